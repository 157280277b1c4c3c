"""Of which model types of transformers does `optimize` find every attention and every norm?

Each model type that transformers' `AutoModel` knows is made small, with random weights of high
variance, exported by both of torch's exporters with free rows and lengths, optimized for the CPU,
and compared with the export at other sizes, both without the runtime's own optimizations. What is
left is counted in the optimized graph, not by what the recognizers looked at: a softmax whose
result a product reads, and the root of a mean of squares. Counted apart is what is no faster
as an operator: weights that are results, or read by more than one product, which Attention would
have to write out (docs/not-fused.md has figures), and softmaxes over anything but a product of two
values that are computed. A reason is what `explain` says.

A file is made in a process of its own, with a limit of time and of memory. With `--results` a run
that was cut off goes on where it was. Exit 3: a result differs from the export's by more than 1e-5,
and is further from torch's own in float64. Needs torch and transformers
(`pip install "graphgen-onnx[bench]"`).
"""

import argparse
import json
import multiprocessing
import os
import random
import resource
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir
from exports import EXPORTERS
from fusion import first_line, relative_rms
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

import graphgen as gg
from graphgen.export.write import to_bytes
from graphgen.graph import constant
from graphgen.processor import processor
from graphgen.recognize.masks import repeated_scalar
from graphgen.runtime import Session

if TYPE_CHECKING:
    from shrink import Small

WRONG = 1e-5  # relative RMS in float32, at each of the sizes
SIZES = ((2, 12), (3, 16), (1, 21))  # rows and tokens; exported with the first
HIDDEN = (-1e5, -1e3)  # numbers that hide a score next to most others, and not next to all
PRODUCTS = ("MatMul", "Gemm", "Einsum", "FusedMatMul")
MOVES = {"Cast", "Transpose", "Reshape", "Dropout", "Identity", "Squeeze", "Unsqueeze", "Expand"}


@dataclass
class Row:
    """One model type by one exporter: what was found, what is left and why."""

    kind: str
    exporter: str
    problem: str = ""  # why there is nothing to count, or what is wrong
    attentions: int = 0
    refused: int = 0  # attentions that were recognized, and are faster as they are
    norms: int = 0
    softmaxes_left: int = 0
    apart: int = 0  # of these, what no operator computes faster: see `apart`
    norms_left: int = 0
    reasons: list[str] = field(default_factory=list)
    error: float = 0.0
    hostile: float = 0.0  # a larger one, with the result no further from float64 than the export's
    sizes: int = 0  # at which results were compared
    part: str = ""  # the class that was exported, where the whole model does not run

    def wrong(self) -> bool:
        return self.problem.startswith("graphgen: ") or not self.error <= WRONG


def free_axes(small: "Small") -> dict[str, dict[int, str]]:
    """Which axes of the inputs have another size for other rows and tokens, with a name each."""
    one, other = (
        {name: tuple(x.shape) for name, x in small.inputs(*sizes).items()} for sizes in SIZES[:2]
    )
    names = dict(zip(zip(*SIZES[:2], strict=True), ("rows", "tokens"), strict=True))
    return {
        name: {
            axis: names.get(pair, f"n{pair[0]}")
            for axis, pair in enumerate(zip(one[name], other[name], strict=True))
            if pair[0] != pair[1]
        }
        for name in one
    }


def export(whole: Any, small: "Small", exporter: str, path: Path) -> None:
    """Write the file with free rows and lengths; with fewer free sizes if that fails."""
    import torch

    given, free = small.inputs(*SIZES[0]), free_axes(small)
    rows = {name: {i: a for i, a in axes.items() if a == "rows"} for name, axes in free.items()}
    names = {"input_names": [*given], "verbose": False}
    for axes in (free, rows, {name: {} for name in given}):
        how: dict[str, Any] = {"opset_version": EXPORTERS[exporter][1]}
        if exporter == "torchscript":
            how |= {"dynamo": False, "dynamic_axes": {n: a for n, a in axes.items() if a}}
        else:
            dims = tuple(dict.fromkeys(axes[name], torch.export.Dim.DYNAMIC) for name in given)
            how |= {"dynamo": True, "external_data": False, "dynamic_shapes": (dims,)}
        try:
            torch.onnx.export(whole, (*given.values(),), path, **names, **how)
            return
        except Exception as error:
            last = error
    raise last


