"""From what was trained back to a checkpoint, as transformers loads it."""

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import onnx_ir as ir

from graphgen import ops
from graphgen.arguments import checked
from graphgen.errors import GraphgenError, user_line
from graphgen.export.adapters import Adapter
from graphgen.export.artifact_files import CHECKPOINT
from graphgen.export.checkpoint import Checkpoint
from graphgen.export.folders import write_checkpoint
from graphgen.export.read import load
from graphgen.export.trained import parameters_of, trained_model
from graphgen.files import path_of
from graphgen.graph import model_in, produced_by
from graphgen.models.published import EMBEDS, find_family
from graphgen.models.published.back import (
    STAGES,
    Checkpoint as Stored,
    stored_stages,
    stored_weights,
)
from graphgen.models.published.config import Config
from graphgen.operands import Array, to_dtype
from graphgen.passes.training.adapters import Linear, linears
from graphgen.passes.training.merged import check_finite, sites_of

SHARD = 5_000_000_000
"""The most bytes of a file of weights, unless one weight alone has more."""


@checked
def to_checkpoint(
    folder: str | os.PathLike[str],
    run: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    dtype: Any = None,
    shard: int = SHARD,
) -> Stored:
    """Write the checkpoint of a folder of `graphgen build` with what a run has trained.

    The weights have the names, parts and orientation that they had in the checkpoint that the
    folder was built from; low-rank updates are merged into them: W + s · B A. transformers computes
    the same with it.

    Args:
        folder: What `graphgen build` wrote, with one graph or several.
        run: The checkpoint of a run, or its folder.
        out: A folder that does not exist yet, or is empty. It is complete or absent.
        dtype: Of all weights; by default each has the one that the checkpoint stored it in.
        shard: The most bytes of a file; with more, there are several, and an index. One weight at
            a time is in memory, besides what was trained.

    Returns the weights and the names of those that were rounded. Raises GraphgenError if the folder
    is not such a one or is in few bits, if what was trained is not in it, and if a low-rank update
    is of a weight that something else reads, such as a head that is tied to the embedding.
    """
    folder, out, run = (path_of(path, "to_checkpoint") for path in (folder, out, run))
    who = f"export({out.name})"
    if type(shard) is not int or shard < 1:
        raise GraphgenError(f"{who}: shard is {shard!r}; it must be a number of bytes{user_line()}")
    kind = None if dtype is None else to_dtype(dtype)
    path = run / CHECKPOINT if run.is_dir() else run
    saved = Checkpoint.load(path)
    parameters, adapter = parameters_of(saved, str(path)), Adapter.of(saved, str(path))
    files = sorted(folder.glob("onnx/*.onnx"))
    if not files or not (folder / "config.json").is_file():
        raise GraphgenError(
            f"{who}: {folder} is not a folder that graphgen build wrote: it has no onnx/*.onnx or "
            "no config.json; give that folder, not a file in it"
        )
    models = [load(file) for file in files]
    updates: dict[str, Callable[[Array], Array]] = {}
    if adapter is not None:
        updates = _updates(who, models, adapter)
        parameters = {n: x for n, x in parameters.items() if n not in adapter.matrices}
    known = [model.graph.initializers for model in models]
    if len(models) > 1 and (other := sorted(parameters.keys() - set[str]().union(*known))):
        raise GraphgenError(
            f"{who}: no graph of {folder} has the parameter {other[0]}; give the folder that the "
            "artifacts were made from"
        )
    for i, names in enumerate(known):
        own = {n: x for n, x in parameters.items() if len(models) == 1 or n in names}
        models[i] = model_in(trained_model(models[i], own, out.name), "export")
    config = Config.read(folder / "config.json")
    family = find_family(config)
    made = stored_weights(config, family, models, kind, updates)
    stages = dict[str, Stored]()
    if any(name.startswith(STAGES) for own in known for name in own):
        features = family.tasks[EMBEDS](config).features
        stages = stored_stages(folder, features, models, kind, updates)
    name = None if kind is None else kind.numpy().name
    fields: dict[str, Any] = {field: name for field in ("dtype", "torch_dtype") if name}
    write_checkpoint(
        folder, out, made.weights, fields, shard, {n: own.weights for n, own in stages.items()}
    )
    rounded = [f"{place}/{name}" for place, own in stages.items() for name in own.rounded]
    return made._replace(rounded=[*made.rounded, *rounded])


def _updates(
    who: str, models: Sequence[ir.Model], adapter: Adapter
) -> dict[str, Callable[[Array], Array]]:
    """What makes each new weight of the old one; a module is in one graph or in several."""
    updates = adapter.updates()
    sizes = {name: update.shape for name, update in updates.items()}
    found = [linears(model) for model in models]
    weights = dict[str, Linear]()
    every: Mapping[ir.Node, Linear] = {node: site for own in found for node, site in own.items()}
    missing = dict(sizes)
    for own in found:
        there = {site.module for site in own.values()}
        present = {name: size for name, size in sizes.items() if name in there}
        for name, site in sites_of(who, own, present).items():
            if name in sizes:
                weights[str(site.weight.name)] = site
                missing.pop(name, None)
    sites_of(who, every, missing)
    for model in models:
        for name, site in weights.items():
            value = model.graph.initializers.get(name)
            if value is not None and (node := _other_reader(value, site, every)) is not None:
                raise GraphgenError(
                    f"{who}: the low-rank update of {site.module} changes {name} for this module "
                    f"only, and {node.op_type} {node.name} reads it, too; a checkpoint has one "
                    "weight for both: save the adapter with graphgen adapter, and load it with PEFT"
                )

    def update(site: Linear, weight: Array) -> Array:
        own = updates[site.module]
        return own.of(weight) if site.by_rows else own.of(weight.T).T

    for site in weights.values():
        check_finite(who, site.module, *updates[site.module])
    return {name: partial(update, site) for name, site in weights.items()}


def _other_reader(
    weight: ir.Value, site: Linear, sites: Mapping[ir.Node, Linear]
) -> ir.Node | None:
    """A node that reads a weight, or its transpose, and is not a product of the module."""
    for node, _ in weight.uses():
        reads = [node]
        if node not in sites and produced_by(node.outputs[0], ops.transpose) is node:
            reads = [use.node for use in node.outputs[0].uses()]
        for reader in reads:
            if reader not in sites or sites[reader].module != site.module:
                return reader
    return None
