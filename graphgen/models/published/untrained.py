"""What of a checkpoint transformers does not train."""

import json
import re

import onnx_ir as ir

from graphgen import ops
from graphgen.graph import HELD, ORIGIN
from graphgen.models.published.config import Config
from graphgen.models.published.family import Family
from graphgen.models.published.weights import stored_names
from graphgen.nn.module import Module
from graphgen.op import is_a


def note_held(family: Family, config: Config, module: Module, model: ir.Model) -> None:
    """Let a model say which of its weights, and which rows of tables, are not trained.

    The weights are trained if they are named; the rows are those of the token that pads.
    """

    def found(pattern: str) -> set[str]:
        return {
            path
            for path, source in family.sources(module).items()
            if any(re.fullmatch(pattern, name) for name in stored_names(source))
        }

    held = found(family.held) & {*model.graph.initializers}
    row, tables = config.raw("pad_token_id"), found(family.pads)
    for node in model.graph.all_nodes() if type(row) is int else ():
        if is_a(node, ops.gather) and (table := node.inputs[0]) is not None:
            count = table.shape[0] if table.shape is not None and table.name in tables else 0
            if isinstance(count, int) and -count <= row < count:
                node.metadata_props[HELD] = str(row % count)
    if held:
        held_names = dict.fromkeys(sorted(held), "not trained in transformers")
        model.metadata_props[ORIGIN] = json.dumps({"frozen": held_names}, sort_keys=True)
