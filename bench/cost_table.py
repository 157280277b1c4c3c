"""What does a layer cost, how much of it must wait, and how far do signals travel? Table 1 again.

Five layers map n vectors of d features to n others. What table 1 of arXiv 1706.03762 says of them
is computed from their graphs: the FLOPs of the matrix products, fitted to terms in n, d and the
width w (the kernel k, the neighborhood r); the longest chain of products in which each waits for
the one before; and the longest of the shortest paths between two positions, in products, on the
graph taken apart into single elements (graphgen/laboratory/paths.py). Layers that do not join all
positions are stacked until they do, or, for the recurrent one, until no more are joined (no signal
goes back in time). Then latency and peak memory are measured against n on ONNX Runtime: one process
and thread, sessions in turn with the order reversed every round, medians of the thread's time;
memory is what the process takes during a call above what it had before, with the runtime's arena
off (Linux only).

    python bench/cost_table.py -o docs

writes cost-table.md and cost-table.png. Exit 3: a count differs from the paper's table.
"""

import argparse
import contextlib
import ctypes
import datetime
import gc
import math
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort

import graphgen as gg
from graphgen import nn, ops
from graphgen.laboratory.inspection import inspect
from graphgen.laboratory.paths import path_lengths, sequential_products
from graphgen.nn.module import normal
from graphgen.processor import processor

TERMS: dict[str, Callable[[int, int, int], int]] = {
    "n²d": lambda n, d, w: n * n * d,
    "nd²": lambda n, d, w: n * d * d,
    "d²": lambda n, d, w: d * d,
    "wnd²": lambda n, d, w: w * n * d * d,
    "wnd": lambda n, d, w: w * n * d,
}
GROWTH: dict[str, Callable[[Any, Any], Any]] = {
    "1": lambda n, w: np.ones_like(n),
    "n": lambda n, w: n,
    "n/w": lambda n, w: n / w,
    "log_w n": lambda n, w: np.log(n) / np.log(w),
}
EXACT = 1e-9  # relative, of a fit
LENGTHS = {False: (4, 8, 16, 32), True: (2, 4, 8)}  # that paths are found at; by --quick
RAW = argparse.RawDescriptionHelpFormatter
PAGE = """\
# What a layer costs

Table 1 of arXiv 1706.03762, counted on graphs and measured. Five layers map n vectors of d features
to n others; the table shows each count next to the paper's.

{counted}

- FLOPs are those of the matrix products, two for a multiplication and its addition. They are fitted
  by least squares to n²d, nd², d² and, with a width k or r, knd² and rnd; the fits are exact. The
  paper leaves out the projections of attention, 8 nd², which are more than half of the work up to
  n = 2d.
- "Sequential" is the longest chain of matrix products in which each waits for the one before,
  at n = {lengths}. Attention has four: queries or keys, scores, the sum of values, the
  output.
- "Longest path" is the longest of the shortest paths between two positions, in matrix products, at
  n = {lengths} and k = r = {width}. It is found element by element: if an element is
  NaN, so is every element that it reaches. Layers are stacked until all positions are joined; the
  recurrent and the convolutional layers only look back, so there each position must reach all later
  ones. One layer of attention takes three products: value, sum,
  output. The lengths are exactly n, (n - 1)/(k - 1) and log_k n, rounded up, and three times
  2(n - 1)/(r - 1), rounded up, because the neighborhood is centered on its position and reaches
  (r - 1)/2 to each side.

The next tables give the time of a call on one thread, in milliseconds, and its peak memory, for one
optimized layer at batch 1, d = {features}, k = r = {width}. Figures are medians of {rounds} calls
in one process, all layers in turn; the last column is the factor when n last doubles. The
recurrent layer is unrolled, for {longest} positions at most.

{measured}
![Latency and memory against n](cost-table.png)

`python bench/cost_table.py -o docs`, {date}, {machine}.
"""


