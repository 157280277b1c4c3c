"""Attention to a pattern of keys equals full attention with that pattern as its mask."""

import math
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_models import ROUNDING, relative_rms, run_plain

import graphgen as gg
from graphgen import nn, ops
from graphgen.autodiff import grad
from graphgen.measure.reference import evaluate
from graphgen.models.sparse import HashedAttention
from graphgen.passes import optimize

RNG = np.random.default_rng(5)
B, H, D = 2, 2, 4
HEADS = {"q_num_heads": H, "kv_num_heads": H}


def normal(*shape: int) -> Any:
    return (RNG.standard_normal(shape) * 2).astype(np.float32)


def split(x: Any) -> Any:
    return x.astype(np.float64).reshape(*x.shape[:2], H, -1).transpose(0, 2, 1, 3)


def by_hand(q: Any, k: Any, v: Any, keep: Any, softcap: float = 0.0) -> Any:
    """Full attention in float64 with a mask (B, H, n, n); zeros where nothing is kept."""
    scores = np.einsum("bhtd,bhsd->bhts", q, k) / math.sqrt(q.shape[-1])
    scores = softcap * np.tanh(scores / softcap) if softcap else scores
    scores = np.where(keep, scores, -np.inf)
    most = scores.max(-1, keepdims=True)
    e = np.exp(scores - np.where(np.isfinite(most), most, 0))
    total = e.sum(-1, keepdims=True)
    y = np.einsum("bhts,bhsd->bhtd", e / np.where(total > 0, total, 1), v)
    return y.transpose(0, 2, 1, 3).reshape(y.shape[0], y.shape[2], -1)


def distance(n: int) -> Any:
    return np.arange(n)[:, None] - np.arange(n)


