"""Weights that a checkpoint stores as one and a model has as several: which outputs are whose."""

from typing import NamedTuple

import numpy as np

from graphgen.operands import Array


class Part(NamedTuple):
    """What a checkpoint calls a module or a weight, and which of its outputs are meant.

    The outputs are `groups` equal groups, each of `of` equal units; the part has `width` units of
    each group, from `number` on. Where queries, keys and values are three equal parts of a weight,
    the values are `Part(name, 2, 3)`; where they alternate by head, `Part(name, 2, 3, heads)`.
    """

    name: str
    number: int = 0
    of: int = 1
    groups: int = 1
    width: int = 1

    def outputs(self, size: int) -> Array:
        """Which of `size` outputs are the part's, in their order, int64; `size` has to fit."""
        places = np.arange(size).reshape(self.groups, self.of, -1)
        return places[:, self.number : self.number + self.width].reshape(-1)

    def whole(self, size: int) -> int:
        """How many outputs there are if the part has `size` of them; 0 if it cannot."""
        units = self.groups * self.width
        return 0 if size % units else size // units * self.groups * self.of
