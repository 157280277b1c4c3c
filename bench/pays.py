"""Which fused operators pay? Each against the nodes it stands for, by processor, dtype and rows.

The operator and its body run in turn in one process, with the runtime's own optimizations off, so
that each runs as it is written; on a GPU, on values in its memory. A figure is the median over the
rounds of the operator's time over the body's: below 1 the operator is faster. The body is inlined
one level only, so that attention's keeps Softmax, and SkipLayerNormalization's is Add and
LayerNormalization. Other spellings of attention are measured against the same body, and all with a
mask against what is usually written: products, a sum and Softmax.

Rows are the product of the result's sizes except the last; for attention, the queries. The sizes
are those of BERT-base and of a GPT of 12 heads; grouped ones have 4 heads of keys; of products with
a transposed operand, the columns count (256 of them, too, with --rows), and of norms along channels
these, in an image of 32 x 32 (--only "LayerNormalization channels" --rows 8 32 64 256). The results
replace figures in graphgen/targets/pays.json, which `optimize` reads; figures of another machine or
runtime are dropped, unless --only adds to them. For your own machine:

    python bench/pays.py --output graphgen/targets/pays.json
"""

import argparse
import itertools
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, get_args

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
from on_cuda import bound_run, device_name
from rich.console import Console
from rich.table import Table

import graphgen as gg
from graphgen import ops
from graphgen.edit import infer_model, replace_composites, tidy
from graphgen.export.write import to_bytes
from graphgen.graph import bodies
from graphgen.infer import DOMAIN
from graphgen.match import CHANNELS
from graphgen.op import Op, find_op
from graphgen.ops.attention import causal_mask, merge_heads, repeat_heads, split_heads
from graphgen.ops.layout import swap_last
from graphgen.processor import Instructions, instructions
from graphgen.record import Operand
from graphgen.targets.kernels import form_of

ROWS = (1, 128, 512, 1024, 2048)
LONGEST = 1024  # of attention: beyond, scores fill the memory's bandwidth, and ratios are noise
FEATURES, HEADS, GROUPS, WIDE = 768, 12, 4, 3072
SIDE, MOST_CHANNELS = 32, 512
MICROSOFT = "com.microsoft"


class Case(NamedTuple):
    """An operator, its call, and the shapes of what it is called on; of the dtype if none is given.

    `plain` is what it stands for, if that is not its body.
    """

    op: Op
    call: Callable[..., Any]
    shapes: tuple[tuple[Any, ...], ...]
    plain: Callable[..., Any] | None = None
    layout: str = ""


