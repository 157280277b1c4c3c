"""How to generate: options, with the defaults that a folder's generation_config.json gives."""

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from graphgen.errors import GraphgenError
from graphgen.models.config import read_json

_NEUTRAL: dict[str, Any] = {
    "typical_p": 1.0,
    "top_h": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "encoder_repetition_penalty": 1.0,
    "encoder_no_repeat_ngram_size": 0,
    "exponential_decay_length_penalty": (),
    "diversity_penalty": 0.0,
    "num_beam_groups": 1,
    "num_return_sequences": 1,
    "guidance_scale": 1.0,
    "penalty_alpha": 0.0,
    "sequence_bias": (),
    "force_words_ids": (),
    "constraints": (),
    "forced_decoder_ids": (),
    "watermarking_config": (),
    "remove_invalid_values": False,
    "renormalize_logits": False,
    "dola_layers": (),
}
"""Fields that change the tokens and are not honoured, and the value at which they do not."""

_NAMES = {
    "max_new_tokens": "max_new_tokens",
    "min_new_tokens": "min_new_tokens",
    "max_length": "max_length",
    "min_length": "min_length",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "no_repeat_ngram_size": "no_repeat_ngram_size",
    "num_beams": "beams",
    "length_penalty": "length_penalty",
    "early_stopping": "early_stopping",
    "suppress_tokens": "suppress_tokens",
    "begin_suppress_tokens": "begin_suppress_tokens",
    "forced_bos_token_id": "forced_bos",
    "forced_eos_token_id": "forced_eos",
    "eos_token_id": "eos",
    "pad_token_id": "pad",
    "decoder_start_token_id": "begin",
}
"""Fields of generation_config.json, and the options that they are."""

_LENGTHS = ("max_position_embeddings", "n_positions", "n_ctx")
_LEAST = {
    "max_new_tokens": 1,
    "min_new_tokens": 0,
    "temperature": 0,
    "top_k": 0,
    "top_p": 1e-9,
    "min_p": 0,
    "repetition_penalty": 1e-9,
    "no_repeat_ngram_size": 0,
    "beams": 1,
    "seed": 0,
}
_MOST = {"top_p": 1, "min_p": 1}


@dataclass(frozen=True)
class Options:
    """How tokens are chosen, and when a row ends; docs/generation.md tells each.

    Raises GraphgenError for a value out of range.
    """

    max_new_tokens: int | None = None
    min_new_tokens: int = 0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    no_repeat_ngram_size: int = 0
    beams: int = 1
    length_penalty: float = 1.0
    early_stopping: bool | str = False
    seed: int = 0
    stop: Sequence[int | str] = ()
    # What a folder says and a caller seldom does.
    suppress_tokens: Sequence[int] = ()
    begin_suppress_tokens: Sequence[int] = ()
    forced_bos: int | Sequence[int] | None = None
    forced_eos: int | Sequence[int] | None = None
    eos: int | Sequence[int] = ()
    pad: int | None = None
    begin: int | None = None
    max_length: int | None = None
    min_length: int = 0
    context: int | None = None
    vocabulary: int | None = None

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            value, whole = getattr(self, name), isinstance(getattr(Options, name), int | None)
            if value is None and name == "max_new_tokens":
                continue
            kinds = int if whole else (int, float)
            most = _MOST.get(name)
            right = isinstance(value, kinds) and not isinstance(value, bool)
            if not right or value < least or (most is not None and value > most):
                told = f"{'a whole number' if whole else 'a number'} of at least {least:g}"
                told += "" if most is None else f" and at most {most}"
                raise GraphgenError(f"generate: {name} is {value!r}; it must be {told}")
        if self.early_stopping not in (True, False, "never"):
            raise GraphgenError(
                f'generate: early_stopping is {self.early_stopping!r}; give True, False or "never"'
            )
        if self.beams > 1 and self.temperature > 0:
            raise GraphgenError(
                f"generate: {self.beams} beams at temperature {self.temperature:g}: a search of "
                "beams draws no tokens; give temperature=0 or beams=1"
            )
        texts = [self.stop] if isinstance(self.stop, str) else self.stop
        if not all(isinstance(s, int) or (isinstance(s, str) and s) for s in texts):
            raise GraphgenError(f"generate: stop is {self.stop!r}; give tokens or strings")


def read_options(folder: Path | None, **given: Any) -> Options:
    """What was given, and for the rest what the folder says.

    Raises GraphgenError for an unknown option, and for a field of the folder that changes the
    tokens and has no option.
    """
    if unknown := sorted(set(given) - set(Options.__dataclass_fields__)):
        known = ", ".join(Options.__dataclass_fields__)
        raise GraphgenError(f"generate: there is no option {unknown[0]!r}; there are {known}")
    options: dict[str, Any] = {}
    if folder is not None and (folder / "config.json").is_file():
        file, fields = folder / "generation_config.json", read_fields(folder)
        for name, neutral in _NEUTRAL.items():
            if (value := fields.get(name) or neutral) != neutral:
                raise GraphgenError(
                    f"{file}: {name} is {value!r}, which has no option here; remove it or make it "
                    f"{neutral!r}"
                )
        options = {own: fields[name] for name, own in _NAMES.items() if name in fields}
        if fields.get("do_sample"):
            options["temperature"] = fields.get("temperature", 1.0)
            options["top_k"] = fields.get("top_k", 50)
        words = [w if isinstance(w, list) else [w] for w in fields.get("bad_words_ids", [])]
        if any(len(word) != 1 for word in words):
            raise GraphgenError(f"{file}: bad_words_ids are words of several tokens; remove them")
        eos = options.get("eos", ())
        bad = {w[0] for w in words}.difference([eos] if isinstance(eos, int) else eos)
        options["suppress_tokens"] = sorted({*options.get("suppress_tokens", []), *bad})
        options["context"] = next((fields[name] for name in _LENGTHS if fields.get(name)), None)
        options["vocabulary"] = fields.get("vocab_size")
    return Options(**{**options, **{n: value for n, value in given.items() if value is not None}})


def read_fields(folder: Path) -> dict[str, Any]:
    """The fields of config.json, and those of generation_config.json, which count more."""
    files = [folder / name for name in ("config.json", "generation_config.json")]
    read = (read_json(file).items() for file in files if file.is_file())
    return {name: value for items in read for name, value in items if value is not None}


def read_tokenizer(folder: Path | None) -> Any:
    """The tokenizer of a folder. Raises GraphgenError where it or the library is missing."""
    file = None if folder is None else folder / "tokenizer.json"
    if file is None or not file.is_file():
        raise GraphgenError(
            f"generate: {folder or 'the model'} has no tokenizer.json: give prompts as lists of "
            "tokens, and no strings to stop at"
        )
    try:
        return importlib.import_module("tokenizers").Tokenizer.from_file(str(file))
    except ImportError as error:
        raise GraphgenError("generate: texts need `pip install graphgen-onnx[text]`") from error
    except Exception as error:  # the library raises nothing narrower
        raise GraphgenError(f"{file} is no tokenizer: {error}") from error
