"""How rows of a decoder go on, step by step: greedy, drawn, by guesses or by beams."""

import itertools
import time
from collections import deque
from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from graphgen.errors import GraphgenError, user_line
from graphgen.generation.beams import Beams
from graphgen.generation.encoder_decoders import EncoderDecoder
from graphgen.generation.grammar import Grammatical
from graphgen.generation.options import Options
from graphgen.generation.prompts import says
from graphgen.generation.sampling import draw, log_softmax, processed
from graphgen.generation.speculation import GUESSES, Draft, Lookup, Speculation
from graphgen.generation.timestamps import Timestamps
from graphgen.operands import Array

if TYPE_CHECKING:
    from graphgen.generation import Generator


@dataclass
class Effort:
    """What tokens took: numbers of tokens and seconds, and guesses if there were some."""

    prefill: tuple[int, float]
    decode: tuple[int, float] = (0, 0.0)
    shared: int = 0
    speculation: Speculation | None = None


class Continuation:
    """An iterator over steps: each is a list of every row's new token, None if the row has ended.

    `begin` are the tokens that rows begin with, and `sources` what is read of each
    `num_return_sequences` rows. `chosen` are the numbers of their adapters and `random` what each
    row draws by. `most` new tokens fit; beyond `bend` of all tokens, longrope turns otherwise.
    Seconds count from `since` on.
    """

    def __init__(
        self,
        generator: "Generator",
        options: Options,
        begin: list[list[int]],
        sources: Sequence[Any],
        *,
        chosen: Array,
        random: Sequence[np.random.Generator],
        most: int,
        effort: Effort,
        since: float,
        bend: int | None = None,
        marks: Timestamps | None = None,
    ) -> None:
        self._generator, self._decoder, self.options = generator, generator.decoder, options
        self._begin, self._sources, self._chosen, self._random = begin, sources, chosen, random
        self._copies = copies = options.num_return_sequences
        self._read = self._known = begin  # what guesses are looked up in
        if isinstance(self._decoder, EncoderDecoder):
            hears = self._decoder.hears
            self._read = [[] if hears else [*sources[i // copies]] for i in range(len(begin))]
            self._known = [[*read, *row] for read, row in zip(self._read, begin, strict=True)]
        self._most, self._bend, self._marks, self._effort = most, bend, marks, effort
        self._then = since
        self._strings, self._ends = options.strings, options.ends
        self.tokens: list[list[int]] = [[] for _ in begin]
        self._grammar: Grammatical | None = None
        if options.grammar is not None:
            self._grammar = Grammatical(options.grammar, generator.tokenizer, options.eos)
        if options.beams > 1:
            if generator.draft is not None:
                raise GraphgenError(
                    f"generate: {options.beams} beams with a draft model: a beam search checks no "
                    f"guesses; give beams=1, or leave out draft{user_line()}"
                )
            self._steps = self._searched()
        else:
            self._steps = self._guessed() if self._speculates() else self._likeliest()
        if self._grammar is not None:
            self._steps = self._grammatical(self._steps, self._grammar)

    def __iter__(self) -> Iterator[list[int | None]]:
        return self._steps

    def _speculates(self) -> bool:
        """Whether tokens are guessed. Raises GraphgenError if they should be, and cannot."""
        options, draft = self.options, self._generator.draft
        asked = bool(options.speculate) or draft is not None
        if not asked and options.num_speculative_tokens is None:
            return False
        if options.speculate and draft is not None:
            raise GraphgenError(
                "generate: tokens are guessed by a draft model or by prompt lookup: leave out "
                f"draft or speculate{user_line()}"
            )
        reason = self._decoder.unchecked(len(self.tokens))
        if not reason and self._bend and len(self.tokens) > 1:
            reason = f"beyond {self._bend:,} tokens longrope turns all rows by the longest: give "
            reason += "one prompt at a time"
        if not reason and draft is not None:
            reason = draft.decoder.onward or draft.decoder.apart(len(self.tokens))
        if reason and asked:
            raise GraphgenError(f"generate: no guesses can be checked: {reason}{user_line()}")
        return not reason

    def _speculation(self) -> Speculation:
        """Guesses by a draft model, or by prompt lookup."""
        draft, most = self._generator.draft, self.options.num_speculative_tokens or GUESSES
        if draft is None:
            guesser: Lookup | Draft = Lookup(len(self.tokens))
            return Speculation(guesser, most, together=self._decoder.together)
        context, copies = draft.context, dict[int, np.random.Generator]()
        longest = max(map(len, self._begin))
        if context is not None and longest >= context:
            raise GraphgenError(
                f"generate: the draft model reads {context} tokens and a prompt has {longest}; "
                f"give a shorter one, or leave out draft{user_line()}"
            )

        def choose(row: int, logits: Array, ahead: int) -> int:
            if not ahead:
                copies[row] = deepcopy(self._random[row])
            return self._taken(logits[: self._decoder.vocabulary], copies[row])

        draft.decoder.user = self
        guesser = Draft(draft.decoder, self._begin, self._most, choose, context=context)
        return Speculation(guesser, most, together=self._decoder.together)

    def _taken(self, scores: Array, random: np.random.Generator) -> int:
        """The likeliest token, or a drawn one."""
        if self.options.temperature > 0:
            return draw(scores, self.options, random)
        return int(scores.argmax())

    def late(self) -> bool:
        """Whether the time is over that all rows may take."""
        limit = self.options.max_time
        return limit is not None and time.perf_counter() - self._then >= limit

    def _start(self) -> Array:
        then = time.perf_counter()
        self._decoder.user = self
        if isinstance(self._decoder, EncoderDecoder):
            self._decoder.begin = self._begin[:: self._copies]
        try:
            copies = max(self.options.beams, self._copies)
            how: tuple[Any, ...] = (self._most, copies, self._chosen)
            logits = self._decoder.start(self._sources, *how)
        except MemoryError as error:
            raise GraphgenError(
                f"generate: {error}, for {self._most} new tokens; give fewer max_new_tokens"
            ) from error
        read, seconds = self._effort.prefill
        self._effort.prefill = (read, seconds + time.perf_counter() - then)
        self._effort.shared = self._decoder.shared
        return logits

    def _check_use(self) -> None:
        """Raise GraphgenError if the decoder now holds the rows of another call."""
        draft = self._generator.draft if self._effort.speculation else None
        decoders = [self._decoder, *([draft.decoder] if draft else [])]
        if any(decoder.user is not self for decoder in decoders):
            raise GraphgenError(
                "generate: another call used this Generator before all tokens were read; read them "
                f"first, or open a second Generator{user_line()}"
            )

    def _count(self, tokens: int, then: float) -> None:
        count, seconds = self._effort.decode
        self._effort.decode = (count + tokens, seconds + time.perf_counter() - then)

    def _likeliest(self) -> Iterator[list[int | None]]:
        """The likeliest token of each row, or a drawn one."""
        logits = self._start()
        ended = [False for _ in self.tokens]
        live = [*range(len(self.tokens))]  # the rows of the decoder
        for step in range(self._most):
            then = time.perf_counter()
            before = [self._begin[row] for row in live], [self.tokens[row] for row in live]
            scores = zip(self._processed(logits, *before, live), live, strict=True)
            found = [self._taken(own, self._random[row]) for own, row in scores]
            new: list[int | None] = [None for _ in self.tokens]
            for row, own in zip(live, found, strict=True):
                new[row] = None if ended[row] else own
            for row, token in enumerate(new):
                if token is not None:
                    self.tokens[row].append(token)
                    ended[row] = self._ends_with(self.tokens[row])
            self._count(sum(token is not None for token in new) if step else 0, then)
            yield new
            if all(ended) or step + 1 == self._most or self.late():
                return
            self._check_use()
            then = time.perf_counter()
            on = [i for i, row in enumerate(live) if not ended[row]]
            if 2 * len(on) <= len(live):  # so all copies together stay smaller than the cache
                self._decoder.keep(np.array(on))
                live, found = [live[i] for i in on], [found[i] for i in on]
            logits = self._decoder.step(np.array(found))
            self._count(0, then)

    def _guessed(self) -> Iterator[list[int | None]]:
        """The same tokens, of which some are guessed and checked together.

        A row whose guesses were right is ahead of the others, and waits for them.
        """
        logits, rows = self._start(), range(len(self.tokens))
        self._effort.speculation = speculation = self._speculation()
        found, guesses = {row: logits[row : row + 1] for row in rows}, dict[int, list[int]]()
        made: list[list[int]] = [[] for _ in rows]
        ahead: list[deque[int]] = [deque() for _ in rows]
        ended, live = [False for _ in rows], [*rows]  # the rows of the decoder
        seconds = 0.0  # of a check, and of forgetting what was wrong
        for step in range(self._most):
            then = time.perf_counter()
            behind = [row for row in rows if not ended[row] and not ahead[row]]
            if step and behind:
                given = {row: [*self._known[row], *made[row]] for row in behind}
                room = self._most - max(len(made[row]) for row in behind)
                [longest, *_] = sorted(map(len, given.values()), reverse=True)
                if self._bend and longest <= self._bend:  # all that is read together turns alike
                    room = min(room, self._bend - longest + 1)
                guesses = speculation.guesses(given, room)
                fed = [[made[row][-1], *guesses.get(row, ())] for row in behind]
                began = time.perf_counter()
                logits_of = self._decoder.extend([live.index(row) for row in behind], fed)
                seconds = time.perf_counter() - began
                found = dict(zip(behind, logits_of, strict=True))
            for row in behind:
                guessed, before = guesses.get(row, []), len(made[row])
                for own, guess in itertools.zip_longest(found[row], guessed):
                    [scores] = self._processed(own[None], [self._begin[row]], [made[row]], [row])
                    made[row].append(self._taken(scores, self._random[row]))
                    ended[row] = self._ends_with(made[row])
                    if ended[row] or made[row][-1] != guess:
                        break
                new = made[row][before:]
                ahead[row].extend(new)
                if step:
                    right = sum(map(int.__eq__, guessed, new))
                    began = time.perf_counter()
                    self._decoder.forget(live.index(row), len(guessed) - right)
                    seconds += time.perf_counter() - began
                    speculation.learn(row, guessed, right, new)
            if step and behind:
                speculation.took(seconds, guesses, len(live))
            next_ = [ahead[row].popleft() if ahead[row] else None for row in rows]
            for row, token in enumerate(next_):
                self.tokens[row] += [] if token is None else [token]
            self._count(sum(token is not None for token in next_) if step else 0, then)
            yield next_
            if all(end and not more for end, more in zip(ended, ahead, strict=True)):
                return
            if self.late():
                return
            self._check_use()
            on = [i for i, row in enumerate(live) if not ended[row]]
            if on and 2 * len(on) <= len(live):
                self._decoder.keep(np.array(on))
                live = [live[i] for i in on]

    def _grammatical(
        self, steps: Iterator[list[int | None]], grammar: Grammatical
    ) -> Iterator[list[int | None]]:
        """These steps; then GraphgenError if a row had to end before its text was whole."""
        yield from steps
        for number, row in enumerate(self.tokens):
            if not grammar.accepts(number, row):
                raise GraphgenError(
                    f"generate: row {number} ended after {len(row)} tokens, and the grammar wants "
                    f"more; give more max_new_tokens, or a grammar of shorter texts{user_line()}"
                )

    def _searched(self) -> Iterator[list[int | None]]:
        """The best sequence of each row that a beam search finds."""
        best = self._search()
        for step in range(max(map(len, best))):
            new = [row[step] if step < len(row) else None for row in best]
            for row, token in zip(self.tokens, new, strict=True):
                row += [] if token is None else [token]
            yield new

    def _search(self) -> list[list[int]]:
        logits, beams = self._start(), self.options.beams
        rows = len(self.tokens) // self._copies
        candidates = max(2, 1 + len(self._ends)) * beams
        how: dict[str, Any] = {"most": self._most, "ends": self._ends_with}
        search = Beams(rows, self.options, **how, candidates=candidates)
        begin = [tokens for tokens in self._begin[:: self._copies] for _ in range(beams)]
        for step in range(self._most):
            then = time.perf_counter()
            flat = [tokens for row in search.sequences for tokens in row]
            scores = self._processed(log_softmax(logits), begin, flat, range(len(flat)))
            source = search.advance(scores, last=self.late())
            self._count(rows if step else 0, then)
            if source is None:
                break
            then = time.perf_counter()
            self._decoder.reorder(source)
            last = [tokens[-1] for row in search.sequences for tokens in row]
            logits = self._decoder.step(np.array(last))
            self._count(0, then)
        return search.best(self._copies)

    def _ends_with(self, tokens: list[int]) -> bool:
        strings = self._strings
        return tokens[-1] in self._ends or (
            bool(strings) and says(tokens, strings, partial(self._generator.texts, special=True))
        )

    def _processed(
        self, scores: Array, begin: list[list[int]], new: list[list[int]], rows: Sequence[int]
    ) -> Array:
        step = max(map(len, new))  # rows that have ended are shorter
        allowed = None
        if (grammar := self._grammar) is not None:
            allowed = [grammar(row, tokens) for row, tokens in zip(rows, new, strict=True)]
        whole = ([*old, *more] for old, more in zip(begin, new, strict=True))
        options, alone = self.options, max(map(len, self._begin)) == 1
        forced = options.forced_eos if step + 1 == self._most else ()
        if not forced and step == 0 and alone:
            forced = options.forced_bos
        free = int(alone and bool(options.forced_bos))
        how: dict[str, Any] = {"step": step, "free": free, "forced": forced, "allowed": allowed}
        beams = options.beams
        of = (row // beams * self._copies if beams > 1 else row for row in rows)
        how["sources"] = [self._read[row] for row in of]
        if (marks := self._marks) is not None:
            how["marks"] = lambda row, own: marks.choose(new[row], own)
        return processed(scores, whole, options, **how)
