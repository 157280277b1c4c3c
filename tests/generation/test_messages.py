"""Conversations as prompts: what the chat template makes of them, and what it must not do."""

import json
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
from test_generate import CONFIG, model

from graphgen import commands
from graphgen.batch import Stage, map_file
from graphgen.errors import GraphgenError
from graphgen.export.folders import MODEL, write_folder
from graphgen.generation import Generator
from graphgen.models.published.chat import Template
from graphgen.models.published.tokenizer import tokenizer

tokenizers = pytest.importorskip("tokenizers")
pytest.importorskip("jinja2", reason="jinja2 is missing: the extra [chat] installs it")

TEMPLATE = (
    "{{ bos_token }}{% for tool in tools or [] %}[{{ tool.name }}]{% endfor %}"
    "{% for m in messages %}<{{ m.role[0] }}>{{ m.content | trim }}<e>{% endfor %}"
    "{% if add_generation_prompt %}<a>{% if calm %}calm:{% endif %}{% endif %}"
)
SPECIAL = ["<s>", "<e>", "<u>", "<a>"]
ASKED = [{"role": "user", "content": " Hi "}]
ANSWER = {"role": "assistant", "content": "So "}
MANY: list[dict[str, Any]] = [{"name": "f", "p": {"a": 1}}, {"name": "g", "p": {"b": None}}]
TOOLS = [{"name": "f"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: Any) -> Path:
    """A decoder whose tokenizer begins every text with <s>, as a template does, too."""
    source = tmp_path_factory.mktemp("source")
    size = {"max_position_embeddings": 256}
    (source / "config.json").write_text(json.dumps(CONFIG | size))
    characters = {chr(32 + i): i for i in range(90)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(characters, []))
    tokenizer.decoder = tokenizers.decoders.Fuse()
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 90)]
    )
    tokenizer.save(str(source / "tokenizer.json"))
    thoughts = "<a>{{ messages[0].reasoning_content | trim }}<e>{{ messages[0].content }}"
    templates = [
        {"name": "default", "template": TEMPLATE},
        {"name": "thoughts", "template": thoughts},
    ]
    named = {"bos_token": {"content": "<s>"}, "chat_template": templates}
    (source / "tokenizer_config.json").write_text(json.dumps(named))
    return write_folder(source, tmp_path_factory.mktemp("out") / "model", {MODEL: model(**size)})


@pytest.fixture(scope="module")
def generator(folder: Path) -> Generator:
    return Generator(folder, threads=1)


def text(generator: Generator, row: list[int]) -> str:
    return str(generator.tokenizer.decode(row, skip_special_tokens=False))


CONVERSATIONS: dict[str, tuple[Any, str]] = {
    "messages": (ASKED, "<s><u>Hi<e><a>"),
    "tools and the template's own": (
        {"messages": ASKED, "tools": TOOLS, "calm": True, "where": "here", "self": 1},
        "<s>[f]<u>Hi<e><a>calm:",
    ),
    "no prompt": ({"messages": ASKED, "add_generation_prompt": False}, "<s><u>Hi<e>"),
    "an answer goes on": ([*ASKED, ANSWER], "<s><u>Hi<e><a>So"),
    "the next answer": (
        {"messages": [*ASKED, ANSWER], "add_generation_prompt": True},
        "<s><u>Hi<e><a>So<e><a>",
    ),
    "an answer that is whole": (
        {"messages": [*ASKED, ANSWER], "continue_final_message": False},
        "<s><u>Hi<e><a>So<e><a>",
    ),
    "what rows have beside them": (
        {"messages": ASKED, "chat_template_kwargs": {"calm": True, "add_generation_prompt": True}},
        "<s><u>Hi<e><a>calm:",
    ),
    "a question goes on": ({"messages": ASKED, "continue_final_message": True}, "<s><u>Hi"),
    "thoughts go on": (
        {
            "messages": [{**ANSWER, "thinking": "Hm "}],
            "chat_template": "thoughts",
            "continue_final_message": "reasoning_content",
        },
        "<a>Hm",
    ),
}


