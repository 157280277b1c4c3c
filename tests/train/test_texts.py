"""Rows of texts as samples: tokens, what they predict, what is cut, and what is refused."""

import json
from pathlib import Path

import numpy as np
import pytest

import graphgen as gg
from graphgen.commands import _parser
from graphgen.commands.options import show
from graphgen.commands.train import _read
from graphgen.errors import GraphgenError, GraphgenWarning
from graphgen.export.tables import open_table
from graphgen.models.decoder import DecoderLM
from graphgen.models.encoder import EncoderModel
from graphgen.plan import TensorType
from graphgen.train.batches import stream
from graphgen.train.data import Dataset
from graphgen.train.metrics import Metric
from graphgen.train.probe import check_shifted
from graphgen.train.run import History, evaluations
from graphgen.train.samples import Report, table
from graphgen.train.sources import read
from graphgen.train.texts import Texts, texts_for

tokenizers = pytest.importorskip("tokenizers", reason="the extra [text] installs it")

INT, FLOAT = np.dtype(np.int64), np.dtype(np.float32)
TOKENS, EACH = TensorType(INT, ("batch", "seq")), TensorType(INT, ("batch",))
MASKED = dict.fromkeys(["input_ids", "attention_mask", "position_ids", "labels"], TOKENS)
LABELED = dict.fromkeys(["input_ids", "attention_mask", "token_type_ids"], TOKENS)
BOS, EOS, SEP, USER, ASSISTANT, END, PAD = range(1, 8)
WORDS = ["<unk>", "<s>", "</s>", "[SEP]", "<|user|>", "<|assistant|>", "<|end|>", "<pad>"]
W = len(WORDS)  # the number of w0


def write_tokenizer(folder, *, single="<s> $A", pair="<s> $A [SEP] $B:1", config=None, **named):
    """Words w0 to w31; "w1 w2" are the tokens [BOS, W + 1, W + 2]."""
    folder.mkdir(exist_ok=True)
    words = [*WORDS, *(f"w{i}" for i in range(32))]
    made = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: i for i, word in enumerate(words)}, "<unk>")
    )
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.add_special_tokens(WORDS[1:])
    special = [("<s>", BOS), ("</s>", EOS), ("[SEP]", SEP)]
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single=single, pair=pair, special_tokens=special
    )
    made.save(str(folder / "tokenizer.json"))
    given = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": {"content": "<pad>"}, **named}
    (folder / "tokenizer_config.json").write_text(json.dumps(given))
    (folder / "config.json").write_text(json.dumps(config or {}))
    return folder


