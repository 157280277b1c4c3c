"""How a folder says to generate: generation_config.json, or config.json without it."""

from collections.abc import Collection
from pathlib import Path
from typing import Any

from graphgen.files import present, read_json
from graphgen.models.published.folder import settings

NEUTRAL: dict[str, Any] = {
    "diversity_penalty": 0.0,
    "num_beam_groups": 1,
    "guidance_scale": 1.0,
    "penalty_alpha": 0.0,
    "force_words_ids": (),
    "constraints": (),
    "forced_decoder_ids": (),
    "watermarking_config": (),
    "dola_layers": (),
    "token_healing": False,
    "condition_on_prev_tokens": False,
    "logprob_threshold": None,
    "compression_ratio_threshold": None,
    "no_speech_threshold": None,
}
"""Fields that change the tokens but have no option here, and the value that changes nothing."""

_SAME = (
    "max_new_tokens min_new_tokens max_length min_length top_p min_p repetition_penalty "
    "no_repeat_ngram_size length_penalty early_stopping renormalize_logits suppress_tokens "
    "begin_suppress_tokens top_k num_return_sequences max_time top_h typical_p epsilon_cutoff "
    "eta_cutoff encoder_repetition_penalty encoder_no_repeat_ngram_size remove_invalid_values "
    "exponential_decay_length_penalty sequence_bias"
)
NAMES = {name: name for name in _SAME.split()} | {
    "num_beams": "beams",
    "stop_strings": "stop",
    "forced_bos_token_id": "forced_bos",
    "forced_eos_token_id": "forced_eos",
    "eos_token_id": "eos",
    "decoder_start_token_id": "begin",
    "prompt_lookup_num_tokens": "num_speculative_tokens",
    "return_timestamps": "timestamps",
}
"""Fields of generation_config.json, and the options they set."""

_SPOKEN = "language task lang_to_id task_to_id no_timestamps_token_id".split()
_SPOKEN += ["return_timestamps", "max_initial_timestamp_index"]
_READ = {*NEUTRAL, *NAMES, *_SPOKEN, "do_sample", "temperature", "bad_words_ids"}

_WITHOUT_EFFECT = set(
    "bos_token_id pad_token_id transformers_version use_cache cache_implementation cache_config "
    "max_cache_len low_memory prefill_chunk_size compile_config disable_compile "
    "continuous_batching_config output_attentions output_hidden_states output_scores output_logits "
    "return_dict_in_generate is_assistant num_assistant_tokens num_assistant_tokens_schedule "
    "assistant_confidence_threshold assistant_lookbehind assistant_ensemble_weight "
    "target_lookbehind max_matching_ngram_size alignment_heads is_multilingual "
    "prev_sot_token_id".split()  # some are of words' timestamps, or noted by others
)
"""Fields that do not change the tokens or where they end; some are for assistant models."""

ENDS = ("decoder_start_token_id", "eos_token_id")
"""What a row begins and ends with; it may stand in config.json alone."""


_WHERE_THEY_COME = ("eos_token_id", "suppress_tokens", "begin_suppress_tokens")
"""Fields of tokens that have an effect only where a row would have them."""


def listed(value: Any) -> list[Any]:
    """The elements of a list, or a single value as a list; [] for None."""
    if value is None:
        return []
    several = isinstance(value, Collection) and not isinstance(value, str)
    several = several and getattr(value, "ndim", 1) > 0  # an array without axes is a number
    return list(value) if several else [value]


def never_come(folder: Path) -> dict[str, list[int]]:
    """The tokens of those fields that the model lacks, as GPT-2's in a smaller vocabulary."""
    known, (_, fields) = read_fields(folder), fields_of_generation(folder)
    size: Any = known.get("vocab_size")
    found = dict[str, list[int]]()
    for name in _WHERE_THEY_COME if isinstance(size, int) else ():
        given = listed((known if name in ENDS else fields).get(name))
        found[name] = [x for x in given if type(x) is int and not 0 <= x < size]
    return {name: tokens for name, tokens in found.items() if tokens}


def unreached(folder: Path | None) -> str:
    """One sentence on the tokens of `never_come`, or ""."""
    if folder is None or not present(folder / "config.json"):
        return ""
    never = never_come(folder)
    told = "; ".join(f"{name} {', '.join(map(str, x))}" for name, x in never.items())
    return f"{folder} names tokens that the model lacks: {told}: no row has them" if told else ""


def ignored(folder: Path | None) -> str:
    """One sentence on the fields of generation_config.json that have no effect here, or ""."""
    file = Path() if folder is None else folder / "generation_config.json"
    if folder is None or not present(file):
        return ""
    known = _READ | _WITHOUT_EFFECT
    names = [
        name
        for name, value in read_json(file).items()
        if not (name in known or name.startswith("_") or value is None or value is False)
    ]
    which = "these fields, which have" if len(names) > 1 else "this field, which has"
    return f"{file} has {which} no effect here: {', '.join(names)}" if names else ""


def fields_of_generation(folder: Path) -> tuple[Path, dict[str, Any]]:
    """The fields that say how to generate, and their file: config.json if there is no other."""
    file = folder / "generation_config.json"
    file = file if present(file) else folder / "config.json"
    return file, {name: value for name, value in read_json(file).items() if value is not None}


def read_fields(folder: Path) -> dict[str, Any]:
    """The fields of config.json and generation_config.json; the latter win."""
    read = (settings(folder, f"{name}.json").items() for name in ("config", "generation_config"))
    return {name: value for items in read for name, value in items if value is not None}


def longrope_length(folder: Path | None) -> int | None:
    """The length from which a model with longrope turns the keys of the whole text otherwise.

    That is `original_max_position_embeddings` (arXiv 2402.13753); None for any other model.
    """
    fields = {} if folder is None else read_fields(folder)
    given = fields.get("rope_parameters", fields.get("rope_scaling"))
    if not isinstance(given, dict) or "long_factor" not in given:
        return None
    length = {**fields, **given}.get("original_max_position_embeddings", 4096)
    return length if isinstance(length, int) else None