def test_messages_are_prompts_with_no_token_twice(generator: Generator) -> None:
    alone = [generator(given, max_new_tokens=4) for given, _ in CONVERSATIONS.values()]
    together = generator([given for given, _ in CONVERSATIONS.values()], max_new_tokens=4)
    for found in (*alone, together):
        list(found)
    wanted = [wanted for _, wanted in CONVERSATIONS.values()]
    assert [text(generator, row) for row in together.prompts] == wanted
    assert [found.prompts[0] for found in alone] == together.prompts
    assert [found.tokens[0] for found in alone] == together.tokens
    as_tokens = generator(together.prompts, max_new_tokens=4)
    list(as_tokens)
    assert as_tokens.tokens == together.tokens
    mixed = generator(["Hi", ASKED, [5, 9]], max_new_tokens=1)
    assert [row[0] for row in mixed.prompts] == [90, 90, 5]


def test_the_command_reads_messages(
    folder: Path, generator: Generator, tmp_path: Path, capsys: Any
) -> None:
    def run(content: Any, *words: str, code: int = 0) -> str:
        path = tmp_path / "chat.json"
        path.write_text(json.dumps(content))
        told = ["generate", str(folder), "--chat", str(path), "--max-new-tokens", "3", *words]
        assert commands.main(told) == code
        captured = capsys.readouterr()
        assert "Traceback" not in captured.err
        return str(captured.err if code else captured.out)

    for given, wanted in CONVERSATIONS.values():
        [row] = json.loads(run(given, "--json"))["rows"]
        assert text(generator, row["prompt"]) == wanted and isinstance(row["text"], str)
    assert "holds a str; it must hold a JSON object or list" in run("Hi", code=2)
    assert "a message is 5; give objects with `role`" in run([5, 9], code=2)
    assert "a message is {'message': []}; give objects with" in run({"message": []}, code=2)
    assert "there is no message; give at least one" in run([], code=2)
    assert "tools is 'f'; give a list of objects" in run({"messages": ASKED, "tools": "f"}, code=2)
    assert "reads text: give --prompt, --ids or --chat alone" in run(ASKED, "--audio", "a", code=2)


def test_special_tokens_that_the_settings_name(folder: Path, tmp_path: Path) -> None:
    """Texts are split at them, as in transformers, if the model has a place for them."""
    for more, ids in (
        ({}, [90, 28, 80, 30]),
        ({"pad_token": "<p>"}, [90, 94]),
        ({"pad_token": "<p>", "x_token": "<x>", "y_token": "<y>"}, [90, 94]),
        (
            {"a_token": "<a>", "b_token": "<b>", "c_token": "<c>", "d_token": "<p>"},
            [90, 28, 80, 30],
        ),
        ({"additional_special_tokens": ["<p>"]}, [90, 94]),
        ({"extra_special_tokens": [{"content": "<p>"}]}, [90, 94]),
        ({"extra_special_tokens": {"image": "<p>"}}, [90, 94]),
    ):
        own = tmp_path / str(sum(1 for _ in tmp_path.iterdir()))
        shutil.copytree(folder, own)
        named = {"bos_token": {"content": "<s>"}, **more}
        (own / "tokenizer_config.json").write_text(json.dumps(named))
        assert tokenizer(own).encode("<p>").ids == ids


@pytest.mark.parametrize(
    "given, told",
    [
        (
            [{"role": "user", "content": object()}],
            "has to be as in JSON, but Object",
        ),
        ([{"role": 5, "content": "a"}], "prompt 0: a message is .*; give objects with `role`"),
        ([{"role": "assistant"}], "the last message has no text as content that could go on"),
        (
            {"messages": ASKED, "continue_final_message": True, "add_generation_prompt": True},
            "continue_final_message and add_generation_prompt contradict each other: leave one out",
        ),
        (
            {"messages": ASKED, "continue_final_message": 1.5},
            "continue_final_message is 1.5; give true, false, or the field that goes on",
        ),
        ([*ASKED, "Hi"], "prompt 0: a message is 'Hi'; give objects"),
        ({"messages": "Hi"}, "messages are 'Hi'; give a list of them"),
        ([["Hi"]], r"prompt 0 is \['Hi'\]; give a text, a list of tokens, or a list of messages"),
    ],
)
def test_what_is_no_conversation(generator: Generator, given: Any, told: str) -> None:
    with pytest.raises(GraphgenError, match=told):
        generator(given)


