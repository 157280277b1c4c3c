"""Whether the tokenizer of a folder is that of a GGUF file that is built with it."""

import json
from importlib.util import find_spec
from pathlib import Path

from graphgen.errors import GraphgenError
from graphgen.models.published.gguf import Gguf
from graphgen.models.published.gguf_tokenizer import tokenizer_files
from graphgen.models.published.tokenizer import tokenizer

_PROBE = "It's  12345 days,\n\nDon't 'LL; x_1=[3.5] ÄÖ e\u0301 日本語 \t🙂 end."
"""Of digits, contractions, blanks, accents and other scripts: what splits of texts differ in."""

_FEW = 100  # one token in so many may differ: converters write some added ones in another way


def differences(file: Gguf, folder: Path) -> list[str]:
    """A line for each way in which texts become other tokens by the folder than by the file.

    The folder's tokenizer is the one that is used. Raises GraphgenError if more than one token in a
    hundred is another one: then the file is of another model.
    """
    tokens = file.fields.get("tokenizer.ggml.tokens")
    own = tokenizer(folder) if find_spec("tokenizers") else None
    if own is None or not isinstance(tokens, list):
        return []
    vocabulary = own.get_vocab(with_added_tokens=False)
    where = folder / "tokenizer.json"
    other = [
        (i, token, tokens[i] if i < len(tokens) else None)
        for token, i in vocabulary.items()
        if i >= len(tokens) or tokens[i] != token
    ]
    found = []
    if other:
        i, token, stored = min(other)
        what = f"{len(other):,} of {len(vocabulary):,} tokens are others than those of {where}"
        problem = f"{file.path}: {what}: token {i} is {stored!r:.40}, and there {token!r:.40}"
        if len(other) * _FEW > len(vocabulary):
            raise GraphgenError(f"{problem}; the two belong to different models")
        found.append(problem)
    try:
        made = tokenizer_files(file).get("tokenizer.json")
    except GraphgenError:
        pre = file.fields.get("tokenizer.ggml.pre")
        found.append(f"{file.path}: tokenizer.ggml.pre {pre!r:.40} was not compared with {where}")
        return found
    if made is None:
        return found
    from tokenizers import Tokenizer

    both = [
        t.encode(_PROBE, add_special_tokens=False)
        for t in (Tokenizer.from_str(json.dumps(made)), own)
    ]
    if both[0].ids != both[1].ids:
        pairs = zip(both[0].tokens, both[1].tokens, strict=False)
        a, b = next(((a, b) for a, b in pairs if a != b), ("its end", "its end"))
        found.append(
            f"{file.path}: its tokenizer cuts a text into {a!r:.40} where {where} has {b!r:.40}; "
            "the latter is used"
        )
    return found
