"""Text from decoders, greedy, sampled or by beams: `for tokens in generate("folder", ["Hi"])`."""

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Unpack

import numpy as np

from graphgen.display import fields, on_screen
from graphgen.errors import GraphgenError, user_line, warn
from graphgen.export.by_row import Chosen, Given, numbers_of
from graphgen.generation.beams import Beams
from graphgen.generation.config import ignored, longrope_length
from graphgen.generation.decoder import Decoder, EncoderDecoder, open_decoder
from graphgen.generation.options import GenerationOptions, Options, read_options
from graphgen.generation.prompts import Prompts, read_prompts, read_tokenizer, says
from graphgen.generation.sampling import draw, log_softmax, processed
from graphgen.generation.speech import Ears, first_tokens, listed_sounds
from graphgen.graph import ModelLike
from graphgen.models.published.chat import Conversation, Template
from graphgen.models.published.folder import encoded
from graphgen.operands import Array
from graphgen.runtime import Provider


def generate(
    model: "str | os.PathLike[str] | ModelLike | Generator",
    prompts: Prompts,
    *,
    threads: int | None = None,
    provider: Provider | None = None,
    strict: bool = False,
    chunk: int = 512,
    adapter: Given | Sequence[str | None] | None = None,
    adapters: Mapping[str, Given] | None = None,
    **options: Unpack[GenerationOptions],
) -> "Generation":
    """Continue prompts; iterate over the result for the new token of each row, step by step.

    Args:
        model: A folder that `graphgen build` wrote, an ONNX file, a model, or a `Generator`.
        prompts: Texts, lists of tokens, or conversations: lists of messages such as
            {"role": "user", "content": "Hi"}, or {"messages": [...], "tools": [...]} with whatever
            else the chat template reads. One or several, of any lengths. For a model of sound: WAV
            files, or arrays of samples.
        threads: How many threads the runtime uses.
        provider: As for `Session`; by default cuda where it works.
        strict: Refuse a provider that leaves nodes that calculate floats to the CPU.
        chunk: How many tokens of a prompt to read at once.
        adapter: One to merge into the weights: a training run, a checkpoint, a folder of PEFT or a
            file .onnx_adapter. With `adapters`: the name of that which all prompts have, or a name
            for each prompt; None is the base alone.
        adapters: Some to run beside the base in one session, by name.
        **options: max_new_tokens, temperature, top_k, top_p, min_p, repetition_penalty,
            no_repeat_ngram_size, beams, length_penalty, early_stopping, seed, stop (tokens and
            strings), ...: docs/generation.md. The folder gives the defaults.

    Raises GraphgenError for a model that is not a decoder, an empty prompt or one longer than the
    context, a tokenizer that is missing or does not fit, and options out of range. One
    GraphgenWarning lists the fields of the folder's generation_config.json that have no effect.
    """
    chosen: Any = None
    if adapters is not None or isinstance(model, Generator):
        chosen, adapter = adapter, None
    if not isinstance(model, Generator):
        merged: Any = adapter
        model = Generator(
            model,
            threads=threads,
            provider=provider,
            strict=strict,
            chunk=chunk,
            adapter=merged,
            adapters=adapters,
        )
    return model(prompts, adapter=chosen, **options)


