"""Decoders as sessions: tokens in, logits of the next one out; keys and values are kept."""

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from graphgen import ops
from graphgen.display import on_screen
from graphgen.errors import GraphgenError, user_line
from graphgen.export.by_row import Given, adapted
from graphgen.export.read import load
from graphgen.export.write import Beside, to_bytes
from graphgen.generation.huge_pages import huge_pages, side_by_side
from graphgen.generation.speech import FEATURES
from graphgen.graph import ModelLike, present_inputs
from graphgen.header import read_header
from graphgen.match import Miss
from graphgen.op import is_a
from graphgen.operands import Array
from graphgen.passes import optimize
from graphgen.passes.caching import with_cache
from graphgen.passes.decoding import CAPACITY, in_place, keep_last, lacks
from graphgen.passes.training.by_row import CHOICE
from graphgen.plan import TensorType
from graphgen.runtime import QUIET, Buffer, Provider, Session, import_runtime, on_host
from graphgen.targets import target as find_target
from graphgen.version import minor

PAST, PRESENT, MASK = "past_key_values", "present", "attention_mask"
_FOLDER = "session.model_external_initializers_file_folder_path"
_SINGLE = "model.onnx"
_STATES = "encoder_hidden_states"
_OWN = ".decoder."  # in the names of a cache of the decoder's own tokens
_ENCODER, _DECODER = "encoder_model.onnx", "decoder_model_merged.onnx"


def open_decoder(
    model: str | os.PathLike[str] | ModelLike,
    *,
    threads: int | None = None,
    provider: Provider | None = None,
    strict: bool = False,
    chunk: int = 512,
    adapter: Given | None = None,
    adapters: Mapping[str, Given] | None = None,
) -> "Decoder":
    """Open the decoder of a folder that `graphgen build` wrote, of a file, or of a model.

    `adapter` is merged into its weights; each row has one of `adapters` beside them.

    Raises GraphgenError if there is none, or if its inputs are not those of a decoder.
    """
    side_by_side()
    how: dict[str, Any] = {"threads": threads, "provider": provider, "strict": strict}
    path = Path(model) if isinstance(model, str | os.PathLike) else None
    if path is not None and path.is_dir():
        found = _files(path)
        if {_ENCODER, _DECODER} <= {*found}:
            files, none = [found[_ENCODER], found[_DECODER]], adapter is None and adapters is None
            if none:
                encoder = Session(files[0], options=QUIET, **how)
                return EncoderDecoder(encoder, Session(files[1], **how))
            both = adapted([load(file) for file in files], "generate", adapter, adapters)
            sessions = [
                session_on(graph, file, changed, **how)
                for file, (graph, changed) in zip(files, both, strict=True)
            ]
            return EncoderDecoder(*sessions)
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
    known = any(CAPACITY in map(str, value.shape or ()) for value in graph.graph.inputs)
    placed = graph if known else in_place(graph)
    if isinstance(placed, Miss) and any(name.startswith(PAST) for name in inputs):
        made = with_cache(graph)  # where places and masks are those of another exporter
        again = made if isinstance(made, Miss) else in_place(made.model)
        placed = placed if isinstance(again, Miss) else again
        if not isinstance(made, Miss) and "position_ids" not in inputs:
            graph = optimize(made.model).model
    old = minor(import_runtime().__version__) < (1, 24)
    if old and isinstance(placed, ir.Model) and (problem := _wrong_below_1_24(placed)):
        if known:
            raise GraphgenError(f"{who}: {problem}")
        placed = Miss(problem)
    webgpu = find_target("webgpu") if provider == "webgpu" else None
    if webgpu and isinstance(placed, ir.Model) and (reason := lacks(placed, webgpu)):
        if known:
            raise GraphgenError(
                f"{who}: {reason}; build it with --layout plain, or leave out provider"
            )
        placed = Miss(reason)
    if isinstance(placed, Miss):
        # Attention of onnxruntime 1.23 gives NaN for rows of padding only, as on the left here.
        graph = optimize(graph).model if old else graph.clone()
        keep_last(graph)
        return Growing(session_on(graph, path, **how), chunk, note=placed.reason)
    placed = placed.clone()
    keep_last(placed)
    return InPlace(session_on(placed, path, **how), chunk)


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
    if {_ENCODER, _DECODER} <= {*found}:
        inputs = {x.name for x in read_header(found[_ENCODER])[1].graph.input}
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


