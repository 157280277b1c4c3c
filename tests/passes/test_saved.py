"""Operators of files that were optimized for another provider: bodies, fused as their source."""

import math
from typing import Any

import numpy as np
import pytest
from small_models import ROUNDING, as_in_a_file, relative_rms, run_plain

import graphgen as gg
from graphgen import ops
from graphgen.graph import count_operators
from graphgen.op import TABLE
from graphgen.passes import Optimized, optimize

H, D = 4, 8
RNG = np.random.default_rng(5)
QKV = gg.float32["b", "t", H, 3, D]
PADDING = gg.float32["b", 1, 1, "t"]


def n(*shape: int, scale: float = 2.0) -> Any:
    return RNG.normal(0.0, scale, shape).astype(np.float32)


def saved(name: str) -> Any:
    return TABLE["com.microsoft", name]


def apart(qkv: Any) -> list[Any]:
    """Q, K and V on heads, of (B, T, H, 3, D)."""
    parts = ops.split(qkv, axis=3, num_outputs=3)
    lead = [ops.dim(qkv, 0), ops.dim(qkv, 1)]
    return [ops.transpose(ops.reshape(x, [*lead, H, D]), perm=[0, 2, 1, 3]) for x in parts]


def source(qkv: Any, padding: Any) -> Any:
    q, k, v = apart(qkv)
    return ops.merge_heads(ops.softmax(q @ ops.swap_last(k) / math.sqrt(D) + padding) @ v)


def by_bias_softmax(qkv: Any, padding: Any) -> Any:
    q, k, v = apart(qkv)
    scores = q @ ops.swap_last(k) / math.sqrt(D)
    weights = saved("BiasSoftmax")(scores, padding, axis=3, is_inner_broadcast=1)
    return ops.merge_heads(weights @ v)


def by_packed_operands(qkv: Any, padding: Any, *, bias: Any = None) -> Any:
    t = ops.dim(qkv, 1)
    whole = ops.expand(padding, [1, H, t, 1])
    return saved("MultiHeadAttention")(qkv, None, None, bias, None, whole, num_heads=H)


def feeds() -> dict[str, Any]:
    padding = np.zeros((2, 1, 1, 6), np.float32)
    padding[0, ..., 4:] = np.finfo(np.float32).min
    return {"qkv": n(2, 6, H, 3, D), "padding": padding}


def remarks(best: Optimized) -> str:
    return " ".join(best.report.remarks())


@pytest.mark.parametrize("body", [by_bias_softmax, by_packed_operands])
def test_what_the_cpu_has_no_kernel_for_is_fused_as_its_source(body: Any) -> None:
    model = as_in_a_file(body, qkv=QKV, padding=PADDING)
    best = optimize(model, expect={"attention": 1})
    counts = count_operators(best.model)
    assert counts["Attention"] == 1 and not {"Softmax", "MatMul"} & set(counts)
    given = feeds()
    plain = as_in_a_file(source, qkv=QKV, padding=PADDING)
    (wanted,), (got,) = run_plain(plain, given), run_plain(best.model, given)
    assert relative_rms(wanted, got) < ROUNDING


def test_on_a_gpu_which_has_the_kernel_it_stays() -> None:
    best = optimize(as_in_a_file(by_packed_operands, qkv=QKV, padding=PADDING), target="cuda")
    assert count_operators(best.model)["com.microsoft::MultiHeadAttention"] == 1


def test_operands_without_a_body_stay_with_a_remark() -> None:
    with_bias = as_in_a_file(lambda qkv, padding: by_packed_operands(qkv, padding, bias=n(96)),
                             qkv=QKV, padding=PADDING)  # fmt: skip
    best = optimize(with_bias)
    assert count_operators(best.model)["com.microsoft::MultiHeadAttention"] == 1
    reason = "MultiHeadAttention with packed operands: MultiHeadAttention: packed operands with a"
    assert f"refuses {reason} bias have no body" in remarks(best)


def test_what_the_cpu_has_a_kernel_for_stays_and_counts() -> None:
    def body(x: Any, mask: Any) -> Any:
        return saved("Attention")(x, n(16, 3 * H * D, scale=0.5), n(3 * H * D), mask, num_heads=H)

    model = as_in_a_file(body, x=gg.float32["b", "t", 16], mask=gg.int32["b", "t"])
    best = optimize(model, expect={"attention": 1}, verify=True)
    assert count_operators(best.model) == {"com.microsoft::Attention": 1}


