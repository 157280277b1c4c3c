"""How fast is graphgen's output on the CPU, next to what other optimizers make of the same file?

torch exports each model (bench/exports.py). The contenders are graphgen's file and the export
itself, at ONNX Runtime's full level, and what graphgen.laboratory.others finds installed:
onnxruntime.transformers.optimizer, at the fastest of its levels 0 to 2 that is right; onnxscript's
optimizer and optimize_for_ort; onnxslim; onnxsim. All run in sessions without options. One session
of each stays open, all run in turn with the order reversed every round, and one large matrix
product (ONNX Runtime's own, at the same number of threads) runs with them: `peak` is the share of
its best speed that the model's products reach.

`ratio` is the median time of the contender over that of graphgen, with the 95 % interval of a
bootstrap over the rounds; `error` the relative RMS difference from the export with every
optimization off. A file that does not load or differs by more than 1e-3 is shown, but not counted.
Up to 3 % is a tie. Exit 3: graphgen's file is wrong, or slower than the best other beyond a tie.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
from exports import EXPORTERS, MODELS, cache_folder, exported
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

import graphgen as gg
from graphgen.laboratory.inspection import inspect
from graphgen.laboratory.others import optimized_by_others
from graphgen.measure.feeds import symbols
from graphgen.processor import processor

TIE, WRONG = 0.03, 1e-3
LIMIT = 900  # seconds that another optimizer may take
OURS = "graphgen"
FIXTURES = Path(__file__).resolve().parents[1] / "tests" / "fixtures"
PEAK = (1024, 1024, 1024)  # the sizes M, K, N of the matrix product that measures the peak
LEVEL = ort.GraphOptimizationLevel

Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class Case:
    """A model: the exporter that serves the others best, what one must be told, and sizes."""

    exporter: str
    kind: str  # for onnxruntime.transformers
    shapes: tuple[tuple[int, int], ...] = ((1, 128), (8, 128), (1, 512))


CASES = {
    "bert": Case("torchscript", "bert"),
    "minilm": Case("torchscript", "bert", ((1, 16), (1, 128), (32, 128))),
    "gpt2": Case("torchscript", "gpt2"),
    "llama": Case("dynamo", "qwen3", ((1, 128), (8, 128), (1, 512), (1, 2048))),
    "t5": Case("torchscript", "t5"),
}
QUICK = {  # committed fixtures: nothing to export
    "bert": "bert_torchscript_eager_14.onnx",
    "gpt2": "gpt2_torchscript_sdpa_14.onnx",
    "llama": "llama_dynamo_sdpa_18.onnx",
    "t5": "t5_torchscript_eager_14.onnx",
}


@dataclass
class Contender:
    """A file and its session; `problem` says why it does not count."""

    name: str
    path: Path
    problem: str = ""
    session: Any = None


@dataclass
class Row:
    """One contender at one shape; times in milliseconds."""

    model: str
    exporter: str
    batch: int
    length: int
    contender: str
    problem: str = ""
    median_ms: float | None = None
    ratio: float | None = None
    interval: tuple[float, float] | None = None
    peak_share: float | None = None
    error: float | None = None

    def verdict(self) -> str:
        """What the ratio means for graphgen."""
        if self.problem or self.ratio is None:
            return self.problem
        if abs(self.ratio - 1) <= TIE:
            return "" if self.contender == OURS else "tie"
        return "slower" if self.ratio > 1 else "FASTER"


def by_graphgen(source: Path, target: Path) -> None:
    gg.export(gg.optimize(gg.load(source), target="cpu"), target)


def shape(text: str) -> tuple[int, int]:
    batch, length = text.split("x")
    return int(batch), int(length)


def first_line(error: Exception) -> str:
    return (str(error).strip() or "no reason given").splitlines()[0][:160]


def open_session(contender: Contender, threads: int, level: Any = LEVEL.ORT_ENABLE_ALL) -> None:
    """Open the session, or say in `problem` why it does not load."""
    if contender.problem:
        return
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = threads, 4
    options.graph_optimization_level = level
    if threads > 1:  # or the threads of idle sessions would take the cores
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    try:
        contender.session = ort.InferenceSession(
            contender.path, options, providers=["CPUExecutionProvider"]
        )
    except Exception as error:
        contender.problem = f"invalid: {first_line(error)}"


def feeds(model: ir.Model, batch: int, length: int, tokens: int) -> Arrays:
    """Random tokens; in a batch, every second row is padded at the right."""
    rng, given = np.random.default_rng(1), {}
    for value in model.graph.inputs:
        name = str(value.name)
        array = rng.integers(1, tokens, (batch, length))
        if "mask" in name:
            array = np.ones_like(array)
            array[1::2, length - length // 4 :] = 0
        given[name] = array % 2 if "type" in name else array
    return given


def relative_rms(given: np.ndarray, wanted: np.ndarray) -> float:
    """‖given - wanted‖ / ‖wanted‖; infinite if shapes differ or anything is not finite."""
    if given.shape != wanted.shape:
        return float("inf")
    if not given.size:
        return 0.0
    error = float(np.linalg.norm(given - wanted) / np.linalg.norm(wanted))
    return error if np.isfinite(error) else float("inf")


def check(contender: Contender, given: Arrays, wanted: np.ndarray) -> float | None:
    """The error at one input; marks a contender that fails or is wrong."""
    if contender.session is None:
        return None
    try:
        (result,) = contender.session.run(None, given)
    except Exception as error:
        contender.problem = f"invalid: {first_line(error)}"
        return None
    error = relative_rms(result, wanted)
    if error > WRONG:
        contender.problem = f"wrong: {error:.1e}"
    return error


def in_turn(
    calls: Sequence[Callable[[], Any]],
    seconds: float,
    least: int,
    *,
    cpu_time: bool,
    enough: Callable[[np.ndarray], bool] = lambda _: False,
) -> np.ndarray:
    """Nanoseconds (rounds, calls), after one round that warms up; each round in reverse order.

    It ends after `seconds` and `least` rounds, or before if so many are `enough`.
    """
    clock = time.process_time_ns if cpu_time else time.perf_counter_ns
    times: list[list[int]] = []
    start, order = time.perf_counter(), list(range(len(calls)))
    while len(times) <= least or time.perf_counter() - start < seconds:
        taken = [0] * len(calls)
        for i in order:
            before = clock()
            calls[i]()
            taken[i] = clock() - before
        times.append(taken)
        order.reverse()
        if len(times) > least and enough(np.array(times[1:])):
            break
    return np.array(times[1:])


def ratio_of(times: np.ndarray, i: int, base: int) -> tuple[float, tuple[float, float]]:
    """The median of call i over that of `base`, with the 95 % interval of a bootstrap."""
    pair = times[:, [i, base]]
    picks = np.random.default_rng(0).integers(0, len(pair), (1000, len(pair)))
    own, other = np.median(pair[picks], axis=1).T  # (1000,) each
    low, high = np.quantile(own / other, (0.025, 0.975))
    return float(np.divide(*np.median(pair, axis=0))), (low, high)


def peak_product(folder: Path) -> Contender:
    """X W with W constant, which the runtime packs as it does a model's weights."""
    m, k, n = PEAK
    weight = np.random.default_rng(0).standard_normal((k, n), np.float32)
    x, y = (
        onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shape)
        for name, shape in (("x", (m, k)), ("y", (m, n)))
    )
    node = onnx.helper.make_node("MatMul", ["x", "w"], ["y"])
    graph = onnx.helper.make_graph(
        [node], "peak", [x], [y], [onnx.numpy_helper.from_array(weight, "w")]
    )
    model = onnx.helper.make_model(
        graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=8
    )
    onnx.save(model, folder / "peak.onnx")
    return Contender("peak", folder / "peak.onnx")