class Decoder:
    """Rows of tokens, each continued by one token at a time.

    Keys and values stay in the memory of the session's device from step to step. `note` says
    why they are copied into larger buffers at each step, or is empty.
    """

    def __init__(self, session: Session, chunk: int = 512, note: str = "") -> None:
        self.session, self.chunk, self.note = session, chunk, note
        self.caches = {name: t for name, t in session.inputs.items() if name.startswith(PAST)}
        self.past: dict[str, Buffer] = {}
        self._logits = list(session.outputs).index("logits")
        huge_pages()

    @on_screen
    def __repr__(self) -> Iterator[str]:
        yield f"{type(self).__name__} decoder: {repr(self.session).partition(chr(10))[0]}"

    @property
    def vocabulary(self) -> int | None:
        """How many tokens there are, if the graph says so."""
        size = (self.session.outputs["logits"].dims or (None,))[-1]
        return size if isinstance(size, int) else None

    def start(
        self,
        rows: Sequence[Sequence[int]],
        more: int,
        beams: int = 1,
        chosen: Array | None = None,
    ) -> Array:
        """Read prompts in chunks; return the logits after each, (rows · beams, vocabulary).

        Prompt r is continued `beams` times, in the rows from r · beams on, by up to `more` tokens.
        `chosen`, (R,), holds the number of each prompt's adapter, for a graph that has some; it is
        0, the base alone, for all prompts by default.
        """
        raise NotImplementedError

    def step(self, tokens: Array) -> Array:
        """Read one more token for each row, (R,); return the logits after it, (R, vocabulary).

        The next step may overwrite them.
        """
        raise NotImplementedError

    def reorder(self, rows: Array) -> None:
        """Let row i go on as row rows[i], another beam of the same prompt."""
        raise NotImplementedError

    def keep(self, rows: Array) -> None:
        """Go on with only these rows, in rising order."""
        raise NotImplementedError

    def _run(
        self, feeds: Mapping[str, Any], past: Mapping[str, Buffer], present: Mapping[str, Buffer]
    ) -> Array:
        """Return the last logits, (R, vocabulary); write keys and values into `present`."""
        outputs = {name.replace(PAST, PRESENT): array for name, array in present.items()}
        bound = self.session.bind({**self._fit(feeds), **past}, outputs)
        return self._last(bound())

    def _picked(self, rows: Array | slice, part: str = "") -> dict[str, Buffer]:
        """These rows of the keys and values with `part` in their names."""
        picked: dict[str, Buffer] = {}
        for name, buffer in self.past.items():
            if part in name:
                with on_host(buffer) as array:
                    picked[name] = self.session.place(array[rows])
        return picked

    def _last(self, outputs: Sequence[Array]) -> Array:
        """The logits of the last tokens, (R, vocabulary), in float32."""
        return outputs[self._logits][:, -1].astype(np.float32, copy=False)

    def _fit(self, feeds: Mapping[str, Any]) -> dict[str, Array]:
        """Copies of those feeds that the graph has as inputs, in its dtypes."""
        known = self.session.inputs
        return {n: np.array(x, known[n].dtype, order="C") for n, x in feeds.items() if n in known}


