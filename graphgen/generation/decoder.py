"""How decoders are opened: from a folder, a file or a model, with the cache in place or not."""

import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

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
_PROMPTS = Path(PROMPTS).name


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
    opening = _Opening(threads, provider, strict, adapter, adapters)
    path = Path(model) if isinstance(model, str | os.PathLike) else None
    in_folder = path is not None and path.is_dir()
    if path is not None and in_folder:
        found = _files(path)
        if {ENCODER, DECODER} <= {*found}:
            return opening.encoder_decoder([found[ENCODER], found[DECODER]])
        if _SINGLE not in found:
            raise GraphgenError(f"generate: {path} has no {_SINGLE}; write it with graphgen build")
        path = found[_SINGLE]
    graph: Any = load(path) if path is not None else getattr(model, "model", model)
    if not isinstance(graph, ir.Model):
        raise GraphgenError(
            f"generate: got a {type(model).__name__}; give a folder or a model{user_line()}"
        )
    second = None
    if prompts is not None:
        second = _Prompts(model_in(prompts, "generate"), None)
    elif path is not None and in_folder and (beside := path.with_name(_PROMPTS)).exists():
        second = _Prompts(load(beside), beside)
    return opening.decoder(graph, path, in_folder=in_folder, chunk=chunk, prompts=second)


class _Prompts(NamedTuple):
    """A second graph, which reads prompts, and its file."""

    graph: ir.Model
    path: Path | None


