"""How a checkpoint's configuration says that its weights are few bits, by any method."""

from collections.abc import Callable

from graphgen.models.published.bitsandbytes import bitsandbytes
from graphgen.models.published.config import Config
from graphgen.models.published.few_bits import Form
from graphgen.models.published.packed import Packed
from graphgen.models.published.packing import packing_of
from graphgen.models.published.scaled import scaled
from graphgen.models.published.schemes import compressed

FIELDS = ("quantization_config", "compression_config")
"""What config.json calls it; the second is older."""

_METHODS: dict[str, Callable[[Config, str], Form]] = {
    **dict.fromkeys(("gptq", "awq", "auto-round"), lambda own, m: Packed(packing_of(own, m))),
    "compressed-tensors": lambda own, method: compressed(own),
    **dict.fromkeys(("fp8", "fbgemm_fp8", "modelopt"), scaled),
    "bitsandbytes": lambda own, method: bitsandbytes(own),
}


def form_of(config: Config) -> Form | None:
    """The form that the configuration names; None for a checkpoint of floats.

    Raises GraphgenError for a method, or a field, whose bits cannot be read.
    """
    name = next((name for name in FIELDS if config.raw(name) is not None), None)
    if name is None:
        return None
    own = config.part(name, name)
    method = own.take("quant_method", str)
    if method == "mxfp4" and config.model_type == "gpt_oss":  # read as floats
        own.raw("modules_to_not_convert")
        return None
    if method not in _METHODS:
        wanted = f"one of {', '.join(_METHODS)}: give the checkpoint of floats"
        own.refuse("quant_method", method, wanted)
    return _METHODS[method](own, method)
