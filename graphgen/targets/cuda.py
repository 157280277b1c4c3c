"""What kernels of CUDA get wrong, refuse or leave to the CPU though the runtime lists them.

Known of onnxruntime-gpu 1.31.1 on an H200, by each operator's samples (tests/devices). The table of
kernels names the version.
"""

import os
from typing import Any

import onnx_ir as ir

from graphgen.providers import CUDA, placement
from graphgen.targets.faults import FAILS, WRONG, Fault, Faults, operand, sizes_of, told, trains

_CUDNN = {"LSTM": ("sigmoid", "tanh", "tanh"), "GRU": ("sigmoid", "tanh"), "RNN": ("tanh",)}


def _is_none_of_cudnn(node: ir.Node) -> str | None:
    """A recurrent layer that cuDNN calculates otherwise is left to the CPU (CUDA, 1.31)."""
    given = {name: attribute.value for name, attribute in node.attributes.items()}
    usual, names = _CUDNN[node.op_type], [str(n).lower() for n in given.get("activations") or ()]
    problems = {
        "of activations other than cuDNN's": names != [*usual] * (len(names) // len(usual)),
        "with settings of its activations": {"activation_alpha", "activation_beta"} & {*given},
        "that clips": "clip" in given,
        "with its reset before the product": node.op_type == "GRU"
        and not given.get("linear_before_reset"),
        "that couples its gates": given.get("input_forget"),
        "with peepholes": operand(node, 7) is not None,
    }
    return next((problem for problem, is_so in problems.items() if is_so), None)


def _pads_unevenly(node: ir.Node) -> str | None:
    """With uneven pads or auto_pad, it is left to the CPU (CUDA, 1.31)."""
    pads = node.attributes.get_ints("pads", ())
    half = len(pads) // 2
    same = node.attributes.get_string("auto_pad", "NOTSET").startswith("SAME")
    return "with uneven pads" if same or pads[:half] != pads[half:] else None


def _selects_the_last(node: ir.Node) -> str | None:
    """With select_last_index, it is left to the CPU (CUDA, 1.31)."""
    last = node.attributes.get_int("select_last_index", 0)
    return "of the last of equal elements" if last else None


def _rounds_up(node: ir.Node) -> str | None:
    """With ceil_mode, it is left to the CPU (CUDA, 1.31)."""
    return "with ceil_mode" if node.attributes.get_int("ceil_mode", 0) else None


def _has_blocks(node: ir.Node) -> str | None:
    """Of 8 bits in blocks, the run fails: "Unsupported quantization type" (CUDA, 1.31)."""
    codes = operand(node, 0) if node.op_type.startswith("De") else node.outputs[0]
    wide = codes is None or codes.dtype is None or codes.dtype.bitwidth == 8
    return "of 8 bits in blocks" if node.attributes.get_int("block_size", 0) and wide else None


def _points_are_padded(node: ir.Node) -> str | None:
    """Zero points are counted through, though rows of them end in padding (CUDA, 1.31)."""
    bits, scales = node.attributes.get_int("bits", 4), sizes_of(node, 2)
    if operand(node, 3) is None or scales is None or not isinstance(scales[-1], int):
        return None
    return "with zero points that rows pad" if scales[-1] * bits % 8 else None


def _crops(node: ir.Node) -> str | None:
    """Cropping without nearest, all elements become one number (CUDA, 1.31)."""
    crops = node.attributes.get_string("coordinate_transformation_mode", "") == (
        "tf_crop_and_resize"
    )
    near = node.attributes.get_string("mode", "nearest") == "nearest"
    return "that crops" if crops and not near else None


def _is_not_aligned(node: ir.Node) -> str | None:
    """Unless 4 divides both sizes of B, the run fails: "CUBLAS failure 15" (CUDA, 1.31)."""
    sizes = sizes_of(node, 1)
    known = sizes is not None and all(isinstance(n, int) and n % 4 == 0 for n in sizes[-2:])
    return None if known else "of sizes that 4 does not divide"


def _activates_otherwise(node: ir.Node) -> str | None:
    """Without Relu, the file does not load: "unsupported conv activation" (CUDA, 1.31)."""
    return "without Relu" if node.attributes.get_string("activation", "") != "Relu" else None


def _is_narrow(node: ir.Node) -> str | None:
    """The run fails: "requires hidden_size >= 16" (CUDA, 1.31)."""
    *_, features = sizes_of(node, 0) or [16]
    narrow = isinstance(features, int) and features < 16
    return f"of {features} features" if narrow else None


def _is_no_channel_of_diffusion(node: ir.Node) -> str | None:
    """The run fails: "hidden size should be 2560, 5120, 6144, …" (CUDA, 1.31)."""
    *_, features = sizes_of(node, 0) or [0]
    known = features in (2560, 5120, 6144, 10240, 12288)
    return None if known else f"of {features} features"


def _has_channels_first(node: ir.Node) -> str | None:
    """The run fails: "only the channels_last layout is supported" (CUDA, 1.31)."""
    return None if node.attributes.get_int("channels_last", 1) else "with channels first"


def _is_listed_only(node: ir.Node) -> str | None:
    """The file does not load: "Could not find an implementation" (CUDA, 1.31)."""
    return "as a whole"


FAULTS: Faults = {
    **{("", name): [Fault(_is_none_of_cudnn)] for name in _CUDNN},
    ("", "ConvTranspose"): [Fault(_pads_unevenly)],
    **{("", name): [Fault(_selects_the_last)] for name in ("ArgMax", "ArgMin")},
    ("", "MaxPool"): [Fault(_rounds_up)],
    **{("", name): [Fault(_has_blocks, FAILS)] for name in ("QuantizeLinear", "DequantizeLinear")},
    ("com.microsoft", "GatherBlockQuantized"): [Fault(_points_are_padded, WRONG)],
    ("", "Resize"): [Fault(_crops, WRONG)],
    ("", "MatMulInteger"): [Fault(_is_not_aligned, FAILS)],
    ("", "BatchNormalization"): [Fault(trains)],
    ("com.microsoft", "FusedConv"): [Fault(_activates_otherwise)],
    ("com.microsoft", "NhwcConv"): [Fault(_is_listed_only)],
    ("com.microsoft", "MoE"): [Fault(_is_narrow, FAILS)],
    ("com.microsoft", "BiasSplitGelu"): [Fault(_is_no_channel_of_diffusion, FAILS)],
    ("com.microsoft", "GroupNorm"): [Fault(_has_channels_first, FAILS)],
}


def faults(who: str, model: str | os.PathLike[str] | bytes, device: Any, session: Any) -> list[str]:
    """What a session gets wrong on CUDA, or fails on, a line each."""
    there = {op_type for op_type, _ in placement(session).get(CUDA, ())}
    return told(who, "CUDA", FAULTS, model, there)
