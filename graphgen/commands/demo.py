"""The command `demo`."""

import argparse
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from graphgen.commands.options import FLAG, count
from graphgen.errors import GraphgenError

EXAMPLE = "-o runs/demo"


def run(options: argparse.Namespace) -> None:
    """Train, export, optimize and run a small language model on English prose."""
    examples = Path(__file__).resolve().parents[2] / "examples"
    if not (examples / "demo.py").exists():
        raise GraphgenError("demo: the examples are not installed; run it in a clone")
    sys.path.insert(0, str(examples))
    given = {} if options.prompt is None else {"prompt": options.prompt}
    own = {"seed": options.seed, "steps": options.steps, "verify": options.verify}
    print(importlib.import_module("demo").run(options.output, **own, **given)[1])


def add_options(add: Callable[..., Any]) -> None:
    """Add the options of `demo`."""
    add("-o", "--output", type=Path, default=Path("runs/demo"), metavar="DIR")
    add("--seed", type=count, default=0)
    add("--steps", type=count, help="of training")
    add("--prompt", help="the text to continue")
    add("--verify", help="check every rewrite", **FLAG)