def t5_bucket(distance: int, buckets: int, furthest: int, both: bool) -> int:
    """The bucket of a key `distance` after its query (arXiv 1910.10683)."""
    first = 0
    if both:
        buckets //= 2
        first, distance = (buckets if distance > 0 else 0), abs(distance)
    else:
        distance = max(-distance, 0)
    exact = buckets // 2
    if distance < exact:
        return first + distance
    step = math.log(distance / exact) / math.log(furthest / exact) * (buckets - exact)
    return first + min(exact + int(step), buckets - 1)


@pytest.mark.parametrize("both", [0, 1])
def test_the_bias_of_t5_reads_its_table_by_columns(both: int) -> None:
    table, length = n(12, H), np.array(40)
    given = saved("RelativePositionBias")(
        table, length, length, max_distance=23, is_bidirectional=both
    )
    rows = table.reshape(H, 12)
    wanted = [[t5_bucket(s - t, 12, 23, bool(both)) for s in range(40)] for t in range(40)]
    np.testing.assert_array_equal(given, rows[None, :, np.array(wanted)])


def test_a_softmax_over_several_axes_is_one() -> None:
    x, bias = n(2, 3, 5), n(1, 3, 5)
    e = np.exp((x + bias).astype(np.float64))
    given = saved("BiasSoftmax")(x, bias, is_inner_broadcast=0)
    assert relative_rms(e / e.sum((1, 2), keepdims=True), given) < ROUNDING


def test_norms_of_groups_have_their_channels_last() -> None:
    x, gain, shift, skip = n(2, 3, 5, 8), n(8), n(8), n(2, 8)
    total = x + skip[:, None, None] + shift
    groups = total.reshape(2, 15, 4, 2)
    mean = groups.mean((1, 3), keepdims=True)
    normal = (groups - mean) / np.sqrt(groups.var((1, 3), keepdims=True) + 1e-5)
    y = normal.reshape(x.shape) * gain + shift
    given = saved("SkipGroupNorm")(x, gain, shift, skip, shift, groups=4, activation=1)
    assert relative_rms(y / (1 + np.exp(-y)), given) < ROUNDING


def test_the_bias_of_wavlm_is_gated_by_its_queries() -> None:
    q, shift, at, w, b, c = (n(2, 3, 8), n(8), n(1, 2, 3, 3), n(4, 6), n(6), n(1, 2, 1, 1))
    heads = (q + shift).reshape(2, 3, 2, 4).transpose(0, 2, 1, 3)
    gates = 1 / (1 + np.exp(-(heads @ w + b).reshape(2, 2, 3, 2, 3).sum(-1)))
    wanted = (gates[..., :1] * (gates[..., 1:] * c - 1.0) + 2.0) * at
    given = saved("GatedRelativePositionBias")(q, shift, at, w, b, c, num_heads=2)
    assert relative_rms(wanted, given) < ROUNDING


@pytest.mark.parametrize("saved_as", ["RMSNormalization", "SimplifiedLayerNormalization"])
@pytest.mark.parametrize(("perm", "axis"), [([0, 1, 2], -1), ([0, 1, 2], 1), ([0, 2, 1], 1)])
def test_a_norm_of_differences_from_the_mean_is_a_layer_norm(
    saved_as: str, perm: Any, axis: int
) -> None:
    """The runtime writes a layer norm without a bias so; along another axis it is none."""

    def body(x: Any) -> Any:
        d = x - ops.reduce_mean(x, [axis])
        d = d if perm[1] == 1 else ops.transpose(d, perm=perm)
        return TABLE["", saved_as](d, gain, epsilon=0.01)

    gain = n(16)
    model = as_in_a_file(body, x=gg.float32["b", 16, 16])
    best = optimize(model, verify=True, expect={"norm": 1})
    found = count_operators(best.model)
    assert ("LayerNormalization" in found) == (axis == -1 or perm[1] == 2)
    x = {"x": n(2, 16, 16) + 3.0}
    (wanted,), (got,) = run_plain(model, x), run_plain(best.model, x)
    assert relative_rms(wanted, got) < ROUNDING
