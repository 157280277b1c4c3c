"""Conversations next to those of transformers' chat templates: `make parity`."""

import json
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from graphgen.export.tables import open_table
from graphgen.plan import TensorType
from graphgen.train.texts import Texts

pytestmark = pytest.mark.parity

MARKED = """{{- bos_token }}
{%- for message in messages %}
    {%- set role = message['role'] | trim %}
    {%- if role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}
        {%- generation %}
            {{- message.content | trim + '<|im_end|>' }}
        {%- endgeneration %}
        {{- '\\n' }}
    {%- else %}
        {{- '<|im_start|>' + role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
    {%- if not loop.last %}{% continue %}{% endif %}
    {{- message | tojson }}
{%- endfor %}"""
CONVERSATIONS = [
    [
        {"role": "system", "content": "You are brief, naïve."},
        {"role": "user", "content": "What is 2 + 2?"},
        {"role": "assistant", "content": "  It is 4."},
        {"role": "user", "content": "And in 日本語?\n"},
        {"role": "assistant", "content": "四 <|im_end|> 🙂"},
    ],
    [{"role": "assistant", "content": "Alone"}],
]


def test_tokens_and_their_marks_are_those_of_transformers(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    special = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator([json.dumps(CONVERSATIONS)] * 4, trainer)
    made.save(str(tmp_path / "tokenizer.json"))
    named = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": MARKED}
    named["tokenizer_class"] = "PreTrainedTokenizerFast"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(named))
    rows = [json.dumps({"messages": messages}) for messages in CONVERSATIONS]
    (tmp_path / "a.jsonl").write_text("\n".join(rows))

    inputs = dict.fromkeys(["input_ids", "labels"], TensorType(np.dtype(np.int64), ("b", "t")))
    columns = Texts(tmp_path, inputs, None).columns(open_table(tmp_path / "a.jsonl"))
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    for i, messages in enumerate(CONVERSATIONS):
        wanted = theirs.apply_chat_template(
            messages, return_dict=True, return_assistant_tokens_mask=True
        )
        ids, mask = np.array(wanted["input_ids"]), np.array(wanted["assistant_masks"])
        assert 0 < mask.sum() < len(mask)
        np.testing.assert_array_equal(columns["input_ids"][i], ids[:-1])
        np.testing.assert_array_equal(columns["labels"][i], np.where(mask, ids, -100)[1:])
