"""Conversations by a chat template: what the assistant says, and templates that end badly."""

import json
import sys

import numpy as np
import pytest
from test_texts import ASSISTANT, BOS, END, MASKED, USER, W, write_lines, write_tokenizer

from graphgen.errors import GraphgenError
from graphgen.export.tables import open_table
from graphgen.models.published.chat import Template
from graphgen.train.texts import Texts

pytest.importorskip("jinja2", reason="jinja2 is missing: the extra [chat] installs it")

PLAIN = (
    "{{ bos_token }}{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
MARKED = """{{ bos_token }}
{%- for m in messages %}
    {%- if m.role == 'assistant' %}
<|assistant|>{% generation %}{{ m.content }}<|end|>{% endgeneration %}
    {%- else %}
<|user|>{{ m.content }}<|end|>
    {%- endif %}
{%- endfor %}"""
TURNS = [
    {"role": "user", "content": "w1 w2"},
    {"role": "assistant", "content": "w3"},
    {"role": "user", "content": "w4"},
    {"role": "assistant", "content": "w5 w6"},
]
TOKENS = [BOS, USER, W + 1, W + 2, END, ASSISTANT, W + 3, END, USER, W + 4, END, ASSISTANT, W + 5,
          W + 6, END]  # fmt: skip
LEARNED = {W + 3: 6, W + 5: 12, W + 6: 13}


@pytest.fixture
def template(tmp_path):
    def made(source):
        return Template(write_tokenizer(tmp_path / "tokens", chat_template=source))

    return made


@pytest.mark.parametrize("source", [PLAIN, MARKED])
def test_only_what_the_assistant_says_is_learned(source, tmp_path):
    folder = write_tokenizer(tmp_path / "tokens", chat_template=source)
    texts = Texts(folder, MASKED, 40)
    rows = [{"messages": TURNS}, {"messages": TURNS[:1]}, {"messages": []}, {"messages": TURNS[:2]}]
    columns = texts.columns(open_table(write_lines(tmp_path / "a.jsonl", *rows)))
    wanted = np.full(15, -100)
    wanted[[6, 7, 12, 13, 14]] = [W + 3, END, W + 5, W + 6, END]
    ids, labels = columns["input_ids"], columns["labels"]
    assert [row.tolist() for row in ids] == [TOKENS[:-1], TOKENS[:7]]
    assert [row.tolist() for row in labels] == [wanted[1:].tolist(), wanted[1:8].tolist()]
    assert texts.reports[0].dropped_rows == 2


TALK = [
    {"messages": TURNS, "chat_template_kwargs": {"bos_token": "w9"}},
    {"conversations": [{"from": turn["role"], "value": turn["content"]} for turn in TURNS]},
    {"prompt": TURNS[:3], "completion": TURNS[3:]},
]


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("row", TALK, ids=["options", "shared", "prompt"])
def test_conversations_as_trl_reads_them(row, whole, tmp_path):
    texts = Texts(
        write_tokenizer(tmp_path / "tokens", chat_template=PLAIN), MASKED, 40, whole=whole
    )
    columns = texts.columns(open_table(write_lines(tmp_path / "a.jsonl", row)))
    [ids], [labels] = columns["input_ids"], columns["labels"]
    tokens = [W + 9 if "messages" in row else BOS, *TOKENS[1:]]
    learned = [12, 13, 14] if "prompt" in row else [6, 7, 12, 13, 14]
    wanted = [x if whole or i in learned else -100 for i, x in enumerate(tokens)]
    assert [ids.tolist(), labels.tolist()] == [tokens[:-1], wanted[1:]]


def test_the_template_may_be_a_file_or_one_of_several(tmp_path):
    several = [{"name": "tools", "template": "x"}, {"name": "default", "template": PLAIN}]
    folder = write_tokenizer(tmp_path / "tokens", chat_template=several)
    text, spans = Template(folder).render(TURNS[:2], "row")
    assert text == "<s><|user|>w1 w2<|end|><|assistant|>w3<|end|>"
    assert [text[first:last] for first, last in spans] == ["w3<|end|>"]
    (folder / "chat_template.jinja").write_text("{{ messages | length }}")
    assert Template(folder).render(TURNS[:1], "row") == ("1", [])


CALL = [{"function": {"name": "w7", "arguments": {"w8": None}}}]
TOOLED = (
    "{% if tools %}{{ tools | map(attribute='name') | join(' ') }}<|end|>{% endif %}"
    "{% for m in messages %}{% if 'tool_calls' in m %}<|{{ m['role'] }}|>"
    "{{ m.tool_calls[0].function.arguments | length }}<|end|>{% else %}<|{{ m['role'] }}|>"
    "{{ m['content'] }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.mark.parametrize("kind", ["jsonl", "as text", "parquet"])
def test_tools_are_what_the_template_reads(kind, tmp_path):
    """Arrow gives every object the keys of all; in JSON, a null is one."""
    words = {"unk_token": "<unk>", "chat_template": TOOLED}
    texts = Texts(write_tokenizer(tmp_path / "tokens", **words), MASKED, 40)
    called = [TURNS[0], {"role": "assistant", "content": None, "tool_calls": CALL}]
    rows = [{"messages": called, "tools": [{"name": "w9"}]}, {"messages": TURNS, "tools": None}]
    if kind == "as text":
        rows = [{n: None if x is None else json.dumps(x) for n, x in row.items()} for row in rows]
    path = write_lines(tmp_path / "a.jsonl", *rows)
    if kind == "parquet":
        pa = pytest.importorskip("pyarrow", reason="the extra [data] installs it")
        parquet = pytest.importorskip("pyarrow.parquet")
        path = tmp_path / "a.parquet"
        rows[0]["messages"][1]["tool_calls"][0]["function"]["arguments"] = {"w8": "w1"}
        parquet.write_table(pa.Table.from_pylist(rows), path)
    seen = list[str]()
    render = texts._template.render
    texts._template.render = lambda *given: seen.append(render(*given)) or seen[-1]
    labels = texts.columns(open_table(path))["labels"]
    [(tooled, spans), (plain, _)] = seen
    assert tooled == "w9<|end|><|user|>w1 w2<|end|><|assistant|>1<|end|>"
    assert [tooled[first:last] for first, last in spans] == ["1<|end|>"]
    assert plain.startswith("<|user|>w1 w2<|end|><|assistant|>w3<|end|>")
    assert [int(np.sum(row != -100)) for row in labels] == [2, 5]


def test_what_templates_use(template):
    source = (
        "{%- for m in messages %}{%- if loop.index > 1 %}{%- break %}{%- endif %}"
        "{{ m | tojson }}{{ strftime_now is defined }}{{ 'é' | tojson }}{%- endfor %}"
    )
    text, _ = template(source).render(TURNS, "row")
    assert text == json.dumps(TURNS[0]) + 'False"é"'


WRONG = {
    "an exception": ("{{ raise_exception('no system role') }}", "TemplateError: no system role"),
    "a missing name": ("{{ messages[0].a.b }}", "UndefinedError: 'dict object' has no attribute"),
    "no end": (
        "{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}",
        "TimeoutError: it runs for more than 1,000,000 lines",
    ),
    "a macro in itself": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError: "),
    "a large text": ("{{ 'a' * 10 ** 9 }}", r"SecurityError: a result of \* is too large"),
    "a large text of others": (
        "{{ range(99999) | map('string') | join('a' * 10 ** 6) }}",
        "SecurityError: a result of (sync_do_|do_)?join is too large",
    ),
    "a large text of numbers": (
        "{{ range(99999) | join('a' * 10 ** 6) }}",
        "SecurityError: a result of (sync_do_|do_)?join is too large",
    ),
    "a large number": ("{{ 9 ** 9 ** 9 }}", r"SecurityError: a result of \*\* is too large"),
    "a way out": ("{{ ''.__class__.__mro__ }}", "SecurityError: access to attribute '__class__'"),
    "a division": ("{{ 1 // 0 }}", "ZeroDivisionError: "),
    "earlier turns change": (
        "{% for m in messages %}{{ m.content if loop.last else '' }}{% endfor %}",
        r"writes message 2 otherwise when more follow, .* put {% generation %} around it",
    ),
}


@pytest.mark.share(2)
@pytest.mark.parametrize("name", WRONG)
def test_a_template_that_ends_badly_is_one_error(name, template):
    source, message = WRONG[name]
    tracer = sys.gettrace()
    with pytest.raises(GraphgenError, match=f"row 7: the chat template of .* {message}") as raised:
        template(source).render(TURNS, "row 7")
    assert "\n" not in str(raised.value) and sys.gettrace() is tracer


def test_what_is_no_template_or_no_message_is_one_error(template, tmp_path):
    with pytest.raises(GraphgenError, match=r"the chat template of .* is not one: unexpected '}'"):
        template("{{ a }")
    with pytest.raises(GraphgenError, match=r"the chat template of .* is not one: 'break' outside"):
        template("{% break %}")
    with pytest.raises(GraphgenError, match="has no chat template, which `messages` need: add"):
        template(None)
    for messages in (["a"], [{"content": "w1"}], [{"role": 1}]):
        with pytest.raises(GraphgenError, match=r"row: a message is .*; give objects with `role`"):
            template(PLAIN).render(messages, "row")
    turns = [{"role": "assistant", "content": "\ufdd0 w1"}]
    with pytest.raises(GraphgenError, match=r"row: a message has the character U\+FDD0"):
        template(MARKED).render(turns, "row")
    texts = Texts(write_tokenizer(tmp_path / "tokens", chat_template=PLAIN), MASKED, 40)
    for row, told in (
        ({"messages": "w1"}, "messages are 'w1'; give a list of them"),
        ({"messages": TURNS, "tools": "w1"}, "tools is 'w1'; give a list of objects"),
    ):
        with pytest.raises(GraphgenError, match=f"line 1: {told}"):
            texts.columns(open_table(write_lines(tmp_path / "a.jsonl", row)))