class Recurrent(nn.Module):
    """h_t = tanh(x_t W + h_{t-1} R), (B, n, d) to (B, n, d), one step after another."""

    def __init__(self, features: int, length: int):
        self.length = length
        self.input, self.state = (nn.Linear(features, features, bias=False) for _ in range(2))

    def __call__(self, x: Any) -> Any:
        steps = ops.split(self.input(x), axis=1, num_outputs=self.length)
        states: list[Any] = []
        for step in steps:  # (B, 1, d)
            states.append(ops.tanh(step + self.state(states[-1]) if states else step))
        return ops.concat(*states, axis=1)


class Convolution(nn.Module):
    """y_t = Σ x_{t - i·dilation} W_i over k places up to t, (B, n, d) to (B, n, d)."""

    def __init__(self, features: int, kernel: int, dilation: int):
        self.kernel, self.dilation = kernel, dilation
        std = (kernel * features) ** -0.5
        self.weight = nn.Parameter((features, features, kernel), initialize=normal(std))

    def __call__(self, x: Any) -> Any:
        options = {"dilations": [self.dilation], "pads": [(self.kernel - 1) * self.dilation, 0]}
        y = ops.conv(ops.transpose(x, perm=[0, 2, 1]), self.weight, **options)
        return ops.transpose(y, perm=[0, 2, 1])


class Restricted(nn.Module):
    """Self-attention to the r positions around each, (B, n, d) to (B, n, d); one head."""

    def __init__(self, features: int, length: int, width: int):
        self.query, self.key, self.value, self.output = (
            nn.Linear(features, features, bias=False) for _ in range(4)
        )
        self.reach = width // 2
        self.seen = np.arange(length)[:, None] + np.arange(width)  # (n, r), of the padded keys
        inside = (self.seen >= self.reach) & (self.seen < length + self.reach)
        self.mask = np.where(inside, 0, -np.inf).astype(np.float32)[:, None]  # (n, 1, r)

    def __call__(self, x: Any) -> Any:
        q = ops.unsqueeze(self.query(x), [2]) * x.shape[-1] ** -0.5  # (B, n, 1, d)
        k, v = self._around(self.key(x)), self._around(self.value(x))  # (B, n, r, d)
        weights = ops.softmax(ops.matmul(q, ops.swap_last(k)) + self.mask)  # (B, n, 1, r)
        return self.output(ops.squeeze(ops.matmul(weights, v), [2]))

    def _around(self, x: Any) -> Any:
        padded = ops.pad(x, np.array([0, self.reach, 0, 0, self.reach, 0]))
        return ops.gather(padded, self.seen, axis=1)


@dataclass(frozen=True, eq=False)
class Layer:
    """A row: how to make layer number i, and what the paper says of it."""

    make: Callable[[int, int, int, int], nn.Module]  # of n, d, w and i
    operations: str
    sequential: str
    path: str
    terms: dict[str, int]  # the FLOPs of its products
    products: Callable[[int], int]  # of which each waits for the one before, at n
    length: Callable[[int, int], int]  # of the longest path, at n and w
    grows: str
    wide: bool = False
    dilated: bool = False  # layers are not all alike
    longest: int = 1 << 30  # n that is measured


