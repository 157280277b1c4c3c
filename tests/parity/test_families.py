"""Checkpoints of every family, random and of high variance, against transformers.

Each configuration is written by `save_pretrained`, built by graphgen, optimized, and run with the
runtime's own optimizations off.
"""

from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest

import graphgen as gg
from graphgen.models.published import from_folder

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

OWN["Bart"] = {
    "vocab_size": 300,
    "d_model": 64,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 96,
    "decoder_ffn_dim": 96,
    "max_position_embeddings": 64,
}
OWN["Marian"] = {**OWN["Bart"], "pad_token_id": 299, "decoder_start_token_id": 299}
OWN |= {kind: {**OWN["Bart"], "scale_embedding": True} for kind in ("MBart", "Pegasus", "M2M100")}
OWN["T5"] = {"vocab_size": 300, "d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2} | {
    "num_heads": 4
}
OWN["MT5"] = OWN["UMT5"] = OWN["T5"]

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


SEQ2SEQ: dict[str, tuple[str, dict[str, Any]]] = {
    "t5": ("T5", {}),
    "t5, own head size": ("T5", {"d_kv": 24, "num_decoder_layers": 3}),
    "t5, gated": (
        "T5",
        {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False, "untied": True},
    ),
    "t5, near": (
        "T5",
        {
            "feed_forward_proj": "gated-silu",
            "relative_attention_num_buckets": 12,
            "relative_attention_max_distance": 19,
        },
    ),
    "bart": ("Bart", {"max_position_embeddings": LENGTH}),
    "bart, odd": (
        "Bart",
        {
            "decoder_layers": 3,
            "decoder_attention_heads": 2,
            "decoder_ffn_dim": 72,
            "scale_embedding": True,
            "activation_function": "gelu_new",
            "tie_word_embeddings": False,
        },
    ),
    "marian": ("Marian", {"scale_embedding": True, "activation_function": "swish"}),
    "marian, own tables": (
        "Marian",
        {
            "share_encoder_decoder_embeddings": False,
            "vocab_size": 310,
            "decoder_vocab_size": 300,
            "decoder_layers": 1,
            "encoder_attention_heads": 2,
        },
    ),
    "marian, untied": ("Marian", {"tie_word_embeddings": False, "older": True}),
    "mt5": ("MT5", {}),
    "mt5, own output layer": ("MT5", {"untied": True, "d_kv": 24, "num_decoder_layers": 1}),
    "umt5": ("UMT5", {"relative_attention_num_buckets": 12}),
    "umt5, relu": (
        "UMT5",
        {"feed_forward_proj": "relu", "num_decoder_layers": 3, "num_heads": 2, "untied": True},
    ),
    "mbart": ("MBart", {"scale_embedding": False}),
    "mbart, odd": (
        "MBart",
        {
            "decoder_layers": 3,
            "decoder_attention_heads": 2,
            "encoder_ffn_dim": 72,
            "activation_function": "relu",
            "tie_word_embeddings": False,
        },
    ),
    "pegasus": ("Pegasus", {"activation_function": "relu"}),
    "pegasus, odd": (
        "Pegasus",
        {"d_model": 45, "encoder_attention_heads": 3, "decoder_attention_heads": 9}
        | {"max_position_embeddings": LENGTH, "tie_word_embeddings": False},
    ),
    "m2m_100": ("M2M100", {}),
    "m2m_100, odd": (
        "M2M100",
        {"d_model": 45, "encoder_attention_heads": 3, "decoder_attention_heads": 9}
        | {"scale_embedding": False, "pad_token_id": 7, "tie_word_embeddings": False},
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
    options = dict(options)
    untied, older = (options.pop(name, False) for name in ("untied", "older"))
    base = sizes or OWN.get(kind, SMALL)
    config = getattr(transformers, f"{kind}Config")(**{**base, **options})
    module = getattr(transformers, f"{kind}{head}")(config).eval()
    if untied:
        module.lm_head.weight = torch.nn.Parameter(module.lm_head.weight.clone())
    with torch.no_grad():
        for name, weight in module.named_parameters():
            if not weight.requires_grad:  # sinusoids
                continue
            if weight.ndim > 1:
                weight.normal_(std=1.5 / weight.shape[-1] ** 0.5)
                if kind.endswith("T5") and ".q." in name:
                    # Its scores are not scaled, so these weights are: else float32 itself is off
                    # by more than the bound, in torch too.
                    weight /= config.d_kv**0.5
            else:
                weight.normal_(mean=float("norm" in name.lower()), std=0.3)
    if hasattr(module, "final_logits_bias"):
        module.final_logits_bias.normal_()
    if older:  # as older versions store them
        module._keys_to_ignore_on_save = None
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


@pytest.mark.parametrize("which", DECODERS)
def test_attentions_of_a_decoder(which: str, tmp_path: Path) -> None:
    kind, options = DECODERS[which]
    module = save(kind, options, tmp_path, "LMHeadModel" if kind == "GPT2" else "ForCausalLM")
    module.set_attn_implementation("eager")
    run = session(gg.optimize(from_folder(tmp_path, attentions=True).model), tmp_path)
    ids, mask = padded("left", 3)
    feeds = {
        "input_ids": ids,
        "attention_mask": mask,
        "position_ids": np.maximum(mask.cumsum(1) - 1, 0),
    }
    with torch.no_grad():
        given = {name: torch.tensor(x) for name, x in feeds.items()}
        wanted = module(**given, output_attentions=True).attentions
    for x in run.get_inputs():
        if x.name.startswith("past_key_values"):
            feeds[x.name] = np.zeros((3, x.shape[1], 0, x.shape[3]), np.float32)
    known = {x.name: feeds[x.name] for x in run.get_inputs()}
    names = [f"attentions.{n}" for n in range(len(wanted))]
    kept = mask.astype(bool)  # what padding looks at is undefined
    for got, weights in zip(run.run(names, known), wanted, strict=True):
        rows = (x.transpose(0, 2, 1, 3)[kept] for x in (got, weights.numpy()))
        assert relative_rms(*rows) < BOUND


@pytest.mark.parametrize("which", SEQ2SEQ)
def test_encoder_decoder(which: str, tmp_path: Path) -> None:
    kind, options = SEQ2SEQ[which]
    head = "MTModel" if kind == "Marian" else "ForConditionalGeneration"
    module = save(kind, options, tmp_path, head)
    models = from_folder(tmp_path).models
    best = [gg.optimize(model).model for model in models.values()]
    assert not any(n.op_type == "Softmax" for model in best for n in model.graph.all_nodes())
    encoder, decoder = (session(model, tmp_path) for model in best)
    names = [output.name for output in decoder.get_outputs()]
    for side, rows in (("left", 1), ("left", 3), ("right", 3)):
        source, mask = padded(side, rows)
        target = np.random.default_rng(1).integers(0, SMALL["vocab_size"], (rows, LENGTH))
        with torch.no_grad():
            wanted = module(
                input_ids=torch.tensor(source),
                attention_mask=torch.tensor(mask),
                decoder_input_ids=torch.tensor(target),
            )
        kept = mask.astype(bool)
        [states] = encoder.run(None, {"input_ids": source, "attention_mask": mask})
        expected = wanted.encoder_last_hidden_state.numpy()
        assert relative_rms(states[kept], expected[kept]) < BOUND
        for ends in ([LENGTH], [3, 8, *range(9, LENGTH + 1)]):
            past = {
                x.name: np.zeros((rows, x.shape[1], 0, x.shape[3]), np.float32)
                for x in decoder.get_inputs()
                if x.name.startswith("past_key_values")
            }
            parts, start = [], 0
            for end in ends:
                feeds = {
                    "input_ids": target[:, start:end],
                    # The states of the source are needed by the first call alone.
                    "encoder_hidden_states": np.full_like(states, np.nan) if start else states,
                    "encoder_attention_mask": mask,
                    "use_cache_branch": np.array([start > 0]),
                }
                results = dict(zip(names, decoder.run(None, {**feeds, **past}), strict=True))
                parts.append(results.pop("logits"))
                for name, x in results.items():
                    if start == 0 or ".decoder." in name:
                        past[name.replace("present", "past_key_values")] = x
                start = end
            assert relative_rms(np.concatenate(parts, 1), wanted.logits.numpy()) < BOUND


@pytest.mark.parametrize("which", ["t5", "t5, near", "bart, odd", "marian"])
def test_attentions_of_an_encoder_decoder(which: str, tmp_path: Path) -> None:
    kind, options = SEQ2SEQ[which]
    head = "MTModel" if kind == "Marian" else "ForConditionalGeneration"
    module = save(kind, options, tmp_path, head)
    module.set_attn_implementation("eager")
    models = from_folder(tmp_path, attentions=True).models
    encoder, decoder = (session(gg.optimize(model), tmp_path) for model in models.values())
    source, mask = padded("right", 3)
    target = np.random.default_rng(1).integers(0, SMALL["vocab_size"], (3, LENGTH))
    read = {"input_ids": source, "attention_mask": mask}
    with torch.no_grad():
        given = {name: torch.tensor(x) for name, x in read.items()}
        own = {"decoder_input_ids": torch.tensor(target), "output_attentions": True}
        wanted = module(**given, **own)
    names = [output.name for output in encoder.get_outputs()]
    found = dict(zip(names, encoder.run(None, read), strict=True))
    feeds = {
        x.name: np.zeros((3, x.shape[1], 0, x.shape[3]), np.float32)
        for x in decoder.get_inputs()
        if x.name.startswith("past_key_values")
    } | {
        "input_ids": target,
        "encoder_hidden_states": found["last_hidden_state"],
        "encoder_attention_mask": mask,
        "use_cache_branch": np.array([False]),
    }
    names = [output.name for output in decoder.get_outputs()]
    found |= zip(names, decoder.run(None, feeds), strict=True)
    for kind in ("encoder_attentions", "decoder_attentions", "cross_attentions"):
        assert sum(name.startswith(kind) for name in found) == len(wanted[kind])
        for n, weights in enumerate(wanted[kind]):
            assert relative_rms(found[f"{kind}.{n}"], weights.numpy()) < BOUND


CLASSIFIERS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2", {"pad_token_id": 0, "num_labels": 3}),
    "gpt2, padding among the tokens": ("GPT2", {"pad_token_id": 7, "vocab_size": 8}),
    "llama": ("Llama", {"pad_token_id": 0, "num_labels": 5}),
    "mistral": ("Mistral", {"pad_token_id": 299, "sliding_window": 7}),
    "qwen2": ("Qwen2", {"pad_token_id": 0, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"pad_token_id": 0, "head_dim": 24, "num_labels": 1}),
}


@pytest.mark.parametrize("which", CLASSIFIERS)
def test_text_is_classified_by_a_decoder(which: str, tmp_path: Path) -> None:
    kind, options = CLASSIFIERS[which]
    module = save(kind, options, tmp_path, "ForSequenceClassification")
    run = session(gg.optimize(from_folder(tmp_path, "text-classification").model), tmp_path)
    assert [value.name for value in run.get_inputs()] == ["input_ids", "attention_mask"]
    for side, rows in (("left", 1), ("left", 3), ("right", 3)):
        ids, mask = padded(side, rows)
        ids %= module.config.vocab_size
        padding = module.config.pad_token_id
        if module.config.vocab_size > 8:
            ids[ids == padding] = 1
        ids[mask == 0] = padding
        with torch.no_grad():
            given = {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}
            wanted = module(**given).logits.numpy()
        [logits] = run.run(None, {"input_ids": ids, "attention_mask": mask})
        assert logits.shape == wanted.shape
        assert relative_rms(logits, wanted) < BOUND
