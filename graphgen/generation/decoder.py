"""How decoders are opened: from a folder, a file or a model, with the cache in place or not."""

import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir

from graphgen import ops
from graphgen.errors import GraphgenError, user_line
from graphgen.export.by_row import Given, adapted
from graphgen.export.folders import DECODER, ENCODER, PROMPTS, PROMPTS_KEY
from graphgen.export.read import load
from graphgen.export.write import Beside, to_bytes
from graphgen.generation.caches import (
    MASK,
    PAST,
    PRESENT,
    Decoder,
    InPlace,
    Reader,
)
from graphgen.generation.encoder_decoders import EncoderDecoder
from graphgen.generation.growing import Growing
from graphgen.generation.huge_pages import side_by_side
from graphgen.generation.speech import FEATURES
from graphgen.graph import ModelLike, model_in, present_inputs
from graphgen.header import read_header
from graphgen.match import Miss
from graphgen.op import is_a
from graphgen.opening import has_cuda
from graphgen.ops.quantized import dynamic_quantize_linear, dynamic_quantize_matmul
from graphgen.passes import optimize
from graphgen.passes.caching import with_cache
from graphgen.passes.decoding import CAPACITY, in_place, keep_last, lacks
from graphgen.passes.integer_attention import attend_by_products
from graphgen.runtime import QUIET, Provider, Session, import_runtime
from graphgen.targets import TargetName, target as find_target
from graphgen.targets.kernels import products_pay
from graphgen.version import minor

_FOLDER = "session.model_external_initializers_file_folder_path"
_SINGLE = "model.onnx"


def open_decoder(
    model: str | os.PathLike[str] | ModelLike,
    *,
    threads: int | None = None,
    provider: Provider | None = None,
    strict: bool = False,
    chunk: int = 512,
    adapter: Given | None = None,
    adapters: Mapping[str, Given] | None = None,
    prompts: ModelLike | None = None,
) -> "Decoder":
    """Open the decoder of a folder that `graphgen build` wrote, of a file, or of a model.

    `adapter` is merged into its weights; each row has one of `adapters` beside them. `prompts` is a
    graph with the same inputs and outputs, which reads prompts on the CPU if there are no adapters;
    by default that of the folder.

    Raises GraphgenError if there is none, or if its inputs are not those of a decoder.
    """
    side_by_side()
    how: dict[str, Any] = {"threads": threads, "provider": provider, "strict": strict}
    old = minor(import_runtime().__version__) < (1, 24)
    device = _device_of(provider)
    path = Path(model) if isinstance(model, str | os.PathLike) else None
    in_folder = path is not None and path.is_dir()
    if path is not None and in_folder:
        found = _files(path)
        if {ENCODER, DECODER} <= {*found}:
            files = [found[ENCODER], found[DECODER]]
            if adapter is None and adapters is None and not device:
                encoder = Session(files[0], options=QUIET, **how)
                bound = _bound(load(files[1]), in_folder=True)
                return EncoderDecoder(encoder, Session(files[1], **how), bound)
            both = adapted([load(file) for file in files], "generate", adapter, adapters)
            encoder, decoder = (
                session_on(_made_for(device, graph), file, changed, **how)
                for file, (graph, changed) in zip(files, both, strict=True)
            )
            return EncoderDecoder(encoder, decoder, _bound(both[1][0], in_folder=True))
        if _SINGLE not in found:
            raise GraphgenError(f"generate: {path} has no {_SINGLE}; write it with graphgen build")
        path = found[_SINGLE]
    graph: Any = load(path) if path is not None else getattr(model, "model", model)
    if not isinstance(graph, ir.Model):
        raise GraphgenError(
            f"generate: got a {type(model).__name__}; give a folder or a model{user_line()}"
        )
    who = f"generate({path.name if path is not None else 'model'})"
    inputs = [str(value.name) for value in graph.graph.inputs]
    outputs = [value.name for value in graph.graph.outputs]
    if not {"input_ids", MASK} <= {*inputs} or "logits" not in outputs:
        raise GraphgenError(
            f"{who}: its inputs are {', '.join(inputs[:4])}; a decoder has the inputs input_ids, "
            f"attention_mask and a cache, and the output logits: build it with --task "
            "text-generation"
        )
    [(graph, how["changed"])] = adapted([graph], "generate", adapter, adapters)
    placed: ir.Model | Miss
    known = _is_placed(graph)
    placed = graph if known else in_place(graph)
    if isinstance(placed, Miss) and any(name.startswith(PAST) for name in inputs):
        made = with_cache(graph)  # where places and masks are those of another exporter
        again = made if isinstance(made, Miss) else in_place(made.model)
        placed = placed if isinstance(again, Miss) else again
        if not isinstance(made, Miss) and "position_ids" not in inputs:
            graph = optimize(made.model).model
    if old and isinstance(placed, ir.Model) and (problem := _wrong_below_1_24(placed)):
        if known:
            raise GraphgenError(f"{who}: {problem}")
        placed = Miss(problem)
    if device and isinstance(placed, ir.Model) and (reason := lacks(placed, find_target(device))):
        if known:
            raise GraphgenError(
                f"{who}: {reason}; build it with --layout plain and without --kv, or "
                "leave out provider"
            )
        placed = Miss(reason)
    if isinstance(placed, Miss):
        # Attention of onnxruntime 1.23 gives NaN for rows of padding only, as on the left here.
        graph = optimize(graph).model if old else _made_for(device, graph)
        keep_last(graph, several=True)
        session = session_on(graph, path, **how)
        return Growing(session, chunk, placed.reason, _bound(graph, in_folder=in_folder))
    placed = _made_for(device, placed)
    keep_last(placed, several=True)
    session = session_on(_by_products(placed, device), path, **how)
    reader = None
    if adapter is None and adapters is None and session.plan.device == "cpu":
        beside = path.with_name(Path(PROMPTS).name) if path is not None and in_folder else None
        beside = None if prompts is not None or beside is None or not beside.exists() else beside
        second: Any = prompts if beside is None else load(beside)
        if second is not None:
            reader = _reader(second, beside, session, device, how)
    return InPlace(session, chunk, _bound(placed, in_folder=in_folder), reader)


