"""What GGUF files call the weights and the fields of a configuration."""

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from graphgen.errors import GraphgenError
from graphgen.models.published.config import Config
from graphgen.models.published.gguf import Gguf
from graphgen.models.published.gguf_architecture import HEADS, Architecture
from graphgen.models.published.gguf_architectures import ARCHITECTURES
from graphgen.models.published.gguf_experts import COUNT, ROUTED, SHARED_GATE
from graphgen.models.published.gguf_fields import compare, said_by
from graphgen.models.published.gguf_rope import (
    FACTORS,
    LONG,
    check_factors,
    check_scaling,
    scaled,
    scaling_of,
)
from graphgen.models.published.gguf_tensors import FewTensor, FloatTensor
from graphgen.safetensors import Weight

_TABLE = "token_embd.weight"


def read_gguf(file: Gguf, config: Config) -> dict[str, Weight]:
    """The tensors of a file for the model that a configuration describes, by its names.

    Raises GraphgenError for an architecture that is not supported, and fields or tensors that
    contradict the configuration.
    """
    path, fields, arch = file.path, file.fields, ARCHITECTURES.get(config.model_type)
    if arch is None:
        known = ", ".join(ARCHITECTURES)
        raise GraphgenError(f"{path}: GGUF is read for {known}, not for {config.model_type}")
    if fields.get("general.architecture") != arch.name:
        own = f"{fields.get('general.architecture')!r:.40}"
        problem = f"is for {own}, {config.where} for {arch.name!r}"
        raise GraphgenError(f"{path} {problem}: they are of different models")
    said = said_by(file, arch)
    rope = config.given("rope_parameters")
    given = {**(rope if isinstance(rope, dict) else {}), **config.fields}
    compare(file, arch, said, given, f"{config.where} has")
    check_scaling(file, scaling_of(file, said.scaling), config)
    found = dict[str, Weight]()
    for name, weight in file.tensors.items():
        if name == FACTORS or name in LONG:
            check_factors(file, weight, config)
            continue
        match = re.fullmatch(r"(?:blk\.(\d{1,4})\.)?(\w+)\.(weight|bias)", name)
        layer, part, last = match.groups() if match else (None, "", "")
        names = arch.others if layer is None else _layer(file, arch)
        if part not in names:
            raise GraphgenError(f"{path}: {name!r} is not a tensor of {config.model_type}")
        own_name = names[part] if layer is None else f"{arch.layers}.{layer}.{names[part]}"
        made = _as_in_folder(file, arch, part, weight)
        for each in _rows_of(made, f"{own_name}.{last}"):
            found[each.name] = each
    return found


def _layer(file: Gguf, arch: Architecture) -> dict[str, str]:
    names = dict(arch.layer)
    for part, instead in arch.instead.items():
        names |= instead if f"blk.0.{part}.weight" in file.tensors else {}
    return names


def _as_in_folder(file: Gguf, arch: Architecture, part: str, weight: Weight) -> Weight:
    """A tensor with the rows, and the gains, of a checkpoint's folder."""
    assert isinstance(weight, FewTensor | FloatTensor)
    if arch.gains and part.endswith("_norm") and isinstance(weight, FloatTensor):
        return replace(weight, less=1.0)
    if part == SHARED_GATE and len(weight.shape) == 1:
        return replace(weight, shape=(1, *weight.shape))
    if part not in arch.order:
        return weight
    heads = file.fields.get(f"{arch.name}.{HEADS}")
    counts = [heads, file.fields.get(f"{arch.name}.{HEADS}_kv", heads)]
    try:
        if any(type(count) is not int for count in counts):
            raise ValueError
        order = arch.order[part](weight.shape[0], *counts)
    except (ValueError, ZeroDivisionError):
        shape = f"{list(weight.shape)} for {counts[0]!r} and {counts[1]!r} heads"
        raise GraphgenError(f"{file.path}: {weight.name} is {shape}") from None
    return replace(weight, order=order)


def _rows_of(weight: Weight, name: str) -> Iterator[Weight]:
    """A weight by its name, or its parts by names of their own if that has a place for a number."""
    assert isinstance(weight, FewTensor | FloatTensor)
    apart = "{}" in name
    least = 1 + isinstance(weight, FewTensor) + apart
    if not least <= len(weight.shape) <= 2 + apart:
        wanted = "a row for each head, or a matrix for each expert" if apart else "a matrix"
        problem = f"is {list(weight.shape)}, wanted {wanted}"
        raise GraphgenError(f"{weight.path}: {weight.name} {problem}")
    if not apart:
        yield replace(weight, name=name)
        return
    count, *shape = weight.shape
    for i in range(count):
        at = weight.offset + i * (weight.stored // count)
        yield replace(weight, name=name.format(i), shape=(*shape,), offset=at)


def config_fields(file: Gguf) -> dict[str, Any]:
    """The configuration that a file describes, as config.json would have it.

    Raises GraphgenError for an architecture or a field that is not supported.
    """
    fields, name = file.fields, file.fields.get("general.architecture")
    kinds = [kind for kind, arch in ARCHITECTURES.items() if arch.name == name]
    if not kinds:
        known = ", ".join(dict.fromkeys(arch.name for arch in ARCHITECTURES.values()))
        raise GraphgenError(f"{file.path} is for {name!r:.40}; supported are {known}")
    routed = bool(fields.get(f"{name}.{COUNT}"))  # one name may stand for both
    kind = next((kind for kind in kinds if (kind in ROUTED) == routed), kinds[0])
    arch, table = ARCHITECTURES[kind], file.tensors.get(_TABLE)
    if table is None:
        raise GraphgenError(f"{file.path} has no {_TABLE}: it is not a whole model")
    said = said_by(file, arch)
    for field, value in said.unknown.items():
        raise GraphgenError(
            f"{file.path}: the field {name}.{field} ({value!r:.40}) is not supported; give "
            "--like DIR, a folder with the config.json of the model"
        )
    found = {"model_type": kind, **said.fields}
    found["vocab_size"] = table.shape[0]
    found["tie_word_embeddings"] = "output.weight" not in file.tensors
    found |= scaled(file, said.scaling)
    for token in ("bos", "eos"):
        value = fields.get(f"tokenizer.ggml.{token}_token_id")
        found |= {} if value is None else {f"{token}_token_id": value}
    return found
