"""The language models of checkpoints that have parts for images or sound, too."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from random_checkpoints import CAUSAL, random_checkpoint, write_weights

import graphgen as gg
from graphgen.commands import main
from graphgen.errors import GraphgenError
from graphgen.models.published import from_folder
from graphgen.models.published.weights import read_weights

QWEN = CAUSAL["qwen2"]
MROPE = {"type": "mrope", "mrope_section": [2, 3, 3]}


def wrap(source: Path, folder: Path, fields: dict[str, Any], body: str, head: str) -> Path:
    """The checkpoint as a part of another, whose weights have these names."""
    arrays = {name: weight.read() for name, weight in read_weights(source).items()}
    found = {
        f"{body}{name.removeprefix('model.')}" if name.startswith("model.") else head: array
        for name, array in arrays.items()
    }
    found |= {f"{part}.layers.0.norm.weight": np.ones(3, np.float32) for part in ("visual", "x")}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(fields))
    write_weights(folder / "model.safetensors", found)
    return folder


def flat(text: dict[str, Any]) -> dict[str, Any]:
    return {**text, "model_type": "qwen2_vl", "rope_scaling": MROPE, "image_token_id": 7}


@pytest.mark.parametrize(
    ("kind", "fields", "body", "head"),
    [
        (
            "llama",
            {"model_type": "llava"},
            "language_model.model.",
            "language_model.lm_head.weight",
        ),
        ("llama", {"model_type": "llava"}, "model.language_model.", "lm_head.weight"),
        ("llama", {"model_type": "smolvlm"}, "model.text_model.", "lm_head.weight"),
        ("qwen2", flat(QWEN), "model.", "lm_head.weight"),
    ],
)
def test_its_graph_is_that_of_the_language_model_alone(
    tmp_path: Path, kind: str, fields: dict[str, Any], body: str, head: str
) -> None:
    text = CAUSAL[kind] | {"tie_word_embeddings": False}
    alone = random_checkpoint(tmp_path / "alone", text)
    if "hidden_size" not in fields:
        fields = {**fields, "text_config": text, "vision_config": {"model_type": "clip"}}
    fields.pop("tie_word_embeddings", None)
    folder = wrap(alone, tmp_path / "whole", fields, body, head)
    found, wanted = from_folder(folder), from_folder(alone)
    [line] = found.remarks
    assert f"of {fields['model_type']}, this is the language model, {kind}: 2 weights of" in line
    kinds = [[node.op_type for node in one.model.graph] for one in (found, wanted)]
    assert kinds[0] == kinds[1]
    for name, value in wanted.model.graph.initializers.items():
        own = found.model.graph.initializers[name].const_value
        assert value.const_value is not None and own is not None
        assert np.array_equal(own.numpy(), value.const_value.numpy()), name


def test_its_folder_has_its_configuration(tmp_path: Path, capsys: Any) -> None:
    text = CAUSAL["llama"]
    alone = random_checkpoint(tmp_path / "alone", text)
    fields = {"model_type": "llava", "architectures": ["LlavaForConditionalGeneration"]}
    fields |= {"text_config": text | {"architectures": ["LlamaForCausalLM"]}, "eos_token_id": 5}
    folder = wrap(alone, tmp_path / "whole", fields, "language_model.model.", "lm_head.weight")
    assert main(["build", str(folder), "-o", str(tmp_path / "out")]) == 0
    assert "this is the language model" in capsys.readouterr().out
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (written["model_type"], written["hidden_size"]) == ("llama", text["hidden_size"])
    assert not {"text_config", "_part_of", "architectures"} & {*written}
    assert main(["build", str(alone), "-o", str(tmp_path / "out2")]) == 0
    rows = [
        list(gg.generate(tmp_path / name, [[3, 4, 5]], max_new_tokens=8, eos=[]))
        for name in ("out", "out2")
    ]
    assert rows[0] == rows[1]


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"text_config": [1]}, "text_config is .1.; it must be an object"),
        (
            {"text_config": {"model_type": "granite"}},
            "of model_type 'granite'; the language models",
        ),
        ({"text_config": {"final_logit_softcapping": 30.0}}, "final_logit_softcapping is 30.0; it"),
        ({"text_config": {"odd": 1}}, "gemma3_text does not have these fields: odd = 1"),
    ],
)
def test_another_part_is_refused(tmp_path: Path, fields: dict[str, Any], told: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma3", **fields}))
    write_weights(tmp_path / "model.safetensors", {"x": np.ones(1, np.float32)})
    with pytest.raises(GraphgenError, match=told):
        from_folder(tmp_path)
