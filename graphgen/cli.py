"""The command line. `graphgen COMMAND --help` shows an example of each command.

Exit codes: 0 done, 1 our own fault, 2 bad input, 3 a gate was not met, 130 interrupted, 143
terminated. Files are written before anything is printed, each beside its place and then renamed.
"""

import argparse
import contextlib
import importlib
import json
import os
import re
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from importlib.metadata import version
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Table

import graphgen as gg
from graphgen import batch, building, generation, training
from graphgen.errors import GateError, GraphgenError, GraphgenWarning
from graphgen.export import parallel
from graphgen.export.arrays import feeds, statistics
from graphgen.export.files import replacing
from graphgen.export.optimizers import named
from graphgen.export.precision import DTYPES
from graphgen.export.recompute import MODES
from graphgen.laboratory import bisect, compare
from graphgen.laboratory import diff as difference
from graphgen.laboratory.explain import EXPLAIN, add_explain, explain_
from graphgen.ops.inputs import at_sizes
from graphgen.options import (
    ANEW,
    FILE,
    FLAG,
    NUMBERS,
    OUT,
    OWN,
    N,
    check_places,
    count,
    keywords,
    numbers,
    print_json,
    show,
    written,
)

Options: TypeAlias = argparse.Namespace


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit code. Errors are told in one line on stderr, never raised."""
    with _terminable() as terminated:
        return _run(sys.argv[1:] if arguments is None else arguments, terminated)


@contextlib.contextmanager
def _terminable() -> Iterator[list[int]]:
    """Let SIGTERM, whose number the list gets, end a command as an interrupt does.

    A handler of the caller's stays; other threads than the main one have none.
    """
    terminated: list[int] = []

    def terminate(number: int, _: object) -> None:
        signal.signal(number, signal.SIG_IGN)  # some send it twice, as `timeout` does
        terminated.append(number)
        raise KeyboardInterrupt

    main_thread = threading.current_thread() is threading.main_thread()
    ours = main_thread and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    if ours:
        signal.signal(signal.SIGTERM, terminate)
    try:
        yield terminated
    finally:
        if ours:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _run(arguments: Sequence[str], terminated: Sequence[int]) -> int:
    try:
        options = _parser().parse_args(arguments)
        check_places(options)
        with _warnings_in_one_line():
            options.run(options)
        if sys.stdout is not None:  # None where a caller has closed it
            sys.stdout.flush()
        return 0
    except SystemExit:  # of --help and --version, and of rich on a broken pipe
        return 0
    except BrokenPipeError:  # who reads has read enough, and files were written before
        _silence()
        return 0
    except KeyboardInterrupt:
        told = "terminated" if terminated else "interrupted"
        return _fail(arguments, told, 128 + next(iter(terminated), signal.SIGINT))
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


@contextlib.contextmanager
def _warnings_in_one_line() -> Iterator[None]:
    """Show our warnings on stderr as errors are shown, each once; those of others as they are."""
    with warnings.catch_warnings():
        warnings.simplefilter("always", GraphgenWarning)
        others, shown = warnings.showwarning, set[str]()

        def show_one(message: Any, category: Any, *place: Any, **further: Any) -> None:
            line = " ".join(str(message).split())
            if not issubclass(category, GraphgenWarning):
                others(message, category, *place, **further)
            elif line not in shown:
                shown.add(line)
                print(f"graphgen: {line}", file=sys.stderr, flush=True)

        warnings.showwarning = show_one
        yield


def _fail(arguments: Sequence[str], message: str, code: int) -> int:
    if "--debug" in arguments:
        traceback.print_exc()
    print(f"graphgen: {' '.join(message.split())}", file=sys.stderr, flush=True)
    parallel.abort(code)
    return code


def _silence() -> None:
    """Let the interpreter flush stdout into nothing when it ends."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def demo(options: Options) -> None:
    """Train, export, optimise and run a small language model on English prose."""
    examples = Path(__file__).resolve().parents[1] / "examples"
    if not (examples / "demo.py").exists():
        raise GraphgenError("demo: the examples are not installed; run it in a clone")
    sys.path.insert(0, str(examples))
    given = {} if options.prompt is None else {"prompt": options.prompt}
    own = {"seed": options.seed, "steps": options.steps, "verify": options.verify}
    print(importlib.import_module("demo").run(options.output, **own, **given)[1])


def inspect(options: Options) -> None:
    """Tell what a model consists of and what it costs; nothing is run."""
    from graphgen.ops.inspection import inspect as inspect_model

    result = inspect_model(gg.load(options.model), numbers("--dim", options.dim))
    if options.json:
        print_json(result.to_json())
        return
    print("\n".join(result.lines()))
    for table in result.tables(options.depth):
        show(table)