class Bench:
    """The options, and what is the same for all models."""

    def __init__(self, args: argparse.Namespace, folder: Path, progress: Progress) -> None:
        self.args, self.folder, self.progress = args, folder, progress
        self.rounds = partial(in_turn, cpu_time=args.cpu_time)
        self.peak = peak_product(folder)
        open_session(self.peak, args.threads)

    def contenders(self, name: str, source: Path, given: Arrays, wanted: Any) -> list[Contender]:
        """Everyone's file of one export, open sessions; (given, wanted) choose among variants."""
        path, problem = self.folder / f"{OURS}.onnx", ""
        try:
            by_graphgen(source, path)
        except gg.GraphgenError as error:
            problem = f"invalid: {first_line(error)}"
        found = [Contender(OURS, path, problem), Contender("the export", source)]
        others = optimized_by_others(
            source, self.folder, "cpu", kind=CASES[name].kind, seconds=LIMIT
        )
        for peer, made in others:
            told = "" if isinstance(made, Path) else f"invalid: {made}"
            found.append(Contender(peer, source if told else Path(made), told))
        variants = [each for each in found if each.name.startswith("onnxruntime.transformers")]
        found = [each for each in found if each not in variants]
        for contender in [*found, *variants]:
            open_session(contender, self.args.threads)
            check(contender, given, wanted)
        right = [v for v in variants if not v.problem]
        if len(right) > 1:
            calls = [partial(v.session.run, None, given) for v in right]
            medians = np.median(self.rounds(calls, self.args.seconds, 5), axis=0)
            right = [right[int(np.argmin(medians))]]
        return found + (right or variants[-1:])

    def measure(self, name: str, exporter: str, source: Path) -> Iterator[Row]:
        """One row for each contender at each shape."""
        model, args = gg.load(source), self.args
        tokens = 60 if args.quick else 1000
        shapes = args.shape or (((1, 7), (3, 5)) if args.quick else CASES[name].shapes)
        task = self.progress.add_task(f"{name} ({exporter}): contenders", total=len(shapes) + 1)
        plain = Contender("plain", source)
        open_session(plain, args.threads, LEVEL.ORT_DISABLE_ALL)
        given = {shape: feeds(model, *shape, tokens) for shape in shapes}
        wanted = {shape: plain.session.run(None, given[shape])[0] for shape in shapes}
        del plain
        found = self.contenders(name, source, given[shapes[0]], wanted[shapes[0]])
        for shape in shapes:
            self.progress.update(task, advance=1, description=f"{name} ({exporter}) at {shape}")
            errors = {c.name: check(c, given[shape], wanted[shape]) for c in found}
            known = dict.fromkeys(symbols(model), shape[1]) | {symbols(model)[0]: shape[0]}
            yield from self.rows(
                (name, exporter, *shape),
                found,
                given[shape],
                errors,
                inspect(model, known).product_flops,
            )
        self.progress.update(task, advance=1)

    def rows(
        self,
        where: tuple[str, str, int, int],
        found: Sequence[Contender],
        given: Arrays,
        errors: dict[str, float | None],
        product_flops: int | None,
    ) -> Iterator[Row]:
        running = [c for c in found if not c.problem]
        x = np.ones(PEAK[:2], np.float32)
        calls = [partial(c.session.run, None, given) for c in running]
        seconds = self.args.seconds * len(running)
        times = self.rounds([*calls, partial(self.peak.session.run, None, {"x": x})], seconds, 7)
        medians = np.median(times, axis=0)
        flops_a_ns = 2 * np.prod(PEAK) / times[:, -1].min()  # a peak is the best there was
        names = [c.name for c in running]
        for contender in found:
            row = Row(*where, contender.name, contender.problem, error=errors[contender.name])
            if not contender.problem:
                i = names.index(contender.name)
                row.median_ms = medians[i] / 1e6
                if OURS in names:
                    ours = names.index(OURS)
                    row.ratio, row.interval = ratio_of(times, i, ours)
                if product_flops:
                    row.peak_share = product_flops / flops_a_ns / medians[i]
            yield row