def _is_placed(model: ir.Model) -> bool:
    """Whether the cache of a model is in place already."""
    return any(CAPACITY in map(str, value.shape or ()) for value in model.graph.inputs)


def _reader(
    model: ModelLike,
    path: Path | None,
    session: Session,
    device: TargetName | None,
    how: Mapping[str, Any],
) -> Reader:
    """What reads prompts into the cache of a session: raises GraphgenError if it does not fit."""
    model = model_in(model, "generate")
    who = f"generate({'prompts' if path is None else path.name})"
    written = model.metadata_props.get(PROMPTS_KEY, "")
    if not written.isdecimal():
        problem = f"its metadata {PROMPTS_KEY} is {written!r}, not a number of tokens"
        raise GraphgenError(f"{who}: {problem}; build the folder again")

    def open_it() -> Session:
        placed = model.clone() if _is_placed(model) else in_place(model)
        if isinstance(placed, Miss):
            raise GraphgenError(f"{who}: {placed.reason}; build the folder again")
        keep_last(placed, several=True)
        found = session_on(_by_products(placed, device), path, **how)
        if (found.inputs, found.outputs) != (session.inputs, session.outputs):
            problem = "its inputs and outputs are not those of the model beside it"
            raise GraphgenError(f"{who}: {problem}; build the folder again")
        return found

    return Reader(open_it, int(written))


def _by_products(model: ir.Model, device: TargetName | None) -> ir.Model:
    """With attention to a cache of int8 by products of integers, where it runs and pays."""
    return model if device else attend_by_products(model, products_pay)


def _bound(model: ir.Model, *, in_folder: bool) -> str:
    """Why a token's results depend on the tokens that are read together with it, or ""."""
    together = (dynamic_quantize_linear, dynamic_quantize_matmul)
    if any(is_a(node, *together) for node in model.graph.all_nodes()):
        return "int8 products scale all tokens that are read together: build it in int4 or fp32"
    places = [value for value in model.graph.inputs if value.name == "position_ids"]
    if not in_folder and any(is_a(node, ops.reduce_max) for x in places for node in x.consumers()):
        return (
            "its rotary positions turn by the last token of a call: give a folder with config.json"
        )
    return ""


def _device_of(provider: Provider | None) -> TargetName | None:
    """The target of a session that is not on the CPU."""
    if provider == "webgpu":
        return "webgpu"
    asked = provider == "cuda" or (provider in (None, "auto") and has_cuda())
    return "cuda" if asked else None


def _made_for(device: TargetName | None, graph: ir.Model) -> ir.Model:
    """What a folder holds, a copy; in operators that have kernels on the device."""
    return optimize(graph, target=device).model if device else graph.clone()


def _wrong_below_1_24(model: ir.Model) -> str:
    """Why onnxruntime below 1.24 does not compute the attention of a cache in place, or ""."""
    for node in (node for node in model.graph if is_a(node, ops.group_query_attention)):
        if node.attributes.get_int("local_window_size", -1) >= 0:
            return "onnxruntime below 1.24 sees one token too many in a window; upgrade it"
        if len(present_inputs(node)) > 7:
            return "sinks were not tried on onnxruntime below 1.24; upgrade it"
    return ""


def task_of(folder: Path) -> str:
    """The task of a folder that `open_decoder` opens; "" for any other.

    A decoder is a model that outputs keys and values.
    """
    found = _files(folder)
    if {ENCODER, DECODER} <= {*found}:
        inputs = {x.name for x in read_header(found[ENCODER])[1].graph.input}
        return "automatic-speech-recognition" if FEATURES in inputs else "text2text-generation"
    outputs = read_header(found[_SINGLE])[1].graph.output if _SINGLE in found else ()
    return "text-generation" if any(y.name.startswith(PRESENT) for y in outputs) else ""


def _files(folder: Path) -> dict[str, Path]:
    return {file.name: file for file in sorted(folder.rglob("*.onnx"))}


def session_on(
    model: ir.Model, path: Path | None, changed: Collection[str] = (), **how: Any
) -> Session:
    """A session on a model; weights that are not `changed` are read from its data file."""
    if path is None or minor(import_runtime().__version__) < (1, 21):  # it reads no other folder
        return Session(to_bytes(model), **how)
    for tensor in onnx.load(path, load_external_data=False).graph.initializer:
        value = model.graph.initializers.get(tensor.name)
        place = {entry.key: entry.value for entry in tensor.external_data}
        if value is None or value.const_value is None or not place or tensor.name in changed:
            continue
        if list(value.const_value.shape.numpy()) == list(tensor.dims):
            value.const_value = Beside(
                place["location"],
                int(place.get("offset", 0)),
                int(place.get("length", value.const_value.nbytes)),
                value.const_value.dtype,
                shape=ir.Shape(tensor.dims),
                name=tensor.name,
            )
    return Session(to_bytes(model), options={_FOLDER: str(path.parent.resolve())}, **how)
