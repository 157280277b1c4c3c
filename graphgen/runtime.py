"""Sessions on ONNX Runtime: arrays in, arrays out, buffers bound in place, and a plan to read."""

import contextlib
import ctypes
import gc
import importlib
import importlib.metadata
import json
import math
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import onnx
from numpy.typing import NDArray

from graphgen.arguments import checked
from graphgen.arrays import as_array, as_bytes, bits_of, from_bytes
from graphgen.display import fields, listed, on_screen
from graphgen.errors import GraphgenError, Opened, user_line, warn
from graphgen.header import read_header
from graphgen.opening import (
    DISABLED,
    keep_integers,
    keep_vectors,
    open_session,
    session_options,
    unknown,
)
from graphgen.plan import Plan, TensorType
from graphgen.processor import INT8_KEY, processor
from graphgen.providers import (
    CPU,
    Provider,
    can_record,
    floats_elsewhere,
    placement,
    runtime_message,
)
from graphgen.subnormals import FLUSH, can_flush, flushing

Array = NDArray[Any]

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

    # Maps and None are for the few inputs that are no tensors.
    Feed: TypeAlias = "ArrayLike | Mapping[Any, Any] | Resident | None"

_Sizes = dict[str, tuple[int, str]]  # of symbolic dimensions, and the array it came from
OPTIONS_KEY = "graphgen.session_options"
"""Model metadata: the options to open a session with, as JSON."""

QUIET = {"session.force_spinning_stop": "1"}
"""For sessions that run in turn: idle threads of one would take the cores of the next."""

_REINSTALL = (
    "run `pip uninstall -y onnxruntime onnxruntime-gpu`, then "
    '`pip install "graphgen-onnx[cpu]"`, or `pip install "graphgen-onnx[gpu]"` for CUDA'
)


