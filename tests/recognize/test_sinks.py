"""Sinks of attention, as columns of the scores and as factors of the result."""

from typing import Any

import numpy as np
import pytest
from small_models import relative_rms, run_plain

import graphgen as gg
from graphgen import ops
from graphgen.export.write import to_bytes
from graphgen.graph import count_operators
from graphgen.nn.module import build
from graphgen.passes import optimize

H, D = 3, 4
HEADS = gg.float32["b", H, "t", D]
SINKS = np.array([0.5, -1.0, 2.0], np.float32)


def scores(q: Any, k: Any) -> Any:
    return ops.where(
        ops.causal_mask(ops.dim(q, 2), ops.dim(k, 2)), q @ ops.swap_last(k) * 0.5, -1e38
    )


ROWS = SINKS.reshape(1, H, 1)


def left(s: Any, c: Any = ROWS) -> Any:
    """What is left of a row beside a sink."""
    return ops.unsqueeze(ops.sigmoid(ops.reduce_log_sum_exp(s, [-1], keepdims=0) - c), [-1])


def as_factor(q: Any, k: Any, v: Any) -> Any:
    s = scores(q, k)
    return (ops.softmax(s) @ v) * left(s)


def kept_dimensions(q: Any, k: Any, v: Any) -> Any:
    s = scores(q, k)
    share = ops.sigmoid(ops.reduce_log_sum_exp(s, [3]) - SINKS.reshape(H, 1, 1))
    return share * (ops.softmax(s) @ v)


def as_column(q: Any, k: Any, v: Any) -> Any:
    """As GPT-OSS writes it, whose softmax subtracts the maximum a second time."""
    s = scores(q, k)
    column = ops.expand(SINKS.reshape(1, H, 1, 1), [ops.dim(s, 0), 1, ops.dim(s, 2), 1])
    joined = ops.concat(s, column, axis=-1)
    weights = ops.softmax(joined - ops.reduce_max(joined, [-1]))
    return ops.slice_(weights, [0], [-1], [-1]) @ v


def first_column(q: Any, k: Any, v: Any) -> Any:
    """As x-transformers writes it: in front, repeated before it gets its last axis."""
    s = scores(q, k)
    column = ops.expand(SINKS.reshape(1, H, 1), [ops.dim(s, 0), 1, ops.dim(s, 2)])
    weights = ops.softmax(ops.concat(ops.unsqueeze(column, [-1]), s, axis=-1))
    return ops.slice_(weights, [1], [np.iinfo(np.int64).max], [-1]) @ v


def other_scores(q: Any, k: Any, v: Any) -> Any:
    s = scores(q, k)
    return (ops.softmax(s) @ v) * left(s * 0.9)


def added(q: Any, k: Any, v: Any) -> Any:
    s = scores(q, k)
    c = ops.unsqueeze(ops.sigmoid(ops.reduce_log_sum_exp(s, [-1], keepdims=0) + SINKS[0]), [-1])
    return (ops.softmax(s) @ v) * c


def along_queries(q: Any, k: Any, v: Any) -> Any:
    s = scores(q, k)
    return (ops.softmax(s, axis=-2) @ v) * left(s)


def log_of_all(q: Any, k: Any, v: Any) -> Any:
    s = scores(q, k)
    return (ops.softmax(s) @ v) * ops.sigmoid(ops.reduce_log_sum_exp(s, [1, 3]) - 1.0)


def other_rows(q: Any, k: Any, v: Any) -> Any:
    """The factors of the rows along the columns of the result."""
    s = scores(q, k)
    gate = ops.sigmoid(ops.reduce_log_sum_exp(s, [-1], keepdims=0) - ROWS)
    return (ops.softmax(s) @ v) * ops.unsqueeze(gate, [-2])


def for_each_key(q: Any, k: Any, v: Any) -> Any:
    s = scores(q, k)
    return (ops.softmax(s) @ v) * ops.sigmoid(
        ops.reduce_log_sum_exp(s, [-1]) - np.ones(D, np.float32)
    )


def endless(q: Any, k: Any, v: Any) -> Any:
    s = scores(q, k)
    return (ops.softmax(s) @ v) * left(s, np.float32(np.inf))