class InPlace(Decoder):
    """The cache in buffers with room for all tokens to come; each row has its own length."""

    def start(
        self,
        rows: Sequence[Sequence[int]],
        more: int,
        beams: int = 1,
        chosen: Array | None = None,
    ) -> Array:
        self.lengths = np.array([len(row) for row in rows])
        self.chosen = np.zeros(len(rows), np.int64) if chosen is None else chosen
        longest = int(self.lengths.max())
        count, capacity = len(rows), longest + more
        shapes = {name: _sized(t, count * beams, capacity) for name, t in self.caches.items()}
        past = {n: np.zeros(shape, self.caches[n].dtype) for n, shape in shapes.items()}
        if longest <= self.chunk:
            logits = self._part(past, slice(0, count), *_together(rows), 0)
        else:  # after a past, only one row can take more than one token
            parts: list[Array] = []
            for r, row in enumerate(rows):
                last = np.empty(0)
                for at in range(0, len(row), self.chunk):
                    ids = np.asarray([row[at : at + self.chunk]])
                    ones = np.ones((1, at + ids.shape[1]))
                    last = self._part(past, slice(r, r + 1), ids, ones, at)
                parts.append(last)
            logits = np.concatenate(parts)
        self.lengths = np.repeat(self.lengths, beams)
        rows_of = np.repeat(np.arange(count), beams)
        self.chosen = self.chosen[rows_of]
        self.past = {name: self.session.place(array) for name, array in past.items()}
        self._bind(capacity)
        if beams > 1:
            self.reorder(rows_of)
        return logits[rows_of]

    def _part(
        self, past: Mapping[str, Array], rows: slice, ids: Array, mask: Array, at: int
    ) -> Array:
        own = {name: array[rows] for name, array in past.items()}
        places = np.broadcast_to(np.arange(at, at + ids.shape[1]), ids.shape)
        feeds = {"input_ids": ids, MASK: mask, "position_ids": places, CHOICE: self.chosen[rows]}
        return self._run(feeds, own, own)

    def _bind(self, capacity: int) -> None:
        """Bind all buffers for every step to come; the mask is as long as they are."""
        feeds = {
            "input_ids": np.zeros((len(self.lengths), 1)),
            MASK: np.arange(capacity) < self.lengths[:, None],
            "position_ids": self.lengths[:, None],
            CHOICE: self.chosen,
        }
        self.feeds = self._fit(feeds)
        if "position_ids" in self.feeds:  # equal to the lengths before each step
            self.lengths = self.feeds["position_ids"][:, 0]
        self._rows = np.arange(len(self.lengths))
        outputs = {name.replace(PAST, PRESENT): buffer for name, buffer in self.past.items()}
        if self.vocabulary is not None:  # otherwise each step makes a new array
            sizes, kind = (len(self.lengths), 1, self.vocabulary), self.session.outputs["logits"]
            outputs["logits"] = np.empty(sizes, kind.dtype)
        self._bound = self.session.bind({**self.feeds, **self.past}, outputs)

    def step(self, tokens: Array) -> Array:
        self.feeds["input_ids"][:, 0] = tokens
        self.feeds[MASK][self._rows, self.lengths] = 1
        logits = self._last(self._bound())
        self.lengths += 1
        return logits

    def reorder(self, rows: Array) -> None:
        changed = np.flatnonzero(rows != np.arange(len(rows)))
        longest = int(self.lengths.max())
        for buffer in self.past.values() if len(changed) else ():
            with on_host(buffer) as array:
                array[changed, :, :longest] = array[rows[changed], :, :longest]

    def keep(self, rows: Array) -> None:
        self.reorder(rows)
        self.lengths, self.chosen = self.lengths[rows], self.chosen[rows]
        self.past = self._picked(slice(len(rows)))
        self._bind(next(iter(self.past.values())).shape[2])


class Growing(Decoder):
    """A cache that is copied into a larger one at each step; prompts are padded on the left."""

    def start(
        self,
        rows: Sequence[Sequence[int]],
        more: int,
        beams: int = 1,
        chosen: Array | None = None,
    ) -> Array:
        ids, mask = _together(rows, left=True)
        self.mask, self.length = mask[:, :0], 0
        self.chosen = np.zeros(len(rows), np.int64) if chosen is None else chosen
        self.past, logits = self._caches(len(rows)), np.empty(0)
        for at in range(0, ids.shape[1], self.chunk):
            logits = self._grow(ids[:, at : at + self.chunk], mask[:, at : at + self.chunk])
        if beams > 1:
            rows_of = np.repeat(np.arange(len(rows)), beams)
            self.reorder(rows_of)
            logits = logits[rows_of]
        return logits

    def step(self, tokens: Array) -> Array:
        return self._grow(tokens[:, None], np.ones((len(tokens), 1), bool))

    def _grow(self, ids: Array, mask: Array) -> Array:
        """The logits after more tokens, (R, T)."""
        self.length += ids.shape[1]
        self.mask = np.concatenate([self.mask, mask], 1)
        places = np.maximum(self.mask.cumsum(1) - 1, 0)[:, -ids.shape[1] :]
        feeds = {"input_ids": ids, MASK: self.mask, "position_ids": places, CHOICE: self.chosen}
        larger = self._caches(len(ids))
        logits = self._run(feeds, self.past, larger)
        self.past = larger
        return logits

    def _caches(self, rows: int) -> dict[str, Buffer]:
        """Room for the keys and values of that many rows, as long as they are now."""
        new = {n: np.empty(_sized(t, rows, self.length), t.dtype) for n, t in self.caches.items()}
        return {name: self.session.place(array) for name, array in new.items()}

    def reorder(self, rows: Array) -> None:
        self.past = self._picked(rows)
        self.mask, self.chosen = self.mask[rows], self.chosen[rows]

    def keep(self, rows: Array) -> None:
        self.reorder(rows)


