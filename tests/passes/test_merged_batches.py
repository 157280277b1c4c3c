"""Attention around products that merge batch and heads, as tf2onnx writes an einsum."""

import itertools
from typing import Any

import numpy as np
import pytest
from small_models import ROUNDING, as_in_a_file, relative_rms

import graphgen as gg
from graphgen import ops
from graphgen.edit import infer_model
from graphgen.errors import GraphgenError
from graphgen.export.write import to_bytes
from graphgen.graph import count_operators
from graphgen.op import TABLE
from graphgen.ops.linalg import einsum
from graphgen.passes import optimize
from graphgen.runtime import Session

H, D = 4, 8
LOWEST = float(np.finfo(np.float32).min)
reshape, shape = TABLE["", "Reshape"], TABLE["", "Shape"]


def heads(x: Any) -> Any:
    return ops.transpose(ops.reshape(x, [ops.dim(x, 0), ops.dim(x, 1), H, D]), perm=[0, 2, 1, 3])


def flat(x: Any) -> Any:
    """(B·H, T, D), with T as what is left."""
    sizes, rest = shape(x), np.array([-1])
    return reshape(x, ops.concat(ops.reduce_prod(sizes[:2], [0]), rest, sizes[-1:], axis=0))


def attended(x: Any, mask: Any, *, merged: bool = True) -> Any:
    """Self-attention of x (B, T, H·D) with a mask of other sizes."""
    q, k, v = heads(x), heads(x * 0.5), heads(x + 1.0)
    scores = flat(q) @ ops.swap_last(flat(k))
    square = reshape(scores, ops.concat(shape(q)[:3], shape(k)[2:3], axis=0))
    weights = ops.softmax(ops.where(mask, square * 0.25, LOWEST))
    if not merged:
        return weights @ v
    y = flat(weights) @ flat(v)
    return reshape(y, ops.concat(shape(weights)[:3], np.array([D]), axis=0))


def over_keys(x: Any, m: Any) -> Any:
    return attended(x, ops.unsqueeze(m, [1, 2]))


def over_another(x: Any, y: Any) -> Any:
    """Cross attention, whose scores and result have the larger of both batches."""
    q, k, v = heads(x), heads(y * 0.5), heads(y + 1.0)
    larger = ops.maximum(shape(q)[:2], shape(k)[:2])
    scores = flat(q) @ ops.swap_last(flat(k))
    weights = ops.softmax(
        reshape(scores, ops.concat(larger, shape(q)[2:3], shape(k)[2:3], axis=0)) * 0.25
    )
    larger = ops.maximum(shape(weights)[:2], shape(v)[:2])
    y = flat(weights) @ flat(v)
    return reshape(y, ops.concat(larger, shape(weights)[2:3], np.array([D]), axis=0))


def counted_in_floats(x: Any) -> Any:
    """A causal mask of numbers that count the tokens, as TensorFlow calculates them."""
    length = ops.cast(ops.cast(shape(x)[1], to=gg.int32), to=gg.float32)
    steps = ops.range_(0.0, length, 1.0)
    causal = TABLE["", "GreaterOrEqual"](ops.unsqueeze(steps, [1]), steps)
    return attended(x, ops.expand(causal, shape(heads(x))[[0, 1, 2, 2]]))


def batches_apart(x: Any, m: Any) -> Any:
    return attended(x, ops.unsqueeze(m, [1, 2]), merged=False)


def over_keys_of_both(x: Any, m: Any, n: Any) -> Any:
    return attended(x, ops.logical_and(ops.unsqueeze(m, [1, 2]), ops.unsqueeze(n, [1, 2])))


def over_queries(x: Any, m: Any, n: Any) -> Any:
    """A mask (B, T, 1), beside one of keys: its queries may be more than those of x."""
    return attended(x, ops.logical_and(ops.unsqueeze(m, [1, 3]), ops.unsqueeze(n, [1, 2])))