class Session(Opened):
    """A model on ONNX Runtime: `y, = Session("block.onnx")(x=array)`.

    `model` is a path or the bytes of a serialized model. The first of these that sets an option
    wins: the arguments `threads` and `optimize=False`; `options`; the JSON object that the file
    keeps under its metadata key "graphgen.session_options"; session.x64quantprecision=1 where the
    processor would cut off sums of int8 and the file does not say that they fit;
    session.disable_quant_qdq=1 where that fails, and where the runtime takes integers without a
    zero point for unsigned ones; either this or session.qdq_matmulnbits_accuracy_level=1 where it
    would round the floats that it multiplies by restored weights; the runtime. Where the file
    multiplies a transposed matrix by a vector, MatmulTransposeFusion is disabled, which is wrong
    there. session.set_denormal_as_zero=1 counts for the thread that calls the session, too, and
    ends with the call (on Linux with glibc and an x64 processor; elsewhere a file that asks for it
    runs without). The keys
    execution_order, enable_mem_pattern, enable_mem_reuse, graph_optimization_level and
    intra_op_num_threads set that attribute of the runtime's SessionOptions; every other key is a
    session config entry.

    `provider=None` or "auto" takes CUDA where it works and otherwise the CPU, and `plan` says
    which; any other is a provider that is built in or a plugin (`graphgen providers` lists them),
    and never gives its place to the CPU. Nodes that it leaves to the CPU are in
    `plan.placement`; a warning tells those that calculate floats, and `strict` refuses them.
    `outputs` names the outputs to compute, in order.
    With `profile` the runtime times its kernels: `end_profiling` returns the times, and leaves them
    in a JSON file whose path begins with `profile`.
    `inputs` and `outputs` map names to the declared `TensorType`. Raises GraphgenError.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | bytes,
        *,
        provider: Provider | None = None,
        options: Mapping[str, str] | None = None,
        optimize: bool = True,
        threads: int | None = None,
        outputs: Sequence[str] | None = None,
        profile: str | None = None,
        strict: bool = False,
    ) -> None:
        ort = import_runtime()
        self._who, header = read_header(model)
        metadata = {entry.key: entry.value for entry in header.metadata_props}
        settings = _metadata_options(self._who, metadata)
        if not can_flush():  # this thread would not be set back
            settings.pop(FLUSH, None)
        settings |= dict(options or {})
        if not optimize:
            settings["graph_optimization_level"] = "DISABLE_ALL"
        if threads is not None:
            settings["intra_op_num_threads"] = str(threads)
        keep_integers(self._who, ort, model, metadata.get(INT8_KEY), settings, provider)
        keep_vectors(model, settings)
        asked, config = session_options(self._who, ort, settings)
        if profile is not None:
            asked.enable_profiling, asked.profile_file_prefix = True, profile
        self._flushes = config.get(FLUSH) == "1"
        with flushing(self._flushes):
            self._session, device, note = open_session(
                self._who, ort, model, header, asked, config, provider
            )
        own, *_ = providers = tuple(self._session.get_providers())
        if strict and own != CPU and not can_record(ort):
            raise GraphgenError(
                f"{self._who}: strict: onnxruntime {ort.__version__} does not tell which nodes "
                f"{device} leaves to the CPU; upgrade onnxruntime to 1.24 or later, or leave "
                "`strict` out"
            )
        placed = placement(self._session) if own != CPU else {}
        if left := floats_elsewhere(model, placed, own):
            some = ", ".join(f"{count} {op_type}" for op_type, count in left.most_common())
            note = f"runs on the CPU, for lack of a kernel of {device}: {some}"
            if strict:
                raise GraphgenError(
                    f"{self._who}: strict: it {note}; optimize the model for this provider, or "
                    "leave `strict` out"
                )
            warn(f"{self._who} {note}")

        self.inputs = {value.name: TensorType.of(value.type) for value in header.graph.input}
        declared = {value.name: TensorType.of(value.type) for value in header.graph.output}
        for name in outputs or ():
            if name not in declared:
                raise GraphgenError(f"{self._who}: {unknown('output', name, declared)}")
        self.outputs = {name: declared[name] for name in outputs or declared}
        self._output_names = list(self.outputs)
        # The runtime does not list inputs with an initializer: callers may leave them out.
        self._required = [value.name for value in self._session.get_inputs()]
        used = self._session.get_session_options()
        disabled = config.get(DISABLED, "")
        self.plan = Plan(
            runtime=f"onnxruntime {ort.__version__}",
            processor=str(processor()),
            device=device,
            providers=providers,
            placement={name: len(nodes) for name, nodes in placed.items()},
            note=note,
            execution_order=used.execution_order.name,
            enable_mem_pattern=used.enable_mem_pattern,
            enable_mem_reuse=used.enable_mem_reuse,
            graph_optimization_level=used.graph_optimization_level.name,
            disabled_optimizers=tuple(filter(None, disabled.split(";"))),
            threads=used.intra_op_num_threads or None,
            config=config,
        )

    @on_screen
    def __repr__(self) -> Iterator[str]:
        threads = "" if self.plan.threads is None else f", {self.plan.threads} threads"
        yield f"{self._who} on {self.plan.device} ({self.plan.runtime}{threads})"
        yield from fields(
            inputs=[f"{name}: {kind}" for name, kind in self.inputs.items()],
            outputs=[f"{name}: {kind}" for name, kind in self.outputs.items()],
        )

    def __call__(
        self, feeds: "Mapping[str, Feed] | None" = None, /, **named: "Feed"
    ) -> list[Array]:
        """Run once and return the outputs in graph order.

        Names that are not Python identifiers go into `feeds`. Arrays must have the declared dtype;
        Python numbers and lists are converted if that loses nothing.
        """
        if feeds is not None and not isinstance(feeds, Mapping):
            raise GraphgenError(
                f"{self._who}: got a {type(feeds).__name__}; give arrays by name, such as "
                f"{next(iter(self.inputs), 'x')}=..., or in a dictionary"
            )
        arrays = self._checked({**(feeds or {}), **named}, {})
        kinds = (*self.inputs.values(), *self.outputs.values())
        known = all(kind.dtype is None or kind.dtype.isbuiltin == 1 for kind in kinds)
        if not known or any(isinstance(x, Resident) for x in arrays.values()):
            keep = {n: x for n, x in arrays.items() if isinstance(x, Resident)}
            rest = {n: np.require(x, requirements="C") for n, x in arrays.items()}
            return Bound(self, rest | keep, {})()
        try:
            with flushing(self._flushes):
                results: list[Array] = self._session.run(self._output_names, arrays)
        except Exception as error:
            raise GraphgenError(f"{self._who}: the run failed: {runtime_message(error)}") from error
        return results

    def place(self, array: Array) -> "Buffer":
        """Return a copy of `array` in the memory of the session's device, for `bind`.

        It stays there from run to run: `on_host` reads and changes it. On the CPU, and where the
        runtime's Python package cannot reach the device's memory, it is `array` itself.
        """
        device, value = self.plan.device, None
        if device != "cpu" and array.dtype.isbuiltin == 1:
            with contextlib.suppress(Exception):  # the runtime has no class for "not supported"
                made = importlib.import_module("onnxruntime").OrtValue
                value = made.ortvalue_from_numpy(np.ascontiguousarray(array), device, 0)
        return array if value is None else Resident(value, array.dtype, device, self._session)

    @checked
    def bind(
        self, inputs: "Mapping[str, Buffer]", outputs: "Mapping[str, Buffer] | None" = None
    ) -> "Bound":
        """Tie C-contiguous numpy buffers to inputs and outputs by pointer, for many runs.

        One buffer may be both an input and an output, if the graph reads the input before it
        writes the output, as an elementwise update does; WebGPU may refuse a kernel that reads the
        buffer it writes. What `place` returned is bound where it is; any other buffer crosses to
        the device of the session and back in each run.
        """
        outputs, sizes = outputs or {}, _Sizes()
        for name, array in (*inputs.items(), *outputs.items()):
            if isinstance(array, Resident):
                if array.device != self.plan.device:
                    raise GraphgenError(
                        f"{self._who}.bind: {name!r} is on {array.device}, and the session on "
                        f"{self.plan.device}; place it with this session"
                    )
                continue
            if isinstance(array, np.ndarray) and (bits := bits_of(array.dtype)) < 8:
                what = f"{name!r} has elements of {bits} bits, which the runtime packs"
                raise GraphgenError(f"{self._who}.bind: {what}; bind int8 and cast in the graph")
            if not isinstance(array, np.ndarray) or not array.flags.c_contiguous:
                raise GraphgenError(
                    f"{self._who}.bind: {name!r} is not a C-contiguous numpy array, which a "
                    "pointer needs; keep np.ascontiguousarray(...) of it and bind that"
                )
        self._checked(inputs, sizes)
        for name, array in outputs.items():
            if name not in self.outputs:
                raise GraphgenError(f"{self._who}.bind: {unknown('output', name, self.outputs)}")
            self._check("output", name, array, self.outputs[name], sizes)
            if isinstance(array, np.ndarray) and not array.flags.writeable:
                raise GraphgenError(f"{self._who}.bind: {name!r} is read-only; bind a writable one")
        return Bound(self, inputs, outputs)

    def end_profiling(self) -> list[dict[str, Any]]:
        """The runtime's events since the session was opened with `profile`."""
        file = Path(self._session.end_profiling())  # empty if there is none
        if not file.name:
            raise GraphgenError(
                f"{self._who}: it does not profile, or no longer: open a session with "
                f"profile={user_line()}"
            )
        events: list[dict[str, Any]] = json.loads(file.read_text(encoding="utf-8"))
        return events

    def _checked(self, feeds: "Mapping[str, Feed]", sizes: _Sizes) -> dict[str, Any]:
        """The feeds as arrays that fit the graph; `sizes` is filled in on the way."""
        arrays: dict[str, Any] = {}
        for name, value in feeds.items():
            kind = self.inputs.get(name)
            if kind is None:
                raise GraphgenError(f"{self._who}: {unknown('input', name, self.inputs)}")
            if kind.dtype is not None:  # the runtime itself checks sequences, maps, optionals
                raw = isinstance(value, np.ndarray) and value.dtype.type is np.void
                if raw or type(value) not in (np.ndarray, Resident):
                    value = self._to_array(name, value, kind)
                self._check("input", name, value, kind, sizes)
            arrays[name] = value
        for name in self._required:
            if name not in arrays:
                raise GraphgenError(
                    f"{self._who}: input {name!r} is missing; pass an array of {self.inputs[name]}"
                )
        shapes = [getattr(x, "shape", ()) for x in arrays.values()]
        if self.plan.device == "webgpu" and shapes and all(0 in shape for shape in shapes):
            raise GraphgenError(
                f"{self._who}: all inputs are empty, and kernels of WebGPU end the process there; "
                "leave such inputs out, or run them on the CPU"
            )
        return arrays

    def _to_array(self, name: str, value: Any, kind: TensorType) -> Array:
        """`value` as an array; Python numbers and lists take the declared dtype if they can."""
        reason = "that does not convert without loss"
        try:
            array = as_array(value, kind.dtype)
            if hasattr(value, "dtype") or array.dtype == kind.dtype or array.dtype.kind == "U":
                return array
            converted: Array = array.astype(kind.dtype)
            exact = converted.dtype.kind not in "biu" or np.array_equal(array, converted)
            if array.dtype.kind in "biuf" and exact:
                return converted
        except (ValueError, TypeError, RuntimeError, OverflowError) as error:  # such as torch's
            reason = f"({error})"
        raise GraphgenError(
            f"{self._who}: input {name!r} got a {type(value).__name__} {reason}; pass a numpy "
            f"array of {kind}"
        )

    def _check(self, role: str, name: str, array: Any, kind: TensorType, sizes: _Sizes) -> None:
        """Refuse an array whose dtype, rank or sizes are not those of `kind`."""
        problem = ""
        if array.dtype != kind.dtype and not (kind.dtype == np.object_ and array.dtype.kind == "U"):
            problem = f"nothing is cast silently: call .astype({str(kind.dtype)!r})"
        elif kind.dims is None:
            return
        elif array.ndim != len(kind.dims):
            problem = f"its rank must be {len(kind.dims)}, not {array.ndim}"
        else:
            for axis, (size, dim) in enumerate(zip(array.shape, kind.dims, strict=True)):
                if isinstance(dim, str):
                    known, other = sizes.setdefault(dim, (size, name))
                    if size != known:
                        problem = f"{dim!r} is {size} here and {known} in {other!r}"
                elif dim is not None and dim != size:
                    problem = f"its dimension {axis} must be {dim}, not {size}"
        if problem:
            got = TensorType(array.dtype, array.shape)
            raise GraphgenError(f"{self._who}: {role} {name!r} is {got}, not {kind}: {problem}")


