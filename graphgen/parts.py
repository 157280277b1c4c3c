"""Weights that a checkpoint stores as one and a model has as several: which outputs are whose."""

from typing import Any, NamedTuple

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


def parts_in(noted: Any) -> dict[str, Part]:
    """What JSON says of parts, by module. Raises ValueError if it is damaged."""
    found = {str(module): Part(*fields) for module, fields in dict(noted).items()}
    for module, part in found.items():
        name, number, of, groups, width = part
        if type(name) is not str or any(type(n) is not int for n in part[1:]):
            raise ValueError(f"{module} is {[*part]}")
        if min(of, groups, width) < 1 or not 0 <= number <= of - width:
            raise ValueError(f"{module} is part {number} of {of}")
    return found
