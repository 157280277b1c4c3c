"""What a folder is built of: a name of the hub, a folder, or a file."""

from pathlib import Path

from graphgen.models.published import hub


def here(name: str, *, weights: bool = True) -> Path:
    """A path, or that of what the hub has by this name, which is downloaded."""
    return hub.download(name, weights=weights) if hub.is_name(name) else Path(name)


def is_gguf(name: str) -> bool:
    """Whether it names a GGUF file."""
    return name.lower().endswith(".gguf") and not Path(name).is_dir()
