"""How often two folders are right on rows of which the answer is known: labels, or texts."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np

from graphgen.batch import Stage
from graphgen.errors import GraphgenError
from graphgen.files import parse_json, regular
from graphgen.generation import Generator
from graphgen.generation.decoder import task_of
from graphgen.models.published.folder import context
from graphgen.models.published.tokenizer import encoded
from graphgen.operands import Array

_ROWS = 8  # at a time
_LABELED, _ANSWERED = {"text", "label"}, {"prompt", "answer"}


@dataclass(frozen=True)
class Scores:
    """Two folders on the same rows; of answers, also the perplexity of their tokens."""

    kind: Literal["labels", "answers"]
    before: float  # share of rows that the first folder has right
    after: float
    gained: int  # rows that only the second has right
    lost: int  # rows that only the first has right
    rows: int
    perplexity_before: float | None = None
    perplexity_after: float | None = None

    def __str__(self) -> str:
        more = ""
        if self.perplexity_before is not None and self.perplexity_after is not None:
            more = f"; perplexity of answers {self.perplexity_before:.4f} before, "
            more += f"{self.perplexity_after:.4f} after"
        what = "labels" if self.kind == "labels" else "whole answers"
        return (
            f"right {what} {self.before:.1%} before, {self.after:.1%} after, of {self.rows:,} "
            f"rows: {self.lost:,} lost, {self.gained:,} gained{more}"
        )


def scores(before: Path, after: Path, rows: Path, *, threads: int | None = None) -> Scores:
    """Run the rows of a file of JSON lines on two folders, on the CPU.

    Rows have `text` and `label`, a label's name or number, for folders that classify texts; or
    `prompt` and `answer`, for decoders. An answer is right if each of its tokens is the most likely
    one behind the prompt and the tokens before it: then greedy decoding gives it.
    Raises GraphgenError for rows of another form, and folders that do not fit them.
    """
    read = [*_read(rows)]
    kind: Any = "labels" if {*read[0][1]} >= _LABELED else "answers"
    judge = _labels if kind == "labels" else _answers
    found = [judge(folder, read, threads or 1) for folder in (before, after)]
    right, losses = zip(*found, strict=True)
    first, second = right
    perplexities = [None if loss is None else float(np.exp(loss)) for loss in losses]
    shares = float(first.mean()), float(second.mean())
    apart = int((second & ~first).sum()), int((first & ~second).sum())
    return Scores(kind, *shares, *apart, len(read), *perplexities)


def _read(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each row, and where it stands."""
    wanted: set[str] | None = None
    try:
        lines = regular(file).read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise GraphgenError(f"compare: {file} cannot be read: {error}; give JSON lines") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{file}, line {number}"
        try:
            row = parse_json(line)
        except (ValueError, RecursionError) as error:
            raise GraphgenError(f"{where} is not JSON: {error}; give one object a line") from error
        keys = {*row} if isinstance(row, dict) else set[str]()
        wanted = wanted or next((form for form in (_LABELED, _ANSWERED) if form <= keys), None)
        texts = [row[name] for name in (wanted or ()) if name != "label" and name in keys]
        if wanted is None or not wanted <= keys or not all(isinstance(t, str) for t in texts):
            form = " and ".join(sorted(wanted or (), reverse=True))
            form = form or "text and label, or prompt and answer"
            raise GraphgenError(f"{where}: a row has {form}, which are texts; give these")
        yield where, row
    if wanted is None:
        raise GraphgenError(f"compare: {file} has no rows; give at least one")


def _labels(
    folder: Path, rows: Sequence[tuple[str, dict[str, Any]]], threads: int
) -> tuple[Array, None]:
    """Whether the folder's label of each row is the row's."""
    stage = Stage(
        folder, task="text-classification", threads=threads, provider="cpu", truncate=True
    )
    results: Any = stage.run
    names = results.results.labels
    texts = [stage.look(row, where) for where, row in rows]
    wanted = []
    for where, row in rows:
        label = row["label"]
        if type(label) is int and 0 <= label < len(names):
            label = names[label]
        if label not in names:
            known = ", ".join(names[:8])
            raise GraphgenError(f"{where}: {folder} has no label {row['label']!r}; it has {known}")
        wanted.append(label)
    right = np.zeros(len(rows), bool)
    order = sorted(range(len(rows)), key=lambda i: texts[i].size)
    for at in range(0, len(order), _ROWS):
        chosen = order[at : at + _ROWS]
        found = stage.run([texts[i] for i in chosen], [None] * len(chosen))
        right[chosen] = [label == wanted[i] for i, (label, _) in zip(chosen, found, strict=True)]
    return right, None


def _answers(
    folder: Path, rows: Sequence[tuple[str, dict[str, Any]]], threads: int
) -> tuple[Array, float]:
    """Whether the most likely tokens are those of each answer, and the mean -log p of a token."""
    if task_of(folder) != "text-generation":
        raise GraphgenError(f"compare: {folder} is not a decoder, which prompt and answer need")
    generator = Generator(folder, threads=threads, provider="cpu")
    limit, decoder = context(folder), generator.decoder
    split = []
    for where, row in rows:
        make = partial(encoded, where, generator.tokenizer)
        prompt, whole = make(row["prompt"]).ids, make(row["prompt"] + row["answer"]).ids
        begin = next(
            (i for i, (a, b) in enumerate(zip(prompt, whole, strict=False)) if a != b), None
        )
        begin = min(len(prompt), len(whole)) if begin is None else begin
        if not 0 < begin < len(whole) or len(whole) > (limit or len(whole)):
            problem = f"a prompt of {begin} tokens and an answer of {len(whole) - begin}"
            raise GraphgenError(f"{where}: {problem}; both need some, and {limit or 'any'} fit")
        split.append((whole[:begin], whole[begin:]))
    right, lost, count = np.ones(len(rows), bool), 0.0, 0
    for chosen in _together(split, limit):
        answers = [split[i][1] for i in chosen]
        longest = max(map(len, answers))
        logits = decoder.start([split[i][0] for i in chosen], longest)
        for step in range(longest):
            scaled = logits.astype(np.float64)
            scaled -= scaled.max(axis=-1, keepdims=True)
            log_p = scaled - np.log(np.exp(scaled).sum(axis=-1, keepdims=True))
            for r, (i, answer) in enumerate(zip(chosen, answers, strict=True)):
                if step < len(answer):
                    lost, count = lost - log_p[r, answer[step]], count + 1
                    right[i] &= log_p[r].argmax() == answer[step]
            if step + 1 < longest:
                given = [answer[min(step, len(answer) - 1)] for answer in answers]
                logits = decoder.step(np.array(given))
    return right, lost / count


def _together(split: Sequence[tuple[list[int], list[int]]], limit: int | None) -> list[list[int]]:
    """The numbers of rows that are read at once, prompts of similar length.

    All go on to the end of the longest answer, for which each prompt has to leave places.
    """
    found, longest = list[list[int]](), 0
    for i in sorted(range(len(split)), key=lambda i: len(split[i][0])):
        prompt, answer = map(len, split[i])
        longest = max(longest, answer)  # the prompt is the longest so far
        if not found or len(found[-1]) == _ROWS or prompt + longest > (limit or prompt + longest):
            found.append([])
            longest = answer
        found[-1].append(i)
    return found
