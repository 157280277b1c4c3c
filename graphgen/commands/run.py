"""The command `run`: a model, once, on arrays from files."""

import argparse
import json
from collections.abc import Callable
from typing import Any

import graphgen as gg
from graphgen.commands.options import ARRAYS, FLAG, MODEL, OUT, PROVIDER, STRICT, print_json

EXAMPLE = "fast.onnx --input input_ids=ids.npy -o out.npz"


def run(options: argparse.Namespace) -> None:
    """Run a model once on arrays from files."""
    from graphgen.export.arrays import feeds, statistics, write_npz
    from graphgen.export.write import replacing

    session = gg.Session(options.model, provider=options.provider, strict=options.strict)
    for name, kind in session.outputs.items():
        if kind.dtype is None:
            raise gg.GraphgenError(
                f"run: the output {name} is a sequence or a map, which no .npz file holds; call "
                "gg.Session(...) in Python, which returns lists and dictionaries"
            )
    results: dict[str, Any] = dict(zip(session.outputs, session(feeds(options.input)), strict=True))
    with replacing("output", *filter(None, [options.output])) as files:
        for file in files:
            with file.open("wb") as stream:
                write_npz(stream, results)
    if options.json:
        rows = [{"name": name, **statistics(array)} for name, array in results.items()]
        plan = json.loads(session.plan.json())
        print_json({"graphgen": gg.__version__, "outputs": rows, "plan": plan})
        return
    for name, array in results.items():
        row = statistics(array)
        shape = f"{row.pop('dtype')}{row.pop('shape')}"
        numbers = [f"{key} {value:.6g}" for key, value in row.items() if value is not None]
        print(f"{name}  {shape}  {'  '.join(numbers)}")
    print(session.plan)


def add_options(add: Callable[..., Any]) -> None:
    """Add the options of `run`."""
    add("model", **MODEL)
    add("--input", **ARRAYS | {"help": "arrays for all inputs"})
    add("-o", "--output", help="an .npz file for the outputs", **OUT)
    add("--provider", **PROVIDER)
    add("--strict", **STRICT)
    add("--json", help="print what docs/run.schema.json describes", **FLAG)
