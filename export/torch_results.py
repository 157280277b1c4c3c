"""Whether a model that torch exported computes what its module computes."""

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import onnx_ir as ir

from graphgen.errors import GraphgenError, user_line, warn
from graphgen.measure.accuracy import differ
from graphgen.operands import Array
from graphgen.runtime import Session

_FEW = 0.01
"""The part of an output's whole numbers that ties may change: those of an argmax or a sort."""


class Call(NamedTuple):
    """A module and the arguments of a call."""

    module: Any
    positional: tuple[Any, ...]
    keyword: dict[str, Any]


def expect_same(model: ir.Model, file: Path, call: Call) -> None:
    """Raise GraphgenError, with the names of the outputs that differ, unless both compute the same.

    The module runs in evaluation mode; or, if the outputs are others then, with its dropouts and
    norms alone in evaluation mode. Floats may differ by the root of the machine epsilon, relative
    to the largest and in the Euclidean norm. If sizes are symbolic, both run at other sizes, too.
    What cannot be compared, a warning tells: a module that draws random numbers, a dtype that the
    runtime has no kernels for. `file` is the path of a new file next to the model's weights.
    """
    who = f"from_torch: {type(call.module).__name__}"
    try:
        ir.save(model, file)
        session = Session(file, provider="cpu", optimize=False)
    except GraphgenError as error:
        warn(f"{who} is not compared with its model, which the runtime does not open: {error}")
        return
    for given in (call, _at_other_sizes(model, call)):
        if given is not None:
            _compare(who, model, session, given, example=given is call)


def _compare(who: str, model: ir.Model, session: Session, call: Call, *, example: bool) -> None:
    at = "" if example else _sizes(model, call)
    feeds = _feeds(model, call)
    with unchanged(call.module) as state:
        try:
            wanted, changed = state.run(call)
        except Exception as error:  # whatever the module raises
            if example:
                warn(f"{who} is not compared with its model, as a call of it fails: {error}")
            return
        if changed and _differences(model, wanted, state.run(call, restored=False)[0]):
            raise keeps(who, f"changes {changed[0]}, and the next one computes another result")
        try:
            got = session(feeds)
        except GraphgenError as error:
            if example:
                warn(
                    f"{who} is not compared with its model, which the runtime does not run: {error}"
                )
                return
            raise GraphgenError(
                f"{who}: its model does not run{at}, where the module does: {error}; give "
                f"dynamic_shapes for the axes that vary only{user_line()}"
            ) from error
        apart, moved = _differences(model, wanted, got), list[str]()
        if state.in_training:
            with contextlib.suppress(Exception):
                other, moved = state.run(call, parts=True)
                apart = apart and _differences(model, other, got)
                state.disturb(moved)
                if not _differences(model, other, state.run(call, parts=True, restored=False)[0]):
                    moved = []
        if moved:
            what = f"in training mode changes {moved[0]}, and the next one reads it"
            raise keeps(who, what, "give the module in evaluation mode, or ")
        if apart and _differences(model, wanted, state.run(call, seed=1)[0]):
            warn(f"{who} is not compared with its model, as it draws random numbers")
            return
    if apart:
        raise GraphgenError(
            f"{who}: the model that torch exports computes something else{at}: "
            f"{'; '.join(apart)}. Torch's exporter is at fault: write that part of the module in "
            f"other operators, or export it with another version of torch{user_line()}"
        )


def keeps(who: str, what: str, mend: str = "") -> GraphgenError:
    """The error for a module that keeps something from one call to the next."""
    return GraphgenError(
        f"{who}: each call {what}; a graph keeps nothing from one call to the next: {mend}make it "
        f"an input and an output{user_line()}"
    )


class _State:
    """A module whose buffers and modes are put back."""

    def __init__(self, module: Any) -> None:
        self._modes = {part: part.training for part in module.modules()}
        self._buffers = {name: (b, b.detach().clone()) for name, b in module.named_buffers()}
        self.in_training = any(self._modes.values())

    def run(
        self, call: Call, *, seed: int = 0, parts: bool = False, restored: bool = True
    ) -> tuple[list[Array], list[str]]:
        """The results, and the names of the buffers that the call has changed."""
        import torch

        self.restore(buffers=restored)
        for part in self._modes:
            part.training = part.training and parts and not is_random(part)
        before = {name: buffer.detach().clone() for name, (buffer, _) in self._buffers.items()}
        tree = torch.utils._pytree
        given = tree.tree_map(
            lambda x: x.detach().clone() if isinstance(x, torch.Tensor) else x,
            (call.positional, call.keyword),
        )
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            results = call.module(*given[0], **given[1])
        changed = [n for n, (b, _) in self._buffers.items() if not torch.equal(b, before[n])]
        return [_array(x) for x in tensors_in(results)], changed

    def disturb(self, names: Sequence[str]) -> None:
        """Put other numbers into buffers, to see what reads them."""
        import torch

        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            for buffer in (self._buffers[name][0] for name in names):
                floats = buffer.is_floating_point()
                buffer.copy_(torch.randn_like(buffer) if floats else buffer + 1)

    def restore(self, *, buffers: bool = True) -> None:
        for part, mode in self._modes.items():
            part.training = mode
        for buffer, old in self._buffers.values() if buffers else ():
            buffer.data.copy_(old)


@contextlib.contextmanager
def unchanged(module: Any) -> Iterator["_State"]:
    """Put the buffers and modes of a module back afterwards."""
    state = _State(module)
    try:
        yield state
    finally:
        state.restore()


