"""Weights of a checkpoint that a GGUF file has in two parts, and the other way round."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import onnx_ir as ir

from graphgen.bits import Blocks, joined
from graphgen.models.published.few_bits import FewBits, Made, Restored
from graphgen.models.published.gguf_tensors import FewTensor
from graphgen.operands import Array
from graphgen.safetensors import Weight


@dataclass(frozen=True)
class Pair(FewBits):
    """Gates and ups in blocks of one format: (2 H, D), or those of experts, (E, 2 H, D).

    The blocks of experts have a row of each in turn, as the operator reads them. If it is
    `turned`, the array is (E, D, 2 H), with a column of each in turn.
    """

    parts: tuple[FewTensor, FewTensor] = field(kw_only=True)
    turned: bool = field(kw_only=True)

    def read(self) -> Array:
        """The numbers that the integers stand for, float32."""
        return _paired(*self.parts, self.turned)

    def _blocks(self) -> Blocks:
        both = [part.blocks() for part in self.parts]
        found = joined(both, alternate=len(self.shape) == 3, minima=True)
        assert found is not None  # as they are of one format
        return found


@dataclass(frozen=True)
class Swapped(FewBits):
    """Matrices of experts, (E, N, K), of which the checkpoint has (E, K, N)."""

    part: FewTensor = field(kw_only=True)

    def read(self) -> Array:
        """The numbers that the integers stand for, float32."""
        return np.swapaxes(self.part.read(), 1, 2)

    def _blocks(self) -> Blocks:
        return self.part.blocks()


def _paired(gate: Weight, up: Weight, turned: bool) -> Array:
    both = [weight.read().astype(np.float32) for weight in (gate, up)]
    if not turned:
        return np.concatenate(both, axis=-2)
    found: Array = np.stack(both, axis=2)  # (E, H, 2, D), or (E, H, 2) of biases
    found = found.reshape(len(found), -1, *found.shape[3:])
    return np.swapaxes(found, 1, 2) if found.ndim == 3 else found


def pair(name: str, gate: Weight, up: Weight, *, turned: bool = False) -> Weight:
    """Gates and ups as one weight."""
    axis = -2 if len(gate.shape) > 1 + turned else -1
    shape = list(gate.shape)
    shape[axis] += up.shape[axis]
    if turned and axis == -2:
        shape[1:] = shape[:0:-1]
    where = (gate.path, name, ir.DataType.FLOAT, tuple(shape), gate.offset)
    if isinstance(gate, FewTensor) and isinstance(up, FewTensor) and gate.kind == up.kind:
        return Pair(*where, parts=(gate, up), turned=turned)
    return made(where, partial(_paired, gate, up, turned), gate, up)


def swapped(name: str, weight: Weight) -> Weight:
    """Matrices (E, N, K) as (E, K, N)."""
    count, rows, columns = weight.shape
    where = (weight.path, name, ir.DataType.FLOAT, (count, columns, rows), weight.offset)
    if isinstance(weight, FewTensor):
        return Swapped(*where, part=weight)
    return made(where, lambda: np.swapaxes(weight.read(), 1, 2), weight)


def made(where: tuple[Any, ...], make: Callable[[], Array], *parts: Weight) -> Weight:
    """A weight that is computed of these, which may be of few bits."""
    few = any(isinstance(part, FewBits) for part in parts)
    return (Restored if few else Made)(*where, make=make)


def two(found: Mapping[str, Weight], first: str, other: str) -> Iterator[tuple[str, str, str]]:
    """What stands before `first` in names that end so, and the names of both, where both are."""
    for name in found:
        own = name.removesuffix(first)
        if own != name and own + other in found:
            yield own, name, own + other


def in_turn(found: dict[str, Weight], fields: Mapping[str, Any]) -> dict[str, Weight]:
    """Gates and ups in turn, and matrices that are multiplied from the right."""
    left = dict(found)
    for last, own in (("weight", ""), ("bias", "_bias")):
        for before, *both in two(found, f"gate_proj.{last}", f"up_proj.{last}"):
            gate, up = (left.pop(name) for name in both)
            name = f"{before}gate_up_proj{own}"
            left[name] = pair(name, gate, up, turned=True)
    for name in found:
        before = name.removesuffix(".experts.down_proj.weight")
        if before != name and len(found[name].shape) == 3:
            own = f"{before}.experts.down_proj"
            left[own] = swapped(own, left.pop(name))
        elif name.endswith(".experts.down_proj.bias"):
            own = name.replace(".bias", "_bias")
            left[own] = replace(left.pop(name), name=own)
    return left


def halved(found: dict[str, Weight], fields: Mapping[str, Any]) -> dict[str, Weight]:
    """Gates before ups."""
    left = dict(found)
    for before, *both in two(found, "gates.weight", "ups.weight"):
        name = f"{before}input_linear.weight"
        left[name] = pair(name, *(left.pop(name) for name in both))
    return left


STATICS = "moe_statics.e_score_correction_bias"


def one_row(found: dict[str, Weight], fields: Mapping[str, Any]) -> dict[str, Weight]:
    """ERNIE's corrections have an axis of 1 in the checkpoint."""
    rows = {n: w for n, w in found.items() if n.endswith(STATICS) and len(w.shape) == 1}
    return found | {n: replace(w, shape=(1, *w.shape)) for n, w in rows.items()}