class Generator:
    """A decoder and its tokenizer, opened once for many prompts."""

    def __init__(
        self,
        model: str | os.PathLike[str] | ModelLike,
        *,
        threads: int | None = None,
        provider: Provider | None = None,
        strict: bool = False,
        chunk: int = 512,
        adapter: Given | None = None,
        adapters: Mapping[str, Given] | None = None,
    ) -> None:
        if adapter is not None and adapters is not None:
            raise GraphgenError(
                "generate: adapter is merged into the weights, and adapters run beside them; give "
                f"one of the two{user_line()}"
            )
        if type(chunk) is not int or chunk < 1:
            raise GraphgenError(
                f"generate: chunk is {chunk!r}; give a number of tokens, 1 or more{user_line()}"
            )
        path = Path(model) if isinstance(model, str | os.PathLike) else None
        self.folder = path if path is not None and path.is_dir() else None
        read_options(self.folder)
        if ignored_fields := ignored(self.folder):
            warn(ignored_fields)
        self.decoder: Decoder = open_decoder(
            model,
            threads=threads,
            provider=provider,
            strict=strict,
            chunk=chunk,
            adapter=adapter,
            adapters=adapters,
        )
        self.adapters = [*(adapters or ())]
        hears = getattr(self.decoder, "hears", None)
        self.ears = None if hears is None else Ears(self.folder, *hears)

    @on_screen
    def __repr__(self) -> Iterator[str]:
        of = "a model" if self.folder is None else self.folder.name
        vocabulary = self.decoder.vocabulary
        size = f", {vocabulary:,} tokens" if vocabulary is not None else ""
        yield f"Generator of {of} on {self.decoder.session.plan.device}{size}"

    @cached_property
    def tokenizer(self) -> Any:
        """The tokenizer of the folder. Raises GraphgenError if none fits."""
        return read_tokenizer(self.folder, self.decoder.vocabulary)

    @cached_property
    def template(self) -> Template:
        """The chat template of the folder. Raises GraphgenError if it has none."""
        if self.folder is None:
            raise GraphgenError(
                "generate: the model is not a folder, so it has no chat template; give prompts as "
                "texts or tokens"
            )
        return Template(self.folder, dated=True)

    def __call__(
        self, prompts: Prompts, *, adapter: Chosen = None, **options: Unpack[GenerationOptions]
    ) -> "Generation":
        """Like `generate`; `adapter` names one of `adapters` for all prompts, or one for each."""
        return Generation(self, prompts, read_options(self.folder, **options), adapter)

    def messages(self, conversation: Conversation, where: str = "the conversation") -> list[int]:
        """The tokens of a conversation up to where the assistant's next message begins.

        If the last message is the assistant's, it goes on. The template writes all special tokens.
        Raises GraphgenError if the folder has no chat template, or it refuses the conversation.
        """
        text = self.template.prompt(conversation, f"generate: {where}")
        ids: list[int] = encoded("generate", self.tokenizer, text, special=False).ids
        return ids

    def texts(self, rows: Sequence[Sequence[int]]) -> list[str]:
        """The texts of tokens, without special tokens."""
        texts: list[str] = self.tokenizer.decode_batch([list(row) for row in rows])
        return texts


