"""An adapter beside other weights than it was trained with: a warning, from each of its files."""

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from schemes import SCHEMES
from small_models import RowClassifier, vary

import graphgen as gg
from graphgen import safetensors
from graphgen.commands import main
from graphgen.errors import GraphgenError, GraphgenWarning
from graphgen.export.adapters import Adapter
from graphgen.export.base_weights import SPOTS
from graphgen.export.by_row import beside
from graphgen.export.peft import WEIGHTS
from graphgen.quantize import quantize

FIXTURES = Path(__file__).parents[1] / "fixtures"
IDS = np.random.default_rng(0).integers(0, 11, (3, 5))
OTHER = "adapter: it was trained beside other weights than the model has"


def built(seed: int) -> Any:
    return gg.optimize(gg.build(vary(RowClassifier()), seed=seed, ids=gg.int64["batch", "seq"]))


def changed(model: Any, change: Any) -> Any:
    """A copy with other matrices."""
    result = getattr(model, "model", model).clone()
    for name, value in result.graph.initializers.items():
        array = value.const_value.numpy()
        if array.ndim == 2 and array.dtype == np.float32:
            value.const_value = ir.tensor(change(array).astype(np.float32), name=name)
    return result


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: Any) -> dict[str, Adapter]:
    """One adapter from each of its files, trained on a base of float32 or of int4."""
    folder = tmp_path_factory.mktemp("base")
    batch, found = {"ids": IDS, "labels": IDS[:, 0] % 3}, {}
    for kind in ("float32", "int4"):
        base = None if kind == "float32" else kind
        gg.artifacts(built(0), folder / "art", lora="query|down:2", base=base)
        trainer = gg.Trainer(folder / "art", threads=1)
        trainer.fit([batch], steps=2, progress=False, checkpoint=folder / kind)
        assert trainer.adapter is not None
        found[kind] = Adapter.load(folder / kind)
    found["peft"] = Adapter.load(found["float32"].save(folder / "peft"))
    found["runtime"] = Adapter.load(found["float32"].export(folder / "a.onnx_adapter"))
    found["again"] = Adapter.load(found["peft"].export(folder / "b.onnx_adapter"))
    return found


FILES = ["float32", "int4", "peft", "runtime", "again"]


@pytest.mark.parametrize("file", FILES)
def test_other_weights_are_told(adapters: dict[str, Adapter], file: str, tmp_path: Path) -> None:
    adapter, model = adapters[file], built(0)
    for way in (adapter.merged, adapter.base, lambda m: beside(m, {"a": adapter})):
        with pytest.warns(GraphgenWarning, match=OTHER) as told:
            way(built(1))
        assert len(told) == 1
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            way(model)
            way(changed(model, lambda x: x.astype(np.float16)))
    bfloat16 = changed(model, lambda x: x.astype(ir.DataType.BFLOAT16.numpy()))
    tuned = changed(model, lambda x: x + 0.03 * np.roll(x, 1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        adapter.merged(bfloat16)
        if file in ("int4", "runtime", "again"):  # which allow for few bits, or only know signs
            adapter.merged(tuned)
    if file not in ("int4", "runtime", "again"):
        with pytest.warns(GraphgenWarning, match=r"differ by 0\.0[0-9]+ times their size"):
            adapter.merged(tuned)


@pytest.mark.share(2)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_weights_in_few_bits_are_the_same(adapters: dict[str, Adapter], scheme: Any) -> None:
    same, other = (quantize(built(seed), scheme, threshold=1.0)[0] for seed in (0, 1))
    for name in ("float32", "runtime"):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            beside(same, {"a": adapters[name]})
        with pytest.warns(GraphgenWarning, match=OTHER):
            beside(other, {"a": adapters[name]})


def test_parts_of_one_weight_are_known_by_the_checkpoints_name(tmp_path: Path) -> None:
    """GPT-2's query, key and value are one weight in the checkpoint, and three in the folder."""
    folder = tmp_path / "gpt2"
    assert main(["build", str(FIXTURES / "gpt2_checkpoint"), "-o", str(folder)]) == 0
    model = folder / "onnx/model.onnx"
    gg.artifacts(model, tmp_path / "art", lora="query|key|value|attention.out:2", output="logits")
    adapter = gg.Trainer(tmp_path / "art", threads=1).adapter
    assert adapter is not None
    saved = Adapter.load(adapter.save(tmp_path / "peft"))
    assert any(len(spots) == 3 * 8 for spots in saved.spots.values())
    turned = changed(gg.load(model), lambda x: x[::-1])
    for own in (adapter, saved):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            own.merged(model)
        with pytest.warns(GraphgenWarning, match=OTHER):
            own.merged(turned)


@pytest.mark.parametrize("damage", ["[1]", '{"a": [[1, 2]]}', '{"a": [[-1, 2, 3, 1]]}', "{"])
def test_damaged_numbers_are_one_error(
    adapters: dict[str, Adapter], damage: str, tmp_path: Path
) -> None:
    adapters["peft"].save(tmp_path / "peft")
    weights, metadata = safetensors.read_headers(tmp_path / "peft" / WEIGHTS)
    assert metadata["format"] == "pt" and json.loads(metadata[SPOTS])
    arrays = {weight.name: weight.read() for weight in weights}
    data = safetensors.to_bytes(arrays, metadata | {SPOTS: damage})
    (tmp_path / "peft" / WEIGHTS).write_bytes(data)
    with pytest.raises(GraphgenError, match=f"its metadata {SPOTS} is damaged"):
        Adapter.load(tmp_path / "peft")
