"""Text from decoders, greedy, sampled or by beams: `for tokens in generate("folder", ["Hi"])`."""

import os
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Unpack

from graphgen.arguments import checked
from graphgen.display import fields, on_screen
from graphgen.errors import GraphgenError, user_line, warn
from graphgen.export.by_row import Chosen, Given
from graphgen.files import path_of, present
from graphgen.generation.caches import Decoder
from graphgen.generation.config import ignored, longrope_length, unreached
from graphgen.generation.decoder import open_decoder
from graphgen.generation.encoder_decoders import EncoderDecoder
from graphgen.generation.generated import Generation
from graphgen.generation.options import GenerationOptions, read_options
from graphgen.generation.prompts import (
    MOST_UNSETTLED,
    Prompts,
    read_tokenizer,
    removes_spaces,
    without_spaces,
)
from graphgen.generation.speech import Ears
from graphgen.graph import ModelLike
from graphgen.models.published.chat import Template
from graphgen.models.published.conversation import Conversation
from graphgen.models.published.tokenizer import encoded
from graphgen.runtime import Provider

_CHUNK = 512
_OPENED = {"strict": False, "chunk": _CHUNK}
"""What a Generator is opened with by default; None for the rest."""


@checked
def generate(
    model: "str | os.PathLike[str] | ModelLike | Generator",
    prompts: Prompts,
    *,
    threads: int | None = None,
    provider: Provider | None = None,
    strict: bool = False,
    chunk: int = _CHUNK,
    adapter: Given | Sequence[str | None] | None = None,
    adapters: Mapping[str, Given] | None = None,
    draft: "str | os.PathLike[str] | ModelLike | Generator | None" = None,
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
        draft: A smaller decoder of the same vocabulary, whose guesses are checked several at a
            time. The tokens stay the same.
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
            draft=draft,
        )
    else:
        given: dict[str, Any] = {"threads": threads, "provider": provider, "strict": strict}
        given |= {"chunk": chunk, "adapters": adapters, "draft": draft}
        for name, value in given.items():
            if value != _OPENED.get(name):
                raise GraphgenError(
                    f"generate: the Generator is open already; give {name} when you open it"
                    f"{user_line()}"
                )
    return model(prompts, adapter=chosen, **options)


@checked
class Generator:
    """A decoder and its tokenizer, opened once for many prompts.

    With `prefix_cache`, the beginning that a prompt has in common with another of its batch, or
    with a row of the last call, is not read again where that saves time.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | ModelLike,
        *,
        threads: int | None = None,
        provider: Provider | None = None,
        strict: bool = False,
        chunk: int = _CHUNK,
        adapter: Given | None = None,
        adapters: Mapping[str, Given] | None = None,
        draft: "str | os.PathLike[str] | ModelLike | Generator | None" = None,
        prefix_cache: bool = True,
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
        path = path_of(model, "generate") if isinstance(model, str | os.PathLike) else None
        self.folder = path if path is not None and path.is_dir() else None
        read_options(self.folder)
        for line in filter(None, (ignored(self.folder), unreached(self.folder))):
            warn(line)
        self.decoder: Decoder = open_decoder(
            model,
            threads=threads,
            provider=provider,
            strict=strict,
            chunk=chunk,
            adapter=adapter,
            adapters=adapters,
        )
        self.decoder.turn = longrope_length(self.folder)
        self.decoder.shares = prefix_cache
        self.adapters = [*(adapters or ())]
        hears = getattr(self.decoder, "hears", None)
        self.ears = None if hears is None else Ears(self.folder, *hears)
        if draft is not None and not isinstance(draft, Generator):
            how: Any = {"threads": threads, "provider": provider, "strict": strict, "chunk": chunk}
            draft = Generator(draft, prefix_cache=prefix_cache, **how)
        self.draft = draft
        if draft is not None:
            self._check_draft(draft)

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

    @property
    def context(self) -> int | None:
        """The most tokens that the model reads, if its folder says so."""
        return read_options(self.folder).context

    def _check_draft(self, draft: "Generator") -> None:
        """Raise GraphgenError unless a draft model's tokens are those of this model."""
        for whose, one in (("draft ", draft), ("", self)):
            if isinstance(one.decoder, EncoderDecoder):
                raise GraphgenError(
                    f"generate: the {whose}model has an encoder, and a draft is for decoders "
                    "alone; leave out draft"
                )
        if self.folder is None or draft.folder is None:
            sizes = [one.decoder.vocabulary for one in (draft, self)]
            if sizes[0] != sizes[1]:
                raise GraphgenError(
                    f"generate: the draft model has {sizes[0]} tokens and the model {sizes[1]}; "
                    "give one with the same vocabulary"
                )
            return
        named = [present(one.folder / "tokenizer.json") for one in (self, draft) if one.folder]
        if all(named) and self.tokenizer.get_vocab() != draft.tokenizer.get_vocab():
            raise GraphgenError(
                f"generate: {draft.folder} has another vocabulary than {self.folder}; give a draft "
                "model with the same tokenizer.json"
            )

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

    def texts(self, rows: Sequence[Sequence[int]], *, special: bool = False) -> list[str]:
        """The texts of tokens, without special tokens, or with them."""
        tokens = [list(row) for row in rows]
        texts: list[str] = self.tokenizer.decode_batch(tokens, skip_special_tokens=not special)
        return [*map(without_spaces, texts)] if self.unsettled else texts

    @cached_property
    def unsettled(self) -> int:
        """How many characters at the end of a text may change when more follow."""
        return MOST_UNSETTLED if removes_spaces(self.folder, self.tokenizer) else 0

    @cached_property
    def byte_tokens(self) -> set[int]:
        """The tokens that are bytes; a character of several is read when the last one has come."""
        found = (self.tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in range(256))
        return {token for token in found if token is not None}
