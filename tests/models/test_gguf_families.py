"""GGUF files of other families than Llama's: the same graphs as from their checkpoints."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
from gguf_files import FAMILIES, converted, gguf, given, in_bytes, metadata, write_gguf
from random_checkpoints import random_checkpoint
from schemes import EIGHT
from small_models import relative_rms, run_plain

import graphgen as gg
from graphgen.errors import GraphgenError
from graphgen.models.published import from_folder
from graphgen.models.published.config import Config
from graphgen.models.published.gguf import open_gguf
from graphgen.models.published.gguf_names import config_fields, read_gguf
from graphgen.quantize.effect import feeds_of
from graphgen.quantize.kept import keep_bits
from graphgen.safetensors import read_header
from graphgen.version import minor


def graph(model: ir.Model) -> tuple[list[Any], dict[str, Any]]:
    """The operators of a graph with their attributes, and its arrays."""
    nodes = [
        (node.op_type, {name: str(x.value) for name, x in node.attributes.items()})
        for node in model.graph
    ]
    values = model.graph.initializers.items()
    return nodes, {n: x.const_value.numpy() for n, x in values if x.const_value is not None}


EXPERTS = pytest.mark.skipif(
    minor(ort.__version__) < (1, 32), reason="no kernel of experts in few bits"
)


@pytest.mark.share(5)
@pytest.mark.parametrize("which", FAMILIES)
def test_a_file_gives_the_graph_of_its_checkpoint(which: str, tmp_path: Path) -> None:
    wanted = given(which)
    random_checkpoint(tmp_path / "floats", wanted)
    weights = {w.name: w.read() for w in read_header(tmp_path / "floats" / "model.safetensors")}
    path = tmp_path / "few" / "model.gguf"
    path.parent.mkdir()
    write_gguf(path, wanted, weights)
    folder = path.parent
    (folder / "config.json").write_text(json.dumps(config_fields(open_gguf(path))))
    a, b = graph(from_folder(tmp_path / "floats").model), graph(from_folder(folder).model)
    assert a[0] == b[0] and a[1].keys() == b[1].keys()
    for name, array in a[1].items():
        assert array.shape == b[1][name].shape and array.dtype == b[1][name].dtype
        # Fields are float32 in a file, and a gain of Gemma is 1 + w there.
        error = np.abs(array - b[1][name]).max(initial=0)
        assert error <= 3e-7 * np.abs(array).max(initial=1), name
    # The same with the configuration of the checkpoint.
    (folder / "config.json").write_text(json.dumps(wanted))
    assert graph(from_folder(folder).model)[0] == a[0]


@EIGHT
@pytest.mark.parametrize(
    ("which", "kept"),
    [
        ("gpt2", 18),
        ("falcon, new", 10),
        pytest.param("gpt_oss, plain", 12, marks=EXPERTS),
        pytest.param("granitemoeshared", 18, marks=EXPERTS),
    ],
)
def test_bits_are_kept_where_rows_are_in_another_order(
    which: str, kept: int, tmp_path: Path
) -> None:
    wanted = given(which)
    wanted |= {n: 64 for n in ("intermediate_size", "shared_intermediate_size") if n in wanted}
    random_checkpoint(tmp_path / "floats", wanted)
    weights = {w.name: w.read() for w in read_header(tmp_path / "floats" / "model.safetensors")}
    few, floats = {}, {}
    for name, w in converted(wanted, weights).items():
        floats[name] = ("F32", w.shape, w.astype("<f4").tobytes())
        if "blk" not in name or "ffn_gate_inp" in name:
            continue
        if name.endswith("weight") and w.ndim > 1 and w.shape[-1] % 32 == 0:
            data, meant = in_bytes(w.reshape(-1, w.shape[-1]))
            few[name] = ("Q8_0", w.shape, data)
            floats[name] = ("F32", w.shape, meant.astype("<f4").tobytes())
    models = []
    for name, tensors in (("a", floats), ("b", floats | few)):
        (tmp_path / name).mkdir()
        gguf(tmp_path / name / "model.gguf", metadata(wanted), tensors)
        (tmp_path / name / "config.json").write_text(json.dumps(wanted))
        models.append(gg.optimize(from_folder(tmp_path / name).model).model)
    model, report = keep_bits(models[1], method="gguf")
    assert len(report.layers) == kept and not report.kept()
    [feed] = feeds_of(model, np.random.default_rng(0).integers(0, 40, (2, 5)), rows=2)
    a, b = (run_plain(m, dict(feed))[0] for m in (models[0], model))
    assert relative_rms(a, b) < 0.03  # what products read has 8 bits


def test_what_a_file_says_is_compared_with_the_configuration(tmp_path: Path) -> None:
    wanted = given("glm4")
    random_checkpoint(tmp_path / "floats", wanted)
    weights = {w.name: w.read() for w in read_header(tmp_path / "floats" / "model.safetensors")}
    write_gguf(tmp_path / "model.gguf", wanted, weights)
    file = open_gguf(tmp_path / "model.gguf")

    def refused(told: str, config: dict[str, Any] | None = None, **changed: Any) -> None:
        own = {f"glm4.{name.replace('__', '.')}": x for name, x in changed.items()}
        with pytest.raises(GraphgenError) as caught:
            other = file._replace(fields={**file.fields, **own})
            read_gguf(other, Config(wanted | config)) if config else config_fields(other)
        assert told in str(caught.value) and "\n" not in str(caught.value)

    read_gguf(file, Config(wanted))
    refused("has partial_rotary_factor 0.5, but", {"partial_rotary_factor": 0.25})
    refused("but config.json has head_dim 8", {"head_dim": 8})
    refused("has attention_bias True, but config.json has", {"attention_bias": False})
    refused("glm4.attention.head_count is 'four'", attention__head_count="four")
    refused("glm4.attention.head_count is 0", attention__head_count=0)
    refused("1000 heads of 32 features", attention__head_count=1000, attention__key_length=0)
    refused("glm4.attention.value_length is 8, not 16", attention__value_length=8)
    refused("the field glm4.expert_count (4) is not supported", expert_count=4)
    short = {name: x for name, x in file.fields.items() if "dimension_count" not in name}
    with pytest.raises(GraphgenError, match=r"the field glm4.rope.dimension_count is missing"):
        config_fields(file._replace(fields=short))


def test_fields_with_a_number_for_each_layer_and_notes_of_granite(tmp_path: Path) -> None:
    """The all-attention models of Granite 4 have the same number of heads of keys in each layer."""
    wanted = given("granite")
    random_checkpoint(tmp_path / "floats", wanted)
    weights = {w.name: w.read() for w in read_header(tmp_path / "floats" / "model.safetensors")}
    write_gguf(tmp_path / "model.gguf", wanted, weights)
    file = open_gguf(tmp_path / "model.gguf")

    def changed(**fields: Any) -> Any:
        own = {f"granite.{name.replace('__', '.')}": x for name, x in fields.items()}
        return file._replace(fields={**file.fields, **own})

    alike = changed(attention__head_count_kv=np.array([2, 2]), rope__scaling__finetuned=True)
    assert config_fields(alike) == config_fields(file)
    assert read_gguf(alike, Config(wanted)).keys() == read_gguf(file, Config(wanted)).keys()
    with pytest.raises(GraphgenError, match=r"head_count_kv is \[2, 0\]"):
        config_fields(changed(attention__head_count_kv=np.array([2, 0])))
    for fields, told in (
        ({"block_count": np.array([2, 2])}, r"block_count is \[2, 2\]"),
        ({"expert_count": np.array([])}, r"expert_count \(\[\]\) is not supported"),
    ):
        with pytest.raises(GraphgenError, match=told):
            config_fields(changed(**fields))
    deep = {"general.architecture": "glm4moe", "glm4moe.nextn_predict_layers": "x"}
    deep |= {
        n.replace("granite", "glm4moe"): x for n, x in file.fields.items() if "general" not in n
    }
    deep |= {f"glm4moe.{n}": 2 for n in ("expert_count", "expert_used_count")}
    with pytest.raises(GraphgenError, match=r"has fields of other kinds than glm4moe has"):
        config_fields(file._replace(fields=deep | {"glm4moe.rope.dimension_count": 4}))
    with pytest.raises(GraphgenError, match=r"finetuned is false, so layers have no positions"):
        config_fields(changed(rope__scaling__finetuned=False))


@pytest.mark.parametrize(
    ("field", "told"),
    [
        ("rope_theta", "llama.rope.freq_base is 500000.0, but config.json, which lacks it, means "),
        ("rms_norm_eps", "llama.attention.layer_norm_rms_epsilon is 0.001, but config.json, which"),
    ],
)
def test_what_a_configuration_lacks_is_compared_by_what_that_means(
    field: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights of the same shapes, but another model: nothing told them apart."""
    folder, other = random_checkpoint(tmp_path / "a", given("llama")), {"rope_theta": 5e5}
    weights = {w.name: w.read() for w in read_header(folder / "model.safetensors")}
    other = {"rope_parameters": other} if field in other else {"rms_norm_eps": 1e-3}
    write_gguf(tmp_path / "model.gguf", given("llama") | other, weights)
    monkeypatch.chdir(folder)
    with pytest.raises(GraphgenError) as caught:
        from_folder(Path(), gguf=tmp_path / "model.gguf")
    assert told in str(caught.value)
    (folder / "config.json").write_text(json.dumps(given("llama") | other))
    assert from_folder(folder, gguf=tmp_path / "model.gguf").few_bits == ""


def test_rows_of_groups_and_of_heads_have_to_fit(tmp_path: Path) -> None:
    for which, part in (("falcon, new", "attn_qkv"), ("stablelm, parallel", "attn_q_norm")):
        wanted = given(which)
        random_checkpoint(tmp_path / "floats", wanted)
        weights = {w.name: w.read() for w in read_header(tmp_path / "floats" / "model.safetensors")}
        arrays = converted(wanted, weights)
        own = next(name for name in arrays if part in name)
        arrays[own] = arrays[own][:-1] if part == "attn_qkv" else arrays[own].ravel()
        tensors = {n: ("F32", w.shape, w.astype("<f4").tobytes()) for n, w in arrays.items()}
        gguf(tmp_path / "a.gguf", metadata(wanted), tensors)
        file = open_gguf(tmp_path / "a.gguf")
        with pytest.raises(GraphgenError, match=rf"{own}.* (heads|a row for each head)"):
            read_gguf(file, Config(wanted))
