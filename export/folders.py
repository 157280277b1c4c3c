"""Folders that clients load: the graph, its weights, and the files of the checkpoint next to it."""

import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, TypeAlias

import onnx_ir as ir

from graphgen import ops, safetensors
from graphgen.errors import GraphgenError
from graphgen.export.partial import in_place_of
from graphgen.export.past import state_of
from graphgen.export.write import Written, export
from graphgen.files import present, read_json
from graphgen.graph import ModelLike, model_in
from graphgen.match import Miss
from graphgen.op import is_a
from graphgen.passes import optimize
from graphgen.passes.decoding import CAPACITY, in_place, keep_last, lacks
from graphgen.targets import TargetName, target as find_target

COPIED = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "source.spm",
    "target.spm",
    "spiece.model",
    "sentencepiece.bpe.model",
    "chat_template.jinja",
    "chat_template.json",
    "preprocessor_config.json",
    "processor_config.json",
    "modules.json",
    "config_sentence_transformers.json",
)
"""Files of a checkpoint that clients read in addition to the graph."""

_TEMPLATES = "additional_chat_templates/*.jinja"

_PATTERNS = (
    "[1-9]_*/config.json",
    "[1-9]_*/model.safetensors",
    "sentence_*_config.json",
    _TEMPLATES,
)
"""More such files: what sentence-transformers reads, of 1_Pooling and others, and templates."""

GENAI = "model.onnx"
"""Where genai_config.json says that the graph is."""

_JAVASCRIPT = "transformers.js_config"
"""The field of config.json that tells transformers.js which graphs have a file of weights."""

_OF_TOKENIZERS = ("input_ids", "token_type_ids", "attention_mask")

_OF_TRANSFORMERS_5 = "TokenizersBackend"
"""A class that only transformers 5 writes, and that returns no token types by itself."""

_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")

MODEL = "onnx/model.onnx"
"""Where transformers.js looks for the graph; optimum looks everywhere."""

PROMPTS = "onnx/prompt_model.onnx"
"""A second graph of a decoder, for graphgen alone, which reads many tokens at once faster."""

PROMPTS_KEY = "graphgen.prompts"
"""Metadata of that graph: from how many tokens on it is the faster one."""


def write_folder(
    source: Path, out: Path, models: Mapping[str, Any], texts: Mapping[str, str] | None = None
) -> Path:
    """Write a folder of graphs, by their names in it, and the checkpoint's files that clients read.

    `texts` are further files. What the graph `PROMPTS` has in common with the other is stored once.

    The folder is complete or absent. Raises GraphgenError if `out` exists and is not such a folder.
    """
    with replacing_folder(f"build({out.name})", out) as folder:
        _copy(source, folder, COPIED)
        tokenizer = folder / "tokenizer_config.json"
        if present(source / tokenizer.name):
            shutil.copyfile(source / tokenizer.name, tokenizer)
        if tokenizer.exists() and (folder / "tokenizer.json").exists():
            # Clients without a family's Python class read tokenizer.json with this class, which
            # returns token types only if the list of inputs says so.
            named = read_json(tokenizer).get("tokenizer_class")
            _change(source, tokenizer, {"tokenizer_class": "PreTrainedTokenizerFast"})
            first = model_in(next(iter(models.values())), "build")
            inputs = {value.name for value in first.graph.inputs}
            if named == _OF_TRANSFORMERS_5:
                inputs.discard("token_type_ids")
            read = [name for name in _OF_TOKENIZERS if name in inputs]
            _change(source, tokenizer, {"model_input_names": read}, replace=False)
        for name, text in (texts or {}).items():
            (folder / name).write_text(text, encoding="utf-8")
        # Other clients read each graph with a file of weights of its own.
        written: Written | None = {} if PROMPTS in models else None
        for name, model in models.items():
            (folder / name).parent.mkdir(exist_ok=True)
            export(model, folder / name, external_data=True, watch=bar, written=written)
        beside = [file.name.removesuffix("_data") for file in folder.glob("onnx/*.onnx_data")]
        if beside and (folder / "config.json").exists():
            given = {"use_external_data_format": dict.fromkeys(sorted(beside), True)}
            _change(source, folder / "config.json", {_JAVASCRIPT: given})
    return out


