"""Which tokens may come next, next to transformers' logits processors: `make parity`."""

from typing import Any

import numpy as np
import pytest

from graphgen.generation.options import Options
from graphgen.generation.sampling import chances, processed

torch = pytest.importorskip("torch", reason="needs torch (make parity)")
transformers = pytest.importorskip("transformers", reason="needs transformers (make parity)")

pytestmark = pytest.mark.parity

VOCABULARY, BEGIN = 300, 6
WARPERS: list[dict[str, Any]] = [
    {"top_h": 0.4},
    {"top_h": 0.95},
    {"typical_p": 0.2},
    {"typical_p": 0.9},
    {"epsilon_cutoff": 0.01},
    {"epsilon_cutoff": 0.7},
    {"eta_cutoff": 0.01},
    {"eta_cutoff": 0.3, "temperature": 0.5},
    {"top_k": 40, "typical_p": 0.5, "epsilon_cutoff": 0.02},
    {"temperature": 1.7, "top_h": 0.8, "top_p": 0.9, "min_p": 0.01, "typical_p": 0.7},
    {"top_p": 0.8, "typical_p": 0.6, "epsilon_cutoff": 0.004, "eta_cutoff": 0.02},
]
PROCESSORS: list[dict[str, Any]] = [
    {"sequence_bias": [[[7], 2.5], [[3, 9], -4.0], [[1, 2, 3, 3], 8.0], [[7], -1.0]]},
    {"encoder_repetition_penalty": 1.7},
    {"encoder_no_repeat_ngram_size": 1},
    {"encoder_no_repeat_ngram_size": 2, "no_repeat_ngram_size": 3},
    {"exponential_decay_length_penalty": (2, 1.3), "eos_token_id": [5, 8]},
    {"exponential_decay_length_penalty": (2, 1.3), "eos_token_id": [5], "min_new_tokens": 4},
    {"remove_invalid_values": True, "bad_words_ids": [[4]], "suppress_tokens": [3]},
    {
        "sequence_bias": [[[3], 1.5]],
        "encoder_repetition_penalty": 0.8,
        "repetition_penalty": 1.2,
        "encoder_no_repeat_ngram_size": 3,
    },
]
OWN = {"eos_token_id": "eos", "bad_words_ids": "bad_words"}


def scores(seed: int, scale: float) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(VOCABULARY) * scale).astype(np.float32)


def theirs(fields: dict[str, Any], source: Any, **more: Any) -> Any:
    """What transformers makes of the logits, for a row that begins with BEGIN tokens."""
    config = transformers.GenerationConfig(**fields, **more)
    small = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
    )
    model = transformers.LlamaForCausalLM(small)
    ends = fields.get("eos_token_id")
    config._eos_token_tensor = None if ends is None else torch.tensor(ends)
    return model._get_logits_processor(config, BEGIN, torch.tensor([source]))


@pytest.mark.parametrize("fields", WARPERS, ids=str)
@pytest.mark.parametrize("scale", [0.1, 1.0, 4.0])
def test_draws_leave_out_what_transformers_leaves_out(fields: dict[str, Any], scale: float) -> None:
    kept = set[int]()
    for seed in range(10):
        given = scores(seed, scale)
        given[seed] = -np.inf
        options = Options(**{"temperature": 1.0, **fields})
        order = np.argsort(-given, kind="stable")
        found = np.zeros(VOCABULARY)
        found[order] = chances(given[order], options)
        more = {"do_sample": True, "top_k": fields.get("top_k", 0)}
        make = theirs({k: v for k, v in fields.items() if k != "top_k"}, [0], **more)
        wanted = make(torch.tensor([[0]]), torch.tensor(given)[None]).double().softmax(-1)[0]
        np.testing.assert_allclose(found / found.sum(), wanted.numpy(), rtol=1e-5, atol=1e-9)
        kept.add(int((found > 0).sum()))
    assert min(kept) < VOCABULARY - 1 or scale < 1


@pytest.mark.parametrize("fields", PROCESSORS, ids=str)
def test_logits_are_those_of_transformers(fields: dict[str, Any]) -> None:
    changed = 0
    for seed in range(20):
        random = np.random.default_rng(seed)
        source = random.integers(0, 12, 9).tolist()
        tokens = random.integers(0, 12, BEGIN + seed % 8).tolist()
        given = scores(seed, 3.0)
        if "remove_invalid_values" in fields:
            given[[1, 2, 6]] = np.nan, np.inf, -np.inf
        options = Options(**{OWN.get(name, name): value for name, value in fields.items()})
        step = len(tokens) - BEGIN
        [found] = processed(given[None], [tokens], options, step=step, sources=[source])
        wanted = theirs(fields, source)(torch.tensor([tokens]), torch.tensor(given)[None])[0]
        np.testing.assert_allclose(found, wanted.numpy(), rtol=1e-6)
        changed += not np.array_equal(found, given)
    assert changed > 3
