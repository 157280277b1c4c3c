"""What an adapter makes of a weight."""

from typing import Any, NamedTuple

import numpy as np

from graphgen.operands import Array


class Update(NamedTuple):
    """W + b a of W, float[out, in], or m / ‖W + b a‖ · (W + b a) by rows: what an adapter makes.

    a is float[rank, in], b float[out, rank], with the scale in it, and m float[out]. `shift` is
    added to the bias, float[out]; only rows beside a base may have one.
    """

    a: Array
    b: Array
    magnitude: Array | None = None
    shift: Array | None = None

    def of(self, weight: Array) -> Array:
        """The new weight, float32."""
        changed: Array = weight + self.b @ self.a
        return changed if self.magnitude is None else self._gain(changed)[:, None] * changed

    def gain(self, weight: Array) -> Array | None:
        """m / ‖W + b a‖, float[out], of an update with magnitudes."""
        return None if self.magnitude is None else self._gain(weight + self.b @ self.a)

    def _gain(self, changed: Array) -> Array:
        size = norms(changed)
        gain: Array = self.magnitude / np.where(size == 0, np.float32(1), size)
        return gain

    def at(self, rows: Any) -> "Update":
        """That of some rows of the weight."""
        magnitude = None if self.magnitude is None else self.magnitude[rows]
        shift = None if self.shift is None else self.shift[rows]
        return Update(self.a, self.b[rows], magnitude, shift)

    @property
    def shape(self) -> tuple[int, int]:
        """That of the weight."""
        return len(self.b), self.a.shape[1]


class Whole(NamedTuple):
    """A weight, float[out, in], in the place of another."""

    weight: Array

    def of(self, _: Array) -> Array:
        """The new weight, float32."""
        return self.weight

    @property
    def shape(self) -> tuple[int, int]:
        """That of the weight."""
        return len(self.weight), self.weight.shape[1]


def norms(matrix: Array) -> Array:
    """The Euclidean norm of each row."""
    found: Array = np.linalg.norm(matrix, axis=1).astype(np.float32)
    return found