def write_lines(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def samples(tmp_path):
    """The columns of rows as lists, and the report of them."""

    def made(*rows, inputs=MASKED, classes=40, max_length=None, **named):
        how = {name: named.pop(name, False) for name in ("whole", "eos")}
        how["stride"] = named.pop("stride", None)
        folder = write_tokenizer(tmp_path / "tokens", **named)
        texts = Texts(folder, inputs, classes, max_length=max_length, **how)
        columns = texts.columns(open_table(write_lines(tmp_path / "a.jsonl", *rows)))
        lists = {name: [row.tolist() for row in rows] for name, rows in columns.items()}
        return lists, texts.reports[-1]

    return made


def test_each_token_of_a_text_predicts_the_next(samples):
    found, report = samples({"text": "w1 w2"}, {"text": ""}, {"text": None}, {"text": "w3 w4 w5"})
    assert found["input_ids"] == [[BOS, W + 1], [BOS, W + 3, W + 4]]
    assert found["labels"] == [[W + 1, W + 2], [W + 3, W + 4, W + 5]]
    assert found["attention_mask"] == [[1, 1], [1, 1, 1]]
    assert found["position_ids"] == [[0, 1], [0, 1, 2]]
    assert (report.rows, report.tokens, report.labels, report.dropped_rows) == (2, 5, 5, 2)
    assert report.cut_rows == report.cut_tokens == 0


def test_what_is_too_long_is_cut_and_counted(samples):
    rows = [{"text": "w1 w2 w3 w4 w5"}, {"text": "w1"}]
    found, report = samples(*rows, max_length=3)
    assert found["input_ids"] == [[BOS, W + 1, W + 2], [BOS]]
    assert found["labels"] == [[W + 1, W + 2, W + 3], [W + 1]]
    assert (report.cut_rows, report.cut_tokens) == (1, 2)
    found, _ = samples(*rows, max_length=3, truncation_side="left")
    assert found["labels"] == [[W + 3, W + 4, W + 5], [W + 1]]
    assert samples(*rows, config={"n_positions": 3})[1].cut_tokens == 2
    fixed = dict.fromkeys(["input_ids", "labels"], TensorType(INT, ("batch", 4)))
    assert samples(*rows, inputs=fixed)[1].cut_tokens == 1


def test_only_a_completion_and_its_end_are_learned(samples):
    rows = [
        {"prompt": "w1 w2", "completion": " w3 w4"},
        {"prompt": None, "completion": "w5"},
        {"prompt": "w6", "completion": ""},
    ]
    found, report = samples(*rows)
    assert found["input_ids"] == [[BOS, W + 1, W + 2, W + 3, W + 4], [BOS, W + 5]]
    assert found["labels"] == [[-100, -100, W + 3, W + 4, EOS], [W + 5, EOS]]
    assert report.dropped_rows == 1 and report.labels == 5
    assert samples(rows[0], whole=True)[0]["labels"] == [[W + 1, W + 2, W + 3, W + 4, EOS]]
    for limit, last, cut in ((5, EOS, 0), (4, W + 4, 1), (3, W + 3, 1)):
        found, report = samples(rows[0], max_length=limit)
        assert found["labels"][0][-1] == last
        assert (report.cut_rows, len(found["labels"][0])) == (cut, limit)
    with pytest.raises(GraphgenError, match=r"no row is left: 1 are empty, or have .* 2 tokens"):
        samples(rows[0], max_length=2)


def test_the_first_token_of_a_word_has_its_label(samples):
    """As in transformers' examples of token classification."""
    inputs = {**LABELED, "labels": TOKENS}
    how = {"inputs": inputs, "classes": 3, "config": {"id2label": {0: "O", 1: "B-X", 2: "I-X"}}}
    rows = [
        {"tokens": ["w1", "w2.w3", "w4"], "ner_tags": ["O", "B-X", "I-X"]},
        {"tokens": [], "ner_tags": []},
        {"text": "w1", "tokens": ["w5"], "ner_tags": ["B-X"]},
    ]
    found, report = samples(*rows, **how)
    assert found["input_ids"] == [[BOS, W + 1, W + 2, 0, W + 3, W + 4], [BOS, W + 5]]
    assert found["labels"] == [[-100, 0, 1, -100, -100, 2], [-100, 1]]
    assert (report.kind, report.labels, report.dropped_rows) == ("words", 4, 1)
    found, report = samples(*rows, **how, max_length=3)
    assert found["labels"][0] == [-100, 0, 1] and report.cut_tokens == 3
    numbered = [{"tokens": ["w1", "w2"], "tags": [2, -100]}]
    assert samples(*numbered, **how)[0]["labels"] == [[-100, 2, -100]]
    for row, told in (
        ({"tokens": ["w1"], "tags": [1, 2]}, "line 2: 1 tokens and 2 tags; give one for each"),
        ({"tokens": ["w1"], "tags": ["Y"]}, "line 2: 'tags' is 'Y'; give numbers"),
        ({"tokens": "w1", "tags": [1]}, "line 2: 'tokens' is 'w1'; give a list of words"),
        ({"tokens": ["w1"], "tags": 1}, "line 2: 'tags' is 1; give a list"),
    ):
        with pytest.raises(GraphgenError, match=told):
            samples(*numbered, row, **how)


def test_answers_in_a_context_are_places(samples):
    """As in transformers' examples: windows that share tokens, and [CLS] where no answer is."""
    inputs = {**LABELED, "start_positions": EACH, "end_positions": EACH}
    how = {"inputs": inputs, "pair": "<s> $A [SEP] $B:1 [SEP]:1", "cls_token": "<s>"}
    context = "w1 w2 w3 w4 w5 w6"
    rows = [
        {"question": " w9", "context": context, "answers": answers}
        for answers in (
            {"text": ["w5 w6", "w1"], "answer_start": [12, 0]},
            {"text": [], "answer_start": []},
            '{"text": ["3 w"], "answer_start": [7]}',
        )
    ]
    found, report = samples(*rows, {**rows[0], "question": ""}, **how)
    assert found["input_ids"][0] == [BOS, W + 9, SEP, *range(W + 1, W + 7), SEP]
    assert found["token_type_ids"][0] == [0] * 3 + [1] * 7
    assert (found["start_positions"], found["end_positions"]) == ([7, 0, 5], [8, 0, 6])
    assert (report.kind, report.rows, report.without_answer) == ("questions", 3, 1)
    assert report.dropped_rows == 1
    found, report = samples(rows[0], **how, max_length=8, stride=2)  # four of the context
    assert [ids[3:-1] for ids in found["input_ids"]] == [
        [W + 1, W + 2, W + 3, W + 4],
        [W + 3, W + 4, W + 5, W + 6],
    ]
    assert (found["start_positions"], found["end_positions"]) == ([0, 5], [0, 6])
    assert (report.rows, report.without_answer) == (2, 1)
    fits = {"question": "w1 w2 w3", "context": "w4", "answers": {"text": [], "answer_start": []}}
    assert samples(fits, **how, max_length=8, stride=2)[1].rows == 1
    for row, told in (
        ({"answers": {"text": ["w2"], "answer_start": [4]}}, "'w2' does not stand at character 4"),
        ({"answers": {"text": ["w2"], "answer_start": []}}, "line 1: 'answers' is .* as in SQuAD"),
        ({"answers": "w2"}, "line 1: 'answers' is 'w2'; give"),
        ({"context": 1}, "line 1: 'context' is 1; give a text"),
        ({"question": "w1 w2 w3"}, "leaves 2 for the context, and windows share 2: give a smaller"),
    ):
        with pytest.raises(GraphgenError, match=told):
            samples({**rows[0], **row}, **how, max_length=8, stride=2)
    for options, told in (
        ({**how, "max_length": 6, "stride": 3}, "--max-length 6 leaves 3 tokens for a text, and"),
        ({**how, "padding_side": "left"}, "padding_side is 'left', so the context would come"),
        ({"inputs": {**LABELED, "labels": EACH}}, "give other texts, because the artifacts take"),
    ):
        with pytest.raises(GraphgenError, match=told):
            samples(rows[0], **options)
    with pytest.raises(GraphgenError, match="give question, context and answers, because"):
        samples({"text": "w1", "label": 1}, **how)


def test_the_end_of_a_text_is_learned_if_that_is_wanted(samples):
    rows = [{"text": "w1 w2"}, {"text": "w3 </s>"}, {"text": "w1 w2 w3"}]
    found = samples(*rows, eos=True, max_length=3)[0]["labels"]
    assert found == [[W + 1, W + 2, EOS], [W + 3, EOS], [W + 1, W + 2, W + 3]]


def test_the_end_of_a_text_that_is_cut_goes_too(samples):
    """As in TRL: what the tokenizer puts there would teach to end anywhere."""
    both = {"single": "<s> $A </s>", "max_length": 3}
    for row in ({"text": "w1 w2 w3 w4"}, {"prompt": "w1", "completion": " w2 w3 w4"}):
        found, report = samples(row, **both)
        assert found["input_ids"] == [[BOS, W + 1, W + 2]] and found["labels"][0][-1] == W + 3
        assert report.cut_tokens == 2 and report.cut_rows == 1
        found, _ = samples(row, **both, truncation_side="left")
        assert found["labels"][0][-1] == EOS
    assert samples({"text": "w1 w2"}, **both)[0]["labels"] == [[W + 1, W + 2, EOS]]


def test_the_end_of_a_completion_stands_once(samples):
    found, _ = samples({"prompt": "w1", "completion": " w2"}, single="<s> $A </s>")
    assert found["input_ids"] == [[BOS, W + 1, W + 2]]
    assert found["labels"] == [[-100, W + 2, EOS]]
    found, _ = samples({"prompt": "w1", "completion": " w2"}, eos_token=None,
                       config={"eos_token_id": [END, EOS]})  # fmt: skip
    assert found["labels"] == [[-100, W + 2, END]]
    with pytest.raises(GraphgenError, match="names the eos_token; add it"):
        samples({"prompt": "w1", "completion": " w2"}, eos_token=None)


def test_a_text_that_is_cut_on_the_left_has_its_end(samples):
    """transformers' truncation_side: the end of the text is still there, and is learned."""
    row = {"prompt": "w1 w2", "completion": " w3 w4"}
    for limit, labels in (
        (5, [-100, -100, W + 3, W + 4, EOS]),
        (4, [-100, W + 3, W + 4, EOS]),
        (3, [W + 3, W + 4, EOS]),
        (2, [W + 4, EOS]),
    ):
        found, report = samples(row, max_length=limit, truncation_side="left")
        assert found["labels"] == [labels] and found["input_ids"][0][0] == BOS
        assert report.cut_tokens == 5 - limit
    rows = {"source": "w1", "target": "w2 w3 w4"}
    start = {"decoder_start_token_id": PAD}
    how = {"single": "$A </s>", "config": start, "truncation_side": "left", "max_length": 3}
    assert samples(rows, inputs=TARGETS, **how)[0]["labels"] == [[W + 3, W + 4, EOS]]


@pytest.mark.parametrize("trim", [False, True])
def test_blanks_of_a_completion_are_learned(trim, tmp_path):
    """Byte-level tokenizers may trim blanks off what they say a token covers: GPT-NeoX's does."""
    pieces = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=trim)
    alphabet = ["</s>", *sorted(pieces.alphabet())]
    made = tokenizers.Tokenizer(tokenizers.models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    made.pre_tokenizer = pieces
    made.post_processor = tokenizers.processors.ByteLevel(trim_offsets=trim)
    (tmp_path / "tokens").mkdir()
    made.save(str(tmp_path / "tokens/tokenizer.json"))
    (tmp_path / "tokens/tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    texts = Texts(tmp_path / "tokens", MASKED, len(alphabet))
    row = {"prompt": "if  x:", "completion": "\n    y  = 1 "}
    columns = texts.columns(open_table(write_lines(tmp_path / "a.jsonl", row)))
    labels = columns["labels"][0]
    kept = [alphabet[label] for label in labels if label != -100]
    assert "".join(kept) == "ĊĠĠĠĠyĠĠ=Ġ1Ġ</s>" and (labels[:5] == -100).all()


TARGETS = dict.fromkeys(
    ["input_ids", "attention_mask", "decoder_input_ids", "decoder_attention_mask", "labels"], TOKENS
)


def test_a_decoder_reads_the_target_one_token_late(samples):
    rows = [{"source": "w1 w2", "target": "w3"}, {"source": "w4", "target": "w5 w6"}]
    start = {"decoder_start_token_id": PAD}
    found, report = samples(*rows, inputs=TARGETS, single="$A </s>", config=start)
    assert found["input_ids"] == [[W + 1, W + 2, EOS], [W + 4, EOS]]
    assert found["labels"] == [[W + 3, EOS], [W + 5, W + 6, EOS]]
    assert found["decoder_input_ids"] == [[PAD, W + 3], [PAD, W + 5, W + 6]]
    assert found["decoder_attention_mask"] == [[1, 1], [1, 1, 1]]
    assert report.tokens == 10
    own = {"source_ids": TOKENS, "source_mask": TOKENS, "target_ids": TOKENS, "labels": TOKENS}
    found, _ = samples(*rows, inputs=own)
    assert found["target_ids"] == [[BOS, BOS, W + 3], [BOS, BOS, W + 5, W + 6]]
    assert found["labels"] == [[BOS, W + 3, EOS], [BOS, W + 5, W + 6, EOS]]
    with pytest.raises(GraphgenError, match="give source and target, because the artifacts take"):
        samples({"text": "w1"}, inputs=TARGETS)
    with pytest.raises(GraphgenError, match="give text, prompt or messages, because the artifacts"):
        samples(*rows)


def test_labels_of_texts_and_pairs(samples):
    inputs = LABELED | {"labels": EACH}
    rows = [
        {"text": "w1", "text_pair": "w2", "label": "neutral"},
        {"text": "w3", "text_pair": None, "label": "bad"},
    ]
    found, report = samples(*rows, inputs=inputs, classes=3)
    assert found["input_ids"] == [[BOS, W + 1, SEP, W + 2], [BOS, W + 3]]
    assert found["token_type_ids"] == [[0, 0, 0, 1], [0, 0]]
    assert found["labels"] == [1, 0]
    assert report.classes == {"bad": 0, "neutral": 1}
    named = {"id2label": {"0": "good", "1": "neutral", "2": "bad"}}
    assert samples(*rows, inputs=inputs, config=named)[0]["labels"] == [1, 2]
    plain = {"id2label": {"0": "LABEL_0", "1": "LABEL_1"}}
    assert samples(*rows, inputs=inputs, config=plain)[0]["labels"] == [1, 0]
    with pytest.raises(GraphgenError, match="has 2 classes, and the model 1: bad, neutral"):
        samples(*rows, inputs=inputs, classes=1)
    other = {"id2label": {"0": "good", "1": "neutral"}}
    with pytest.raises(
        GraphgenError, match="line 2: 'bad' is not one of the classes good, neutral"
    ):
        samples(*rows, inputs=inputs, config=other)
    cut = [{"text": "w1 w2 w3 w4", "text_pair": "w5 w6 w7", "label": 1}]
    found, report = samples(*cut, inputs=inputs, max_length=6)
    assert len(found["input_ids"][0]) == 6 and report.cut_tokens == 3


def test_labels_that_are_numbers(samples, tmp_path):
    inputs = LABELED | {"labels": EACH}
    rows = [{"text": "w1", "label": 2}, {"text": "w1", "label": 0}]
    assert samples(*rows, inputs=inputs)[0]["labels"] == [2, 0]
    real = LABELED | {"labels": TensorType(FLOAT, ("batch",))}
    rows[1]["label"] = 0.5
    assert samples(*rows, inputs=real)[0]["labels"] == [2.0, 0.5]
    with pytest.raises(GraphgenError, match=r"line 2: 'label' is 0.5; give numbers that fit int64"):
        samples(*rows, inputs=inputs)
    (tmp_path / "a.csv").write_text("text,label\n" + "".join(f"w1,{i}\n" for i in range(11)))
    texts = Texts(tmp_path / "tokens", inputs, 11)
    labels = texts.columns(open_table(tmp_path / "a.csv"))["labels"]
    assert [int(label) for label in labels] == list(range(11)), "not in alphabetical order"
    for first in ("1", "good"):
        (tmp_path / "b.csv").write_text(f"text,label\nw1,{first}\nw2,\n")
        with pytest.raises(GraphgenError, match=r"b.csv, line 3: 'label' is ''; give numbers that"):
            texts.columns(open_table(tmp_path / "b.csv"))  # not a class without a name


def test_classes_whose_names_are_numbers(samples):
    """By their names: "1" is the class 0, whose number a file would not say as a text."""
    named, inputs = {"id2label": {"0": "1", "1": "2", "2": "3"}}, LABELED | {"labels": EACH}
    rows = [{"text": "w1", "label": "1"}, {"text": "w1", "label": "2"}]
    assert samples(*rows, inputs=inputs, classes=3, config=named)[0]["labels"] == [0, 1]
    assert samples(*rows, inputs=inputs, classes=3)[0]["labels"] == [1, 2]
    for row, label in zip(rows, (1, 2), strict=True):
        row["label"] = label
    assert samples(*rows, inputs=inputs, classes=3, config=named)[0]["labels"] == [1, 2]


@pytest.mark.parametrize("known", [True, False])
def test_classes_in_another_order_than_the_models_go_by_name(known, tmp_path):
    """`datasets` notes the names of numbers; config.json, and the data of --data, have theirs."""
    pa = pytest.importorskip("pyarrow", reason="the extra [data] installs it")
    parquet = pytest.importorskip("pyarrow.parquet")
    config = {"id2label": {"0": "good", "1": "bad"}} if known else None
    texts = Texts(
        write_tokenizer(tmp_path / "tokens", config=config), LABELED | {"labels": EACH}, 2
    )
    for names, labels in ((["bad", "good"], [1, 0, 1]), (["good", "bad"], [0, 1, 0])):
        feature = {"label": {"_type": "ClassLabel", "names": names}}
        table = pa.table({"text": ["w1", "w2", "w1"], "label": labels})
        noted_as = json.dumps({"info": {"features": feature}})
        noted = table.replace_schema_metadata({"huggingface": noted_as})
        parquet.write_table(noted, tmp_path / "a.parquet")
        found = texts.columns(open_table(tmp_path / "a.parquet"))["labels"]
        assert [int(label) for label in found] == ([0, 1, 0] if known else [1, 0, 1])
        assert texts.reports[-1].classes == {"good": not known, "bad": known}
    noted = noted.replace_schema_metadata({"huggingface": noted_as.replace("bad", "poor")})
    parquet.write_table(noted, tmp_path / "a.parquet")
    with pytest.warns(GraphgenWarning, match="are good, poor, and .* their numbers count, not"):
        texts.columns(open_table(tmp_path / "a.parquet"))


def test_held_out_texts_have_the_classes_of_the_data(samples, tmp_path):
    folder = write_tokenizer(tmp_path / "tokens")
    texts = Texts(folder / "tokenizer.json", LABELED | {"labels": EACH}, 3)
    rows = [{"text": "w1", "label": name} for name in "abc"]
    texts.columns(open_table(write_lines(tmp_path / "a.jsonl", *rows)))
    found = texts.columns(open_table(write_lines(tmp_path / "b.jsonl", rows[2], rows[1])))
    assert [int(label) for label in found["labels"]] == [2, 1]
    with pytest.raises(GraphgenError, match=r"b.jsonl, line 1: 'd' is not one of the classes a, b"):
        texts.columns(open_table(write_lines(tmp_path / "b.jsonl", {"text": "w1", "label": "d"})))


def test_padding_is_the_tokenizers_and_as_long_as_the_graph_wants(tmp_path):
    fixed = dict.fromkeys(MASKED, TensorType(INT, ("batch", 4)))
    folder = write_tokenizer(tmp_path / "tokens")
    write_lines(tmp_path / "a.jsonl", {"text": "w1 w2"}, {"text": "w3"})
    for inputs, size in ((MASKED, 2), (fixed, 4)):
        texts = Texts(folder, inputs, 40)
        [batch] = stream(read(str(tmp_path / "a.jsonl"), inputs, batch=2, seed=None, texts=texts))
        rest = size - 2
        assert batch["input_ids"].tolist()[1] == [BOS, PAD, *[PAD] * rest]
        assert batch["attention_mask"].tolist() == [[1, 1, *[0] * rest], [1, 0, *[0] * rest]]
        assert batch["labels"].tolist()[1] == [W + 3, -100, *[-100] * rest]
        assert all(array.dtype == INT for array in batch.values())


def test_texts_without_a_mask_are_not_padded(samples):
    inputs = {"input_ids": TOKENS, "labels": EACH}
    rows = [{"text": "w1", "label": 1}, {"text": "w1 w2", "label": 1}]
    assert samples(rows[0], rows[0], inputs=inputs)[0]["input_ids"] == [[BOS, W + 1]] * 2
    with pytest.raises(GraphgenError, match="the model has no attention_mask, so padding would"):
        samples(*rows, inputs=inputs)


BAD = {
    "a number": ({"text": 1}, {}, "line 1: 'text' is 1; give a text"),
    "half a character": ({"text": "\ud800"}, {}, "line 1: tokenizer.json does not split the text"),
    "a list of prompts": ({"prompt": ["a"], "completion": "b"}, {}, "line 1: 'prompt' is"),
    "a missing completion": ({"prompt": "a"}, {}, "a.jsonl has prompt; the artifacts take input"),
    "no label": ({"text": "w1"}, {"inputs": {"input_ids": TOKENS, "labels": EACH}},
                 "but each text needs a `label`: labels are int64"),
    "prompts for classes": ({"prompt": "w1", "completion": "w2"},
                            {"inputs": {"input_ids": TOKENS, "labels": EACH}},
                            "completions need a label for each token; those of the artifacts are"),
    "two kinds of labels": ([{"text": "w1", "label": "a"}, {"text": "w1", "label": 1}],
                            {"inputs": {"input_ids": TOKENS, "labels": EACH}},
                            "line 2: 'label' is 1; give numbers that fit int64, or names"),
    "true among numbers": ([{"text": "w1", "label": 0}, {"text": "w1", "label": True}],
                           {"inputs": {"input_ids": TOKENS, "labels": EACH}},
                           "line 2: 'label' is True; give numbers that fit int64, or names"),
    "no labels": ([{"text": "w1", "label": None}],
                  {"inputs": {"input_ids": TOKENS, "labels": EACH}}, "line 1: 'label' is None"),
    "nothing left": ({"text": ""}, {}, "no row is left: 1 are empty"),
    "no room": ({"text": "w1"}, {"max_length": 1}, "--max-length 2 leaves no room: .* adds 2"),
    "another input": ({"text": "w1"}, {"inputs": MASKED | {"pixels": TOKENS}},
                      "texts give input_ids, masks, types, positions and labels, or start_pos"),
    "too few tokens": ({"text": "w1"}, {"classes": 20}, "one of 20 classes, fewer than the"),
    "a blank in a name": ({"text ": "w1"}, {}, "a.jsonl has 'text '; the artifacts take input_ids"),
    "semicolons": ({"text;label": "w1;1"}, {}, "text, in cells between commas, or tabs in .tsv"),
    "preferences": ({"prompt": "w1", "chosen": "w2", "rejected": "w3"}, {},
                    "of which one is chosen and one rejected, and each would be learned as if"),
    "wanted or not": ({"prompt": "w1", "completion": "w2", "label": False}, {},
                      "completion, label, texts whose label says whether it is wanted, and each"),
    "tokens alone": ({"input_ids": [1, 2]}, {}, "rows of tokens need all of these, and labels are"),
    "a text as a whole": ({"text": "w1"}, {"whole": True}, "--whole has no effect on texts, which"),
    "an end too many": ({"prompt": "w1", "completion": "w2"}, {"eos": True},
                        "--eos has no effect on completions, which .*a.jsonl has; leave it out"),
    "no token": ({"prompt": "", "completion": "w1"}, {"eos_token": None, "config":
                 {"eos_token_id": "x"}}, "eos_token_id is 'x'; it must be a token"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_rows_that_cannot_be_learned_are_one_error(name, samples):
    rows, options, message = BAD[name]
    with pytest.raises(GraphgenError, match=message) as raised:
        samples(*(rows if isinstance(rows, list) else [rows]), **options)
    assert "\n" not in str(raised.value)


def test_a_row_late_in_the_file_is_named(samples):
    rows = [{"text": "w1"}] * 1500 + [{"text": "\ud800"}]
    with pytest.raises(GraphgenError, match=r"line 1501: tokenizer.json does not split the text"):
        samples(*rows)
    assert len(samples(*rows[:1500])[0]["labels"]) == 1500


def test_other_columns_are_left_out_with_a_warning(samples):
    with pytest.warns(GraphgenWarning, match=r"a.jsonl: texts do not need label, which are left"):
        samples({"text": "w1", "label": 1})


def test_a_folder_without_a_tokenizer_is_one_error(tmp_path):
    with pytest.raises(GraphgenError, match=r"there is no tokenizer.json; give a folder with one"):
        Texts(tmp_path, MASKED, 40)


def trainer_of(model, folder, **kwargs):
    inputs = kwargs.pop("inputs", {"input_ids": gg.int64["batch", "seq"]})
    gg.artifacts(gg.build(model, **inputs), folder, **kwargs)
    return gg.Trainer(folder, threads=1)


@pytest.fixture(scope="module")
def causal(tmp_path_factory):
    decoder = DecoderLM(40, 16, layers=1, num_heads=2, length=32)
    return trainer_of(decoder, tmp_path_factory.mktemp("a") / "art")


def test_a_model_that_sees_later_tokens_is_refused(causal, tmp_path):
    encoder = EncoderModel(40, 16, layers=1, num_heads=2, length=32)

    class Filled(gg.nn.Module):
        def __init__(self):
            self.encoder, self.head = encoder, gg.nn.Linear(16, 40)

        def __call__(self, input_ids, attention_mask):
            states = self.encoder(input_ids, attention_mask)["last_hidden_state"]
            return {"logits": self.head(states)}

    names = dict.fromkeys(["input_ids", "attention_mask"], gg.int64["batch", "seq"])
    seeing = trainer_of(Filled(), tmp_path / "art", inputs=names, output="logits")
    tokens = write_tokenizer(tmp_path / "tokens")
    source = write_lines(
        tmp_path / "a.jsonl",
        {"prompt": "w1 w2 w3", "completion": " w4"},
        {"prompt": "w1", "completion": " w2"},
    )
    ids = np.arange(8).reshape(1, 8)
    own = {"input_ids": ids, "labels": np.where(ids > 2, ids, -100)}
    with pytest.raises(
        GraphgenError, match=r"themselves, which a causal .* cross_entropy:labels=copied"
    ):
        causal.fit([own], progress=False)
    assert not causal.step
    for group in ([own, {**own, "labels": ids[:, ::-1]}], [{**own, "labels": ids[:, ::-1]}, own]):
        check_shifted(causal, group, "fit")  # the rule is another one
    copied = tmp_path / "copied"
    loss = gg.Loss("cross_entropy", labels="copied")  # as the error says, if copying is meant
    again = trainer_of(DecoderLM(40, 16, layers=1, num_heads=2, length=32), copied, loss=loss)
    again.fit([{"input_ids": ids, "copied": own["labels"]}], progress=False)
    seeing.fit([{**own, "attention_mask": np.ones_like(ids)}], progress=False)  # may be its task
    for trainer in (causal, seeing):
        texts = texts_for(trainer, tmp_path, tokens)
        data = read(str(source), trainer.inputs, batch=2, texts=texts)
        assert isinstance(data, Dataset)
        if trainer is causal:
            texts.check(trainer, data)
        else:
            with pytest.raises(GraphgenError, match="this model sees later tokens: with another"):
                texts.check(trainer, data)


def test_training_on_completions_lowers_their_loss(causal, tmp_path):
    tokens = write_tokenizer(tmp_path / "tokens")
    rows = [{"prompt": f"w{i}", "completion": f" w{i + 1} w{i + 2}"} for i in range(8)]
    source = write_lines(tmp_path / "a.jsonl", *rows)
    data = read(str(source), causal.inputs, batch=8, texts=texts_for(causal, tmp_path, tokens))
    losses = [line["loss"] for line in causal.fit(data, steps=60, progress=False)]
    assert losses[0] > 3 and losses[-1] < 2.8
    assert texts_for(causal, tmp_path, None) is None
    assert texts_for(causal, tokens, None) is not None
    with pytest.raises(GraphgenError, match=r"--max-length 5 is for texts: give --tokenizer DIR"):
        texts_for(causal, tmp_path, None, max_length=5)


def test_options_of_texts_are_refused_for_numbers(causal, tmp_path):
    tokens, source = write_tokenizer(tmp_path / "tokens"), tmp_path / "a.npz"
    np.savez(source, input_ids=np.ones((8, 4), np.int64), labels=np.ones((8, 4), np.int64))
    options = _parser(["train"]).parse_args(["train", str(tmp_path), "--data", str(source)])
    _read(options, causal, shown=False)
    options.tokenizer = tokens
    with pytest.raises(GraphgenError, match="--tokenizer is for texts, and --data has numbers"):
        _read(options, causal, shown=False)


def test_the_command_reports_what_was_cut(tmp_path, capsys, monkeypatch):
    from graphgen.commands import main

    monkeypatch.chdir(tmp_path)
    decoder = DecoderLM(40, 16, layers=1, num_heads=2, length=32)
    trainer_of(decoder, tmp_path / "art")
    write_tokenizer(tmp_path / "tokens")
    write_lines(tmp_path / "a.jsonl", *[{"text": f"w{i} w2 w3 w4 w5"} for i in range(9)])
    command = "train art --data a.jsonl --tokenizer tokens --max-length 3 --batch 4 --threads 1"
    assert main([*command.split(), "--checkpoint", "run"]) == 0
    shown, row, _ = capsys.readouterr().out.splitlines()
    assert shown.split() == "data kind rows tokens labels cut rows cut tokens dropped rows".split()
    assert row.split() == "a.jsonl texts 9 27 27 9 18 0".split()
    plan = json.loads(Path("run/plan.json").read_text())
    assert plan["data"][0]["cut_tokens"] == 18
    assert main([*command.split(), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["data"] == plan["data"]
    again = [*command.split(), "--checkpoint", "run", "--resume", "--allow-changes", "schedule"]
    assert main([*again, "--max-length", "2"]) == 2
    assert "the run in run has data, first batch" in capsys.readouterr().err


def test_a_text_may_have_a_number_or_several(samples):
    rows = [{"text": "w1", "label": -100.0}, {"text": "w1 w2", "label": "[2]"}]
    several = LABELED | {"labels": TensorType(FLOAT, ("batch", 1))}
    found, report = samples(*rows, inputs=several, classes=None)
    assert found["labels"] == [[-100.0], [2.0]] and report.labels == 2
    alone = LABELED | {"labels": TensorType(FLOAT, ("batch",))}
    assert samples(rows[0], inputs=alone, classes=None)[0]["labels"] == [-100.0]
    three = LABELED | {"labels": TensorType(FLOAT, ("batch", 3))}
    found, report = samples({"text": "w1", "labels": [0, 1, 1]}, inputs=three, classes=None)
    assert found["labels"] == [[0.0, 1.0, 1.0]] and report.labels == 3
    names = {"inputs": three, "classes": None, "config": {"id2label": {1: "b", 0: "a", 2: "c"}}}
    rows = [{"text": "w1", "label": given} for given in (["c", "a"], [], ["b"], [0, 1, 0])]
    assert samples(*rows, **names)[0]["labels"] == [[1, 0, 1], [0, 0, 0], [0, 1, 0], [0, 1, 0]]
    with pytest.raises(GraphgenError, match="line 1: 'label' is not a list of numbers"):
        samples({"text": "w1", "label": ["d"]}, **names)
    for label, message in (
        ([0, 1], r"line 1: 'label' is \[0, 1\]; give 3 numbers"),
        ([0, 1, True], "line 1: 'label' has true or false"),
        (None, "line 1: 'label' is not a list of numbers"),
        ("good", "line 1: 'label' is not a list of numbers"),
    ):
        with pytest.raises(GraphgenError, match=message):
            samples({"text": "w1", "label": label}, inputs=three, classes=None)


def test_names_in_brackets_are_printed_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    losses = {"loss": 1.0, "evaluation_loss": 2.0}
    history = History({"step": n, **losses, "evaluation_f[x]": n} for n in (1, 2))
    show(table([Report("[a]b.jsonl", "texts", rows=1_000)]))
    show(evaluations(history, [Metric(np.dot, "f[x]")]))
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert rows[1][:3] == ["[a]b.jsonl", "texts", "1,000"]
    assert rows[-1] == ["f[x]", "2", "2", "2"]
