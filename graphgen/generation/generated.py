"""What a generator gives for prompts, step by step: greedy, drawn, by guesses or by beams."""

import itertools
import math
import time
from collections import deque
from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from graphgen.display import fields, on_screen
from graphgen.errors import GraphgenError, user_line, warn
from graphgen.export.by_row import Chosen, numbers_of
from graphgen.generation.beams import Beams
from graphgen.generation.config import longrope_length
from graphgen.generation.encoder_decoders import EncoderDecoder
from graphgen.generation.grammar import Grammatical
from graphgen.generation.options import Options
from graphgen.generation.prompts import Prompts, read_prompts, says
from graphgen.generation.sampling import draw, log_softmax, processed
from graphgen.generation.speculation import GUESSES, Draft, Lookup, Speculation
from graphgen.generation.speech import Ears, first_tokens, listed_sounds, timestamps_of
from graphgen.generation.timestamps import STEP, Segment, Timestamps
from graphgen.models.published.folder import encoded
from graphgen.operands import Array

if TYPE_CHECKING:
    from graphgen.generation import Generator


class Generation:
    """An iterator over steps: each is a list of every row's new token, None if the row has ended.

    `tokens` holds those so far, a list for each row; `texts()` gives their text. A beam search
    gives its steps when it is done. `prefill` and `decode` are numbers of tokens and seconds;
    `shared` tokens of the prompts were not read, because the cache had them. `segments` are, for
    each sound that was heard with timestamps, its parts.
    """

    def __init__(
        self,
        generator: "Generator",
        prompts: Prompts,
        options: Options,
        adapter: Chosen = None,
        *,
        window: "Window | None" = None,
    ) -> None:
        self._generator, self._decoder, self.options = generator, generator.decoder, options
        self._then = time.perf_counter()
        self._strings = [s for s in options.stop if isinstance(s, str)]
        self._ends = {*options.eos, *(s for s in options.stop if isinstance(s, int))}
        if self._strings:
            self._generator.tokenizer  # noqa: B018  # an error comes before anything runs
        vocabulary = self._decoder.vocabulary or options.vocabulary
        options.fit(vocabulary)
        encoder = isinstance(self._decoder, EncoderDecoder)  # whose positions are its own
        self.segments: list[list[Segment]] = []
        self._sources: Sequence[Any] = []
        self._marks: Timestamps | None = None
        if window is not None:
            self._sources, self._marks = window.features, window.marks
            self.prompts = self._begin = window.begin
        elif generator.ears is not None:
            sounds = listed_sounds(prompts)
            self._chosen = numbers_of("generate", generator.adapters, adapter, len(sounds))
            self._hear(sounds, generator.ears)
        else:
            self.prompts = read_prompts(
                prompts,
                lambda text: encoded("generate", generator.tokenizer, text).ids,
                generator.messages,
                vocabulary=vocabulary,
                context=options.context,
                room=0 if encoder else 1,
            )
            self._sources = self.prompts
            self._begin = list(map(list, self.prompts))
            if options.language or options.translate or options.timestamps:
                raise GraphgenError(
                    "generate: language, translate and timestamps are for models of sound; leave "
                    f"them out{user_line()}"
                )
            if isinstance(self._decoder, EncoderDecoder):
                self._begin = [[self._first()] for _ in self.prompts]
        self._chosen = numbers_of("generate", generator.adapters, adapter, len(self.prompts))
        longest = max(map(len, self._begin))
        most = options.max_new_tokens or (options.max_length or longest + 64) - longest
        if most < 1:
            raise GraphgenError(
                f"generate: max_length is {options.max_length}, and a row begins with {longest} "
                f"tokens; give max_new_tokens{user_line()}"
            )
        room = most if options.context is None else options.context - longest
        self._most = min(most, room)
        length = longrope_length(generator.folder)
        grows = length is not None and longest + self._most > length
        self._bend = length if grows else None
        if length is not None and longest <= length and grows:
            warn(
                f"generate: beyond {length:,} tokens longrope turns the whole text by other "
                "factors, but the cache keeps the first ones: from there on, give the text to a "
                "new call"
            )
        self.shared = 0
        self.prefill, self.decode = (sum(map(len, self.prompts)), 0.0), (0, 0.0)
        self._copies = options.num_return_sequences
        self.prompts, self._begin = (
            [row for row in rows for _ in range(self._copies)]
            for rows in (self.prompts, self._begin)
        )
        self.tokens: list[list[int]] = [[] for _ in self.prompts]
        rows = range(len(self.prompts))
        self._random = [np.random.default_rng([options.seed, row]) for row in rows]
        self._grammar: Grammatical | None = None
        if options.grammar is not None:
            self._grammar = Grammatical(options.grammar, generator.tokenizer, options.eos)
        self.speculation: Speculation | None = None
        if self._marks is not None and window is None:
            self._steps = self._heard()
        elif options.beams > 1:
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

    @on_screen
    def __repr__(self) -> Iterator[str]:
        made = sum(map(len, self.tokens))
        yield f"Generation, rows: {len(self.prompts):,}, at most {self._most:,} new tokens each"
        (read, prefill), (_, decode) = self.prefill, self.decode
        yield from fields(
            prompts=f"{read:,} tokens in {prefill:.3g} s",
            tokens=f"{made:,} so far in {decode:.3g} s",
            options=repr(self.options),
        )

    def __iter__(self) -> "Generation":
        return self

    def __next__(self) -> list[int | None]:
        return next(self._steps)

    def texts(self) -> list[str]:
        """The text of each row so far, up to a string that it stops at."""
        return [_before(text, self._strings) for text in self.read(self.tokens)]

    def read(self, rows: Sequence[Sequence[int]]) -> list[str]:
        """The texts of any tokens, without timestamps and special tokens."""
        first = self._marks.first if self._marks else math.inf
        return self._generator.texts([[token for token in row if token < first] for row in rows])

    def _first(self) -> int:
        """The token that a decoder behind an encoder begins with."""
        if self.options.begin is None:
            raise GraphgenError("generate: the folder names no decoder_start_token_id")
        return self.options.begin

    def _hear(self, sounds: Sequence[Any], ears: Ears) -> None:
        """Read sounds; `prompts` are then the tokens that answers begin with."""
        folder, decoder = self._generator.folder, self._decoder
        assert folder is not None and isinstance(decoder, EncoderDecoder)
        begin = self._first()
        if not sounds:
            raise GraphgenError(f"generate: there is no sound; give at least one{user_line()}")
        self._features = [ears(sound, f"generate: sound {n}") for n, sound in enumerate(sounds)]
        self._sources = [ears.window(x, 0) for x in self._features]
        if self.options.timestamps or any(x.shape[1] > ears.frames for x in self._features):
            self._marks = timestamps_of(folder, self.options.eos, decoder.vocabulary)
            self.segments = [[] for _ in sounds]
            given = {
                "a grammar": self.options.grammar,
                "strings to stop at": self._strings,
                "several answers": self.options.num_return_sequences > 1,
            }
            if named := [name for name, value in given.items() if value]:
                raise GraphgenError(
                    f"generate: {named[0]} with timestamps, which sounds longer than "
                    f"{ears.samples // ears.rate} seconds are read with, too: leave one "
                    f"out{user_line()}"
                )

        def detect(languages: Sequence[int]) -> list[int]:
            decoder.begin, decoder.user = [[begin]], self
            scores = decoder.start(self._sources, 1, 1, self._chosen)[:, languages]
            return [languages[best] for best in scores.argmax(-1)]

        how: dict[str, Any] = {"language": self.options.language, "detect": detect}
        how |= {"translate": self.options.translate, "timestamps": self._marks is not None}
        rows = first_tokens(folder, begin, **how)
        self.prompts = self._begin = [rows[n % len(rows)] for n in range(len(sounds))]

    def _heard(self) -> Iterator[list[int | None]]:
        """The tokens of sounds, window by window, each when it is done.

        A window begins where the last whole part of the one before ended. Those of all sounds that
        still go on are read together.
        """
        ears, marks = self._generator.ears, self._marks
        assert ears is not None and marks is not None
        names = [None, *self._generator.adapters]
        at, frames = [0 for _ in self.prompts], [x.shape[1] for x in self._features]
        while on := [row for row, size in enumerate(frames) if at[row] < size]:
            features = [ears.window(self._features[row], at[row]) for row in on]
            window = Window(features, [self._begin[row] for row in on], marks)
            options, left = replace(self.options, timestamps=False), self.options.max_time
            if left is not None:
                left = max(0.0, left - (time.perf_counter() - self._then))
                options = replace(options, max_time=left)
            chosen = [names[self._chosen[row]] for row in on] if len(names) > 1 else None
            found = Generation(self._generator, [], options, chosen, window=window)
            found._random = [self._random[row] for row in on]
            list(found)
            new: list[list[int]] = [[] for _ in self.prompts]
            for row, tokens in zip(on, found.tokens, strict=True):
                tokens = tokens[: len(tokens) - (tokens[-1] in self._ends)]
                seconds, step = at[row] * ears.seconds, STEP * ears.seconds
                parts, taken = marks.split(tokens, min(frames[row] - at[row], ears.frames))
                for begin, end, part in parts:
                    segment = Segment(seconds + begin * step, seconds + end * step, part)
                    self.segments[row].append(segment)
                    new[row] += part
                at[row] += taken
            self.prefill = self.prefill[0], self.prefill[1] + found.prefill[1]
            self.decode = self.decode[0] + found.decode[0], self.decode[1] + found.decode[1]
            for now in itertools.zip_longest(*new):
                for said, token in zip(self.tokens, now, strict=True):
                    said += [] if token is None else [token]
                yield [*now]
            if self._late():
                return

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
        reason = self._decoder.unchecked(len(self.prompts))
        if not reason and self._bend and len(self.prompts) > 1:
            reason = f"beyond {self._bend:,} tokens longrope turns all rows by the longest: give "
            reason += "one prompt at a time"
        if not reason and draft is not None:
            reason = draft.decoder.apart(len(self.prompts))
        if reason and asked:
            raise GraphgenError(f"generate: no guesses can be checked: {reason}{user_line()}")
        return not reason

    def _speculation(self) -> Speculation:
        """Guesses by a draft model, or by prompt lookup."""
        draft, most = self._generator.draft, self.options.num_speculative_tokens or GUESSES
        if draft is None:
            guesser: Lookup | Draft = Lookup(len(self.prompts))
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

    def _late(self) -> bool:
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
        self.prefill = (self.prefill[0], time.perf_counter() - then)
        self.shared = self._decoder.shared
        return logits

    def _check_use(self) -> None:
        """Raise GraphgenError if the decoder now holds the rows of another call."""
        draft = self._generator.draft if self.speculation else None
        decoders = [self._decoder, *([draft.decoder] if draft else [])]
        if any(decoder.user is not self for decoder in decoders):
            raise GraphgenError(
                "generate: another call used this Generator before all tokens were read; read them "
                f"first, or open a second Generator{user_line()}"
            )

    def _count(self, tokens: int, then: float) -> None:
        count, seconds = self.decode
        self.decode = (count + tokens, seconds + time.perf_counter() - then)

    def _likeliest(self) -> Iterator[list[int | None]]:
        """The likeliest token of each row, or a drawn one."""
        logits = self._start()
        ended = [False for _ in self.prompts]
        live = [*range(len(self.prompts))]  # the rows of the decoder
        for step in range(self._most):
            then = time.perf_counter()
            before = [self._begin[row] for row in live], [self.tokens[row] for row in live]
            scores = zip(self._processed(logits, *before, live), live, strict=True)
            found = [self._taken(own, self._random[row]) for own, row in scores]
            new: list[int | None] = [None for _ in self.prompts]
            for row, own in zip(live, found, strict=True):
                new[row] = None if ended[row] else own
            for row, token in enumerate(new):
                if token is not None:
                    self.tokens[row].append(token)
                    ended[row] = self._ends_with(self.tokens[row])
            self._count(sum(token is not None for token in new) if step else 0, then)
            yield new
            if all(ended) or step + 1 == self._most or self._late():
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
        logits, rows = self._start(), range(len(self.prompts))
        self.speculation = speculation = self._speculation()
        found, guesses = {row: logits[row : row + 1] for row in rows}, dict[int, list[int]]()
        made: list[list[int]] = [[] for _ in rows]
        ahead: list[deque[int]] = [deque() for _ in rows]
        ended, live = [False for _ in rows], [*rows]  # the rows of the decoder
        for step in range(self._most):
            then = time.perf_counter()
            behind = [row for row in rows if not ended[row] and not ahead[row]]
            if step and behind:
                given = {row: [*self._begin[row], *made[row]] for row in behind}
                room = self._most - max(len(made[row]) for row in behind)
                [longest, *_] = sorted(map(len, given.values()), reverse=True)
                if self._bend and longest <= self._bend:  # all that is read together turns alike
                    room = min(room, self._bend - longest + 1)
                guesses = speculation.guesses(given, room)
                fed = [[made[row][-1], *guesses.get(row, ())] for row in behind]
                checked = time.perf_counter()
                logits_of = self._decoder.extend([live.index(row) for row in behind], fed)
                speculation.took(time.perf_counter() - checked, guesses, len(live))
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
                    self._decoder.forget(live.index(row), len(guessed) - right)
                    speculation.learn(row, guessed, right, new)
            next_ = [ahead[row].popleft() if ahead[row] else None for row in rows]
            for row, token in enumerate(next_):
                self.tokens[row] += [] if token is None else [token]
            self._count(sum(token is not None for token in next_) if step else 0, then)
            yield next_
            if all(end and not more for end, more in zip(ended, ahead, strict=True)):
                return
            if self._late():
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
        rows = len(self.prompts) // self._copies
        candidates = max(2, 1 + len(self._ends)) * beams
        how: dict[str, Any] = {"most": self._most, "ends": self._ends_with}
        search = Beams(rows, self.options, **how, candidates=candidates)
        begin = [tokens for tokens in self._begin[:: self._copies] for _ in range(beams)]
        for step in range(self._most):
            then = time.perf_counter()
            flat = [tokens for row in search.sequences for tokens in row]
            scores = self._processed(log_softmax(logits), begin, flat, range(len(flat)))
            source = search.advance(scores, last=self._late())
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
            bool(strings) and says(tokens, strings, self._generator.texts)
        )

    def _processed(
        self, scores: Array, begin: list[list[int]], new: list[list[int]], rows: Sequence[int]
    ) -> Array:
        step = len(new[0])
        allowed = None
        if (grammar := self._grammar) is not None:
            allowed = [grammar(row, tokens) for row, tokens in zip(rows, new, strict=True)]
        whole = ([*old, *more] for old, more in zip(begin, new, strict=True))
        options, alone = self.options, max(map(len, begin)) == 1
        forced = options.forced_bos if step == 0 and alone else ()
        if not forced and step + 1 == self._most:
            forced = options.forced_eos
        free = int(alone and bool(options.forced_bos))
        how: dict[str, Any] = {"step": step, "free": free, "forced": forced, "allowed": allowed}
        if (marks := self._marks) is not None:
            how["marks"] = lambda row, own: marks.choose(new[row], own)
        return processed(scores, whole, options, **how)


class Window(NamedTuple):
    """A window of each sound, (bands, frames), the tokens that rows begin with, and timestamps."""

    features: list[Array]
    begin: list[list[int]]
    marks: Timestamps


def _before(text: str, strings: Sequence[str]) -> str:
    found = [text.index(string) for string in strings if string in text]
    return text[: min(found, default=len(text))]