def is_random(part: Any) -> bool:
    """Whether a module is a dropout or norm: what a model for inference has in evaluation mode."""
    return hasattr(part, "track_running_stats") or (not [*part.children()] and hasattr(part, "p"))


def _differences(model: ir.Model, wanted: Sequence[Array], got: Sequence[Array]) -> list[str]:
    """What differs, by the outputs' names."""
    outputs = model.graph.outputs
    if len(wanted) != len(got):
        return [f"the module has {len(wanted)} outputs, and the model {len(got)}"]
    kinds = [value.dtype for value in (*outputs, *model.graph.initializers.values())]
    floats = {kind for kind in kinds if kind is not None and kind.is_floating_point()}
    info: Any = ml_dtypes.finfo  # untyped there; numpy's own does not know bfloat16
    epsilon = max((float(info(kind.numpy()).eps) for kind in floats), default=0.0)
    found = []
    for value, r, x in zip(outputs, wanted, got, strict=True):
        if r.shape != x.shape or r.dtype != x.dtype:
            found.append(
                f"{value.name} is {x.dtype}{[*x.shape]}, and the module's {r.dtype}{[*r.shape]}"
            )
        elif (error := _apart(r, x, epsilon)) is not None:
            found.append(f"{value.name} differs by {error}")
    return found


def _apart(r: Array, x: Array, epsilon: float) -> str | None:
    """How far two arrays are apart, in words; None if they are close enough.

    Elements that are equal to the last bit do not count: -1e9 for what is masked would hide others.
    """
    other = (r != x) & ~((r != r) & (x != x))  # both NaN
    if not np.any(other):
        return None
    if not ir.DataType.from_numpy(r.dtype).is_floating_point():
        part = float(np.mean(other))
        return f"{part:.1%} of its elements" if part > _FEW else None
    error = differ([r[other]], [x[other]])
    if error.max_abs <= 8 * epsilon or max(error.rel_rms, error.max_rel) <= epsilon**0.5:
        return None
    return f"{error.max_abs:.3g}, {error.rel_rms:.2g} of its norm"


def _feeds(model: ir.Model, call: Call) -> dict[str, Array]:
    """What the call gives, by the names of the model's inputs: numbers are constants there."""
    given = [_array(x) for x in tensors_in((call.positional, call.keyword))]
    return {str(v.name): x for v, x in zip(model.graph.inputs, given, strict=True)}


def _at_other_sizes(model: ir.Model, call: Call) -> Call | None:
    """The call with one element less, or more, along each symbolic axis; None if there is none."""
    import torch

    inputs = iter(model.graph.inputs)

    def changed(x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return x
        for axis, size in enumerate(next(inputs).shape or ()):
            if isinstance(size, ir.SymbolicDim) and axis < x.ndim and x.shape[axis] > 0:
                old = x.shape[axis]
                rows = [*range(old - 1)] if old > 2 else [*range(old), old - 1]
                x = x.index_select(axis, torch.tensor(rows, device=x.device))
        return x

    if not any(isinstance(d, ir.SymbolicDim) for v in model.graph.inputs for d in v.shape or ()):
        return None
    given = torch.utils._pytree.tree_map(changed, (call.positional, call.keyword))
    return Call(call.module, *given)


def _sizes(model: ir.Model, call: Call) -> str:
    """The symbolic sizes of a call, in words."""
    arrays = _feeds(model, call)
    sizes = {
        str(dim): size
        for value in model.graph.inputs
        for dim, size in zip(value.shape or (), arrays[str(value.name)].shape, strict=False)
        if isinstance(dim, ir.SymbolicDim)
    }
    return f" at {', '.join(f'{name}={size}' for name, size in sizes.items())}"


def names_of_results(program: Any) -> list[str | None]:
    """What the module of an ONNXProgram calls its results: their keys, joined by dots, if any."""
    exported = program.exported_program
    specs = exported.graph_signature.output_specs
    kinds = [type(x.arg).__name__ for x in specs if x.kind.name == "USER_OUTPUT"]
    names = [*_keys(exported.call_spec.out_spec, [], named=False)]
    return [n for n, kind in zip(names, kinds, strict=True) if kind != "ConstantArgument"]


def _keys(spec: Any, way: list[str], *, named: bool) -> Iterator[str | None]:
    """The names of the leaves of a tree of torch, of which None is one."""
    if spec.type is None:
        yield ".".join(way) if named else None
        return
    newer = hasattr(spec, "children")  # of torch
    children, context = spec.children() if newer else spec.children_specs, spec.context
    context = getattr(context, "_fields", context)  # of a named tuple
    if isinstance(context, list) and [*map(type, context)] == [list, list]:
        context = context[0]  # of a dataclass, whose other list is of what is None
    keyed = isinstance(context, (list, tuple)) and len(context) == len(children)
    for key, child in zip(context if keyed else range(len(children)), children, strict=True):
        yield from _keys(child, [*way, str(key)], named=named or keyed)


def tensors_in(tree: Any) -> list[Any]:
    """The tensors in lists, dictionaries and other classes that torch knows."""
    import torch

    return [x for x in torch.utils._pytree.tree_leaves(tree) if isinstance(x, torch.Tensor)]


def _array(tensor: Any) -> Array:
    """As the model has it: complex numbers have one more axis, real and imaginary parts."""
    import torch
    from onnx_ir.tensor_adapters import TorchTensor

    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    array: Array = TorchTensor(tensor.detach().cpu().contiguous()).numpy()
    return array
