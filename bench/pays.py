"""Which fused operators pay? Each against the nodes it stands for, by provider, dtype and rows.

The operator and its body run in turn in one process, with the runtime's own optimizations off, so
that each runs as it is written. A figure is the median over the rounds of the operator's time over
the body's: below 1 the operator is faster. The body is inlined one level only, so that attention's
keeps Softmax, and SkipLayerNormalization's is Add and LayerNormalization. Other spellings of
attention are measured against the same body.

Rows are the product of the result's sizes except the last; for attention, the queries. The sizes
are those of BERT-base and of a GPT of 12 heads; grouped ones have 4 heads of keys. The results
replace figures in graphgen/targets/pays.json, which `optimize` reads; figures of another machine or
runtime are dropped. For your own machine:

    python bench/pays.py --output graphgen/targets/pays.json
"""

import argparse
import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
from rich.console import Console
from rich.table import Table

import graphgen as gg
from graphgen import ops
from graphgen.edit import infer_model, replace_composites, tidy
from graphgen.export.write import to_bytes
from graphgen.graph import bodies
from graphgen.infer import DOMAIN
from graphgen.op import Op, find_op
from graphgen.processor import processor
from graphgen.record import Operand
from graphgen.targets.kernels import form_of

ROWS = (1, 128, 512, 2048)
FEATURES, HEADS, GROUPS, WIDE = 768, 12, 4, 3072
MICROSOFT = "com.microsoft"

Case = tuple[Op, Callable[..., Operand], tuple[tuple[Any, ...], ...]]
"""The operator, its call, and the shapes of what it is called on; those of dtype float first."""