@pytest.mark.parametrize(
    ("body", "fits"),
    [(over_keys, 9), (batches_apart, 12), (over_keys_of_both, 25), (over_queries, 30)],
)
def test_masks_have_sizes_of_their_own(body: Any, fits: int) -> None:
    """What ran runs, with the same result; nothing else does."""
    names = "xmn"[: body.__code__.co_argcount]
    specs = {"x": gg.float32["unk__0", "unk__1", H * D]}
    for i, name in enumerate(names[1:], 1):
        specs[name] = gg.bool_[f"unk__{2 * i}", f"unk__{2 * i + 1}"]
    model = as_in_a_file(body, primitives=True, **{name: specs[name] for name in names})
    best = optimize(model, verify=True)
    operators = count_operators(best.model)
    assert operators["Attention"] == 1 and "Softmax" not in operators, operators
    rng = np.random.default_rng(0)
    before, after = (Session(to_bytes(m), optimize=False) for m in (model, best.model))
    ran = 0
    for sizes in itertools.product((1, 3), (1, 5), repeat=len(names)):
        feeds: dict[str, Any] = {"x": rng.standard_normal((*sizes[:2], H * D)).astype(np.float32)}
        for i, name in enumerate(names[1:], 1):
            feeds[name] = rng.integers(0, 4, sizes[2 * i : 2 * i + 2]) > 0
            feeds[name][:, 0] = True
        try:
            [wanted] = before(feeds)
        except GraphgenError:
            with pytest.raises(GraphgenError):
                after(feeds)
            continue
        [got] = after(feeds)
        assert wanted.shape == got.shape and relative_rms(wanted, got) < ROUNDING
        ran += 1
    assert ran == fits


def test_the_larger_of_two_batches_is_either_where_a_product_shows_that_they_are_one() -> None:
    """Elsewhere the graph did not run, nor does it then."""
    specs = {n: gg.float32[f"unk__{i}", f"unk__{i + 1}", H * D] for i, n in ((0, "x"), (2, "y"))}
    model = as_in_a_file(over_another, primitives=True, **specs)
    best = optimize(model, verify=True)
    operators = count_operators(best.model)
    assert operators["Attention"] == 1 and "Softmax" not in operators, operators
    rng = np.random.default_rng(0)
    before, after = (Session(to_bytes(m), optimize=False) for m in (model, best.model))
    for b, t, c, s in itertools.product((1, 2, 3), (1, 5), (1, 2, 3), (1, 4)):
        sizes = {"x": (b, t, H * D), "y": (c, s, H * D)}
        feeds = {n: rng.standard_normal(each).astype(np.float32) for n, each in sizes.items()}
        if b != c:
            for session in (before, after):
                with pytest.raises(GraphgenError):
                    session(feeds)
            continue
        [wanted], [got] = before(feeds), after(feeds)
        assert wanted.shape == got.shape and relative_rms(wanted, got) < ROUNDING


def test_what_counts_a_size_in_floats_has_that_size() -> None:
    model = as_in_a_file(
        counted_in_floats, primitives=True, x=gg.float32["unk__0", "unk__1", H * D]
    )
    best = optimize(model, verify=True)
    operators = count_operators(best.model)
    assert operators["Attention"] == 1 and "Softmax" not in operators, operators
    before, after = (Session(to_bytes(m), optimize=False) for m in (model, best.model))
    for sizes in ((1, 1), (2, 1), (1, 7), (3, 4)):
        x = np.random.default_rng(1).standard_normal((*sizes, H * D)).astype(np.float32)
        [wanted], [got] = before({"x": x}), after({"x": x})
        assert wanted.shape == got.shape and relative_rms(wanted, got) < ROUNDING


def test_sizes_that_are_broadcast_have_one_name_in_whatever_steps() -> None:
    """But not the name of any of them, which may be 1."""

    def body(a: Any, b: Any, c: Any) -> Any:
        return (a + b) + c, a + (c + b), a + b

    specs = {name: gg.float32[f"unk__{i}", 2] for i, name in enumerate("abc")}
    model = as_in_a_file(body, primitives=True, **specs)
    infer_model(model)
    one, other, two = (str(y.shape[0]) for y in model.graph.outputs if y.shape is not None)
    assert one == other != two
    assert {one, two}.isdisjoint({"unk__0", "unk__1", "unk__2"})


def traced_length(x: Any, y: Any) -> Any:
    """torch's cross attention, (T, B, H·D), of which a tool made the example's length a number."""
    rows, flat = ops.reshape(x, [-1, H * D]), np.eye(H * D, dtype=np.float32) * 0.5
    q = reshape(rows @ flat + 0.1, ops.concat(shape(x)[:2], np.array([H, D]), axis=0))
    k, v = (ops.transpose(ops.reshape(y * c, [7, -1, D]), perm=[1, 0, 2]) for c in (0.5, 0.7))
    k, v = (ops.reshape(z, [-1, H, 7, D]) for z in (k, v))
    return ops.softmax(ops.transpose(q, perm=[1, 2, 0, 3]) @ ops.swap_last(k)) @ v