def write_checkpoint(
    source: Path,
    out: Path,
    weights: Mapping[str, ir.TensorProtocol],
    fields: Mapping[str, Any],
    most: int,
    inside: Mapping[str, Mapping[str, ir.TensorProtocol]] | None = None,
) -> Path:
    """Write the folder of a checkpoint: weights, and the files about it that `source` has.

    `inside` are weights of folders in it, instead of those that `source` has there.

    `fields` replace those that its config.json has. Weights of more than `most` bytes are several
    files and an index, as transformers writes them; one weight at a time is in memory. The folder
    is complete or absent. Raises GraphgenError if `out` exists and holds something: it could be a
    checkpoint without a copy.
    """
    who = f"export({out.name})"
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        what = "holds files" if out.is_dir() else "is a file"
        raise GraphgenError(f"{who}: {out} exists and {what}; remove it, or choose another place")
    parts = safetensors.shards(weights, most)
    names = [f"model-{i:05}-of-{len(parts):05}.safetensors" for i in range(1, len(parts) + 1)]
    names = names if len(parts) > 1 else ["model.safetensors"]
    try:
        with in_place_of(Path(os.path.realpath(out))) as folder:
            _copy(source, folder, (*COPIED, "tokenizer_config.json"))
            config = read_json(source / "config.json")
            config.pop(_JAVASCRIPT, None)
            config.pop("quantization_config", None)  # the weights are real numbers
            config |= {name: value for name, value in fields.items() if name in config}
            text = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
            (folder / "config.json").write_text(text, encoding="utf-8")
            for name, part in zip(names, parts, strict=True):
                with (folder / name).open("wb") as stream:
                    safetensors.write(stream, part, {"format": "pt"})
            for place, own in (inside or {}).items():
                with (folder / place / "model.safetensors").open("wb") as stream:
                    safetensors.write(stream, own, {"format": "pt"})
            if len(parts) > 1:
                size = sum(tensor.nbytes for tensor in weights.values())
                listed = {n: file for file, part in zip(names, parts, strict=True) for n in part}
                index = {"metadata": {"total_size": size}, "weight_map": listed}
                text = json.dumps(index, indent=2, sort_keys=True) + "\n"
                (folder / "model.safetensors.index.json").write_text(text, encoding="utf-8")
    except OSError as error:
        raise GraphgenError(f"{who}: {out} cannot be written: {error.strerror}") from error
    return out


