"""What a generator gives for prompts and sounds, step by step."""

import itertools
import math
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from graphgen.display import fields, on_screen
from graphgen.errors import GraphgenError, user_line, warn
from graphgen.export.by_row import Chosen, numbers_of
from graphgen.generation.config import longrope_length
from graphgen.generation.continuation import Continuation, Effort
from graphgen.generation.encoder_decoders import EncoderDecoder
from graphgen.generation.options import Options
from graphgen.generation.prompts import Prompts, read_prompts
from graphgen.generation.speculation import Speculation
from graphgen.generation.speech import Ears, first_tokens, listed_sounds, timestamps_of
from graphgen.generation.timestamps import STEP, Segment, Timestamps
from graphgen.models.published.tokenizer import encoded

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
        self, generator: "Generator", prompts: Prompts, options: Options, adapter: Chosen = None
    ) -> None:
        self._generator, self._decoder, self.options = generator, generator.decoder, options
        self._then = time.perf_counter()
        if options.strings:
            self._generator.tokenizer  # noqa: B018  # an error comes before anything runs
        vocabulary = self._decoder.vocabulary or options.vocabulary
        options.fit(vocabulary)
        encoder = isinstance(self._decoder, EncoderDecoder)  # whose positions are its own
        self.segments: list[list[Segment]] = []
        sources: Sequence[Any]
        self._marks: Timestamps | None = None
        self._steps: Iterator[list[int | None]]
        if generator.ears is not None:
            sounds = listed_sounds(prompts)
            self._chosen = numbers_of("generate", generator.adapters, adapter, len(sounds))
            sources, self._marks = self._hear(sounds, generator.ears)
        else:
            sources = self.prompts = read_prompts(
                prompts,
                lambda text: encoded("generate", generator.tokenizer, text).ids,
                generator.messages,
                vocabulary=vocabulary,
                context=options.context,
                room=0 if encoder else 1,
            )
            if options.language or options.translate or options.timestamps:
                raise GraphgenError(
                    "generate: language, translate and timestamps are for models of sound; leave "
                    f"them out{user_line()}"
                )
            self._chosen = numbers_of("generate", generator.adapters, adapter, len(sources))
            self._begin = [[self._first()] if encoder else [*row] for row in self.prompts]
        longest = max(map(len, self._begin))
        counted = longest if generator.ears is None else 0  # of a sound, the new ones
        most = options.max_new_tokens or (options.max_length or counted + 64) - counted
        if most < 1:
            raise GraphgenError(
                f"generate: max_length is {options.max_length}, and a row begins with {counted} "
                f"tokens; give max_new_tokens{user_line()}"
            )
        self._most = most if options.context is None else min(most, options.context - longest)
        length = longrope_length(generator.folder)
        bend = length if length is not None and longest + self._most > length else None
        if bend is not None and longest <= bend:
            warn(
                f"generate: beyond {bend:,} tokens longrope turns the whole text by other "
                "factors, but the cache keeps the first ones: from there on, give the text to a "
                "new call"
            )
        self._effort = Effort((sum(map(len, self.prompts)), 0.0))
        copies = options.num_return_sequences
        self.prompts, self._begin = (
            [row for row in rows for _ in range(copies)] for rows in (self.prompts, self._begin)
        )
        rows = range(len(self._begin))
        self._random = [np.random.default_rng([options.seed, row]) for row in rows]
        self.tokens: list[list[int]] = [[] for _ in rows]
        if self._marks is not None:
            self._steps = self._heard(self._marks)
        else:
            on = self._continued(sources, rows, bend)
            self.tokens, self._steps = on.tokens, iter(on)

    @property
    def prefill(self) -> tuple[int, float]:
        """The tokens of the prompts, and the seconds that reading them took."""
        return self._effort.prefill

    @property
    def decode(self) -> tuple[int, float]:
        """The tokens behind the first of each row, and the seconds that they took."""
        return self._effort.decode

    @property
    def shared(self) -> int:
        """How many tokens of the prompts were not read, because the cache had them."""
        return self._effort.shared

    @property
    def speculation(self) -> Speculation | None:
        """How many guesses were checked, and were right, if some were to be."""
        return self._effort.speculation

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

    def settled(self) -> str:
        """The text of the only row so far, without an end that further tokens may change.

        That are the bytes of a character, what may begin a string in `stop`, and spaces that are
        removed before marks.
        """
        [tokens], generator = self.tokens, self._generator
        size = len(tokens)
        while size and tokens[size - 1] in generator.byte_tokens:
            size -= 1
        [text] = self._texts([tokens[:size]])
        begun = (string[:n] for string in self.options.strings for n in range(len(string)))
        held = max((len(part) for part in begun if text.endswith(part)), default=0)
        return text[: max(0, len(text) - max(held, generator.unsettled))]

    def texts(self) -> list[str]:
        """The text of each row so far, up to a string that it stops at."""
        return self._texts(self.tokens)

    def _texts(self, rows: Sequence[Sequence[int]]) -> list[str]:
        texts, strings = self.read(rows), self.options.strings
        if not strings:
            return texts
        whole = self._generator.texts(rows, special=True)
        found = ([string for string in strings if string in spelled] for spelled in whole)
        return [*map(_before, texts, found)]

    def read(self, rows: Sequence[Sequence[int]]) -> list[str]:
        """The texts of any tokens, without timestamps and special tokens."""
        first = self._marks.first if self._marks else math.inf
        return self._generator.texts([[token for token in row if token < first] for row in rows])

    def _first(self) -> int:
        """The token that a decoder behind an encoder begins with."""
        if self.options.begin is None:
            raise GraphgenError("generate: the folder names no decoder_start_token_id")
        return self.options.begin

    def _hear(self, sounds: Sequence[Any], ears: Ears) -> tuple[list[Any], Timestamps | None]:
        """The first windows of sounds, and what their timestamps are if there are to be some.

        `prompts` are then the tokens that answers begin with.
        """
        folder, decoder = self._generator.folder, self._decoder
        assert folder is not None and isinstance(decoder, EncoderDecoder)
        begin = self._first()
        if not sounds:
            raise GraphgenError(f"generate: there is no sound; give at least one{user_line()}")
        self._features = [ears(sound, f"generate: sound {n}") for n, sound in enumerate(sounds)]
        marks: Timestamps | None = None
        windows: list[Any] = [ears.window(x, 0) for x in self._features]
        if self.options.timestamps or any(x.shape[1] > ears.frames for x in self._features):
            marks = timestamps_of(folder, self.options.eos, decoder.vocabulary)
            self.segments = [[] for _ in sounds]
            given = {
                "a grammar": self.options.grammar,
                "strings to stop at": self.options.strings,
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
            scores = decoder.start(windows, 1, 1, self._chosen)[:, languages]
            return [languages[best] for best in scores.argmax(-1)]

        how: dict[str, Any] = {"language": self.options.language, "detect": detect}
        how |= {"translate": self.options.translate, "timestamps": marks is not None}
        rows = first_tokens(folder, begin, **how)
        self.prompts = self._begin = [rows[n % len(rows)] for n in range(len(sounds))]
        return windows, marks

    def _heard(self, marks: Timestamps) -> Iterator[list[int | None]]:
        """The tokens of sounds, window by window, each when it is done.

        A window begins where the last whole part of the one before ended. Those of all sounds that
        still go on are read together.
        """
        ears = self._generator.ears
        assert ears is not None
        at, frames = [0 for _ in self.prompts], [x.shape[1] for x in self._features]
        while on := [row for row, size in enumerate(frames) if at[row] < size]:
            found = self._continued([ears.window(self._features[row], at[row]) for row in on], on)
            for _ in found:
                pass
            new: list[list[int]] = [[] for _ in self.prompts]
            for row, tokens in zip(on, found.tokens, strict=True):
                tokens = tokens[: len(tokens) - (tokens[-1] in self.options.ends)]
                seconds, step = at[row] * ears.seconds, STEP * ears.seconds
                parts, taken = marks.split(tokens, min(frames[row] - at[row], ears.frames))
                for begin, end, part in parts:
                    segment = Segment(seconds + begin * step, seconds + end * step, part)
                    self.segments[row].append(segment)
                    new[row] += part
                at[row] += taken
            for now in itertools.zip_longest(*new):
                for said, token in zip(self.tokens, now, strict=True):
                    said += [] if token is None else [token]
                yield [*now]
            if found.late():
                return

    def _continued(
        self, sources: Sequence[Any], rows: Sequence[int], bend: int | None = None
    ) -> Continuation:
        """How these rows go on from where they begin."""
        copies = self.options.num_return_sequences
        return Continuation(
            self._generator,
            self.options,
            [self._begin[row] for row in rows],
            sources,
            chosen=self._chosen[np.array(rows)[::copies] // copies],
            random=[self._random[row] for row in rows],
            most=self._most,
            effort=self._effort,
            since=self._then,
            bend=bend,
            marks=self._marks,
        )


def _before(text: str, strings: Sequence[str]) -> str:
    found = [text.index(string) for string in strings if string in text]
    return text[: min(found, default=len(text))]
