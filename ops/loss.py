"""Losses, each a scalar mean."""

from typing import Any

from graphgen.infer import DOMAIN
from graphgen.op import Operand, composite
from graphgen.ops.elementwise import equal, logical_not, maximum, neg, where
from graphgen.ops.layout import (
    cast_like,
    dim,
    gather_elements,
    scatter_elements,
    squeeze,
    unsqueeze,
    zeros_like,
)
from graphgen.ops.reduce import reduce_max, reduce_mean, reduce_sum
from graphgen.ops.softmax import log_softmax, softmax


def _kept(labels: Operand, like: Operand, ignore_index: int) -> tuple[Operand, Operand, Operand]:
    """Which labels count, the labels made safe to gather by, and how many count (at least 1)."""
    keep = logical_not(equal(labels, ignore_index))
    weight = cast_like(keep, like)
    return weight, where(keep, labels, 0), maximum(reduce_sum(weight, None, keepdims=0), 1.0)


def _log_normaliser(logits: Operand, logp: Operand) -> Operand:
    """log Σ exp(logits), (..., 1), as the log-softmax has it: at the maximum nothing cancels."""
    return reduce_max(logits, [-1]) - reduce_max(logp, [-1])


@composite("CrossEntropy", domain=DOMAIN)
def cross_entropy(
    logits: Any,
    labels: Any,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> Operand:
    """-Σ log softmax(logits)[label] / n over the n labels that are not `ignore_index`.

    logits float[..., C], labels int64[...]. With label smoothing s, the target is 1 - s on the
    label plus s/C on every class (arXiv 1512.00567). `z_loss` times the mean square of
    log Σ exp logits over those labels is added (arXiv 2204.02311). Without any label, the loss
    is 0.
    """
    weight, safe, count = _kept(labels, logits, ignore_index)
    logp = log_softmax(logits, axis=-1)
    loss = neg(squeeze(gather_elements(logp, unsqueeze(safe, [-1]), axis=-1), [-1]))
    if label_smoothing:
        uniform = neg(reduce_mean(logp, [-1], keepdims=0))
        loss = loss * (1.0 - label_smoothing) + uniform * label_smoothing
    if z_loss:
        z = squeeze(_log_normaliser(logits, logp), [-1])
        loss = loss + z * z * z_loss
    return reduce_sum(loss * weight, None, keepdims=0) / count


@cross_entropy.vjp
def _(
    g: Any,
    y: Any,
    logits: Any,
    labels: Any,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> Operand:
    """dlogits = g / n (softmax(logits) (1 + 2 z_loss log Σ exp logits) - target), for labels that
    count.
    """
    weight, safe, count = _kept(labels, logits, ignore_index)
    p = softmax(logits, axis=-1)
    if z_loss:
        p = p * (1.0 + 2.0 * z_loss * _log_normaliser(logits, log_softmax(logits, axis=-1)))
    if label_smoothing:
        classes = dim(logits, -1)
        known = isinstance(classes, int)
        p = p - label_smoothing / (classes if known else cast_like(classes, logits))
    index = unsqueeze(safe, [-1])
    hit = zeros_like(cast_like(index, logits)) - (1.0 - label_smoothing)
    error = scatter_elements(p, index, hit, axis=-1, reduction="add")
    return error * unsqueeze(weight * (g / count), [-1])


@composite("MeanSquaredError", domain=DOMAIN)
def mean_squared_error(x: Any, target: Any) -> Operand:
    """mean((x - target)²)."""
    d = x - target
    return reduce_mean(d * d, None, keepdims=0)
