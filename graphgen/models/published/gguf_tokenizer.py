"""The tokenizer in a GGUF file, as the files of a checkpoint's folder have it."""

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from graphgen.errors import GraphgenError
from graphgen.models.published.gguf import Gguf, open_gguf
from graphgen.models.published.gguf_fields import pooling_of
from graphgen.models.published.gguf_names import config_fields
from graphgen.models.published.gguf_splits import NFC, PLAIN, SPLITS, WHOLE
from graphgen.models.published.gguf_words import (
    CONTROL,
    MARK,
    OWN_TYPE,
    UNKNOWN,
    likely_pairs,
    unigram,
    word_pieces,
)
from graphgen.models.published.sentence_modules import entry

_FIELD = "tokenizer.ggml."


@contextmanager
def folder_of(path: Path) -> Iterator[Path]:
    """A temporary folder of the files that a checkpoint has beside its weights, from a GGUF file.

    Raises GraphgenError for a model or a tokenizer that is not supported.
    """
    file = open_gguf(path)
    texts: dict[str, Any] = {"config.json": config_fields(file), **tokenizer_files(file)}
    texts["generation_config.json"] = _generation(file)
    if pooling := pooling_of(file, str(file.fields["general.architecture"])):
        texts |= _vectors_of(pooling)
    with tempfile.TemporaryDirectory(prefix=f"{path.stem}-") as name:
        for text, content in texts.items():
            written = json.dumps(content, ensure_ascii=False, indent=2)
            place = Path(name) / text
            place.parent.mkdir(exist_ok=True)
            place.write_text(written + "\n", encoding="utf-8")
        yield Path(name)


def _vectors_of(pooling: str) -> dict[str, Any]:
    """The files of a folder whose encoder's vectors are pooled and made of length 1."""
    paths = {"Transformer": "", "Pooling": "1_Pooling", "Normalize": "2_Normalize"}
    modules = [entry(number, *of) for number, of in enumerate(paths.items())]
    return {"modules.json": modules, "1_Pooling/config.json": {"pooling_mode": pooling}}


def _generation(file: Gguf) -> dict[str, Any]:
    """The tokens that begin and end: a turn of a chat may end with others than a text."""
    ids = {n: file.fields.get(f"{_FIELD}{n}_token_id") for n in ("bos", "eos", "eot", "eom")}
    ends = [*dict.fromkeys(i for n in ("eos", "eot", "eom") if (i := ids[n]) is not None)]
    found = {"bos_token_id": ids["bos"], "eos_token_id": ends[0] if len(ends) == 1 else ends}
    return {name: value for name, value in found.items() if value not in (None, [])}


