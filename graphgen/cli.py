"""The command line. `graphgen COMMAND --help` shows an example of each command.

Exit codes: 0 done, 1 our own fault, 2 bad input, 3 a gate was not met, 130 interrupted. Files are
written before anything is printed, each beside its place and then renamed.
"""

import argparse
import contextlib
import json
import math
import os
import sys
import traceback
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

import numpy as np
from rich.console import Console
from rich.table import Table

import graphgen as gg
from graphgen.errors import GateError, GraphgenError
from graphgen.export.files import replacing
from graphgen.models import ARCHITECTURES, create, find
from graphgen.op import Array
from graphgen.passes import Report

Options: TypeAlias = argparse.Namespace

_WIDTH = 200  # of tables that go into a file or a pipe


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit code. Errors are told in one line on stderr, never raised."""
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        options = _parser().parse_args(arguments)
        options.run(options)
        if sys.stdout is not None:  # None where a caller has closed it
            sys.stdout.flush()
        return 0
    except SystemExit as end:  # --help and --version
        return int(end.code or 0)
    except BrokenPipeError:  # who reads has read enough, and files were written before
        _silence()
        return 0
    except KeyboardInterrupt:
        return _fail(arguments, "interrupted", 130)
    except GateError as error:
        return _fail(arguments, str(error), 3)
    except GraphgenError as error:
        return _fail(arguments, str(error), 2)
    except OSError as error:
        _silence()
        return _fail(arguments, f"{error.filename or 'stdout'}: {error.strerror}", 2)
    except MemoryError as error:
        return _fail(arguments, f"not enough memory: {error}; choose smaller sizes", 2)
    except Exception as error:
        told = f"{type(error).__name__}: {error}; this is a fault in graphgen: please report it "
        return _fail(arguments, told + "with what the same command prints with --debug", 1)


def _fail(arguments: Sequence[str], message: str, code: int) -> int:
    if "--debug" in arguments:
        traceback.print_exc()
    print(f"graphgen: {' '.join(message.split())}", file=sys.stderr)
    return code


def _silence() -> None:
    """Let the interpreter flush stdout into nothing when it ends."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def demo(options: Options) -> None:
    """Train, export, optimise and run a small language model on English prose."""
    from graphgen.demo import run

    given = {} if options.prompt is None else {"prompt": options.prompt}
    run(options.output, seed=options.seed, steps=options.steps, verify=options.verify, **given)


def build(options: Options) -> None:
    """Write a model of a known architecture, with fresh weights, as ONNX."""
    if options.list:
        for name, found in ARCHITECTURES.items():
            sizes = (f"--{_dashed(n)} {'...' if d is None else d}" for n, d in found.sizes().items())
            print(f"{name:<18}{found.description}\n{'':<18}{' '.join(sizes)}")
        return
    if options.name is None or options.output is None:
        raise GraphgenError("build needs NAME and -o OUT; `graphgen build --list` lists the names")
    if options.name not in ARCHITECTURES and Path(options.name).is_dir():
        raise GraphgenError(
            f"{options.name} is a folder, and checkpoint folders are not read yet; build by a "
            f"name, one of {', '.join(ARCHITECTURES)}"
        )
    prefix = "size_"
    sizes = {
        key.removeprefix(prefix): value
        for key, value in vars(options).items()
        if key.startswith(prefix) and value is not None
    }
    model = gg.build(
        create(options.name, **sizes),
        seed=options.seed,
        primitives=options.primitives,
        training=options.training,
        **find(options.name).inputs(),
    )
    gg.export(model, options.output)
    count = sum(math.prod(v.shape.numpy()) for v in _parameters(model) if v.shape is not None)
    print(f"{options.output}: {count:,} parameters, {model.graph.num_nodes()} nodes")