def failures(rows: Sequence[Row], *, speed: bool) -> list[str]:
    """A sentence for each place where graphgen is wrong or, if `speed` counts, slower."""
    told = []
    for at in dict.fromkeys((r.model, r.exporter, r.batch, r.length) for r in rows):
        here = [r for r in rows if (r.model, r.exporter, r.batch, r.length) == at]
        where = f"{at[0]} ({at[1]}) at {at[2]} x {at[3]}"
        told += [
            f"{where}: {r.contender}: {r.problem}"
            for r in here
            if OURS in r.contender and r.problem
        ]
        others = [r for r in here if OURS not in r.contender and r.ratio is not None]
        best = min(others, key=lambda r: r.ratio or 0.0, default=None)
        if speed and best is not None and best.ratio and best.ratio < 1 / (1 + TIE):
            told.append(f"{where}: graphgen takes {1 / best.ratio:.3f} of {best.contender}")
    return told


def table(rows: Sequence[Row], title: str) -> Table:
    result = Table(title=title)
    for heading in ("model", "B x T", "contender"):
        result.add_column(heading, no_wrap=True)
    for heading in ("ms", "ratio", "95 %", "peak", "error"):
        result.add_column(heading, justify="right", no_wrap=True)
    result.add_column("")
    before: Any = None
    for row in rows:
        at = (row.model, row.exporter, row.batch, row.length)
        first = at != before
        if first and before is not None:
            result.add_section()
        before = at
        result.add_row(
            f"{row.model} ({row.exporter})" if first else "",
            f"{row.batch} x {row.length}" if first else "",
            row.contender,
            "" if row.median_ms is None else f"{row.median_ms:.1f}",
            "" if row.ratio is None else f"{row.ratio:.3f}",
            "" if row.interval is None else "{:.3f}-{:.3f}".format(*row.interval),
            "" if row.peak_share is None else f"{row.peak_share:.0%}",
            "" if row.error is None else f"{row.error:.1e}",
            row.verdict(),
        )
    return result


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="example: python bench/fusion.py --only bert llama --shape 1x128 8x128 --seconds 20",
    )
    parser.add_argument("--only", nargs="+", choices=MODELS, default=[*MODELS], metavar="MODEL")
    parser.add_argument(
        "--exporter", nargs="+", choices=EXPORTERS, help="instead of the one that suits the others"
    )
    parser.add_argument(
        "--seconds", type=float, default=10, help="of each contender and shape (10)"
    )
    parser.add_argument("--shape", nargs="+", type=shape, metavar="BxT", help="instead of all")
    parser.add_argument("--threads", type=int, default=1, help="threads of each session (1)")
    parser.add_argument("--cpu-time", action="store_true", help="not the wall's: for busy machines")
    parser.add_argument("--cache", type=Path, default=cache_folder(), help="folder of the exports")
    parser.add_argument("--quick", action="store_true", help="tiny models; speed does not count")
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    args = parser.parse_args()
    args.seconds = 0.02 if args.quick else args.seconds
    if (
        hasattr(os, "sched_setaffinity") and not args.cpu_time
    ):  # or the scheduler moves threads between cores
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[-args.threads :])

    rows: list[Row] = []
    with Progress(console=Console(stderr=True)) as progress:
        for name in args.only:
            if args.quick and name not in QUICK:
                continue
            for exporter in args.exporter or [CASES[name].exporter]:
                if args.quick:
                    source = FIXTURES / QUICK[name]
                else:
                    try:
                        source = exported(name, exporter, args.cache)
                    except RuntimeError as error:
                        print(error, file=sys.stderr)
                        return 2
                with tempfile.TemporaryDirectory() as folder:
                    bench = Bench(args, Path(folder), progress)
                    rows += bench.measure(name, exporter, source)
    machine = f"{processor()}, onnxruntime {ort.__version__}, threads: {args.threads}"
    told = failures(rows, speed=not args.quick)
    if args.json:
        found = [asdict(row) | {"verdict": row.verdict()} for row in rows]
        print(json.dumps({"machine": machine, "rows": found, "failures": told}, indent=2))
    else:
        Console(width=None if sys.stdout.isatty() else 160).print(table(rows, machine))
        for line in told:
            print(line)
    return 3 if told else 0


if __name__ == "__main__":
    sys.exit(main())