def optimize(options: Options) -> None:
    """Fuse a model for a target, and tell what every pass did."""
    from graphgen.passes import words_of

    expect = numbers("--expect", options.expect)
    for word in expect:
        words_of(word)  # before the work is done
    with Console(stderr=True).status(f"optimizing {options.model} for {options.target}"):
        best = gg.optimize(
            at_sizes(gg.load(options.model), numbers("--dim", options.dim)),
            **keywords(gg.optimize, options) | {"expect": None},  # told below
        )
        report, unmet = best.report.to_json(), best.report.unmet(expect)
        with replacing("output", *filter(None, [options.report])) as files:
            for file in files:
                file.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
            if not unmet:
                gg.export(best, options.output)
    if unmet:
        raise GateError(f"{options.output} is not written: {'; '.join(unmet)}")
    if options.json:
        print_json(report)
        return
    show(best.report.table())
    for remark in best.report.remarks():
        print(remark)
    for name, (whole, declared) in best.report.whole().items():
        print(f"{name}: {whole} of {declared}")


def run(options: Options) -> None:
    """Run a model once on arrays from files."""
    session = gg.Session(options.model, provider=options.provider)
    results = dict(zip(session.outputs, session(feeds(options.input)), strict=True))
    with replacing("output", *filter(None, [options.output])) as files:
        for file in files:
            with file.open("wb") as stream:
                np.savez(stream, **results)
    if options.json:
        told = [{"name": name, **statistics(array)} for name, array in results.items()]
        plan = json.loads(session.plan.json())
        print_json({"graphgen": version("graphgen-onnx"), "outputs": told, "plan": plan})
        return
    for name, array in results.items():
        row = statistics(array)
        shape = f"{row.pop('dtype')}{row.pop('shape')}"
        numbers = [f"{key} {value:.6g}" for key, value in row.items() if value is not None]
        print(f"{name}  {shape}  {'  '.join(numbers)}")
    print(session.plan)