def inspect(options: Options) -> None:
    """Tell what a model consists of and what it costs; nothing is run."""
    from graphgen.inspection import inspect as inspect_model

    result = inspect_model(gg.load(options.model), dict(options.dim))
    if options.json:
        _print_json(result.to_json())
        return
    _print_types("input", result.inputs)
    _print_types("output", result.outputs)
    flops = f"unknown; give {' '.join(f'--dim {name}=...' for name in result.missing_dims)}"
    if result.flops is not None:
        flops = f"{result.flops:,}, of which {result.product_flops:,} in matrix products"
    print(f"parameters     {result.parameters:,}\nFLOPs          {flops}")
    print(f"weights        {result.weight_bytes:,} bytes")
    if result.result_bytes is not None:
        print(f"results        {result.result_bytes:,} bytes")
    print(f"depth          {result.depth} of {result.nodes} nodes")
    for reason in result.uncounted:
        print(f"not counted    {reason}")
    operators = sorted(result.operators.items(), key=lambda item: -item[1])
    _show(_table("operator", "nodes", rows=operators))
    shown = [b for b in result.blocks if b.path.count(".") < options.depth]
    _show(
        _table(
            "block",
            "nodes",
            "parameters",
            "FLOPs",
            rows=[
                (b.path, b.nodes, b.parameters, "" if b.flops is None else b.flops) for b in shown
            ],
        )
    )
    if path := result.critical_path:
        steps = [(s.where, s.operator, s.flops) for s in path.nodes if s.flops]
        title = f"critical path: {path.flops:,} FLOPs"
        _show(_table("where", "operator", "FLOPs", rows=steps, title=title))


def optimize(options: Options) -> None:
    """Fuse a model for a target, and tell what every pass did."""
    from graphgen.inspection import at_sizes

    with Console(stderr=True).status(f"optimizing {options.model} for {options.target}"):
        best = gg.optimize(
            at_sizes(gg.load(options.model), dict(options.dim)),
            target=options.target,
            verify=options.verify,
            stop_after=options.stop_after,
            strict_masked_rows=options.strict_masked_rows,
        )
        report = best.report.to_json()
        with _beside(options.report) as file:
            if file is not None:
                file.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
            gg.export(best, options.output)
    if options.json:
        _print_json(report)
        return
    _show(best.report.table())
    for done in best.report.passes:
        for site in done.sites:
            if site.status != "fired":
                print(f"{site.status} {done.name} at {site.where}: {site.reason}")
    for line in _wholes(best.report):
        print(line)


def _wholes(report: Report) -> list[str]:
    """`Attention: 12 of 12` for each operator that the source declared."""
    after = report.ops_after
    whole = [f"{n}: {count} of {count}" for n, count in report.declared.items()
             if after.get(n, 0) >= count]  # fmt: skip
    return whole + report.shortfalls()


def run(options: Options) -> None:
    """Run a model once on arrays from files."""
    session = gg.Session(options.model, provider=options.provider)
    results = dict(zip(session.outputs, session(_feeds(options.input)), strict=True))
    with _beside(options.output) as file:
        if file is not None:
            with file.open("wb") as stream:
                np.savez(stream, **results)
    if options.json:
        told = [{"name": name, **_statistics(array)} for name, array in results.items()]
        plan = json.loads(session.plan.json())
        _print_json({"graphgen": version("graphgen-onnx"), "outputs": told, "plan": plan})
        return
    for name, array in results.items():
        row = _statistics(array)
        shape = f"{row.pop('dtype')}{row.pop('shape')}"
        told = [f"{key} {value:.6g}" for key, value in row.items() if value is not None]
        print(f"{name}  {shape}  {'  '.join(told)}")
    print(session.plan)


def artifacts(options: Options) -> None:
    """Write the four training artifacts of a model."""
    if options.optimizer == "sgd" and options.weight_decay is not None:
        raise GraphgenError("--weight-decay is AdamW's; leave it out with --optimizer sgd")
    decay = {} if options.weight_decay is None else {"weight_decay": options.weight_decay}
    gg.artifacts(
        options.model,
        options.directory,
        loss=options.loss,
        optimizer=(
            gg.SGD(clip_norm=options.clip_norm)
            if options.optimizer == "sgd"
            else gg.AdamW(clip_norm=options.clip_norm, **decay)
        ),
        output=options.output,
        trainable=options.trainable,
        label_smoothing=options.label_smoothing,
    )
    print(f"{options.directory}: {', '.join(sorted(os.listdir(options.directory)))}")


def train(options: Options) -> None:
    """Train from a folder of artifacts, with AdamW or SGD as they say."""
    if (options.model is None) != (options.output is None):
        raise GraphgenError("--model and -o belong together: the model that is written when trained")
    data = _npz(options.data)
    batches, in_epoch = _batches(data, options.batch, options.seed)
    steps = options.steps or in_epoch
    schedule = gg.schedule.cosine(options.lr, warmup=options.warmup, steps=steps)
    trainer = gg.Trainer(options.directory, schedule=schedule, seed=options.seed)
    history = trainer.fit(
        batches,
        steps=steps,
        checkpoint=options.checkpoint,
        resume=options.resume,
        progress=sys.stdout is not None and sys.stdout.isatty() and not options.json,
    )
    if options.output is not None:
        trainer.export(options.model, options.output)
    if options.json:
        _print_json({"graphgen": version("graphgen-onnx"), "steps": history})
    else:
        print(f"step {trainer.step}" + (f": loss {history[-1]['loss']:.4f}" if history else ""))


