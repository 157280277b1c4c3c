"""The command `diff`."""

import argparse
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from graphgen.commands.options import FLAG, OUT, doing, print_json
from graphgen.errors import GateError, GraphgenError

_OF_GRAPHS = ("canonical", "exit_code", "html")

EXAMPLE = """torchscript.onnx dynamo.onnx --canonical --html diff.html
  graphgen diff model.onnx fused.onnx --exit-code
  graphgen diff monday.json tuesday.json  # reports of compare --json or optimize --report"""


def run(options: argparse.Namespace) -> None:
    """Compare two models by structure, not by names; or two reports."""
    if ".json" in (options.a.suffix, options.b.suffix):
        _reports(options)
    else:
        _graphs(options)


def _graphs(options: argparse.Namespace) -> None:
    """Align two models and list changes."""
    from rich.console import Console
    from rich.text import Text

    from graphgen.laboratory.diff import diff
    from graphgen.laboratory.report import place

    with ExitStack() as stack:
        html = options.html and stack.enter_context(place(options.html, ".html", "diff"))
        stack.enter_context(doing(f"comparing {options.a} and {options.b}"))
        found = diff(options.a, options.b, canonical=options.canonical)
        if html:
            graphs = zip((str(options.a), str(options.b)), found.graphs, strict=True)
            html(found.to_json(), [*graphs], same=found.same)
    if options.json:
        print_json(found.to_json())
    else:
        console = Console()
        with console.capture() as captured:  # rich ends the process on a broken pipe
            for line, style in found.lines():
                console.print(Text(line, style), soft_wrap=True)
        print(captured.get(), end="")
    if found.changes and options.exit_code:
        raise GateError(f"{options.a} and {options.b} have {found.count()}")


def _reports(options: argparse.Namespace) -> None:
    """Compare two saved reports, row by row."""
    from graphgen.files import read_json
    from graphgen.laboratory.reports import diff_reports

    names = (str(options.a), str(options.b))
    if options.a.suffix != options.b.suffix:
        raise GraphgenError(f"diff: {names[0]} and {names[1]}: give two models or two reports")
    if flags := [f"--{x.replace('_', '-')}" for x in _OF_GRAPHS if getattr(options, x)]:
        raise GraphgenError(f"diff: {', '.join(flags)} is for graphs: leave it out for reports")
    found = diff_reports(read_json(options.a), read_json(options.b), names)
    if options.json:
        print_json(found.to_json())
    else:
        print(found)


def add_options(add: Callable[..., Any]) -> None:
    """Add the options of `diff`."""
    add("a", type=Path, metavar="A.onnx", help="a model, or a report A.json")
    add("b", type=Path, metavar="B.onnx", help="another, to compare it with")
    add("--canonical", help="ignore different ways to write the same computation", **FLAG)
    add("--exit-code", help="exit with 3 if anything differs", **FLAG)
    add("--html", help="write a page that shows both, side by side", **OUT)
    add("--json", help="print what docs/diff.schema.json, or diff-reports, describes", **FLAG)
