"""The oldest supported versions in pyproject.toml, printed as pip constraints."""

import sys
import tomllib
from pathlib import Path

project = tomllib.loads(Path(sys.argv[1]).read_text())["project"]
for requirement in (*project["dependencies"], *project["optional-dependencies"]["cpu"]):
    print(requirement.replace(">=", "=="))
