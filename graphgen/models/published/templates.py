"""Where the folder of a checkpoint has its chat templates."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from graphgen.errors import GraphgenError
from graphgen.files import present, read_bytes
from graphgen.models.published.folder import settings

_FILE, _FILES = "chat_template.jinja", "additional_chat_templates"
_OF_PROCESSORS = ("processor_config.json", "chat_template.json")
"""Files of processors with a template, which counts where the tokenizer has none."""


def sources(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """The texts of the templates by name, from where transformers takes those of a tokenizer.

    If there are files, the field of tokenizer_config.json does not count.
    """
    found = [folder / _FILE] if present(folder / _FILE) else []
    found += sorted((folder / _FILES).glob("*.jinja"))
    named: Any = {("default" if x.parent == folder else x.stem): _read(x) for x in found}
    named = named or config.get("chat_template")
    if isinstance(named, list):
        named = {x.get("name"): x.get("template") for x in named if isinstance(x, dict)}
    for file in _OF_PROCESSORS:
        if not named:
            named = settings(folder, file).get("chat_template")
            named = named.get("default") if isinstance(named, dict) else named
    if not isinstance(named, dict):
        named = {"default": named}
    texts = {name: text for name, text in named.items() if isinstance(text, str)}
    if not texts:
        problem = f"{folder} has no chat template, which `messages` need"
        raise GraphgenError(f"{problem}: add {_FILE}")
    return texts


def _read(path: Path) -> str:
    try:
        return read_bytes(path).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise GraphgenError(f"{path} cannot be read: {error}") from error
