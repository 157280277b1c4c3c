"""wav2vec 2.0 and HuBERT, sounds of several lengths in a batch, against transformers."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import graphgen as gg
from graphgen.models.published import from_folder

torch = pytest.importorskip("torch", reason="needs torch (make parity)")
transformers = pytest.importorskip("transformers", reason="needs transformers (make parity)")

from test_families import relative_rms, session  # noqa: E402

pytestmark = pytest.mark.parity

FIELDS: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "conv_dim": [16, 16, 24],
    "conv_kernel": [10, 3, 2],
    "conv_stride": [5, 2, 2],
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 4,
    "vocab_size": 12,
    "classifier_proj_size": 20,
    "num_labels": 3,
}
LAYERED = {"feat_extract_norm": "layer", "conv_bias": True}
STABLE = {"do_stable_layer_norm": True}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "group": ("ForCTC", {}),
    "group, stable": ("ForSequenceClassification", STABLE),
    "layer": ("ForSequenceClassification", LAYERED),
    "layer, stable": ("ForCTC", {**LAYERED, **STABLE}),
    "vectors": ("Model", {**LAYERED, **STABLE}),
    "weighted": ("ForSequenceClassification", {**LAYERED, "use_weighted_layer_sum": True}),
    "weighted, stable": (
        "ForSequenceClassification",
        {**LAYERED, **STABLE, "use_weighted_layer_sum": True},
    ),
    "odd": (
        "ForCTC",
        {"num_conv_pos_embeddings": 7, "feat_extract_activation": "relu", "layer_norm_eps": 1e-3},
    ),
}


@pytest.mark.parametrize("kind", ["Wav2Vec2", "Hubert"])
@pytest.mark.parametrize("which", CASES)
def test_sounds(which: str, kind: str, tmp_path: Path) -> None:
    head, own = CASES[which]
    if kind == "Hubert" and which == "odd":
        own = {**own, "feat_proj_layer_norm": False}
    torch.manual_seed(0)
    module = getattr(transformers, kind + head)(
        getattr(transformers, f"{kind}Config")(**{**FIELDS, **own})
    )
    with torch.no_grad():
        for name, weight in module.named_parameters():
            if "original0" in name:
                weight.uniform_(0.5, 2.0)
            elif weight.ndim > 1:
                weight.normal_(std=1.5 / weight.shape[1:].numel() ** 0.5)
            else:
                weight.normal_(mean=float("norm" in name and "weight" in name), std=0.3)
    module.eval().save_pretrained(tmp_path)
    model = gg.optimize(from_folder(tmp_path).model, expect={"attention": 2}).model
    lengths, size = [200, 133, 61], 200
    mask = np.array([[1] * n + [0] * (size - n) for n in lengths])
    x = (np.random.default_rng(0).standard_normal((3, size)) * mask).astype(np.float32)
    given = {"input_values": x} | ({"attention_mask": mask} if own.get("conv_bias") else {})
    assert {str(value.name) for value in model.graph.inputs} == {*given}
    with torch.no_grad():
        wanted = module(**{name: torch.tensor(array) for name, array in given.items()})
    name = "last_hidden_state" if head == "Model" else "logits"
    [got] = session(model, tmp_path).run([name], given)
    assert relative_rms(got, wanted[name].numpy()) < 1e-5