def _batches(
    data: Mapping[str, Array], size: int, seed: int
) -> tuple[Iterator[dict[str, Array]], int]:
    """Shuffled batches without an end, a function of the seed, and how many make an epoch."""
    counts = {name: len(array) if array.ndim else 0 for name, array in data.items()}
    count = min(counts.values(), default=0)
    if count == 0 or len({*counts.values()}) > 1 or size < 1:
        raise GraphgenError(
            f"--data has arrays of {', '.join(f'{n} {c}' for n, c in counts.items()) or 'nothing'} "
            f"samples and --batch is {size}; all arrays need the same number, of at least 1"
        )

    def stream() -> Iterator[dict[str, Array]]:
        rng = np.random.default_rng(seed)
        while True:
            order = rng.permutation(count)
            for at in range(0, count, size):
                yield {name: array[order[at : at + size]] for name, array in data.items()}

    return stream(), math.ceil(count / size)


def _feeds(given: Sequence[str]) -> dict[str, Array]:
    """Arrays by input name, from `NAME=x.npy` and `x.npz`."""
    feeds: dict[str, Array] = {}
    for item in given:
        name, equals, path = item.partition("=")
        if equals and path.endswith(".npy"):
            feeds[name] = _read(path)
        elif item.endswith(".npz"):
            feeds |= _npz(item)
        else:
            raise GraphgenError(f"--input {item}: give NAME=FILE.npy, or FILE.npz with all names")
    return feeds


def _npz(path: str) -> dict[str, Array]:
    found = _read(path)
    if not isinstance(found, np.lib.npyio.NpzFile):
        raise GraphgenError(f"{path} holds one array without a name; give an .npz file")
    try:
        with found:
            return dict(found)
    except (ValueError, EOFError, zipfile.BadZipFile) as error:
        raise GraphgenError(f"{path} is damaged: {error}; write it again") from error


def _read(path: str) -> Any:
    try:
        return np.load(path, allow_pickle=False)
    except OSError as error:
        raise GraphgenError(f"{path} cannot be read: {error.strerror or error}") from error
    except (ValueError, EOFError, zipfile.BadZipFile) as error:
        raise GraphgenError(
            f"{path} is no file of numpy arrays: {error}; write it with np.save or np.savez"
        ) from error


def _statistics(array: Array) -> dict[str, Any]:
    """dtype, shape, and of the finite elements the least, the greatest and the mean."""
    row: dict[str, Any] = {"dtype": str(array.dtype), "shape": list(array.shape)}
    numbers = array.astype(np.float64) if array.dtype.kind not in "OUS" else np.zeros(0)
    finite = numbers[np.isfinite(numbers)]
    for name, function in (("min", np.min), ("max", np.max), ("mean", np.mean)):
        row[name] = float(function(finite)) if finite.size else None
    return {**row, "not_finite": int(numbers.size - finite.size)}


@contextlib.contextmanager
def _beside(path: Path | None) -> Iterator[Path | None]:
    """A file to write beside `path`, renamed to it at the end; None where there is no path."""
    if path is None:
        yield None
        return
    with replacing("graphgen", path) as [file]:
        yield file


def _parameters(model: Any) -> Any:
    from graphgen.graph import parameters

    return parameters(model.graph).values()


def _print_json(value: Any) -> None:
    print(json.dumps(value, indent=2, allow_nan=False))


def _print_types(role: str, types: Mapping[str, str]) -> None:
    for name, text in types.items():
        print(f"{role:<15}{name}: {text}")


def _table(*columns: str, rows: Sequence[Sequence[Any]], title: str | None = None) -> Table:
    table = Table(title=title, title_justify="left")
    for column, cell in zip(columns, rows[0] if rows else columns, strict=True):
        table.add_column(column, justify="right" if isinstance(cell, int) else "left")
    for row in rows:
        table.add_row(*(f"{x:,}" if isinstance(x, int) else x for x in row))
    return table


def _show(table: Table) -> None:
    """Print a table if it has rows; written here, since rich ends the process on a broken pipe."""
    console = Console(width=None if sys.stdout and sys.stdout.isatty() else _WIDTH)
    with console.capture() as captured:
        console.print(table)
    if table.row_count:
        print(captured.get(), end="")
