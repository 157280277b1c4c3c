"""Kernels of ONNX Runtime, by operator: what they refuse, and how they were measured."""

import json
import math
from collections.abc import Callable
from functools import cache, wraps
from importlib.resources import files
from typing import Any, NamedTuple

import onnx_ir as ir

from graphgen.infer import describe, same_dim
from graphgen.match import CHANNELS
from graphgen.processor import processor
from graphgen.targets import cpu, cuda, webgpu
from graphgen.targets.faults import Fault, operand

EIGHT_BITS = (1, 23)
"""The first version whose MatMulNBits multiplies weights of eight bits."""


class Runtime(NamedTuple):
    """Whose kernels: `cpu`, `cuda` or `webgpu`, of a version such as (1, 20)."""

    provider: str
    version: tuple[int, ...]


def _is_empty(node: ir.Node, at: Runtime) -> str | None:
    """Attention needs sizes above 0; before 1.29, MultiHeadAttention crashed the process."""
    if node.domain and at.version >= (1, 29):
        return None
    shapes = [_shape_of_input(node, i) for i in range(3)]
    return "of an empty tensor" if any(s is not None and 0 in s.dims for s in shapes) else None


def _mask_broadcasts(node: ir.Node, at: Runtime) -> str | None:
    """The mask is read by the sizes of Q and K: its last two must be full; (B, 1, 1, S) fails."""
    mask, *others = (_shape_of_input(node, i) for i in (3, 0, 1))
    if mask is None:
        return None
    wanted = [None if shape is None else shape[-2] for shape in others]
    ones = len(mask) < 2 or any(m == 1 != w for m, w in zip(mask[-2:], wanted, strict=True))
    return f"with a mask that broadcasts, {list(mask)}" if ones else None


def _rows_are_not_zero(node: ir.Node, at: Runtime) -> str | None:
    """Before 1.28, a row that the mask hides entirely gives the mean of V, or NaN."""
    old = at.version < (1, 28) and _shape_of_input(node, 3) is not None
    return "with a mask that may hide all keys" if old else None


def _is_packed(node: ir.Node, at: Runtime) -> str | None:
    """Q, K and V in one tensor, or K and V: the schema has it, but the CPU's kernel does not."""
    packed = len([x for x in node.inputs[:3] if x is not None]) < 3
    return "with packed operands" if packed and at.provider != "cuda" else None


def _caches_broadcast(node: ir.Node, at: Runtime) -> str | None:
    """Without positions, the caches need a row of angles for each place in the batch."""
    x, cos, sin = (_shape_of_input(node, i) for i in range(3))
    if (len(node.inputs) > 3 and node.inputs[3] is not None) or x is None:
        return None
    wanted = [x[0], x[1 if len(x) == 3 else 2]]
    full = all(c is not None and all(map(same_dim, c.dims[:2], wanted)) for c in (cos, sin))
    return None if full else f"with caches that broadcast, {describe(node.inputs[1])}"


def _is_double(node: ir.Node, at: Runtime) -> str | None:
    """Registered for it, but "does not support double yet" (1.19 to 1.32)."""
    x = node.inputs[0]
    double = x is not None and x.dtype == ir.DataType.DOUBLE
    return "in float64" if double and at.provider == "cpu" else None


def _is_turned(node: ir.Node, at: Runtime) -> str | None:
    """The batch first: "Batchwise recurrent operations (layout == 1) are not supported"."""
    turned = node.attributes.get_int("layout", 0) != 0 and at.provider != "webgpu"
    return "with layout 1" if turned else None


def _has_eight_bits(node: ir.Node, at: Runtime) -> str | None:
    """Eight bits a weight: before 1.23 the file does not load, or the run ends in an error."""
    old = at.provider != "webgpu" and at.version < EIGHT_BITS
    return "with eight bits" if old and node.attributes.get_int("bits", 4) == 8 else None


def _shape_of_input(node: ir.Node, index: int) -> ir.Shape | None:
    value = operand(node, index)
    return None if value is None else value.shape


REFUSED: dict[tuple[str, str], list[Callable[[ir.Node, Runtime], str | None]]] = {
    ("", "Attention"): [_is_empty, _mask_broadcasts, _rows_are_not_zero],
    ("", "RotaryEmbedding"): [_caches_broadcast],
    ("", "RNN"): [_is_turned],
    ("", "LSTM"): [_is_double, _is_turned],
    ("", "GRU"): [_is_double, _is_turned],
    ("com.microsoft", "MultiHeadAttention"): [_is_empty, _is_packed],
    ("com.microsoft", "MatMulNBits"): [_has_eight_bits],
}
"""What kernels refuse though schemas and type constraints allow it; a test checks each."""


def _on(provider: str, fault: Fault) -> Callable[[ir.Node, Runtime], str | None]:
    """What a session is told of the provider's kernels, as what they refuse."""

    @wraps(fault.of)
    def refused(node: ir.Node, at: Runtime) -> str | None:
        return fault.of(node) if at.provider == provider else None

    return refused


