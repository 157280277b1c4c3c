"""Conversations next to those of transformers' chat templates: `make parity`."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from graphgen.errors import GraphgenError
from graphgen.export.tables import open_table
from graphgen.models.published.chat import Template
from graphgen.models.published.tokenizer import encoded, tokenizer
from graphgen.plan import TensorType
from graphgen.train.texts import Texts

transformers = pytest.importorskip("transformers")
AutoTokenizer, LlavaProcessor = transformers.AutoTokenizer, transformers.LlavaProcessor

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


STYLES = {
    "ChatML": """{%- if messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- else %}
    {{- '<|im_start|>system\\nBe helpful.<|im_end|>\\n' }}
{%- endif %}
{%- if tools %}
    {{- '<tools>' }}
    {%- for tool in tools %}{{- '\\n' ~ (tool | tojson) }}{%- endfor %}
    {{- '\\n</tools>\\n' }}
{%- endif %}
{%- for m in messages if m.role != 'system' %}
    {%- set thought = m.reasoning_content is defined and loop.last %}
    {{- '<|im_start|>' ~ m.role ~ '\\n' }}
    {%- if thought %}{{- '<think>' + m.reasoning_content.strip('\\n') + '</think>' }}{% endif %}
    {{- m.content if m.content is string else m.content | map(attribute='text') | join(' ') }}
    {%- for call in m.tool_calls or [] %}
        {{- '<tool_call>' + call.function.name + call.function.arguments | tojson(indent=2) }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}""",
    "Llama 2": """{% if messages[0]['role'] == 'system' %}{% set rest = messages[1:] %}
{% set system = '<<SYS>>\\n' + messages[0]['content'] + '\\n<</SYS>>\\n\\n' %}
{% else %}{% set rest = messages %}{% set system = '' %}{% endif %}
{% for m in rest %}
{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('Roles must alternate') }}
{% endif %}
{% if m['role'] == 'user' %}
{{ bos_token + '[INST] ' + (system if loop.first else '') + m['content'].strip() + ' [/INST]' }}
{% else %}{{ ' ' + m['content'].strip() + ' ' + eos_token }}{% endif %}
{% endfor %}""",
    "Llama 3": """{{- bos_token }}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}
        {%- set date_string = strftime_now('%d %b %Y') %}
    {%- else %}{%- set date_string = '26 Jul 2024' %}{%- endif %}
{%- endif %}
{{- '<|start|>system<|end|>\\nToday: ' + date_string + '\\n' }}
{%- if tools is not none %}
    {%- for t in tools %}{{- t | tojson(indent=4) }}{{- '\\n\\n' }}{%- endfor %}
{%- endif %}
{%- for m in messages %}
    {%- if m.role == 'tool' or 'tool_calls' in m %}
        {{- '<|start|>' + m.role + '<|end|>' }}
        {%- if m.content is mapping or m.content is iterable %}{{- m.content | tojson }}{%- endif %}
    {%- else %}
        {{- '<|start|>' + m['role'] + '<|end|>\\n\\n' + m['content'] | trim + '</s>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant<|end|>\\n\\n' }}{%- endif %}""",
    "Mistral": """{{- bos_token }}
{%- set ns = namespace(index=0, system='') %}
{%- macro shown(text) %}{{- '[INST]' ~ text ~ '[/INST]' }}{%- endmacro %}
{%- for m in messages %}
    {%- if m.role == 'system' %}{%- set ns.system = m.content + '\\n' %}{%- continue %}{%- endif %}
    {%- if m.role == 'user' %}
        {%- if tools and loop.last %}
            {{- '[AVAILABLE_TOOLS] ' + tools | tojson + '[/AVAILABLE_TOOLS]' }}
        {%- endif %}
        {{- shown(ns.system + m.content) }}
    {%- elif m.role == 'assistant' and m.content %}{{- ' ' + m.content + eos_token }}
    {%- elif m.role == 'tool' %}{{- '[TOOL_RESULTS]' + m.content | string + '[/TOOL_RESULTS]' }}
    {%- endif %}
    {%- set ns.index = ns.index + 1 %}
{%- endfor %}
{{- ns.index }}""",
    "Gemma": """{{ bos_token }}
{%- if messages[0].role == 'system' %}{{ raise_exception('No system role') }}{% endif %}
{%- for m in messages %}
    {%- set role = 'model' if m.role == 'assistant' else m.role %}
    {{- '<start_of_turn>' + role + '\\n' -}}
    {%- if m.content is string %}{{ m.content | trim }}{% else %}
    {%- for part in m.content %}{{ part.text | trim }}{% endfor %}{% endif %}
    {{- '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}""",
    "Phi": "{% for m in messages %}{% if m.role in ['system', 'user', 'assistant'] %}"
    "{{ '<|' + m.role + '|>\\n' + m.content + '<|end|>\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% else %}{{ eos_token }}{% endif %}"
    "{{ pad_token is defined }}{{ sep_token }}",
    "marked": MARKED.replace("    {{- message | tojson }}\n", ""),
}
TOOL = {
    "name": "weather",
    "parameters": {"type": "object", "properties": {"städte": {"type": "a"}}},
}
CALL = {"function": {"name": "weather", "arguments": {"städte": ["Köln", 1.5, None]}}}
USER = {"role": "user", "content": " What is <b> & 2 + 2?\n"}
SYSTEM = {"role": "system", "content": "Be brief, naïve."}
ANSWER = {"role": "assistant", "content": "It is 4. "}
ASKED: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {
    "user": ([USER], {}),
    "system": ([SYSTEM, USER], {}),
    "turns": ([USER, ANSWER, USER], {}),
    "tools": ([USER], {"tools": [{"type": "function", "function": TOOL}]}),
    "a call": (
        [USER, {"role": "assistant", "content": "", "tool_calls": [CALL]},
         {"role": "tool", "content": "12 °C"}],
        {"tools": [TOOL, TOOL]},
    ),
    "nulls": (
        [{**USER, "tool_calls": None}, {"role": "assistant", "content": None, "tool_calls": [CALL]},
         {**ANSWER, "tool_calls": None, "reasoning_content": None}, {"name": None, **USER}],
        {},
    ),
    "no tools": ([USER], {"tools": []}),
    "parts": ([{"role": "user", "content": [{"type": "text", "text": "日本"}]}], {}),
    "its own fields": ([USER], {"enable_thinking": False, "date_string": "yesterday"}),
    "an answer goes on": ([USER, ANSWER], {}),
    "thoughts go on": ([USER, {**ANSWER, "reasoning": "\nHm.\n"}], {}),
    "the next answer": ([USER, ANSWER], {"add_generation_prompt": True}),
    "a question goes on": ([USER], {"continue_final_message": True}),
    "only thoughts go on": (
        [USER, {**ANSWER, "thinking": "\nHm. "}], {"continue_final_message": "reasoning_content"},
    ),
}  # fmt: skip


def tokenizer_of(folder: Path, template: Any) -> Any:
    """A folder's tokenizer of bytes, which begins texts with <s>, in transformers."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    special = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator([json.dumps(CONVERSATIONS)] * 4, trainer)
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    made.save(str(folder / "tokenizer.json"))
    named = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": template}
    named["tokenizer_class"] = "PreTrainedTokenizerFast"
    (folder / "tokenizer_config.json").write_text(json.dumps(named))
    return AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("style", STYLES)
def test_prompts_are_those_of_transformers(style: str, tmp_path: Path) -> None:
    theirs, own = tokenizer_of(tmp_path, STYLES[style]), tokenizer(tmp_path)
    template, texts = Template(tmp_path, dated=True), set[str]()
    for name, (messages, fields) in ASKED.items():
        how = {"add_generation_prompt": True}
        if messages[-1]["role"] == "assistant":
            how = {"continue_final_message": True}
        how = {} if {"add_generation_prompt", "continue_final_message"} & fields.keys() else how
        try:
            wanted = theirs.apply_chat_template(messages, tokenize=False, **how, **fields)
        except Exception:
            with pytest.raises(GraphgenError, match="prompt 0: the chat template of"):
                template.prompt({"messages": messages, **fields}, "prompt 0")
            continue
        text = template.prompt({"messages": messages, **fields}, "prompt 0")
        assert text == wanted, name
        ids = encoded("generate", own, text, special=False).ids
        assert ids == theirs.apply_chat_template(messages, **how, **fields)["input_ids"], name
        texts.add(text)
    assert len(texts) >= 4


@pytest.mark.parametrize(
    ("field", "files"),
    [
        (None, {"chat_template.jinja": "file"}),
        ("field", {"chat_template.jinja": "file"}),
        ("field", {}),
        ({"default": "field", "tool_use": "tools"}, {}),
        ([{"name": n, "template": f"{n}!"} for n in ("rag", "tool_use", "default")], {}),
        (
            [{"name": n, "template": n} for n in ("tool_use", "default")],
            {"chat_template.jinja": "file"},
        ),
        (
            None,
            {"chat_template.jinja": "file", "additional_chat_templates/tool_use.jinja": "tools"},
        ),
        (
            [{"name": n, "template": n} for n in ("tool_use", "default")],
            {"chat_template.jinja": "file", "additional_chat_templates/rag.jinja": "a rag"},
        ),
        ("field", {"additional_chat_templates/default.jinja": "other file"}),
        ("field", {"additional_chat_templates/chat_template.jinja": "other file"}),
        ("field", {"additional_chat_templates/tool_use.jinja": "tools"}),
        ("field", {"chat_template.json": '{"chat_template": "of the processor"}'}),
    ],
)
def test_templates_are_found_where_transformers_finds_them(
    field: Any, files: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "additional_chat_templates").mkdir()
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    theirs, own = tokenizer_of(tmp_path, field), Template(tmp_path)
    for tools in (None, [], [TOOL]):
        for name in (None, "rag", "tool_use"):
            given = {"messages": [USER], "tools": tools, "chat_template": name}
            try:
                chosen = theirs.get_chat_template(name, tools)
            except ValueError:
                chosen = name  # what is no name is itself a template there
            if chosen == name:
                with pytest.raises(GraphgenError, match="has none named '"):
                    own.prompt(given, "prompt 0")
            else:
                wanted = theirs.apply_chat_template(
                    [USER], chat_template=chosen, tools=tools, tokenize=False
                )
                assert own.prompt(given, "prompt 0") == wanted


@pytest.mark.parametrize(
    "files",
    [
        {"chat_template.json": "legacy"},
        {"processor_config.json": "field"},
        {"processor_config.json": "field", "chat_template.json": "legacy"},
        {"chat_template.json": {"default": "legacy", "tool_use": "tools"}},
    ],
)
def test_templates_of_processors_are_found_where_transformers_finds_them(
    files: dict[str, Any], tmp_path: Path
) -> None:
    tokenizer_of(tmp_path, None)
    for name, text in files.items():
        (tmp_path / name).write_text(json.dumps({"chat_template": text}))
    kind = {"image_processor_type": "CLIPImageProcessor"}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(kind))
    theirs, own = LlavaProcessor.from_pretrained(tmp_path), Template(tmp_path)
    for tools in (None, [TOOL]):
        wanted = theirs.apply_chat_template([USER], tools=tools)
        assert own.prompt({"messages": [USER], "tools": tools}, "prompt 0") == wanted


def test_special_tokens_of_the_model(tmp_path: Path) -> None:
    template = "{{ image_token }}{{ boi }}{{ y_token }}{{ tools }}"
    tokenizer_of(tmp_path, template)
    told = json.loads((tmp_path / "tokenizer_config.json").read_text())
    told |= {"image_token": "<|im_end|>", "extra_special_tokens": {"boi": "<s>"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(told))
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    wanted = theirs.apply_chat_template([USER], tokenize=False)
    assert Template(tmp_path).prompt([USER], "prompt 0") == wanted == "<|im_end|><s>None"


def test_special_tokens_of_older_folders(tmp_path: Path) -> None:
    """They stand in special_tokens_map.json, if tokenizer_config.json lists no added tokens."""
    template = "{{ bos_token }}{{ eos_token }}{{ sep_token }}"
    for listed in (False, True):
        tokenizer_of(tmp_path, template)
        named = {"chat_template": template, "bos_token": "<s>", "sep_token": "</s>"}
        more = {"added_tokens_decoder": {}} if listed else {}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({**named, **more}))
        other = {"bos_token": "<|im_start|>", "eos_token": {"content": "<|im_end|>"}}
        (tmp_path / "special_tokens_map.json").write_text(json.dumps(other))
        theirs = AutoTokenizer.from_pretrained(tmp_path)
        wanted = theirs.apply_chat_template([USER], tokenize=False)
        assert Template(tmp_path).prompt([USER], "prompt 0") == wanted


def test_tokens_and_their_marks_are_those_of_transformers(tmp_path: Path) -> None:
    theirs = tokenizer_of(tmp_path, MARKED)
    rows = [json.dumps({"messages": messages}) for messages in CONVERSATIONS]
    (tmp_path / "a.jsonl").write_text("\n".join(rows))

    inputs = dict.fromkeys(["input_ids", "labels"], TensorType(np.dtype(np.int64), ("b", "t")))
    columns = Texts(tmp_path, inputs, None).columns(open_table(tmp_path / "a.jsonl"))
    for i, messages in enumerate(CONVERSATIONS):
        wanted = theirs.apply_chat_template(
            messages, return_dict=True, return_assistant_tokens_mask=True
        )
        ids, mask = np.array(wanted["input_ids"]), np.array(wanted["assistant_masks"])
        assert 0 < mask.sum() < len(mask)
        np.testing.assert_array_equal(columns["input_ids"][i], ids[:-1])
        np.testing.assert_array_equal(columns["labels"][i], np.where(mask, ids, -100)[1:])
