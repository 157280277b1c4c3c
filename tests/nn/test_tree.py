"""A module at a prompt: a tree, folded where blocks are equal; in errors it is one line."""

import time
from typing import Any

import numpy as np
import pytest

import graphgen as gg
from graphgen import nn, ops
from graphgen.display import LINES, WIDTH
from graphgen.nn.module import zeros


class Stack(nn.Module):
    """Layers in a list, beside what they share and a table of parameters."""

    def __init__(self, sizes: list[int], *, name: str = "") -> None:
        self.name = name
        self.embedding = nn.Embedding(7, 4)
        self.layers = [nn.Linear(4, size) for size in sizes]
        self.gates = {"a": nn.Parameter((3,), initialize=zeros), "b": self.embedding.weight}
        self.head = self.embedding

    def __call__(self, x: Any) -> Any:
        return self.layers[0](x)

    def last(self, x: Any) -> Any:
        """A part of the module."""
        return [x]


def test_equal_layers_are_one_line() -> None:
    stack = Stack([4] * 12)
    assert repr(stack).split("\n") == [
        "Stack()  gates.a[3], gates.b[7, 4]",
        "  embedding: Embedding(count=7, features=4)  weight[7, 4]",
        "  layers (0-11): 12 x Linear(features_in=4, features_out=4)  weight[4, 4], bias[4]",
        "  head: Embedding(count=7, features=4)  weight[7, 4]",
        "271 parameters",
    ]
    assert 271 == 7 * 4 + 3 + 12 * (4 * 4 + 4), "the table counts once"
    assert repr(stack) == str(stack)


def test_only_neighbors_are_folded() -> None:
    lines = repr(Stack([4, 4, 5, 4])).split("\n")
    assert [line.split(":")[0] for line in lines[2:-2]] == [
        "  layers (0-1)",
        "  layers.2",
        "  layers.3",
    ]


def test_values_change_nothing_but_the_dtype() -> None:
    linear = nn.Linear(2, 3)
    before = repr(linear)
    nn.initialize(linear)
    assert (
        repr(linear)
        == before
        == ("Linear(features_in=2, features_out=3)  weight[2, 3], bias[3]\n9 parameters")
    )
    nn.initialize(linear, weights={"weight": np.zeros((2, 3), np.float16), "bias": [0, 0, 0]})
    assert "weight: float16[2, 3], bias[3]" in repr(linear)


def test_it_is_as_deep_as_a_screen() -> None:
    layer = nn.EncoderLayer(8, num_heads=2)
    assert "    query: Linear(features_in=8, features_out=8)  weight[8, 8], bias[8]" in repr(layer)
    two = nn.Module()
    vars(two).update(a=layer, b=nn.DecoderLayer(8, num_heads=2))
    shown = repr(two).split("\n")
    assert len(shown) <= LINES and not any("query" in line for line in shown)
    assert "    feed_forward: FeedForward(features=8, hidden=32)  552 parameters" in shown


class Chain(nn.Module):
    """A block in a block, and so on."""

    def __init__(self, depth: int) -> None:
        self.linear = nn.Linear(2, 2)
        self.next = Chain(depth - 1) if depth else self


@pytest.mark.parametrize(
    ("module", "last"),
    [
        (Stack([i % 7 + 1 for i in range(3000)]), "60,001 parameters"),
        (Chain(300), "1,806 parameters"),
        (Stack([], name="\x1b[2J\n<b>"), "31 parameters"),
        (nn.Linear.__new__(nn.Linear), "0 parameters"),
    ],
    ids=["thousands", "deep", "hostile", "half-made"],
)
def test_a_tree_is_at_most_a_screen(module: nn.Module, last: str) -> None:
    then = time.perf_counter()
    lines = repr(module).split("\n")
    assert time.perf_counter() - then < 3
    assert lines[-1] == last
    assert len(lines) <= LINES
    assert all(len(line) <= WIDTH and line.isprintable() for line in lines)


def test_errors_name_a_module_in_one_line() -> None:
    stack = Stack([4] * 12)
    with pytest.raises(gg.GraphgenError) as caught:
        gg.build(stack, x=gg.float32["n", 3])
    assert str(caught.value).startswith("Linear(features_in=4, features_out=4): x is float[n, 3]; ")
    with pytest.raises(gg.GraphgenError, match=r"^build: Stack\(\)\.last returned list, not"):
        gg.build(stack.last, x=gg.float32["n", 3])
    with pytest.raises(gg.GraphgenError, match=r"^build: softmax called with y: missing"):
        gg.build(ops.softmax, y=gg.float32["n", 3])
    with pytest.raises(
        gg.GraphgenError, match=r"^weights do not fit Stack\(\): missing: embedding"
    ):
        nn.initialize(stack, weights={})
