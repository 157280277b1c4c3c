"""What GGUF files call the weights and the fields of a configuration."""

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from graphgen.errors import GraphgenError
from graphgen.models.published.config import Config
from graphgen.models.published.gguf import Gguf
from graphgen.models.published.gguf_architecture import HEADS, Architecture
from graphgen.models.published.gguf_architectures import ARCHITECTURES
from graphgen.models.published.gguf_rope import (
    FACTORS,
    LONG,
    SCALING,
    check_factors,
    check_scaling,
    close,
    scaled,
    scaling_of,
)
from graphgen.models.published.gguf_tensors import FewTensor, FloatTensor
from graphgen.safetensors import Weight

_TABLE = "token_embd.weight"
_SIZES = ("block_count", "embedding_length", HEADS)
_MAY_DIFFER = ("max_position_embeddings", "n_positions", "vocab_size")
"""Tables may be longer than what is used."""


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
    said = _said(file, arch)
    rope = config.given("rope_parameters")
    for name, value in said.fields.items():
        wanted = config.given(name)
        if wanted is None and isinstance(rope, dict):
            wanted = rope.get(name)
        differ = None not in (value, wanted) and not close(value, wanted)
        if differ and name not in _MAY_DIFFER and name not in arch.lacks:
            own = f"{arch.name}.{said.names[name]} is" if name in said.names else f"has {name}"
            problem = f"{own} {value!r:.40}, but {config.where} has {name} {wanted!r:.40}"
            raise GraphgenError(f"{path}: {problem}: they are of different models")
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


class _Said(NamedTuple):
    """What a file says, by the configuration's names; and those of its own fields.

    `scaling` are its fields of stretched positions, and `unknown` those that have no meaning here.
    """

    fields: dict[str, Any]
    names: dict[str, str]
    scaling: dict[str, Any]
    unknown: dict[str, Any]


def _said(file: Gguf, arch: Architecture) -> _Said:
    """Raises GraphgenError for fields that are missing, no numbers, or contradict each other."""
    prefix, nothing = f"{arch.name}.", {f"{SCALING}type": "none", "expert_count": 0}
    own = {n.removeprefix(prefix): x for n, x in file.fields.items() if n.startswith(prefix)}
    own = {n: x for n, x in own.items() if n not in nothing or x != nothing[n]}
    for name in dict.fromkeys([*arch.needed, *arch.fields]):
        value: Any = own.get(name)
        if value is None and name not in arch.needed:
            continue
        given = "is missing" if value is None else f"is {value!r:.40}"
        if not isinstance(value, int | float) or (name in _SIZES and value < 1):
            problem = f"the field {prefix}{name} {given}"
            raise GraphgenError(f"{file.path}: {problem}; download it again, or convert it again")
    try:
        found, names = arch.derive(own, file.tensors), dict[str, str]()
    except ArithmeticError:  # more heads than features
        sizes = f"{own[HEADS]} heads of {own['embedding_length']} features"
        raise GraphgenError(f"{file.path} is of {sizes}; download it again") from None
    scaling = {n: own.pop(n) for n in [*own] if n.startswith(SCALING)}
    for name, field in arch.fields.items():
        if (value := own.pop(name, None)) is None:
            continue
        if not close(found.setdefault(field, value), value):
            problem = f"{prefix}{name} is {value!r:.40}, not {found[field]}"
            raise GraphgenError(f"{file.path}: {problem}")
        names[field] = name
    return _Said(found, names, scaling, own)


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
    """A weight by its name, or its rows by names of their own if that has a place for a number."""
    if "{}" not in name:
        yield replace(weight, name=name)
        return
    if not isinstance(weight, FloatTensor) or len(weight.shape) != 2:
        problem = f"is {list(weight.shape)}, wanted floats with a row for each head"
        raise GraphgenError(f"{weight.path}: {weight.name} {problem}")
    rows, columns = weight.shape
    for i in range(rows):
        offset = weight.offset + i * columns * weight.dtype.bitwidth // 8
        yield replace(weight, name=name.format(i), shape=(columns,), offset=offset)


def config_fields(file: Gguf) -> dict[str, Any]:
    """The configuration that a file describes, as config.json would have it.

    Raises GraphgenError for an architecture or a field that is not supported.
    """
    fields, name = file.fields, file.fields.get("general.architecture")
    kind = next((kind for kind, arch in ARCHITECTURES.items() if arch.name == name), None)
    if kind is None:
        known = ", ".join(dict.fromkeys(arch.name for arch in ARCHITECTURES.values()))
        raise GraphgenError(f"{file.path} is for {name!r:.40}; supported are {known}")
    arch, table = ARCHITECTURES[kind], file.tensors.get(_TABLE)
    if table is None:
        raise GraphgenError(f"{file.path} has no {_TABLE}: it is not a whole model")
    said = _said(file, arch)
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
