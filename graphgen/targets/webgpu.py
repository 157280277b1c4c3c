"""What kernels of WebGPU get wrong, refuse at the run or crash on: one table for all uses.

A session tells it when it opens, and the target `webgpu` has no kernel for such a node. Known of
the version of onnxruntime-ep-webgpu that the table of kernels names, by `bisect --against webgpu`
and by each of ONNX's own tests. Of any other version a session says that it is not known.
"""

import os
import re
from collections import Counter
from typing import Any

import onnx_ir as ir

from graphgen.providers import WEBGPU, placement
from graphgen.targets.faults import (
    ENDS,
    FAILS,
    WRONG,
    Fault,
    number_of,
    numbers,
    operand,
    sizes_of,
    told,
    trains,
)
from graphgen.targets.tables import committed

_ATTENDS = re.compile(r".*(Head|Query)Attention")


def _broadcasts_last(node: ir.Node) -> str | None:
    """Only one operand repeats along the last axis, by a multiple of 4 (plugin 0.4.0).

    Pow then fails. And keeps one shader for such an operand on either side, and for none: whichever
    runs first in the process is right.
    """
    sizes = [sizes_of(node, i) for i in range(2)]
    if any(s is None or len(s) == 0 or s == [1] for s in sizes):
        return None
    last = [s[-1] for s in sizes if s is not None]
    if last.count(1) != 1 or any(isinstance(n, int) and n > 1 and n % 4 for n in last):
        return None
    return "that broadcasts along the last axis"


def _turns_a_part(node: ir.Node) -> str | None:
    """A step back from any element but the last one starts elsewhere (plugin 0.4.0)."""
    starts, steps = numbers(node, 1), numbers(node, 4)
    back = [i for i, step in enumerate(steps or ()) if step < 0]
    if not back:
        return None
    sizes, axes = sizes_of(node, 0), numbers(node, 3)
    for i in back:
        size = None if sizes is None else sizes[i if axes is None else int(axes[i])]
        first = None if starts is None else starts[i]
        last = first == -1 or (first or 0) >= (size - 1 if isinstance(size, int) else 2**31 - 1)
        if not last:
            return "that goes back from within"
    return None


def _reduces_nothing(node: ir.Node) -> str | None:
    """Without axes, WebGPU gives x itself, not its size or square (plugin 0.4.0)."""
    none = operand(node, 1) is None or numbers(node, 1) == []
    kept = node.attributes.get_int("noop_with_empty_axes", 0) != 0
    return "over no axes" if none and kept else None


def _gives_the_root(node: ir.Node) -> str | None:
    """The second result is the root mean square, not 1 over it (plugin 0.4.0)."""
    return "with a second result" if any(y.name for y in node.outputs[1:]) else None


def _scales_broadcast(node: ir.Node) -> str | None:
    """The run fails: "Size of scale and bias (if provided) must match" (plugin 0.4.0)."""
    axis = node.attributes.get_int("axis", -1)
    row, *others = (sizes_of(node, i) for i in range(3))
    sizes = [number_of(row and row[axis:]), *map(number_of, others)]
    return "with a scale that broadcasts" if len({*sizes} - {None}) > 1 else None


def _adds_a_scalar(node: ir.Node) -> str | None:
    """With C of rank 0, WebGPU's kernel ends the process from 16 rows on (plugin 0.4.0)."""
    return "with C of rank 0" if sizes_of(node, 2) == [] else None


def _pads_the_end(node: ir.Node) -> str | None:
    """Windows of one element are read as products, which leaves pads at the end out (0.4.0)."""
    weights, pads = sizes_of(node, 1), node.attributes.get_ints("pads", ())
    half = len(pads) // 2
    one = weights is not None and all(n == 1 for n in weights[2:])
    ends = one and not any(pads[:half]) and any(pads[half:])
    return "of one element with pads at the end" if ends else None


def _has_space(node: ir.Node) -> str | None:
    """The run fails: "Only Conv2d or Conv1d are supported" (WebGPU, plugin 0.4.0)."""
    sizes = sizes_of(node, 0) or sizes_of(node, 1) or []
    return "of three spatial axes" if len(sizes) == 5 else None


def _tells_places(node: ir.Node) -> str | None:
    """The run fails: "The Indices output is not supported yet" (WebGPU, plugin 0.4.0)."""
    return "with indices" if any(y.name for y in node.outputs[1:]) else None