def artifacts(options: Options) -> None:
    """Write the four training artifacts of a model."""
    own = {
        "optimizer": named(
            options.optimizer, **{f.name: getattr(options, f.name) for f in fields(gg.AdamW)}
        ),
        "recompute": options.recompute or ("none" if options.memory is None else "auto"),
        "dims": numbers("--dim", options.dim),
    }
    found = gg.artifacts(options.model, options.directory, **keywords(gg.artifacts, options) | own)
    table = Table("weight", "type", "", "why")
    told = [w for w in found if w.why not in ("a constant", "only float32 is trained")]
    for w in told:
        trained = "trained" if w.trained else "frozen"
        table.add_row(escape(w.name), escape(f"{w.dtype}{[*w.shape]}"), trained, escape(w.why))
    show(table)
    if len(told) < len(found):
        print(f"and {len(found) - len(told)} constants")
    written = sorted(file.name for file in options.directory.iterdir())
    print(f"{options.directory}: {', '.join(written)}")


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are ours."""

    def error(self, message: str) -> NoReturn:
        raise GraphgenError(f"{message}; see `{self.prog} --help`")


def _memory(text: str) -> int:
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?(?:([kKMGT])(i?))?B?", text)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no size such as 1GiB, 800MB or 1073741824")
    number, prefix, binary = found.groups()
    power = " KMGT".index((prefix or " ").upper())
    return int(float(number) * (1024 if binary else 1000) ** power)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="graphgen", description=gg.__doc__)
    parser.add_argument("--version", action="version", version=version("graphgen-onnx"))
    parser.add_argument("--debug", action="store_true", help="show tracebacks")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    def command(function: Callable[[Options], None], example: str) -> Callable[..., Any]:
        told, name = str(function.__doc__), function.__name__.rstrip("_")
        sub = commands.add_parser(
            name,
            help=told[0].lower() + told[1:].rstrip("."),
            description=told,
            epilog=f"example:\n  graphgen {name} {example}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        actions: list[argparse.Action] = []
        sub.set_defaults(run=function, actions=actions)
        sub.add_argument("--debug", action="store_true", default=argparse.SUPPRESS)
        return lambda *names, **given: actions.append(sub.add_argument(*names, **given))

    add = command(demo, "-o runs/demo")
    add("-o", "--output", type=Path, default=Path("runs/demo"), metavar="DIR")
    add("--seed", type=count, default=0)
    add("--steps", type=count, help="of training")
    add("--prompt", help="the text to continue")
    add("--verify", help="check every rewrite", **FLAG)

    building.add_build(command(building.build, building.EXAMPLE))

    add = command(inspect, "decoder.onnx --dim batch=1 --dim seq=128")
    add("model", **FILE)
    add("--dim", help="fix a symbolic dimension", **NUMBERS)
    add("--depth", type=count, default=3, help="of the blocks that are listed (3)")
    add("--json", help="print what docs/inspect.schema.json describes", **FLAG)

    add = command(optimize, "decoder.onnx -o fast.onnx --target cpu --report report.json")
    add("model", **FILE)
    add("-o", "--output", required=True, **ANEW)
    add("--target", default="cpu", help="cpu, cuda or official (onnxruntime 1.19)")
    add("--runtime", metavar="1.20", help="its version; by default cpu is what is installed")
    add("--expect", help="fail with 3 where fewer are fused: attention, norm, gelu, ...", **NUMBERS)
    add("--report", help="write what docs/report.schema.json describes", **OUT)
    add("--dim", help="fix a symbolic dimension", **NUMBERS)
    add("--verify", help="check every rewrite by running both sides", **FLAG)
    told = "a minimal model of every site that differs"
    add("--repros", type=written, metavar="DIR", help=told)
    add("--stop-after", help="apply only the first N rewrites", **N)
    add("--strict-masked-rows", help="keep what foreign masks give for empty rows", **FLAG)
    add("--with", **OWN)
    add("--json", help="print the report", **FLAG)

    add = command(run, "fast.onnx --input input_ids=ids.npy -o out.npz")
    add("model", **FILE)
    add("--input", nargs="+", action="extend", default=[], metavar="NAME=X.npy | X.npz")
    add("-o", "--output", help="an .npz file for the outputs", **OUT)
    add("--provider", help="cpu or cuda; by default cuda where it works")
    add("--json", help="print what docs/run.schema.json describes", **FLAG)

    example = "out --prompt 'Once upon a time' --max-new-tokens 64"
    generation.add_generate(command(generation.generate, example))

    add = command(artifacts, "decoder.onnx -o art --loss cross_entropy --clip-norm 1")
    add("model", **FILE)
    add("-o", dest="directory", required=True, type=written, metavar="DIR")
    add("--loss", default="cross_entropy", help="cross_entropy, mse, or a scalar output")
    add("--optimizer", default="adamw", choices=("adamw", "adam", "sgd"))
    add("--weight-decay", type=float, help="AdamW's (0.01)")
    add("--no-decay", metavar="REGEX", help="parameters without decay (--profile stock)")
    add("--betas", type=float, nargs=2, metavar="BETA", help="Adam's and AdamW's (0.9 0.999)")
    add("--epsilon", type=float, help="Adam's and AdamW's (1e-8)")
    add("--clip-norm", type=float, help="the largest norm of all gradients together")
    add("--output", metavar="NAME", help="the output to train")
    add("--trainable", metavar="REGEX", help="which parameters to train, by name")
    add("--label-smoothing", type=float, default=0.0, help="of cross_entropy (0)")
    add("--z-loss", type=float, default=0.0, help="of cross_entropy, such as 1e-4 (0)")
    add("--accumulate", default=1, help="batches for one update (1)", **N)
    add(
        "--profile",
        default="official",
        choices=("official", "stock"),
        help="operators that onnxruntime-training 1.19.2 has, or all of the installed runtime",
    )
    told = "in the backward pass, for less memory and more time (auto with --memory, else none)"
    add("--recompute", choices=MODES, help=told)
    add("--memory", type=_memory, metavar="1GiB", help="that training may take at --dim sizes")
    add("--dim", help="a size of a symbolic dimension, to count memory at", **NUMBERS)
    add(
        "--dtype",
        default="fp32",
        choices=tuple(DTYPES),
        help="of products; half precision is for CUDA and --profile stock",
    )

    training.add_train(
        command(training.train, "art --data a.npz --steps 1000 --warmup 100 --checkpoint runs/a")
    )

    batch.add_map(command(batch.map_, "out --data in.jsonl --out out.parquet --workers 4"))

    bisect.add_bisect(command(bisect.bisect_, "decoder.onnx --tolerance 1e-5 --dim batch=1"))

    add = command(training.export, "decoder.onnx --checkpoint runs/a/best -o trained.onnx")
    add("model", help="the inference model that the artifacts were made from", **FILE)
    add("--checkpoint", required=True, type=Path, help="a checkpoint, or its folder")
    add("-o", "--output", required=True, **ANEW)

    add_explain(command(explain_, EXPLAIN))
    difference.add_diff(command(difference.diff_, difference.EXAMPLE))
    compare.add_compare(command(compare.compare, compare.EXAMPLE))
    return parser
