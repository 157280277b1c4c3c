"""How to generate: options, with the defaults that a folder's generation_config.json gives."""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypedDict

import numpy as np

from graphgen.display import on_screen
from graphgen.errors import GraphgenError, near, user_line, warn
from graphgen.files import present
from graphgen.generation.config import (
    ENDS,
    NAMES,
    NEUTRAL,
    fields_of_generation,
    listed,
    never_come,
    read_fields,
)
from graphgen.generation.grammar import Grammar
from graphgen.models.published.folder import positions
from graphgen.operands import Array

LOOKUP = "prompt-lookup"
"""The way to guess tokens that needs no other model."""

_RANGES: dict[str, tuple[type, float, float]] = {
    "max_new_tokens": (int, 1, math.inf),
    "min_new_tokens": (int, 0, math.inf),
    "temperature": (float, 0, math.inf),
    "top_k": (int, 0, math.inf),
    "top_p": (float, 1e-9, 1),
    "min_p": (float, 0, 1),
    "top_h": (float, 1e-9, 1),
    "typical_p": (float, 1e-9, 1),
    "epsilon_cutoff": (float, 0, 1),
    "eta_cutoff": (float, 0, 1),
    "repetition_penalty": (float, 1e-9, 1e9),
    "no_repeat_ngram_size": (int, 0, math.inf),
    "encoder_repetition_penalty": (float, 1e-9, 1e9),
    "encoder_no_repeat_ngram_size": (int, 0, math.inf),
    "beams": (int, 1, math.inf),
    "length_penalty": (float, -8, 8),
    "seed": (int, 0, math.inf),
    "begin": (int, 0, math.inf),
    "max_length": (int, 1, math.inf),
    "min_length": (int, 0, math.inf),
    "context": (int, 1, math.inf),
    "vocabulary": (int, 1, math.inf),
    "num_return_sequences": (int, 1, math.inf),
    "num_speculative_tokens": (int, 1, 1000),
    "max_time": (float, 0, math.inf),
}
"""The options that are numbers: their type, the least and the largest value."""

