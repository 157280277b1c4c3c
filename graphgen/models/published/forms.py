"""How a checkpoint's configuration says that its weights are few bits, by any method."""

from collections.abc import Callable

from graphgen.models.published.affine import bitnet, mlx
from graphgen.models.published.bitsandbytes import bitsandbytes
from graphgen.models.published.codebooks import aqlm
from graphgen.models.published.config import Config
from graphgen.models.published.few_bits import Form
from graphgen.models.published.packed import Packed
from graphgen.models.published.packing import packing_of
from graphgen.models.published.scaled import scaled
from graphgen.models.published.schemes import compressed
from graphgen.models.published.torchao import torchao

FIELDS = ("quantization_config", "compression_config", "quantization")
"""What config.json calls it: the second is older, the third MLX's."""

_METHODS: dict[str, Callable[[Config, str], Form]] = {
    **dict.fromkeys(("gptq", "awq", "auto-round"), lambda own, m: Packed(packing_of(own, m))),
    "compressed-tensors": lambda own, method: compressed(own),
    **dict.fromkeys(("fp8", "fbgemm_fp8", "modelopt"), scaled),
    "bitsandbytes": lambda own, method: bitsandbytes(own),
    **dict.fromkeys(("mlx", "metal"), mlx),
    "torchao": lambda own, method: torchao(own),
    "bitnet": lambda own, method: bitnet(own),
    "aqlm": lambda own, method: aqlm(own),
}

_OTHERS = {
    **dict.fromkeys(("eetq", "spqr", "vptq", "nvfp4", "quark"), "their order is that of a kernel"),
    **dict.fromkeys(("fp_quant", "fouroversix", "sinq"), "their order is that of a kernel"),
    "higgs": "transformers' model.dequantize() makes floats of it, which you save",
    "hqq": "its HQQLinear.dequantize() makes floats of it, which you save",
    "quanto": "optimum-quanto's dequantize() makes floats of it, which you save",
}
"""Methods whose weights are not read, and why, or what makes floats of them."""


def form_of(config: Config) -> Form | None:
    """The form that the configuration names; None for a checkpoint of floats.

    Raises GraphgenError for a method, or a field, whose bits cannot be read.
    """
    name = next((name for name in FIELDS if config.raw(name) is not None), None)
    if name is None:
        return None
    both = name == FIELDS[0] and config.given(name) == config.given(FIELDS[-1])
    name = config.named(*FIELDS[:3:2]) if both else name  # MLX writes both
    own = config.part(name, "")
    method = own.take("quant_method", str, "mlx" if both or name == FIELDS[-1] else None)
    if method == "mxfp4" and config.model_type == "gpt_oss":  # its names say which
        own.raw("modules_to_not_convert")
        return None
    if method not in _METHODS:
        why = f"{_OTHERS[method]}: otherwise " if method in _OTHERS else ""
        wanted = f"one of {', '.join(_METHODS)}; {why}give the checkpoint of floats"
        own.refuse("quant_method", method, wanted)
    return _METHODS[method](own, method)