for _name, _faults in {"cpu": cpu.FAULTS, "cuda": cuda.FAULTS, "webgpu": webgpu.FAULTS}.items():
    for _key, _known in _faults.items():
        REFUSED.setdefault(_key, []).extend(_on(_name, fault) for fault in _known)


_MASK = {"Attention": 3, "MultiHeadAttention": 5, "GroupQueryAttention": 10}
"""Which input is added to the scores, or keeps some of them."""


def form_of(node: ir.Node, layout: str = "") -> str:
    """The row of graphgen/targets/pays.json: the operator, and for attention how it is called."""
    given = {name: attr.value for name, attr in node.attributes.items()}
    if layout:
        return f"{node.op_type} {layout}"
    if given.get("transA"):
        return f"{node.op_type} transA"
    if not node.op_type.endswith("Attention"):
        return f"{node.op_type} tanh" if given.get("approximate") == "tanh" else node.op_type
    shapes = [_shape_of_input(node, i) for i in range(2)]
    split = all(shape is not None and len(shape) == 4 for shape in shapes)
    query, key = given.get("q_num_heads", given.get("num_heads")), given.get("kv_num_heads")
    if split:
        query, key = (shape[1] for shape in shapes if shape is not None)
    causal = given.get("is_causal") or given.get("unidirectional") or "Group" in node.op_type
    traits = {"causal": causal, "grouped": key and key != query, "4D": split}
    traits["softcap"] = given.get("softcap")
    mask = node.inputs[_MASK[node.op_type] :][:1] if node.op_type in _MASK else ()
    traits["masked"] = any(x is not None for x in mask)
    return " ".join([node.op_type, *(trait for trait, has in traits.items() if has)])


def unit_of(form: str, count: int) -> str:
    """What `rows_of` counts: `rows`, or `row`."""
    units = {"transA": "columns", CHANNELS: CHANNELS}
    return units.get(form.rpartition(" ")[2], "rows").removesuffix("s" * (count == 1))


def rows_of(node: ir.Node, layout: str = "") -> int | None:
    """The product of the result's sizes except the last; for attention, the number of queries.

    For a product of Aᵀ it is the smaller size: so many columns are read again and again. For a norm
    along channels it is their number.
    """
    shape = node.outputs[0].shape
    if shape is None or len(shape) < 2:
        return None
    if layout == CHANNELS:
        summed = shape[node.attributes.get_int("axis", -1) :]
        return math.prod(d for d in summed if isinstance(d, int))  # all are known
    if node.attributes.get_int("transA", 0):
        return min((d for d in shape if isinstance(d, int)), default=None)
    sizes = shape.dims[-2:-1] if node.op_type.endswith("Attention") else shape.dims[:-1]
    known = [d for d in sizes if isinstance(d, int)]
    return math.prod(known) if len(known) == len(sizes) else None


@cache
def measured() -> dict[str, Any]:
    """Figures of bench/pays.py: by `avx2`, `avx512` or `cuda`, by dtype: whose, and the ratios."""
    table: dict[str, Any] = json.loads(
        files("graphgen.targets").joinpath("pays.json").read_text("utf-8")
    )
    return table


_GAINS = 0.8  # of the operator's time, after 4,096 positions: after 1,024 it gains less


def products_pay(queries: int, features: int) -> bool:
    """Whether an int8 cache is read faster by products of integers, to one more token.

    `queries` heads share one of keys, with that many features; between two measured sizes, both
    have to be faster. Figures of bench/int8_cache.py, for processors that have the same products of
    int8 as this one.
    """
    text = files("graphgen.targets").joinpath("int8_cache.json").read_text("utf-8")
    known = json.loads(text).get(processor().int8, {}).get("ratios", {})
    sizes = sorted(map(int, known))
    around = {max((s for s in sizes if s <= features), default=0)}
    around.add(min((s for s in sizes if s >= features), default=0))
    ratios = list[float]()
    for size in around:
        rows = {int(n): ratio for n, ratio in known.get(str(size), {}).items()}
        ratios.append(rows.get(max((n for n in rows if n <= queries), default=0), 1.0))
    return max(ratios) <= _GAINS


def ratios_of(node: ir.Node, where: str, layout: str = "") -> tuple[str, dict[int, float]]:
    """What a node was measured against, and its time relative to that, by rows.

    `where` is `avx2`, `avx512` or `cuda`. What was not measured with a mask counts without one.
    """
    y = node.outputs[0]
    dtype = y.dtype.name.lower() if y.dtype is not None else ""
    known = measured().get(where, {}).get(dtype, {}).get("ratios", {})
    form = form_of(node, layout)
    row = dict(known.get(form) or known.get(form.removesuffix(" masked"), {}))
    instead_of = row.pop("instead_of", "")
    ratios = {int(rows): ratio for rows, ratio in row.items() if rows.isdecimal()}
    rows = rows_of(node, layout)
    if rows is not None and ratios:
        near = min(ratios, key=lambda n: abs(math.log(n / max(rows, 1))))
        ratios = {near: ratios[near]}
    return instead_of, ratios
