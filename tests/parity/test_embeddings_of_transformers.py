"""Embeddings of encoders, decoders and T5's encoders against transformers and torch."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from published_decoders import DECODERS, weight

import graphgen as gg
from graphgen.models.published import from_folder
from graphgen.models.published.stages import ACTIVATIONS

torch = pytest.importorskip("torch", reason="needs torch (make parity)")
transformers = pytest.importorskip("transformers", reason="needs transformers (make parity)")

from safetensors.numpy import save_file  # noqa: E402
from test_encoders import BERT, named, write_sentence  # noqa: E402
from test_families import LENGTH, relative_rms, save, session  # noqa: E402
from test_published_decoders import save as save_decoder  # noqa: E402

pytestmark = pytest.mark.parity

BOUND = 1e-5  # relative RMS in float32
MODES = {
    "cls": "cls_token",
    "max": "max_tokens",
    "mean": "mean_tokens",
    "mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "weightedmean": "weightedmean_tokens",
    "lasttoken": "lasttoken",
}

OLDER: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("Qwen3", {"head_dim": 24}),
    "llama": ("Llama", {}),
    "gpt2": ("GPT2", {}),
}


def padded(side: str, rows: int = 3) -> dict[str, Any]:
    ids = np.random.default_rng(0).integers(1, 40, (rows, LENGTH))
    mask = np.ones_like(ids)
    for row in range(1, rows):
        mask[row, slice(0, 9 * row) if side == "left" else slice(LENGTH - 9 * row, LENGTH)] = 0
    return {"input_ids": ids, "attention_mask": mask}


def states(module: Any, feeds: dict[str, Any]) -> Any:
    with torch.no_grad():
        given = {name: torch.tensor(x) for name, x in feeds.items()}
        return module(**given).last_hidden_state


def pooled(mode: str, x: Any, mask: Any) -> Any:
    """What sentence-transformers 6.2 does, row by row."""
    rows = []
    for vectors, kept in zip(x, mask.bool(), strict=True):
        own = vectors[kept]
        ranks = torch.arange(1, len(own) + 1)[:, None]
        rows.append(
            {
                "cls": own[0],
                "max": own.max(0)[0],
                "mean": own.mean(0),
                "mean_sqrt_len_tokens": own.sum(0) / len(own) ** 0.5,
                "weightedmean": (own * ranks).sum(0) / ranks.sum(),
                "lasttoken": own[-1],
            }[mode]
        )
    return torch.stack(rows)


def write_stage(folder: Path, sizes: tuple[int, int], **fields: Any) -> dict[str, Any]:
    """A Dense, and its weights."""
    known = {"in_features": sizes[0], "out_features": sizes[1], **fields}
    shapes = {"linear.weight": sizes[::-1]}
    if known.get("bias", True):
        shapes["linear.bias"] = sizes[1:]
    if known.get("use_residual") and sizes[0] != sizes[1]:
        shapes["residual.weight"] = sizes[::-1]
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(known))
    arrays = {name: weight(f"{folder.name}.{name}", shape) for name, shape in shapes.items()}
    save_file(arrays, folder / "model.safetensors")
    return {name: torch.tensor(array) for name, array in arrays.items()}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("newer", [False, True])
def test_poolings_and_dense_layers(mode: str, newer: bool, tmp_path: Path) -> None:
    module = save("Bert", {}, tmp_path, "Model", sizes=BERT)
    flags = {f"pooling_mode_{flag}": name == mode for name, flag in MODES.items()}
    pooling = {"pooling_mode": mode} if newer else flags
    kinds = ["Transformer", "Pooling", "Dense", "Dense", "Normalize"]
    write_sentence(tmp_path, kinds, {"word_embedding_dimension": 64, **pooling})
    one = write_stage(
        tmp_path / "2_Dense",
        (64, 48),
        activation_function="torch.nn.modules.activation.Tanh",
        use_residual=newer,
    )
    other = write_stage(
        tmp_path / "3_Dense",
        (48, 48),
        activation_function="torch.nn.modules.linear.Identity",
        bias=False,
        use_residual=newer,
    )
    run = session(gg.optimize(from_folder(tmp_path).model), tmp_path)
    for side in ("left", "right"):
        feeds = padded(side) | {"token_type_ids": padded(side)["input_ids"] % 2}
        x = pooled(mode, states(module, feeds), torch.tensor(feeds["attention_mask"]))
        y = torch.tanh(x @ one["linear.weight"].T + one["linear.bias"])
        y = y + x @ one["residual.weight"].T if newer else y
        z = y @ other["linear.weight"].T + (y if newer else 0)
        wanted = torch.nn.functional.normalize(z, dim=1)
        got = named(run, feeds)["sentence_embedding"]
        assert relative_rms(got, wanted.numpy()) < BOUND


@pytest.mark.parametrize("which", [*OLDER, *(which for which in DECODERS if "," not in which)])
def test_decoders_embed(which: str, tmp_path: Path) -> None:
    if which in OLDER:
        module = save(*OLDER[which], tmp_path, "Model")
    else:
        module = save_decoder(which, tmp_path, "")
    size = module.config.hidden_size
    pooling = {"word_embedding_dimension": size, "pooling_mode_lasttoken": True}
    write_sentence(tmp_path, ["Transformer", "Pooling", "Normalize"], pooling)
    best = gg.optimize(from_folder(tmp_path).model)
    # The kernel for a softcap on the CPU is slower than its body, sinks have none, and what chooses
    # experts may be one of its own.
    written = which in ("gemma2", "gpt_oss", "ernie4_5_moe", "deepseek_v2")
    assert written or not [n.op_type for n in best.model.graph if n.op_type == "Softmax"]
    run = session(best, tmp_path)
    for side in ("left", "right"):
        feeds = padded(side)
        x, kept = states(module, feeds), feeds["attention_mask"].astype(bool)
        got = named(run, feeds)
        assert relative_rms(got["last_hidden_state"][kept], x.numpy()[kept]) < BOUND
        last = pooled("lasttoken", x, torch.tensor(kept))
        wanted = torch.nn.functional.normalize(last, dim=1)
        assert relative_rms(got["sentence_embedding"], wanted.numpy()) < BOUND


def test_a_decoder_that_sees_both_sides_embeds(tmp_path: Path) -> None:
    """EmbeddingGemma, whose local layers see half a window on each side."""
    module = save_decoder("gemma3_text", tmp_path, "", use_bidirectional_attention=True)
    pooling = {"word_embedding_dimension": 32, "pooling_mode_mean_tokens": True}
    write_sentence(tmp_path, ["Transformer", "Pooling", "Normalize"], pooling)
    best = gg.optimize(from_folder(tmp_path).model, expect={"attention": 2})
    run = session(best, tmp_path)
    for side in ("left", "right"):
        feeds = padded(side)
        x, kept = states(module, feeds), feeds["attention_mask"].astype(bool)
        got = named(run, feeds)
        assert relative_rms(got["last_hidden_state"][kept], x.numpy()[kept]) < BOUND
        wanted = torch.nn.functional.normalize(pooled("mean", x, torch.tensor(kept)), dim=1)
        assert relative_rms(got["sentence_embedding"], wanted.numpy()) < BOUND


@pytest.mark.parametrize("which", ["olmo2", "granite", "phi3", "gpt_neox", "opt", "falcon, new"])
def test_a_decoder_that_is_not_causal_embeds(which: str, tmp_path: Path) -> None:
    module = save_decoder(which, tmp_path, "", is_causal=False)
    run = session(gg.optimize(from_folder(tmp_path, "feature-extraction").model), tmp_path)
    for side in ("left", "right"):
        feeds = padded(side)
        x, kept = states(module, feeds), feeds["attention_mask"].astype(bool)
        assert relative_rms(named(run, feeds)["last_hidden_state"][kept], x.numpy()[kept]) < BOUND


@pytest.mark.parametrize("kind", ["T5", "MT5", "UMT5"])
@pytest.mark.parametrize("whole", [False, True])
def test_encoders_of_t5_embed(kind: str, whole: bool, tmp_path: Path) -> None:
    sizes = {"vocab_size": 300, "d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2}
    head = "ForConditionalGeneration" if whole else "EncoderModel"
    module = save(kind, {"num_heads": 4}, tmp_path, head, sizes=sizes)
    pooling = {"word_embedding_dimension": 64, "pooling_mode_mean_tokens": True}
    write_sentence(tmp_path, ["Transformer", "Pooling", "Dense", "Normalize"], pooling)
    dense = write_stage(
        tmp_path / "2_Dense",
        (64, 32),
        bias=False,
        activation_function="torch.nn.modules.linear.Identity",
    )
    best = gg.optimize(from_folder(tmp_path).model, expect={"attention": 2})
    run = session(best, tmp_path)
    for side in ("left", "right"):
        feeds = padded(side)
        x = states(module.encoder if whole else module, feeds)
        y = pooled("mean", x, torch.tensor(feeds["attention_mask"])) @ dense["linear.weight"].T
        wanted = torch.nn.functional.normalize(y, dim=1)
        assert relative_rms(named(run, feeds)["sentence_embedding"], wanted.numpy()) < BOUND


@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_an_activation_of_a_dense(kind: str) -> None:
    x = np.random.default_rng(0).standard_normal(200).astype(np.float32) * 5
    wanted = getattr(torch.nn, kind.rpartition(".")[2])()(torch.tensor(x))
    assert relative_rms(wanted.numpy(), ACTIVATIONS[kind](x)) < 1e-6
