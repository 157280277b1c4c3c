"""Rows of texts as the numbers that a model's training graph takes."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from graphgen.errors import GraphgenError, warn
from graphgen.export.columns import Chunk, Rows
from graphgen.export.named_losses import IGNORED, LABELS
from graphgen.export.tables import Objects, Table, in_words
from graphgen.files import present
from graphgen.models.published.chat import Template
from graphgen.models.published.conversation import (
    CHAT,
    SHARED,
    is_messages,
    nested,
    of_row,
)
from graphgen.models.published.tokenizer import BeyondVocabularyError
from graphgen.operands import Array
from graphgen.plan import TensorType
from graphgen.train.class_labels import Labels, listed
from graphgen.train.data import Batches, Dataset, LabelKind, Padding
from graphgen.train.packing import packed
from graphgen.train.probe import check_apart, check_causal
from graphgen.train.questions import ANSWERS, PLACES, STRIDE, Question, windows
from graphgen.train.samples import Report, Sample
from graphgen.train.tokens import FILE, Text, Tokenizer, Tokens

if TYPE_CHECKING:
    from graphgen.train import Trainer

SOURCE = ("input_ids", "source_ids")
TARGET = ("decoder_input_ids", "target_ids")
_MASKS = {
    "attention_mask": "input_ids",
    "source_mask": "source_ids",
    "decoder_attention_mask": "decoder_input_ids",
}
"""What is 1 at each token of an input, and 0 where that is padded."""

_SOME = 1024
"""Samples that are stored together."""

_LABEL = ("label", LABELS)
_TAGS = (LABELS, "tags", "ner_tags")
_KINDS = {
    ("question", "context", ANSWERS): "questions",
    ("messages",): "chat",
    (SHARED,): "chat",
    ("prompt", "completion"): "completions",
    ("source", "target"): "pairs",
    ("text",): "texts",
}


class Texts:
    """What makes samples of rows with texts: the tokenizer, the limit and the names of classes.

    `inputs` are those of the training graph, and `classes` how many its labels have. The columns:
    `question`, `context` and `answers`, of which places are learned, with windows that share
    `stride` tokens; `messages`, or `prompt` and `completion`, which train what the assistant or the
    completion says, or with `whole` all; `source` and `target`, for encoder-decoders; `text`, and
    `text_pair` if there is one, with `label`; or `text` alone, in which each token predicts the
    next, with `eos` also the one that ends it.
    """

    def __init__(
        self,
        source: Path,
        inputs: Mapping[str, TensorType],
        classes: int | None,
        *,
        max_length: int | None = None,
        pack: int | None = None,
        apart: bool = False,
        whole: bool = False,
        eos: bool = False,
        stride: int | None = None,
    ) -> None:
        self.inputs, self.pack, self.whole, self.eos = inputs, pack, whole, eos
        self.stride = stride
        self.places = inputs.keys() >= {*PLACES}
        """Whether places are learned, where an answer begins and ends."""
        self.ids = next((name for name in SOURCE if name in inputs), None)
        dims = inputs[LABELS].dims or () if LABELS in inputs else ()
        several = dims[1:2] if self.ids and dims[1:2] != (self._fixed(self.ids),) else ()
        self.size = next((size for size in several if isinstance(size, int)), None)
        """How many numbers label a text, None if one does, or one each token."""
        self.each = len(dims) > 1 and self.size is None
        """Whether each token has a label."""
        self.target = next((name for name in TARGET if name in inputs), None)
        known = {*SOURCE, *TARGET, *_MASKS, "token_type_ids", "position_ids"}
        known |= {*PLACES} if self.places else {LABELS}
        others = [name for name in inputs if name not in known]
        if self.ids is None or not (self.places or LABELS in inputs) or others:
            raise GraphgenError(
                f"--tokenizer {source}: texts give input_ids, masks, types, positions and labels, "
                f"or {' and '.join(PLACES)}; "
                f"the artifacts take {', '.join(inputs)}"
            )
        self._classes, self._of_words = classes, False
        try:
            self.tokenizer = Tokenizer(source, classes if self.each else None)
        except BeyondVocabularyError:
            if not self.each or classes is None:
                raise
            self.tokenizer, self._of_words = Tokenizer(source), True
        kind = inputs[PLACES[0] if self.places else LABELS]
        self._labels = Labels(kind, classes, self.size, self.tokenizer.config)
        if pack is not None and not (apart and self.each and self.target is None):
            raise GraphgenError(
                f"--pack {pack}: this model cannot keep the documents of a row apart; write the "
                "artifacts of a decoder with an attention_mask with --documents"
            )
        sizes = [max_length, self.tokenizer.context, self._fixed(self.ids), pack]
        self.limit = min((size for size in sizes if size is not None), default=None)
        self.reports: list[Report] = []

    def columns(self, table: Table) -> dict[str, Rows]:
        """The columns of the model's inputs from a table; a report of it is added.

        Raises GraphgenError for a row that is wrong, and if none is left.
        """
        names, kind = self._kind(table)
        for option, given, kinds in (
            ("--whole", self.whole, ("chat", "completions")),
            ("--eos", self.eos, ("texts",)),
            ("--pack", self.pack is not None, ("chat", "completions", "texts")),
            ("--stride", self.stride is not None, ("questions",)),
        ):
            if given and kind not in kinds:
                raise GraphgenError(
                    f"{option} has no effect on {kind}, which {table.path} has; leave it out"
                )
        report = Report(str(table.path), kind)
        self._table, self._report = table, report
        if left := [name for name in table.names if name not in names]:
            warn(f"{table.path}: {kind} do not need {in_words(left)}, which are left out")
        makers = {
            "chat": self._chat,
            "completions": self._completions,
            "pairs": self._pairs,
            "texts": self._texts,
            "texts with labels": self._labeled,
            "words": self._words,
            "questions": self._questions,
        }
        samples = (one for one in makers[kind](names) if report.add(one) and one is not None)
        chunks = []
        while some := list(itertools.islice(samples, _SOME)):
            chunks.append(self._chunks(some))
        if not chunks:
            raise GraphgenError(
                f"{table.path}: no row is left: {report.dropped_rows} are empty, or have nothing "
                f"to learn within {self.limit or 'any number of'} tokens"
            )
        report.classes = dict(self._labels.names)
        found = {
            name: Rows(f"{table.path}: {name!r}", [chunk[name] for chunk in chunks], kind.dtype)
            for name, kind in self.inputs.items()
        }
        self._check_padding(table, found)
        if self.pack is not None:
            found = packed(found, "attention_mask", self.pack)
            report.packed_rows = len(found[LABELS])
        self.reports.append(report)
        return found

    def _check_padding(self, table: Table, columns: Mapping[str, Rows]) -> None:
        """Raise GraphgenError if padding would count; in a decoder, what comes before does not."""
        assert self.ids is not None
        masked = any(name in self.inputs for name, of in _MASKS.items() if of in SOURCE)
        sizes = {size for size, *_ in columns[self.ids].shapes} | {self._fixed(self.ids)}
        if not masked and len(sizes - {None}) > 1 and (self.target or not self.each):
            raise GraphgenError(
                f"{table.path}: texts have different lengths, and the model has no attention_mask, "
                "so padding would count: give texts of one length, or train a model with a mask"
            )

    def check(self, trainer: "Trainer", batches: Batches) -> None:
        """Raise GraphgenError if tokens that have labels see those that they should predict."""
        seeing = all(report.kind != "words" for report in self.reports)
        if self.each and seeing and isinstance(batches, Dataset):
            check_causal(trainer, batches.at(0), self.target or str(self.ids), "--data")
            if self.pack is not None and self._fixed(str(self.ids)) is None:
                check_apart(trainer, batches.at(0), "attention_mask", f"--pack {self.pack}")

    def padding(self) -> dict[str, Padding]:
        """What columns are padded with, and up to which length at least."""
        token = self.tokenizer.token("pad_token") or 0
        values = dict.fromkeys((*SOURCE, *TARGET), token) | {LABELS: IGNORED}
        return {name: Padding(values.get(name, 0), self._fixed(name)) for name in self.inputs}

    def _fixed(self, name: str) -> int | None:
        dims = self.inputs[name].dims or ()
        return dims[1] if len(dims) > 1 and isinstance(dims[1], int) else None

    def _kind(self, table: Table) -> tuple[list[str], str]:
        """The columns that are read, and what they are."""
        who, there = str(table.path), {*table.names}
        tags = next((name for name in _TAGS if name in there), None)
        if self.each and self.target is None and "tokens" in there and tags is not None:
            return ["tokens", tags], "words"
        if self._of_words:
            raise GraphgenError(
                f"{who} has {in_words(table.names)}, and each token one of {self._classes} "
                "classes, fewer than the tokenizer has tokens: give `tokens`, a list of words, and "
                "`labels`, a list of their classes, or the tokenizer of this model"
            )
        found = next((names for names in _KINDS if there.issuperset(names)), None)
        if found is None and there >= {"chosen", "rejected"}:
            raise _preferences(table, "of which one is chosen and one rejected")
        if found is None:
            wanted = "; ".join(" and ".join(names) for names in _KINDS)
            if self.ids in there:
                wanted += "; rows of tokens need all of these, and labels are the tokens after each"
            if len(there) == 1 and ";" in table.names[0]:
                wanted += ", in cells between commas, or tabs in .tsv, not ';'"
            raise GraphgenError(
                f"{who} has {in_words(table.names)}; the artifacts take "
                f"{', '.join(self.inputs)}, and texts are {wanted}; --columns text=NAME names "
                "others"
            )
        names, kind = [*found], _KINDS[found]
        if (kind == "questions") != self.places:
            wanted = "question, context and answers" if self.places else "other texts"
            raise GraphgenError(
                f"{who} has {in_words(table.names)}; give {wanted}, because the artifacts take "
                f"{', '.join(self.inputs)}"
            )
        if kind == "questions":
            return names, kind
        if kind == "texts" and not self.each:
            label = next((name for name in _LABEL if name in there), None)
            if label is None:
                raise GraphgenError(
                    f"{who} has {in_words(table.names)}, but each text needs a `label`: "
                    f"labels are {self.inputs[LABELS]}"
                )
            pair = ["text_pair"] if "text_pair" in there else []
            return [*names, *pair, label], "texts with labels"
        if not self.each:
            raise GraphgenError(
                f"{who}: {kind} need a label for each token; those of the artifacts are "
                f"{self.inputs[LABELS]}: give `text` and `label`"
            )
        if (kind == "pairs") != (self.target is not None):
            wanted = "source and target" if self.target else "text, prompt or messages"
            raise GraphgenError(
                f"{who} has {in_words(table.names)}; give {wanted}, because the artifacts take "
                f"{', '.join(self.inputs)}"
            )
        if kind == "completions":
            kind = self._completed(table)
        if kind == "chat":
            names = [*names, *(name for name in CHAT if name in there and name not in names)]
        return names, kind

    def _completed(self, table: Table) -> str:
        """What rows of a prompt and a completion are: texts, or messages."""
        names = ["prompt", "completion", *({"label"} & {*table.names})]
        first = next(table.rows(names))
        if isinstance(first.get("label"), bool):
            raise _preferences(table, "whose label says whether it is wanted")
        if all(is_messages(nested(first[name])) for name in names[:2]):
            return "chat"
        return "completions"

    def _rows(self, names: Sequence[str]) -> Iterator[tuple[str, dict[str, Any]]]:
        for number, row in enumerate(self._table.rows(names)):
            yield self._table.where(number), row

    def _split(
        self,
        names: Sequence[str],
        limit: int | None,
        optional: Sequence[str] = (),
        end: int | None = None,
        kept: bool = True,
    ) -> Iterator[Tokens | None]:
        """The tokens of the texts in these columns of each row, joined; None for an empty one."""

        def texts() -> Iterator[Text | None]:
            for where, row in self._rows([*names, *optional]):
                given = [name for name in row if name in names or row[name] is not None]
                parts = [_text(where, name, row) for name in given]
                empty = not all(parts[: len(names)])
                yield None if empty else Text(where, parts)

        return self.tokenizer.encode(texts(), limit, end=end, kept=kept)

    def _texts(self, names: Sequence[str]) -> Iterator[Sample | None]:
        end = self.tokenizer.wanted("eos_token") if self.eos else None
        return map(_shifted, self._split(names, self._more, end=end, kept=False))

    def _completions(self, names: Sequence[str]) -> Iterator[Sample | None]:
        def texts() -> Iterator[Text | None]:
            for where, row in self._rows(names):
                prompt, completion = (_text(where, name, row) for name in names)
                whole = prompt + completion
                spans = None if self.whole else [(len(prompt), len(whole))]
                yield Text(where, [whole], spans) if completion else None

        eos = self.tokenizer.wanted("eos_token")
        return map(_shifted, self.tokenizer.encode(texts(), self._more, end=eos, kept=False))

    def _chat(self, names: Sequence[str]) -> Iterator[Sample | None]:
        def texts() -> Iterator[Text | None]:
            for where, row in self._rows(names):
                if isinstance(self._table, Objects):  # where a null is one
                    given = {n: nested(x) if isinstance(x, str) else x for n, x in row.items()}
                else:
                    given = {name: nested(value) for name, value in row.items()}
                found, prompt = of_row(given)
                if found.get("messages", []) == []:
                    yield None
                    continue
                text, spans = self._template.render(found, where, prompt)
                yield Text(where, [text], None if self.whole else spans) if text else None

        return map(_shifted, self.tokenizer.encode(texts(), self._more, special=False))

    @cached_property
    def _template(self) -> Template:
        return Template(self.tokenizer.folder)

    def _pairs(self, names: Sequence[str]) -> Iterator[Sample | None]:
        tokenizer, eos = self.tokenizer, self.tokenizer.wanted("eos_token")
        start = tokenizer.config.get("decoder_start_token_id")
        if type(start) is not int:
            start = tokenizer.wanted("bos_token")
        assert self.target is not None
        sizes = [size for size in (self.limit, self._fixed(self.target)) if size is not None]
        limit = min(sizes, default=None)
        both = [self._split([names[0]], self.limit), self._split([names[1]], limit, end=eos)]
        for one, other in zip(*both, strict=True):
            if one is None or other is None:
                yield None
            else:
                target = np.concatenate([[start], other.ids[:-1]])
                yield Sample(one.ids, other.ids, one.types, target, one.cut + other.cut)

    def _labeled(self, names: Sequence[str]) -> Iterator[Sample | None]:
        given = [name for name in names if name == "text_pair"]
        labels = self._labels.column(self._table, names[-1])
        for tokens, label in zip(self._split(["text"], self.limit, given), labels, strict=True):
            if tokens is None:
                yield None
            else:
                yield Sample(tokens.ids, label, tokens.types, cut=tokens.cut)

    def _words(self, names: Sequence[str]) -> Iterator[Sample]:
        """The first token of each word has its label, and the others none, as in transformers."""
        table, rows = self._table, list[tuple[str, list[str]]]()
        for where, row in self._rows(names[:1]):
            words = listed(row[names[0]])
            if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
                raise GraphgenError(f"{where}: 'tokens' is {words!r:.40}; give a list of words")
            rows.append((where, words))
        labels = self._labels.lists(table, names[1])
        found = self.tokenizer.words(rows, self.limit)
        for (where, words), given, (tokens, places) in zip(rows, labels, found, strict=True):
            if len(words) != len(given):
                raise GraphgenError(
                    f"{where}: {len(words)} tokens and {len(given)} {names[1]}; give one for each"
                )
            own = np.full(len(tokens.ids), IGNORED, np.int32)
            for token, place in enumerate(places):
                if place is not None and (token == 0 or place != places[token - 1]):
                    own[token] = given[place]
            yield Sample(tokens.ids, own, tokens.types, cut=tokens.cut)

    def _questions(self, names: Sequence[str]) -> Iterator[Sample | None]:
        """Each window of a context is a sample, as in transformers' examples."""
        rows = (
            Question.of(where, *(row[name] for name in names)) for where, row in self._rows(names)
        )
        stride = STRIDE if self.stride is None else self.stride
        for found in windows(self.tokenizer, rows, self.limit, stride):
            yield from [None] if found is None else [sample for sample, _ in found]
            self._report.without_answer += sum(not there for _, there in found or ())

    @property
    def _more(self) -> int | None:
        """The limit of texts whose last token is only predicted."""
        return None if self.limit is None else self.limit + 1

    def _chunks(self, samples: Sequence[Sample]) -> dict[str, Chunk]:
        """Columns of some samples, by the model's inputs."""
        arrays: dict[str, Sequence[Any]] = {
            "token_type_ids": [one.types for one in samples],
            LABELS: [one.labels for one in samples],
            **{name: [one.ids for one in samples] for name in SOURCE},
            **{name: [one.target for one in samples] for name in TARGET},
        }
        if self.places:
            arrays |= {n: [one.labels[i] for one in samples] for i, n in enumerate(PLACES)}
        for name, of in _MASKS.items():
            arrays[name] = [np.ones(np.size(ids), np.int8) for ids in arrays[of]]
        arrays["position_ids"] = [np.arange(len(one.ids), dtype=np.int32) for one in samples]
        return {name: _chunk(arrays[name]) for name in self.inputs}