def _copy(source: Path, folder: Path, names: Sequence[str]) -> None:
    """Copy the files with these names, and those that `_PATTERNS` find."""
    found = [file for pattern in _PATTERNS for file in sorted(source.glob(pattern))]
    for name in (*names, *(str(file.relative_to(source)) for file in found)):
        if present(source / name):
            (folder / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(source / name, folder / name)


def _change(source: Path, file: Path, fields: Mapping[str, Any], *, replace: bool = True) -> None:
    """Add fields to the object in a copied file; a field that is an object itself is merged.

    Existing fields stay unless `replace`.
    """
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        for name, value in fields.items():
            old = found.get(name) if isinstance(value, dict) else None
            value = {**old, **value} if isinstance(old, dict) else value
            found[name] = value if replace else found.get(name, value)
        file.write_text(json.dumps(found, indent=2, ensure_ascii=False), encoding="utf-8")
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise GraphgenError(
            f"{source / file.name} is not a JSON object: {error}; download it again"
        ) from error


def bar(items: Iterable[Any], what: str = "writing weights", total: int | None = None) -> Any:
    """The items, with a progress bar on a terminal."""
    from rich.console import Console
    from rich.progress import track

    console = Console(stderr=True)
    return track(
        items, what, total, console=console, transient=True, disable=not console.is_terminal
    )


ENCODER, DECODER = "encoder_model.onnx", "decoder_model_merged.onnx"
"""What the graphs of an encoder-decoder are called, as optimum calls them."""

PARTS = tuple(f"onnx/{name}" for name in (ENCODER, DECODER))
"""Where they are, in this order."""


def write_like(
    who: str, source: Path, out: Path, change: Callable[[Sequence[Path]], Sequence[ModelLike]]
) -> Path:
    """Write a folder like `source`, whose graphs are what `change` makes of the files there.

    The folder is complete or absent. Raises GraphgenError for a folder without graphs of its own.
    """
    graphs = [place for place in (MODEL, GENAI, *PARTS) if present(source / place)]
    known = graphs in ([MODEL], [GENAI], [*PARTS])
    if not known or len([*source.rglob("*.onnx")]) != len(graphs):
        raise GraphgenError(
            f"{who}: {source} is not a folder of graphgen build with {MODEL}, {GENAI}, or "
            f"{' and '.join(PARTS)} alone; give such a folder, or an ONNX file"
        )
    models = change([source / graph for graph in graphs])
    with replacing_folder(f"{who}({out.name})", out) as folder:
        old = {source / f"{graph}{end}" for graph in graphs for end in ("", "_data")}
        for path in sorted(source.rglob("*")):
            if path.is_file() and path not in old:
                (folder / path.relative_to(source)).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, folder / path.relative_to(source))
        for graph, model in zip(graphs, models, strict=True):
            (folder / graph).parent.mkdir(exist_ok=True)
            export(model, folder / graph, external_data=True, watch=bar)
    return out


Layout: TypeAlias = Literal["plain", "genai"]
"""For clients with their own growing cache, and for onnxruntime-genai with shared buffers."""


def write_genai(
    source: Path,
    out: Path,
    model: ModelLike,
    fields: Mapping[str, Any],
    texts: Mapping[str, str] | None = None,
    *,
    target: TargetName = "cpu",
    search: Mapping[str, Any] | None = None,
) -> Path:
    """Write a folder for onnxruntime-genai: the cache in place, and genai_config.json.

    `fields` are those of config.json and generation_config.json, `search` those of how tokens are
    chosen, and `texts` further files.

    Raises GraphgenError if the model's cache cannot be in place.
    """
    given = model_in(model, "write_genai")
    stateful = any(state_of(str(value.name)) for value in given.graph.inputs)
    if stateful and fields["model_type"] not in _WITH_STATES:
        raise GraphgenError(
            f"build({out.name}): its layers keep states of a fixed size; onnxruntime-genai "
            f"knows those of {', '.join(_WITH_STATES)} only; choose --layout plain"
        )
    found = in_place(given)
    if isinstance(found, Miss):
        runtime = find_target("cpu").runtime  # older ones have fewer kernels of attention
        raise GraphgenError(
            f"build({out.name}): the cache cannot be in place, which --layout genai needs: "
            f"{found.reason}, for onnxruntime {runtime}; choose --layout plain, or a newer "
            "onnxruntime where that one is old"
        )
    if target == "webgpu":
        found = optimize(found, target=target).model
        if reason := lacks(found, find_target(target)):
            raise GraphgenError(f"build({out.name}): {reason}; choose --layout plain")
    keep_last(found)
    providers: list[Any] = (
        [{target: {}}] if target in ("cuda", "webgpu") else []
    )  # the CPU is the fallback
    config = json.dumps(_genai_config(fields, found, providers, search or {}), indent=2)
    return write_folder(source, out, {GENAI: found}, {"genai_config.json": config, **(texts or {})})


_WITH_STATES = ("lfm2", "qwen3_5_text", "qwen3_5_moe_text")