def hashed_keep(q: Any, live: Any, causal: bool, **sizes: Any) -> Any:
    """What each query sees, written out with loops over rounds, queries and keys."""
    buckets, chunk, rounds = sizes["buckets"], sizes["chunk"], sizes["rounds"]
    n = q.shape[2]
    buckets = [buckets] if isinstance(buckets, int) else buckets
    rotations = ops.hash_rotations(q.shape[3], buckets=buckets, rounds=rounds, seed=0)
    keep = np.zeros((*q.shape[:2], n, n), bool)
    for b, h, r in np.ndindex(*q.shape[:2], rounds):
        xs = [q[b, h] @ rotation.astype(np.float64) for rotation in rotations[r]]
        hashes = [np.argmax(np.concatenate([x, -x], -1), -1) for x in xs]
        bucket = np.ravel_multi_index(hashes, buckets)
        order = sorted(np.flatnonzero(live[b]), key=lambda i: (bucket[i], i))
        missing = -(-n // chunk) * chunk - len(order)  # padding is in front
        place = {i: (missing + slot) // chunk for slot, i in enumerate(order)}
        for i in order:
            for j in order:
                met = bucket[i] == bucket[j] and place[i] - place[j] in (0, 1)
                keep[b, h, i, j] |= met and (j < i if causal else j != i)
    alone = ~keep.any(-1) & live[:, None]
    keep |= alone[..., None] & np.eye(n, dtype=bool)
    return keep


def patterns(n: int) -> list[tuple[Any, Any]]:
    """Functions and the bool (n, n) of their pattern."""
    d = abs(distance(n))
    found: list[tuple[Any, Any]] = [
        (partial(ops.window_attention, window=w), d < w) for w in (1, 2, 5, 40)
    ]
    found += [
        (partial(ops.strided_attention, stride=s), (d < s) | (d % s == 0)) for s in (1, 4, 40)
    ]
    count = -(-n // 3) + 1  # one block more than the sequence has
    for layout in (RNG.random((count, count)) < 0.3, ops.big_bird_layout(count)):
        pattern = np.kron(layout, np.ones((3, 3)))[:n, :n] > 0
        found.append((partial(ops.block_sparse_attention, layout=layout, block=3), pattern))
    return found


@pytest.mark.parametrize("softcap", [0.0, 1.5])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("n", [1, 2, 7, 16, 23])
def test_a_pattern_is_full_attention_with_a_mask(
    n: int, causal: bool, masked: bool, softcap: float
) -> None:
    options = {"softcap": softcap} if softcap else {}
    q, k, v = (normal(B, n, H * D) for _ in range(3))
    live = RNG.random((B, n)) < 0.7 if masked else np.ones((B, n), bool)
    for attend, pattern in patterns(n):
        keep = pattern & (distance(n) >= 0 if causal else True) & live[:, None, None]
        wanted = by_hand(split(q), split(k), split(v), keep, softcap)
        y = attend(q, k, v, live if masked else None, is_causal=int(causal), **HEADS, **options)
        assert np.abs(y - wanted).max() < ROUNDING * max(np.abs(wanted).max(), 1)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("n", [1, 2, 16, 23])
def test_hashing_is_full_attention_to_the_union_of_what_its_rounds_see(
    n: int, causal: bool, masked: bool
) -> None:
    q, v = normal(B, n, H * D), normal(B, n, H * D)
    live = RNG.random((B, n)) < 0.7 if masked else np.ones((B, n), bool)
    queries = split(q)
    keys = queries / np.linalg.norm(queries, axis=-1, keepdims=True)
    for buckets, chunk, rounds in ((2, 3, 1), (4, 3, 2), ((4, 2), 4, 3), (16, 1, 2), (32, 64, 2)):
        sizes = {"buckets": buckets, "chunk": chunk, "rounds": rounds}
        wanted = by_hand(queries, keys, split(v), hashed_keep(queries, live, causal, **sizes))
        mask = live if masked else None
        y = ops.hashed_attention(q, v, mask, num_heads=H, is_causal=int(causal), **sizes)
        assert relative_rms(wanted, y) < ROUNDING


@pytest.mark.parametrize("causal", [False, True])
def test_one_bucket_that_holds_all_is_full_attention(causal: bool) -> None:
    q, v = abs(normal(B, 9, H * D)), normal(B, 9, H * D)
    q[..., 1:] *= 1e-3  # all of one direction in the first head: one bucket, of which one is empty
    q = np.tile(q[..., :D], H)
    sizes = {"buckets": 2, "chunk": 9, "num_heads": H}
    y = ops.hashed_attention(q, v, is_causal=int(causal), **sizes)
    queries = split(q)
    keep = distance(9) > 0 if causal else distance(9) != 0
    keep = keep | (~keep.any(-1))[:, None] & np.eye(9, dtype=bool)
    keys = queries / np.linalg.norm(queries, axis=-1, keepdims=True)
    assert relative_rms(by_hand(queries, keys, split(v), keep), y) < ROUNDING


def test_several_rounds_see_more_and_differ() -> None:
    q, v = normal(1, 32, D), normal(1, 32, D)
    live = np.ones((1, 32), bool)
    seen = [
        hashed_keep(q[:, None].astype(np.float64), live, False, buckets=8, chunk=8, rounds=r).sum()
        for r in (1, 3)
    ]
    assert seen[0] < seen[1] < 32 * 32
    one, same, other = (
        ops.hashed_attention(q, v, num_heads=1, buckets=8, chunk=8, seed=s) for s in (0, 0, 1)
    )
    assert np.array_equal(one, same) and not np.array_equal(one, other)


def hashed(q: Any, k: Any, v: Any, mask: Any = None, **options: Any) -> Any:
    """Hashed attention with the signature of the others."""
    sizes = {"num_heads": H, "buckets": 4, "chunk": 4, "rounds": 2}
    return ops.hashed_attention(q, v, mask, is_causal=options["is_causal"], **sizes)


EACH = {
    "window": partial(ops.window_attention, window=5),
    "strided": partial(ops.strided_attention, stride=3),
    "blocks": partial(
        ops.block_sparse_attention, layout=ops.big_bird_layout(7, random_blocks=1), block=4
    ),
    "hashed": hashed,
}


def model_of(name: str, *, causal: bool, n: int | str = "n", **options: Any) -> Any:
    def attend(q: Any, k: Any, v: Any, mask: Any) -> Any:
        y = EACH[name](q, k, v, mask, is_causal=int(causal), **HEADS)
        return y + k * 0.0 if name == "hashed" else y

    x = gg.float32["b", n, H * D]
    return gg.build(attend, q=x, k=x, v=x, mask=gg.bool_["b", n], **options)


@pytest.mark.share(3)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", EACH)
def test_graphs_compute_what_arrays_do_at_any_length(name: str, causal: bool) -> None:
    model = model_of(name, causal=causal, primitives=True)
    best = optimize(model)
    assert best.report.shortfalls() == []
    assert [str(d) for d in model.graph.outputs[0].shape] == ["b", "n", str(H * D)]
    for n in (1, 23):
        feeds = {x: normal(B, n, H * D) for x in "qkv"} | {"mask": RNG.random((B, n)) < 0.8}
        wanted = evaluate(model, feeds)[0]
        for graph in (model, best.model):
            assert relative_rms(wanted, run_plain(graph, feeds)[0]) < ROUNDING


@pytest.mark.parametrize("name", EACH)
def test_gradients(name: str) -> None:
    """Against central differences in float64, and in the runtime."""

    def loss(q: Any, k: Any, v: Any, mask: Any) -> Any:
        y = EACH[name](q, k, v, mask, is_causal=1, **HEADS)
        y = y + k * 0.1 if name == "hashed" else y
        return ops.reduce_sum(ops.sin(y), None, keepdims=0)

    x = gg.float32["b", "n", H * D]
    model = gg.build(loss, q=x, k=x, v=x, mask=gg.bool_["b", "n"])
    slope = grad(model, wrt=["q", "k", "v"])
    feeds = {x: normal(B, 11, H * D).astype(np.float64) for x in "qkv"}
    feeds["mask"] = np.arange(11) < np.array([[11], [8]])
    _, *found = evaluate(slope, feeds)
    step = {x: RNG.standard_normal((B, 11, H * D)) for x in "qkv"}
    up, down = (
        float(evaluate(model, feeds | {x: feeds[x] + s * 1e-5 * step[x] for x in "qkv"})[0])
        for s in (1, -1)
    )
    products = [g * step[x] for g, x in zip(found, "qkv", strict=True)]
    size = sum(abs(p).sum() for p in products)
    assert abs(sum(p.sum() for p in products) - (up - down) / 2e-5) < 1e-6 * size
    narrow = {k: x.astype(np.float32) if x.dtype == np.float64 else x for k, x in feeds.items()}
    for wanted, given in zip(
        evaluate(slope, narrow)[1:], run_plain(slope, narrow)[1:], strict=True
    ):
        assert relative_rms(wanted, given) < 2e-5


@pytest.mark.parametrize("name", ["window", "strided", "blocks"])
def test_no_positions_give_none(name: str) -> None:
    x = np.zeros((B, 0, H * D), np.float32)
    model = gg.build(lambda q: EACH[name](q, q, q, **HEADS), q=gg.float32["b", "n", H * D])
    assert EACH[name](x, x, x, **HEADS).shape == x.shape
    assert gg.Session(optimize(model))(q=x)[0].shape == x.shape


def test_grouped_heads() -> None:
    q, k, v = normal(B, 9, 4 * D), normal(B, 9, 2 * D), normal(B, 9, 2 * D)
    wide_k, wide_v = (np.repeat(x.reshape(B, 9, 2, D), 2, 2).reshape(B, 9, -1) for x in (k, v))
    for name in ("window", "strided", "blocks"):
        y = EACH[name](q, k, v, q_num_heads=4, kv_num_heads=2)
        assert np.allclose(y, EACH[name](q, wide_k, wide_v, q_num_heads=4, kv_num_heads=4))


def test_no_graph_holds_the_weights_of_all_pairs() -> None:
    """n x n numbers in one value: with 16 times the length, 16 times as many, not 256."""
    from graphgen.record import recording

    def largest(name: str, n: int) -> int:
        sizes = []
        with recording(primitives=True) as tape:
            x = tape.input("x", gg.float32[1].dtype, [1, n, H * D])
            attend = (
                EACH[name]
                if name != "blocks"
                else partial(
                    ops.block_sparse_attention, layout=ops.big_bird_layout(n // 4), block=4
                )
            )
            attend(x, x, x, is_causal=0, **HEADS)
            for node in tape.nodes:
                for value in node.outputs:
                    if value.shape is not None and all(isinstance(d, int) for d in value.shape):
                        sizes.append(math.prod(value.shape))
        return max(sizes)

    for name in ("window", "blocks", "hashed"):
        assert largest(name, 1024) <= 17 * largest(name, 64)


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda x: ops.window_attention(x, x, x, window=0, **HEADS), "window is 0; it must be an"),
        (lambda x: ops.strided_attention(x, x, x, stride=-1, **HEADS), "stride is -1; it must be"),
        (
            lambda x: ops.block_sparse_attention(
                x, x, x, layout=np.ones((2, 3), bool), block=4, **HEADS
            ),
            r"layout is bool\[2, 3\]; it must be a square of bool",
        ),
        (
            lambda x: ops.block_sparse_attention(
                x, x, x, layout=np.ones((2, 2), bool), block=4, **HEADS
            ),
            "layout has 2 blocks of 4, the sequence 9 positions; it must have at least 3",
        ),
        (
            lambda x: ops.hashed_attention(x, x, num_heads=H, buckets=3, chunk=4),
            "buckets is 3; it must be even",
        ),
        (
            lambda x: ops.hashed_attention(x, x, num_heads=H, buckets=[4, 0], chunk=4),
            "buckets is 0; it must be an integer of at least 1",
        ),
        (
            lambda x: ops.hashed_attention(x, x, num_heads=H, buckets=2, chunk=0),
            "chunk is 0; it must be",
        ),
        (
            lambda x: ops.window_attention(x, x[:, :4], x[:, :4], window=2, **HEADS),
            "9 queries and 4 keys; a pattern is for self-attention",
        ),
        (
            lambda x: ops.window_attention(x, x, x, np.ones((9, 9)), window=2, **HEADS),
            r"mask is float64\[9, 9\]; with a pattern it is for padding",
        ),
        (
            lambda x: nn.Attention(
                H * D, num_heads=H, pattern=partial(ops.window_attention, window=2)
            )(x, x),
            "a pattern is for self-attention without a memory",
        ),
        (
            lambda x: HashedAttention(9, num_heads=2, buckets=2, chunk=2),
            "the heads must divide the features",
        ),
    ],
)
def test_bad_input_is_one_clear_error(call: Any, told: str) -> None:
    with pytest.raises(gg.GraphgenError, match=told):
        call(normal(B, 9, H * D))


def test_a_sequence_longer_than_the_layout_fails_at_run_time() -> None:
    layout = np.ones((2, 2), bool)

    def attend(q: Any) -> Any:
        return ops.block_sparse_attention(q, q, q, layout=layout, block=4, **HEADS)

    model = gg.build(attend, q=gg.float32["b", "n", H * D])
    best = optimize(model)
    assert gg.Session(best)(q=normal(1, 8, H * D))[0].shape == (1, 8, H * D)
    with pytest.raises(gg.GraphgenError):
        gg.Session(best)(q=normal(1, 9, H * D))


@pytest.mark.parametrize("causal", [False, True])
def test_rows_behind_the_end_of_a_sequence_are_not_computed(causal: bool, tmp_path: Path) -> None:
    """Of 9 positions in a graph for 4,096 no result is larger than the keys of one full row."""
    attend = partial(ops.block_sparse_attention, layout=ops.big_bird_layout(512), block=8, **HEADS)
    x = gg.float32["b", "n", H * D]
    model = gg.build(lambda q: attend(q, q, q, is_causal=int(causal)), q=x)
    session = gg.Session(optimize(model), profile=str(tmp_path / "run"))
    session(q=normal(1, 9, H * D))
    sizes = [int(event["args"].get("output_size", 0)) for event in session.end_profiling()]
    assert 0 < max(sizes) <= 4096 * H * D * 4
