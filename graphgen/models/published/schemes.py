"""How a configuration of compressed-tensors says which weights are of few bits."""

from typing import Any

from graphgen.models.published.compressed import Compressed
from graphgen.models.published.config import Config

_FORMATS = {
    "pack-quantized",
    "int-quantized",
    "naive-quantized",
    "float-quantized",
    "nvfp4-pack-quantized",
    "mxfp4-pack-quantized",
    "mxfp8-quantized",
    "mixed-precision",
}
_NOTES = "ignore quantization_status global_compression_ratio version run_compressed targets"
_OF_WEIGHTS = "dynamic observer observer_kwargs type symmetric scale_dtype zp_dtype actorder"


def compressed(own: Config) -> Compressed:
    """What a quantization_config of compressed-tensors says.

    Raises GraphgenError for a format or a scheme whose weights cannot be read.
    """
    groups = own.raw("config_groups")
    if not isinstance(groups, dict) or not groups:
        own.refuse("config_groups", groups, "an object of schemes")
    forms = [own.raw("format", "dense")]
    bits, sizes, blocks, rounds = set[int](), set[int](), set[Any](), False
    for name, scheme in groups.items():
        part = Config({"model_type": "scheme", **_object(own, name, scheme)}, own.where)
        given = part.raw("weights")
        rounds |= bool(part.raw("input_activations") or part.raw("output_activations"))
        forms.append(part.raw("format", forms[0]))
        part.raw("targets")
        part.finish()
        if given is None:
            continue
        weights = Config({"model_type": "weights", **_object(own, name, given)}, own.where)
        count = weights.take("num_bits", int)
        if not 2 <= count <= 8:
            weights.refuse("num_bits", count, "2 to 8")
        weights.expect("strategy", "tensor", "channel", "group", "tensor_group", "block")
        bits.add(count)
        size, block = weights.raw("group_size"), weights.raw("block_structure")
        sizes |= {size} if type(size) is int and size > 0 else set()
        blocks |= {tuple(block)} if isinstance(block, list) else set()
        for note in _OF_WEIGHTS.split():
            weights.raw(note)
        weights.finish()
    for form in forms:
        if form not in _FORMATS:
            own.refuse("format", form, f"one of {', '.join(sorted(_FORMATS))}")
    rounds |= bool(own.raw("kv_cache_scheme"))
    sparse = own.raw("sparsity_config", {})
    if not isinstance(sparse, dict) or sparse.get("format", "dense") != "dense":
        own.refuse("sparsity_config", sparse, "of format dense: give the checkpoint of floats")
    if moved := own.raw("transform_config", {}):
        own.refuse("transform_config", moved, "empty: give the checkpoint of floats")
    if len(blocks) > 1 or any(len(block) != 2 for block in blocks):
        own.refuse("config_groups", groups, "of one block_structure")
    for note in _NOTES.split():
        own.raw(note)
    block = next(iter(blocks), None)
    return Compressed(frozenset(bits), frozenset(sizes), block, rounds)


def _object(own: Config, name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        own.refuse(name, value, "an object")
    return value
