"""Losses, each a scalar mean."""

from typing import Literal

import numpy as np

from graphgen.infer import DOMAIN
from graphgen.op import composite
from graphgen.ops.elementwise import equal, log, logical_not, maximum, neg, where
from graphgen.ops.layout import (
    cast_like,
    dim,
    gather,
    gather_elements,
    numpy_dtype,
    scatter_elements,
    squeeze,
    unsqueeze,
    zeros_like,
)
from graphgen.ops.reduce import reduce_max, reduce_mean, reduce_sum
from graphgen.ops.softmax import log_softmax, softmax
from graphgen.value import Tensor


def _kept(labels: Tensor, like: Tensor, ignore_index: int) -> tuple[Tensor, Tensor, Tensor]:
    """Which labels count, the labels made safe to gather by, and how many count (at least 1)."""
    keep = logical_not(equal(labels, ignore_index))
    weight = cast_like(keep, like)
    return weight, where(keep, labels, 0), maximum(reduce_sum(weight, None, keepdims=0), 1.0)


def _log_normalizer(highest: Tensor, p: Tensor) -> Tensor:
    """log Σ exp(logits), (..., 1), from the highest logits and the softmax.

    The largest p is 1 / Σ exp(x - max x): two short passes, and the backward pass needs p anyway.
    """
    return highest - log(reduce_max(p, axis=[-1]))


@composite("CrossEntropy", domain=DOMAIN)
def cross_entropy(
    logits: Tensor,
    labels: Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> Tensor:
    """-Σ log softmax(logits)[label] / n over the n labels that are not `ignore_index`.

    logits float[..., C], labels int64[...]. With label smoothing s, the target is 1 - s on the
    label plus s/C on every class (arXiv 1512.00567). `z_loss` times the mean square of
    log Σ exp logits over those labels is added (arXiv 2204.02311). Without any label, the loss
    is 0.
    """
    weight, safe, count = _kept(labels, logits, ignore_index)
    highest = reduce_max(logits, axis=[-1])
    picked = gather_elements(logits, unsqueeze(safe, [-1]), axis=-1)
    if label_smoothing:
        mean = reduce_mean(logits, [-1])
        picked = picked * (1.0 - label_smoothing) + mean * label_smoothing
    # The last to read the logits, so that a runtime can write p over them.
    log_sum = _log_normalizer(highest, softmax(logits, axis=-1))
    loss = log_sum - picked
    if z_loss:
        loss = loss + log_sum * log_sum * z_loss
    return reduce_sum(squeeze(loss, [-1]) * weight, None, keepdims=0) / count


@cross_entropy.vjp
def _(
    g: Tensor,
    logits: Tensor,
    labels: Tensor,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
) -> Tensor:
    """dlogits = g / n (softmax(logits) (1 + 2 z_loss log Σ exp logits) - target), for labels that
    count.
    """
    weight, safe, count = _kept(labels, logits, ignore_index)
    p = softmax(logits, axis=-1)
    if z_loss:
        p = p * (1.0 + 2.0 * z_loss * _log_normalizer(reduce_max(logits, axis=[-1]), p))
    if label_smoothing:
        classes = dim(logits, -1)
        known = isinstance(classes, int)
        share = label_smoothing if known else np.asarray(label_smoothing, numpy_dtype(logits))
        p = p - share / classes
    index = unsqueeze(safe, [-1])
    hit = zeros_like(cast_like(index, logits)) - (1.0 - label_smoothing)
    error = scatter_elements(p, index, hit, axis=-1, reduction="add")
    return error * unsqueeze(weight * (g / count), [-1])


@composite("MeanSquaredError", domain=DOMAIN)
def mean_squared_error(x: Tensor, target: Tensor) -> Tensor:
    """mean((x - target)²), a scalar, of two tensors of one shape."""
    d = x - target
    return reduce_mean(d * d, None, keepdims=0)


@composite("NegativeLogLikelihoodLoss")
def negative_log_likelihood_loss(
    logp: Tensor,
    labels: Tensor,
    weight: Tensor | None = None,
    *,
    ignore_index: int | None = None,
    reduction: Literal["none", "sum", "mean"] = "mean",
) -> Tensor:
    """-Σ w logp[label] / Σ w, w = weight[label], or 0 where the label is `ignore_index`.

    logp float[N, C, ...], labels int[N, ...], weight float[C]. "sum" is not divided, "none" is
    not summed.
    """
    ignored = equal(labels, -1 if ignore_index is None else ignore_index)  # no label is negative
    safe = where(ignored, 0, labels)
    each = where(
        ignored,
        0.0,
        cast_like(np.ones((), np.float32), logp) if weight is None else gather(weight, safe),
    )
    loss = neg(squeeze(gather_elements(logp, unsqueeze(safe, [1]), axis=1), [1])) * each
    if reduction == "none":
        return loss
    total = reduce_sum(loss, None, keepdims=0)
    return total if reduction == "sum" else total / reduce_sum(each, None, keepdims=0)


@composite("SoftmaxCrossEntropyLoss")
def softmax_cross_entropy_loss(
    scores: Tensor,
    labels: Tensor,
    weights: Tensor | None = None,
    *,
    ignore_index: int | None = None,
    reduction: Literal["none", "sum", "mean"] = "mean",
) -> Tensor:
    """`negative_log_likelihood_loss` of log softmax(scores) along axis 1, scores (N, C, ...)."""
    return negative_log_likelihood_loss(
        log_softmax(scores, axis=1), labels, weights, ignore_index=ignore_index, reduction=reduction
    )


@softmax_cross_entropy_loss.output(1)
def _(scores: Tensor) -> Tensor:
    """log softmax(scores)."""
    return log_softmax(scores, axis=1)
