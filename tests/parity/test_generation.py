"""Generation against transformers: the same tokens over 64 steps, greedy and by beams."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_families import SMALL, save

import graphgen as gg
from graphgen.export.folders import write_folder
from graphgen.generation import Generator, decoder as decoders
from graphgen.match import Miss
from graphgen.models.published import from_folder

torch = pytest.importorskip("torch", reason="needs torch (make parity)")

pytestmark = pytest.mark.parity

STEPS, LENGTHS = 64, (17, 5, 30)
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"head_dim": 24, "attention_bias": True}),
    "mistral": ("Mistral", {"sliding_window": 7}),
    "qwen3": ("Qwen3", {"head_dim": 24}),
    "qwen3, windows": (
        "Qwen3",
        {"head_dim": 32, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    ),
    "gpt2": ("GPT2", {}),
    "t5": ("T5", {"decoder_start_token_id": 0}),
    "bart": ("Bart", {"forced_eos_token_id": None, "max_position_embeddings": 96}),
    "marian": ("Marian", {"forced_eos_token_id": None, "max_position_embeddings": 96}),
    "mt5": ("MT5", {"decoder_start_token_id": 0}),
    "umt5": ("UMT5", {"decoder_start_token_id": 0}),
    "mbart": (
        "MBart",
        {"decoder_start_token_id": 2, "forced_eos_token_id": None, "max_position_embeddings": 96},
    ),
    "pegasus": ("Pegasus", {"forced_eos_token_id": None, "max_position_embeddings": 96}),
    "m2m_100": ("M2M100", {"max_position_embeddings": 96}),
}
HEADS = {"GPT2": "LMHeadModel", "Marian": "MTModel"}
HEADS |= dict.fromkeys(
    ("T5", "Bart", "MT5", "UMT5", "MBart", "Pegasus", "M2M100"), "ForConditionalGeneration"
)
MANY = list(range(100, 115))  # tokens that end a row, so many that some come
SEARCHES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "greedy, ends": {"eos_token_id": MANY},
    "greedy, no repetition": {"no_repeat_ngram_size": 2},
    "penalty": {"repetition_penalty": 1.3},
    "beams": {"num_beams": 4},
    "beams, ends": {"num_beams": 4, "eos_token_id": [7, 11]},
    "beams, renormalized": {
        "num_beams": 3,
        "repetition_penalty": 1.4,
        "renormalize_logits": True,
        "suppress_tokens": MANY,
    },
    "beams, short": {"num_beams": 3, "eos_token_id": MANY, "length_penalty": -1.0},
    "beams, early": {"num_beams": 4, "eos_token_id": MANY, "early_stopping": True},
    "beams, never": {
        "num_beams": 4,
        "eos_token_id": MANY,
        "early_stopping": "never",
        "length_penalty": 1.5,
    },
    "beams, no repetition": {
        "num_beams": 2,
        "no_repeat_ngram_size": 2,
        "eos_token_id": MANY,
        "min_new_tokens": 20,
    },
    "beams, several answers": {
        "num_beams": 4,
        "num_return_sequences": 3,
        "eos_token_id": MANY,
        "early_stopping": "never",
    },
    "bad words": {"bad_words_ids": [[n, m] for n in range(3, 90) for m in range(100, 130)]},
    "beams, bad words": {"num_beams": 3, "bad_words_ids": [[50], [60, 61], *([n] for n in MANY)]},
}
OWN = {"num_beams": "beams", "eos_token_id": "eos", "bad_words_ids": "bad_words"}


@pytest.fixture(scope="module", params=MODELS)
def pair(request: Any, tmp_path_factory: Any) -> Any:
    """The module of torch, and the folder that is built from its checkpoint."""
    kind, options = MODELS[request.param]
    source = tmp_path_factory.mktemp("source")
    module = save(kind, options, source, HEADS.get(kind, "ForCausalLM"))
    models = from_folder(source).models
    best = {f"onnx/{name}": gg.optimize(model) for name, model in models.items()}
    return module, write_folder(source, tmp_path_factory.mktemp("out") / "model", best)


def prompts() -> list[list[int]]:
    rng = np.random.default_rng(3)
    return [rng.integers(3, SMALL["vocab_size"], length).tolist() for length in LENGTHS]


def wanted(module: Any, **options: Any) -> list[list[int]]:
    """What transformers gives, with padding on the left, of an encoder's tokens on the right."""
    longest, encoder = max(LENGTHS), module.config.is_encoder_decoder
    pads = [(0, longest - n) if encoder else (longest - n, 0) for n in LENGTHS]
    padded = zip(prompts(), pads, strict=True)
    ids = np.array([np.pad(row, pad, constant_values=1) for row, pad in padded])
    mask = np.array([np.pad([1] * n, pad) for n, pad in zip(LENGTHS, pads, strict=True)])
    own = {"do_sample": False, "pad_token_id": 1, "eos_token_id": None, **options}
    with torch.no_grad():
        given = {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}
        rows = module.generate(**given, max_new_tokens=STEPS, **own)
    return rows[:, 1 if encoder else longest :].tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize("chunk", [512, 7])