def _resizes_channels(node: ir.Node) -> str | None:
    """Of four axes, the second is not taken for one of an image (WebGPU, plugin 0.4.0)."""
    x, y = sizes_of(node, 0), node.outputs[0].shape
    if node.attributes.get_string("mode", "nearest") == "nearest" or x is None or len(x) != 4:
        return None
    axes, scales = node.attributes.get_ints("axes", range(4)), numbers(node, 2)
    if scales:
        kept = all(s == 1 for s, axis in zip(scales, axes, strict=True) if axis % 4 == 1)
    else:
        kept = y is None or not (isinstance(x[1], int) and isinstance(y[1], int) and x[1] != y[1])
    return None if kept else "along the second axis"


def _has_wide_groups(node: ir.Node) -> str | None:
    """A group that is wider than the product is read beyond its end (WebGPU, plugin 0.4.0)."""
    width, group = (node.attributes.get_int(name, 0) for name in ("K", "block_size"))
    return f"of {width} inputs in groups of {group}" if width < group else None


def _splits_widely(node: ir.Node) -> str | None:
    """The run fails: one buffer a part, and devices bind few, the software one 12 (0.4.0)."""
    parts = len(node.outputs)
    return f"into {parts} parts" if parts > 11 else None


def _mixes_channels(node: ir.Node) -> str | None:
    """WebGPU's kernel reads three channels at a time, of the wrong ones (plugin 0.4.0)."""
    # Where 3 divides the channels, and 4 only those of the result (onnxruntime #29651). Windows of
    # one element are products, and right.
    sizes = sizes_of(node, 1) or []
    if node.attributes.get_int("group", 1) > 1 or not 3 <= len(sizes) <= 4:
        return None
    strides, pads = (node.attributes.get_ints(name, ()) for name in ("strides", "pads"))
    if not any(pads) and all(n == 1 for n in (*sizes[2:], *strides)):
        return None
    to, channels = sizes[:2]
    if not isinstance(channels, int) or channels <= 3 or channels % 3 or channels % 4 == 0:
        return None
    return None if isinstance(to, int) and to % 4 else f"of {channels} channels to {to}"


def _has_groups_in_space(node: ir.Node) -> str | None:
    """The run fails: "Conv3D does not support grouped convolution" (WebGPU, plugin 0.4.0)."""
    x, weights = operand(node, 0), operand(node, 1)
    ranks = {len(v.shape) for v in (x, weights) if v is not None and v.shape is not None}
    grouped = node.attributes.get_int("group", 1) > 1
    return "of three spatial axes in groups" if grouped and 5 in ranks else None


def _is_capped(node: ir.Node) -> str | None:
    """WebGPU leaves the softcap out and says nothing (plugin 0.4.0)."""
    return "with a softcap" if node.attributes.get_float("softcap", 0.0) != 0.0 else None


def _caches_few_bits(node: ir.Node) -> str | None:
    """The run fails where keys and values are integers (WebGPU, plugin 0.4.0)."""
    few = node.attributes.get_int("kv_cache_bit_width", 0)
    return f"with a cache of {few} bits" if few else None


def _loses_its_past(node: ir.Node) -> str | None:
    """WebGPU leaves out the past unless the node has both presents (plugin 0.4.0)."""
    presents = [y for y in node.outputs[1:3] if y.name != ""]
    lost = operand(node, 6) is not None and len(presents) < 2
    return "with a past and without both presents" if lost else None


def _hides_padding(node: ir.Node) -> str | None:
    """The run fails: "`key_padding_mask` not implemented for webgpu" (plugin 0.4.0)."""
    return "with a mask of padding" if operand(node, 4) is not None else None


def _has_no_bias(node: ir.Node) -> str | None:
    """Without a bias, WebGPU's kernel ends the process (plugin 0.4.0)."""
    return "without a bias" if operand(node, 2) is None else None


def _overflows(node: ir.Node) -> str | None:
    """WebGPU adds up exponentials as they are: numbers above 88 give infinity (plugin 0.4.0)."""
    return "of numbers above 88"


def _powers_as_floats(node: ir.Node) -> str | None:
    """WebGPU calculates powers of integers in float32: 7⁹ is off by 27 (plugin 0.4.0)."""
    x = operand(node, 0)
    return "of integers" if x is not None and x.dtype is not None and x.dtype.is_integer() else None


def _cancels(node: ir.Node) -> str | None:
    """WebGPU takes ln(x + √(x² + 1)) as it is: -88 for -10,000, not -9.9 (plugin 0.4.0)."""
    return "of negative numbers"