def _genai_config(
    fields: Mapping[str, Any], model: ir.Model, providers: list[Any], search: Mapping[str, Any]
) -> dict[str, Any]:
    """What onnxruntime-genai reads; an unknown key is an error there."""
    caches = [value for value in model.graph.inputs if CAPACITY in map(str, value.shape or ())]
    attention = next(node for node in model.graph if is_a(node, ops.group_query_attention))
    [_, kv_heads, _, head_size] = caches[0].shape  # type: ignore[misc]
    names = {"past_%s_names": "past_key_values.%%d.%s", "present_%s_names": "present.%%d.%s"}
    past, present = (
        {key % kind: name % kind for kind in ("key", "value")} for key, name in names.items()
    )
    known = {str(value.name) for value in model.graph.inputs}
    states = sorted({*map(state_of, known)} - {""})
    past |= {f"past_{kind}_names": f"past_{kind}.%d" for kind in states}
    present |= {f"present_{kind}_names": f"present_{kind}.%d" for kind in states}
    layers = {int(n.split(".")[1]): n for n in known if n.startswith("past_")}
    kinds = ["conv" if state_of(layers[i]) else "full_attention" for i in sorted(layers)]
    inputs = ("input_ids", "attention_mask", "position_ids")
    lengths = [fields[n] for n in ("max_position_embeddings", "n_positions") if n in fields]
    if not lengths:
        raise GraphgenError(
            "build: config.json has no max_position_embeddings, which genai_config.json needs; add "
            "it, or choose --layout plain"
        )
    tokens, size = {n: fields[n] for n in _TOKENS if n in fields}, fields["vocab_size"]
    ends = tokens.pop("eos_token_id", [])
    ends = ends if isinstance(ends, list) else [ends]
    if ends := [token for token in ends if 0 <= token < size]:  # genai refuses any other
        tokens["eos_token_id"] = ends[0] if len(ends) == 1 else ends
    longest = min(lengths[0], search.get("max_length", lengths[0]))
    return {
        "model": {
            "type": fields["model_type"] if states else "decoder",
            "context_length": lengths[0],
            "vocab_size": size,
            **tokens,
            "decoder": {
                "session_options": {"log_id": "onnxruntime-genai", "provider_options": providers},
                "filename": GENAI,
                "head_size": head_size,
                "hidden_size": fields.get("hidden_size", fields.get("n_embd")),
                "num_attention_heads": attention.attributes["num_heads"].as_int(),
                "num_key_value_heads": kv_heads,
                "num_hidden_layers": len(layers),
                **({"layer_types": kinds} if fields["model_type"] == "lfm2" else {}),
                "inputs": {**{name: name for name in inputs if name in known}, **past},
                "outputs": {"logits": "logits", **present},
            },
        },
        "search": {**search, "max_length": longest, "past_present_share_buffer": True},
    }


def _foreign(out: Path) -> str:
    """Why a path is not a folder that a build wrote, or ""."""
    if not out.is_dir():
        return "it is a file"
    for path in out.rglob("*"):
        name = path.relative_to(out)
        known = path.suffix in (".onnx", ".onnx_data", ".json") or path.is_dir()
        if not known and name.as_posix() not in COPIED and not any(map(name.match, _PATTERNS)):
            return f"it holds {name}"
    return "" if not any(out.iterdir()) or any(out.rglob("*.onnx")) else "it holds no graph"


@contextmanager
def replacing_folder(who: str, out: Path) -> Iterator[Path]:
    """A folder to fill next to `out`, renamed to it when complete; it replaces an older build."""
    out = Path(os.path.realpath(out))
    if out.exists() and (problem := _foreign(out)):
        raise GraphgenError(
            f"{who}: {out} exists and is not a folder of a model: {problem}; choose another place"
        )
    try:
        with in_place_of(out) as partial:
            yield partial
    except OSError as error:
        raise GraphgenError(f"{who}: {out} cannot be written: {error.strerror}") from error