@pytest.mark.parametrize("place", ["in place", "growing"])
def test_tokens_are_those_of_transformers(
    pair: Any, place: str, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, folder = pair
    if place == "growing":
        monkeypatch.setattr(decoders, "in_place", lambda model: Miss("asked not to be"))
    generator = Generator(folder, threads=1, chunk=chunk)
    growing = place == "growing" or module.config.is_encoder_decoder
    assert bool(generator.decoder.note) == growing
    for name, options in SEARCHES.items():
        own = {OWN.get(key, key): value for key, value in {"eos_token_id": [], **options}.items()}
        found = generator(prompts(), max_new_tokens=STEPS, **own)
        list(found)
        for tokens, row in zip(found.tokens, wanted(module, **options), strict=True):
            assert tokens == row[: len(tokens)], name
            assert set(row[len(tokens) :]) <= {1}, name


PAIRS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "t5": ("T5", "ForConditionalGeneration", {}),
    "bart": ("Bart", "ForConditionalGeneration", {}),
    "marian": ("Marian", "MTModel", {"scale_embedding": True}),
}
SOURCE_SEARCHES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "greedy, ends": {"eos_token_id": MANY, "min_length": 4},
    "penalty": {"repetition_penalty": 1.3},
    "forced": {"forced_bos_token_id": 9, "forced_eos_token_id": 8, "eos_token_id": 8},
    "forced, one suppressed": {
        "forced_bos_token_id": 9,
        "forced_eos_token_id": [7, 8],
        "suppress_tokens": [7],
        "begin_suppress_tokens": MANY,
        "eos_token_id": 8,
    },
    "beams, forced": {
        "num_beams": 4,
        "forced_bos_token_id": 9,
        "forced_eos_token_id": 8,
        "eos_token_id": [8, *MANY],
    },
    "beams, as Marian": {
        "num_beams": 4,
        "bad_words_ids": [[299], [5]],
        "forced_eos_token_id": 8,
        "eos_token_id": 8,
        "renormalize_logits": True,
    },
    "beams, as BART": {
        "num_beams": 4,
        "no_repeat_ngram_size": 3,
        "early_stopping": True,
        "min_length": 12,
        "length_penalty": 2.0,
        "eos_token_id": MANY,
    },
    "of the source": {
        "encoder_no_repeat_ngram_size": 1,
        "exponential_decay_length_penalty": [4, 1.2],
        "sequence_bias": [[[40], 3.0], [[40, 41], 9.0]],
        "eos_token_id": MANY,
    },
    "beams, of the source": {
        "num_beams": 3,
        "encoder_no_repeat_ngram_size": 2,
        "encoder_repetition_penalty": 1.6,
        "suppress_tokens": [1],  # the padding, which is a part of the source in transformers
    },
}


@pytest.mark.parametrize("which", PAIRS)
def test_tokens_behind_an_encoder_are_those_of_transformers(which: str, tmp_path: Path) -> None:
    kind, head, options = PAIRS[which]
    module = save(kind, {**options, "decoder_start_token_id": 2}, tmp_path / "in", head)
    models = {name: gg.optimize(m) for name, m in from_folder(tmp_path / "in").models.items()}
    folder = write_folder(tmp_path / "in", tmp_path / "out", models)
    ids = [row + [1] * (max(LENGTHS) - len(row)) for row in prompts()]
    mask = [[1] * n + [0] * (max(LENGTHS) - n) for n in LENGTHS]
    for name, search in SOURCE_SEARCHES.items():
        own = {"do_sample": False, "pad_token_id": 1, "eos_token_id": None, **search}
        (folder / "generation_config.json").write_text(
            json.dumps({"decoder_start_token_id": 2, **{k: v for k, v in own.items() if v}})
        )
        fields = json.loads((folder / "config.json").read_text())
        for field in ("eos_token_id", "forced_eos_token_id"):
            fields.pop(field, None)
        (folder / "config.json").write_text(json.dumps(fields))
        for field in ("forced_bos_token_id", "forced_eos_token_id", "bad_words_ids", "min_length"):
            setattr(module.generation_config, field, None)
        with torch.no_grad():
            rows = module.generate(
                torch.tensor(ids), attention_mask=torch.tensor(mask), max_new_tokens=20, **own
            )[:, 1:].tolist()
        found = Generator(folder, threads=1)(prompts(), max_new_tokens=20)
        list(found)
        for tokens, row in zip(found.tokens, rows, strict=True):
            assert tokens == row[: len(tokens)], name
            assert set(row[len(tokens) :]) <= {1}, name