def feeds(length: int) -> dict[str, Any]:
    r = np.random.default_rng(length)
    return {n: 2 * r.standard_normal((2, H, length, D), np.float32) for n in "qkv"}


def sites(report: Any, name: str) -> list[tuple[str, str]]:
    return [(s.status, s.reason) for p in report.passes if p.name == name for s in p.sites]


@pytest.mark.parametrize("body", [as_factor, kept_dimensions, as_column, first_column])
def test_sinks_are_one_score_more(body: Any) -> None:
    model = build(body, primitives=False, q=HEADS, k=HEADS, v=HEADS)
    best = optimize(model, verify=True)
    found = [
        reason for status, reason in sites(best.report, "fuse_attention") if status == "refused"
    ]
    assert found == [f"cpu (onnxruntime {best.report.runtime}) has no SinkAttention"]
    left = count_operators(best.model)
    assert not {"ReduceLogSumExp", "ReduceMax", "Sigmoid"} & {*left}
    assert left["Softmax"] == 1
    for length in (1, 4, 7):
        given = feeds(length)
        before, after = (run_plain(to_bytes(m), given) for m in (model, best.model))
        assert relative_rms(after[0], before[0]) < 1e-6


@pytest.mark.share(2)
@pytest.mark.parametrize(
    "body", [other_scores, added, along_queries, log_of_all, other_rows, for_each_key, endless]
)
def test_near_misses_stay(body: Any) -> None:
    """Without verification, which would undo what the rule must not do."""
    sizes = gg.float32["b", H, D, D]  # lengths that hide nothing from the rule
    model = build(body, primitives=False, q=sizes, k=sizes, v=sizes)
    best = optimize(model)
    assert sites(best.report, "fuse_softmax") == []
    assert count_operators(best.model)["ReduceLogSumExp"] == 1
    before, after = (run_plain(to_bytes(m), feeds(D)) for m in (model, best.model))
    assert relative_rms(after[0], before[0]) < 1e-6


def two_columns_off(q: Any, k: Any, v: Any) -> Any:
    s = scores(q, k)
    column = ops.expand(SINKS.reshape(1, H, 1, 1), [ops.dim(s, 0), 1, ops.dim(s, 2), 1])
    return ops.slice_(ops.softmax(ops.concat(s, column, axis=-1)), [1], [-1], [-1]) @ v[:, :, 1:]


def of_queries(q: Any, k: Any, v: Any) -> Any:
    s = scores(q, k)
    column = ops.expand(
        np.arange(D, dtype=np.float32).reshape(1, 1, D, 1), [ops.dim(s, 0), H, 1, 1]
    )
    return ops.slice_(ops.softmax(ops.concat(s, column, axis=-1)), [0], [-1], [-1]) @ v


def of_batches(q: Any, k: Any, v: Any) -> Any:
    """Heads are the first axis, as they lie beside the features."""
    rows = [ops.reshape(ops.transpose(x, perm=[0, 2, 1, 3]), [H, -1, H * D]) for x in (q, k, v)]
    first = [ops.transpose(ops.reshape(x * 2.0, [H, -1, H, D]), perm=[2, 0, 1, 3]) for x in rows]
    s = first[0] @ ops.swap_last(first[1])
    column = ops.expand(SINKS.reshape(1, H, 1, 1), [H, 1, ops.dim(s, 2), 1])
    joined = ops.softmax(ops.concat(s, column, axis=-1))
    return ops.slice_(joined, [0], [-1], [-1]) @ first[2]


OTHERS = [(two_columns_off, "b", D, "one column"), (of_queries, "b", D, "wanted sinks")]


@pytest.mark.parametrize(
    ("body", "batch", "length", "reason"), [*OTHERS, (of_batches, H, "t", "one for each head")]
)
def test_other_columns_are_no_sinks(body: Any, batch: Any, length: Any, reason: str) -> None:
    sizes = gg.float32[batch, H, length, D]
    model = build(body, primitives=False, q=sizes, k=sizes, v=sizes)
    [(status, why)] = sites(optimize(model).report, "fuse_attention")
    assert status == "missed" and reason in why