def cases(rows: int, dtype: Any) -> Iterator[Case]:
    """Every operator, and how it is called at these rows."""
    gain, shift, bias = np.ones(FEATURES, dtype), np.zeros(FEATURES, dtype), np.ones(WIDE, dtype)
    x, wide, keys = (1, rows, FEATURES), (1, rows, WIDE), (1, max(rows, 128))
    yield Case(ops.softmax, ops.softmax, ((1, HEADS, rows, keys[1]),))
    norm = ops.layer_normalization
    yield Case(norm, lambda x: norm(x, gain, shift), (x,))
    yield Case(ops.rms_normalization, lambda x: ops.rms_normalization(x, gain), (x,))
    ones, zeros = np.ones(rows, dtype), np.zeros(rows, dtype)
    yield Case(
        ops.instance_normalization, lambda x: ops.instance_normalization(x, ones, zeros), (x,)
    )
    yield from channel_cases(rows, dtype)
    yield Case(ops.gelu, ops.gelu, (wide,))
    yield Case(ops.gelu, lambda x: ops.gelu(x, approximate="tanh"), (wide,))
    yield Case(ops.quick_gelu, ops.silu, (wide,))
    skip, skip_rms = ops.contrib.skip_layer_normalization, ops.contrib.skip_rms_normalization
    yield Case(skip, lambda x, y: skip(x, y, gain, shift), (x, x))
    yield Case(skip_rms, lambda x, y: skip_rms(x, y, gain), (x, x))
    yield Case(ops.contrib.bias_gelu, lambda x: ops.contrib.bias_gelu(x, bias), (wide,))
    yield Case(
        ops.rotary_embedding,
        lambda x, cos, sin: ops.rotary_embedding(x, cos, sin, num_heads=HEADS),
        (x, *[(1, rows, FEATURES // HEADS // 2)] * 2),
    )
    words = np.ones((WIDE, FEATURES), dtype)
    embed = ops.contrib.embed_layer_normalization
    yield Case(
        embed,
        lambda ids: embed(ids, None, words, words[:rows], None, gain, shift),
        ((np.int32, 1, rows),),
    )
    matrix = np.ones((FEATURES, WIDE), dtype)
    yield Case(ops.gemm, lambda x: ops.gemm(x, matrix, bias), ((rows, FEATURES),))
    if rows > 1:  # for products of A transposed, which read it again for each few columns
        shapes = (2 * LONGEST, rows), (2 * LONGEST, 4 * rows)
        yield Case(ops.gemm, partial(ops.gemm, transA=1), shapes, of_a_copy)
    if rows <= LONGEST:
        yield from attention_cases(rows, keys)


def channel_cases(channels: int, dtype: Any) -> Iterator[Case]:
    """Norms along the channels of images, which come before their height and width."""
    gain, shift = np.ones(channels, dtype), np.zeros(channels, dtype)
    norm, rms, x = ops.layer_normalization, ops.rms_normalization, (1, channels, SIDE, SIDE)
    if not 1 < channels <= MOST_CHANNELS:
        return

    def written_out(x: Any) -> Any:
        return normal(x - ops.reduce_mean(x, [1])) * gain[:, None, None] + shift[:, None, None]

    def rms_written_out(x: Any) -> Any:
        return normal(x) * gain[:, None, None]

    to_last, back = (
        partial(ops.transpose, perm=[0, 2, 3, 1]),
        partial(ops.transpose, perm=[0, 3, 1, 2]),
    )
    yield Case(norm, lambda x: back(norm(to_last(x), gain, shift)), (x,), written_out, CHANNELS)
    yield Case(rms, lambda x: back(rms(to_last(x), gain)), (x,), rms_written_out, CHANNELS)


def normal(d: Any) -> Any:
    """d by its root mean square along axis 1."""
    return d / ops.sqrt(ops.reduce_mean(d * d, [1]) + 1e-5)


def of_a_copy(a: Any, b: Any) -> Any:
    """Aᵀ B, with A transposed in memory first."""
    return ops.gemm(ops.transpose(a, perm=[1, 0]), b)


def attention_cases(rows: int, keys: tuple[int, int]) -> Iterator[Case]:
    """Attention and its other spellings; the causal ones are prefills, of more than one row."""
    attention, width = ops.scaled_dot_product_attention, FEATURES // HEADS
    q, mask = (1, rows, FEATURES), (1, 1, rows, keys[1])
    causals = (0, 1) if rows > 1 else (0,)
    for heads, softcap, masked, causal in itertools.product(
        (HEADS, GROUPS), (0.0, 30.0), (False, True), causals
    ):
        kv, split = (*keys, width * heads), (1, heads, keys[1], width)
        whole, flat = ((1, HEADS, rows, width), split, split), (q, kv, kv)
        how = {"is_causal": causal, "softcap": softcap}
        plain = flat_plain = None
        if masked:
            whole, flat = (*whole, mask), (*flat, mask)
            plain = partial(written_out, groups=HEADS // heads, **how)
            flat_plain = partial(on_heads, plain, heads)
        counts = {"q_num_heads": HEADS, "kv_num_heads": heads}
        yield Case(attention, partial(attention, **how), whole, plain)
        yield Case(attention, partial(attention, **how, **counts), flat, flat_plain)
        if heads == HEADS and not softcap:  # which MultiHeadAttention does not have
            yield Case(ops.multi_head_attention, partial(multi_head, causal), flat, flat_plain)
        if causal:
            call = partial(grouped, heads, softcap)
            yield Case(ops.group_query_attention, call, flat, flat_plain)


def multi_head(causal: int, q: Any, k: Any, v: Any, bias: Any = None) -> Any:
    """MultiHeadAttention, with a mask as its bias."""
    return ops.multi_head_attention(
        q, k, v, None, None, bias, num_heads=HEADS, unidirectional=causal
    )


def grouped(heads: int, softcap: float, q: Any, k: Any, v: Any, bias: Any = None) -> Any:
    """GroupQueryAttention of a whole prompt, with a mask as its bias."""
    last, total = np.array([q.shape[1] - 1], np.int32), np.array(q.shape[1], np.int32)
    inputs = (q, k, v, None, None, last, total, None, None, None, bias)
    return ops.group_query_attention(*inputs, num_heads=HEADS, kv_num_heads=heads, softcap=softcap)


def written_out(
    q: Any, k: Any, v: Any, mask: Any, *, groups: int, is_causal: int, softcap: float
) -> Any:
    """Attention as it is usually written, with a mask that is added."""
    k, v = (repeat_heads(x, groups) for x in (k, v))
    scores = q * (1 / math.sqrt(q.shape[-1])) @ swap_last(k)
    scores = (ops.softcap(scores, softcap) if softcap else scores) + mask
    if is_causal:
        scores = ops.where(causal_mask(q.shape[2], k.shape[2]), scores, -math.inf)
    return ops.softmax(scores) @ v


def on_heads(attend: Any, heads: int, q: Any, k: Any, v: Any, mask: Any) -> Any:
    """The same on (B, T, H·D)."""
    q, k, v = map(split_heads, (q, k, v), (HEADS, heads, heads))
    return merge_heads(attend(q, k, v, mask))


def models(case: Case, dtype: Any, times: int) -> tuple[ir.Node, str, list[ir.Model]]:
    """The operator's node, what its body consists of, and the two models, each several times."""
    op, _, shapes, written, _ = case
    specs = {}
    for name, shape in zip("abcd", shapes, strict=False):
        of = shape[0] if isinstance(shape[0], type) else dtype
        named = {np.int32: gg.int32, np.float16: gg.float16}.get(of, gg.float32)
        specs[name] = named[tuple(d for d in shape if isinstance(d, int))]

    def repeated(call: Any) -> ir.Model:
        return gg.build(lambda **x: {f"y{i}": call(*x.values()) for i in range(times)}, **specs)

    fused = repeated(case.call)
    [*_, node] = (n for n in fused.graph if find_op(n) is op)
    plain = fused.clone() if written is None else repeated(written)
    inner = {op, ops.scaled_dot_product_attention}

    def body(found: Op, node: ir.Node) -> list[Operand] | None:
        return bodies(found, node) if found in inner or found.domain == DOMAIN else None

    if written is None:
        replace_composites(plain.graph, infer_model(plain), body)
        tidy(plain)
    names = [n.op_type for n in plain.graph][: plain.graph.num_nodes() // times]
    attends = written is not None and op.name.endswith("Attention")
    long = "products, a sum and Softmax" if attends else "its body"
    told = " + ".join(names) if len(names) <= 3 else long
    if op is ops.group_query_attention:  # older runtimes want its caches too
        for each in [n for n in fused.graph if find_op(n) is op]:
            each.resize_outputs(3)
    return node, told, [fused, plain]


def session(model: ir.Model, provider: str) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 4
    name: Any = "CPUExecutionProvider"
    if provider == "cuda":
        ort.preload_dlls()
        name = "CUDAExecutionProvider", {"use_tf32": "0"}
    return ort.InferenceSession(to_bytes(model), options, providers=[name])


def measure(
    case: Case, rows: int, provider: str, dtype: Any, seconds: float, clock: Callable[[], float]
) -> tuple[str, str, float]:
    """The operator's form, what it stands for, and the median ratio of its time to that."""
    node, told, pair = models(case, dtype, max(1, 64 // rows))
    form = form_of(node, case.layout)
    sessions = [session(model, provider) for model in pair]
    rng = np.random.default_rng(0)
    feeds = {
        str(value.name): (
            rng.standard_normal(value.shape.numpy(), np.float32).astype(value.dtype.numpy())
            if value.dtype.is_floating_point()
            else rng.integers(0, 1000, value.shape.numpy(), value.dtype.numpy())
        )
        for value in pair[0].graph.inputs
        if value.shape is not None and value.dtype is not None
    }
    runs = [partial(each.run, None, feeds) for each in sessions]
    if provider == "cuda":  # else copies take most of the time
        runs = [bound_run(each, feeds, provider) for each in sessions]
    ratios, stop = [], time.perf_counter() + seconds
    while len(ratios) < 5 or (time.perf_counter() < stop and len(ratios) < 500):
        order = (0, 1) if len(ratios) % 2 else (1, 0)
        took = [0.0, 0.0]
        for i in order:
            start = clock()
            runs[i]()
            took[i] = clock() - start
        ratios.append(took[0] / took[1])
    return form, told, round(statistics.median(ratios[2:]), 2)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--provider", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", choices=("float", "float16"), default="float")
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument(
        "--processor",
        choices=get_args(Instructions),
        help="whose figures they are (this machine's)",
    )
    parser.add_argument("--only", default="", help="forms that begin like this")
    parser.add_argument("--seconds", type=float, default=1.0, help="for each figure (1)")
    parser.add_argument("--cpu-time", action="store_true", help="not the wall's: for busy machines")
    parser.add_argument("--output", type=Path, help="the table to put the figures into")
    args = parser.parse_args()
    dtype = {"float": np.float32, "float16": np.float16}[args.dtype]
    found: dict[str, dict[str, Any]] = {}
    clock = time.process_time if args.cpu_time else time.perf_counter
    console = Console()
    for rows in args.rows:
        for case in cases(rows, dtype):
            if not case[0].name.startswith(args.only.split(" ")[0]):
                continue
            form, told, ratio = measure(case, rows, args.provider, dtype, args.seconds, clock)
            if not form.startswith(args.only):
                continue
            found.setdefault(form, {"instead_of": told})[str(rows)] = ratio
    machine = device_name(args.provider)
    table = Table(title=f"time over that of the body, {args.dtype}, {machine}")
    for column in ("operator", "instead of", *map(str, args.rows)):
        table.add_column(column)
    for form, row in found.items():
        figures = [f"{row[str(n)]:.2f}" if str(n) in row else "" for n in args.rows]
        table.add_row(form, row["instead_of"], *figures)
    console.print(table)
    if args.output is not None:
        kept = json.loads(args.output.read_text("utf-8")) if args.output.exists() else {}
        where = "cuda" if args.provider == "cuda" else args.processor or instructions()
        by_dtype = kept.setdefault(where, {})
        here = {"machine": machine, "onnxruntime": ort.__version__, "threads": 1}
        old = by_dtype.get(args.dtype, {})
        day = {"date": date.today().isoformat()}
        same = old.items() >= here.items()
        ratios = old.get("ratios", {}) if same or args.only else {}
        whose = {} if same or not ratios else {"machine": machine, **day}
        for form, row in found.items():
            ratios[form] = {**ratios.get(form, {}), **row, **whose}
        by_dtype[args.dtype] = {**(old if whose else here | day), "ratios": ratios}
        beside = args.output.with_name(f"{args.output.name}.{os.getpid()}")
        beside.write_text(json.dumps(kept, indent=1) + "\n", "utf-8")
        beside.replace(args.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
