"""Rotary embeddings in the spellings of exporters and hands; each against itself unfused."""

from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from small_models import as_in_a_file, relative_rms, run_plain

import graphgen as gg
from graphgen import ops
from graphgen.graph import count_operators
from graphgen.nn.module import build
from graphgen.passes import optimize

H, D = 4, 8
X = gg.float32["b", "t", H * D]
HALF = gg.float32["b", "t", D // 2]
FREQUENCIES = (10000.0 ** -(np.arange(D // 2) / (D // 2))).astype(np.float32)
LONG = np.arange(64, dtype=np.float32)[:, None] * FREQUENCIES


def sliced(x: Any, start: int, end: int, step: int = 1) -> Any:
    return ops.slice_(x, [start], [end], [-1], [step])


def halves(x: Any) -> Any:
    return ops.split(x, axis=-1, num_outputs=2)


def stack(a: Any, b: Any) -> Any:
    return ops.concat(ops.unsqueeze(a, [-1]), ops.unsqueeze(b, [-1]), axis=-1)


def apart(x: Any) -> Any:
    """(B, T, H·D) to (B, T, H, D)."""
    return ops.reshape(x, [ops.dim(x, 0), ops.dim(x, 1), H, D])


def heads(x: Any) -> Any:
    return ops.transpose(apart(x), perm=[0, 2, 1, 3])


def rotated(x: Any) -> Any:
    a, b = halves(x)
    return ops.concat(ops.neg(b), a, axis=-1)


def doubled(c: Any, axis: int = 1) -> Any:
    return ops.unsqueeze(ops.concat(c, c, axis=-1), [axis])


def rotate_half(x: Any, c: Any, s: Any) -> Any:
    return heads(x) * doubled(c) + rotated(heads(x)) * doubled(s)


def rotate_half_by_slices(x: Any, c: Any, s: Any) -> Any:
    y = heads(x)
    turned = ops.concat(ops.neg(sliced(y, D // 2, 2**63 - 1)), sliced(y, 0, D // 2), axis=-1)
    return doubled(s) * turned + y * doubled(c)


def rotate_half_the_other_way(x: Any, c: Any, s: Any) -> Any:
    return heads(x) * doubled(c) - rotated(heads(x)) * doubled(s)


def before_the_transpose(x: Any, c: Any, s: Any) -> Any:
    y = apart(x) * doubled(c, 2) + rotated(apart(x)) * doubled(s, 2)
    return ops.transpose(y, perm=[0, 2, 1, 3])


def moved_behind_a_product(x: Any, c: Any, s: Any) -> Any:
    """As the runtime saves it: one term in the layout before the transpose."""
    y, order = apart(x), [0, 2, 1, 3]
    one = ops.transpose(y * ops.transpose(doubled(c), perm=order), perm=order)
    return one + rotated(ops.transpose(y, perm=order)) * doubled(s)


def half_by_half(x: Any, c: Any, s: Any) -> Any:
    (a, b), c, s = halves(heads(x)), ops.unsqueeze(c, [1]), ops.unsqueeze(s, [1])
    return ops.concat(a * c - b * s, b * c + a * s, axis=-1)


def angles_inside(x: Any, c: Any, s: Any) -> Any:
    """Cos and sin of angles that are doubled first."""
    angle = doubled(c)
    return heads(x) * ops.cos(angle) + rotated(heads(x)) * (ops.sin(angle) * 1.5)


def even_and_odd(x: Any, c: Any, s: Any) -> Any:
    y, c, s = heads(x), ops.unsqueeze(c, [1]), ops.unsqueeze(s, [1])
    a, b = sliced(y, 0, D, 2), sliced(y, 1, D, 2)
    both = stack(a * c - b * s, a * s + b * c)
    return ops.reshape(both, [ops.dim(y, 0), H, ops.dim(y, 2), D])


def as_complex_numbers(x: Any, c: Any, s: Any) -> Any:
    """Pairs on an axis of their own, angles too."""
    y = ops.reshape(x, [ops.dim(x, 0), ops.dim(x, 1), H, D // 2, 2])
    angles = ops.unsqueeze(stack(c, s), [2])
    (a, b), (c, s) = ([ops.gather(z, np.asarray(i), axis=-1) for i in (0, 1)] for z in (y, angles))
    both = stack(a * c - b * s, a * s + b * c)
    y = ops.reshape(both, [ops.dim(x, 0), ops.dim(x, 1), H, D])
    return ops.transpose(y, perm=[0, 2, 1, 3])


def rotate_every_two(x: Any, c: Any, s: Any) -> Any:
    y = apart(x)
    turned = stack(ops.neg(sliced(y, 1, D, 2)), sliced(y, 0, D, 2))
    turned = ops.reshape(turned, [ops.dim(x, 0), ops.dim(x, 1), H, D])
    c, s = (
        ops.reshape(
            ops.expand(ops.unsqueeze(z, [2, 4]), [1, 1, 1, 1, 2]),
            [ops.dim(x, 0), ops.dim(x, 1), 1, D],
        )
        for z in (c, s)
    )
    return ops.transpose(y * c + turned * s, perm=[0, 2, 1, 3])


def partial(x: Any, c: Any, s: Any) -> Any:
    c, s = (doubled(sliced(z, 0, 2)) for z in (c, s))
    turned, kept = ops.split(heads(x), [4, D - 4], axis=-1, num_outputs=2)
    return ops.concat(turned * c + rotated(turned) * s, kept, axis=-1)


def partial_in_three(x: Any, c: Any, s: Any) -> Any:
    y, c, s = heads(x), *(ops.unsqueeze(sliced(z, 0, 2), [1]) for z in (c, s))
    a, b, kept = sliced(y, 0, 2), sliced(y, 2, 4), sliced(y, 4, D)
    return ops.concat(a * c - b * s, b * c + a * s, kept, axis=-1)


def partial_behind(x: Any, c: Any, s: Any) -> Any:
    c, s = (doubled(sliced(z, 0, 2)) for z in (c, s))
    kept, turned = ops.split(heads(x), [D - 4, 4], axis=-1, num_outputs=2)
    return ops.concat(kept, turned * c + rotated(turned) * s, axis=-1)


def from_a_cache(x: Any, c: Any, s: Any) -> Any:
    """Rows of constant caches, chosen by positions."""
    at = ops.cast(ops.reduce_max(c, [2], keepdims=0), to=ir.DataType.INT64)
    caches = [f(np.concatenate([LONG, LONG], -1)) for f in (np.cos, np.sin)]
    c, s = (ops.unsqueeze(ops.gather(cache, at), [1]) for cache in caches)
    return heads(x) * c + rotated(heads(x)) * s


def cut_from_a_table(x: Any, c: Any, s: Any) -> Any:
    """The first rows of constant caches, Min(64, t) of them, as cos[:t] in torch."""
    c, s = (ops.slice_(f(LONG), [0], [ops.dim(x, 1)], [0]) for f in (np.cos, np.sin))
    a, b = halves(heads(x))
    return ops.concat(a * c - b * s, b * c + a * s, axis=-1)


def rolled(x: Any, c: Any, s: Any) -> Any:
    """The halves exchanged, and a constant of signs."""
    a, b = halves(heads(x))
    signs = np.repeat(np.array([-1.0, 1.0], np.float32), D // 2)
    return heads(x) * doubled(c) + ops.concat(b, a, axis=-1) * signs * doubled(s)


def in_two_layouts(x: Any, c: Any, s: Any) -> Any:
    """One term of all features, the other of pairs, as einops lays them out."""
    c, s = (
        ops.reshape(
            ops.expand(ops.unsqueeze(z, [1, 4]), [1, 1, 1, 1, 2]),
            [ops.dim(x, 0), 1, ops.dim(x, 1), D],
        )
        for z in (c, s)
    )
    pairs = ops.reshape(heads(x), [ops.dim(x, 0), H, ops.dim(x, 1), D // 2, 2])
    a, b = (ops.gather(pairs, np.asarray(i), axis=-1) for i in (0, 1))
    turned = ops.reshape(stack(ops.neg(b), a), [ops.dim(x, 0), H, ops.dim(x, 1), D])
    return heads(x) * c + turned * s


def one_angle_for_each_pair(x: Any, c: Any, s: Any) -> Any:
    """Complex numbers as torch.export takes them apart: both parts keep an axis of 1."""
    y = ops.reshape(heads(x), [ops.dim(x, 0), H, ops.dim(x, 1), D // 2, 2])
    (a, b), (c, s) = halves(y), (ops.unsqueeze(z, [1, 4]) for z in (c, s))
    both = ops.concat(a * c - b * s, a * s + b * c, axis=-1)
    return ops.reshape(both, [ops.dim(x, 0), H, ops.dim(x, 1), D])


def the_operator(x: Any, c: Any, s: Any) -> Any:
    return ops.rotary_embedding(heads(x), c, s, interleaved=1)


SPELLINGS = [
    (rotate_half, "4 heads, 8 of 8 features, by halves"),
    (rotate_half_by_slices, "4 heads, 8 of 8 features, by halves"),
    (rotate_half_the_other_way, "4 heads, 8 of 8 features, by halves"),
    (before_the_transpose, "4 heads, 8 of 8 features, by halves"),
    (moved_behind_a_product, "4 heads, 8 of 8 features, by halves"),
    (half_by_half, "4 heads, 8 of 8 features, by halves"),
    (angles_inside, "4 heads, 8 of 8 features, by halves"),
    (even_and_odd, "4 heads, 8 of 8 features, even and odd"),
    (as_complex_numbers, "4 heads, 8 of 8 features, even and odd"),
    (rotate_every_two, "4 heads, 8 of 8 features, even and odd"),
    (partial, "4 heads, 4 of 8 features, by halves"),
    (partial_in_three, "4 heads, 4 of 8 features, by halves"),
    (partial_behind, "4 heads, 4 of 4 features, by halves"),
    (from_a_cache, "4 heads, 8 of 8 features, by halves"),
    (cut_from_a_table, "4 heads, 8 of 8 features, by halves"),
    (rolled, "4 heads, 8 of 8 features, by halves"),
    (in_two_layouts, "4 heads, 8 of 8 features, even and odd"),
    (one_angle_for_each_pair, "4 heads, 8 of 8 features, even and odd"),
    (the_operator, "4 heads, 8 of 8 features, even and odd"),
]


def feeds(b: int = 2, t: int = 5) -> dict[str, Any]:
    rng = np.random.default_rng(3)
    shapes = {"x": (b, t, H * D), "c": (b, t, D // 2), "s": (b, t, D // 2)}
    return {k: rng.normal(0.0, 3.0, shape).astype(np.float32) for k, shape in shapes.items()}


@pytest.mark.share(3)
@pytest.mark.parametrize("target, runtime", [("cpu", None), ("cpu", "1.20"), ("cuda", None)])
@pytest.mark.parametrize("body, told", SPELLINGS, ids=[body.__name__ for body, _ in SPELLINGS])
def test_spellings(body: Any, told: str, target: str, runtime: str | None) -> None:
    model = build(body, primitives=True, x=X, c=HALF, s=HALF)
    best = optimize(model, target=target, runtime=runtime, verify=target == "cpu")
    sites = next(p.sites for p in best.report.passes if p.name == "fuse_rotary")
    assert [(s.status, s.reason) for s in sites] == [("fired", told)]
    domain = "com.microsoft::" if runtime else ""
    found = count_operators(best.model)
    assert found[f"{domain}RotaryEmbedding"] == 1
    of_angles = {angles_inside: {"Mul"}, rotate_half_the_other_way: {"Neg"}}.get(body, set())
    assert {"Mul", "Neg"} & set(found) <= of_angles | ({"Mul"} if runtime else set())
    for b, t in ((2, 5), (1, 1)):
        given = feeds(b, t)
        wanted, got = (run_plain(m, given)[0] for m in (model, best.model))
        assert relative_rms(wanted, got) < 1e-6


def other_halves(x: Any, c: Any, s: Any) -> Any:
    c, s = (ops.unsqueeze(ops.concat(a, b, axis=-1), [1]) for a, b in ((c, s), (s, c)))
    return heads(x) * c + rotated(heads(x)) * s


def a_reflection(x: Any, c: Any, s: Any) -> Any:
    (a, b), c, s = halves(heads(x)), ops.unsqueeze(c, [1]), ops.unsqueeze(s, [1])
    return ops.concat(a * c + b * s, b * c + a * s, axis=-1)


def exchanged(x: Any, c: Any, s: Any) -> Any:
    a, b = halves(heads(x))
    return heads(x) * doubled(c) + ops.concat(b, a, axis=-1) * doubled(s)


def angles_of_heads(x: Any, c: Any, s: Any) -> Any:
    each = np.arange(1, H + 1, dtype=np.float32).reshape(1, H, 1, 1)
    c, s = (doubled(ops.reduce_max(z, [0])) * each for z in (c, s))
    return heads(x) * c + rotated(heads(x)) * s


def other_features(x: Any, c: Any, s: Any) -> Any:
    """The features that stay stand where they did not."""
    turned, kept = ops.split(heads(x), [4, D - 4], axis=-1, num_outputs=2)
    c, s = (doubled(sliced(z, 0, 2)) for z in (c, s))
    return ops.concat(turned * c + rotated(kept) * s, turned, axis=-1)


def positions(c: Any) -> Any:
    return ops.cast(ops.reduce_max(c, [2]), to=ir.DataType.INT64)


def of_rows_and_columns(x: Any, c: Any, s: Any) -> Any:
    """Two kinds of positions, which are the same below 4."""
    at = [ops.cast(ops.div(positions(c), n), to=ir.DataType.FLOAT) * FREQUENCIES for n in (4, 8)]
    angle = ops.unsqueeze(ops.concat(*at, axis=-1), [1])
    return heads(x) * ops.cos(angle) + rotated(heads(x)) * ops.sin(angle)


def from_other_tables(x: Any, c: Any, s: Any) -> Any:
    """The halves of a cache differ from row 10 on."""
    late = np.concatenate([LONG, np.where(np.arange(64)[:, None] < 10, LONG, 0.5 * LONG)], -1)
    at = ops.squeeze(positions(c), [2])
    c, s = (ops.unsqueeze(ops.gather(f(late), at), [1]) for f in (np.cos, np.sin))
    return heads(x) * c + rotated(heads(x)) * s


@pytest.mark.parametrize(
    "body",
    [other_halves, a_reflection, exchanged, angles_of_heads, other_features, of_rows_and_columns,
     from_other_tables],
)  # fmt: skip
def test_what_only_looks_like_it(body: Any) -> None:
    model = build(body, primitives=True, x=X, c=HALF, s=HALF)
    best = optimize(model, verify=True)
    assert "RotaryEmbedding" not in count_operators(best.model)
    [site] = next(p.sites for p in best.report.passes if p.name == "fuse_rotary")
    told = {angles_of_heads: "; wanted the same for all heads, of a known number"}.get(
        body, ", but it is not (x0 cos - x1 sin, x1 cos + x0 sin)"
    )
    assert site.status == "missed" and site.reason.endswith(told)
    wanted, got = (run_plain(m, feeds())[0] for m in (model, best.model))
    assert relative_rms(wanted, got) < 1e-6


def test_one_head_of_keys_is_turned_too() -> None:
    """Then the angles have the shape of the product."""

    def body(x: Any, c: Any, s: Any) -> Any:
        y = ops.unsqueeze(x, [1])
        return y * doubled(c) + rotated(y) * doubled(s)

    best = optimize(build(body, primitives=True, x=gg.float32["b", "t", D], c=HALF, s=HALF))
    assert count_operators(best.model)["RotaryEmbedding"] == 1
    sites = next(p.sites for p in best.report.passes if p.name == "fuse_rotary")
    assert [s.reason for s in sites] == ["1 heads, 8 of 8 features, by halves"]


def test_long_sequences_of_known_size_are_as_quick() -> None:
    """Samples have few rows: those of this x alone would take a GB."""
    x, angles = gg.float32[1, 2**20, H * D], gg.float32[1, 2**20, D // 2]
    best = optimize(build(rotate_half, primitives=True, x=x, c=angles, s=angles))
    assert count_operators(best.model)["RotaryEmbedding"] == 1


def test_what_has_no_rank_stays_with_a_remark() -> None:
    values = [ir.val(n, ir.DataType.FLOAT) for n in "xcs"]
    node = ir.node("RotaryEmbedding", values)
    node.outputs[0].name, node.outputs[0].type = "y", values[0].type
    graph = ir.Graph(values, node.outputs, nodes=[node], opset_imports={"": 23})
    best = optimize(ir.Model(graph, ir_version=10), runtime="1.20")
    [site] = next(p.sites for p in best.report.passes if p.name == "legalize")
    assert site.status == "missed" and "its rank must be known" in site.reason


def test_caches_that_broadcast_are_expanded() -> None:
    """A file may ask for what the kernel refuses: the same angles for all of a batch."""

    def body(x: Any, c: Any, s: Any) -> Any:
        return ops.rotary_embedding(x, c, s, num_heads=H)

    angles = gg.float32[1, "t", D // 2]
    model = build(body, x=X, c=angles, s=angles)
    best = optimize(model)
    assert count_operators(best.model)["RotaryEmbedding"] == 1
    given = {k: v[:1] if k != "x" else v for k, v in feeds().items()}
    plain = build(body, primitives=True, x=X, c=angles, s=angles)
    wanted, got = (run_plain(m, given)[0] for m in (plain, best.model))
    assert relative_rms(wanted, got) < 1e-6


def test_in_front_of_attention_nothing_is_transposed() -> None:
    def body(q: Any, k: Any, v: Any, c: Any, s: Any) -> Any:
        q, k = rotate_half(q, c, s), rotate_half(k, c, s)
        return ops.merge_heads(ops.softmax(q @ ops.swap_last(k) / D**0.5) @ heads(v))

    best = optimize(build(body, primitives=True, q=X, k=X, v=X, c=HALF, s=HALF), verify=True)
    assert count_operators(best.model) == {"Attention": 1, "RotaryEmbedding": 2}


def wide(x: Any) -> Any:
    return ops.cast(x, to=ir.DataType.FLOAT)


def test_moved_in_float16_turned_in_float32() -> None:
    """As the runtime saves float16: each operand of a product is cast after it was moved."""
    half = gg.float16["b", "t", H * D]

    def body(x: Any, c: Any, s: Any) -> Any:
        (a, b), y = halves(heads(x)), heads(x)
        turned = ops.concat(ops.neg(wide(b)), wide(a), axis=-1)
        return ops.cast_like(wide(y) * doubled(c) + turned * doubled(s), x)

    model = build(body, primitives=True, x=half, c=HALF, s=HALF)
    best = optimize(model, verify=True)
    assert count_operators(best.model)["RotaryEmbedding"] == 1
    given = feeds()
    given["x"] = given["x"].astype(np.float16)
    wanted, got = (run_plain(m, given)[0] for m in (model, best.model))
    assert relative_rms(wanted, got) < 1e-3


def test_a_cast_that_rounds_is_no_move() -> None:
    """One term is of x, the other of its whole numbers: no rotation gives both."""

    def body(x: Any, c: Any, s: Any) -> Any:
        rounded = wide(ops.cast(heads(x), to=ir.DataType.INT32))
        return heads(x) * doubled(c) + rotated(rounded) * doubled(s)

    model = build(body, primitives=True, x=X, c=HALF, s=HALF)
    best = optimize(model)
    assert "RotaryEmbedding" not in count_operators(best.model)
    wanted, got = (run_plain(m, feeds())[0] for m in (model, best.model))
    assert relative_rms(wanted, got) < 1e-6


@pytest.mark.parametrize("body", [rotate_half, even_and_odd, partial])
def test_angles_of_unknown_width_may_be_one_for_all_features(body: Any) -> None:
    width = gg.float32["b", "t", "w"]
    model = as_in_a_file(body, primitives=True, x=X, c=width, s=HALF)
    best = optimize(model, verify=True)
    assert "RotaryEmbedding" not in count_operators(best.model)
    [site] = next(p.sites for p in best.report.passes if p.name == "fuse_rotary")
    assert site.status == "missed" and "the angles" in site.reason


@pytest.mark.parametrize("size", [2, 8])
def test_one_angle_that_is_repeated_for_all_features(size: int) -> None:
    """It is as long as half of them in the operator, which otherwise turns the first two alone."""

    def body(x: Any, c: Any) -> Any:
        c, s = (ops.expand(ops.unsqueeze(f(c), [1]), [1, 1, 1, size]) for f in (ops.cos, ops.sin))
        y = ops.transpose(ops.reshape(x, [0, 0, H, size]), perm=[0, 2, 1, 3])
        a, b = halves(y)
        return y * c + ops.concat(ops.neg(b), a, axis=-1) * s

    specs = {"x": gg.float32["b", "t", H * size], "c": gg.float32["b", "t", 1]}
    model = as_in_a_file(body, primitives=True, **specs)
    best = optimize(model, verify=True)
    rng = np.random.default_rng(0)
    for b, t in ((2, 5), (1, 1)):
        feeds = {
            "x": rng.standard_normal((b, t, H * size)).astype(np.float32),
            "c": rng.standard_normal((b, t, 1)).astype(np.float32),
        }
        (wanted,), (got,) = run_plain(model, feeds), run_plain(best.model, feeds)
        assert relative_rms(wanted, got) < 1e-6
    assert count_operators(best.model).get("RotaryEmbedding", 0) == 1
