"""Losses, each a scalar mean."""

from typing import Literal

import numpy as np

from graphgen.infer import DOMAIN
from graphgen.op import composite
from graphgen.ops.activation import softplus
from graphgen.ops.elementwise import abs, equal, log, logical_not, maximum, minimum, neg, where
from graphgen.ops.layout import (
    cast_like,
    dim,
    gather,
    gather_elements,
    numpy_dtype,
    scatter_elements,
    size,
    squeeze,
    unsqueeze,
    zeros_like,
)
from graphgen.ops.reduce import reduce_log_sum_exp, reduce_max, reduce_mean, reduce_sum
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


@composite("WeightedCrossEntropy", domain=DOMAIN)
def weighted_cross_entropy(
    logits: Tensor,
    labels: Tensor,
    weight: Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> Tensor:
    """-Σ w log softmax(logits)[label] / Σ w, w = weight[label], as `cross_entropy` otherwise.

    weight float[C]. The smoothed part s/C of each class c is times weight[c], as in PyTorch, and
    the square of `z_loss` times w. Where Σ w is 0, as without any label, the loss is 0.
    """
    keep, safe, _ = _kept(labels, logits, ignore_index)
    logp, own = log_softmax(logits, axis=-1), gather(weight, safe) * keep
    loss = neg(squeeze(gather_elements(logp, unsqueeze(safe, [-1]), axis=-1), [-1])) * own
    if label_smoothing:
        even = reduce_mean(logp * weight, [-1], keepdims=0) * keep
        loss = loss * (1.0 - label_smoothing) - even * label_smoothing
    if z_loss:
        log_sum = reduce_log_sum_exp(logits, [-1], keepdims=0)
        loss = loss + log_sum * log_sum * own * z_loss
    whole = reduce_sum(own, None, keepdims=0)
    return reduce_sum(loss, None, keepdims=0) / where(equal(whole, 0.0), 1.0, whole)


weighted_cross_entropy.fixed = {"weight": "a weight of classes"}


@composite("BinaryCrossEntropy", domain=DOMAIN)
def binary_cross_entropy(logits: Tensor, target: Tensor, weight: Tensor | None = None) -> Tensor:
    """mean(-w t log σ(x) - (1 - t) log(1 - σ(x))), a scalar, of logits x and a target t in [0, 1].

    Both have one shape; w, the weight of what is positive, broadcasts to it. The logarithms are
    softplus(-x) and x + softplus(-x), which cannot overflow.
    """
    each = softplus(neg(logits))
    each = each if weight is None else each * (1.0 + target * (weight - 1.0))
    return reduce_mean((1.0 - target) * logits + each, None, keepdims=0)


binary_cross_entropy.fixed = {"weight": "a weight of classes"}


@composite("MeanSquaredError", domain=DOMAIN)
def mean_squared_error(x: Tensor, target: Tensor) -> Tensor:
    """mean((x - target)²), a scalar, of two tensors of one shape."""
    d = x - target
    return reduce_mean(d * d, None, keepdims=0)


@composite("MeanAbsoluteError", domain=DOMAIN)
def mean_absolute_error(x: Tensor, target: Tensor) -> Tensor:
    """mean(|x - target|), a scalar, of two tensors of one shape."""
    return reduce_mean(abs(x - target), None, keepdims=0)


@composite("HuberLoss", domain=DOMAIN)
def huber_loss(x: Tensor, target: Tensor, *, delta: float = 1.0) -> Tensor:
    """The mean of d²/2, or δ (|d| - δ/2) where |d| > δ, of d = x - target, two of one shape.

    A square near 0 and a line beyond δ (Huber 1964, doi 10.1214/aoms/1177703732). Divided by δ it
    is the smooth L1 loss of arXiv 1504.08083.
    """
    d = abs(x - target)
    near = minimum(d, delta)
    return reduce_mean(near * (d - 0.5 * near), None, keepdims=0)


@huber_loss.vjp
def _(g: Tensor, x: Tensor, target: Tensor, delta: float) -> tuple[Tensor, ...]:
    """dx = g / n · (d limited to ±δ), dtarget = -dx."""
    d = x - target
    slope = minimum(maximum(d, -delta), delta)
    dx = slope * (g / cast_like(size(d), g))
    return dx, neg(dx)


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


negative_log_likelihood_loss.fixed = {"weight": "a weight of classes"}
softmax_cross_entropy_loss.fixed = {"weights": "a weight of classes"}


@softmax_cross_entropy_loss.output(1)
def _(scores: Tensor) -> Tensor:
    """log softmax(scores)."""
    return log_softmax(scores, axis=1)
