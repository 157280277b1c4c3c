"""One more token over a cache of int8 by products of integers: the operator's meaning, no less."""

from typing import Any

import numpy as np
import onnx.helper as oh
import onnx_ir as ir
import onnxruntime as ort
import pytest

from graphgen.export.write import to_bytes
from graphgen.measure.reference import evaluate
from graphgen.passes import integer_attention
from graphgen.passes.integer_attention import attend_by_products
from graphgen.processor import Processor, saturating_product
from graphgen.runtime import QUIET, Session
from graphgen.targets import kernels
from graphgen.version import minor

pytestmark = pytest.mark.skipif(
    minor(ort.__version__) < (1, 27), reason="the runtime reads no cache of int8 before 1.27"
)
G, D, CAPACITY = 2, 16, 40


def always(queries: int, features: int) -> bool:
    return True


def layer(r: int, *, sinks: bool = False, opset: int = 23, **attributes: Any) -> ir.Model:
    """GroupQueryAttention over buffers of int8, with the unit scales that `in_place` writes."""
    of = oh.make_tensor_value_info
    inputs = [of(n, 1, ["B", "T", w * D]) for n, w in zip("qkv", (r * G, G, G), strict=True)]
    inputs += [of(n, 3, ["B", G, "C", D]) for n in ("keys", "values")]
    inputs += [of("last", 6, ["B"]), of("total", 6, [])]
    arrays = [oh.make_tensor("one", 1, [1], [1.0])]
    if sinks:
        arrays.append(oh.make_tensor("sinks", 1, [r * G], np.linspace(-2, 3, r * G)))
    names = ["q", "k", "v", "keys", "values", "last", "total"]
    names += ["", "", "", "", "sinks" if sinks else "", "one", "one"]
    of_int8 = {"k_quant_type": "PER_TENSOR", "v_quant_type": "PER_TENSOR", "kv_cache_bit_width": 8}
    node = oh.make_node(
        "GroupQueryAttention",
        names,
        ["y", "new_keys", "new_values"],
        domain="com.microsoft",
        num_heads=r * G,
        kv_num_heads=G,
        **of_int8,
        **attributes,
    )
    outputs = [of("y", 1, ["B", "T", r * G * D])]
    outputs += [of(n, 3, ["B", G, "C", D]) for n in ("new_keys", "new_values")]
    opsets = [oh.make_opsetid("", opset), oh.make_opsetid("com.microsoft", 1)]
    graph = oh.make_graph([node], "g", inputs, outputs, arrays)
    return ir.from_proto(oh.make_model(graph, opset_imports=opsets, ir_version=10))


def feed(r: int, tokens: int, last: list[int], scale: float = 1.0) -> dict[str, np.ndarray]:
    """Keys far apart, so that some weights are 10⁻⁶ of others; garbage behind what rows hold."""
    rng, b = np.random.default_rng(r), len(last)
    made = {
        n: rng.normal(0, s, (b, tokens, w * D)).astype(np.float32)
        for n, w, s in (("q", r * G, 0.02 * scale), ("k", G, 40), ("v", G, 40))
    }
    for name in ("keys", "values"):
        made[name] = rng.integers(-128, 128, (b, G, CAPACITY, D), np.int8)
    return made | {"last": np.array(last, np.int32), "total": np.array(CAPACITY, np.int32)}