LAYERS: dict[str, Layer] = {
    "self-attention": Layer(
        lambda n, d, w, i: nn.Attention(d, num_heads=1, bias=False),
        *("O(n²·d)", "O(1)", "O(1)"),
        terms={"n²d": 4, "nd²": 8},
        products=lambda n: 4,
        length=lambda n, w: 3,
        grows="1",
    ),
    "recurrent": Layer(
        lambda n, d, w, i: Recurrent(d, n),
        *("O(n·d²)", "O(n)", "O(n)"),
        terms={"nd²": 4, "d²": -2},  # no product with the state before the first
        products=lambda n: n,
        length=lambda n, w: n,
        grows="n",
        longest=512,
    ),
    "convolutional": Layer(
        lambda n, d, w, i: Convolution(d, w, 1),
        *("O(k·n·d²)", "O(1)", "O(n/k)"),
        terms={"wnd²": 2},
        products=lambda n: 1,
        length=lambda n, w: math.ceil((n - 1) / (w - 1)),
        grows="n/w",
        wide=True,
    ),
    "convolutional, dilated": Layer(
        lambda n, d, w, i: Convolution(d, w, w**i),
        *("O(k·n·d²)", "O(1)", "O(log_k n)"),
        terms={"wnd²": 2},
        products=lambda n: 1,
        length=lambda n, w: next(i for i in range(n) if w**i >= n),
        grows="log_w n",
        wide=True,
        dilated=True,
    ),
    "self-attention, restricted": Layer(
        lambda n, d, w, i: Restricted(d, n, w),
        *("O(r·n·d)", "O(1)", "O(n/r)"),
        terms={"wnd": 4, "nd²": 8},
        products=lambda n: 4,
        length=lambda n, w: 3 * math.ceil((n - 1) / (w // 2)),
        grows="n/w",
        wide=True,
    ),
}


class Stack(nn.Module):
    """One layer after another."""

    def __init__(self, layers: Sequence[nn.Module]):
        self.layers = list(layers)

    def __call__(self, x: Any) -> Any:
        for layer in self.layers:
            x = layer(x)  # type: ignore[operator]
        return x


def built(layer: Layer, n: int, d: int, w: int, numbers: Sequence[int] = (0,)) -> Any:
    """The model of the layers of these numbers, as primitives, on float[1, n, d]."""
    stack = Stack([layer.make(n, d, w, i) for i in numbers])
    return gg.build(stack, primitives=True, x=gg.float32[1, n, d])


def fitted_terms(
    layer: Layer, lengths: Sequence[int], features: Sequence[int], widths: Sequence[int]
) -> dict[str, float]:
    """The FLOPs of matrix products as factors of `TERMS`, by least squares; those that are not 0.

    Raises GateError where the terms do not tell them exactly.
    """
    points = list(product(lengths, features, widths if layer.wide else [1]))
    counted = np.array([inspect(built(layer, *at)).product_flops for at in points], np.float64)
    names = [name for name in TERMS if layer.wide or not name.startswith("w")]
    terms = np.array([[TERMS[name](*at) for name in names] for at in points], np.float64)
    factors, *_ = np.linalg.lstsq(terms / counted[:, None], np.ones(len(points)), rcond=None)
    if np.abs(terms @ factors / counted - 1).max() > EXACT:
        raise gg.GateError(f"no sum of {', '.join(names)} fits {counted.tolist()}")
    return {n: float(round(f, 6)) for n, f in zip(names, factors, strict=True) if abs(f) > EXACT}


def joining(layer: Layer, n: int, w: int) -> int:
    """How many layers join all positions, or as many as will ever be joined."""
    joined, count = np.eye(n, dtype=bool), 0
    while True:
        grown = joined @ np.isfinite(_paths(layer, n, w, (count * layer.dilated,)))
        if (grown == joined).all():
            return count
        joined, count = grown, count + 1


def longest_path(layer: Layer, n: int, w: int) -> int:
    """The longest of the shortest paths between two positions of as many layers."""
    lengths = _paths(layer, n, w, tuple(range(joining(layer, n, w))))
    return int(lengths[np.isfinite(lengths)].max())


@cache
def _paths(layer: Layer, n: int, w: int, numbers: tuple[int, ...]) -> Any:
    d = 2  # a path is as long in vectors of any size
    x = np.random.default_rng(0).standard_normal((1, n, d))
    return path_lengths(built(layer, n, d, w, numbers), {"x": x})


def growth(points: Sequence[tuple[int, int]], values: Sequence[int]) -> str:
    """Which f of `GROWTH` tells values at (n, w) best as a + b f, by least squares."""
    n, w = np.array(points, np.float64).T
    y, best = np.array(values, np.float64), ("", np.inf)
    for name, f in GROWTH.items():
        if name in ("1", "n") or w.min() > 1:
            columns = np.stack([np.ones_like(n), f(n, w)], axis=1)
            error = np.square(columns @ np.linalg.lstsq(columns, y, rcond=None)[0] - y).sum()
            best = (name, error) if error < best[1] - EXACT else best
    return best[0]


def memory(key: str) -> float:
    """A line of /proc/self/status in MB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(float(line.split()[1]) / 1e3 for line in lines if line.startswith(key))


def peak(call: Callable[[], Any]) -> float | None:
    """MB that a call takes above what the process had; None where there is no /proc."""
    marks = Path("/proc/self/clear_refs")
    if not marks.exists():
        return None
    found = []
    gc.collect()
    for _ in range(5):
        ctypes.CDLL(None).malloc_trim(0)
        marks.write_text("5")  # the peak starts from here
        before = memory("VmRSS")
        call()
        found.append(memory("VmHWM") - before)
    return float(np.median(found))


def measured(
    lengths: Sequence[int], *, features: int, width: int, rounds: int
) -> dict[str, dict[int, tuple[float, float | None]]]:
    """Median milliseconds, and MB, of a call of each optimized layer at each n; on one thread."""
    found: dict[str, dict[int, tuple[float, float | None]]] = {name: {} for name in LAYERS}
    for n in lengths:
        x = np.random.default_rng(0).standard_normal((1, n, features), np.float32)
        calls: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {}
        with tempfile.TemporaryDirectory() as folder:
            for name, layer in LAYERS.items():
                if n > layer.longest:
                    continue
                path = gg.export(
                    gg.optimize(built(layer, n, features, width, [int(layer.dilated)])),
                    Path(folder) / "layer.onnx",
                )
                both = []
                for arena in (True, False):
                    options = ort.SessionOptions()
                    options.intra_op_num_threads = options.inter_op_num_threads = 1
                    options.enable_cpu_mem_arena = options.enable_mem_pattern = arena
                    session = ort.InferenceSession(
                        path, options, providers=["CPUExecutionProvider"]
                    )
                    both.append(partial(session.run, None, {"x": x}))
                calls[name] = (both[0], both[1])
            times: dict[str, list[int]] = {name: [] for name in calls}
            order = list(calls)
            for turn in range(rounds + 2):
                for name in order:
                    start = time.thread_time_ns()  # what else runs here counts little
                    calls[name][0]()
                    if turn > 1:  # the first ones warm up
                        times[name].append(time.thread_time_ns() - start)
                order.reverse()
            for name, (_, plain) in calls.items():
                found[name][n] = float(np.median(times[name])) / 1e6, peak(plain)
    return found


@dataclass
class Counted:
    """What is computed of a layer, and at which (n, w)."""

    terms: dict[str, float]
    products: dict[int, int]
    layers: dict[tuple[int, int], int]
    paths: dict[tuple[int, int], int]
    grows: str


def counted(
    name: str, *, lengths: Sequence[int], features: Sequence[int], widths: Sequence[int]
) -> Counted:
    """A row of the table. Raises GateError where it is not what `LAYERS` says."""
    layer = LAYERS[name]
    points = list(product(lengths, widths if layer.wide else [1]))
    paths = {at: longest_path(layer, *at) for at in points}
    row = Counted(
        terms=fitted_terms(layer, lengths[-2:], features, widths),
        products={n: sequential_products(built(layer, n, 2, widths[-1])) for n in lengths},
        layers={at: joining(layer, *at) for at in points},
        paths=paths,
        grows=growth(points, list(paths.values())),
    )
    wanted = Counted(
        terms={n: float(f) for n, f in layer.terms.items()},
        products={n: layer.products(n) for n in lengths},
        layers=row.layers,
        paths={at: layer.length(*at) for at in points},
        grows=layer.grows,
    )
    if row != wanted:
        raise gg.GateError(f"{name}: counted {row}, wanted {wanted}")
    return row


def count_table(rows: dict[str, Counted], width: int) -> Iterator[str]:
    """What was counted, beside what the paper says, as lines of Markdown."""
    heads = ("operations", "FLOPs", "sequential", "counted", "longest path", "counted", "layers")
    yield f"| layer | {' | '.join(heads)} |"
    yield "|---|" + "---|" * len(heads)
    for name, row in rows.items():
        layer, letter = LAYERS[name], "r" if "restricted" in name else "k"
        terms = (f"{f:g} {n}".replace("w", letter) for n, f in row.terms.items())
        at = [p for p in row.paths if p[1] in (1, width)]
        cells = [
            *(layer.operations, " + ".join(terms).replace("+ -", "- ")),
            *(layer.sequential, ", ".join(str(c) for c in row.products.values())),
            *(layer.path, ", ".join(str(row.paths[p]) for p in at)),
            ", ".join(str(row.layers[p]) for p in at),
        ]
        yield f"| {name} | {' | '.join(cells)} |"


def time_tables(times: Any) -> Iterator[str]:
    """What was measured, as lines of Markdown."""
    lengths = sorted({n for row in times.values() for n in row})
    for title, place, form in (("ms", 0, ".3f"), ("MB", 1, ".2f")):
        yield f"| {title} at n = | {' | '.join(map(str, lengths))} | twice n |"
        yield f"|---|{'---:|' * (len(lengths) + 1)}"
        for name, row in times.items():
            values = [row[n][place] if n in row else None for n in lengths]
            cells = ["" if v is None else format(v, form) for v in values]
            before, last = [v for v in values if v is not None][-2:] or [0, 0]
            cells.append(f"x {last / before:.1f}" if before else "")
            yield f"| {name} | {' | '.join(cells)} |"
        yield ""


def plot(times: Any, path: Path) -> None:
    """Latency and memory against n, both axes logarithmic."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for place, (axis, label) in enumerate(zip(axes, ("ms a call", "peak MB"), strict=True)):
        for name, row in times.items():
            points = [(n, values[place]) for n, values in row.items() if values[place]]
            axis.loglog(*np.array(points or [(np.nan, np.nan)]).T, "o-", markersize=3, label=name)
        axis.set(xlabel="n", ylabel=label)
        axis.grid(alpha=0.3)
    axes[0].legend(fontsize="small")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def machine() -> str:
    """The processor, and what ran on it."""
    with contextlib.suppress(OSError, IndexError):
        told = re.findall(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())[0]
        return f"{told}, one thread, onnxruntime {ort.__version__}"
    return f"{processor()}, one thread, onnxruntime {ort.__version__}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=RAW)
    parser.add_argument("-o", "--output", type=Path, help="folder for the page and its plot")
    parser.add_argument("--quick", action="store_true", help="few and small sizes")
    parser.add_argument("--rounds", type=int, default=101, help="timed calls of each session (101)")
    options = parser.parse_args()
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:1])
    try:
        sizes: Any = {"lengths": LENGTHS[options.quick], "features": (4, 8), "widths": (3, 5)}
        rows = {name: counted(name, **sizes) for name in LAYERS}
    except gg.GraphgenError as error:
        print(f"cost_table: {error}", file=sys.stderr)
        return 3 if isinstance(error, gg.GateError) else 2
    features, width = (8, 5) if options.quick else (64, 5)
    lengths = (8, 16) if options.quick else (64, 128, 256, 512, 1024, 2048)
    rounds = 3 if options.quick else options.rounds
    times = measured(lengths, features=features, width=width, rounds=rounds)
    text = PAGE.format(
        counted="\n".join(count_table(rows, width)),
        measured="\n".join(time_tables(times)),
        lengths=", ".join(map(str, sizes["lengths"])),
        features=features,
        width=width,
        longest=LAYERS["recurrent"].longest,
        rounds=rounds,
        date=datetime.date.today(),
        machine=machine(),
    )
    print(text)
    if options.output is not None:
        options.output.mkdir(parents=True, exist_ok=True)
        (options.output / "cost-table.md").write_text(text)
        plot(times, options.output / "cost-table.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