def read_by_product(value: ir.Value, steps: int = 4) -> bool:
    """Whether a product reads a value, at once or through what moves and scales it."""
    for node in value.consumers():
        if node.op_type in PRODUCTS:
            return True
        scales = node.op_type in {"Mul", "Where", "Slice", "Concat", "Add", *MOVES}
        if steps and scales and read_by_product(node.outputs[0], steps - 1):
            return True
    return False


def weights_multiplied(graph: ir.Graph) -> list[ir.Node]:
    """Softmaxes whose result a product reads."""
    nodes = [node for node in graph.all_nodes() if node.op_type == "Softmax"]
    return [node for node in nodes if read_by_product(node.outputs[0])]


def softmaxes_left(graph: ir.Graph) -> int:
    """How many there are."""
    return len(weights_multiplied(graph))


def apart(graph: ir.Graph) -> int:
    """Softmaxes that no operator of attention computes faster, whatever recognizes it.

    Their weights are a result, or read by more than one product; or they are over anything but a
    product of two values that are computed: of a dense layer or a convolution, as in ConvBERT; or
    hidden scores become a number such as -10000, next to which another score may still count, or
    are multiplied by 0 before one is added, as in OpenAI GPT.
    """

    def readers(value: ir.Value) -> int:
        total = int(value.is_graph_output())
        for node in value.consumers():
            total += readers(node.outputs[0]) if node.op_type in MOVES else node.op_type != "Shape"
        return total

    def hides_in_part(value: ir.Value | None) -> bool:
        number = repeated_scalar(value)
        return number is not None and HIDDEN[0] <= number <= HIDDEN[1]

    def is_0_in_part(value: ir.Value | None) -> bool:
        while (node := value.producer() if value is not None else None) is not None:
            if node.op_type not in {"Slice", *MOVES}:
                return False
            value = node.inputs[0]
        array = constant(value)
        return array is not None and bool(np.any(array == 0) and np.any(array != 0))

    def of_product(value: ir.Value | None, steps: int) -> bool:
        node = value.producer() if value is not None else None
        if node is None or not steps:
            return False
        if node.op_type in PRODUCTS:
            return all(x is not None and x.const_value is None for x in node.inputs[:2])
        if node.op_type == "Where" and any(map(hides_in_part, node.inputs[1:])):
            return False
        if node.op_type == "Mul" and any(map(is_0_in_part, node.inputs)):
            return False
        return any(of_product(x, steps - 1) for x in node.inputs)

    left = weights_multiplied(graph)
    return sum(readers(n.outputs[0]) > 1 or not of_product(n.inputs[0], 12) for n in left)


def norms_left(graph: ir.Graph) -> int:
    """Roots of a mean or of a sum of squares that divide: what is left of norms."""

    def of_mean(value: ir.Value | None, steps: int) -> bool:
        node = value.producer() if value is not None else None
        if node is None or not steps:
            return False
        if node.op_type in ("ReduceMean", "ReduceSumSquare"):
            return True
        return node.op_type in ("Add", "Max", "Clip") and any(
            of_mean(x, steps - 1) for x in node.inputs
        )

    roots = [node for node in graph.all_nodes() if node.op_type in ("Sqrt", "Pow")]
    return sum(of_mean(node.inputs[0], 3) for node in roots)


