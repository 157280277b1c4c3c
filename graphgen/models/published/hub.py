"""Checkpoints by their names on the Hugging Face Hub, which its own library downloads and keeps."""

import re
from pathlib import Path

from graphgen.errors import GraphgenError
from graphgen.models.published.weights import INDEX, SINGLE

_NAME = re.compile(r"([\w-][\w.-]*/[\w-][\w.-]*)(?:/([\w./-]+\.gguf))?(?:@([\w./-]+))?")

_NOTES = ("*.json", "*.jinja", "*.txt", "*.model")
_OF_MODULES = [f"*_{kind}/{SINGLE}" for kind in ("Dense", "LayerNorm", "StaticEmbedding")]
_WEIGHTS = (SINGLE, "model-*-of-*.safetensors", INDEX, *_OF_MODULES)
_ASIDE = ("onnx/*", "openvino/*", "original/*", "*.onnx.json")
"""The same model for others, and as its authors trained it."""


def is_name(text: str) -> bool:
    """Whether it is OWNER/MODEL, with /FILE.gguf or @REVISION if wanted, and no path of a file."""
    return _NAME.fullmatch(text) is not None and not Path(text).exists()


def download(name: str, *, weights: bool = True) -> Path:
    """The folder of a name's checkpoint, or its GGUF file, downloaded unless the cache has it.

    Only what is read here is: weights in safetensors, configurations, tokenizers. The cache, the
    token for models that are not public, and being offline are huggingface_hub's, with its
    variables HF_HOME, HF_TOKEN and HF_HUB_OFFLINE. Raises GraphgenError if the model or the file
    is not there, or not for everybody, and if the library is missing.
    """
    match = _NAME.fullmatch(name)
    if match is None:
        raise GraphgenError(f"{name!r} is not the name of a model: give OWNER/MODEL")
    model, file, revision = match.groups()
    try:
        from huggingface_hub import errors, snapshot_download
    except ImportError as error:
        raise GraphgenError(
            f"{name} is no folder here, and downloading a model of that name needs "
            'huggingface_hub; run `pip install "graphgen-onnx[text]"`'
        ) from error
    # A GGUF file in several parts has the others beside it.
    part = re.sub(r"-\d{5}-of-(\d{5})\.gguf$", r"-*-of-\1.gguf", file) if file else None
    wanted = [part] if part else [*_NOTES, *(_WEIGHTS if weights else ())]
    try:
        folder = snapshot_download(
            model, revision=revision, allow_patterns=wanted, ignore_patterns=[*_ASIDE]
        )
    except errors.GatedRepoError as error:
        problem = "its owner grants access: ask for it on the model's page, then `hf auth login`"
        raise GraphgenError(f"{model}: {problem}") from error
    except errors.RevisionNotFoundError as error:
        raise GraphgenError(f"{model} has no revision {revision!r}; leave out @") from error
    except errors.RepositoryNotFoundError as error:
        problem = "is neither a folder here nor a public model of that name on the hub"
        raise GraphgenError(f"{model} {problem}; one that is not needs `hf auth login`") from error
    except Exception as error:  # its client for HTTP raises errors of its own
        [reason, *_] = str(error).splitlines() or [type(error).__name__]
        problem = "is no folder here, and cannot be downloaded"
        raise GraphgenError(f"{model} {problem}: {reason}") from error
    found = Path(folder, file or "")
    if not found.exists():
        raise GraphgenError(f"{model} has no file {file}; see the files on the model's page")
    return found