def tokenizer_files(file: Gguf) -> dict[str, dict[str, Any]]:
    """tokenizer.json and tokenizer_config.json; nothing for a file without a vocabulary.

    Byte-level BPE (gpt2), SentencePiece's BPE (llama), whose merges follow from the scores, its
    Unigram (t5), and WordPiece (bert).
    Raises GraphgenError for others, and for fields that do not fit together.
    """
    own = {n.removeprefix(_FIELD): x for n, x in file.fields.items() if n.startswith(_FIELD)}
    kind, pre, tokens = own.get("model"), own.get("pre"), own.get("tokens")
    if pre is None and file.fields.get("general.architecture") == "gpt2":
        pre = "gpt-2"  # the oldest files do not say; those of other models had it wrong
    if kind in (None, "none") or tokens is None:
        return {}
    known = {"llama": [None], "gpt2": list(SPLITS), "bert": [None], "t5": [None]}
    if kind not in list(known) or (kind == "gpt2" and pre not in list(SPLITS)):
        name = f"{_FIELD}pre is {pre!r:.40}" if kind == "gpt2" else f"{_FIELD}model is {kind!r:.40}"
        supported = ", ".join(SPLITS if kind == "gpt2" else known)
        raise GraphgenError(
            f"{file.path}: {name}; supported are {supported}: give --like DIR, a folder with the "
            "config.json and the tokenizer.json of the model"
        )
    encoder = file.fields.get("general.architecture") == "bert"
    if kind == "t5" and encoder and not {"add_bos_token", "add_eos_token"} <= own.keys():
        problem = "does not say which tokens are put around texts"
        raise GraphgenError(f"{file.path} {problem}; give --like DIR, or convert the model again")
    types, scores = (_numbers(file, own, name) for name in ("token_type", "scores"))
    if not isinstance(tokens, list) or (kind in ("llama", "t5") and scores is None):
        raise GraphgenError(f"{file.path}: {_FIELD}tokens or scores are missing; give --like DIR")
    vocabulary = {token: i for i, token in enumerate(tokens)}
    special = np.zeros(len(tokens), int) if types is None else types
    mark = MARK if kind == "bert" else ""
    whole = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    added = [
        {
            "id": int(i),
            "content": tokens[i].removeprefix(mark),
            **whole,
            "special": bool(special[i] != OWN_TYPE),
        }
        for i in np.flatnonzero(np.isin(special, [UNKNOWN, CONTROL, OWN_TYPE]))
        if tokens[i]
    ]
    named = {n: _token(file, own, tokens, n) for n in ("bos", "eos", "unknown", "padding")}
    parts = (
        likely_pairs(own, vocabulary, scores, special, named["unknown"])
        if kind == "llama"
        else None
    )
    if kind in ("bert", "t5"):
        args = (file.path, own)
        parts = word_pieces(*args, special) if kind == "bert" else unigram(*args, scores)
    made: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        **(parts or _bytes(file, own, vocabulary, str(pre))),
    }
    begins = own.get("add_bos_token", kind == "llama" or pre in WHOLE)
    ends = own.get("add_eos_token", kind == "t5")
    begin, end = (named[n] if put else None for n, put in (("bos", begins), ("eos", ends)))
    made.setdefault("post_processor", _post(begin, end, vocabulary))
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    names = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
    config |= {names[n]: token for n, token in named.items() if token is not None}
    if isinstance(template := own.get("chat_template"), str):
        config["chat_template"] = template
    return {"tokenizer.json": made, "tokenizer_config.json": config}


def _numbers(file: Gguf, own: dict[str, Any], name: str) -> Any:
    """An array with a number for each token, if there is one."""
    found = own.get(name)
    if found is None:
        return None
    if not isinstance(found, np.ndarray) or len(found) != len(own["tokens"]):
        problem = f"{_FIELD}{name} has not a number for each of {len(own['tokens'])} tokens"
        raise GraphgenError(f"{file.path}: {problem}; give --like DIR")
    return found


def _token(file: Gguf, own: dict[str, Any], tokens: list[str], name: str) -> str | None:
    found = own.get(f"{name}_token_id")
    if found is None:
        return None
    if type(found) is not int or not 0 <= found < len(tokens):
        problem = f"{_FIELD}{name}_token_id is {found!r:.40}, and there are {len(tokens)} tokens"
        raise GraphgenError(f"{file.path}: {problem}; give --like DIR")
    return tokens[found]


def _bytes(file: Gguf, own: dict[str, Any], vocabulary: dict[str, int], pre: str) -> dict[str, Any]:
    merges = own.get("merges")
    pairs = [m.split(" ") for m in merges] if isinstance(merges, list) else [[]]
    wrong = [p for p in pairs if len(p) != 2 or not {*p, "".join(p)} <= vocabulary.keys()]
    if wrong:
        what = f"has {' '.join(wrong[0])!r:.40}, which is not a pair of tokens"
        raise GraphgenError(f"{file.path}: {_FIELD}merges {what}; give --like DIR")
    model = {"type": "BPE", "vocab": vocabulary, "merges": pairs, "ignore_merges": pre in WHOLE}
    return {
        "normalizer": {"type": "NFC"} if pre in NFC else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": SPLITS[pre]},
        "decoder": PLAIN,
        "model": model,
    }


def _post(begin: str | None, end: str | None, ids: dict[str, int]) -> dict[str, Any]:
    """What is put around a text, and around each of a pair."""

    def around(text: str, kind: int) -> list[dict[str, Any]]:
        tokens = [{"SpecialToken": {"id": x, "type_id": kind}} if x else None for x in (begin, end)]
        first, last = ([token] if token else [] for token in tokens)
        return [*first, {"Sequence": {"id": text, "type_id": kind}}, *last]

    return {
        "type": "TemplateProcessing",
        "single": around("A", 0),
        "pair": [*around("A", 0), *around("B", 1)],
        "special_tokens": {x: {"id": x, "ids": [ids[x]], "tokens": [x]} for x in (begin, end) if x},
    }
