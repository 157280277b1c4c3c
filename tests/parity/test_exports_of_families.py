"""Encoders, towers and speech models of transformers, as torch's two exporters write them.

Exported with dynamic axes at one size, optimized, and compared with the export at other sizes, both
without the runtime's own optimizations. Every attention and every norm has to be found.
"""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import graphgen as gg
from graphgen.export.write import to_bytes
from graphgen.runtime import Session

torch = pytest.importorskip("torch", reason="needs torch (make parity)")
transformers = pytest.importorskip("transformers", reason="needs transformers (make parity)")

pytestmark = pytest.mark.parity

BOUND = 1e-5  # relative RMS in float32
SIZES = ((3, 16), (2, 24), (4, 37))  # rows and tokens, or what is made of them
BASE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4} | {
    "intermediate_size": 48
}
TEXT = {**BASE, "vocab_size": 99, "max_position_embeddings": 512}
IMAGE = {**BASE, "image_size": 32, "patch_size": 8}
SOUND = {
    **BASE,
    "conv_dim": (16, 16),
    "conv_stride": (5, 2),
    "conv_kernel": (10, 3),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 2,
}


def text(rows: int, tokens: int) -> dict[str, Any]:
    """Tokens, of which the last of the first row are padding."""
    mask = torch.ones(rows, tokens, dtype=torch.long)
    mask[0, tokens - tokens // 4 :] = 0
    return {"input_ids": torch.randint(5, 90, (rows, tokens)), "attention_mask": mask}


def pages(rows: int, tokens: int) -> dict[str, Any]:
    low = torch.randint(0, 50, (rows, tokens, 2))
    return text(rows, tokens) | {"bbox": torch.cat([low, low + 7], -1)}


def images(rows: int, tokens: int) -> dict[str, Any]:
    return {"pixel_values": torch.randn(rows, 3, 32, 32)}


def films(rows: int, tokens: int) -> dict[str, Any]:
    return {"pixel_values": torch.randn(rows, 4, 3, 32, 32)}


def sounds(rows: int, tokens: int) -> dict[str, Any]:
    return {"input_values": torch.randn(rows, 800 + 80 * tokens)}


def states(rows: int, tokens: int) -> dict[str, Any]:
    return {"inputs": torch.randn(rows, tokens, 32)}


class Family(NamedTuple):
    """A model of transformers, and how many attentions and norms its result depends on."""

    kind: str
    fields: dict[str, Any]
    inputs: Callable[[int, int], dict[str, Any]] = text
    attentions: int = 2
    norms: int = 5


FAMILIES = {
    "roformer": Family("RoFormer", {**TEXT, "embedding_size": 32}),
    "convbert": Family("ConvBert", {**TEXT, "embedding_size": 32, "head_ratio": 2}),
    "squeezebert": Family("SqueezeBert", {**TEXT, "embedding_size": 32}),
    "rembert": Family("RemBert", {**TEXT, "input_embedding_size": 16}),
    "layoutlm": Family("LayoutLM", {**TEXT, "max_2d_position_embeddings": 128}, pages),
    "splinter": Family("Splinter", TEXT),
    "ibert": Family("IBert", {**TEXT, "pad_token_id": 1}),
    "esm": Family(
        "Esm",
        {**TEXT, "pad_token_id": 1, "mask_token_id": 4, "position_embedding_type": "rotary"},
    ),
    "xlm": Family("XLM", {"vocab_size": 99, "emb_dim": 32, "n_layers": 2, "n_heads": 4}),
    "flaubert": Family("Flaubert", {"vocab_size": 99, "emb_dim": 32, "n_layers": 2, "n_heads": 4}),
    "ctrl": Family(
        "CTRL",
        {"vocab_size": 99, "n_positions": 128, "n_embd": 32, "dff": 48, "n_layer": 2, "n_head": 4},
    ),
    "perceiver": Family(
        "Perceiver",
        {"num_latents": 8, "d_latents": 32, "d_model": 32, "num_blocks": 1}
        | {"num_self_attends_per_block": 2, "num_self_attention_heads": 4}
        | {"num_cross_attention_heads": 4},
        states,
        attentions=3,
        norms=7,
    ),
    "swinv2": Family(
        "Swinv2",
        {"image_size": 32, "patch_size": 2, "embed_dim": 16, "depths": [2, 2]}
        | {"num_heads": [2, 4], "window_size": 4},
        images,
        attentions=4,
        norms=11,
    ),
    "segformer": Family(
        "Segformer",
        {"num_encoder_blocks": 2, "depths": [1, 1], "sr_ratios": [2, 1], "hidden_sizes": [16, 32]}
        | {"patch_sizes": [7, 3], "strides": [4, 2], "num_attention_heads": [1, 2]}
        | {"mlp_ratios": [2, 2]},
        images,
        norms=9,
    ),
    "timesformer": Family("Timesformer", {**IMAGE, "num_frames": 4}, films, attentions=4, norms=7),
    "videomae": Family("VideoMAE", {**IMAGE, "num_frames": 4, "tubelet_size": 2}, films, norms=4),
    "wav2vec2": Family("Wav2Vec2", SOUND, sounds, norms=6),
    "hubert": Family(
        "Hubert",
        {**SOUND, "do_stable_layer_norm": True, "feat_extract_norm": "layer"},
        sounds,
        norms=8,
    ),
    "sew": Family("SEW", {**SOUND, "squeeze_factor": 2}, sounds, norms=6),
    "wavlm": Family(
        "WavLM", {**SOUND, "num_buckets": 32, "max_bucket_distance": 64}, sounds, norms=6
    ),
}


class Positional(torch.nn.Module):  # type: ignore[misc,name-defined]
    """A model that is called with tensors alone, and gives its first result."""

    def __init__(self, model: Any, names: list[str]) -> None:
        super().__init__()
        self.model, self.names = model, names

    def forward(self, *tensors: Any) -> Any:
        return self.model(**dict(zip(self.names, tensors, strict=True)))[0]


def varied(family: Family, attention: str) -> Any:
    """The model with weights of high variance."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{family.kind}Config")(**family.fields)
    config.use_cache = False
    try:
        config._attn_implementation = attention
        model = getattr(transformers, f"{family.kind}Model")(config).eval()
    except ValueError:  # it has the eager form only
        config._attn_implementation = "eager"
        model = getattr(transformers, f"{family.kind}Model")(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim < 2:
                weight += 0.2 * torch.randn(weight.shape)
            elif weight.requires_grad:
                weight.normal_(std=1.3 / weight[0].numel() ** 0.5)
    return model


@pytest.mark.parametrize("exporter", ["torchscript", "dynamo"])
@pytest.mark.parametrize("which", FAMILIES)
def test_an_export_is_fused_and_right_at_other_sizes(
    which: str, exporter: str, tmp_path: Path
) -> None:
    family, path = FAMILIES[which], tmp_path / "export.onnx"
    model = varied(family, "eager" if exporter == "torchscript" else "sdpa")
    given = family.inputs(*SIZES[0])
    whole = Positional(model, [*given]).eval()
    free = [1] if family.inputs not in (images, films) else []
    axes = {name: {0: "rows"} | dict.fromkeys(free, "tokens") for name in given}
    how: dict[str, Any] = {"opset_version": 17, "dynamo": False, "dynamic_axes": axes}
    if exporter == "dynamo":
        dims = [dict.fromkeys(a, torch.export.Dim.DYNAMIC) for a in axes.values()]
        how = {"opset_version": 18, "dynamo": True, "external_data": False, "verbose": False}
        how["dynamic_shapes"] = (tuple(dims),)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        names = {"input_names": [*given], "output_names": ["y"]}
        torch.onnx.export(whole, (*given.values(),), path, **names, **how)
    best = gg.optimize(gg.load(path))
    counts = best.report.ops_after
    attention = ("Attention", "MultiHeadAttention", "GroupQueryAttention")
    found = sum(n for name, n in counts.items() if name.split("::")[-1] in attention)
    assert (found, counts.get("LayerNormalization", 0)) == (family.attentions, family.norms)
    before, after = Session(path, optimize=False), Session(to_bytes(best.model), optimize=False)
    for rows, tokens in SIZES:
        given = family.inputs(rows, tokens)
        feeds = {name: given[name].numpy() for name in before.inputs}
        wanted, got = before(feeds)[0], after(feeds)[0]
        assert np.linalg.norm(got - wanted) <= BOUND * np.linalg.norm(wanted)
        with torch.no_grad():
            exact = whole(*given.values()).numpy()
        assert np.linalg.norm(got - exact) <= BOUND * np.linalg.norm(exact)
