"""Weights that a checkpoint stores as several tensors: few bits, and their scales.

A method of storing them is a `Form`. Weights whose integers the runtime multiplies are `FewBits`,
others are `Restored`: read as the floats that they stand for.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar, Protocol

import numpy as np
import onnx_ir as ir

from graphgen.bits import KEPT, STACKED, Blocks, joined
from graphgen.errors import GraphgenError
from graphgen.operands import Array
from graphgen.parts import Part
from graphgen.safetensors import Weight


@dataclass(frozen=True)
class FewBits(Weight, ABC):
    """A weight (N, K) of integers: `read` gives what they mean, `blocks` the integers.

    `again` says whether it may be rounded once more: where the integers stand for floats.
    """

    again: ClassVar[bool] = False

    def blocks(self) -> Blocks:
        """The same integers as the runtime's operator reads them. Refuses scales of NaN."""
        made = self._blocks()
        if all(np.isfinite(x).all() for x in (made.scales, made.shift) if x is not None):
            return made
        raise GraphgenError(
            f"{self.path}: {self.name} has scales that are no finite numbers; download it again"
        )

    @abstractmethod
    def _blocks(self) -> Blocks: ...

    def read(self) -> Array:
        """The numbers that the integers stand for, float32."""
        return self.blocks().dequantized()


@dataclass(frozen=True)
class Made(Weight):
    """A weight that is computed of what stands in its file, float32."""

    make: Callable[[], Array] = field(kw_only=True, compare=False)

    def read(self) -> Array:
        """The array."""
        return self.make()


@dataclass(frozen=True)
class Restored(Made):
    """A weight of few bits that no kernel multiplies as they are, read as float32."""


class Form(Protocol):
    """How a method stores the weight of a layer."""

    @property
    def method(self) -> str:
        """What the configuration calls it."""
        ...

    @property
    def endings(self) -> Sequence[str]:
        """Of the names of a layer's tensors, behind the layer's own."""
        ...

    @property
    def spare(self) -> Sequence[str]:
        """Of names of tensors that say nothing of weights."""
        ...

    @property
    def rounds(self) -> bool:
        """Whether the method rounds what products read, too."""
        ...

    def weight(self, layer: str, parts: Mapping[str, Weight]) -> tuple[Weight | None, list[str]]:
        """The weight that the tensors of a layer are, by their endings, and what is wrong.

        None is for a layer of floats, whose tensors stay as they are.
        """
        ...


def unpacked_names(stored: Mapping[str, Weight], form: Form, where: str) -> dict[str, Weight]:
    """The weights by the names that they have as floats; the tensors of a layer become one.

    Raises an error that names all tensors that do not fit.
    """
    stored = {n: w for n, w in stored.items() if n.rpartition(".")[2] not in form.spare}
    layers = dict[str, dict[str, Weight]]()
    endings = sorted(form.endings, key=len, reverse=True)
    for name in stored:
        ending = next((e for e in endings if name.endswith(f".{e}")), None)
        if ending is not None:
            layers.setdefault(name.removesuffix(f".{ending}"), {})[ending] = stored[name]
    found, problems, count = dict(stored), list[str](), 0
    for layer, parts in layers.items():
        weight, wrong = form.weight(layer, parts)
        problems += wrong
        if weight is None:
            continue
        for ending in parts:
            del found[f"{layer}.{ending}"]
        found[f"{layer}.weight"] = weight
        count += 1
    if problems:
        raise GraphgenError(f"{where}: the weights do not fit: {'; '.join(problems)}")
    if not count:
        first, *_ = form.endings
        raise GraphgenError(
            f"{where}: quantization_config says {form.method}, but no weight is called "
            f"*.{first}, or none is of few bits; remove the field if the weights are floats"
        )
    return found


def as_floats(weights: Mapping[str, Weight], method: str, where: str) -> list[str]:
    """A line about the weights of few bits that are floats, which are not kept so."""
    count = sum(isinstance(weight, Restored) for weight in weights.values())
    return [
        f"{where}: {count} weights of few bits ({method}) are read as the floats that they stand "
        "for: no kernel multiplies floats of few bits"
    ] * bool(count)


def is_spare(name: str, stored: Mapping[str, Weight]) -> bool:
    """Whether a weight is a bias of zeros, which GPTQ's first programs wrote beside every layer."""
    layer, _, last = name.rpartition(".")
    few = isinstance(stored.get(f"{layer}.weight"), FewBits)
    return last == "bias" and few and not stored[name].read().any()


def keep(tensor: ir.LazyTensor, weight: Weight, part: Part, turned: bool) -> None:
    """Note on a tensor made of a part of a weight what its blocks are, if that is of few bits.

    The tensor is (K, N) if the weight was turned, else (N, K), as of a table. A weight of three
    dimensions is a stack of others.
    """
    if isinstance(weight, FewBits) and len(weight.shape) == 3:
        tensor.meta[STACKED] = lambda: [weight.blocks()]
    elif isinstance(weight, FewBits):
        tensor.meta[KEPT] = (partial(_of_part, weight, part), not turned)


def keep_stack(tensor: ir.LazyTensor, weights: Sequence[Sequence[Weight]], alternate: bool) -> None:
    """The same on a tensor whose rows are stacked weights, each joined of one or several."""
    few = [[w for w in row if isinstance(w, FewBits)] for row in weights]
    if few == [list(row) for row in weights]:
        tensor.meta[STACKED] = partial(_stacked, few, alternate)


def _stacked(weights: list[list[FewBits]], alternate: bool) -> Iterator[Blocks | None]:
    return (joined([w.blocks() for w in row], alternate=alternate) for row in weights)


def _of_part(weight: FewBits, part: Part) -> Blocks:
    blocks = weight.blocks()
    if part.of == part.width:
        return blocks
    return blocks.part(part.outputs(len(blocks.integers)))
