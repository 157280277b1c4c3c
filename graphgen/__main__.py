"""`python -m graphgen`."""

import sys

from graphgen.commands import main

sys.exit(main())
