"""What a token of a model sees, found by running it: later ones, or those of other documents."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from graphgen.errors import GraphgenError
from graphgen.export.named_losses import IGNORED, LABELS
from graphgen.train.data import Batch

if TYPE_CHECKING:
    from graphgen.train import Trainer

IDS = {"input_ids", "source_ids", "decoder_input_ids", "target_ids"}
"""What inputs of tokens are called."""

_DIFFERENCE = 1e-6  # of a loss, relative; a causal model's is 0 but for the order of sums
_APART = 1e-5  # the same, where products have other shapes


def check_causal(trainer: "Trainer", batch: Batch, ids: str, who: str) -> None:
    """Raise GraphgenError if a token sees the one that it should predict.

    The model would learn to copy: its loss falls, and it cannot write.
    """
    last, losses = _losses(trainer, batch, ids)
    if not _same(losses):
        raise GraphgenError(
            f"{who}: this model sees later tokens: with another token {last}, the loss of those "
            f"before it is {losses[1]:.6g} instead of {losses[0]:.6g}, so it would learn to copy "
            "what it should predict; give texts with labels, or train a causal model"
        )


def check_shifted(trainer: "Trainer", batches: Sequence[Batch], who: str) -> None:
    """Raise GraphgenError if labels are the tokens that stand there, and the model is causal.

    Models of transformers shift labels themselves; a graph does not, and would learn to copy.
    """
    kind = trainer._engine.labels.get(LABELS)
    for name in IDS & batches[0].keys() if kind is not None and kind.ignored == IGNORED else ():
        if all(_copies(batch, name) for batch in batches) and _same(
            _losses(trainer, batches[0], name)[1]
        ):
            raise GraphgenError(
                f"{who}: labels are {name} themselves, which a causal model reads: it would learn "
                "to copy them. transformers shifts such labels; here, they are the token after "
                "each: labels[:, :-1] = labels[:, 1:], and -100 at the end. If copying is meant, "
                "give the labels another name: artifacts with the loss cross_entropy:labels=copied"
            )


def _copies(batch: Batch, name: str) -> bool:
    """Whether the labels of a batch are these tokens, and not those after each as well."""
    labels, ids = (np.asarray(batch.get(one, 0)) for one in (LABELS, name))
    if ids.ndim != 2 or ids.shape != labels.shape or labels.dtype.kind not in "iu":
        return False
    counted = labels != IGNORED
    next_too = (labels[:, :-1] == ids[:, 1:]) | ~counted[:, :-1]  # as in a row of one token
    return bool(counted.any() and not next_too.all() and (labels == ids)[counted].all())


def _losses(trainer: "Trainer", batch: Batch, ids: str) -> tuple[int, list[float]]:
    """The last token with a label, and the loss of all before it with and without it in `ids`.

    They are the same for a causal model, and none if there is nothing before it.
    """
    labels = np.asarray(batch[LABELS])
    row = int(np.argmax(np.where(labels != IGNORED, np.arange(labels.shape[1]), 0).max(axis=1)))
    last = int(np.flatnonzero(labels[row] != IGNORED).max(initial=0))
    if not last:
        return last, []
    before, changed = np.full_like(labels, IGNORED), np.array(batch[ids])
    before[row, :last] = labels[row, :last]
    if (before == IGNORED).all():
        before[row, 0] = labels[row, last]
    others = changed[changed != changed[row, last]]
    changed[row, last] = others[0] if others.size else not changed[row, last]
    one = {**batch, LABELS: before}
    return last, [trainer.evaluate([given]) for given in (one, {**one, ids: changed})]


def _same(losses: Sequence[float]) -> bool:
    return not losses or abs(losses[0] - losses[1]) <= _DIFFERENCE * max(1.0, abs(losses[0]))


def check_apart(trainer: "Trainer", batch: Batch, mask: str, who: str) -> None:
    """Raise GraphgenError if documents of a row, which `mask` numbers, see each other.

    The loss of a row has to be that of its documents, each in a row of its own.
    """
    numbers = np.asarray(batch[mask])
    row = int(np.argmax(numbers.max(axis=1)))
    whole = {name: np.asarray(array)[row : row + 1] for name, array in batch.items()}
    parts = []
    for number in range(1, int(numbers[row].max()) + 1):
        part = {name: array[:, numbers[row] == number] for name, array in whole.items()}
        parts.append({**part, mask: np.ones_like(part[mask])})
    together, apart = trainer.evaluate([whole]), trainer.evaluate(parts)
    if abs(together - apart) > _APART * max(1.0, abs(apart)):
        raise GraphgenError(
            f"{who}: this model does not keep the documents of a row apart: the loss of "
            f"{len(parts)} in one row is {together:.6g}, and in rows of their own {apart:.6g}; "
            "leave --pack out"
        )
