"""Folders of published checkpoints: config.json, safetensors, tokenizer files."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import MethodType
from typing import Any, NamedTuple

import onnx_ir as ir

from graphgen.bits import KEPT, STACKED
from graphgen.display import on_screen
from graphgen.errors import GraphgenError, near
from graphgen.files import present
from graphgen.models.published.back import STORED, note
from graphgen.models.published.cache import in_dtype
from graphgen.models.published.config import Config
from graphgen.models.published.families import FAMILIES as FAMILIES, find_family as find_family
from graphgen.models.published.family import Family
from graphgen.models.published.few_bits import FewBits, as_floats
from graphgen.models.published.fresh import Fresh, Head
from graphgen.models.published.gguf import gguf_in, open_gguf
from graphgen.models.published.gguf_fields import check_absent
from graphgen.models.published.heads import LOGITS_OF_TOKENS, Vectors
from graphgen.models.published.language_model import PART_OF
from graphgen.models.published.module_names import module_names, note_modules
from graphgen.models.published.saved_as import default_task, misfit_mend, own_code
from graphgen.models.published.sentence import (
    EMBEDS as EMBEDS,
    sentence_head,
    sentence_task,
    sparse_vectors,
)
from graphgen.models.published.seq2seq import DECODER, ENCODER, CrossAttention
from graphgen.models.published.stored import check_files, stored_in
from graphgen.models.published.untrained import note_held
from graphgen.models.published.weights import stored_names
from graphgen.nn.attention import Attention
from graphgen.nn.module import build, members
from graphgen.safetensors import Weight
from graphgen.value import Tensor

MODEL = "model.onnx"
"""What clients call the graph of a family that needs only one."""

# The names of transformers' results.
_ATTENTIONS = {ENCODER: "encoder_attentions", DECODER: "decoder_attentions"}
_CROSS = "cross_attentions"


class Pretrained(NamedTuple):
    """What was built from a folder: the models by file name, with lazy weights."""

    models: dict[str, ir.Model]
    config: Config
    module: Any
    fresh: Fresh | None = None
    few_bits: str = ""  # the method of the checkpoint, if its weights are of few bits: gptq
    remarks: Sequence[str] = ()  # what it has that is not built
    again: bool = False  # whether weights of few bits may be rounded once more

    @on_screen
    def __repr__(self) -> Iterator[str]:
        yield f"Pretrained {self.config.model_type}: {', '.join(self.models)}"
        yield from (line for model in self.models.values() for line in repr(model).split("\n"))

    @property
    def model(self) -> ir.Model:
        """The only model."""
        [model] = self.models.values()
        return model


def from_folder(
    folder: Path,
    task: str | None = None,
    *,
    dtype: ir.DataType = ir.DataType.FLOAT,
    attentions: bool = False,
    head: Head | None = None,
    seed: int = 0,
    gguf: Path | None = None,
) -> Pretrained:
    """The graphs of a checkpoint for a task; no weight is read before it is written.

    Weights, and all that is computed from them, are in `dtype`, except the angles of rotary
    positions. `attentions` adds the outputs attentions.0 ..., the weights (B, H, T, S) of each
    layer; for an encoder-decoder these are encoder_attentions.0 ..., decoder_attentions.0 ... and
    cross_attentions.0 ...

    With `head`, weights of the task that the checkpoint lacks, or that this head has for other
    labels, are fresh, from `seed`; those of the body have to be there. `gguf` is a file to read the
    weights from, instead of the folder's own.

    Raises GraphgenError for an unknown model type or task, a field of the configuration that is
    not supported, and weights that do not fit; it names all of them at once.
    """
    check_files(folder)
    config = Config.read(folder / "config.json")
    if head is not None:
        config.replace(head.fields())
    family = find_family(config)
    chosen = task or sentence_task(folder, family.tasks)
    task, reason = (chosen, "") if chosen else default_task(config, [*family.tasks])
    remarks = [*own_code(config), *([f"{config.where}: {reason}"] if reason else [])]
    if task not in family.tasks:
        raise GraphgenError(
            f"{folder}: {config.model_type} has no task {task!r}; it has {', '.join(family.tasks)}"
            + near(task, family.tasks)
        )
    gguf = gguf or gguf_in(folder)
    stored, method = stored_in(folder, config, gguf, remarks)
    family = family if gguf is None else replace(family, transposed=True)
    config.stored = frozenset(stored)
    module = family.tasks[task](config)
    config.finish()
    if gguf is not None:
        check_absent(open_gguf(gguf), config)
    fresh = None if head is None else _fresh(head, family, config, module, task, seed)
    try:
        weights = family.weights(module, stored, dtype, str(folder), fresh)
    except GraphgenError as error:
        mend = misfit_mend(config, task, chosen, [*family.tasks])
        raise GraphgenError(f"{error}{mend}") from error
    if hasattr(module, "fill"):
        module.fill(stored, str(folder))
    if method:
        remarks += as_floats(stored, method, config.where)
        kept = any({KEPT, STACKED} & tensor.meta.keys() for tensor in weights.values())
        method = method if kept else ""
    names = module_names(family, module, body=EMBEDS in task)
    if isinstance(getattr(module, "head", None), Vectors):
        embedding = sentence_head(folder, module.features, dtype)
        if embedding is not None:
            module.head, weights = embedding[0], weights | embedding[1]
    elif task == "fill-mask":
        module.after = sparse_vectors(folder)
    if task in LOGITS_OF_TOKENS:
        family.check_ties(module, stored, str(folder))
    graphs = getattr(module, "graphs", None)
    parts = graphs() if graphs is not None else {MODEL: (module, module.inputs())}
    models = {
        name: build(
            with_attentions(part, _ATTENTIONS.get(name, "attentions")) if attentions else part,
            weights=weights,
            **in_dtype(inputs, dtype),
        )
        for name, (part, inputs) in parts.items()
    }
    bare = fresh is None and not any(name.startswith(family.prefix) for name in stored)
    asked = config.asked or any(part.asked for part in config.parts.values())
    noted = note(task, family.current(stored), asked=asked, bare=bare)
    for model in models.values():
        note_held(family, config, module, model)
        note_modules(family, model, names)
        model.metadata_props[STORED] = noted
    again = all(w.again for w in stored.values() if isinstance(w, FewBits))
    return Pretrained(models, config, module, fresh, method, remarks, again)


def _fresh(head: Head, family: Family, config: Config, module: Any, task: str, seed: int) -> Fresh:
    """Which weights of a task may be fresh. Raises GraphgenError if it has no such head."""
    whole = family.sources(family.tasks[next(iter(family.tasks))](config))
    body = {n for source in whole.values() for n in stored_names(source)}
    body |= {name.removeprefix(family.prefix) for name in body}  # as the body alone has them
    fresh = Fresh(head, frozenset(body), seed)
    every = {n for source in family.sources(module).values() for n in stored_names(source)}
    if not any(map(fresh.of_head, every)):
        outside = sorted({n.rpartition(".")[0] for n in every if fresh.covers(n)})
        folder = Path(config.where).parent
        raise GraphgenError(
            f"{folder}: {task} has no head {head.name!r}; it has {', '.join(outside) or 'none'}"
            + near(head.name, outside)
        )
    return fresh


def with_attentions(part: Any, name: str) -> Any:
    """A module, or a method of one, that also outputs the weights of its attentions, written out.

    They are called `name`.0 ..., and those from a decoder to its encoder cross_attentions.0 ...
    """
    module = getattr(part, "__self__", part)
    found = [item for _, item in members(module) if isinstance(item, Attention)]

    def call(_: Any, **inputs: Tensor) -> dict[str, Tensor]:
        kept: dict[str, list[Tensor]] = {name: [], _CROSS: []}
        for attention in found:
            attention.weights = kept[_CROSS if isinstance(attention, CrossAttention) else name]
        try:
            outputs: dict[str, Tensor] = part(**inputs)
        finally:
            for attention in found:
                attention.weights = None
        return outputs | {f"{kind}.{n}": x for kind in kept for n, x in enumerate(kept[kind])}

    return MethodType(call, module)
