"""Generation against transformers: the same tokens over 64 steps, greedy and by beams."""

from typing import Any

import numpy as np
import pytest
from test_families import SMALL, save

import graphgen as gg
from graphgen.export import decoder as decoders
from graphgen.export.layouts import write_folder
from graphgen.generate import Generator
from graphgen.graph import Miss
from graphgen.models.pretrained import from_folder

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
}
HEADS = {"GPT2": "LMHeadModel", "Marian": "MTModel"}
HEADS |= dict.fromkeys(("T5", "Bart"), "ForConditionalGeneration")
MANY = list(range(100, 115))  # tokens that end a row, so many that some come
SEARCHES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "greedy, ends": {"eos_token_id": MANY},
    "greedy, no repetition": {"no_repeat_ngram_size": 2},
    "penalty": {"repetition_penalty": 1.3},
    "beams": {"num_beams": 4},
    "beams, ends": {"num_beams": 4, "eos_token_id": [7, 11]},
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
}
OWN = {"num_beams": "beams", "eos_token_id": "eos"}


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