def texts_for(
    trainer: "Trainer",
    folder: Path,
    source: Path | None,
    *,
    max_length: int | None = None,
    pack: int | None = None,
    whole: bool = False,
    eos: bool = False,
    stride: int | None = None,
) -> Texts | None:
    """What reads texts for a trainer: with the tokenizer in `source`, or in its own folder."""
    source = folder if source is None and present(folder / FILE) else source
    how: dict[str, Any] = {"max_length": max_length, "pack": pack, "whole": whole, "eos": eos}
    how["stride"] = stride
    if source is None:
        for name, given in how.items():
            if given:
                option = f"--{name.replace('_', '-')}" + (f" {given}" if given is not True else "")
                raise GraphgenError(f"{option} is for texts: give --tokenizer DIR")
        return None
    engine = trainer._engine
    classes = engine.labels.get(LABELS, LabelKind()).classes
    apart = bool(engine.loss.get("documents"))
    return Texts(source, trainer.inputs, classes, apart=apart, **how)


def _chunk(rows: Sequence[Array]) -> Chunk:
    if rows[0].ndim == 0:
        return Chunk(np.stack(rows))
    starts = np.cumsum([0, *map(len, rows)], dtype=np.int64)
    return Chunk(np.concatenate(rows), starts)


def _preferences(table: Table, which: str) -> GraphgenError:
    """What is said of rows for DPO, KTO or a model of rewards."""
    return GraphgenError(
        f"{table.path} has {in_words(table.names)}, texts {which}, and each would be learned as "
        "if it was wanted: write a loss of your own, as in docs/training.md, or give only what is "
        "wanted, as `prompt` and `completion`"
    )


def _text(where: str, name: str, row: Mapping[str, Any]) -> str:
    """A text in a row, "" if there is none."""
    text = row[name]
    if text is not None and not isinstance(text, str):
        raise GraphgenError(f"{where}: {name!r} is {text!r:.40}; give a text")
    return text or ""


def _shifted(tokens: Tokens | None) -> Sample | None:
    """Each token predicts the next, if that counts."""
    if tokens is None or len(tokens.ids) < 2:
        return None
    labels = np.where(tokens.counted, tokens.ids, IGNORED)[1:].astype(np.int32)
    return Sample(tokens.ids[:-1], labels, tokens.types[:-1], cut=tokens.cut)