class _Opening:
    """How the graphs of a decoder are opened: on which device, and with which adapters."""

    def __init__(
        self,
        threads: int | None,
        provider: Provider | None,
        strict: bool,
        adapter: Given | None,
        adapters: Mapping[str, Given] | None,
    ) -> None:
        self._how: dict[str, Any] = {"threads": threads, "provider": provider, "strict": strict}
        self._adapters = adapter, adapters
        self._plain = adapter is None and adapters is None
        self._device: TargetName | None = _device_of(provider)
        self._old = minor(import_runtime().__version__) < (1, 24)

    def encoder_decoder(self, files: Sequence[Path]) -> EncoderDecoder:
        """Open an encoder, and the decoder that reads what it gives."""
        if self._plain and not self._device:  # as the files are
            encoder, bound = Session(files[0], options=QUIET, **self._how), load(files[1])
            decoder = Session(files[1], **self._how)
            return EncoderDecoder(encoder, decoder, _bound(bound, in_folder=True))
        both = adapted([load(file) for file in files], "generate", *self._adapters)
        encoder, decoder = (
            session_on(_made_for(self._device, graph), file, changed, **self._how)
            for file, (graph, changed) in zip(files, both, strict=True)
        )
        return EncoderDecoder(encoder, decoder, _bound(both[1][0], in_folder=True))

    def decoder(
        self,
        graph: ir.Model,
        path: Path | None,
        *,
        in_folder: bool,
        chunk: int,
        prompts: _Prompts | None,
    ) -> Growing | InPlace:
        """Open a decoder with its cache in place, or growing if that cannot be."""
        who = f"generate({path.name if path is not None else 'model'})"
        inputs = [str(value.name) for value in graph.graph.inputs]
        outputs = [value.name for value in graph.graph.outputs]
        if not {"input_ids", MASK} <= {*inputs} or "logits" not in outputs:
            raise GraphgenError(
                f"{who}: its inputs are {', '.join(inputs[:4])}; a decoder has the inputs "
                "input_ids, attention_mask and a cache, and the output logits: build it with "
                "--task text-generation"
            )
        [(graph, changed)] = adapted([graph], "generate", *self._adapters)
        graph, placed = self._in_place(graph, who)
        if isinstance(placed, Miss):
            # Attention of onnxruntime 1.23 gives NaN for rows of padding only, as on the left here.
            graph = optimize(graph).model if self._old else _made_for(self._device, graph)
            session = self._session(graph, path, changed)
            return Growing(session, chunk, placed.reason, _bound(graph, in_folder=in_folder))
        placed = _made_for(self._device, placed)
        bound = _bound(placed, in_folder=in_folder)
        session = self._session(placed, path, changed)
        read = prompts is not None and self._plain and session.plan.device == "cpu"
        reader = self._reader(prompts, session) if prompts is not None and read else None
        return InPlace(session, chunk, bound, reader)

    def _session(
        self, graph: ir.Model, path: Path | None, changed: Collection[str], **how: Any
    ) -> Session:
        """On a graph that gives the logits of a row's last token, and reads int8 as it pays."""
        keep_last(graph, several=True)
        if not self._device:
            graph = attend_by_products(graph, products_pay)
        return session_on(graph, path, changed, **self._how, **how)

    def _in_place(self, graph: ir.Model, who: str) -> tuple[ir.Model, ir.Model | Miss]:
        """The graph to open if its cache must grow, and the one with the cache in place.

        Raises GraphgenError if it is in place in the file, and cannot be on this machine.
        """
        known = _is_placed(graph)
        placed = graph if known else in_place(graph)
        inputs = {str(value.name) for value in graph.graph.inputs}
        if isinstance(placed, Miss) and any(name.startswith(PAST) for name in inputs):
            made = with_cache(graph)  # where places and masks are those of another exporter
            again = made if isinstance(made, Miss) else in_place(made.model)
            placed = placed if isinstance(again, Miss) else again
            if not isinstance(made, Miss) and "position_ids" not in inputs:
                graph = optimize(made.model).model
        problem = "" if isinstance(placed, Miss) else self._problem(placed)
        if problem and known:
            mend = "leave out provider" if self._device else "upgrade onnxruntime"
            raise GraphgenError(
                f"{who}: {problem}; build it with --layout plain and without --kv, or {mend}"
            )
        return graph, Miss(problem) if problem else placed

    def _problem(self, placed: ir.Model) -> str:
        """Why this runtime or device does not compute a cache in place, or ""."""
        if self._old and (problem := _wrong_below_1_24(placed)):
            return problem
        return lacks(placed, find_target(self._device)) if self._device else ""

    def _reader(self, prompts: _Prompts, session: Session) -> Reader:
        """What reads prompts into the cache of a session: GraphgenError if it does not fit."""
        model, path = prompts
        who = f"generate({'prompts' if path is None else path.name})"
        written = model.metadata_props.get(PROMPTS_KEY, "")
        if not written.isdecimal():
            problem = f"its metadata {PROMPTS_KEY} is {written!r}, not a number of tokens"
            raise GraphgenError(f"{who}: {problem}; build the folder again")

        def open_it() -> Session:
            placed = model.clone() if _is_placed(model) else in_place(model)
            if isinstance(placed, Miss):
                raise GraphgenError(f"{who}: {placed.reason}; build the folder again")
            found = self._session(placed, path, (), options=QUIET)
            if (found.inputs, found.outputs) != (session.inputs, session.outputs):
                problem = "its inputs and outputs are not those of the model beside it"
                raise GraphgenError(f"{who}: {problem}; build the folder again")
            return found

        return Reader(open_it, int(written))


def _is_placed(model: ir.Model) -> bool:
    """Whether the cache of a model is in place already."""
    return any(CAPACITY in map(str, value.shape or ()) for value in model.graph.inputs)


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
            return "onnxruntime below 1.24 sees one token too many in a window"
        if len(present_inputs(node)) > 7:
            return "sinks were not tried on onnxruntime below 1.24"
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
    model: ir.Model,
    path: Path | None,
    changed: Collection[str] = (),
    options: Mapping[str, str] | None = None,
    **how: Any,
) -> Session:
    """A session on a model; weights that are not `changed` are read from its data file."""
    if path is None or minor(import_runtime().__version__) < (1, 21):  # it reads no other folder
        return Session(to_bytes(model), options=options, **how)
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
    folder = {_FOLDER: str(path.parent.resolve())}
    return Session(to_bytes(model), options={**folder, **(options or {})}, **how)
