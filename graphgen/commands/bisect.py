"""The command `bisect`."""

import math
from argparse import SUPPRESS, Namespace
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import graphgen as gg
from graphgen.commands.options import (
    ARRAYS,
    FILE,
    FLAG,
    NUMBERS,
    OWN,
    RUNTIME,
    TARGET,
    doing,
    keywords,
    numbers,
    print_json,
    provider,
    share,
    written,
)
from graphgen.errors import GateError, GraphgenError

if TYPE_CHECKING:
    import onnx_ir as ir

    from graphgen.laboratory.bisect import Bisection
    from graphgen.operands import Array
    from graphgen.quantize import Quantizing

_OF_REWRITES = ("slower_than", "quantize", "passes", "with_passes", "target", "runtime", "seconds")
"""What only rewrites have."""
_SECONDS = 0.5

EXAMPLE = "decoder.onnx --tolerance 1e-5 --dim batch=1 --dim seq=8"


def run(options: Namespace) -> None:
    """Find the rewrite, or the node, that breaks numbers or speed."""
    if options.quantize is not None and ("passes" in options or options.with_passes):
        raise GraphgenError("bisect: --quantize has no other passes; leave out --passes and --with")
    if options.quantize is not None and options.runtime is not None:
        raise GraphgenError("bisect: --quantize runs the installed runtime; leave out --runtime")
    if options.against is not None or options.against_python is not None:
        _across(options)
        return
    if options.seconds != _SECONDS and options.slower_than is None:
        raise GraphgenError("bisect: --seconds needs --slower-than; add that option")
    with doing(f"optimizing {options.model}") as progress:
        found = (_quantized if options.quantize else _optimized)(options, progress)
    if options.json:
        print_json(found.to_json())
    else:
        print(found)
    if not found.complete:
        raise KeyboardInterrupt
    if found.guilty:
        raise GateError("; ".join(map(str, found.guilty)))


def _across(options: Namespace) -> None:
    """The nodes that the other side computes otherwise."""
    from graphgen.export.arrays import feeds
    from graphgen.laboratory.across import across

    defaults = {action.dest: action.default for action in options.actions}
    given = [name for name in _OF_REWRITES if vars(options).get(name) not in (None, defaults[name])]
    if given:
        names = ", ".join(f"--{name.removesuffix('_passes').replace('_', '-')}" for name in given)
        raise GraphgenError(f"bisect: --against compares nodes, not rewrites; leave out {names}")
    if None not in (options.against, options.against_python):
        raise GraphgenError("bisect: --against and --against-python are two searches; give one")
    arrays, tolerance, against = feeds(options.input), options.tolerance, options.against
    if against in ("int8", "int4"):
        from graphgen.quantize import THRESHOLDS

        _, arrays, job = _quantizing(options, against, "cpu")
        tolerance = THRESHOLDS[against] if tolerance is None else tolerance
        against = replace(job.as_pass(), name=against)
    with doing(f"running {options.model}") as progress:
        found = across(
            options.model,
            against,
            python=options.against_python,
            tolerance=tolerance,
            dims=numbers("--dim", options.dim),
            feeds=arrays,
            output=options.output,
            progress=progress,
        )
    if options.json:
        print_json(found.to_json())
    else:
        print(found)
    if found.differing:
        more = len(found.differing) - 1
        raise GateError(f"{found.differing[0]}" + (f", and {more} more" if more else ""))


def _other(text: str) -> str | Path:
    """What `--against` takes: a name, or the path of a file."""
    return Path(text) if text.endswith(".onnx") else provider(text)


def _optimized(options: Namespace, progress: Callable[[str], object]) -> "Bisection":
    from graphgen.export.arrays import feeds
    from graphgen.laboratory.bisect import bisect

    given: dict[str, Any] = keywords(bisect, options) | {"feeds": feeds(options.input)}
    given["dims"] = numbers("--dim", options.dim)
    model = options.model if options.model.is_dir() else gg.load(options.model)
    return bisect(model, progress=progress, **given)


def _quantized(options: Namespace, progress: Callable[[str], object]) -> "Bisection":
    """The layer of an optimized float model that loses too much; none stays in float here."""
    from graphgen.laboratory.bisect import search

    model, feeds, job = _quantizing(options, options.quantize, options.target)
    given = keywords(search, options)
    return search(model, [job.as_pass()], feeds, progress=progress, **given)


def _quantizing(
    options: Namespace, scheme: Any, target: Any
) -> "tuple[ir.Model, dict[str, Array], Quantizing]":
    """A float model at its sizes, its inputs, and what makes integers of all of its layers."""
    from graphgen.export.arrays import feeds as read_feeds
    from graphgen.export.session import model_of
    from graphgen.measure.feeds import at_sizes, given_sizes, invent
    from graphgen.quantize import Quantizing

    model, arrays = model_of(gg.load(options.model), "bisect"), read_feeds(options.input)
    model = at_sizes(model, given_sizes(model, numbers("--dim", options.dim), arrays))
    feeds = invent(model, arrays)
    job = Quantizing(scheme, target, calibration=[feeds], random=not arrays, threshold=math.inf)
    return model, feeds, job


def add_options(add: Callable[..., Any]) -> None:
    """Add the options of `bisect`."""
    add("model", **FILE, help="a model, or a folder of training artifacts, which a trainer lowers")
    add(
        "--tolerance",
        type=float,
        metavar="X",
        help="the largest relative RMS error, such as 1e-5; exit with 3 beyond it",
    )
    add(
        "--slower-than",
        type=share,
        metavar="3%",
        help="how much longer a site may take; exit with 3 beyond it",
    )
    against = "find the nodes that differ on a provider, in float16, bfloat16, int8 or int4, or in "
    add("--against", type=_other, metavar="WHAT", help=f"{against}another .onnx file")
    python = "find the nodes that differ with the onnxruntime of another Python"
    add("--against-python", type=Path, metavar="PYTHON", help=python)
    add("--target", **TARGET)
    add("--runtime", **RUNTIME)
    add("--passes", nargs="+", default=SUPPRESS, metavar="PASS", help="by default, all")
    add("--with", **OWN)
    layer = "find the layer that loses too much, or is slower, in few bits, instead of a pass"
    add("--quantize", choices=("int8", "int4", "weights8"), help=layer)
    add("--dim", help="fix a symbolic dimension", **NUMBERS)
    add("--input", **ARRAYS)
    add("--seconds", type=float, default=_SECONDS, help="for one measurement (0.5)")
    place = "where to write models, inputs and a script if a rewrite is found (bisect)"
    add("-o", "--output", type=written, default=Path("bisect"), metavar="DIR", help=place)
    schema = "print what docs/bisect.schema.json, or bisect-against.schema.json, describes"
    add("--json", help=schema, **FLAG)