def test_a_model_without_template(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text("{}")
    with pytest.raises(GraphgenError, match=r"has no chat template, which `messages` need: add"):
        Template(tmp_path)
    with pytest.raises(GraphgenError, match="is not a folder, so it has no chat template"):
        Generator(model(), threads=1)(ASKED)


def test_tools_choose_their_own_template(tmp_path: Path) -> None:
    several = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "none"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": several}))
    template = Template(tmp_path, dated=True)
    assert template.prompt({"messages": ASKED, "tools": TOOLS}, "") == "tools"
    assert template.prompt({"messages": ASKED, "tools": []}, "") == "tools"  # as in transformers
    assert template.prompt({"messages": ASKED}, "") == "none"


def test_templates_in_files_replace_those_of_the_field(folder: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(folder, source)
    (source / "chat_template.jinja").write_text("a file")
    (source / "additional_chat_templates").mkdir()
    for name, text in (("tool_use", "another"), ("rag", "a third")):
        (source / "additional_chat_templates" / f"{name}.jinja").write_text(text)
    models = {MODEL: model(max_position_embeddings=256)}
    for _ in range(2):  # the second time, a folder with such files is replaced
        out = write_folder(source, tmp_path / "out", models)
    for where in (source, out):
        found = Template(where)
        assert found.prompt(ASKED, "") == "a file"
        assert found.prompt({"messages": ASKED, "tools": TOOLS}, "") == "another"
        assert found.prompt({"messages": ASKED, "chat_template": "rag"}, "") == "a third"
        for name in ("{{ 1 }}", ["rag"]):
            told = "has none named .*; give one of these .*: default, rag, tool_use"
            with pytest.raises(GraphgenError, match=told):
                found.prompt({"messages": ASKED, "chat_template": name}, "")
    (out / "chat_template.jinja").unlink()
    with pytest.raises(GraphgenError, match="has none named 'default'"):
        Template(out).prompt(ASKED, "")


def test_templates_of_older_processors(folder: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(folder, source)
    (source / "chat_template.json").write_text('{"chat_template": "a legacy file"}')
    tokens = json.loads((source / "tokenizer_config.json").read_text())
    assert Template(source).prompt(ASKED, "") != "a legacy file"  # the tokenizer has one
    del tokens["chat_template"]
    (source / "tokenizer_config.json").write_text(json.dumps(tokens))
    out = write_folder(source, tmp_path / "out", {MODEL: model(max_position_embeddings=256)})
    for where in (source, out):
        assert Template(where).prompt(ASKED, "") == "a legacy file"
    (out / "processor_config.json").write_text('{"chat_template": "a field"}')
    assert Template(out).prompt({"messages": ASKED, "tools": TOOLS}, "") == "a field"


def test_what_is_null_is_not_there(tmp_path: Path) -> None:
    """Clients of OpenAI's interface send null for what a message does not have."""
    source = "{% for m in messages %}{{ m.role }}{{ m.content is defined }}{% endfor %}"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": source}))
    given = [{"role": "assistant", "content": None, "name": None}, *ASKED]
    assert Template(tmp_path).prompt(given, "") == "assistantFalseuserTrue"


def test_a_template_reads_the_special_tokens_of_the_model(tmp_path: Path) -> None:
    told = {"chat_template": "{{ image_token }}{{ boi }}{{ y_token }}{{ true | tojson(true, 2) }}"}
    told |= {"image_token": "<i>", "extra_special_tokens": {"boi": "<b>"}}
    told |= {"model_specific_special_tokens": {"y_token": {"content": "<y>"}}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(told))
    assert Template(tmp_path).prompt(ASKED, "") == "<i><b><y>true"


def test_special_tokens_of_an_older_folder(tmp_path: Path) -> None:
    told = {"chat_template": "{{ bos_token }}{{ eos_token }}", "bos_token": "<s>"}
    (tmp_path / "special_tokens_map.json").write_text('{"eos_token": {"content": "<e>"}}')
    for more, text in (({}, "<s><e>"), ({"added_tokens_decoder": {}}, "<s>")):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(told | more))
        assert Template(tmp_path).prompt(ASKED, "") == text


def test_spaces_before_marks_are_removed_where_the_folder_says_so(
    folder: Path, tmp_path: Path, capsys: Any
) -> None:
    shutil.copytree(folder, tmp_path / "out")
    file = tmp_path / "out" / "tokenizer_config.json"
    told, name = json.loads(file.read_text()), "clean_up_tokenization_spaces"
    rows = [[ord(c) - 32 for c in "It 's so , is n't it ?"]]
    for flags, text in (
        ((), "It 's so , is n't it ?"),
        ((name,), "It 's so , is n't it ?"),  # BPE has no such spaces but those that were meant
        ((name, f"{name}_for_bpe_even_though_it_will_corrupt_output"), "It's so, isn't it?"),
    ):
        file.write_text(json.dumps(told | dict.fromkeys(flags, True)))
        generator = Generator(tmp_path / "out", threads=1)
        assert generator.texts(rows) == [text]
        words = ["generate", str(tmp_path / "out"), "--prompt", "Hi", "--max-new-tokens", "20"]
        assert commands.main(words) == 0
        printed = capsys.readouterr().out.split("\nprefill")[0]
        found = generator("Hi", max_new_tokens=20)
        list(found)
        assert printed == found.texts()[0]


BOMBS = {
    "text": "{% for i in range(99999) %}{{ 'a' * 9999999 }}{% endfor %}",
    "doubling": "{% set n = namespace(x='ab') %}{% for i in range(99) %}{% set n.x = n.x ~ n.x %}"
    "{% endfor %}",
    "a list": "{% set n = namespace(x=[1]) %}{% for i in range(99) %}{% set n.x = n.x + n.x %}"
    "{% endfor %}",
    "a filter": "{{ 'a' | center(10 ** 11) }}",
    "a method": "{{ 'a'.ljust(10 ** 11) }}",
    "replacing": "{% set x = 'a' * 999999 %}{{ x.replace('a', x) }}{{ x | replace('a', x) }}",
    "joining": "{% set x = ['a' * 999999] * 9 %}{{ (x * 99999) | join('') }}",
    "a width": "{{ '%99999999999d' % 1 }}",
    "a format": "{{ '{:99999999999}'.format(1) }}",
    "a width within a width": "{{ '{:{}}'.format(1, 10 ** 11) }}",
    "made text": "{{ lipsum(n=10 ** 9) }}",
    "a dunder": "{% set n = namespace(__class__=1) %}",
    "a dunder set later": "{% set n = namespace() %}{% set n.__class__ = 1 %}",
    "a file": "{% include '/etc/passwd' %}",
    "an import": "{% import 'os' as os %}",
    "the globals": "{{ raise_exception.__globals__['a'] }}",
}


@pytest.mark.share(2)
@pytest.mark.parametrize("name", BOMBS)
def test_a_template_cannot_take_the_memory_or_call_out(name: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": BOMBS[name]}))
    with pytest.raises(GraphgenError, match=r"the chat template of .* ends in "):
        Template(tmp_path).prompt(ASKED, "prompt 0")


def test_a_template_ends_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("graphgen.models.published.sandbox._SECONDS", 0.2)
    slow = "{% for i in range(99999) %}{% if range(99999) | sum %}{% endif %}\n{% endfor %}"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": slow}))
    then = time.monotonic()
    with pytest.raises(GraphgenError, match=r"TimeoutError: it runs for more than 0\.2 seconds"):
        Template(tmp_path).prompt(ASKED, "prompt 0")
    assert time.monotonic() - then < 5


@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet", "with nulls"])
def test_map_reads_messages(kind: str, folder: Path, tmp_path: Path, monkeypatch: Any) -> None:
    """The template sees the objects as they were written, whatever a table makes of them."""
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    write = "{{ tools | tojson }}{% for m in messages %}{{ m | tojson }}{% endfor %}"
    monkeypatch.setattr(Template, "__init__", _with(Template.__init__, write))
    last = 2 if kind == "with nulls" else "2"  # which no column of numbers holds
    said: list[Any] = [*ASKED, {"role": "assistant", "content": None, "calls": [{"f": [1, last]}]}]
    rows = [{"messages": [*said, *ASKED], "tools": MANY}, {"messages": ASKED, "tools": None}]
    texts = [{name: json.dumps(x) for name, x in row.items() if x} for row in rows]
    file = tmp_path / f"in.{kind if kind != 'with nulls' else 'parquet'}"
    if kind == "jsonl":
        file.write_text("\n".join(map(json.dumps, rows)))
    elif kind == "csv":
        pytest.importorskip("pyarrow.csv").write_csv(pa.Table.from_pylist(texts), file)
    else:
        parquet.write_table(pa.Table.from_pylist(texts if kind == "parquet" else rows), file)
    wanted = [row | {"tools": row["tools"] or None} for row in rows]
    if kind == "with nulls":  # which cannot be told from fields that are not there
        wanted[0]["tools"] = [{"name": "f", "p": {"a": 1}}, {"name": "g", "p": {}}]
    one = Generator(folder, threads=1)
    found = [one(row, max_new_tokens=5) for row in wanted]
    map_file(folder, file, tmp_path / "out.parquet", max_new_tokens=5)
    out = parquet.read_table(tmp_path / "out.parquet").to_pylist()
    assert [row["generated_tokens"] for row in out] == [(list(x), x.tokens[0])[1] for x in found]
    assert [row["generated_text"] for row in out] == [x.texts()[0] for x in found]
    if kind == "jsonl":
        assert json.loads(out[0]["messages"]) == rows[0]["messages"]


def _with(begin: Any, source: str) -> Any:
    def init(self: Any, folder: Path, **how: Any) -> None:
        begin(self, folder, **how)
        self._templates["default"] = self._templates["default"].environment.from_string(source)

    return init


def test_map_names_bad_conversations(folder: Path, tmp_path: Path, capsys: Any) -> None:
    pytest.importorskip("pyarrow")
    file, out = tmp_path / "in.jsonl", tmp_path / "out.parquet"
    good, loop = (
        {"messages": ASKED},
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    )
    long = [{"role": "user", "content": "x" * 300}]
    cases: list[tuple[Any, str]] = [
        ({"messages": "Hi"}, "line 2: messages are 'Hi'; give a list of them"),
        ({"messages": 5}, "line 2: messages are 5; give a list of them"),
        ({"messages": [{"content": "Hi"}]}, "line 2: a message is {'content': 'Hi'}; give objects"),
        ({"messages": []}, "line 2: there is no message; give at least one"),
        ({**good, "tools": "f"}, "line 2: tools is 'f'; give a list of objects"),
        ({**good, "text": "Hi"}, "line 2 has `messages` and `text`; give one of them"),
        (
            {"messages": long},
            "line 2: the conversation has 304 tokens; it must have 1 to 255: leave",
        ),
        ({"tools": []}, "line 2 has neither `text`"),
    ]
    for row, told in cases:
        file.write_text(f"{json.dumps(good)}\n{json.dumps(row)}\n")
        words = ["map", str(folder), "--data", str(file), "--out", str(out), "--truncate"]
        assert commands.main(words) == 2
        assert told in (error := capsys.readouterr().err) and error.count("\n") == 1
    config = json.loads((folder / "tokenizer_config.json").read_text())
    for template, told in (
        (loop, "row 1: the chat template of .* ends in TimeoutError: it runs for"),
        ("{{ raise_exception('no') }}", "row 1: the chat template of .* ends in TemplateError: no"),
        (None, "has no chat template"),
    ):
        other = tmp_path / told[-5:]
        shutil.copytree(folder, other)
        (other / "tokenizer_config.json").write_text(
            json.dumps(config | {"chat_template": template})
        )
        with pytest.raises(GraphgenError, match=told):
            Stage(other).look(good, "row 1")
    assert sorted(path.suffix for path in tmp_path.iterdir()) == ["", "", "", ".jsonl"]


def test_what_is_shown_of_a_row_stays(folder: Path, tmp_path: Path) -> None:
    """Bytes, what may begin a string to stop at, and spaces before marks wait."""
    shutil.copytree(folder, tmp_path / "out")
    words = ["a", "b", " ", "'", "<0x0A>", "<0xC3>", "<0xA9>"]
    made = tokenizers.Tokenizer(tokenizers.models.BPE({x: i for i, x in enumerate(words)}, []))
    steps = [tokenizers.decoders.ByteFallback(), tokenizers.decoders.Fuse()]
    made.decoder = tokenizers.decoders.Sequence(steps)
    made.save(str(tmp_path / "out" / "tokenizer.json"))
    removed = "clean_up_tokenization_spaces"
    names = [removed, f"{removed}_for_bpe_even_though_it_will_corrupt_output"]
    for row, stop, flags, text in (
        ([0, 4, 5], [], [], "a\ufffd\ufffd"),
        ([5, 6, 1], [], [], "\u00e9b"),
        ([0, 1, 0, 1], ["bab"], [], "a"),
        ([0, 1, 0, 0], ["bab"], [], "abaa"),
        ([0, 2, 3, 2, 1], [], names, "a'b"),
    ):
        (tmp_path / "out" / "tokenizer_config.json").write_text(json.dumps(dict.fromkeys(flags, 1)))
        found = Generator(tmp_path / "out", threads=1)([[0]], max_new_tokens=1, stop=stop)
        found.tokens = [row]
        assert found.texts() == [text]
        for size in range(len(row)):
            found.tokens = [row[:size]]
            assert text.startswith(found.settled()), (row, size)
