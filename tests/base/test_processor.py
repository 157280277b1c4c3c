"""The processor of this machine: what is said of it is what its products show."""

import numpy as np
import onnx.parser
import onnxruntime as ort
import pytest
from small_models import order_of_sums, relative_rms

from graphgen import processor as module
from graphgen.processor import SATURATES, processor, saturating_product


def on_the_runtime(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """a (M, K) uint8 times b (K, N) int8 by MatMulInteger, b known when the session opens."""
    (rows, inner), columns = a.shape, b.shape[1]
    numbers = ", ".join(map(str, b.ravel()))
    model = onnx.parser.parse_model(
        f"""<ir_version: 8, opset_import: ["": 13]>
        g (uint8[{rows}, {inner}] a) => (int32[{rows}, {columns}] y)
        <int8[{inner}, {columns}] b = {{{numbers}}}> {{ y = MatMulInteger(a, b) }}"""
    )
    session = ort.InferenceSession(model.SerializeToString())
    found: np.ndarray = session.run(None, {"a": a})[0]
    return found


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("inner", [1, 2, 3, 8, 33, 64])
def test_products_are_what_the_processor_is_said_to_compute(rows: int, inner: int) -> None:
    """Exact sums, or the simulation bit by bit: random bytes, and the largest there are."""
    rng = np.random.default_rng(inner)
    b = rng.integers(-128, 128, (inner, 24), np.int8)
    b[:, :8] = 127
    b[:, 8:12] = -128
    a = rng.integers(0, 256, (rows, inner), np.uint8)
    a[0] = 255
    exact, cut = a.astype(np.int32) @ b.astype(np.int32), saturating_product(a, b)
    assert np.array_equal(exact, cut) is (inner == 1)
    np.testing.assert_array_equal(on_the_runtime(a, b), cut if processor().saturates else exact)


def test_neighbors_are_an_even_channel_and_the_next() -> None:
    """What rounding relies on: no other two channels are added in 16 bits."""
    pairs = [(i, j) for i in range(16) for j in range(i + 1, 16)]
    b = np.zeros((16, len(pairs)), np.int8)
    for column, pair in enumerate(pairs):
        b[pair, column] = 127
    a = np.full((3, 16), 255, np.uint8)
    cut = [n for n, (i, j) in enumerate(pairs) if i % 2 == 0 and j == i + 1]
    found = saturating_product(a, b)
    assert [*np.flatnonzero(found[0] != 2 * 255 * 127)] == cut
    if processor().saturates:
        np.testing.assert_array_equal(on_the_runtime(a, b), found)


def test_it_says_who_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    here = processor()
    assert here.name and str(here) == f"{here.name}, int8 by {here.int8}"
    for saturates in (True, False):
        monkeypatch.setattr(module, "_saturates", lambda saturates=saturates: saturates)
        found = module.processor.__wrapped__()
        assert found.saturates is saturates is (found.int8 == SATURATES)


def test_two_orders_of_a_sum_differ_by_what_the_bounds_derive_from() -> None:
    rng = np.random.default_rng(0)
    for n in (16, 256, 2400):
        terms = rng.standard_normal((2000, n), np.float32)
        orders = (np.arange(n), rng.permutation(n))
        one, other = (np.cumsum(terms[:, order], axis=1)[:, -1] for order in orders)
        assert 0.5 < relative_rms(one, other) / order_of_sums(n) < 1
