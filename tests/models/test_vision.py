"""DeiT, DINOv2, CLIP and SigLIP with the numbers of transformers, and what their fields allow."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from published_vision import ONE, STORED, VISION, fields, inputs, weight
from random_checkpoints import stored_shapes, write_weights
from small_models import relative_rms, run_plain

import graphgen as gg
from graphgen.errors import GraphgenError
from graphgen.models.published import FAMILIES, from_folder
from graphgen.models.published.back import stored_weights
from graphgen.models.published.config import Config
from graphgen.models.published.weights import read_weights

RESULTS = np.load(Path(__file__).resolve().parents[1] / "fixtures" / "vision" / "results.npz")
BOUND = 1e-5  # relative RMS
ATTENTIONS = {"vit_msn": 1, "dinov2_with_registers": 1} | {
    "deit": 1,
    "dinov2": 1,
    "clip": 3,
    "siglip": 4,
}


def checkpoint(folder: Path, kind: str) -> Path:
    """A folder of a small model, with the weights that the results are of."""
    config, family = Config(fields(kind)), FAMILIES[kind]
    config.stored = STORED.get(kind, frozenset())
    module = next(iter(family.tasks.values()))(config)
    arrays = {}
    for name, shape in stored_shapes(family, module).items():
        arrays[name] = weight(name, shape)
    (folder / "config.json").write_text(json.dumps(fields(kind)))
    write_weights(folder / "model.safetensors", arrays)
    return folder


@pytest.mark.parametrize("kind", VISION)
def test_numbers_of_transformers(kind: str, tmp_path: Path) -> None:
    model = gg.optimize(from_folder(checkpoint(tmp_path, kind)).model).model
    operators = [node.op_type for node in model.graph.all_nodes()]
    assert "Softmax" not in operators
    assert sum("Attention" in name for name in operators) == ATTENTIONS[kind]
    found = zip(model.graph.outputs, run_plain(model, inputs(kind)), strict=True)
    for value, array in found:
        assert relative_rms(RESULTS[f"{kind}, {value.name}"], array) < BOUND
    assert lost(tmp_path) == set()


def lost(folder: Path) -> set[str]:
    """The weights of a checkpoint that the way back from its graph does not give."""
    config = Config.read(folder / "config.json")
    back = stored_weights(config, FAMILIES[config.model_type], [from_folder(folder).model])
    return {*read_weights(folder)} ^ {*back.weights}


@pytest.mark.parametrize("kind", ["clip", "siglip"])
def test_towers_are_two_files_that_give_the_same(kind: str, tmp_path: Path) -> None:
    models = from_folder(checkpoint(tmp_path, kind), "feature-extraction").models
    assert [*models] == ["text_model.onnx", "vision_model.onnx"]
    for model, name in zip(models.values(), ("text_embeds", "image_embeds"), strict=True):
        read = [str(value.name) for value in model.graph.inputs]
        vectors, _ = run_plain(model, {n: x for n, x in inputs(kind).items() if n in read})
        lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
        assert relative_rms(RESULTS[f"{kind}, {name}"], vectors / lengths) < BOUND


@pytest.mark.parametrize("kind", ONE)
def test_a_tower_alone_gives_the_same(kind: str, tmp_path: Path) -> None:
    both, side = kind.split("_")[:2]
    (tmp_path / "both").mkdir()
    read = read_weights(checkpoint(tmp_path / "both", both))
    own = {"text": "text_projection", "vision": "visual_projection"}[side]
    kept = {n: x.read() for n, x in read.items() if n.startswith((f"{side}_model.", own))}
    (tmp_path / "config.json").write_text(json.dumps(fields(kind)))
    write_weights(tmp_path / "model.safetensors", kept)
    model = gg.optimize(from_folder(tmp_path).model).model
    name = {"text": "text_embeds", "vision": "image_embeds"}[side]
    assert [value.name for value in model.graph.outputs] == [
        name if both == "clip" else "pooler_output",
        "last_hidden_state",
    ]
    assert lost(tmp_path) == set()
    vectors, _ = run_plain(
        model, {str(x.name): inputs(both)[str(x.name)] for x in model.graph.inputs}
    )
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    assert relative_rms(RESULTS[f"{both}, {name}"], vectors / lengths) < BOUND


PUBLISHED: dict[str, dict[str, Any]] = {
    "deit": {"qkv_bias": True, "encoder_stride": 16, "hidden_act": "gelu"},
    "dinov2": {
        "apply_layernorm": True,
        "drop_path_rate": 0.0,
        "layerscale_value": 1.0,
        "out_features": ["stage12"],
        "out_indices": [12],
        "reshape_hidden_states": True,
        "stage_names": ["stem", "stage1"],
        "use_swiglu_ffn": False,
    },
    "clip": {
        "initializer_factor": 1.0,
        "logit_scale_init_value": 2.6592,
        "text_config": {
            "hidden_size": 12,
            "projection_dim": 512,
            "num_attention_heads": 2,
            "add_cross_attention": False,
            "bad_words_ids": None,
            "eos_token_id": 2,
            "is_decoder": False,
            "tie_word_embeddings": True,
            "torchscript": False,
            "hidden_act": "quick_gelu",
            "dropout": 0.0,
            "max_position_embeddings": 77,
        },
        "text_config_dict": {"hidden_size": 12, "num_attention_heads": 2},
        "vision_config_dict": None,
    },
    "siglip": {
        "initializer_factor": 1.0,
        "text_config": {"model_type": "siglip_text_model"},
        "vision_config": {"model_type": "siglip_vision_model", "image_size": 384},
    },
}
"""What published configurations have besides sizes, or instead of them."""


@pytest.mark.parametrize("kind", PUBLISHED)
def test_published_fields_are_known(kind: str) -> None:
    config = Config(fields(kind) | PUBLISHED[kind])
    next(iter(FAMILIES[kind].tasks.values()))(config)
    config.finish()


@pytest.mark.parametrize(
    ("kind", "change", "told"),
    [
        ("deit", {"head_dim": 5}, "head_dim is 5; it must be 8"),
        ("dinov2", {"image_size": [9, 12]}, r"image_size is \[9, 12\]; it must be square"),
        ("dinov2", {"num_register_tokens": 4}, "does not have these fields: num_register_tokens"),
        ("clip", {"text_config": 3}, "text_config is 3; it must be an object"),
        (
            "clip",
            {"text_config": {"kind": 3}},
            "text_config: clip_text_model does not .*: kind = 3",
        ),
        ("clip", {"text_config": {"eos_token_id": [2]}}, "eos_token_id is .*; it must be an in"),
        ("clip", {"text_config_dict": {"hidden_size": 9}}, "must be what text_config says: hidden"),
        ("siglip", {"vision_config": {"vision_use_head": False}}, "vision_use_head is False; it"),
        ("siglip", {"text_config": {"model_type": "gemma"}}, "must be of model_type 'siglip_text"),
    ],
)
def test_what_would_change_results_is_refused(kind: str, change: dict[str, Any], told: str) -> None:
    config = Config(fields(kind) | change)
    with pytest.raises(GraphgenError, match=told):
        next(iter(FAMILIES[kind].tasks.values()))(config)
        config.finish()


def test_weights_of_a_layer_too_many_are_refused(tmp_path: Path) -> None:
    given = fields("clip")
    given["text_config"] = {**given["text_config"], "num_hidden_layers": 1}
    folder = checkpoint(tmp_path, "clip")
    (folder / "config.json").write_text(json.dumps(given))
    with pytest.raises(GraphgenError, match=r"text_model.encoder.layers.1.*is not in the archi"):
        from_folder(folder)


DINO3: dict[str, Any] = {"model_type": "dinov3_vit", "hidden_size": 16, "intermediate_size": 24} | {
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_channels": 2,
    "patch_size": 3,
}


@pytest.mark.parametrize("count", [0, 2])
def test_places_of_patches_turn_queries_and_keys(count: int, tmp_path: Path) -> None:
    """Of DINOv3, whose images of equal patches differ by their places alone."""
    family, given = FAMILIES["dinov3_vit"], {**DINO3, "num_register_tokens": count}
    shapes = stored_shapes(family, family.tasks["feature-extraction"](Config(given)))
    write_weights(tmp_path / "model.safetensors", {n: weight(n, s) for n, s in shapes.items()})
    (tmp_path / "config.json").write_text(json.dumps(given))
    model = gg.optimize(from_folder(tmp_path).model, expect={"attention": 1}).model
    images = np.random.default_rng(0).standard_normal((1, 2, 6, 9)).astype(np.float32)
    swapped = np.concatenate([images[:, :, 3:], images[:, :, :3]], axis=2)
    (x,), (y,) = (run_plain(model, {"pixel_values": one}) for one in (images, swapped))
    assert x.shape == (1, 1 + count + 6, 16)
    moved = np.concatenate([y[:, 4 + count :], y[:, 1 + count : 4 + count]], axis=1)
    assert relative_rms(x[:, 1 + count :], moved) > 0.01
    assert lost(tmp_path) == set()


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"num_attention_heads": 3}, "num_attention_heads is 3; it must be 16 by a multiple of 4"),
        ({"num_register_tokens": -1}, "num_register_tokens is -1; it must be a number from 0 to"),
        ({"key_bias": 1}, "key_bias is 1; it must be true or false"),
        ({"rope_theta": "a"}, "rope_theta is 'a'; it must be a number"),
    ],
)
def test_fields_of_dinov3_are_refused(fields: dict[str, Any], told: str) -> None:
    with pytest.raises(GraphgenError, match=told):
        FAMILIES["dinov3_vit"].tasks["feature-extraction"](Config(DINO3 | fields))
