"""Are the fused operators right, native and fast on a GPU? Each alone, in fp32, fp16 and bf16.

For every operator that `optimize` makes, the provider's result is compared with the operator's own
definition in float64, on the same rounded inputs; the runtime tells where the node ran, which must
agree with graphgen's table of kernels; and its time is compared with the same operation in eager
torch and in torch.compile, if torch is installed. Runs are interleaved, on values that lie in the
device's memory, and end when the device has finished. The runtime's own optimizations are off.
At last, 20 steps of training there have to give the CPU's losses to 1e-4. The page is written after
each operator; Ctrl-C keeps what is known.

    python bench/on_cuda.py --page docs/cuda.md

It exits with 2 if the provider or its device is missing, and with 3 if an operator is wrong, fails,
or runs elsewhere than the table of kernels says, or if training differs. With `--provider cpu` it
runs anywhere.
"""

import argparse
import json
import math
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from datetime import date
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
from fusion import first_line, in_turn, ratio_of

import graphgen as gg
from graphgen import nn, ops
from graphgen.display import aligned
from graphgen.errors import GraphgenError, GraphgenWarning
from graphgen.laboratory.sides import check_provider
from graphgen.measure.accuracy import differ
from graphgen.measure.reference import evaluate
from graphgen.op import Op, find_op
from graphgen.passes.verify import BOUNDS
from graphgen.processor import processor
from graphgen.targets import target

ROWS = (1, 128, 1024)
DTYPES = {"fp32": gg.float32, "fp16": gg.float16, "bf16": gg.bfloat16}
LEAST = 7  # rounds

HEAD = """# CUDA

`python bench/on_cuda.py --page docs/cuda.md` runs every operator that `optimize` makes on a GPU, in
fp32, fp16 and bf16, and writes this page. It needs `onnxruntime-gpu`; with torch, it also compares
times with eager torch and with `torch.compile`. It exits with 2 if there is no GPU, and with 3 if
an operator is wrong, fails, or runs elsewhere than graphgen's table of kernels says, or if 20 steps
of training have other losses than on the CPU. `--provider cpu` tries the script itself on any
machine.
"""
UNRUN = """
**Nobody has run it on a GPU yet.** So nothing here says that graphgen works on CUDA, or is fast
there: its table of kernels was read from the library of onnxruntime-gpu. If you have a GPU, please
run it, and send the page.
"""
EXPLAINED = """
The error is the relative RMS against the operator's definition in float64, on the same rounded
inputs; it may be 5e-6 in fp32, 5e-3 in fp16 and 4e-2 in bf16. The CUDA provider calculates fp32
products in TF32 unless its option `use_tf32` is 0, as graphgen's sessions set it. The table of
kernels says whether the operator is native; `ran on` is what the runtime's profile shows, *inlined*
if the runtime put the operator's body in its place. Milliseconds are the median of one run; a ratio
is the median of torch over that of ONNX Runtime, in the same rounds: above 1, ONNX Runtime is
faster.
"""


class Sizes(NamedTuple):
    """Features, heads of queries and of keys, wide features and the size of the vocabulary."""

    features: int = 768
    heads: int = 12
    groups: int = 4
    wide: int = 3072
    words: int = 1000


TINY = Sizes(16, 2, 1, 32, 11)


class Case(NamedTuple):
    """An operator's call, the shapes of its inputs, and the same in torch."""

    name: str
    op: Op
    call: Callable[..., Any]
    shapes: Sequence[tuple[int, ...]]
    torch: Callable[..., Any] | None = None
    ids: int = 0  # if not 0, the first input is integers below it


@dataclass
class Row:
    """One operator in one dtype at one number of rows."""

    operator: str
    dtype: str
    rows: int
    table: bool  # whether graphgen's table has a kernel
    ran_on: str = ""
    error: float | None = None
    ms: float | None = None
    ratios: dict[str, float] = field(default_factory=dict)  # torch's time over this
    problem: str = ""

    def fault(self, provider: str) -> str:
        """Why this row fails the run, or ''."""
        who = f"{self.operator} {self.dtype} at {self.rows}"
        if self.table != (self.ran_on == provider):
            says = "native" if self.table else "no kernel"
            return f"{who}: the table says {says}, and it ran on {self.ran_on or 'nothing'}" + (
                f" ({self.problem})" if self.problem else ""
            )
        bound = BOUNDS[_long(self.dtype)]
        if self.error is not None and not self.error <= bound:
            return f"{who}: its error is {self.error:.1e}, above {bound:.0e}"
        return f"{who}: {self.problem}" if self.problem and self.table else ""