class Resident:
    """An array in the memory of a session's device, made by `Session.place`."""

    def __init__(self, value: Any, dtype: np.dtype[Any], device: str, session: Any) -> None:
        self.value, self.dtype, self.device = value, dtype, device
        self.shape = tuple(value.shape())
        self._session = session  # the device's memory may go with it

    @property
    def ndim(self) -> int:
        """Its rank."""
        return len(self.shape)

    def read(self) -> Array:
        """Return a copy of it as an array."""
        try:
            return np.array(self.value.numpy())
        except Exception as error:
            problem = f"cannot be read back: {runtime_message(error)}"
            raise GraphgenError(f"a buffer on {self.device} {problem}") from error

    def write(self, array: Array) -> None:
        """Copy an array of its shape and dtype into it."""
        try:
            self.value.update_inplace(array)
        except Exception as error:
            problem = f"cannot be written: {runtime_message(error)}"
            raise GraphgenError(f"a buffer on {self.device} {problem}") from error

    @on_screen
    def __repr__(self) -> Iterator[str]:
        yield f"Resident {TensorType(self.dtype, self.shape)} on {self.device}"


Buffer: TypeAlias = Array | Resident


@contextlib.contextmanager
def on_host(buffer: Buffer) -> Iterator[Array]:
    """The numpy array of a buffer, to read and to change: changes go back to the device at the end.

    `with on_host(session.place(zeros)) as array: array[0] = 1`
    """
    if not isinstance(buffer, Resident):
        yield buffer
        return
    yield (array := buffer.read())
    buffer.write(array)


