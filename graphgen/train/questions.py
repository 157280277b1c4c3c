"""Questions whose answers stand in a context: where they begin and end, in tokens."""

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np

from graphgen.errors import GraphgenError
from graphgen.models.published.conversation import nested
from graphgen.models.published.tokenizer import encoded
from graphgen.train.samples import Sample
from graphgen.train.tokens import Tokenizer

ANSWERS, PLACES = "answers", ("start_positions", "end_positions")
STRIDE = 128
"""The tokens that two windows of a context share, as in transformers' examples."""


class Question(NamedTuple):
    """A question, its context, and where the first answer begins and ends there, if it has one."""

    where: str
    question: str
    context: str
    answer: tuple[int, int] | None

    @classmethod
    def of(cls, where: str, question: Any, context: Any, answers: Any) -> "Question":
        """A row as SQuAD has it: `answers` are {"text": [...], "answer_start": [...]}.

        Raises GraphgenError for another, and for an answer that does not stand where it says.
        """
        for name, text in (("question", question), ("context", context)):
            if text is not None and not isinstance(text, str):
                raise GraphgenError(f"{where}: {name!r} is {text!r:.40}; give a text")
        given = nested(answers) if isinstance(answers, str) else answers
        given = given if isinstance(given, dict) else {}
        texts, starts = given.get("text"), given.get("answer_start")
        right = isinstance(texts, list) and isinstance(starts, list) and len(texts) == len(starts)
        if not right or not all(isinstance(x, str) and x for x in texts or ()):
            raise GraphgenError(
                f"{where}: 'answers' is {answers!r:.60}; give {{\"text\": [...], "
                '"answer_start": [...]}, as in SQuAD: texts, and the character where each begins; '
                "empty lists for a question without an answer"
            )
        question, context, answer = question or "", context or "", None
        for text, start in zip(texts or (), starts or (), strict=True):
            if type(start) is not int or start < 0 or not context.startswith(text, start):
                raise GraphgenError(
                    f"{where}: the answer {text!r:.40} does not stand at character {start!r:.20} "
                    "of the context: answer_start counts characters from 0"
                )
            answer = answer or (start, start + len(text))  # more are for evaluation
        return cls(where, question.lstrip(), context, answer)


def windows(
    tokenizer: Tokenizer, rows: Iterable[Question], limit: int | None, stride: int
) -> Iterator[list[tuple[Sample, bool]] | None]:
    """The samples of each row, and whether they have its answer; None for an empty row.

    A context that is longer than `limit` leaves becomes several, which share `stride` tokens. The
    labels are the first and the last token of the answer, or twice the first token of the text,
    [CLS], where it has none, or one that is not whole in the window.
    """
    cutting = tokenizer.windows(limit, stride)
    firsts = [tokenizer.token(name) for name in ("cls_token", "bos_token")]
    for row in rows:
        if not row.question or not row.context:
            yield None
            continue
        room, used = stride + 1, cutting
        if limit is not None:
            alone = encoded(row.where, tokenizer.whole, row.question, special=False).ids
            room = limit - len(alone) - tokenizer.whole.num_special_tokens_to_add(True)
            used = cutting if room > stride else tokenizer.whole
        whole, found = encoded(row.where, used, row.question, row.context), []
        if limit is not None and room <= stride and len(whole.ids) > limit:
            raise GraphgenError(
                f"{row.where}: within {limit} tokens the question leaves {max(room, 0)} for the "
                f"context, and windows share {stride}: give a smaller --stride, or a larger "
                "--max-length"
            )
        for one in (whole, *whole.overflowing):
            ids, types = np.array(one.ids, np.int32), np.array(one.type_ids, np.int8)
            first = next((one.ids.index(token) for token in firsts if token in one.ids), 0)
            places = _places(one, row.answer)
            labels = np.array(places or (first, first), np.int64)
            found.append((Sample(ids, labels, types), places is not None))
        yield found


def _places(one: Any, answer: tuple[int, int] | None) -> tuple[int, int] | None:
    """The first and last token of an answer; None if a window does not have all of it."""
    own = [i for i, which in enumerate(one.sequence_ids) if which == 1]
    if answer is None or not own:
        return None
    start, end = answer
    if one.offsets[own[0]][0] > start or one.offsets[own[-1]][1] < end:
        return None
    first = max(i for i in own if one.offsets[i][0] <= start)
    return first, min(i for i in own if one.offsets[i][1] >= end)
