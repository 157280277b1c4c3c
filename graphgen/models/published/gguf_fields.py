"""What a GGUF file says of a model, by the names of a configuration, and whether that agrees."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from graphgen.errors import GraphgenError
from graphgen.models.published.config import Config
from graphgen.models.published.gguf import Gguf
from graphgen.models.published.gguf_architecture import HEADS, Architecture
from graphgen.models.published.gguf_architectures import ARCHITECTURES
from graphgen.models.published.gguf_rope import SCALING, close

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

    `scaling` are its fields of stretched positions, and `unknown` those that have no meaning here.
    """

    fields: dict[str, Any]
    names: dict[str, str]
    scaling: dict[str, Any]
    unknown: dict[str, Any]


def said_by(file: Gguf, arch: Architecture) -> Said:
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
    if pooling_of(file, arch.name) is not None:
        own.pop(POOLING)
    for name, field in arch.fields.items():
        if (value := own.pop(name, None)) is None:
            continue
        if not close(found.setdefault(field, value), value):
            problem = f"{prefix}{name} is {value!r:.40}, not {found[field]}"
            raise GraphgenError(f"{file.path}: {problem}")
        names[field] = name
    return Said(found, names, scaling, own)


def check_absent(file: Gguf, config: Config) -> None:
    """Raise an error if fields that a configuration lacks mean something else than the file says.

    `config` knows what they mean once a model is made of it.
    """
    arch = ARCHITECTURES[config.model_type]
    said, absent = said_by(file, arch), dict[str, Any]()
    for name, values in config.absent.items():
        if not (config.given("rope_parameters") and name in _OF_ROPE):
            same = (value for value in values if close(value, said.fields.get(name)))
            absent[name] = next(same, values[0])
    compare(file, arch, said, absent, f"{config.where}, which lacks it, means")


def compare(
    file: Gguf, arch: Architecture, said: Said, known: Mapping[str, Any], where: str
) -> None:
    """Raise an error if a file says otherwise than `known`, which is of `where`."""
    for name, value in said.fields.items():
        wanted = known.get(name)
        differ = None not in (value, wanted) and not close(value, wanted)
        if differ and name not in _MAY_DIFFER and name not in arch.lacks:
            own = f"{arch.name}.{said.names[name]} is" if name in said.names else f"has {name}"
            problem = f"{own} {value!r:.40}, but {where} {name} {wanted!r:.40}"
            raise GraphgenError(f"{file.path}: {problem}: they are of different models")
