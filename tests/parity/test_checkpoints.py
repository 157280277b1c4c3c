"""Checkpoints of every family, random and of high variance, against transformers.

Each configuration is written by `save_pretrained`, built by graphgen, optimised, and run with the
runtime's own optimisations off.
"""

from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest

import graphgen as gg
from graphgen.models.pretrained import from_folder

torch = pytest.importorskip("torch", reason="needs torch (make parity)")
transformers = pytest.importorskip("transformers", reason="needs transformers (make parity)")

pytestmark = pytest.mark.parity

BOUND = 1e-5  # relative RMS in float32
LENGTH = 40

SMALL = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
OWN: dict[str, dict[str, Any]] = {
    "GPT2": {"vocab_size": 300, "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 512},
}
"""The small sizes of families that have names of their own for them."""

STRETCHED = {"rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 8}
LONG_WAVES = {**STRETCHED, "rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}

DECODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama, own head size": ("Llama", {"head_dim": 24, "attention_bias": True, "mlp_bias": True}),
    "llama, tied": ("Llama", {"tie_word_embeddings": True, "num_key_value_heads": 1}),
    "llama, llama3": ("Llama", {"rope_parameters": LONG_WAVES}),
    "llama, linear": (
        "Llama",
        {"rope_parameters": {"rope_theta": 1e4, "rope_type": "linear", "factor": 3.0}},
    ),
    "llama, yarn": ("Llama", {"rope_parameters": {**STRETCHED, "rope_type": "yarn"}}),
    "mistral": ("Mistral", {"sliding_window": 7}),
    "mistral, no window": ("Mistral", {"sliding_window": None, "head_dim": 32}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2, windows": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3", {"head_dim": 24, "attention_bias": True}),
    "gpt2": ("GPT2", {}),
    "gpt2, untied": ("GPT2", {"tie_word_embeddings": False, "n_inner": 72}),
    "gpt2, scales": (
        "GPT2",
        {"scale_attn_by_inverse_layer_idx": True, "activation_function": "relu"},
    ),
    "gpt2, no scale": (
        "GPT2",
        {"scale_attn_weights": False, "reorder_and_upcast_attn": True, "n_positions": 40},
    ),
}


def save(
    kind: str,
    options: dict[str, Any],
    folder: Path,
    head: str = "ForCausalLM",
    *,
    sizes: dict[str, Any] | None = None,
    stored: Any = None,
    **files: Any,
) -> Any:
    """A checkpoint with weights so large that every one of them matters; the module of torch.

    Weights are rounded to the dtype `stored`, and saved in that; `files` are further options.
    """
    torch.manual_seed(0)
    base = sizes or OWN.get(kind, SMALL)
    config = getattr(transformers, f"{kind}Config")(**{**base, **options})
    module = getattr(transformers, f"{kind}{head}")(config).eval()
    with torch.no_grad():
        for name, weight in module.named_parameters():
            if weight.ndim > 1:
                weight.normal_(std=1.5 / weight.shape[-1] ** 0.5)
            else:
                weight.normal_(mean=float("norm" in name.lower()), std=0.3)
    module.to(stored).save_pretrained(folder, **files)
    return module.to(torch.float32)


def session(model: Any, folder: Path) -> ort.InferenceSession:
    gg.export(model, folder / "model.onnx")
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    return ort.InferenceSession(folder / "model.onnx", options)


def relative_rms(got: Any, wanted: Any) -> float:
    return float(np.sqrt(np.mean((got - wanted) ** 2) / np.mean(wanted**2)))


def padded(side: str, rows: int) -> tuple[Any, Any]:
    """Random tokens and their mask: the last rows shorter than the first, padded on one side."""
    ids = np.random.default_rng(0).integers(0, SMALL["vocab_size"], (rows, LENGTH))
    mask = np.ones_like(ids)
    for row in range(1, rows):
        hidden = slice(0, 9 * row) if side == "left" else slice(LENGTH - 9 * row, LENGTH)
        mask[row, hidden] = 0
    return ids, mask


@pytest.mark.parametrize("which", DECODERS)
def test_decoder(which: str, tmp_path: Path) -> None:
    kind, options = DECODERS[which]
    head = "LMHeadModel" if kind == "GPT2" else "ForCausalLM"
    module = save(kind, options, tmp_path, head)
    run = session(gg.optimize(from_folder(tmp_path).model), tmp_path)
    names = [output.name for output in run.get_outputs()]
    for side, rows in (("left", 1), ("left", 3), ("right", 3)):
        ids, mask = padded(side, rows)
        positions = np.maximum(mask.cumsum(1) - 1, 0)
        with torch.no_grad():
            given = dict(
                zip(
                    ("input_ids", "attention_mask", "position_ids"),
                    map(torch.tensor, (ids, mask, positions)),
                    strict=True,
                )
            )
            wanted = module(**given).logits.numpy()
        empty = {
            x.name: np.zeros((rows, x.shape[1], 0, x.shape[3]), np.float32)
            for x in run.get_inputs()
            if x.name.startswith("past_key_values")
        }
        for ends in ([LENGTH], [3, 8, *range(9, LENGTH + 1)]):  # whole; in chunks, then one by one
            past, parts, start = empty, [], 0
            for end in ends:
                feeds = {
                    "input_ids": ids[:, start:end],
                    "attention_mask": mask[:, :end],
                    "position_ids": positions[:, start:end],
                }
                known = {x.name for x in run.get_inputs()}
                feeds = {name: x for name, x in feeds.items() if name in known}
                results = dict(zip(names, run.run(None, {**feeds, **past}), strict=True))
                parts.append(results.pop("logits"))
                past = {n.replace("present", "past_key_values"): x for n, x in results.items()}
                start = end
            kept = mask.astype(bool)
            assert relative_rms(np.concatenate(parts, 1)[kept], wanted[kept]) < BOUND
