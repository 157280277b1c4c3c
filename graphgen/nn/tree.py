"""A module as a tree of its blocks with the shapes of their parameters, for a prompt."""

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby, islice
from typing import NamedTuple, TypeVar

from graphgen.display import LINES, cut
from graphgen.nn.module import Module, Parameter, children, count_parameters, in_line

_DEPTH = 20  # of the deepest blocks to look into
_CALL = 48  # the most characters of the call that made a block
_T = TypeVar("_T")


class _Block(NamedTuple):
    """A module: the call that made it, its parameters, the blocks in it, and what all hold."""

    text: str
    shapes: str
    blocks: Sequence[tuple[str, "_Block"]]
    size: int


def tree(module: Module) -> Iterator[str]:
    """A line for each block, as deep as a screen allows; equal ones of a list are one line.

    What a block is shown for once is not shown again where it is shared. The last line counts all
    parameters.
    """
    root = _block(module, {}, 0)
    lines = list(_lines("", root, 1))
    for depth in range(2, _DEPTH):
        deeper = list(islice(_lines("", root, depth), LINES))
        if len(deeper) == LINES or deeper == lines:
            break
        lines = deeper
    yield from lines
    yield f"{root.size:,} parameters"


def _block(module: Module, seen: dict[int, _Block], depth: int) -> _Block:
    """The module, or what `seen` has for it; one that is in itself is cut off there."""
    if id(module) in seen:
        return seen[id(module)]
    seen[id(module)] = made = _Block(cut(in_line(module), _CALL), "", (), count_parameters(module))
    if depth == _DEPTH:
        return made
    shapes: list[tuple[str, str]] = []
    blocks: list[tuple[str, _Block]] = []
    for name, item in children(module):
        if isinstance(item, Parameter):
            shapes.append((name, _shape(item)))
        else:
            blocks.append((name, _block(item, seen, depth + 1)))
    shown = (f"{name}{shape}" for name, shape in _folded(shapes, lambda n, x: f" {n} x {x}"))
    seen[id(module)] = made = made._replace(shapes=", ".join(shown), blocks=tuple(blocks))
    return made


def _shape(parameter: Parameter) -> str:
    dtype = "" if parameter.dtype == "float32" else f": {parameter.dtype}"
    return f"{dtype}{[*parameter.shape]}"


def _folded(
    named: Sequence[tuple[str, _T]], times: Callable[[int, _T], _T]
) -> Iterator[tuple[str, _T]]:
    """Equal neighbors of one list as one: `layers.0`, `layers.1` and so on as `layers (0-11)`."""

    def place(entry: tuple[str, _T]) -> tuple[str, _T]:
        head, _, number = entry[0].rpartition(".")
        return (head if number.isdigit() else entry[0]), entry[1]

    for (head, item), group in groupby(named, place):
        names = [name for name, _ in group]
        if len(names) == 1:
            yield names[0], item
        else:
            first, last = (name.rpartition(".")[2] for name in (names[0], names[-1]))
            yield f"{head} ({first}-{last})", times(len(names), item)


def _lines(name: str, block: _Block, depth: int, margin: str = "") -> Iterator[str]:
    """The block and those in it, `depth` levels deep; a closed one shows how much it holds."""
    whole = depth > 0 or not block.blocks
    detail = block.shapes if whole else f"{block.size:,} parameters"
    head = f"{name}: " if name else ""
    yield f"{margin}{head}{block.text}" + (f"  {detail}" if detail else "")
    if depth:
        folded = _folded(block.blocks, lambda n, x: x._replace(text=f"{n} x {x.text}"))
        for inner, item in folded:
            yield from _lines(inner, item, depth - 1, f"{margin}  ")