class Bound:
    """A run with its buffers tied in place, made by `Session.bind`; call it as often as you like.

    Each call reads the input buffers as they are then, writes the bound outputs, and returns the
    outputs in graph order: bound ones as the very arrays that were bound, the others as new arrays.
    On the CPU only those new arrays are copied; elsewhere every buffer crosses to the device and
    back in each call, but those that `Session.place` put there.
    """

    def __init__(
        self, session: Session, inputs: Mapping[str, Buffer], outputs: Mapping[str, Buffer]
    ) -> None:
        self._who, self._session = session._who, session._session
        self._names = session._output_names
        self._binding = self._session.io_binding()
        self._elsewhere, self._flushes = session.plan.device != "cpu", session._flushes
        # The runtime holds only addresses; these references keep the arrays alive.
        self._inputs = {name: _ort_value(array) for name, array in inputs.items()}
        self._outputs = [outputs.get(name) for name in self._names]
        self._unbound = [name for name in self._names if name not in outputs]
        for name, value in self._inputs.items():
            self._binding.bind_ortvalue_input(name, value)
        for name in self._names:
            if name in outputs:
                self._binding.bind_ortvalue_output(name, _ort_value(outputs[name]))
            else:
                self._binding.bind_output(name)

    @on_screen
    def __repr__(self) -> Iterator[str]:
        bound = [name for name in self._names if name not in self._unbound]
        names = [*self._inputs, *bound]
        yield f"Bound run of {self._who}: {listed(names, len(names))} in place"

    def __call__(self) -> list[Any]:
        """Run on the buffers' present contents and return the outputs in graph order."""
        if self._elsewhere:  # copies, also those to nodes on the CPU, are made when binding
            for name, value in self._inputs.items():
                self._binding.bind_ortvalue_input(name, value)
        for name in self._unbound:  # else the last run's memory and shape would be used again
            self._binding.bind_output(name)
        try:
            with flushing(self._flushes):
                self._session.run_with_iobinding(self._binding)
            made = self._binding.get_outputs() if self._unbound else self._outputs
            pairs = zip(self._outputs, made, strict=True)
            return [_array(new) if bound is None else bound for bound, new in pairs]
        except Exception as error:
            raise GraphgenError(f"{self._who}: the run failed: {runtime_message(error)}") from error


