"""How onnxruntime-genai generates, of what a folder says: the `search` of genai_config.json."""

from dataclasses import fields
from typing import Any

from graphgen.generation.config import NAMES
from graphgen.generation.options import OF_DRAWS, Options

_SAME = ("repetition_penalty", "no_repeat_ngram_size", "min_length", "max_length")
"""Options with a field of the same name and meaning."""

_ELSEWHERE = "eos begin context vocabulary seed temperature beams speculate num_speculative_tokens"
"""Options that are said elsewhere, or change no token."""

_FIELDS = {option: name for name, option in NAMES.items()} | {"bad_words": "bad_words_ids"}


def search_of(options: Options) -> tuple[dict[str, Any], list[str]]:
    """The fields of `search`, and those of generation_config.json that have no place there.

    What onnxruntime-genai does by default is said where transformers does otherwise: it draws one
    of the 50 most likely tokens, and ends a search of beams early. All tokens are as many as the
    vocabulary has: with a top_k of 0, version 0.18 draws some that top_p leaves out.
    """
    given = {
        field.name: value
        for field in fields(options)
        if (value := getattr(options, field.name)) != field.default and (value or field.default)
    }
    if options.max_new_tokens is not None:
        given.pop("max_length", None)  # which it replaces
    search = {name: given.pop(name) for name in _SAME if name in given}
    for name in _ELSEWHERE.split():
        given.pop(name, None)
    if options.temperature > 0:
        search |= {"do_sample": True, "temperature": options.temperature, "top_p": options.top_p}
        known = options.vocabulary or options.top_k
        search["top_k"] = min(options.top_k or known, known)
    for name in ("top_k", "top_p") if options.temperature > 0 else OF_DRAWS:
        given.pop(name, None)
    if options.beams > 1:
        search |= {
            "num_beams": options.beams,
            "length_penalty": options.length_penalty,
            "early_stopping": options.early_stopping is True,
        }
    if options.early_stopping != "never" or options.beams == 1:
        given.pop("early_stopping", None)
    given.pop("length_penalty", None)
    if 1 < options.num_return_sequences <= options.beams:
        search["num_return_sequences"] = given.pop("num_return_sequences")
    return search, [_FIELDS.get(name, name) for name in given]
