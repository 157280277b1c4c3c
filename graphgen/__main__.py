"""`python -m graphgen`."""

import sys

from graphgen.cli import main

sys.exit(main())
