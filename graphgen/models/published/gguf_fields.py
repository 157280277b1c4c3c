"""What a GGUF file says of a model, by the names of a configuration, and whether that agrees."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from graphgen.errors import GraphgenError
from graphgen.models.published.config import Config
from graphgen.models.published.gguf import Gguf
from graphgen.models.published.gguf_architecture import HEADS, Architecture
from graphgen.models.published.gguf_architectures import ARCHITECTURES
from graphgen.models.published.gguf_rope import SCALING, same

_SIZES = ("block_count", "embedding_length", HEADS)
_MAY_DIFFER = ("max_position_embeddings", "n_positions", "vocab_size")
"""Tables may be longer than what is used."""
_OF_ROPE = ("rope_theta", "partial_rotary_factor")
"""What `rope_parameters` say, for all layers or for some."""


POOLING = "pooling_type"
_POOLINGS = ("", "mean", "cls", "lasttoken")


def pooling_of(file: Gguf, arch: str) -> str | None:
    """How an embedding model of an architecture pools, "" if it does not; None if that is unknown.

    llama.cpp calls rerankers the fourth way.
    """
    kind = file.fields.get(f"{arch}.{POOLING}")
    return _POOLINGS[kind] if type(kind) is int and 0 <= kind < len(_POOLINGS) else None


class Said(NamedTuple):
    """What a file says, by the configuration's names; and those of its own fields.

    `scaling` are its fields of stretched positions, `yarn` what others say of these, and `unknown`
    those that have no meaning here.
    """

    fields: dict[str, Any]
    names: dict[str, str]
    scaling: dict[str, Any]
    yarn: dict[str, Any]
    unknown: dict[str, Any]


_NOTHING = {f"{SCALING}type": "none", "expert_count": 0, "expert_used_count": 0}


def own_fields(file: Gguf, arch: str) -> dict[str, Any]:
    """The fields of an architecture by their own names, without those that say of nothing.

    A number that all layers have alike may stand there for each.
    """
    found, layers = dict[str, Any](), file.fields.get(f"{arch}.block_count")
    for name, value in file.fields.items():
        own = name.removeprefix(f"{arch}.")
        if own == name:
            continue
        if isinstance(value, np.ndarray):
            value = value.tolist()
            alike = type(layers) is int and len(value) == layers and len({*value}) == 1
            value = value[0] if alike and type(value[0]) is not bool else value
        if not (own in _NOTHING and value == _NOTHING[own]):
            found[own] = value
    return found


def said_by(file: Gguf, arch: Architecture) -> Said:
    """Raises GraphgenError for fields that are missing, no numbers, or contradict each other."""
    prefix, own = f"{arch.name}.", own_fields(file, arch.name)
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
    except (TypeError, ValueError) as error:
        problem = f"has fields of other kinds than {arch.name} has ({error!r:.80})"
        raise GraphgenError(f"{file.path} {problem}; download it again") from None
    yarn = arch.yarn(own, file.tensors) if own.get(f"{SCALING}type") == "yarn" else {}
    scaling = {n: own.pop(n) for n in [*own] if n.startswith(SCALING)}
    if pooling_of(file, arch.name) is not None:
        own.pop(POOLING)
    for name, field in arch.fields.items():
        if (value := own.pop(name, None)) is None:
            continue
        if not same(found.setdefault(field, value), value):
            problem = f"{prefix}{name} is {value!r:.40}, not {found[field]}"
            raise GraphgenError(f"{file.path}: {problem}")
        names[field] = name
    return Said(found, names, scaling, yarn, own)


def check_absent(file: Gguf, config: Config) -> None:
    """Raise an error if fields that a configuration lacks mean something else than the file says.

    `config` knows what they mean once a model is made of it.
    """
    arch = ARCHITECTURES[config.model_type]
    said, absent = said_by(file, arch), dict[str, Any]()
    for name, values in config.absent.items():
        if not (config.given("rope_parameters") and name in _OF_ROPE):
            alike = (value for value in values if same(value, said.fields.get(name)))
            absent[name] = next(alike, values[0])
    compare(file, arch, said, absent, f"{config.where}, which lacks it, means")


def compare(
    file: Gguf, arch: Architecture, said: Said, known: Mapping[str, Any], where: str
) -> None:
    """Raise an error if a file says otherwise than `known`, which is of `where`."""
    for name, value in said.fields.items():
        wanted = known.get(name)
        differ = value is not None is not wanted and not same(value, wanted)
        if differ and name not in _MAY_DIFFER and name not in arch.lacks:
            own = f"{arch.name}.{said.names[name]} is" if name in said.names else f"has {name}"
            problem = f"{own} {value!r:.40}, but {where} {name} {wanted!r:.40}"
            raise GraphgenError(f"{file.path}: {problem}: they are of different models")
