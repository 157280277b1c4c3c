"""What a checkpoint and its adapters call the modules of a graph, as metadata of the model."""

import json
import re
from collections.abc import Mapping

import onnx_ir as ir

from graphgen import ops
from graphgen.graph import FORMER, PUBLISHED
from graphgen.models.published.family import Family
from graphgen.nn.linear import Embedding, Linear
from graphgen.nn.module import Module, members
from graphgen.op import is_a
from graphgen.parts import Part


def module_names(family: Family, module: Module, *, body: bool) -> dict[str, Part]:
    """What the checkpoint calls each linear layer and table, which a head may have for its weight.

    Of the `body` alone, without the prefix.
    """
    sources = family.sources(module)
    found = {
        path: sources[f"{path}.weight"]
        for path, item in members(module)
        if isinstance(item, Linear | Embedding)
    }
    prefix = family.prefix if body else ""
    return {
        path: part._replace(name=part.name.removeprefix(prefix).removesuffix(".weight"))
        for path, part in found.items()
        if isinstance(part, Part)
    }


def note_modules(family: Family, model: ir.Model, names: Mapping[str, Part]) -> None:
    """Note these names in a model, of its modules.

    A table that it takes rows of has that of the head which is tied to it, or none.
    """
    weights = {name: model.graph.initializers.get(f"{name}.weight") for name in names}
    own = {n: names[n] for n, w in weights.items() if w is not None}
    heads = {table: head.removesuffix(".weight") for head, table in family.tied.items()}
    for name, weight in weights.items():
        taken = [] if weight is None else [is_a(use.node, ops.gather) for use in weight.uses()]
        if any(taken):
            part = own.pop(name)
            if (head := heads.get(f"{part.name}.weight")) and not all(taken):
                own[name] = part._replace(name=head)
    now = {part.name: _now(family, part.name) for part in own.values()}
    noted = {n: [*part._replace(name=now[part.name])] for n, part in own.items()}
    model.metadata_props[PUBLISHED] = json.dumps(noted, sort_keys=True)
    if former := {new: old for old, new in now.items() if new != old}:
        model.metadata_props[FORMER] = json.dumps(former, sort_keys=True)


def _now(family: Family, name: str) -> str:
    for pattern, now in family.renamed.items():
        if match := re.fullmatch(pattern, name):
            return match.expand(now)
    return name