class EncoderDecoder(Decoder):
    """An encoder that runs once for each prompt, and a decoder that starts with its own tokens.

    In its first call the decoder computes the keys and values of the encoder's output, and returns
    them; with use_cache_branch, it takes them back. Those of its own tokens grow.
    """

    def __init__(self, encoder: Session, decoder: Session) -> None:
        super().__init__(decoder, note="a decoder that reads an encoder's output grows its cache")
        self.encoder = encoder
        self.begin: list[list[int]] = []
        self._read: tuple[Any, Any, dict[str, Array]] = (None, None, {})

    @property
    def hears(self) -> tuple[int, int] | None:
        """The bands and frames of the sounds that the encoder reads; None if it reads tokens."""
        found = self.encoder.inputs.get(FEATURES)
        _, bands, frames = (found and found.dims) or (None, None, None)
        return (bands, frames) if isinstance(bands, int) and isinstance(frames, int) else None

    def encode(self, rows: Sequence[Any], chosen: Array | None = None) -> dict[str, Array]:
        """What the decoder is given of these rows, tokens or features (bands, frames)."""
        chosen = np.zeros(len(rows), np.int64) if chosen is None else chosen
        if self._read[0] is not rows or not np.array_equal(self._read[1], chosen):
            given = {CHOICE: chosen}
            if self.hears:
                read = {FEATURES: np.stack(rows)}
            else:
                ids, mask = _together(rows)
                read = {"input_ids": ids, MASK: mask.astype(np.int64)}
                given[f"encoder_{MASK}"] = mask
            known = self.encoder.inputs
            feeds = {name: x for name, x in {**read, CHOICE: chosen}.items() if name in known}
            [hidden, *_] = self.encoder(feeds)
            self._read = rows, chosen, {**given, _STATES: hidden}
        return self._read[2]

    def start(
        self,
        rows: Sequence[Sequence[int]],
        more: int,
        beams: int = 1,
        chosen: Array | None = None,
    ) -> Array:
        given, own = self.encode(rows, chosen), np.array(self.begin)
        own = np.broadcast_to(own, (len(rows), own.shape[1]))
        begin = {"input_ids": own, "use_cache_branch": [False]}
        empty = {n: np.zeros(_sized(t, len(rows), 0), t.dtype) for n, t in self.caches.items()}
        values = self.session({**self._fit({**given, **begin}), **empty})
        found = dict(zip(self.session.outputs, values, strict=True))
        logits = self._last(values)
        past = {n: found[n.replace(PAST, PRESENT)].repeat(beams, 0) for n in self.caches}
        self.past = {name: self.session.place(array) for name, array in past.items()}
        self.given = {name: x.repeat(beams, 0) for name, x in given.items()}
        return logits.repeat(beams, 0)

    def step(self, tokens: Array) -> Array:
        grown = {}
        for name, old in self.past.items():
            if _OWN in name:
                rows, heads, length, size = old.shape
                longer = np.empty((rows, heads, length + 1, size), old.dtype)
                grown[name] = self.session.place(longer)
        new = {"input_ids": tokens[:, None], "use_cache_branch": [True]}
        logits = self._run({**self.given, **new}, self.past, grown)
        self.past |= grown
        return logits

    def reorder(self, rows: Array) -> None:
        # All beams of a prompt read the same from the encoder.
        self.past |= self._picked(rows, _OWN)

    def keep(self, rows: Array) -> None:
        self.past = self._picked(rows)
        self.given = {name: array[rows] for name, array in self.given.items()}


def _together(rows: Sequence[Sequence[int]], *, left: bool = False) -> tuple[Array, Array]:
    """Rows of different lengths as one array, padded on one side, and where their tokens are."""
    lengths = np.array([len(row) for row in rows])
    longest = lengths.max()
    mask = np.arange(longest) < lengths[:, None]
    mask = mask[:, ::-1] if left else mask
    ids = np.zeros(mask.shape, np.int64)
    ids[mask] = np.concatenate(rows)
    return ids, mask


def _sized(kind: TensorType, rows: int, length: int) -> tuple[int, ...]:
    """The shape of a buffer of a cache (B, G, S, D)."""
    _, heads, _, size = kind.dims or (0, 0, 0, 0)
    if isinstance(heads, str) or isinstance(size, str):
        raise GraphgenError(
            f"a cache of the decoder is {kind}; its second and last sizes, heads and features, "
            "must be numbers: build or export the folder again"
        )
    return rows, heads or 0, length, size or 0
