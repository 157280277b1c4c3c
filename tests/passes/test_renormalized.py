"""A mask that multiplies weights, which are then divided by their sum, as jax2onnx writes it."""

from typing import Any

import numpy as np
import pytest
from small_models import ROUNDING, as_in_a_file, relative_rms, run_plain

import graphgen as gg
from graphgen import ops
from graphgen.graph import count_operators
from graphgen.op import TABLE
from graphgen.passes import optimize

H, D = 4, 8
X = gg.float32["b", "t", H * D]
reduce_sum = TABLE["", "ReduceSum"]


def heads(x: Any) -> Any:
    return ops.transpose(ops.reshape(x, [ops.dim(x, 0), ops.dim(x, 1), H, D]), perm=[0, 2, 1, 3])


def renormalized(
    x: Any,
    mask: Any,
    *,
    above: float = 0.0,
    other: float = 1.0,
    axis: int = 3,
    square: int = 1,
    bounded: bool = True,
) -> Any:
    q, k, v = heads(x), heads(x * 0.5), heads(x + 1.0)
    if bounded:  # an element of a norm is √8 at most, so a score is 8 · (1.5 √8)² / 4 = 36
        q, k = (ops.layer_normalization(y, np.full(D, 1.5, np.float32)) for y in (q, k))
    weights = ops.softmax(q @ ops.swap_last(k) * 0.25)
    kept = weights * (mask if isinstance(mask, np.ndarray) else ops.cast(mask, to=np.float32))
    total = reduce_sum(kept**square if square > 1 else kept, np.array([axis]), keepdims=1)
    some = ops.greater(total, np.float32(above))
    return ops.where(some, kept / ops.where(some, total, np.float32(other)), np.float32(0)) @ v


def attentions(body: Any, **specs: Any) -> tuple[Any, Any, int]:
    model = as_in_a_file(body, **specs)
    best = optimize(model, verify=True)
    return model, best, count_operators(best.model).get("Attention", 0)


def test_what_is_kept_is_a_masked_attention() -> None:
    """Rows of which nothing is kept are zeros on both sides."""
    model, best, found = attentions(renormalized, x=X, mask=gg.bool_["b", 1, "t", "t"])
    assert found == 1
    rng = np.random.default_rng(0)
    for b, t in ((2, 5), (1, 1), (3, 8)):
        x = rng.standard_normal((b, t, H * D)).astype(np.float32)
        mask = rng.integers(0, 2, (b, 1, t, t)) > 0
        mask[0, :, 0] = False
        [wanted], [got] = (run_plain(m, {"x": x, "mask": mask}) for m in (model, best.model))
        assert not got[0, :, 0].any() and relative_rms(wanted, got) < ROUNDING


def test_scores_of_any_size_stay() -> None:
    """Where a hidden score is above the kept ones by 100, their weights are 0 in float32."""

    def body(x: Any, mask: Any) -> Any:
        return renormalized(x, mask, bounded=False)

    model, best, found = attentions(body, x=X, mask=gg.bool_["b", 1, "t", "t"])
    [site] = next(p for p in best.report.passes if p.name == "fuse_softmax").sites
    assert not found and site.status == "missed" and "are kept by 100" in site.reason
    x = 30 * np.random.default_rng(0).standard_normal((1, 6, H * D)).astype(np.float32)
    mask = np.tri(6, k=-1, dtype=bool)[None, None]
    [wanted], [got] = (run_plain(m, {"x": x, "mask": mask}) for m in (model, best.model))
    assert not wanted.any(-1)[0, 1:].all() and relative_rms(wanted, got) < ROUNDING


def test_constant_masks_are_numbers_0_and_1() -> None:
    def body(x: Any, of: Any = None) -> Any:
        mask = np.tril(np.ones((5, 5), np.float32))
        mask[3, 1] = 0.0 if of is None else of
        return renormalized(x, mask)

    spec = gg.float32["b", 5, H * D]
    assert attentions(body, x=spec)[2] == 1
    assert attentions(lambda x: body(x, 0.5), x=spec)[2] == 0


@pytest.mark.parametrize("change", [{"above": 0.5}, {"other": 2.0}, {"axis": 2}, {"square": 2}])
def test_other_formulas_stay(change: dict[str, Any]) -> None:
    def body(x: Any, mask: Any) -> Any:
        return renormalized(x, mask, **change)

    assert attentions(body, x=X, mask=gg.bool_["b", 1, "t", "t"])[2] == 0