def _long(dtype: str) -> str:
    return {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}[dtype]


def cases(rows: int, at: Sizes, torch: Any) -> Iterator[Case]:
    """Every operator that the passes make, at these rows."""
    d, wide, width = at.features, at.wide, at.features // at.heads
    x, one, broad = (1, rows, d), (d,), (1, rows, wide)
    f = torch.nn.functional if torch else None
    of = (lambda call: call) if torch else (lambda call: None)
    scores = (1, at.heads, rows, max(rows, 16))
    yield Case("Softmax", ops.softmax, ops.softmax, [scores], of(lambda x: f.softmax(x, -1)))
    log = ops.log_softmax
    yield Case("LogSoftmax", log, log, [scores], of(lambda x: f.log_softmax(x, -1)))
    norm, rms = ops.layer_normalization, ops.rms_normalization
    layer_norm = of(lambda x, g, b: f.layer_norm(x, (d,), g, b))
    rms_norm = of(lambda x, g: f.rms_norm(x, (d,), g, 1e-5))
    yield Case("LayerNormalization", norm, norm, [x, one, one], layer_norm)
    yield Case("RMSNormalization", rms, rms, [x, one], rms_norm)
    group = partial(ops.group_normalization, num_groups=at.heads)
    grouped = of(lambda x, g, b: f.group_norm(x, at.heads, g, b))
    channels = [(1, d, rows, 4), one, one]
    yield Case("GroupNormalization", ops.group_normalization, group, channels, grouped)
    gelu, tanh = ops.gelu, partial(ops.gelu, approximate="tanh")
    yield Case("Gelu", gelu, gelu, [broad], of(lambda x: f.gelu(x)))
    approximate = of(lambda x: f.gelu(x, approximate="tanh"))
    yield Case("Gelu, tanh", gelu, tanh, [broad], approximate)
    yield Case("QuickGelu", ops.quick_gelu, ops.silu, [broad], of(lambda x: f.silu(x)))
    yield Case("Relu", ops.relu, ops.relu, [broad], of(lambda x: f.relu(x)))
    angles = [(1, rows, width // 2)] * 2
    rotary = partial(ops.rotary_embedding, num_heads=at.heads)
    turn = of(partial(rotated, torch, at.heads))
    yield Case("RotaryEmbedding", ops.rotary_embedding, rotary, [x, *angles], turn)
    linear = of(lambda x, w, b: x @ w + b)
    yield Case("Gemm", ops.gemm, ops.gemm, [(rows, d), (d, wide), (wide,)], linear)
    contrib = ops.contrib
    skip, skip_rms = contrib.skip_layer_normalization, contrib.skip_rms_normalization
    skipped = of(lambda x, y, g, b: f.layer_norm(x + y, (d,), g, b))
    yield Case("SkipLayerNormalization", skip, skip, [x, x, one, one], skipped)
    name = "SkipSimplifiedLayerNormalization"
    skipped = of(lambda x, y, g: f.rms_norm(x + y, (d,), g, 1e-5))
    yield Case(name, skip_rms, skip_rms, [x, x, one], skipped)
    bias_gelu = contrib.bias_gelu
    yield Case("BiasGelu", bias_gelu, bias_gelu, [broad, (wide,)], of(lambda x, b: f.gelu(x + b)))
    embed = contrib.embed_layer_normalization

    def embedded(ids: Any, words: Any, places: Any, g: Any, b: Any) -> Any:
        return embed(ids, None, words, places, None, g, b)

    look_up = of(lambda i, w, p, g, b: f.layer_norm(w[i.long()] + p, (d,), g, b))
    tables = [(1, rows), (at.words, d), (rows, d), one, one]
    yield Case("EmbedLayerNormalization", embed, embedded, tables, look_up, at.words)
    yield from attentions(rows, at, of, f)
    for op, gates in ((ops.lstm, 4), (ops.gru, 3)):  # torch orders the gates otherwise
        hidden = at.features // 4
        weights = [(1, gates * hidden, d), (1, gates * hidden, hidden)]
        call = partial(first_of, op, hidden)
        yield Case(op.name, op, call, [(min(rows, 16), 1, d), *weights])


def attentions(rows: int, at: Sizes, of: Any, f: Any) -> Iterator[Case]:
    """Attention and its other spellings, causal where there is more than one row."""
    width, causal = at.features // at.heads, int(rows > 1)
    heads = [(1, n, rows, width) for n in (at.heads, at.groups, at.groups)]
    flat = [(1, rows, n * width) for n in (at.heads, at.groups, at.groups)]
    whole = [flat[0]] * 3
    how = {"is_causal": bool(causal)}

    def attend(q: Any, k: Any, v: Any, enable_gqa: bool = True) -> Any:
        return f.scaled_dot_product_attention(q, k, v, enable_gqa=enable_gqa, **how)

    def on_flat(q: Any, k: Any, v: Any) -> Any:
        q, k, v = (x.unflatten(-1, (-1, width)).transpose(1, 2) for x in (q, k, v))
        return attend(q, k, v).transpose(1, 2).flatten(-2)

    attention = ops.scaled_dot_product_attention
    yield Case("Attention", attention, partial(attention, is_causal=causal), heads, of(attend))
    counts = {"q_num_heads": at.heads, "kv_num_heads": at.groups, "is_causal": causal}
    on_three = partial(attention, **counts)
    yield Case("Attention, 3-D", attention, on_three, flat, of(on_flat))
    multi = partial(ops.multi_head_attention, num_heads=at.heads, unidirectional=causal)
    yield Case("MultiHeadAttention", ops.multi_head_attention, multi, whole, of(on_flat))

    def prompt(q: Any, k: Any, v: Any) -> Any:
        last, total = np.array([rows - 1], np.int32), np.array(rows, np.int32)
        counts = {"num_heads": at.heads, "kv_num_heads": at.groups}
        return ops.group_query_attention(q, k, v, None, None, last, total, **counts)

    yield Case("GroupQueryAttention", ops.group_query_attention, prompt, flat, of(on_flat))


def first_of(op: Op, hidden: int, x: Any, w: Any, r: Any) -> Any:
    """All hidden states of a recurrent layer."""
    return op(x, w, r, hidden_size=hidden)[0]


def rotated(torch: Any, heads: int, x: Any, cos: Any, sin: Any) -> Any:
    """Rotary embedding of (B, T, H·D), both halves of each head."""
    a, b = x.unflatten(-1, (heads, -1)).chunk(2, -1)
    cos, sin = cos.unsqueeze(2), sin.unsqueeze(2)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2)


def model_of(case: Case, dtype: Any) -> ir.Model:
    """The operator alone."""
    specs = {f"x{i}": dtype[shape] for i, shape in enumerate(case.shapes)}
    if case.ids:
        specs["x0"] = gg.int32[case.shapes[0]]
    model = gg.build(lambda **x: {"y": case.call(*x.values())}, **specs)
    if case.op is ops.group_query_attention:  # older runtimes want its caches, too
        [node] = (n for n in model.graph if find_op(n) is case.op)
        node.resize_outputs(3)
    return model


def feeds_of(case: Case, model: ir.Model) -> dict[str, np.ndarray]:
    rng, found = np.random.default_rng(0), {}
    for value, shape in zip(model.graph.inputs, case.shapes, strict=True):
        assert value.dtype is not None
        array = rng.standard_normal(shape, np.float32)
        if value.dtype is ir.DataType.INT32:
            array = rng.integers(0, case.ids, shape)  # type: ignore[assignment]
        found[str(value.name)] = array.astype(value.dtype.numpy())
    return found


def opened(
    model: ir.Model, op_type: str, feeds: dict[str, np.ndarray], provider: Any
) -> tuple[gg.Session, list[np.ndarray], str]:
    """A session that has run once, its results, and where the operator ran."""
    with TemporaryDirectory() as folder:
        with warnings.catch_warnings(action="ignore", category=GraphgenWarning):  # `ran on` tells
            prefix = str(Path(folder, "run"))
            session = gg.Session(model, provider=provider, optimize=False, profile=prefix)
        results = session(feeds)
        events = session.end_profiling()
    nodes = (event["args"] for event in events if event["cat"] == "Node")
    on = {node["provider"] for node in nodes if node.get("op_name") == op_type}
    if not on:
        return session, results, "inlined"
    return session, results, provider if on == {session.plan.providers[0]} else "cpu"


def bound_run(session: Any, feeds: dict[str, np.ndarray], device: str) -> Callable[[], None]:
    """A run on values in the device's memory, which ends when the device has finished."""
    binding, of = session.io_binding(), ort.OrtValue
    for name, x in feeds.items():
        if x.dtype.isbuiltin == 1:
            value = of.ortvalue_from_numpy(x, device, 0)
        else:  # numpy has no bfloat16: memory that nobody has written, which takes the same time
            number = onnx.helper.np_dtype_to_tensor_dtype(x.dtype)
            value = of.ortvalue_from_shape_and_type(x.shape, number, device, 0)
        binding.bind_ortvalue_input(name, value)
    for output in session.get_outputs():
        binding.bind_output(output.name, device)

    def run() -> None:
        session.run_with_iobinding(binding)
        binding.synchronize_outputs()

    return run


def torch_runs(
    torch: Any, case: Case, dtype: str, feeds: dict[str, np.ndarray], device: str, compiled: bool
) -> dict[str, Callable[[], None]]:
    """The same in eager torch and, if wanted, compiled, for `in_turn`."""
    kind = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[dtype]
    given = [
        torch.from_numpy(x if x.dtype.kind == "i" else x.astype(np.float32)).to(
            device, None if x.dtype.kind == "i" else kind
        )
        for x in feeds.values()
    ]

    def timed(call: Callable[..., Any]) -> Callable[[], None]:
        def run() -> None:
            with torch.no_grad():
                call(*given)
            if device == "cuda":
                torch.cuda.synchronize()

        return run

    if not compiled:
        return {"torch": timed(case.torch)}
    torch.compiler.reset()
    return {"torch": timed(case.torch), "torch.compile": timed(torch.compile(case.torch))}


def measure(
    case: Case, dtype: str, rows: int, provider: str, torch: Any, seconds: float, compiled: bool
) -> Row:
    """One row; what fails is its problem."""
    model = model_of(case, DTYPES[dtype])
    [node] = (n for n in model.graph if find_op(n) is case.op)
    row = Row(case.name, dtype, rows, target(provider).runs(node))
    feeds = feeds_of(case, model)
    try:
        session, results, row.ran_on = opened(model, node.op_type, feeds, provider)
    except GraphgenError as error:
        row.problem = first_line(error)
        return row
    [wanted] = evaluate(model, feeds)
    row.error = differ([wanted], results[:1]).rel_rms
    calls = {"ours": bound_run(session._session, feeds, session.plan.device)}
    if torch and case.torch:
        try:
            given = torch, case, dtype, feeds, session.plan.device, compiled
            for name, run in torch_runs(*given).items():
                run()
                calls[name] = run
        except Exception as error:  # whatever torch raises is its problem
            row.problem = f"torch: {first_line(error)}"
    times = in_turn([*calls.values()], seconds, LEAST, cpu_time=False)
    row.ms = float(np.median(times[:, 0])) / 1e6
    row.ratios = {name: ratio_of(times, i, 0)[0] for i, name in enumerate(calls) if i}
    return row


def measured(
    case: Case, dtype: str, rows: int, provider: str, torch: Any, seconds: float, compiled: bool
) -> Row:
    """One row, also where the runtime or torch fails in a way of its own."""
    try:
        return measure(case, dtype, rows, provider, torch, seconds, compiled)
    except Exception as error:
        native = target(provider).runs
        [node] = (n for n in model_of(case, DTYPES[dtype]).graph if find_op(n) is case.op)
        return Row(case.name, dtype, rows, native(node), problem=first_line(error))


def trained(provider: str) -> list[str]:
    """What is wrong with 20 steps of training there: losses other than the CPU's, or a failure."""
    x = np.random.default_rng(0).standard_normal((4, 4, 6, 16), np.float32)
    batches, losses = [{"x": rows, "labels": np.sin(rows)} for rows in x], list[list[float]]()
    with TemporaryDirectory() as folder, warnings.catch_warnings(action="ignore"):
        model = gg.build(nn.EncoderLayer(16, num_heads=2), x=gg.float32["n", "t", 16], seed=0)
        path, art = gg.export(model, Path(folder, "layer.onnx")), Path(folder, "artifacts")
        gg.artifacts(path, art, loss="mse", optimizer=gg.AdamW(clip_norm=1.0), profile="stock")
        for each in ("cpu", provider):
            try:
                trainer = gg.Trainer(art, schedule=gg.schedule.constant(1e-2), provider=each)
                history = trainer.fit(batches, steps=20, progress=False)
            except Exception as error:
                return [f"training on {each}: {first_line(error)}"]
            losses.append([line["loss"] for line in history])
    error = float(np.max(np.abs(np.divide(*losses) - 1)))
    return [] if error < 1e-4 else [f"training: losses differ by {error:.1e} from the CPU's"]


def table(rows: Sequence[Row]) -> list[list[str]]:
    head = ["operator", "dtype", "rows", "table", "ran on", "error", "ms", "torch", "compiled"]
    cells = [head]
    for row in rows:
        ratios = [row.ratios.get(name) for name in ("torch", "torch.compile")]
        cells.append([
            row.operator, row.dtype, f"{row.rows:,}", "native" if row.table else "-",
            row.ran_on or "-", "-" if row.error is None else f"{row.error:.1e}",
            "-" if row.ms is None else f"{row.ms:.3g}",
            *("-" if ratio is None else f"{ratio:.2f}" for ratio in ratios),
        ])  # fmt: skip
    return cells


def page(rows: Sequence[Row], about: str, faults: Sequence[str]) -> str:
    """docs/cuda.md with these results, or, without any, as nobody has run it."""
    if not rows:
        return HEAD + UNRUN
    head, *cells = table(rows)
    lines = [f"| {' | '.join(line)} |" for line in (head, ["---"] * len(head), *cells)]
    found = [f"- {fault}" for fault in faults] or ["Nothing was wrong or elsewhere."]
    return "\n".join([HEAD + EXPLAINED, about, "", *found, "", *lines, ""])


def about(provider: str, torch: Any) -> str:
    """What it ran on: versions and device."""
    versions = (
        f"onnxruntime {ort.__version__}, {f'torch {torch.__version__}' if torch else 'no torch'}"
    )
    return f"{provider} on {device_name(provider)}, {versions}, {date.today()}"


def device_name(provider: str) -> str:
    """The processor, or the GPU as its driver calls it."""
    if provider == "cpu":
        return str(processor())
    asked = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    return subprocess.run(asked, capture_output=True, text=True).stdout.partition("\n")[0]


def import_torch(provider: str) -> Any:
    """torch if it is installed and has the device, else None."""
    try:
        import torch
    except ImportError:
        return None
    return torch if provider == "cpu" or torch.cuda.is_available() else None


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--provider", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--dtypes", nargs="+", choices=(*DTYPES,), default=[*DTYPES])
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("--only", default="", help="operators whose names begin like this")
    parser.add_argument("--seconds", type=float, default=0.5, help="for each row (0.5)")
    parser.add_argument("--eager", action="store_true", help="no torch.compile: it takes seconds")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, for a test")
    parser.add_argument("--page", type=Path, help="write the page there")
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")
    args = parser.parse_args()
    try:
        check_provider("on_cuda.py", args.provider)
    except GraphgenError as error:
        print(error, file=sys.stderr)
        return 2
    torch = import_torch(args.provider)
    counts, sizes = ((3,), TINY) if args.quick else (args.rows, Sizes())
    seconds = 0.0 if args.quick else args.seconds
    wanted = [
        (case, dtype, count)
        for count in counts
        for case in cases(count, sizes, torch)
        if case.name.startswith(args.only)
        for dtype in args.dtypes
    ]
    rows, faults, told = list[Row](), list[str](), about(args.provider, torch)
    try:
        for i, (case, dtype, count) in enumerate(wanted, 1):
            print(f"{i}/{len(wanted)} {case.name} {dtype} at {count}", file=sys.stderr)
            given = case, dtype, count, args.provider, torch, seconds, not args.eager
            rows.append(measured(*given))
            faults = [fault for row in rows if (fault := row.fault(args.provider))]
            if args.page:  # what is known stays, whatever happens to the device
                args.page.write_text(page(rows, told, faults), encoding="utf-8")
        if not args.only:
            faults += trained(args.provider)
    except KeyboardInterrupt:
        faults.append(f"interrupted after {len(rows)} of {len(wanted)}")
    if args.page:
        args.page.write_text(page(rows, told, faults), encoding="utf-8")
    if args.json:
        found = [asdict(row) | {"fault": row.fault(args.provider)} for row in rows]
        print(
            json.dumps({"about": told, "rows": found, "faults": faults}, indent=2, default=_finite)
        )
    else:
        print(told, *aligned(table(rows)), *faults, sep="\n")
    return 3 if faults else 0


def _finite(x: Any) -> Any:
    return None if isinstance(x, float) and not math.isfinite(x) else x


if __name__ == "__main__":
    sys.exit(main())