OF_DRAWS = ("top_k", "top_p", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff")
"""Options that change nothing where the most likely token is taken."""

_OF_BEAMS = ("length_penalty", "early_stopping")

_TOKENS = ("stop", "suppress_tokens", "begin_suppress_tokens", "forced_bos", "forced_eos", "eos")
"""Options that are one or more tokens; `stop` may also have strings."""


class UnmetError(GraphgenError):
    """What a folder says has a meaning, but not here, or only with other options."""


Processor: TypeAlias = Callable[[Sequence[int], Array], Array]
"""Logits (vocabulary,) of what may follow a row's tokens, from those logits as they are."""


class GenerationOptions(TypedDict, total=False):
    """The fields of `Options`, as arguments of `generate`."""

    max_new_tokens: int | None
    min_new_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    top_h: float | None
    typical_p: float
    epsilon_cutoff: float
    eta_cutoff: float
    repetition_penalty: float
    no_repeat_ngram_size: int
    encoder_repetition_penalty: float
    encoder_no_repeat_ngram_size: int
    exponential_decay_length_penalty: tuple[int, float] | None
    sequence_bias: Sequence[tuple[Sequence[int], float]]
    remove_invalid_values: bool
    beams: int
    length_penalty: float
    early_stopping: bool | Literal["never"]
    renormalize_logits: bool
    seed: int
    num_return_sequences: int
    max_time: float | None
    bad_words: Sequence[Sequence[int]]
    logits_processors: Processor | Sequence[Processor]
    grammar: Grammar | None
    speculate: Literal["", "prompt-lookup"]
    num_speculative_tokens: int | None
    stop: int | str | Sequence[int | str]
    suppress_tokens: int | Sequence[int]
    begin_suppress_tokens: int | Sequence[int]
    forced_bos: int | Sequence[int]
    forced_eos: int | Sequence[int]
    eos: int | Sequence[int]
    begin: int | None
    max_length: int | None
    min_length: int
    context: int | None
    vocabulary: int | None
    language: str
    translate: bool
    timestamps: bool


@dataclass(frozen=True)
class Options:
    """How tokens are chosen, and when a row ends; docs/generation.md describes each option.

    Raises GraphgenError for a value out of range.
    """

    max_new_tokens: int | None = None
    min_new_tokens: int = 0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    top_h: float | None = None
    typical_p: float = 1.0
    epsilon_cutoff: float = 0.0
    eta_cutoff: float = 0.0
    repetition_penalty: float = 1.0
    no_repeat_ngram_size: int = 0
    encoder_repetition_penalty: float = 1.0
    encoder_no_repeat_ngram_size: int = 0
    exponential_decay_length_penalty: tuple[int, float] | None = None
    sequence_bias: Sequence[tuple[Sequence[int], float]] = ()
    remove_invalid_values: bool = False
    beams: int = 1
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    renormalize_logits: bool = False
    seed: int = 0
    num_return_sequences: int = 1
    max_time: float | None = None
    bad_words: Sequence[Sequence[int]] = ()
    logits_processors: Sequence[Processor] = ()
    grammar: Grammar | None = None
    speculate: Literal["", "prompt-lookup"] = ""
    num_speculative_tokens: int | None = None
    stop: Sequence[int | str] = ()
    # A folder sets these; a caller seldom does.
    suppress_tokens: Sequence[int] = ()
    begin_suppress_tokens: Sequence[int] = ()
    forced_bos: Sequence[int] = ()
    forced_eos: Sequence[int] = ()
    eos: Sequence[int] = ()
    begin: int | None = None
    max_length: int | None = None
    min_length: int = 0
    context: int | None = None
    vocabulary: int | None = None
    # Of models of sound: docs/generation.md.
    language: str = ""
    translate: bool = False
    timestamps: bool = False

    @on_screen
    def __repr__(self) -> Iterator[str]:
        given = [(f.name, getattr(self, f.name), f.default) for f in fields(self)]
        other = (f"{n}={x!r}" for n, x, default in given if x != default and (x or default))
        yield f"Options({', '.join(other)})"

    def __post_init__(self) -> None:
        given = {field.name: _plain(getattr(self, field.name)) for field in fields(self)}
        for name, value in given.items():
            object.__setattr__(self, name, value)
        for name, read in _LISTS.items():
            object.__setattr__(self, name, read(given[name]))
        for name, (kind, least, most) in _RANGES.items():
            value = given[name]
            if value is None and getattr(Options, name) is None:
                continue
            is_number = isinstance(value, int | kind) and not isinstance(value, bool)
            if not is_number or value is None or not least <= value <= most:
                wanted = f"{'a whole number' if kind is int else 'a number'} of at least {least:g}"
                wanted += "" if most == math.inf else f" and at most {most:g}"
                raise GraphgenError(
                    f"generate: {name} is {value!r}; it must be {wanted}{user_line()}"
                )
        for name, (is_right, wanted) in _RIGHT.items():
            if not is_right(getattr(self, name)):
                raise GraphgenError(
                    f"generate: {name} is {given[name]!r:.100}; give {wanted}{user_line()}"
                )
        self._check_together()

    def _check_together(self) -> None:
        """Raise GraphgenError for options that contradict each other."""
        if self.beams > 1 and self.speculate:
            raise GraphgenError(
                f"generate: {self.beams} beams with guesses: a beam search checks none; give "
                f"beams=1, or leave out speculate{user_line()}"
            )
        copies = self.num_return_sequences
        if copies > 1 and self.temperature == 0 and copies > self.beams:
            wanted = f"beams={copies}" if self.beams > 1 else "a temperature above 0, or beams"
            raise UnmetError(
                f"generate: num_return_sequences is {copies}, but {self.beams} beam"
                f"{'s' * (self.beams > 1)} at temperature 0 would give some twice; give {wanted}"
                f"{user_line()}"
            )
        if self.beams > 1 and self.temperature > 0:
            raise UnmetError(
                f"generate: {self.beams} beams at temperature {self.temperature:g}: a beam search "
                f"draws no tokens; give temperature=0 or beams=1{user_line()}"
            )

    @property
    def strings(self) -> list[str]:
        """The strings that end a row."""
        return [end for end in self.stop if isinstance(end, str)]

    @property
    def ends(self) -> set[int]:
        """The tokens that end a row."""
        return {*self.eos, *(end for end in self.stop if isinstance(end, int))}

    def fit(self, vocabulary: int | None) -> None:
        """Raise an error for a token beyond the vocabulary."""
        biased = [token for tokens, _ in self.sequence_bias for token in tokens]
        lists: dict[str, Sequence[int | str]] = {name: getattr(self, name) for name in _TOKENS}
        lists |= {"bad_words": [*itertools.chain(*self.bad_words)], "sequence_bias": biased}
        for name, given in lists.items():
            tokens = [t for t in given if not isinstance(t, str)]
            if vocabulary is not None and max(tokens, default=0) >= vocabulary:
                raise UnmetError(
                    f"generate: {name} has token {max(tokens)}; the model has tokens 0 to "
                    f"{vocabulary - 1}{user_line()}"
                )


def read_options(folder: Path | None, **given: Any) -> Options:
    """The given options, and what the folder says for the rest.

    Raises GraphgenError for an unknown option, and for a field of the folder that changes the
    tokens and has no option.
    """
    if unknown := sorted(set(given) - set(Options.__dataclass_fields__)):
        known = ", ".join(Options.__dataclass_fields__)
        problem = f"there is no option {unknown[0]!r}; there are {known}"
        raise GraphgenError(
            f"generate: {problem}{near(unknown[0], Options.__dataclass_fields__)}{user_line()}"
        )
    options: dict[str, Any] = {}
    if folder is not None and present(folder / "config.json"):
        config, (file, fields) = read_fields(folder), fields_of_generation(folder)
        spoken = {"forced_decoder_ids"} if "num_mel_bins" in config else set()
        for name, neutral in NEUTRAL.items():
            if name in spoken:
                continue  # what an answer begins with
            value = fields.get(name, neutral)
            if value != neutral and not (neutral == () and len(listed(value)) == 0):
                raise UnmetError(
                    f"{file}: {name} is {value!r}, which has no option here; remove it or make it "
                    f"{neutral!r}"
                )
        if fields.get("cache_implementation") == "quantized":
            raise UnmetError(
                f"{file}: cache_implementation is 'quantized', which rounds keys and values; "
                "remove it, or also build with --kv int8"
            )
        fields |= {name: config[name] for name in ENDS if name in config}
        if _is_token(fields.get("bos_token_id")):  # a decoder behind an encoder begins with it
            fields.setdefault("decoder_start_token_id", fields["bos_token_id"])
        options = {own: fields[name] for name, own in NAMES.items() if name in fields}
        for name, tokens in never_come(folder).items():
            options[NAMES[name]] = [x for x in listed(fields[name]) if x not in tokens]
        texts = listed(fields.get("stop_strings"))  # a number would be a token
        for name, right, wanted in (
            ("do_sample", type(fields.get("do_sample", False)) is bool, "true or false"),
            ("stop_strings", all(isinstance(text, str) for text in texts), "texts"),
        ):
            if not right:
                raise GraphgenError(
                    f"{file}: {name} is {fields[name]!r:.100}; give {wanted}, or remove it"
                )
        if fields.get("do_sample"):
            options["temperature"] = fields.get("temperature", 1.0)
            options.setdefault("top_k", 50)
        words = listed(fields.get("bad_words_ids"))
        if not all(isinstance(word, list) and all(map(_is_token, word)) and word for word in words):
            raise GraphgenError(
                f"{file}: bad_words_ids is {words!r:.100}; give lists of tokens, or remove it"
            )
        ends = [[token] for token in listed(options.get("eos"))]
        options["bad_words"] = [word for word in words if word not in ends]
        options["context"] = positions(config)
        options["vocabulary"] = config.get("vocab_size")
    options |= {name: value for name, value in given.items() if value is not None}
    if options.get("min_new_tokens") is not None:
        options.pop("min_length", None)  # it limits the same for the prompt and what follows
    made = Options(**options)
    _tell_useless(made, given)
    return made


def _tell_useless(options: Options, given: Mapping[str, Any]) -> None:
    """Warn of a given option that changes nothing; a folder's may."""
    useless = dict.fromkeys(OF_DRAWS if options.temperature == 0 else (), "a temperature above 0")
    useless |= dict.fromkeys(_OF_BEAMS if options.beams == 1 else (), "beams above 1")
    for name, lacking in useless.items():
        if given.get(name) is not None and getattr(options, name) != getattr(Options, name):
            warn(f"generate: {name} changes nothing without {lacking}")


def _words(value: Any) -> list[list[Any]]:
    return [listed(word) for word in listed(value)]


def _functions(value: Any) -> list[Any]:
    return [value] if callable(value) else listed(value)


def _pairs(value: Any) -> list[Any]:
    return [*value] if isinstance(value, list | tuple) else [None]


def _plain(value: Any) -> Any:
    """Numbers and arrays of NumPy as those of Python."""
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, list | tuple):
        return [*map(_plain, value)] if isinstance(value, list) else tuple(map(_plain, value))
    return value


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_truth(value: Any) -> bool:
    return isinstance(value, bool)