def _is_near(node: ir.Node) -> str | None:
    """WebGPU's language bounds their error by 2⁻¹¹ from -π to π, and not at all beyond."""
    return "to more than 2⁻¹¹"


def _is_near_too(node: ir.Node) -> str | None:
    """WebGPU's language lets their error be 7e-5, and 5e-4 of the angle."""
    return "to more than 7e-5"


def _smooths(node: ir.Node) -> str | None:
    """The run fails: "the antialias attribute … is NOT implemented" (WebGPU, plugin 0.4.0)."""
    return "with antialias" if node.attributes.get_int("antialias", 0) else None


FAULTS: dict[tuple[str, str], list[Fault]] = {
    **{("", name): [Fault(_is_near)] for name in ("Sin", "Cos", "Tan")},
    **{("", name): [Fault(_is_near_too)] for name in ("Asin", "Acos", "Atan")},
    ("", "Asinh"): [Fault(_cancels, WRONG)],
    ("", "Pow"): [Fault(_powers_as_floats, WRONG), Fault(_broadcasts_last, FAILS)],
    ("", "And"): [Fault(_broadcasts_last, WRONG)],
    ("", "Slice"): [Fault(_turns_a_part, WRONG)],
    ("", "Split"): [Fault(_splits_widely, FAILS)],
    ("", "Gemm"): [Fault(_adds_a_scalar, ENDS)],
    **{
        ("", name): [Fault(_reduces_nothing, WRONG)]
        for name in ("ReduceL1", "ReduceL2", "ReduceSumSquare", "ReduceLogSum")
    },
    ("", "LayerNormalization"): [Fault(_scales_broadcast, FAILS)],
    ("", "SimplifiedLayerNormalization"): [Fault(_gives_the_root, WRONG)],
    ("", "ReduceLogSumExp"): [Fault(_overflows, WRONG)],
    ("", "Conv"): [
        Fault(_mixes_channels, WRONG),
        Fault(_pads_the_end, WRONG),
        Fault(_has_groups_in_space, FAILS),
    ],
    ("com.microsoft", "FusedConv"): [Fault(_mixes_channels, WRONG), Fault(_pads_the_end, WRONG)],
    ("", "ConvTranspose"): [Fault(_has_space, FAILS)],
    ("", "MaxPool"): [Fault(_tells_places, FAILS)],
    ("com.microsoft", "MatMulNBits"): [Fault(_has_wide_groups, WRONG)],
    ("", "BatchNormalization"): [Fault(trains, FAILS)],
    ("", "Resize"): [Fault(_smooths, FAILS), Fault(_resizes_channels, WRONG)],
    ("com.microsoft", "Attention"): [Fault(_has_no_bias, ENDS)],
    ("com.microsoft", "MultiHeadAttention"): [
        Fault(_loses_its_past, WRONG),
        Fault(_hides_padding, FAILS),
    ],
    ("com.microsoft", "GroupQueryAttention"): [
        Fault(_is_capped, WRONG),
        Fault(_caches_few_bits, FAILS),
    ],
}


def _unknown(device: Any) -> list[str]:
    """That these kernels are of a version that nobody has examined, if they are."""
    package, known = committed("webgpu")["source"].split()[-2:]
    version = "" if device is None else device.ep_metadata.get("version", "")
    if version == known:
        return []
    other = version or "a runtime that has WebGPU built in"
    return [
        f"graphgen knows the kernels of {package} {known}, not those of {other}: some may be "
        "missing, or wrong without an error; check with `graphgen bisect MODEL --against webgpu`"
    ]


def faults(who: str, model: str | os.PathLike[str] | bytes, device: Any, session: Any) -> list[str]:
    """What a session gets wrong on WebGPU, or fails on, a line each.

    `device` is the plugin's, or None where the provider is built in. Raises GraphgenError for a
    node that would end the process.
    """
    there = Counter(op_type for op_type, _ in placement(session).get(WEBGPU, ()))
    attend = {op_type: n for op_type, n in there.items() if _ATTENDS.fullmatch(op_type)}
    found = _unknown(device) if there else []
    if attend and device is not None and device.device.type.name == "CPU":
        problem = "this WebGPU device is software, where attention of 32 queries or more is wrong"
        some = ", ".join(f"{n} {op_type}" for op_type, n in attend.items())
        found.append(f"{problem}: {some}; use it for shorter inputs only")
    return found + told(who, "WebGPU", FAULTS, model, there)