def cases(rows: int, dtype: Any) -> Iterator[Case]:
    """Every operator, and how it is called at these rows."""
    gain, shift, bias = np.ones(FEATURES, dtype), np.zeros(FEATURES, dtype), np.ones(WIDE, dtype)
    x, wide, keys = (1, rows, FEATURES), (1, rows, WIDE), (1, max(rows, 128))
    yield ops.softmax, ops.softmax, ((1, HEADS, rows, keys[1]),)
    yield (
        ops.layer_normalization,
        lambda x: ops.layer_normalization(x, gain, shift),
        (x,),
    )
    yield ops.rms_normalization, lambda x: ops.rms_normalization(x, gain), (x,)
    yield ops.gelu, ops.gelu, (wide,)
    yield ops.gelu, lambda x: ops.gelu(x, approximate="tanh"), (wide,)
    yield ops.quick_gelu, ops.silu, (wide,)
    skip, skip_rms = ops.contrib.skip_layer_normalization, ops.contrib.skip_rms_normalization
    yield skip, lambda x, y: skip(x, y, gain, shift), (x, x)
    yield skip_rms, lambda x, y: skip_rms(x, y, gain), (x, x)
    yield ops.contrib.bias_gelu, lambda x: ops.contrib.bias_gelu(x, bias), (wide,)
    yield (
        ops.rotary_embedding,
        lambda x, cos, sin: ops.rotary_embedding(x, cos, sin, num_heads=HEADS),
        (x, *[(1, rows, FEATURES // HEADS // 2)] * 2),
    )
    words = np.ones((WIDE, FEATURES), dtype)
    yield (
        ops.contrib.embed_layer_normalization,
        lambda ids: ops.contrib.embed_layer_normalization(
            ids, None, words, words[:rows], None, gain, shift
        ),
        ((np.int32, 1, rows),),
    )
    matrix = np.ones((FEATURES, WIDE), dtype)
    yield ops.gemm, lambda x: ops.gemm(x, matrix, bias), ((rows, FEATURES),)
    yield from attention_cases(rows, keys)


def attention_cases(rows: int, keys: tuple[int, int]) -> Iterator[Case]:
    """Attention and its other spellings; the causal ones are prefills, of more than one row."""
    attention = ops.scaled_dot_product_attention
    q, width = (1, rows, FEATURES), FEATURES // HEADS
    for heads, softcap in itertools.product((HEADS, GROUPS), (0.0, 30.0)):
        kv, split = (*keys, width * heads), (1, heads, keys[1], width)
        for causal in (0, 1) if rows > 1 else (0,):
            given = {"is_causal": causal, "softcap": softcap}
            flat = {"q_num_heads": HEADS, "kv_num_heads": heads, **given}
            yield attention, lambda q, k, v, a=flat: attention(q, k, v, **a), (q, kv, kv)
            yield (
                attention,
                lambda q, k, v, a=given: attention(q, k, v, **a),
                ((1, HEADS, rows, width), split, split),
            )
            if heads == HEADS and not softcap:  # which MultiHeadAttention does not have
                multi = {"num_heads": HEADS, "unidirectional": causal}
                yield (
                    ops.multi_head_attention,
                    lambda q, k, v, a=multi: ops.multi_head_attention(q, k, v, **a),
                    (q, kv, kv),
                )
            if causal:
                grouped = {"num_heads": HEADS, "kv_num_heads": heads, "softcap": softcap}
                last = np.array([rows - 1], np.int32)
                total = np.array(rows, np.int32)
                yield (
                    ops.group_query_attention,
                    lambda q, k, v, a=grouped, n=last, t=total: ops.group_query_attention(
                        q, k, v, None, None, n, t, **a
                    ),
                    (q, kv, kv),
                )


def models(case: Case, dtype: Any, times: int) -> tuple[ir.Node, str, list[ir.Model]]:
    """The operator's node, what its body consists of, and the two models, each several times."""
    op, call, shapes = case
    specs = {}
    for name, shape in zip(("a", "b", "c"), shapes, strict=False):
        of = shape[0] if isinstance(shape[0], type) else dtype
        named = {np.int32: gg.int32, np.float16: gg.float16}.get(of, gg.float32)
        specs[name] = named[tuple(d for d in shape if isinstance(d, int))]

    def repeated(**inputs: Any) -> dict[str, Any]:
        return {f"y{i}": call(*inputs.values()) for i in range(times)}

    fused = gg.build(repeated, **specs)
    [*_, node] = (n for n in fused.graph if find_op(n) is op)
    plain = fused.clone()
    inner = {op, ops.scaled_dot_product_attention}

    def body(found: Op, node: ir.Node) -> list[Operand] | None:
        return bodies(found, node) if found in inner or found.domain == DOMAIN else None

    replace_composites(plain.graph, infer_model(plain), body)
    tidy(plain)
    names = [n.op_type for n in plain.graph][: plain.graph.num_nodes() // times]
    told = " + ".join(names) if len(names) <= 3 else "its body"
    if op is ops.group_query_attention:  # older runtimes want its caches too
        for each in [n for n in fused.graph if find_op(n) is op]:
            each.resize_outputs(3)
    return node, told, [fused, plain]


def session(model: ir.Model, provider: str) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 4
    name = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}[provider]
    return ort.InferenceSession(to_bytes(model), options, providers=[name])


def measure(
    case: Case, rows: int, provider: str, dtype: Any, seconds: float
) -> tuple[str, str, float]:
    """The operator's form, what it stands for, and the median ratio of its time to that."""
    node, told, pair = models(case, dtype, max(1, 64 // rows))
    form = form_of(node)
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
    ratios, stop = [], time.perf_counter() + seconds
    while len(ratios) < 5 or (time.perf_counter() < stop and len(ratios) < 500):
        order = (0, 1) if len(ratios) % 2 else (1, 0)
        took = [0.0, 0.0]
        for i in order:
            start = time.perf_counter()
            sessions[i].run(None, feeds)
            took[i] = time.perf_counter() - start
        ratios.append(took[0] / took[1])
    return form, told, round(statistics.median(ratios[2:]), 2)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--provider", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", choices=("float", "float16"), default="float")
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("--only", default="", help="forms that begin like this")
    parser.add_argument("--seconds", type=float, default=1.0, help="for each figure (1)")
    parser.add_argument("--output", type=Path, help="the table to put the figures into")
    args = parser.parse_args()
    dtype = {"float": np.float32, "float16": np.float16}[args.dtype]
    found: dict[str, dict[str, Any]] = {}
    console = Console()
    for rows in args.rows:
        for case in cases(rows, dtype):
            if not case[0].name.startswith(args.only):
                continue
            form, told, ratio = measure(case, rows, args.provider, dtype, args.seconds)
            found.setdefault(form, {"instead_of": told})[str(rows)] = ratio
    table = Table(title=f"time over that of the body, {args.provider} {args.dtype}, {processor()}")
    for column in ("operator", "instead of", *map(str, args.rows)):
        table.add_column(column)
    for form, row in found.items():
        figures = [f"{row[str(n)]:.2f}" if str(n) in row else "" for n in args.rows]
        table.add_row(form, row["instead_of"], *figures)
    console.print(table)
    if args.output is not None:
        kept = json.loads(args.output.read_text("utf-8")) if args.output.exists() else {}
        by_dtype = kept.setdefault(args.provider, {})
        here = {"machine": str(processor()), "onnxruntime": ort.__version__, "threads": 1}
        old = by_dtype.get(args.dtype, {})
        ratios = old.get("ratios", {}) if old.items() >= here.items() else {}
        for form, row in found.items():
            ratios[form] = {**ratios.get(form, {}), **row}
        by_dtype[args.dtype] = {**here, "date": date.today().isoformat(), "ratios": ratios}
        beside = args.output.with_name(f"{args.output.name}.{os.getpid()}")
        beside.write_text(json.dumps(kept, indent=1) + "\n", "utf-8")
        beside.replace(args.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
