"""What kernels of WebGPU get wrong, refuse at the run or crash on: one table for all uses.

A session tells it when it opens, and the target `webgpu` has no kernel for such a node. Known of
the version of onnxruntime-ep-webgpu that the table of kernels names, by `bisect --against webgpu`
and by each of ONNX's own tests. Of any other version a session says that it is not known.
"""

import os
import re
from collections import Counter
from collections.abc import Callable
from itertools import chain
from typing import Any, NamedTuple

import onnx_ir as ir

from graphgen.errors import GraphgenError
from graphgen.providers import WEBGPU, placement, typed_proto_of
from graphgen.targets.tables import committed

_ATTENDS = re.compile(r".*(Head|Query)Attention")


def operand(node: ir.Node, index: int) -> ir.Value | None:
    """The input of a node, None if it is left out."""
    return node.inputs[index] if len(node.inputs) > index else None


def _mixes_channels(node: ir.Node) -> str | None:
    """WebGPU's kernel reads three channels at a time, of the wrong ones (plugin 0.4.0)."""
    # Where 3 divides the channels, and 4 only those of the result (onnxruntime #29651). Windows of
    # one element are products, and right.
    weights = operand(node, 1)
    sizes = [] if weights is None or weights.shape is None else [*weights.shape]
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
    """WebGPU takes ln(x + √(x² + 1)) as it is: -88 for -10,000, where -9.9 is right."""
    return "of negative numbers"


def _is_near(node: ir.Node) -> str | None:
    """WebGPU's language bounds their error by 2⁻¹¹ from -π to π, and not at all beyond."""
    return "to more than 2⁻¹¹"


def _is_near_too(node: ir.Node) -> str | None:
    """WebGPU's language lets their error be 7e-5, and 5e-4 of the angle."""
    return "to more than 7e-5"


def _trains(node: ir.Node) -> str | None:
    """The run fails: "trainingMode is not supported yet" (WebGPU, plugin 0.4.0)."""
    return "in training mode" if node.attributes.get_int("training_mode", 0) else None


def _smooths(node: ir.Node) -> str | None:
    """The run fails: "the antialias attribute … is NOT implemented" (WebGPU, plugin 0.4.0)."""
    return "with antialias" if node.attributes.get_int("antialias", 0) else None


class Fault(NamedTuple):
    """Which nodes of an operator it is about, and what a session tells of them, if anything."""

    of: Callable[[ir.Node], str | None]
    effect: str = ""


_DO = "optimize the model for this provider, or run it on the CPU"
_WRONG = "WebGPU gets {} wrong, without an error; " + _DO
_FAILS = "WebGPU has no kernel for {}, and the run fails; " + _DO
_ENDS = "WebGPU's kernel of {} ends the process; " + _DO

FAULTS: dict[tuple[str, str], list[Fault]] = {
    **{("", name): [Fault(_is_near)] for name in ("Sin", "Cos", "Tan")},
    **{("", name): [Fault(_is_near_too)] for name in ("Asin", "Acos", "Atan")},
    ("", "Asinh"): [Fault(_cancels, _WRONG)],
    ("", "Pow"): [Fault(_powers_as_floats, _WRONG)],
    ("", "ReduceLogSumExp"): [Fault(_overflows, _WRONG)],
    ("", "Conv"): [Fault(_mixes_channels, _WRONG), Fault(_has_groups_in_space, _FAILS)],
    ("com.microsoft", "FusedConv"): [Fault(_mixes_channels, _WRONG)],
    ("", "BatchNormalization"): [Fault(_trains, _FAILS)],
    ("", "Resize"): [Fault(_smooths, _FAILS)],
    ("com.microsoft", "Attention"): [Fault(_has_no_bias, _ENDS)],
    ("com.microsoft", "MultiHeadAttention"): [
        Fault(_loses_its_past, _WRONG),
        Fault(_hides_padding, _FAILS),
    ],
    ("com.microsoft", "GroupQueryAttention"): [
        Fault(_is_capped, _WRONG),
        Fault(_caches_few_bits, _FAILS),
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
    known = {key: rows for key, rows in FAULTS.items() if key[1] in there}
    if not any(fault.effect for rows in known.values() for fault in rows):
        return found
    read = ir.from_proto(typed_proto_of(model))
    told: dict[str, Counter[str]] = {}
    for node in chain(read.graph.all_nodes(), *(f.all_nodes() for f in read.functions.values())):
        for fault in known.get((node.domain, node.op_type), ()):
            if fault.effect and (which := fault.of(node)):
                told.setdefault(fault.effect, Counter())[f"{node.op_type} {which}"] += 1
    for effect, counts in told.items():
        line = effect.format(", ".join(f"{n} {which}" for which, n in counts.items()))
        if effect is _ENDS:
            raise GraphgenError(f"{who}: {line}")
        found.append(line)
    return found
