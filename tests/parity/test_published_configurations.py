"""Checkpoints with the real fields of published ones, made small, against transformers."""

import json
from pathlib import Path
from typing import Any

import pytest
from published_configurations import PUBLISHED, small

torch = pytest.importorskip("torch", reason="needs torch (make parity)")
transformers = pytest.importorskip("transformers", reason="needs transformers (make parity)")

import published_decoders as decoders  # noqa: E402
import published_encoders as encoders  # noqa: E402
import published_seq2seq as seq2seq  # noqa: E402
from test_configuration_fields import BOUND, KINDS, difference, eager  # noqa: E402

pytestmark = pytest.mark.parity

_HEADS: dict[str, tuple[str, Any]] = {
    "text-generation": ("CausalLM", decoders),
    "fill-mask": ("MaskedLM", encoders),
    "text-classification": ("SequenceClassification", encoders),
    "token-classification": ("TokenClassification", encoders),
    "text2text-generation": ("Seq2SeqLM", seq2seq),
}
# UMT5 is built as it was published, where transformers 5 scales its logits: docs/checkpoints.md.
NAMES = [n for n, one in PUBLISHED.items() if one["task"] in _HEADS and n != "umt5-small"]


@pytest.mark.parametrize("name", NAMES)
def test_a_published_configuration_gives_the_results(name: str, tmp_path: Path) -> None:
    transformers.logging.set_verbosity_error()
    task, fields = PUBLISHED[name]["task"], small(PUBLISHED[name]["fields"])
    head, own = _HEADS[task]
    KINDS[name] = (head, task, own)
    text = json.dumps(fields)
    (tmp_path / "config.json").write_text(text)
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    auto = getattr(transformers, f"AutoModelFor{head}")
    module = auto.from_config(config, dtype=torch.float32, **eager(name))
    if fields["model_type"] in ("t5", "mt5") and fields.get("tie_word_embeddings") is False:
        module.lm_head.weight = torch.nn.Parameter(module.lm_head.weight.clone())  # as published
    with torch.no_grad():
        for path, weight in module.named_parameters():
            weight.copy_(torch.from_numpy(own.weight(path, (*weight.shape,))))
    module.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(text)  # as it was published, not as transformers 5 has it
    error = difference(name, tmp_path)
    assert error is not None and error < BOUND
