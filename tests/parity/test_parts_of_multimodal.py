"""The language models of models of several parts: the logits are transformers' for texts."""

from pathlib import Path
from typing import Any

import numpy as np
import published_decoders as decoders
import pytest
from random_checkpoints import GROUPED

import graphgen as gg
from graphgen.models.published import from_folder
from graphgen.models.published.language_model import TYPES

torch = pytest.importorskip("torch", reason="needs torch (make parity)")
transformers = pytest.importorskip("transformers", reason="needs transformers (make parity)")
modeling_auto = transformers.models.auto.modeling_auto

pytestmark = pytest.mark.parity

SMALL = {**GROUPED, "hidden_size": 32, "head_dim": 8, "pad_token_id": 0}
PART = {
    **dict.fromkeys(("hidden_size", "d_model", "embed_dim", "out_hidden_size"), 32),
    **dict.fromkeys(("intermediate_size", "encoder_ffn_dim"), 48),
    **dict.fromkeys(("num_hidden_layers", "encoder_layers", "depth"), 1),
    **dict.fromkeys(("num_attention_heads", "encoder_attention_heads", "num_heads"), 2),
    "num_key_value_heads": 2,
}
ANEW = ("layer_types", "rope_parameters", "rope_scaling", "architectures")
CLASSES = {
    **modeling_auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
    **modeling_auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
    **modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
}


def save(kind: str, folder: Path) -> Any:
    """A small model of random weights, of all its parts."""
    base = transformers.CONFIG_MAPPING[kind]()
    text = {n: x for n, x in base.text_config.to_dict().items() if n not in ANEW} | SMALL
    if kind == "kimi_k25":
        text |= decoders.fields("deepseek_v3") | {"vocab_size": 200}
        text |= {"head_dim": 4, "qk_head_dim": 10}
    if kind.startswith("qwen3_5"):  # one layer at least has to attend
        text |= decoders.fields(f"{kind}_text") | {"vocab_size": 200}
    if "vl" in kind and kind.startswith("qwen"):
        text["rope_parameters"] = {"rope_type": "default", "mrope_section": [1, 1, 2]}
        text["rope_parameters"]["rope_theta"] = 1e4
    parts = {
        name: {n: PART.get(n, x) for n, x in part.items()}
        for name, part in base.to_dict().items()
        if name.endswith("_config") and name != "text_config" and isinstance(part, dict)
    }
    config = transformers.CONFIG_MAPPING[kind](text_config=text, **parts)
    torch.manual_seed(0)
    model = getattr(transformers, CLASSES[kind])(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_(*(0, 0.3) if weight.ndim > 1 else (1, 0.2))
    model.save_pretrained(folder)
    if kind == "kimi_k25":  # whose layers are written by the names of those for images
        from safetensors.torch import load_file, save_file

        [file] = folder.glob("*.safetensors")
        named = {n.replace("model.blocks.", "model.layers."): x for n, x in load_file(file).items()}
        save_file(named, file)
    return model


@pytest.mark.parametrize("kind", TYPES)
def test_its_logits_are_those_of_the_whole(kind: str, tmp_path: Path) -> None:
    model = save(kind, tmp_path)
    ids, mask = torch.randint(3, 90, (2, 9)), torch.ones(2, 9, dtype=torch.int64)
    mask[1, :3] = 0
    with torch.no_grad():
        wanted = model(input_ids=ids, attention_mask=mask).logits.numpy()
    found = from_folder(tmp_path)
    assert found.config.model_type in (TYPES[kind], "llama")
    places = (mask.cumsum(1) - 1).clamp(min=0)
    feeds: dict[str, Any] = {"input_ids": ids, "attention_mask": mask, "position_ids": places}
    feeds = {name: array.numpy() for name, array in feeds.items()}
    sizes = {str(value.name): [*(value.shape or ())] for value in found.model.graph.inputs}
    feeds |= decoders.no_past(sizes, 2)
    logits = gg.Session(gg.optimize(found.model).model)(**feeds)[0]
    real = mask.numpy() == 1
    error = np.linalg.norm((logits - wanted)[real]) / np.linalg.norm(wanted[real])
    assert error < 1e-5