class Generation:
    """An iterator over steps: each is a list of every row's new token, None if the row has ended.

    `tokens` holds those so far, a list for each row; `texts()` gives their text. A beam search
    gives its steps when it is done. `prefill` and `decode` are numbers of tokens and seconds.
    """

    def __init__(
        self, generator: Generator, prompts: Prompts, options: Options, adapter: Chosen = None
    ) -> None:
        self._generator, self._decoder, self.options = generator, generator.decoder, options
        self._strings = [s for s in options.stop if isinstance(s, str)]
        self._ends = {*options.eos, *(s for s in options.stop if isinstance(s, int))}
        if self._strings:
            self._generator.tokenizer  # noqa: B018  # an error comes before anything runs
        vocabulary = self._decoder.vocabulary or options.vocabulary
        options.fit(vocabulary)
        encoder = isinstance(self._decoder, EncoderDecoder)  # whose positions are its own
        if generator.ears is not None:
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
            self._sources: Sequence[Any] = self.prompts
            self._begin = list(map(list, self.prompts))
            if options.language or options.translate:
                raise GraphgenError(
                    "generate: language and translate are for models of sound; leave them out"
                    f"{user_line()}"
                )
            if isinstance(self._decoder, EncoderDecoder):
                self._begin = [[self._first()] for _ in self.prompts]
        self._chosen = numbers_of("generate", generator.adapters, adapter, len(self.prompts))
        if isinstance(self._decoder, EncoderDecoder):
            self._decoder.begin = self._begin
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
        if length is not None and longest <= length < longest + self._most:
            warn(
                f"generate: beyond {length:,} tokens longrope turns the whole text by other "
                "factors, but the cache keeps the first ones: from there on, give the text to a "
                "new call"
            )
        self.tokens: list[list[int]] = [[] for _ in self.prompts]
        self.prefill, self.decode = (sum(map(len, self.prompts)), 0.0), (0, 0.0)
        self._steps = self._searched() if options.beams > 1 else self._likeliest()

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
        texts = self._generator.texts(self.tokens)
        return [_before(text, self._strings) for text in texts]

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
        self._sources = [ears(sound, f"generate: sound {n}") for n, sound in enumerate(sounds)]

        def detect(languages: Sequence[int]) -> list[int]:
            decoder.begin = [[begin]]
            scores = decoder.start(self._sources, 1, 1, self._chosen)[:, languages]
            return [languages[best] for best in scores.argmax(-1)]

        language, translate = self.options.language, self.options.translate
        rows = first_tokens(folder, begin, language=language, translate=translate, detect=detect)
        self.prompts = self._begin = [rows[n % len(rows)] for n in range(len(sounds))]

    def _start(self) -> Array:
        then = time.perf_counter()
        try:
            how: tuple[Any, ...] = (self._most, self.options.beams, self._chosen)
            logits = self._decoder.start(self._sources, *how)
        except MemoryError as error:
            raise GraphgenError(
                f"generate: {error}, for {self._most} new tokens; give fewer max_new_tokens"
            ) from error
        self.prefill = (self.prefill[0], time.perf_counter() - then)
        return logits

    def _count(self, tokens: int, then: float) -> None:
        count, seconds = self.decode
        self.decode = (count + tokens, seconds + time.perf_counter() - then)

    def _likeliest(self) -> Iterator[list[int | None]]:
        """The likeliest token of each row, or a drawn one."""
        options, logits = self.options, self._start()
        random = [np.random.default_rng([options.seed, row]) for row in range(len(self.prompts))]
        ended = [False for _ in self.prompts]
        live = [*range(len(self.prompts))]  # the rows of the decoder
        for step in range(self._most):
            then = time.perf_counter()
            before = [self._begin[row] for row in live], [self.tokens[row] for row in live]
            scores = self._processed(logits, *before, step)
            if options.temperature > 0:
                drawn = zip(scores, live, strict=True)
                found = [draw(own, options, random[row]) for own, row in drawn]
            else:
                found = scores.argmax(-1).tolist()
            new: list[int | None] = [None for _ in self.prompts]
            for row, own in zip(live, found, strict=True):
                new[row] = None if ended[row] else own
            for row, token in enumerate(new):
                if token is not None:
                    self.tokens[row].append(token)
                    ended[row] = self._ends_with(self.tokens[row])
            self._count(sum(token is not None for token in new) if step else 0, then)
            yield new
            if all(ended) or step + 1 == self._most:
                return
            then = time.perf_counter()
            on = [i for i, row in enumerate(live) if not ended[row]]
            if 2 * len(on) <= len(live):  # so all copies together stay smaller than the cache
                self._decoder.keep(np.array(on))
                live, found = [live[i] for i in on], [found[i] for i in on]
            logits = self._decoder.step(np.array(found))
            self._count(0, then)

    def _searched(self) -> Iterator[list[int | None]]:
        """The best sequence of each row that a beam search finds."""
        best = self._search()
        for step in range(max(map(len, best))):
            new = [row[step] if step < len(row) else None for row in best]
            for row, token in zip(self.tokens, new, strict=True):
                row += [] if token is None else [token]
            yield new

    def _search(self) -> list[list[int]]:
        logits, rows, beams = self._start(), len(self.prompts), self.options.beams
        candidates = max(2, 1 + len(self._ends)) * beams
        how: dict[str, Any] = {"most": self._most, "ends": self._ends_with}
        search = Beams(rows, self.options, **how, candidates=candidates)
        begin = [tokens for tokens in self._begin for _ in range(beams)]
        for step in range(self._most):
            then = time.perf_counter()
            flat = [tokens for row in search.sequences for tokens in row]
            source = search.advance(self._processed(log_softmax(logits), begin, flat, step))
            self._count(rows if step else 0, then)
            if source is None:
                break
            then = time.perf_counter()
            self._decoder.reorder(source)
            last = [tokens[-1] for row in search.sequences for tokens in row]
            logits = self._decoder.step(np.array(last))
            self._count(0, then)
        return search.best()

    def _ends_with(self, tokens: list[int]) -> bool:
        strings = self._strings
        return tokens[-1] in self._ends or (
            bool(strings) and says(tokens, strings, self._generator.texts)
        )

    def _processed(
        self, scores: Array, begin: list[list[int]], new: list[list[int]], step: int
    ) -> Array:
        whole = ([*old, *more] for old, more in zip(begin, new, strict=True))
        options, alone = self.options, max(map(len, begin)) == 1
        forced = options.forced_bos if step == 0 and alone else ()
        if not forced and step + 1 == self._most:
            forced = options.forced_eos
        free = int(alone and bool(options.forced_bos))
        return processed(scores, whole, options, step=step, free=free, forced=forced)


def _before(text: str, strings: Sequence[str]) -> str:
    found = [text.index(string) for string in strings if string in text]
    return text[: min(found, default=len(text))]
