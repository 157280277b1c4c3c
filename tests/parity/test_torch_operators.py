"""Gradients of single operators, next to torch's of the same function: `make parity`."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from small_models import relative_rms

import graphgen as gg
from graphgen import ops

torch = pytest.importorskip("torch", reason="needs torch: make parity")
pytestmark = pytest.mark.parity
RNG = np.random.default_rng(0)


def numbers(*shape: int) -> Any:
    return RNG.standard_normal(shape)


def sampled(x: Any, rows: Any, columns: Any, padding: str) -> Any:
    """x (N, C, H, W) at places in elements, (N, A, B): (N, C, A, B)."""
    height, width = x.shape[2:]
    grid = torch.stack((2 * columns / (width - 1) - 1, 2 * rows / (height - 1) - 1), -1)
    return torch.nn.functional.grid_sample(x, grid, padding_mode=padding, align_corners=True)


def deformed(x: Any, w: Any, offset: Any, mask: Any) -> Any:
    """One product for each element of the kernel, 2 x 3, with steps of 2 along the rows."""
    total: Any = 0.0
    for k in range(6):
        rows = offset[:, 2 * k] + (k // 3 + 2 * torch.arange(offset.shape[2]))[:, None]
        columns = offset[:, 2 * k + 1] + (k % 3 + torch.arange(offset.shape[3]))[None]
        values = sampled(x, rows, columns, "zeros") * mask[:, k, None]
        total = total + torch.einsum("ncab,oc->noab", values, w[:, :, k // 3, k % 3])
    return total


def aligned(x: Any, rois: Any) -> Any:
    """Means of 2 x 2 places in 2 x 3 bins of one image, all of them within it."""
    x1, y1, x2, y2 = (rois - 0.5).unbind(1)
    rows = y1[:, None] + (y2 - y1)[:, None] * (torch.arange(4) + 0.5) / 4
    columns = x1[:, None] + (x2 - x1)[:, None] * (torch.arange(6) + 0.5) / 6
    where = rows[:, :, None].expand(-1, 4, 6), columns[:, None].expand(-1, 4, 6)
    values = sampled(x.expand(len(rois), -1, -1, -1), *where, "border")
    return torch.nn.functional.avg_pool2d(values, 2)


def written(past: Any, update: Any) -> Any:
    """From 3 and 1 on, along the second axis."""
    rows = [torch.cat((p[:k], u, p[k + 2 :])) for p, u, k in zip(past, update, (3, 1), strict=True)]
    return torch.stack(rows)


ZEROS = np.array([[1.5, 0.0, -2.0, 0.0], [0.5, 2.0, 0.0, -1.0], [1.0, -3.0, 0.5, 2.0]])
PLACES = np.array([[1.3, 1.1, 5.2, 4.6], [0.9, 2.3, 6.0, 5.4]])
CASES: dict[str, tuple[Callable[..., Any], Callable[..., Any], list[Any]]] = {
    "Det": (ops.det, lambda x: torch.linalg.det(x), [numbers(2, 4, 4)]),
    "Inverse": (ops.inverse, lambda x: torch.linalg.inv(x), [numbers(2, 3, 3)]),
    "CumProd": (lambda x: ops.cumprod(x, 1), lambda x: torch.cumprod(x, 1), [ZEROS]),
    "CumProd, reverse": (
        lambda x: ops.cumprod(x, -1, reverse=1),
        lambda x: torch.cumprod(x.flip(-1), -1).flip(-1),
        [ZEROS],
    ),
    "TensorScatter": (
        lambda past, update: ops.tensor_scatter(past, update, np.array([3, 1]), axis=1),
        written,
        [numbers(2, 6, 3), numbers(2, 2, 3)],
    ),
    "RoiAlign": (
        lambda x, rois: ops.roi_align(
            x, rois, np.zeros(2, np.int64), output_height=2, output_width=3, sampling_ratio=2
        ),
        aligned,
        [numbers(1, 3, 7, 8), PLACES],
    ),
    "DeformConv": (
        lambda x, w, offset, mask: ops.deform_conv(x, w, offset, None, mask, strides=[2, 1]),
        deformed,
        [numbers(2, 4, 6, 7), numbers(3, 4, 2, 3), numbers(2, 12, 3, 5), numbers(2, 6, 3, 5)],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_gradient_is_that_of_torch(name: str) -> None:
    own, theirs, arrays = CASES[name]
    given = [torch.tensor(x, requires_grad=True) for x in arrays]
    y = theirs(*given)
    weights = numbers(*y.shape)
    (y * torch.tensor(weights)).sum().backward()

    def loss(**inputs: Any) -> Any:
        weighted = own(*inputs.values()) * weights.astype(np.float32)
        return ops.reduce_sum(weighted, None, keepdims=0)

    feeds = {f"x{i}": x.astype(np.float32) for i, x in enumerate(arrays)}
    model = gg.build(loss, **{n: gg.float32[x.shape] for n, x in feeds.items()})
    value, *found = gg.Session(gg.optimize(gg.grad(model)), threads=1)(feeds)
    assert value == pytest.approx((y * torch.tensor(weights)).sum().item(), rel=1e-4, abs=1e-4)
    for gradient, x in zip(found, given, strict=True):
        assert relative_rms(x.grad.numpy(), gradient) < 1e-4
