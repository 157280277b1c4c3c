"""Several adapters in one session: each row has its own, as if it were merged."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from schemes import SCHEMES
from small_models import RowClassifier, relative_rms, vary

import graphgen as gg
from graphgen import nn, ops
from graphgen.errors import GraphgenError
from graphgen.export.adapters import Adapter
from graphgen.export.by_row import beside, numbers_of
from graphgen.passes.training.adapters import linears
from graphgen.passes.training.by_row import quantized_linears, weight_of
from graphgen.quantize import quantize

IDS = np.random.default_rng(0).integers(0, 11, (4, 5))


@pytest.fixture(scope="module")
def model(tmp_path_factory: Any) -> Path:
    built = gg.build(vary(RowClassifier()), ids=gg.int64["batch", "seq"])
    return Path(gg.export(gg.optimize(built), tmp_path_factory.mktemp("by_row") / "m.onnx"))


def random_adapter(
    model: Any, targets: tuple[str, ...], rank: int, seed: int = 0, dora: bool = False
) -> Adapter:
    random, matrices = np.random.default_rng(seed), {}
    for site in linears(gg.load(model) if isinstance(model, Path) else model).values():
        if any(target in site.module for target in targets):
            size, out = site.sizes
            for part, shape in (("A", (rank, size)), ("B", (out, rank))):
                array = random.standard_normal(shape).astype(np.float32)
                matrices[f"{site.module}.lora_{part}.weight"] = array
            if dora:
                magnitude = random.uniform(0.5, 4.0, out).astype(np.float32)
                matrices[f"{site.module}.lora_magnitude_vector"] = magnitude
    return Adapter(matrices, rank, 0.5 * rank)


def test_each_row_has_its_own(model: Path, tmp_path: Path) -> None:
    """Of other modules and other ranks; one comes from a file of the runtime."""
    found = {
        "a": random_adapter(model, ("query", "head"), 3),
        "b": random_adapter(model, ("query", "layers.1.feed_forward"), 2, seed=1),
    }
    found["c"] = random_adapter(model, ("query", "head"), 1, seed=2, dora=True)
    given = {**found, "b": found["b"].export(tmp_path / "b.onnx_adapter")}
    session = gg.Session(beside(model, given), threads=1)
    names = ["a", None, "b", "c"]
    [logits] = session(ids=IDS, adapter=numbers_of("x", [*found], names, 4))
    for row, name in enumerate(names):
        one = model if name is None else found[name].merged(model)
        [wanted] = gg.Session(one, threads=1)(ids=IDS[row : row + 1])
        assert relative_rms(wanted[0], logits[row]) < 1e-5
    assert relative_rms(logits[2], session(ids=IDS, adapter=np.ones(4, np.int64))[0][2]) > 0.1
    for use in (
        lambda: found["c"].base(model),
        lambda: found["c"].export(tmp_path / "c.onnx_adapter"),
    ):
        with pytest.raises(GraphgenError, match="has magnitudes"):
            use()


def test_a_file_of_the_runtime_holds_the_same(model: Path, tmp_path: Path) -> None:
    adapter = random_adapter(model, ("query",), 2)
    file = adapter.export(tmp_path / "a.onnx_adapter")
    again = Adapter.load(file)
    for name, update in adapter.updates().items():
        for one, other in zip(again.updates()[name][:2], update[:2], strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-6)
    assert again.save(tmp_path / "peft").is_dir()
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(GraphgenError, match="is no adapter of the runtime"):
        Adapter.load(file)
    with pytest.raises(GraphgenError, match="cannot be read: No such file"):
        Adapter.load(tmp_path / "none.onnx_adapter")
    first = next(iter(adapter.matrices))
    for name, array, told in (
        (first, adapter.matrices[first][:1], "or has no partner"),
        ("x", adapter.matrices[first], r"x, float32\[2, 8\], is no matrix of a low-rank update"),
    ):
        other = Adapter({**adapter.matrices, name: array}, 2, 2.0)
        with pytest.raises(GraphgenError, match=told):
            Adapter.load(other.export(file))


class Flattened(nn.Module):
    """Rows of all elements of the batch in one product, and heads in another."""

    def __init__(self, turned: bool = False) -> None:
        self.first, self.second, self.heads = nn.Linear(8, 8), nn.Linear(8, 6), nn.Linear(4, 5)
        self.turned = turned

    def __call__(self, x: Any) -> Any:
        rows = ops.transpose(x, perm=[1, 0, 2]) if self.turned else x
        y = ops.relu(self.first(ops.reshape(rows, [-1, 8])))
        y = ops.reshape(self.second(y), [ops.dim(x, 0), -1, 6])
        heads = ops.transpose(ops.reshape(x, [0, 0, 2, 4]), perm=[0, 2, 1, 3])
        return {"y": y, "z": self.heads(heads)}


def test_rows_of_one_axis_and_of_heads() -> None:
    """Those of a Reshape are in the order of the batch, after a Transpose they are not."""
    flat = gg.build(vary(Flattened()), x=gg.float32["batch", "seq", 8])
    adapters = {
        "a": random_adapter(flat, ("first", "heads"), 2),
        "b": random_adapter(flat, ("first", "second", "heads"), 3, seed=1, dora=True),
    }
    x = np.random.default_rng(3).standard_normal((3, 4, 8)).astype(np.float32)
    session = gg.Session(beside(flat, adapters), threads=1)
    found = session(x=x, adapter=np.array([1, 2, 0]))
    for row, one in enumerate([adapters["a"].merged(flat), adapters["b"].merged(flat), flat]):
        wanted = gg.Session(one, threads=1)(x=x[row : row + 1])
        for given, other in zip(found, wanted, strict=True):
            assert relative_rms(other[0], given[row]) < 1e-5
    turned = gg.build(vary(Flattened(turned=True)), x=gg.float32["batch", "seq", 8])
    with pytest.raises(GraphgenError, match=r"first reads float.*those of batch: merge"):
        beside(turned, adapters)


def test_an_export_of_gpt2_has_flattened_rows() -> None:
    path = Path(__file__).parent.parent / "fixtures" / "gpt2_torchscript_sdpa_14.onnx"
    adapters = {
        "a": random_adapter(path, ("attn", "h.0"), 2),
        "b": random_adapter(path, ("mlp",), 3, seed=1, dora=True),
    }
    ids = np.random.default_rng(3).integers(0, 9, (3, 5))
    session = gg.Session(beside(path, adapters), threads=1)
    feeds = {name: ids if "ids" in name else np.ones_like(ids) for name in session.inputs}
    found = session({**feeds, "adapter": np.array([2, 0, 1])})[0]
    for row, one in enumerate([adapters["b"].merged(path), path, adapters["a"].merged(path)]):
        own = {name: x[row : row + 1] for name, x in feeds.items() if name != "adapter"}
        wanted = gg.Session(one, threads=1)(own)[0]
        assert relative_rms(wanted[0], found[row]) < 1e-5


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_base_in_few_bits(model: Path, scheme: Any) -> None:
    """The update is that of float32, on top of what the few bits give."""
    few, _ = quantize(gg.load(model), scheme, threshold=1.0)
    found = {
        "a": random_adapter(model, ("query", "head"), 3),
        "c": random_adapter(model, ("query", "down"), 2, seed=2, dora=True),
    }
    assert len(quantized_linears(few)) > 10
    session = gg.Session(beside(few, found), threads=1)
    [logits] = session(ids=IDS, adapter=numbers_of("x", [*found], ["a", None, "c", "c"], 4))
    [plain] = gg.Session(few, threads=1)(ids=IDS)
    restored = gg.load(model)
    for node, site in quantized_linears(few).items():
        weight = restored.graph.initializers[f"{site.module}.weight"]
        array = weight_of(node).T
        assert weight.const_value is not None and weight.shape == array.shape
        assert relative_rms(weight.const_value.numpy(), array) < 0.15
        weight.const_value = ir.tensor(np.ascontiguousarray(array))
    wide = gg.Session(beside(restored, found), threads=1)
    [wanted] = wide(ids=IDS, adapter=numbers_of("x", [*found], ["a", None, "c", "c"], 4))
    # One scale of int8 is for all rows of x, so that a row also depends on the others.
    assert relative_rms(plain[1], logits[1]) < (0.02 if scheme == "int8" else 1e-6)
    assert (
        relative_rms(wanted, logits)
        < (0.002 if scheme == "weights8" else 0.1)
        < relative_rms(plain, logits)
    )
    with pytest.raises(GraphgenError, match="is in few bits, and no update can be merged"):
        found["a"].merged(few)


def test_what_has_no_rows_to_choose(model: Path) -> None:
    class Flat(nn.Module):
        def __init__(self) -> None:
            self.linear = nn.Linear(4, 3)

        def __call__(self, x: Any, y: Any = None) -> Any:
            flat = self.linear(ops.reshape(ops.transpose(x, perm=[1, 0, 2]), [-1, 4]))
            return flat if y is None else flat + ops.reduce_sum(y)

    flat = gg.build(Flat(), seed=0, x=gg.float32["batch", "seq", 4])
    adapter = {"a": Adapter({f"linear.lora_{x}.weight": np.ones(s, np.float32)
                             for x, s in (("A", (2, 4)), ("B", (3, 2)))}, 2, 2.0)}  # fmt: skip
    with pytest.raises(GraphgenError, match=r"linear reads float.*those of batch: merge"):
        beside(flat, adapter)
    two = gg.build(Flat(), seed=0, x=gg.float32["batch", "seq", 4], y=gg.float32["other"])
    with pytest.raises(GraphgenError, match="no first size in common"):
        beside(two, adapter)
    with pytest.raises(GraphgenError, match="for module linear, and the model has no such"):
        beside(model, adapter)
    query = random_adapter(model, ("query",), 2)
    with pytest.raises(GraphgenError, match="an input 'adapter' already"):
        beside(beside(model, {"a": query}), {"a": query})
    query.matrices[next(iter(query.matrices))][0, 0] = np.inf
    with pytest.raises(GraphgenError, match="is not finite"):
        beside(model, {"a": query})
    with pytest.raises(GraphgenError, match="adapters is empty"):
        beside(model, {})
    with pytest.raises(GraphgenError, match="adapter is 'c'; there are a, b"):
        numbers_of("x", ["a", "b"], ["a", "c"], 2)
    with pytest.raises(GraphgenError, match="adapter names 1 rows, and there are 2"):
        numbers_of("x", ["a", "b"], ["a"], 2)
