"""Updates in place: numpy's numbers are those of the recorded graph, to the bit."""

from typing import Any

import numpy as np
import pytest

import graphgen as gg
from graphgen.export.optimizers import Optimizer, Setting
from graphgen.nn.module import build, float32
from graphgen.train.in_place import CHUNK, InPlace

OPTIMIZERS: list[Optimizer] = [
    gg.AdamW(betas=(0.8, 0.95), weight_decay=0.1),
    gg.SGD(),
    gg.SGD(weight_decay=0.1),
    gg.SGD(momentum=0.9),
    gg.SGD(momentum=0.9, nesterov=True, weight_decay=0.01),
]


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=repr)
def test_the_bits_are_those_of_the_graph(optimizer: Optimizer, scaled: bool) -> None:
    """Nothing else is changed: neither the gradient nor what comes after the chunk."""
    kinds = ["p", "g", *optimizer.moments]
    setting = Setting(0.5, 0.1)
    scalars = optimizer.scalars(1e-2, 3, setting) | ({"scale": 0.37} if scaled else {})
    numbers = {name: np.float32(number) for name, number in scalars.items()}
    specs: dict[str, Any] = dict.fromkeys(kinds, float32["n"]) | dict.fromkeys(numbers, float32[()])

    def update(**given: Any) -> dict[str, Any]:
        return {f"{kind}_next": new for kind, new in optimizer.update(**given).items()}

    session = gg.Session(build(update, **specs))
    in_place = InPlace(optimizer.update, kinds, numbers)
    rng = np.random.default_rng(0)
    flat = {kind: rng.random(CHUNK + 9, np.float32) for kind in kinds}
    kept = {kind: array.copy() for kind, array in flat.items()}
    for at, size in ((0, CHUNK), (CHUNK, 5)):
        chunk = {kind: array[at : at + size] for kind, array in flat.items()}
        feeds = {name: x for name, x in (chunk | numbers).items() if name in session.inputs}
        wanted = dict(zip(session.outputs, map(np.copy, session(**feeds)), strict=True))
        in_place(chunk, numbers, in_place.spare())
        for kind, array in chunk.items():
            np.testing.assert_array_equal(
                array, wanted.get(f"{kind}_next", kept[kind][at : at + size])
            )
            np.testing.assert_array_equal(flat[kind][CHUNK + 5 :], kept[kind][CHUNK + 5 :])


def test_a_formula_may_keep_numbers_and_use_rows_again() -> None:
    """a b + a, of which a is changed last, with a number made of two."""
    in_place = InPlace(lambda a, b, x: {"a": (a * b + b * (x * x)) * a}, ["a", "b"], ["x"])
    a, b = np.float32([1, 2, 3]), np.float32([4, 5, 6])
    wanted = (a * b + b * 9) * a
    in_place({"a": a, "b": b}, {"x": np.float32(3)}, in_place.spare())
    np.testing.assert_array_equal(a, wanted)
    np.testing.assert_array_equal(b, np.float32([4, 5, 6]))
