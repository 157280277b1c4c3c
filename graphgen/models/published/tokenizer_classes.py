"""What a tokenizer's class says in transformers 5, which may differ from its tokenizer.json.

Classes with parts of their own take the vocabulary from the file, and how texts are normalized and
split from their code; all other clients do as the file says.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from graphgen.errors import GraphgenError
from graphgen.files import read_bytes
from graphgen.models.published.folder import settings
from graphgen.models.published.tokenizer import encoded, panics, tokenizer
from graphgen.models.published.tokenizer_parts import around, charsmap_of, parts_of

_OF_TYPES = {
    "Bert": "bert distilbert electra nomic_bert megatron-bert",
    "MPNet": "mpnet",
    "Roberta": "roberta bart data2vec-text roberta-prelayernorm",
    "XLMRoberta": "xlm-roberta gte jina_embeddings_v3",
    "Camembert": "camembert",
    "Albert": "albert",
    "Deberta": "deberta",
    "DebertaV2": "deberta-v2",
    "T5": "t5 mt5",
    "Pegasus": "pegasus",
    "GPT2": "gpt2 gptj opt starcoder2",
    "Qwen2": "qwen2 qwen3 qwen2_moe qwen3_moe",
    "Gemma": "gemma gemma2 gemma3_text",
    "Cohere": "cohere cohere2",
    "GPTNeoX": "gpt_neox",
    "Whisper": "whisper",
    "": "mistral mixtral granite olmo2 phi3 glm glm4 stablelm modernbert modernbert-decoder umt5 "
    "xlm-roberta-xl",
}
"""The class that transformers has for a model type; "" reads the file whatever class is named."""

_CLASS = {kind: name for name, kinds in _OF_TYPES.items() for kind in kinds.split()}
_ALIASES = {"Bart": "Roberta", "DistilBert": "Bert", "Electra": "Bert"}

_TEXTS = (
    "Hello World 12345",
    "  two  spaces\n\nand lines\t\u00fc\u0301",
    "it's",
    "a{0}b {0} c",
    "\ufb01\u00bd ``x'' \u65e5\u672c \u00c0 \x7f \x00",
)
"""Texts on which tokenizers differ; {0} is a special token."""


def class_of(folder: Path) -> str:
    """The class, such as GPT2, that transformers makes of a folder's tokenizer; "" if no other."""
    model, config = settings(folder, "config.json"), settings(folder, "tokenizer_config.json")
    named = config.get("tokenizer_class") or model.get("tokenizer_class")
    kind = str(model.get("model_type"))
    if "auto_map" in config or _CLASS.get(kind) == "":
        return ""
    if not isinstance(named, str) or kind == "qwen2":
        return _CLASS.get(kind, "")
    name = named.removesuffix("Fast").removesuffix("Tokenizer")
    return _ALIASES.get(name, name)


def class_remarks(folder: Path) -> Iterator[str]:
    """A line if transformers reads a text as other tokens than tokenizer.json does."""
    name = class_of(folder)
    try:
        written = json.loads(read_bytes(folder / "tokenizer.json").decode())
        reader = tokenizer(folder)
    except (OSError, ValueError, RecursionError, GraphgenError):
        return  # what needs it gives the error
    config = settings(folder, "tokenizer_config.json")
    parts = parts_of(name, config, charsmap_of(written)) if isinstance(written, dict) else None
    if parts is None or reader is None or (name == "Llama" and "ByteLevel" in json.dumps(written)):
        return
    from tokenizers import Tokenizer

    parts["model"] = {**written.get("model", {}), **parts.get("model", {})}
    parts |= {"padding": None, "truncation": None, **around(name, config, reader)}
    try:
        with panics():
            other = Tokenizer.from_str(json.dumps({**written, **parts}))
    except Exception:  # it raises nothing more specific; the vocabulary is of another kind
        return
    special = next((t.content for t in reader.get_added_tokens_decoder().values()), "")
    for text in (text.format(special) for text in _TEXTS):
        ours, theirs = _ids(reader, text), _ids(other, text)
        if ours != theirs and None not in (ours, theirs):
            yield (
                f"{folder / 'tokenizer.json'} reads {text!r} as the tokens {ours}, but "
                f"{name}Tokenizer of transformers 5, which takes only the vocabulary from it, as "
                f"{theirs}: the built folder does as the file says, and so does "
                "PreTrainedTokenizerFast of transformers"
            )
            return


def _ids(reader: Any, text: str) -> list[int] | None:
    try:
        return [*encoded("build", reader, text).ids]
    except GraphgenError:
        return None
