"""What a model makes of its inputs, found by running it: whether a token sees later ones."""

from typing import TYPE_CHECKING

import numpy as np

from graphgen.errors import GraphgenError
from graphgen.export.named_losses import IGNORED, LABELS
from graphgen.train.data import Batch

if TYPE_CHECKING:
    from graphgen.train import Trainer

_DIFFERENCE = 1e-6  # of a loss, relative; a causal model's is 0 but for the order of sums


def check_causal(trainer: "Trainer", batch: Batch, ids: str, who: str) -> None:
    """Raise GraphgenError if a token sees the one that it should predict.

    With another last token in `ids`, the loss of all tokens before it has to stay the same. The
    model would otherwise learn to copy: its loss falls, and it cannot write.
    """
    labels = np.asarray(batch[LABELS])
    row = int(np.argmax(np.where(labels != IGNORED, np.arange(labels.shape[1]), 0).max(axis=1)))
    last = int(np.flatnonzero(labels[row] != IGNORED).max(initial=0))
    if not last:
        return
    before, changed = np.full_like(labels, IGNORED), np.array(batch[ids])
    before[row, :last] = labels[row, :last]
    if (before == IGNORED).all():
        before[row, 0] = labels[row, last]
    others = changed[changed != changed[row, last]]
    changed[row, last] = others[0] if others.size else not changed[row, last]
    one = {**batch, LABELS: before}
    losses = [trainer.evaluate([given]) for given in (one, {**one, ids: changed})]
    if abs(losses[0] - losses[1]) > _DIFFERENCE * max(1.0, abs(losses[0])):
        raise GraphgenError(
            f"{who}: this model sees later tokens: with another token {last}, the loss of those "
            f"before it is {losses[1]:.6g} instead of {losses[0]:.6g}, so it would learn to copy "
            "what it should predict; give texts with labels, or train a causal model"
        )
