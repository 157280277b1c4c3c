"""The weights of a published checkpoint, in one safetensors file or several."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import onnx_ir as ir

from graphgen.errors import GraphgenError
from graphgen.files import present, read_json
from graphgen.operands import Array
from graphgen.parts import Part
from graphgen.safetensors import Weight, read_header

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_OTHERS = (".safetensors", ".bin", ".h5", ".msgpack", ".pt", ".pth")


class Stack(NamedTuple):
    """A parameter (E, ...) whose row e is stored by itself, joined of one weight or several.

    Each of `names` is that of a weight, with {} for e; they are joined along the first axis, one
    after the other, or rows of each in turn if they `alternate`.
    """

    names: tuple[str, ...]
    alternate: bool = False


def lazily(
    shape: tuple[int, ...], dtype: ir.DataType, name: str, make: Callable[[], Array]
) -> ir.LazyTensor:
    """A tensor whose array is made each time it is needed, and converted to `dtype`.

    Making it raises GraphgenError for numbers that are not finite, or too large for `dtype`.
    """

    def evaluate() -> ir.TensorProtocol:
        return ir.Tensor(converted(make(), dtype, name), dtype, shape=ir.Shape(shape), name=name)

    return ir.LazyTensor(evaluate, dtype, ir.Shape(shape), name=name)


def converted(given: Array, dtype: ir.DataType, name: str) -> Array:
    """A weight in `dtype`.

    Raises GraphgenError for numbers that are too large for it, or not finite: a product that
    rounds its inputs to eight bits makes ordinary numbers of NaN.
    """
    if not np.isfinite(given).all():
        raise GraphgenError(
            f"{name} has numbers that are not finite (NaN or infinity): download the checkpoint "
            "again, or give one from before its training diverged"
        )
    with np.errstate(over="ignore"):
        array = given.astype(dtype.numpy(), order="C", copy=False)
    if array.dtype != given.dtype and not np.isfinite(array).all():
        raise GraphgenError(
            f"{name}: {np.abs(given).max():g} is too large for {dtype.name.lower()}; choose "
            "another --dtype"
        )
    return array


_WRAPPERS = {"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
"""Names that torch puts into those of a module's weights: compiled, sharded, recomputed."""


def read_weights(
    folder: Path, writer: str = "from_pretrained and save_pretrained of transformers"
) -> dict[str, Weight]:
    """The tensors of a folder by name, without what torch has wrapped their modules in.

    `writer` makes them of files that can run code. Raises GraphgenError as `_stored` does.
    """
    stored = _stored(folder, writer)
    parallel = all(name.startswith("module.") for name in stored)
    found = {
        ".".join(part for part in name.split(".")[parallel:] if part not in _WRAPPERS): weight
        for name, weight in stored.items()
    }
    return found if len(found) == len(stored) else stored


def _stored(folder: Path, writer: str) -> dict[str, Weight]:
    """The tensors of model.safetensors, or of all files of its index, by name.

    Raises GraphgenError if there is neither, if a file is truncated or damaged, if a shard is
    missing or outside the folder, if the index and the files differ, or if two shards do.
    """
    if present(folder / SINGLE):
        return {weight.name: weight for weight in read_header(folder / SINGLE)}
    if not present(folder / INDEX):
        others = sorted(p.name for p in folder.glob("*") if p.suffix in _OTHERS)
        mend = "give the folder of a checkpoint"
        if any(name.endswith(".safetensors") for name in others):
            mend = "give the one of this model that name"
        elif others:
            mend = f"reading them can run code: {writer}, where you trust them, write {SINGLE}"
        have = f", but {_shortened(others)}" if others else ""
        raise GraphgenError(f"{folder} has no {SINGLE} and no {INDEX}{have}: {mend}")
    listed = read_json(folder / INDEX).get("weight_map")
    if not isinstance(listed, dict) or not all(isinstance(f, str) for f in listed.values()):
        raise GraphgenError(f"{folder / INDEX}: weight_map must give a file for each weight")
    found: dict[str, Weight] = {}
    for file in sorted(set(listed.values())):
        if Path(file).name != file:
            raise GraphgenError(f"{folder / INDEX}: {file!r} is not the name of a file next to it")
        if not present(folder / file):
            raise GraphgenError(f"{folder / file} is missing; {INDEX} lists it")
        for weight in read_header(folder / file):
            known = found.setdefault(weight.name, weight)
            if known is not weight and not known.equals(weight):
                raise GraphgenError(
                    f"{folder}: {known.path.name} and {file} have different numbers for "
                    f"{weight.name}: remove the wrong one"
                )
    if absent := sorted(set(listed) - set(found)):
        raise GraphgenError(
            f"{folder / INDEX} lists weights that no file has: {_shortened(absent)}"
        )
    return found


def _shortened(names: list[str]) -> str:
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    return ", ".join(names[:8]) + more


def stored_names(source: Part | Stack) -> tuple[str, ...]:
    """What the weights that a parameter is made of are called."""
    return source.names if isinstance(source, Stack) else (source.name,)


def misfit(name: str, weight: Weight | None, wanted: tuple[int, ...]) -> str:
    """What is wrong with a stored weight, or ""."""
    if weight is None:
        return f"{name} is missing"
    if not weight.dtype.is_floating_point():
        return f"{name} is {weight.dtype.name.lower()}, must hold real numbers"
    if weight.shape != wanted:
        return f"{name} is {list(weight.shape)}, must be {list(wanted)}"
    return ""


def part_of(weight: Weight, turned: bool, part: Part) -> Array:
    """A part of a stored weight, whose last two axes are swapped if it is to be turned."""
    array = np.swapaxes(weight.read(), -1, -2) if turned else weight.read()
    return array if part.of == part.width else array[..., part.outputs(array.shape[-1])]


def alternated(weight: Weight) -> Array:
    """Matrices, (E, 2 H, D), with a row of their first halves and one of the second in turn."""
    return np.stack(np.split(weight.read(), 2, axis=1), 2).reshape(weight.shape)


def halved(array: Array) -> Array:
    """What `alternated` was made of."""
    return np.concatenate([array[:, 0::2], array[:, 1::2]], axis=1)


def stacked(weights: Sequence[Sequence[Weight]], alternate: bool) -> Array:
    """Weights joined along the first axis, and these stacked; of several dtypes, as float32."""
    mixed = len({weight.dtype for row in weights for weight in row}) > 1

    def joined(row: Sequence[Weight]) -> Array:
        arrays = [weight.read() for weight in row]
        arrays = [array.astype(np.float32) for array in arrays] if mixed else arrays
        if not alternate:
            return np.concatenate(arrays)
        return np.stack(arrays, 1).reshape(-1, *arrays[0].shape[1:])

    return np.stack([joined(row) for row in weights])


def unstacked(rows: Array, source: Stack) -> list[Array]:
    """What `stacked` has joined to a row, by the names of the source."""
    count = len(source.names)
    return [rows[i::count] for i in range(count)] if source.alternate else np.split(rows, count)