def exported(row: Row, path: Path) -> tuple[Any, "Small", Session]:
    """The model with positional inputs, how to feed it, and its file in a session."""
    import torch
    from shrink import floats, small_model

    small = small_model(row.kind, "eager" if row.exporter == "torchscript" else "sdpa")
    names = [*small.inputs(*SIZES[0])]
    row.part = small.part

    class Positional(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = small.model

        def forward(self, *tensors: Any) -> Any:
            return tuple(floats(self.model(**dict(zip(names, tensors, strict=True)))))

    whole = Positional().eval()
    with torch.no_grad():
        export(whole, small, row.exporter, path)
    before = Session(path, optimize=False)
    before(
        {name: x.numpy() for name, x in small.inputs(*SIZES[0]).items() if name in before.inputs}
    )
    return whole, small, before


def distance(got: Sequence[Any], wanted: Sequence[Any]) -> float:
    """The largest relative RMS among results that are all finite."""
    return max((relative_rms(x, y) for x, y in zip(got, wanted, strict=True)), default=0.0)


def worse(whole: Any, given: dict[str, Any], before: Sequence[Any], after: Sequence[Any]) -> bool:
    """Whether the optimized file is further from the model in float64 than the export is."""
    import torch

    try:
        wide = [x.double() if x.is_floating_point() else x for x in given.values()]
        with torch.no_grad():
            exact = [x.numpy() for x in whole.double()(*wide)]
        error = distance(before, exact)
    except Exception:  # the model has something that is not there in float64
        return True
    finally:
        whole.float()
    return error > 1e-2 or distance(after, exact) > 2 * error + WRONG


def measure(kind: str, exporter: str, folder: Path) -> Row:
    """What one type by one exporter gives."""
    row, path = Row(kind, exporter), folder / "export.onnx"
    warnings.simplefilter("ignore")
    try:
        whole, small, before = exported(row, path)
    except Exception as error:
        row.problem = f"no export that runs: {type(error).__name__}: {first_line(error)}"
        return row
    try:
        best = gg.optimize(gg.load(path), target="cpu")
        after = Session(to_bytes(best.model), optimize=False)
    except Exception as error:
        row.problem = f"graphgen: {type(error).__name__}: {first_line(error)}"
        return row
    graph, fused = best.model.graph, best.report.fused()
    sites = [s for done in best.report.passes if done.name == "fuse_attention" for s in done.sites]
    row.attentions = fused["attention"]
    row.refused = sum(site.status == "refused" for site in sites)
    row.softmaxes_left = max(0, softmaxes_left(graph) - row.refused)
    row.apart = min(row.softmaxes_left, apart(graph))
    row.norms = sum(n for name, n in fused.items() if name.endswith("norm"))
    refused = sum(done.count("refused") for done in best.report.passes if done.name == "fuse_norm")
    row.norms_left = max(0, norms_left(graph) - refused)
    words = ["attention"] * (row.softmaxes_left > 0) + ["layer_norm"] * (row.norms_left > 0)
    row.reasons = best.report.reasons(words) if words else []
    for rows, tokens in SIZES:
        given = small.inputs(rows, tokens)
        feeds = {name: given[name].numpy() for name in before.inputs}
        try:
            wanted, again = before(feeds), before(feeds)
        except gg.GraphgenError:  # the export itself does not run at this size
            continue
        try:
            got = after(feeds)
        except gg.GraphgenError as error:
            row.problem = f"graphgen: at {rows} x {tokens}: {first_line(error)}"
            return row
        if all(
            np.isfinite(x).all() and np.array_equal(x, y)
            for x, y in zip(wanted, again, strict=True)
        ):
            differ = distance(got, wanted)
            if not differ <= WRONG and not worse(whole, given, wanted, got):
                row.hostile = max(row.hostile, differ)
            else:
                row.error = max(row.error, differ)
            row.sizes += 1
    return row


def limited(kind: str, exporter: str, memory: float, folder: str, pipe: Any) -> None:
    """Measure one type by one exporter, within a limit of memory."""
    resource.setrlimit(resource.RLIMIT_AS, (int(memory * 1e9),) * 2)
    sink = os.open(os.devnull, os.O_WRONLY)
    os.dup2(sink, 1)
    os.dup2(sink, 2)
    pipe.send(asdict(measure(kind, exporter, Path(folder))))


def in_process(kind: str, exporter: str, seconds: float, memory: float) -> Row:
    """A type's row by one exporter; one that takes longer or dies has a row that says so."""
    context = multiprocessing.get_context("fork")  # with torch imported once
    ours, theirs = context.Pipe(duplex=False)
    problem = f"no export that runs: not done in {seconds:g} s"
    with tempfile.TemporaryDirectory() as folder:
        call = (kind, exporter, memory, folder, theirs)
        process = context.Process(target=limited, args=call, daemon=True)
        process.start()
        theirs.close()
        try:
            if ours.poll(seconds):
                return Row(**ours.recv())
        except EOFError:
            problem = "no export that runs: its process died"
        finally:
            process.kill()
            process.join()
    return Row(kind, exporter, problem=problem)


def table(rows: Sequence[Row], title: str) -> Table:
    result = Table(title=title)
    result.add_column("type", no_wrap=True)
    result.add_column("exporter", no_wrap=True)
    for heading in ("attentions", "left", "norms", "left", "error"):
        result.add_column(heading, justify="right", no_wrap=True)
    result.add_column("why")
    for row in rows:
        if row.softmaxes_left or row.norms_left or row.wrong():
            found = row.attentions + row.refused
            figures = (found, row.softmaxes_left, row.norms, row.norms_left)
            why = row.problem or "; ".join(row.reasons)
            result.add_row(row.kind, row.exporter, *map(str, figures), f"{row.error:.1e}", why)
    return result


def conclusion(rows: Sequence[Row]) -> str:
    """How many files there are, and in how many of them everything was found."""
    files = [row for row in rows if not row.problem.startswith("no export")]
    whole = [row for row in files if not (row.softmaxes_left or row.norms_left or row.problem)]
    fair = [row for row in files if row.softmaxes_left > row.apart or row.norms_left or row.problem]
    found = sum(row.attentions + row.refused for row in files), sum(row.norms for row in files)
    left = sum(row.softmaxes_left for row in files), sum(row.norms_left for row in files)
    return (
        f"{len(files)} files of {len({row.kind for row in files})} types, "
        f"{len(rows) - len(files)} not exported; everything found in {len(whole)}, "
        f"and in {len(files) - len(fair)} all but what no operator computes faster; "
        f"attentions {found[0]} found, {left[0]} left; norms {found[1]} found, {left[1]} left; "
        f"{sum(row.wrong() for row in files)} wrong, "
        f"{sum(row.sizes == 0 for row in files)} not comparable"
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="example: python bench/model_types.py --only bert llama --results model_types.jsonl",
    )
    parser.add_argument("--only", nargs="+", metavar="TYPE", help="these model types alone")
    parser.add_argument("--exporters", nargs="+", default=[*EXPORTERS], choices=[*EXPORTERS])
    parser.add_argument("--part", default="0/1", metavar="I/N", help="part I of N of all types")
    parser.add_argument("--order", type=int, default=0, metavar="SEED", help="of the types (0)")
    parser.add_argument("--results", type=Path, help="a JSON lines file to go on with")
    parser.add_argument("--seconds", type=float, default=90, help="for each file (90)")
    parser.add_argument("--memory", type=float, default=12, help="address space in GB (12)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    args = parser.parse_args()
    import torch
    from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

    torch.set_num_threads(1)
    kinds = sorted(args.only or MODEL_MAPPING_NAMES)
    random.Random(args.order).shuffle(kinds)  # so that a part is a fair sample
    part, parts = map(int, args.part.split("/"))
    rows = []
    if args.results and args.results.exists():
        rows = [Row(**json.loads(line)) for line in args.results.read_text().splitlines()]
    done = {(row.kind, row.exporter) for row in rows}
    files = [(kind, exporter) for kind in kinds[part::parts] for exporter in args.exporters]
    files = [file for file in files if file not in done]
    with Progress(console=Console(stderr=True)) as progress:
        task = progress.add_task("", total=len(files))
        for kind, exporter in files:
            progress.update(task, description=f"{kind} by {exporter}")
            row = in_process(kind, exporter, args.seconds, args.memory)
            rows.append(row)
            if args.results:
                with args.results.open("a") as out:
                    out.write(json.dumps(asdict(row)) + "\n")
            progress.advance(task)
    if args.json:
        print(
            json.dumps(
                {"machine": str(processor()), "rows": [asdict(row) for row in rows]}, indent=2
            )
        )
    else:
        console = Console(width=None if sys.stdout.isatty() else 140)
        console.print(table(rows, str(processor())))
        console.print(conclusion(rows))
        problems = Counter(row.problem.partition(": ")[0] for row in rows if row.problem)
        console.print(*(f"{count} {what}" for what, count in problems.items()), sep=", ")
    return 3 if any(row.wrong() for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
