"""The command `demo`."""

import argparse
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

from graphgen.commands.options import FLAG, N

EXAMPLE = "-o runs/demo"

_OUT = "where to write the models (runs/demo)"


def run(options: argparse.Namespace) -> None:
    """Train, export, optimize and run a small language model."""
    _, package, clone, *_ = Path(__file__).resolve().parents
    example = Path("examples/demo.py")  # a wheel has it in the package
    here = package if (package / example).exists() else clone
    given = {} if options.prompt is None else {"prompt": options.prompt}
    own = {"seed": options.seed, "steps": options.steps, "verify": options.verify}
    print(runpy.run_path(str(here / example))["run"](options.output, **own, **given)[1])


def add_options(add: Callable[..., Any]) -> None:
    """Add the options of `demo`."""
    add("-o", "--output", type=Path, default=Path("runs/demo"), metavar="DIR", help=_OUT)
    add("--seed", help="of the weights and the batches", default=0, **N)
    add("--steps", help="of training", **N)
    add("--prompt", help="the text to continue")
    add("--verify", help="check every rewrite", **FLAG)
