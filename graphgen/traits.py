"""What follows from an operator's meaning, declared once: questions that passes ask of a node.

A trait is a property, not a list of some pass. It is given where the operator is declared,
`@primitive("Reshape", traits=Trait.MOVES | Trait.VIEW)`; operators that are only known by their
name have theirs in ops/foreign.py. An operator is its domain and its name: one of another domain
that is called Reshape has none of these.
"""

import enum
from typing import NamedTuple

import onnx_ir as ir


class Trait(enum.Flag):
    """A property of an operator. `|` joins several; `has` asks for any of those."""

    MOVES = enum.auto()
    """Its results hold elements of its operands, elsewhere or in another dtype: no arithmetic."""
    LAYOUT = enum.auto()
    """The result is its first operand in another shape or order, perhaps repeated."""
    VIEW = enum.auto()
    """The result is the memory of its first operand."""
    TAKES = enum.auto()
    """It reads as much of its first operand as it writes."""
    CARRIES = enum.auto()
    """The result holds the numbers of its operands, or numbers near them."""
    CHEAP = enum.auto()
    """It costs so little that it may be computed for others as well."""
    SHAPE = enum.auto()
    """It reads the shape of its operand and none of its elements."""
    GENERATES = enum.auto()
    """All its operands say what the result is like: it has no data."""
    SIZED = enum.auto()
    """Its operands but the first are sizes or places, of which no number can be guessed."""
    PRODUCT = enum.auto()
    """Most of its work is products of matrices."""
    REDUCES = enum.auto()
    """It costs one operation for each element that goes in, not for each that comes out."""
    BROADCASTS = enum.auto()
    """Elementwise, its operands broadcast as in numpy."""
    COMMUTATIVE = enum.auto()
    """The order of its operands has no meaning."""
    BY_ROWS = enum.auto()
    """A row of the result needs that row of the operand alone, over the last axis."""
    NORMALIZES = enum.auto()
    """It normalizes along its axes from `axis` on."""
    RANDOM = enum.auto()
    """It draws random numbers: two of them differ, and so do two runs."""
    QUANTIZED = enum.auto()
    """It reads or makes quantized numbers."""
    CONTROL_FLOW = enum.auto()
    """Its subgraphs get their inputs from it, as inference knows."""
    CONSTANT = enum.auto()
    """The result is one of its attributes."""
    BETWEEN = enum.auto()
    """Its axis is a place between the axes of its operand: one more than there are axes."""
    OTHERWISE = enum.auto()
    """onnx's reference, which folds constants, computes otherwise than the runtime: infinities."""
    WRITES_OVER = enum.auto()
    """On the CPU it writes over its first operand, where it is the last that reads it."""


class Lookup(NamedTuple):
    """Which operand of an operator says the rows, and which are the tables."""

    rows: int
    tables: tuple[int, ...]


TRAITS: dict[tuple[str, str], Trait] = {}
"""By domain and name."""

LOOKUPS: dict[tuple[str, str], Lookup] = {}
"""Operators that look rows up, by domain and name."""

NONE = Trait(0)


def declare_traits(
    name: str,
    traits: Trait,
    *,
    domain: str = "",
    looks_up: tuple[int, tuple[int, ...]] | None = None,
) -> None:
    """Say what an operator is like. Raises RuntimeError where that was said before."""
    if (domain, name) in TRAITS:
        raise RuntimeError(f"{domain}::{name} has traits already")
    TRAITS[domain, name] = traits
    if looks_up is not None:
        LOOKUPS[domain, name] = Lookup(*looks_up)


def traits_of(node: ir.Node) -> Trait:
    """All traits of a node's operator; none where nothing is known of it."""
    return TRAITS.get((node.domain, node.op_type), NONE)


def has(node: ir.Node, traits: Trait) -> bool:
    """Whether a node's operator has one of these traits."""
    return bool(traits_of(node)._value_ & traits._value_)


def lookup_of(node: ir.Node) -> Lookup | None:
    """Which operands of a node are index and tables, or None where it looks nothing up."""
    return LOOKUPS.get((node.domain, node.op_type))
