"""What the folder of a checkpoint, or a file of GGUF, holds: the weights by their names."""

from pathlib import Path

from graphgen.errors import GraphgenError
from graphgen.files import present
from graphgen.models.published.config import Config
from graphgen.models.published.few_bits import FewBits, unpacked_names
from graphgen.models.published.forms import form_of
from graphgen.models.published.gguf import open_gguf
from graphgen.models.published.gguf_names import read_gguf
from graphgen.models.published.language_model import PART_OF, language_only
from graphgen.models.published.mxfp4 import unpacked
from graphgen.models.published.quanto import quanto_in
from graphgen.models.published.sentence_modules import modules_of
from graphgen.models.published.weight_norm import plain
from graphgen.models.published.weights import read_weights
from graphgen.safetensors import Weight


def check_files(folder: Path) -> None:
    """Raise GraphgenError where there is no checkpoint, or an adapter that would be left out."""
    adapter = present(folder / "adapter_config.json")
    if not present(folder / "config.json"):
        modules_of(folder)  # an error tells which part of sentence-transformers there is instead
        mend = "build its base, and give this one with --adapter" if adapter else ""
        raise GraphgenError(
            f"{folder} has no config.json; {mend or 'give the folder of a checkpoint'}"
        )
    if adapter:
        raise GraphgenError(
            f"{folder} holds an adapter, too, which transformers adds to the weights: move "
            "adapter_config.json and its weights to a folder of their own, for --adapter"
        )


def stored_in(
    folder: Path, config: Config, gguf: Path | None, remarks: list[str]
) -> tuple[dict[str, Weight], str]:
    """The weights by their names, and the method by which they are in few bits, or ""."""
    if gguf is not None:  # whose matrices all have a row for each output
        stored = read_gguf(open_gguf(gguf), config)
    else:
        stored = plain(unpacked(read_weights(folder)))
        if config.given(PART_OF):
            stored, line = language_only(config, stored)
            remarks.append(line)
    form = form_of(config) or quanto_in(folder, stored)
    if form is None:
        few = any(isinstance(weight, FewBits) for weight in stored.values())
        return stored, ("mxfp4" if gguf is None else "gguf") * few
    stored = unpacked_names(stored, form, str(folder))
    if form.rounds:
        remarks.append(
            f"{config.where}: {form.method} also rounds what products read, in a way of its own, "
            "which is left out: results are closer to those of the weights"
        )
    return stored, form.method