def unsigned(x: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return x | {"keys": x["keys"].view(np.uint8) ^ 128}


@pytest.mark.parametrize(
    ("r", "how"),
    [
        (1, {}),
        (3, {"local_window_size": 7}),
        (7, {"sinks": True}),
        (2, {"softcap": 5.0, "scale": 0.1}),
    ],
)
def test_a_token_gets_what_the_operator_means(r: int, how: dict[str, Any]) -> None:
    model = layer(r, **how)
    changed = attend_by_products(model, always)
    session, plain = (Session(to_bytes(m), options=QUIET) for m in (changed, model))
    assert session.inputs["keys"].dtype == np.uint8
    for last, scale in (([0, 39], 1.0), ([22, 5], 30.0), ([17], 0.0), ([30, 29], 1.0)):
        fed = feed(r, 1, last, scale)
        y, keys, values = evaluate(model, fed)
        got = session(unsigned(fed))
        products, operator = (
            np.linalg.norm(x - y) / np.linalg.norm(y) for x in (got[0], plain(fed)[0])
        )
        assert products < 2 * operator + 6e-6
        assert ((got[1] ^ 128).view(np.int8) == keys).all()
        assert (got[2] == values).all()


def test_many_small_weights_count_beside_a_large_one() -> None:
    """One key has e¹² times the weight of each other: their digits are not all 0."""
    model = layer(1, scale=1.0)
    fed = feed(1, 1, [CAPACITY - 1])
    fed["q"][:] = fed["k"][:] = fed["keys"][:] = fed["values"][:] = 0
    fed["q"][:, :, ::D], fed["keys"][:, :, 0, 0], fed["values"][:, :, 1:] = 0.12, 100, 100
    session = Session(to_bytes(attend_by_products(model, always)), options=QUIET)
    y = evaluate(model, fed)[0].reshape(1, 1, G, D)
    assert 0 < np.abs(y[..., 1:]).min() < 0.05
    assert np.abs(session(unsigned(fed))[0].reshape(y.shape) - y).max() < 0.05 * np.abs(y).min()


def test_several_tokens_stay_with_the_operator() -> None:
    model = layer(2)
    session = Session(to_bytes(attend_by_products(model, always)), options=QUIET)
    fed = feed(2, 3, [20], 30.0)
    wanted, got = Session(to_bytes(model), options=QUIET)(fed), session(unsigned(fed))
    assert all((a == b).all() for a, b in zip(wanted[::2], got[::2], strict=True))
    assert ((got[1] ^ 128).view(np.int8) == wanted[1]).all()


def test_no_sum_of_two_products_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    r = 2
    fed = feed(r, 1, [CAPACITY - 1], 30.0)
    fed["q"][..., :2], fed["k"][:] = 9.0, 127.0  # the largest digits, side by side
    fed["keys"][:], fed["values"][:] = 127, -128
    model = layer(r)
    assert np.abs(evaluate(model, fed)[0]).max() > 100

    def saturating(a: np.ndarray, b: np.ndarray, zero: np.ndarray) -> np.ndarray:
        shape = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
        y = np.empty((*shape, a.shape[-2], b.shape[-1]), np.int32)
        for at in np.ndindex(shape):
            y[at] = saturating_product(a[at], b[at]) - np.int32(zero) * b[at].sum(0, np.int32)
        return y

    a = {"num_heads": r * G, "kv_num_heads": G, "scale": None, "softcap": None}
    a |= {"local_window_size": -1}
    x = unsigned(fed)
    given = (x["q"], x["k"], x["v"], x["keys"], x["values"], x["last"], None, a)
    monkeypatch.setattr(integer_attention, "matmul_integer", saturating)
    got, *_ = integer_attention._one_token(*given)
    assert np.abs(got - evaluate(model, fed)[0]).max() < 1e-3


def test_what_has_no_such_cache_or_does_not_pay_stays() -> None:
    model = layer(2)
    assert attend_by_products(model, lambda r, d: False) is model
    scaled = layer(2)
    scaled.graph.initializers["one"].const_value = ir.tensor([2.0], ir.DataType.FLOAT)
    assert attend_by_products(scaled, always) is scaled
    turned = layer(2, do_rotary=1)
    assert attend_by_products(turned, always) is turned


def test_the_table_is_of_this_kind_of_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    pays = kernels.products_pay
    monkeypatch.setattr(kernels, "processor", lambda: Processor("any", "sums of 32 bits"))
    assert not pays(7, 64)
    monkeypatch.setattr(kernels, "processor", lambda: Processor("any", "AVX-512 VNNI"))
    assert pays(4, 64)
    assert pays(9, 80)
    assert not any(pays(n, d) for n in (1, 2) for d in (32, 64, 80, 128, 256))
    assert not any(pays(8, d) for d in (32, 256))  # not measured