def import_runtime() -> Any:
    """Return the onnxruntime module. Raises GraphgenError if none, two or a broken one is there."""
    names = ("onnxruntime", "onnxruntime-gpu")
    if all(next(iter(importlib.metadata.distributions(name=name)), None) for name in names):
        raise GraphgenError(
            "onnxruntime and onnxruntime-gpu are both installed and overwrite each other's files; "
            f"keep one: {_REINSTALL}"
        )
    try:
        ort = importlib.import_module("onnxruntime")
    except ImportError as error:
        if isinstance(error.__cause__, KeyboardInterrupt):  # as the extension module reports it
            raise KeyboardInterrupt from None
        if error.name == "onnxruntime":
            raise GraphgenError(
                'no onnxruntime is installed; run `pip install "graphgen-onnx[cpu]"`, '
                'or `pip install "graphgen-onnx[gpu]"` for CUDA'
            ) from None
        raise GraphgenError(f"onnxruntime does not import ({error}); {_REINSTALL}") from error
    if not hasattr(ort, "InferenceSession"):  # what remains after one of two is uninstalled
        raise GraphgenError(f"the installed onnxruntime has lost its library; {_REINSTALL}")
    return ort


def _metadata_options(who: str, metadata: Mapping[str, str]) -> dict[str, Any]:
    text = metadata.get(OPTIONS_KEY, "{}")
    with contextlib.suppress(ValueError, RecursionError):
        options = json.loads(text)
        if isinstance(options, dict):
            return options
    raise GraphgenError(f"{who}: metadata {OPTIONS_KEY!r} is {text!r}; it must be a JSON object")


def return_memory() -> None:
    """Return freed memory to the system; glibc would keep it."""
    gc.collect()
    if sys.platform == "linux" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)):
        trim(0)


def _ort_value(array: Buffer) -> Any:
    """The runtime's view of a C-contiguous array's memory, without a copy."""
    if isinstance(array, Resident):
        return array.value
    value = importlib.import_module("onnxruntime").OrtValue
    if array.dtype.isbuiltin == 1:
        return value.ortvalue_from_numpy(array)
    number = onnx.helper.np_dtype_to_tensor_dtype(array.dtype)  # bfloat16 and the like: ml_dtypes
    return value.ortvalue_from_numpy_with_onnx_type(as_bytes(array), number)


def _array(value: Any) -> Array:
    """The array of a result; a copy of its memory if numpy itself lacks the dtype."""
    if not value.is_tensor():
        return np.asarray(value.numpy())
    dtype = onnx.helper.tensor_dtype_to_np_dtype(value.element_type())
    if dtype.isbuiltin == 1 or dtype == np.object_:
        found: Array = value.numpy()
        return found
    size = -(-math.prod(shape := value.shape()) * bits_of(dtype) // 8)
    return from_bytes(ctypes.string_at(value.data_ptr(), size), dtype, shape)
