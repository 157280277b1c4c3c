"""What kernels of a provider get wrong without an error, as a session is told when it opens.

Known of onnxruntime-ep-webgpu 0.4.0; `bisect --against webgpu` found them.
"""

import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import onnx

from graphgen.providers import WEBGPU, graphs_of, placement, proto_of

_ATTENDS, _CONVOLVES = re.compile(r".*(Head|Query)Attention"), re.compile(r"(Fused)?Conv")


def mixes_channels(
    weights: Sequence[Any], groups: int, strides: Iterable[int], pads: Iterable[int]
) -> bool:
    """Whether WebGPU's kernel convolves the wrong channels, by the sizes of the weights.

    If 3 divides the channels, and 4 only those of the result, it reads three at a time, and then
    the wrong ones (onnxruntime #29651). Windows of one element are products, and right.
    """
    if groups > 1 or not 3 <= len(weights) <= 4:
        return False
    if not any(pads) and all(n == 1 for n in (*weights[2:], *strides)):
        return False
    to, channels = weights[:2]
    if not isinstance(channels, int) or channels <= 3 or channels % 3 or channels % 4 == 0:
        return False
    return not isinstance(to, int) or to % 4 == 0


def faults(model: str | os.PathLike[str] | bytes, device: Any, session: Any) -> list[str]:
    """What a session gets wrong on WebGPU, a line each.

    `device` is the plugin's, or None where the provider is built in.
    """
    there = Counter(op_type for op_type, _ in placement(session).get(WEBGPU, ()))
    attend = {op_type: n for op_type, n in there.items() if _ATTENDS.fullmatch(op_type)}
    found = []
    if attend and device is not None and device.device.type.name == "CPU":
        problem = "this WebGPU device is software, where attention of 32 queries or more is wrong"
        found.append(f"{problem}: {_counts(attend)}; use it for shorter inputs only")
    if not any(_ATTENDS.fullmatch(name) or _CONVOLVES.fullmatch(name) for name in there):
        return found
    nodes, sizes = list[onnx.NodeProto](), dict[str, list[int | None]]()
    for graph in graphs_of(proto_of(model).graph):
        nodes += [node for node in graph.node if node.op_type in there]
        for value in graph.input:
            dims = value.type.tensor_type.shape.dim
            sizes[value.name] = [d.dim_value if d.HasField("dim_value") else None for d in dims]
        sizes |= {array.name: [*array.dims] for array in graph.initializer}

    def told(problem: str, wrong: Callable[[onnx.NodeProto], bool]) -> Iterable[str]:
        if counts := Counter(node.op_type for node in nodes if wrong(node)):
            yield problem.format(_counts(counts))

    found += told("WebGPU leaves out the softcap of {}: results are wrong there", _has_softcap)
    found += told(
        "WebGPU computes {} of other channels than it should: results are wrong there; optimize "
        "the model for this provider",
        lambda node: _convolves_wrong_channels(node, sizes),
    )
    return found


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{n} {op_type}" for op_type, n in counts.items())


def _has_softcap(node: onnx.NodeProto) -> bool:
    return any(a.name == "softcap" and a.f != 0 for a in node.attribute)


def _convolves_wrong_channels(node: onnx.NodeProto, sizes: dict[str, list[int | None]]) -> bool:
    if not _CONVOLVES.fullmatch(node.op_type) or len(node.input) < 2:
        return False
    given = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
    window = (given.get(name, ()) for name in ("strides", "pads"))
    return mixes_channels(sizes.get(node.input[1], []), given.get("group", 1), *window)
