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
from graphgen.models.published.gguf_experts import SHARED_GATE
from graphgen.models.published.gguf_fields import compare, own_fields, said_by
from graphgen.models.published.gguf_rope import (
    FACTORS,
    LONG,
    check_factors,
    check_scaling,
    scaled,
    scaling_of,
)
from graphgen.models.published.gguf_tensors import FewTensor, FloatTensor
from graphgen.models.published.near_llama import stretched
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
    rope = config.given("rope_parameters") or config.given("rope_scaling")
    rope = rope if isinstance(rope, dict) else {}
    if config.model_type == "hunyuan_v1_dense":
        rope = stretched(config, rope, config.given("head_dim") or 0)
    given = {**rope, **config.fields}
    compare(file, arch, said, given, f"{config.where} has")
    check_scaling(file, scaling_of(file, said.scaling, said.yarn), config)
    found, layers = dict[str, Weight](), said.fields.get("num_hidden_layers")
    for name, weight in file.tensors.items():
        if name == FACTORS or name in LONG:
            check_factors(file, weight, config)
            continue
        if layers != fields.get(f"{arch.name}.block_count") and _behind(name, layers):
            continue  # a layer that guesses further tokens
        match = re.fullmatch(r"(?:blk\.(\d{1,4})\.)?(\w+)\.(weight|bias)", name)
        layer, part, last = match.groups() if match else (None, "", "")
        names = arch.others if layer is None else _layer(file, arch)
        whole = names.get(f"{part}.{last}")
        if whole is None and part not in names:
            raise GraphgenError(f"{path}: {name!r} is not a tensor of {config.model_type}")
        own_name = whole or f"{names[part]}.{last}"
        own_name = own_name if layer is None else f"{arch.layers}.{layer}.{own_name}"
        for each in _rows_of(_as_in_folder(file, arch, part, last, weight), own_name):
            found[each.name] = each
    finished: dict[str, Weight] = arch.finish(found, fields)
    return finished


def _behind(name: str, layers: Any) -> bool:
    """Whether a tensor is of a layer behind so many."""
    match = re.match(r"blk\.(\d{1,4})\.", name)
    return match is not None and isinstance(layers, int) and int(match[1]) >= layers


def _layer(file: Gguf, arch: Architecture) -> dict[str, str]:
    names = dict(arch.layer)
    for part, instead in arch.instead.items():
        names |= instead if f"blk.0.{part}.weight" in file.tensors else {}
    return names


def _as_in_folder(file: Gguf, arch: Architecture, part: str, last: str, weight: Weight) -> Weight:
    """A tensor with the rows, and the gains, of a checkpoint's folder."""
    assert isinstance(weight, FewTensor | FloatTensor)
    gain = part.endswith("_norm") and last == "weight"
    if arch.gains and gain and isinstance(weight, FloatTensor):
        return replace(weight, less=1.0)
    if part == SHARED_GATE and len(weight.shape) == 1:
        return replace(weight, shape=(1, *weight.shape))
    if part not in arch.order:
        return weight
    own = own_fields(file, arch.name)
    heads: Any = own.get(HEADS)
    counts = [heads, own.get(f"{HEADS}_kv", heads)]
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
    if not least <= len(weight.shape) <= 3:
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
    own = own_fields(file, str(name))
    fitting = (kind for kind in kinds if ARCHITECTURES[kind].when(own, file.tensors))
    kind = next(fitting, kinds[0])
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
    found |= scaled(file, said.scaling, said.yarn)
    for token in ("bos", "eos"):
        value = fields.get(f"tokenizer.ggml.{token}_token_id")
        found |= {} if value is None else {f"{token}_token_id": value}
    return found