def merged_in_two_ways(x: Any, y: Any) -> Any:
    """Q (T, B·H, D) of (T, B, H, D), as conditional DETR; K's and V's first axis has a name."""
    flat = ops.concat(shape(x)[:1], shape(x)[1:2] * 4, np.array([D]), axis=0)
    q = ops.transpose(reshape(ops.reshape(x, [0, 0, H, D]), flat), perm=[1, 0, 2])
    k = ops.reshape(y, [0, 0, D, H])[..., 0]
    return ops.softmax(q @ ops.swap_last(k)) @ (k + 1.0)


def by_einsum(x: Any, y: Any) -> Any:
    """As LoFTR writes it, with a softmax over axis 2."""
    q, k = ops.reshape(x, [0, 0, H, D]), ops.reshape(y, [0, 0, H, D])
    weights = ops.softmax(einsum(q, k, equation="nlhd,nshd->nlsh") * 0.35, axis=2)
    return einsum(weights, k + 1.0, equation="nlsh,nshd->nlhd")


@pytest.mark.parametrize(
    ("body", "given"),
    [
        (by_einsum, [((3, 5), (3, 7)), ((3, 5), (1, 7)), ((1, 5), (3, 7)), ((1, 1), (1, 1))]),
        (traced_length, [((5, 3), (7, 3)), ((5, 3), (7, 1)), ((5, 1), (7, 3)), ((1, 1), (14, 1))]),
        (merged_in_two_ways, [((5, 3), (12, 6)), ((5, 3), (1, 6)), ((1, 1), (4, 1))]),
    ],
)
def test_batches_that_may_differ_have_the_sizes_of_operands(body: Any, given: Any) -> None:
    """Where a source has merged them with something else, too; 1 is repeated for the other's."""
    specs = {"x": gg.float32["t", "b", H * D], "y": gg.float32["s", "n", H * D]}
    model = as_in_a_file(body, primitives=True, **specs)
    best = optimize(model)
    assert count_operators(best.model)["Attention"] == 1
    rng = np.random.default_rng(0)
    before, after = (Session(to_bytes(m), optimize=False) for m in (model, best.model))
    for sizes in given:
        feeds = {
            name: rng.standard_normal((*size, H * D)).astype(np.float32)
            for name, size in zip("xy", sizes, strict=True)
        }
        [wanted], [got] = before(feeds), after(feeds)
        assert wanted.shape == got.shape and relative_rms(wanted, got) < ROUNDING


def test_grouped_queries_of_five_dimensions() -> None:
    """(B, G, R, T, D), as tf2onnx merges them to (B·G, R·T, D): products of sizes with a name."""

    def body(x: Any) -> Any:
        q = ops.transpose(ops.reshape(x, [0, 0, 2, 2, D]), perm=[0, 2, 3, 1, 4])
        k = ops.transpose(ops.reshape(x[..., : 2 * D], [0, 0, 2, D]), perm=[0, 2, 1, 3])
        square = ops.concat(shape(q)[:4], shape(k)[2:3], axis=0)
        weights = ops.softmax(reshape(flat(q) @ ops.swap_last(flat(k)), square) * 0.35)
        y = reshape(flat(weights) @ flat(k + 1.0), shape(q))
        return reshape(
            ops.transpose(y, perm=[0, 3, 1, 2, 4]),
            ops.concat(shape(x)[:2], np.array([H * D]), axis=0),
        )

    model = as_in_a_file(body, primitives=True, x=gg.float32["b", "t", H * D])
    best = optimize(model, verify=True)
    operators = count_operators(best.model)
    assert operators["Attention"] == 1 and "Softmax" not in operators, operators
    rng = np.random.default_rng(0)
    before, after = (Session(to_bytes(m), optimize=False) for m in (model, best.model))
    for b, t in ((2, 5), (1, 1), (3, 2)):
        feeds = {"x": rng.standard_normal((b, t, H * D)).astype(np.float32)}
        [wanted], [got] = before(feeds), after(feeds)
        assert relative_rms(wanted, got) < ROUNDING
