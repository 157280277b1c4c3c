"""Checkpoints of encoders, random and of high variance, against transformers."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_families import BOUND, padded, relative_rms, save, session

import graphgen as gg
from graphgen.batch.images import Images
from graphgen.models.published import from_folder

torch = pytest.importorskip("torch", reason="needs torch (make parity)")
transformers = pytest.importorskip("transformers", reason="needs transformers (make parity)")

pytestmark = pytest.mark.parity

LONGEST = 48  # positions: RoBERTa's begin behind its padding's
BERT = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": LONGEST,
}
DISTILBERT = {
    "vocab_size": 300,
    "dim": 64,
    "hidden_dim": 96,
    "n_layers": 3,
    "n_heads": 4,
    "max_position_embeddings": LONGEST,
}
VIT = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "image_size": 24,
    "patch_size": 8,
}
SIZES = {"Bert": BERT, "Roberta": BERT, "XLMRoberta": BERT, "DistilBert": DISTILBERT, "ViT": VIT}
HEADS = {
    "feature-extraction": "Model",
    "fill-mask": "ForMaskedLM",
    "text-classification": "ForSequenceClassification",
    "token-classification": "ForTokenClassification",
    "question-answering": "ForQuestionAnswering",
    "image-classification": "ForImageClassification",
}
ODD: dict[str, dict[str, Any]] = {
    "Bert": {"hidden_act": "gelu_new", "type_vocab_size": 3, "layer_norm_eps": 1e-3},
    "Roberta": {"hidden_act": "relu", "pad_token_id": 5, "type_vocab_size": 1},
    "XLMRoberta": {"hidden_act": "silu", "num_attention_heads": 2, "pad_token_id": 0},
    "DistilBert": {"activation": "relu", "sinusoidal_pos_embds": True, "n_heads": 8},
}
CASES = [
    *((k, t, {}) for k in SIZES if k != "ViT" for t in HEADS if t != "image-classification"),
    *((kind, "fill-mask", {"tie_word_embeddings": False, **odd}) for kind, odd in ODD.items()),
    ("Bert", "feature-extraction", {"type_vocab_size": 1}),
    ("Bert", "text-classification", {"num_labels": 7}),
    ("Roberta", "token-classification", {"num_labels": 1}),
]


def named(run: Any, feeds: dict[str, Any]) -> dict[str, Any]:
    """The outputs by name."""
    names = [output.name for output in run.get_outputs()]
    return dict(zip(names, run.run(None, feeds), strict=True))


def compare(module: Any, run: Any, feeds: dict[str, Any]) -> None:
    """Every output of both within the bound, and none but those of torch."""
    with torch.no_grad():
        wanted = module(**{name: torch.tensor(x) for name, x in feeds.items()})
    got = named(run, feeds)
    assert set(got) == set(wanted) - {"pooler_output"}
    for name, array in got.items():
        assert array.shape == wanted[name].shape
        assert relative_rms(array, wanted[name].numpy()) < BOUND


def tokens(run: Any, side: str, rows: int) -> dict[str, Any]:
    """The inputs that the graph wants."""
    ids, mask = padded(side, rows)
    every = {"input_ids": ids, "attention_mask": mask, "token_type_ids": ids % 2}
    return {x.name: every[x.name] for x in run.get_inputs()}


@pytest.mark.parametrize(("kind", "task", "options"), CASES)
def test_encoder(kind: str, task: str, options: dict[str, Any], tmp_path: Path) -> None:
    module = save(kind, options, tmp_path, HEADS[task], sizes=SIZES[kind])
    run = session(gg.optimize(from_folder(tmp_path, task).model), tmp_path)
    for side, rows in (("left", 1), ("left", 3), ("right", 3)):
        compare(module, run, tokens(run, side, rows))
    padding = module.config.pad_token_id
    length = LONGEST - (padding + 1 if "roberta" in kind.lower() else 0)
    ids = np.random.default_rng(1).integers(padding + 1, 300, (2, length))
    ids[1, -3:] = padding
    feeds = {**tokens(run, "left", 1), "input_ids": ids, "attention_mask": np.ones_like(ids)}
    compare(module, run, {name: x if len(x) == 2 else ids % 2 for name, x in feeds.items()})


@pytest.mark.parametrize(
    ("task", "options"),
    [
        ("image-classification", {"num_labels": 5}),
        ("feature-extraction", {"qkv_bias": False, "hidden_act": "gelu_pytorch_tanh"}),
        ("image-classification", {"image_size": [20, 32], "patch_size": [6, 8], "num_channels": 1}),
    ],
)
def test_vit(task: str, options: dict[str, Any], tmp_path: Path) -> None:
    module = save("ViT", options, tmp_path, HEADS[task], sizes=VIT)
    run = session(gg.optimize(from_folder(tmp_path, task).model), tmp_path)
    size = run.get_inputs()[0].shape[1:]
    for rows in (1, 3):
        image = np.random.default_rng(0).normal(size=(rows, *size)).astype(np.float32)
        compare(module, run, {"pixel_values": image})


@pytest.mark.parametrize("stored", ["float16", "bfloat16", "float32"])
def test_stored_in_parts_and_in_half_precision(stored: str, tmp_path: Path) -> None:
    parts = {"max_shard_size": "40KB", "stored": getattr(torch, stored)}
    module = save("Bert", {}, tmp_path, "ForMaskedLM", sizes=BERT, **parts)
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    run = session(gg.optimize(from_folder(tmp_path, "fill-mask").model), tmp_path)
    compare(module, run, tokens(run, "left", 3))


@pytest.mark.parametrize("kind", ["Bert", "Roberta", "DistilBert", "ViT"])
def test_attentions(kind: str, tmp_path: Path) -> None:
    module = save(kind, {}, tmp_path, "Model", sizes=SIZES[kind])
    module.set_attn_implementation("eager")
    model = from_folder(tmp_path, "feature-extraction", attentions=True).model
    run = session(gg.optimize(model), tmp_path)
    image = {"pixel_values": np.random.default_rng(0).normal(size=(2, 3, 24, 24))}
    feeds = tokens(run, "left", 3) if kind != "ViT" else image
    feeds = {name: x if x.dtype == np.int64 else x.astype(np.float32) for name, x in feeds.items()}
    with torch.no_grad():
        given = {name: torch.tensor(x) for name, x in feeds.items()}
        wanted = module(**given, output_attentions=True)
    got = named(run, feeds)
    assert relative_rms(got.pop("last_hidden_state"), wanted.last_hidden_state.numpy()) < BOUND
    assert list(got) == ["attentions.0", "attentions.1", "attentions.2"]
    for array, weights in zip(got.values(), wanted.attentions, strict=True):
        assert relative_rms(array, weights.numpy()) < BOUND


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("pooling", ["cls", "mean", "max"])
def test_sentence_embedding(pooling: str, side: str, tmp_path: Path) -> None:
    module = save("Bert", {}, tmp_path, "Model", sizes=BERT)
    chosen = {"cls": "cls_token", "mean": "mean_tokens", "max": "max_tokens"}
    flags = {f"pooling_mode_{flag}": name == pooling for name, flag in chosen.items()}
    kinds = ["Transformer", "Pooling", "Normalize"][: 2 if pooling == "max" else 3]
    write_sentence(tmp_path, kinds, {"word_embedding_dimension": 64, **flags})
    run = session(gg.optimize(from_folder(tmp_path).model), tmp_path)
    feeds = tokens(run, side, 3)
    with torch.no_grad():
        x = module(**{name: torch.tensor(x) for name, x in feeds.items()}).last_hidden_state
        kept = torch.tensor(feeds["attention_mask"])[..., None]
        pooled = {
            "cls": x[torch.arange(3), kept[..., 0].argmax(1)],
            "mean": (x * kept).sum(1) / kept.sum(1).clamp(min=1e-9),
            "max": x.masked_fill(kept == 0, -1e9).max(1)[0],
        }[pooling]
        wanted = torch.nn.functional.normalize(pooled, dim=1) if kinds[2:] else pooled
    got = named(run, feeds)
    assert list(got) == ["last_hidden_state", "sentence_embedding"]
    assert relative_rms(got["sentence_embedding"], wanted.numpy()) < BOUND


def write_sentence(folder: Path, kinds: list[str], pooling: dict[str, Any]) -> None:
    """The files that make a checkpoint one of sentence-transformers."""
    modules = [
        {"idx": n, "name": str(n), "type": f"sentence_transformers.models.{kind}"}
        | {"path": f"{n}_{kind}" if n else ""}
        for n, kind in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"resample": 3, "image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]},
        {"size": {"height": 20, "width": 30}, "do_normalize": False},
        {"size": 16, "do_rescale": False, "resample": 0},
    ],
)
def test_images_are_prepared(options: dict[str, Any], tmp_path: Path) -> None:
    """Larger ones, smaller ones, those with a palette or one channel: as a pipeline reads them."""
    pillow = pytest.importorskip("PIL.Image", reason="needs Pillow")
    kind = getattr(transformers, "ViTImageProcessorPil", None) or transformers.ViTImageProcessor
    processor = kind(**{"size": {"height": 24, "width": 24}, **options})
    processor.save_pretrained(tmp_path)
    size = processor.size
    images = Images(tmp_path, ["batch_size", 3, size["height"], size["width"]], tmp_path)
    random, rows, wanted = np.random.default_rng(0), [], []
    for i, mode in enumerate(["RGB", "L", "P", "RGBA"]):
        array = random.integers(0, 256, (11 + 20 * i, 50 - 9 * i, 3), np.uint8)
        turned = pillow.Exif()
        turned[0x0112] = 6  # a quarter to the right
        pillow.fromarray(array).convert(mode).save(tmp_path / f"{i}.png", exif=turned)
        image = transformers.image_utils.load_image(str(tmp_path / f"{i}.png"))
        wanted.append(processor(image, return_tensors="np")["pixel_values"][0])
        rows.append(images.look({"image": f"{i}.png"}, f"row {i}"))
    got = images.feeds(rows)["pixel_values"]
    assert got.dtype == np.float32
    assert np.abs(got - np.array(wanted)).max() <= 1e-5 * max(1, np.abs(wanted).max())
