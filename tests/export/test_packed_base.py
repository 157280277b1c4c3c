"""Frozen weights in few bits: what is trained beside them is what float32 would give."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from small_models import relative_rms, vary

import graphgen as gg
from graphgen import nn
from graphgen.commands import main
from graphgen.errors import GraphgenError
from graphgen.export.checkpoint import Checkpoint
from graphgen.export.trained import BASE, export_trained, parameters_of
from graphgen.passes.training.packed import Base, pack
from graphgen.targets import newest_opset

RNG = np.random.default_rng(0)
BATCH = {"ids": RNG.integers(0, 50, (3, 7)), "labels": RNG.integers(0, 50, (3, 7))}
LORA = gg.LoRA("query|down|embedding", 3)
BASES: list[Base] = ["int8", "int4"]


class Model(nn.Module):
    """A small decoder with a tied head; 100 is no multiple of a block."""

    def __init__(self) -> None:
        self.embedding = nn.Embedding(50, 64)
        self.stack = nn.Encoder(64, layers=2, num_heads=4, causal=True, dropout=0.0, hidden=100)

    def __call__(self, ids: Any) -> Any:
        return {"logits": self.embedding.logits(self.stack(self.embedding(ids)))}


@pytest.fixture(scope="module")
def model(tmp_path_factory: Any) -> Path:
    path = tmp_path_factory.mktemp("packed") / "m.onnx"
    return Path(gg.export(gg.build(vary(Model()), ids=gg.int64["batch", "seq"]), path))


def steps(folder: Path, count: int = 3) -> tuple[gg.Trainer, list[float]]:
    trainer = gg.Trainer(folder, schedule=gg.schedule.constant(0.5), threads=1)
    history = trainer.fit([BATCH], steps=count, progress=False)
    return trainer, [line["loss"] for line in history]


NEW = pytest.mark.skipif(
    newest_opset() < 23, reason="the merged model has IR version 11, which this runtime cannot read"
)


@pytest.mark.share(5)
@NEW
@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize(("base", "dora"), [("int8", True), ("int4", False), ("int4", True)])
def test_it_trains_as_the_restored_weights(
    model: Path, tmp_path: Path, base: Base, recompute: Any, dora: bool
) -> None:
    lora = replace(LORA, dora=dora)
    options: dict[str, Any] = {"lora": lora, "optimizer": gg.SGD(), "recompute": recompute}
    gg.artifacts(model, tmp_path / "few", base=base, **options)
    start = Checkpoint.load(tmp_path / "few" / "checkpoint")
    own = {n: x for n, x in parameters_of(start, "").items() if n not in start.trainable}
    wide = export_trained(model, own, tmp_path / "wide.onnx")
    gg.artifacts(wide, tmp_path / "float", **options)
    (few, losses), (full, wanted) = steps(tmp_path / "few"), steps(tmp_path / "float")
    np.testing.assert_allclose(losses, wanted, rtol=1e-6)
    assert wanted[0] - wanted[-1] > 0.1
    for name, array in start.trainable.items():
        moved, as_wide = few.parameters[name] - array, full.parameters[name] - array
        assert relative_rms(as_wide, moved) < 1e-5 and moved.any()
    merged = few.export(model, tmp_path / "merged.onnx")
    other = full.export(wide, tmp_path / "other.onnx")
    given = {"ids": BATCH["ids"]}
    one, two = (gg.Session(path, threads=1)(given)[0] for path in (merged, other))
    assert relative_rms(two, one) < 1e-5


@pytest.mark.parametrize(("base", "most"), [("int8", 0.27), ("int4", 0.17)])
def test_the_weights_of_products_take_few_bits(
    model: Path, tmp_path: Path, base: Base, most: float
) -> None:
    table = gg.artifacts(model, tmp_path / "art", lora=LORA, base=base)
    kinds = {weight.name: weight.dtype for weight in table}
    assert kinds["stack.layers.0.attention.query.weight"] == base
    assert kinds["embedding.weight"] == "int8"  # rows of it are read
    assert kinds["stack.layers.0.attention.query.bias"] == "float"
    frozen = Checkpoint.load(tmp_path / "art" / "checkpoint").frozen
    bits = {w.name: w.shape for w in table if w.dtype == base}
    held = sum(x.nbytes for n, x in frozen.items() if n.rpartition(".")[0] in bits)
    assert held < most * 4 * sum(np.prod(shape) for shape in bits.values())


@pytest.mark.parametrize("dora", [False, True])
def test_no_restored_weight_is_kept(model: Path, tmp_path: Path, dora: bool) -> None:
    """Each is alive between the node that restores it and one product, transposed or not.

    With magnitudes, a sum, of which the norm is taken, reads it beside the forward pass's product.
    """
    gg.artifacts(model, tmp_path / "art", lora=replace(LORA, dora=dora), base="int4")
    graph = onnx.load(tmp_path / "art" / "training_model.onnx").graph
    readers: dict[str, list[int]] = {}
    for place, node in enumerate(graph.node):
        for name in node.input:
            readers.setdefault(name, []).append(place)
    restored = [(i, n) for i, n in enumerate(graph.node) if n.op_type == "DequantizeLinear"]
    assert len(restored) == 13 + 10  # no gradient passes the first query, key and value
    for place, node in restored:
        ends = [place]
        while graph.node[ends[0]].op_type in ("DequantizeLinear", "Reshape", "Slice", "Transpose"):
            ends = sorted([*ends[1:], *readers[graph.node[ends[0]].output[0]]])
        kinds = sorted({graph.node[end].op_type for end in ends} - {"MatMul", "Gemm"})
        assert len(ends) == 1 + len(kinds) and kinds in ([], ["Add"][:dora]), node.name
        assert ends[-1] - place < (24 if dora else 8), node.name


def from_text(text: str, *weights: str) -> ir.Model:
    """The graph, with random weights for these of its inputs."""
    model = ir.from_onnx_text(f'<ir_version: 10, opset_import: ["": 20]> g {text}')
    for value in [x for x in model.graph.inputs if x.name in weights]:
        assert value.shape is not None
        array = RNG.standard_normal(value.shape.numpy()).astype(np.float32)
        value.const_value = ir.tensor(array, name=value.name)
        model.graph.inputs.remove(value)
        model.graph.register_initializer(value)
    return model


@pytest.mark.parametrize("base", BASES)
def test_weights_are_read_in_any_orientation(base: Base) -> None:
    """What the packed graph gives is what the restored weights give."""
    model = from_text(
        """(float[b, 48] x, int64[n] i, float[48, 80] plain, float[80, 48] turned,
            float[80, 48] table) => (float[b, 80] y, float[b, 80] z, float[n, 48] rows) {
            y0 = MatMul(x, plain)
            other = Transpose<perm = [1, 0]>(plain)
            back = MatMul(y0, other)
            y = Gemm<transB = 1>(back, turned)
            t = Transpose<perm = [1, 0]>(table)
            z = MatMul(x, t)
            rows = Gather(table, i)
        }""",
        *("plain", "turned", "table"),
    )
    few = model.clone()
    found = pack(few, base, ["plain", "turned", "table"])
    schemes = {name: packed.scheme for name, packed in found.items()}
    assert schemes == {"plain": base, "turned": base, "table": "int8"}
    parts = {n: v.const_value.numpy() for n, v in few.graph.initializers.items() if v.const_value}
    for name, packed in found.items():
        restored, value = packed.float_of(name, parts), model.graph.initializers[name]
        error = relative_rms(value.const_value.numpy(), restored)  # type: ignore[union-attr]
        assert 0 < error < (0.1 if packed.scheme == "int4" else 0.01)
        value.const_value = ir.tensor(restored, name=name)
    feeds = {"x": RNG.standard_normal((3, 48)).astype(np.float32), "i": np.array([7, 0, 79])}
    wanted, given = (gg.Session(one, threads=1)(feeds) for one in (model, few))
    for one, other in zip(wanted, given, strict=True):
        assert relative_rms(one, other) < 1e-6


def test_what_has_another_use_stays_float() -> None:
    """A sum of squares reads the first weight, and the second is small."""
    model = from_text(
        """(float[b, 64] x, float[64, 64] first, float[64, 8] small)
            => (float[b, 8] y, float total) {
            a = MatMul(x, first)
            y = MatMul(a, small)
            total = ReduceSumSquare<keepdims = 0>(first)
        }""",
        *("first", "small"),
    )
    assert pack(model, "int4", ["first", "small"]) == {}


@pytest.mark.share(2)
@NEW
@pytest.mark.parametrize("base", BASES)
def test_the_commands(
    model: Path, tmp_path: Path, base: str, capsys: pytest.CaptureFixture[str]
) -> None:
    art, run = str(tmp_path / "art"), tmp_path / "run"
    command = ["artifacts", str(model), "-o", art, "--lora", "query|down:3", "--base", base]
    assert main(command) == 0
    assert "kept in few bits" in capsys.readouterr().out
    trainer = gg.Trainer(art, schedule=gg.schedule.constant(0.05), threads=1)
    trainer.fit([BATCH], steps=2, checkpoint=run, progress=False)
    again = gg.Trainer(art, schedule=gg.schedule.constant(0.05), threads=1)
    again.fit([BATCH], steps=3, checkpoint=run, resume=True, progress=False)
    out = tmp_path / "out.onnx"
    assert main(["export", str(model), "--checkpoint", str(run), "-o", str(out)]) == 0
    logits = gg.Session(out, threads=1)(ids=BATCH["ids"])[0].astype(np.float64)
    logits -= logits.max(-1, keepdims=True)
    chances = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    loss = -np.take_along_axis(chances, BATCH["labels"][..., None], -1).mean()
    assert again.evaluate([BATCH]) == pytest.approx(loss, rel=1e-6)
    assert {*gg.Adapter.load(run).modules} == {*again.adapter.modules}  # type: ignore[union-attr]


def test_damaged_notes_and_weights(model: Path, tmp_path: Path) -> None:
    gg.artifacts(model, tmp_path / "art", lora=LORA, base="int4")
    found = Checkpoint.load(tmp_path / "art" / "checkpoint")
    noted = json.loads(str(found.properties[BASE]))
    name = "stack.layers.0.attention.query.weight"
    for fields in ([], ["int4", 64, 200, True], ["int4", "x", 64, True], ["int8", 64, 64, True], 3):
        found.properties[BASE] = json.dumps({**noted, name: fields})
        with pytest.raises(GraphgenError, match=f"its property {BASE}, or a weight"):
            parameters_of(found, "there")
    broken = gg.load(model)
    weight = broken.graph.initializers[name].const_value
    assert weight is not None
    array = weight.numpy().copy()
    array[0, 0] = np.inf
    broken.graph.initializers[name].const_value = ir.tensor(array)
    with pytest.raises(GraphgenError, match=f"the weight {name} is not finite"):
        gg.artifacts(broken, tmp_path / "no", lora=LORA, base="int8")
    with pytest.raises(GraphgenError, match="base is 'int3'; choose"):
        gg.artifacts(model, tmp_path / "no", base="int3")  # type: ignore[arg-type]
    assert not (tmp_path / "no").exists()
