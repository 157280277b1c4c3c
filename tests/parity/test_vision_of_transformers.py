"""DeiT, DINOv2, CLIP and SigLIP, and how images are prepared for them, against transformers."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import graphgen as gg
from graphgen.batch.images import Images
from graphgen.models.published import from_folder

torch = pytest.importorskip("torch", reason="needs torch (make parity)")
transformers = pytest.importorskip("transformers", reason="needs transformers (make parity)")

from safetensors import numpy as safetensors  # noqa: E402
from test_families import relative_rms, session  # noqa: E402

pytestmark = pytest.mark.parity

BOUND = 1e-5  # relative RMS
IMAGES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_channels": 2} | {
    "num_attention_heads": 4
}
OBLONG = {**IMAGES, "image_size": [12, 18], "patch_size": [4, 5], "num_labels": 3}
SQUARE = {**IMAGES, "image_size": 15, "patch_size": 5, "num_labels": 3}
DINO = {name: value for name, value in SQUARE.items() if name != "intermediate_size"}
TEXTS = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "vocab_size": 30} | {
    "num_attention_heads": 3,
    "max_position_embeddings": 11,
    "eos_token_id": 29,
    "bos_token_id": 1,
}
ENCODERS: dict[str, tuple[str, str, dict[str, Any], tuple[int, int]]] = {
    "deit": ("DeiT", "ForImageClassification", OBLONG, (12, 18)),
    "deit, teacher": ("DeiT", "ForImageClassificationWithTeacher", OBLONG, (12, 18)),
    "deit, no bias": ("DeiT", "Model", {**OBLONG, "qkv_bias": False}, (12, 18)),
    "dinov2": ("Dinov2", "ForImageClassification", DINO, (15, 15)),
    "dinov2, gated": (
        "Dinov2",
        "ForImageClassification",
        {**DINO, "use_swiglu_ffn": True},
        (15, 15),
    ),
    "vit_msn": ("ViTMSN", "ForImageClassification", OBLONG, (12, 18)),
    "vit_msn, vectors": ("ViTMSN", "Model", OBLONG, (12, 18)),
    "registers": ("Dinov2WithRegisters", "ForImageClassification", DINO, (15, 15)),
    "registers, larger": (
        "Dinov2WithRegisters",
        "Model",
        {**DINO, "use_swiglu_ffn": True, "num_register_tokens": 2},
        (24, 36),
    ),
    "registers, smaller": ("Dinov2WithRegisters", "Model", {**DINO, "image_size": 45}, (10, 15)),
    "dinov3": ("DINOv3ViT", "Model", {**SQUARE, "num_register_tokens": 3}, (15, 20)),
    "dinov3, gated": (
        "DINOv3ViT",
        "Model",
        {**SQUARE, **dict.fromkeys(("query_bias", "value_bias", "proj_bias", "mlp_bias"), False)}
        | {"key_bias": True, "use_gated_mlp": True, "hidden_act": "silu", "rope_theta": 50.0},
        (26, 15),
    ),
    "dinov2, larger": ("Dinov2", "Model", {**DINO, "mlp_ratio": 3}, (24, 36)),
    "dinov2, smaller": ("Dinov2", "Model", DINO, (10, 15)),
}
PAIRS: dict[str, tuple[str, str, dict[str, Any], str]] = {
    "clip": ("CLIP", "Model", {}, "zero-shot-image-classification"),
    "clip, highest token": ("CLIP", "Model", {"eos_token_id": 2}, "zero-shot-image-classification"),
    "clip, towers": ("CLIP", "Model", {"hidden_act": "gelu"}, "feature-extraction"),
    "clip, labels": ("CLIP", "ForImageClassification", {}, "image-classification"),
    "siglip": ("Siglip", "Model", {}, "zero-shot-image-classification"),
    "siglip, towers": ("Siglip", "Model", {"max_position_embeddings": 12}, "feature-extraction"),
    "siglip, labels": ("Siglip", "ForImageClassification", {}, "image-classification"),
}


def save(module: Any, folder: Path) -> Any:
    """A checkpoint with weights so large that every one of them matters; the module."""
    torch.manual_seed(0)
    with torch.no_grad():
        for name, weight in module.named_parameters():
            if weight.ndim > 1:
                weight.normal_(std=1.5 / weight.shape[-1] ** 0.5)
            else:
                weight.normal_(mean=float("norm" in name), std=0.3)
    module.eval().save_pretrained(folder)
    return module


def built(folder: Path, task: str) -> dict[str, Any]:
    """The optimized graphs, in which every attention is one operator."""
    models = {name: gg.optimize(m).model for name, m in from_folder(folder, task).models.items()}
    for model in models.values():
        assert not any(node.op_type == "Softmax" for node in model.graph.all_nodes())
    return models


@pytest.mark.parametrize("which", ENCODERS)
def test_images(which: str, tmp_path: Path) -> None:
    kind, head, options, size = ENCODERS[which]
    config = getattr(transformers, f"{kind}Config")(**options)
    module = save(getattr(transformers, f"{kind}{head}")(config), tmp_path)
    task = "feature-extraction" if head == "Model" else "image-classification"
    [model] = built(tmp_path, task).values()
    pixels = np.random.default_rng(0).standard_normal((3, 2, *size), np.float32)
    with torch.no_grad():
        wanted = module(torch.tensor(pixels))
    name = "last_hidden_state" if head == "Model" else "logits"
    [got] = session(model, tmp_path).run([name], {"pixel_values": pixels})
    assert relative_rms(got, wanted[name].numpy()) < BOUND


@pytest.mark.parametrize("which", PAIRS)
def test_texts_and_images(which: str, tmp_path: Path) -> None:
    kind, head, options, task = PAIRS[which]
    own = {"projection_size": 32} if kind == "Siglip" else {}
    sides = {"text_config": {**TEXTS, **own, **options}, "vision_config": SQUARE}
    if kind == "CLIP":
        sides["projection_dim"] = 20
    config = getattr(transformers, f"{kind}Config")(**sides, num_labels=3)
    module = save(getattr(transformers, f"{kind}{head}")(config), tmp_path)
    random = np.random.default_rng(0)
    ids, mask = random.integers(1, 29, (3, 11)), np.ones((3, 11), np.int64)
    ids[0, 10] = ids[1, 5] = ids[2, 4] = ids[2, 8] = 29
    mask[1, 6:] = mask[2, :2] = 0
    feeds: dict[str, Any] = {"input_ids": ids, "attention_mask": mask}
    if kind == "Siglip":
        del feeds["attention_mask"]
    texts = {name: torch.tensor(array) for name, array in feeds.items()}
    feeds["pixel_values"] = random.standard_normal((2, 2, 15, 15), np.float32)
    pixels = torch.tensor(feeds["pixel_values"])
    with torch.no_grad():
        if task == "image-classification":
            wanted = module(pixel_values=pixels)
        elif task == "feature-extraction":
            wanted = {
                "text_embeds": module.get_text_features(**texts).pooler_output,
                "image_embeds": module.get_image_features(pixels).pooler_output,
            }
        else:
            wanted = module(**texts, pixel_values=pixels)
    compared = 0
    for model in built(tmp_path, task).values():
        run = session(model, tmp_path)
        own = {value.name: feeds[value.name] for value in run.get_inputs()}
        for value, got in zip(run.get_outputs(), run.run(None, own), strict=True):
            if value.name != "last_hidden_state":
                assert relative_rms(got, wanted[value.name].numpy()) < BOUND
                compared += 1
    assert compared == {"image-classification": 1, "feature-extraction": 2}.get(task, 4)


ALONE: dict[str, tuple[str, str, dict[str, Any]]] = {
    "clip, text": ("CLIPText", "Model", {**TEXTS, "hidden_act": "gelu"}),
    "clip, text, highest token": ("CLIPText", "Model", {**TEXTS, "eos_token_id": 2}),
    "clip, text, projected": ("CLIPText", "ModelWithProjection", {**TEXTS, "projection_dim": 20}),
    "clip, image": ("CLIPVision", "Model", SQUARE),
    "clip, image, projected": ("CLIPVision", "ModelWithProjection", SQUARE),
    "siglip, text": ("SiglipText", "Model", {**TEXTS, "projection_size": 20}),
    "siglip, image": ("SiglipVision", "Model", SQUARE),
}


@pytest.mark.parametrize("older", [False, True])
@pytest.mark.parametrize("which", ALONE)
def test_a_tower_alone(which: str, older: bool, tmp_path: Path) -> None:
    """All its outputs; older folders name weights by the tower, and hold places."""
    kind, head, options = ALONE[which]
    config = getattr(transformers, f"{kind}Config")(**options)
    module = save(getattr(transformers, f"{kind}{head}")(config), tmp_path)
    side = f"{'text' if 'Text' in kind else 'vision'}_model."
    file = tmp_path / "model.safetensors"
    stored = safetensors.load_file(file)
    if older:
        own = {n: n if n.startswith(side) or "_projection." in n else side + n for n in stored}
        stored = {own[name]: array for name, array in stored.items()}
        stored[f"{side}embeddings.position_ids"] = np.arange(11)[None]
        safetensors.save_file(stored, file)
    random = np.random.default_rng(0)
    ids, mask = random.integers(1, 29, (3, 11)), np.ones((3, 11), np.int64)
    ids[0, 10] = ids[1, 5] = ids[2, 4] = ids[2, 8] = 29
    mask[1, 6:] = 0
    feeds: dict[str, Any] = {"input_ids": ids, "attention_mask": mask}
    if "Vision" in kind:
        feeds = {"pixel_values": random.standard_normal((2, 2, 15, 15), np.float32)}
    elif "Siglip" in kind:
        del feeds["attention_mask"]
    with torch.no_grad():
        wanted = module(**{name: torch.tensor(array) for name, array in feeds.items()})
    [model] = built(tmp_path, "feature-extraction").values()
    run = session(model, tmp_path)
    names = [value.name for value in run.get_outputs()]
    assert len(names) == 2 and {value.name for value in run.get_inputs()} == {*feeds}
    for name, got in zip(names, run.run(None, feeds), strict=True):
        assert relative_rms(got, wanted[name].numpy()) < BOUND


@pytest.mark.parametrize(
    ("kind", "options", "size"),
    [
        (
            "CLIP",
            {"size": {"shortest_edge": 24}, "crop_size": {"height": 24, "width": 24}},
            (24, 24),
        ),
        ("CLIP", {"size": {"shortest_edge": 13}, "crop_size": 20}, (20, 20)),
        ("CLIP", {"size": 30, "crop_size": 20}, (20, 20)),
        ("CLIP", {"size": 30, "crop_size": 20, "default_to_square": True}, (20, 20)),
        ("DeiT", {"size": 30, "crop_size": 20, "default_to_square": False}, (20, 20)),
        (
            "Bit",
            {"size": {"shortest_edge": 30}, "crop_size": {"height": 21, "width": 18}},
            (21, 18),
        ),
        ("DeiT", {"size": {"height": 26, "width": 31}, "crop_size": 24}, (24, 24)),
        ("Siglip", {"size": {"height": 20, "width": 30}}, (20, 30)),
        ("ConvNext", {"size": {"shortest_edge": 33}, "crop_pct": 0.9}, (33, 33)),
        ("ConvNext", {"size": {"shortest_edge": 384}}, (384, 384)),
    ],
)
@pytest.mark.parametrize("free", [False, True])
@pytest.mark.parametrize("older", [False, True])
def test_images_are_prepared(
    kind: str,
    options: dict[str, Any],
    size: tuple[int, int],
    free: bool,
    older: bool,
    tmp_path: Path,
) -> None:
    """Also by a file that names no class, as older ones: the model type says which it is."""
    pillow = pytest.importorskip("PIL.Image", reason="needs Pillow")
    processor = getattr(transformers, f"{kind}ImageProcessorPil")(**options)
    processor.save_pretrained(tmp_path)
    if older:
        named = {"Bit": "dinov2"}.get(kind, kind.lower())
        (tmp_path / "config.json").write_text(f'{{"model_type": "{named}"}}')
        (tmp_path / "preprocessor_config.json").write_text(json.dumps(options))
        processor = transformers.AutoImageProcessor.from_pretrained(tmp_path)
    dims = ("height", "width") if free else size
    images = Images(tmp_path, ["batch_size", 3, *dims], tmp_path)
    random, rows, wanted = np.random.default_rng(0), [], []
    for i in range(4):
        array = random.integers(0, 256, (11 + 20 * i, 50 - 9 * i, 3), np.uint8)
        pillow.fromarray(array).save(tmp_path / f"{i}.png")
        wanted.append(processor(pillow.fromarray(array), return_tensors="np")["pixel_values"][0])
        rows.append(images.look({"image": f"{i}.png"}, f"row {i}"))
    got = images.feeds(rows)["pixel_values"]
    assert got.shape[2:] == size
    assert np.abs(got - np.array(wanted)).max() <= 1e-5 * max(1, np.abs(wanted).max())