def _is_token(value: Any) -> bool:
    return type(value) is int and value >= 0


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value == value


def _is_pair(value: Any) -> bool:
    return isinstance(value, list | tuple) and len(value) == 2 and _is_number(value[1])


def _is_bias(value: Any) -> bool:
    if not _is_pair(value) or not isinstance(value[0], list | tuple):
        return False
    return bool(value[0]) and all(map(_is_token, value[0]))


def _is_decay(value: Any) -> bool:
    return _is_pair(value) and _is_token(value[0]) and 0 < value[1] < math.inf


def _are_tokens(value: Sequence[Any]) -> bool:
    return all(map(_is_token, value))


def _are_ends(value: Sequence[Any]) -> bool:
    return all(_is_token(end) or (isinstance(end, str) and end) for end in value)


_LISTS: Mapping[str, Callable[[Any], list[Any]]] = {
    **dict.fromkeys(_TOKENS, listed),
    "bad_words": _words,
    "sequence_bias": _pairs,
    "logits_processors": _functions,
}
"""The options that become lists."""

_RIGHT: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(_TOKENS, (_are_tokens, "tokens, whole numbers of at least 0")),
    "stop": (_are_ends, "tokens or strings"),
    "language": (_is_text, "a text"),
    "translate": (_is_truth, "True or False"),
    "timestamps": (_is_truth, "True or False"),
    "renormalize_logits": (_is_truth, "True or False"),
    "remove_invalid_values": (_is_truth, "True or False"),
    "early_stopping": (lambda x: x in (True, False, "never"), 'True, False or "never"'),
    "bad_words": (
        lambda words: all(word and _are_tokens(word) for word in words),
        "lists of tokens",
    ),
    "sequence_bias": (
        lambda pairs: all(map(_is_bias, pairs)),
        "pairs of a list of tokens and a number",
    ),
    "exponential_decay_length_penalty": (
        lambda decay: decay is None or _is_decay(decay),
        "after how many new tokens it begins, and a factor above 0",
    ),
    "logits_processors": (
        lambda functions: all(map(callable, functions)),
        "functions of a row's tokens and its logits",
    ),
    "speculate": (lambda way: way in ("", LOOKUP), repr(LOOKUP)),
}
"""What each other option has to be, of lists each element, and how to say so."""
