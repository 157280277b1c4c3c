"""What follows from an operator's meaning, declared once: what passes ask about a node.

A trait is a property, not a list for some pass. It is given where the operator is declared,
`@primitive("Reshape", traits=Trait.MOVES | Trait.VIEW)`; operators known only by name have theirs
in ops/foreign.py. An operator is its domain and its name: an operator called Reshape in another
domain has none of these.
"""

import enum
from importlib import import_module
from typing import NamedTuple

import onnx_ir as ir


class Trait(enum.Flag):
    """A property of an operator. `|` joins several; `has` tests for any of them."""

    MOVES = enum.auto()
    """Its results hold elements of its operands, moved or in another dtype, without arithmetic."""
    LAYOUT = enum.auto()
    """The result is its first operand in another shape or order, possibly repeated."""
    VIEW = enum.auto()
    """The result is the memory of its first operand."""
    READS_PART = enum.auto()
    """It reads as much of its first operand as it writes."""
    CARRIES = enum.auto()
    """The result holds the numbers of its operands, or numbers near them."""
    CHEAP = enum.auto()
    """It costs so little that other users may compute it again."""
    SHAPE = enum.auto()
    """It reads only the shape of its operand, not its elements."""
    GENERATES = enum.auto()
    """All its operands describe the result; none holds data."""
    SIZED = enum.auto()
    """All operands but the first are sizes or places, for which no number can be guessed."""
    SCALAR = enum.auto()
    """A number given for its operand of integers has no dimensions; elsewhere it has one."""
    PRODUCT = enum.auto()
    """Most of its work is matrix products."""
    REDUCES = enum.auto()
    """It costs one operation for each input element, not for each output element."""
    BROADCASTS = enum.auto()
    """It is elementwise, and its operands broadcast as in numpy."""
    COMMUTATIVE = enum.auto()
    """The order of its operands has no meaning."""
    BY_ROWS = enum.auto()
    """A row of the result, over the last axis, needs only that row of the operand."""
    NORMALIZES = enum.auto()
    """It normalizes along its axes from `axis` on."""
    RANDOM = enum.auto()
    """It draws random numbers: two of them differ, and so do two runs."""
    QUANTIZED = enum.auto()
    """It reads or makes quantized numbers."""
    CONTROL_FLOW = enum.auto()
    """It gives its subgraphs their inputs, and inference knows how."""
    CONSTANT = enum.auto()
    """The result is one of its attributes."""
    SPLITS_AXES = enum.auto()
    """Its axis is the one that a second part starts with; that part may be empty."""
    ADDS_AXIS = enum.auto()
    """Its axis is one of the result, which has one more than the operand."""
    REFERENCE_DIFFERS = enum.auto()
    """onnx's reference, which folds constants, differs from the runtime: infinities."""
    WHOLE_AS_FLOAT = enum.auto()
    """The runtime computes integers in float64, which has 53 bits; larger ones are not exact."""
    WRITES_OVER = enum.auto()
    """On the CPU it overwrites its first operand if it is the last to read it."""
    OMITS_EMPTY = enum.auto()
    """An operand without elements means the same as none, and some readers accept none only."""
    WIDTH_AS_ZERO = enum.auto()
    """ONNX or the runtime takes an operand's last size for 0 if nothing in the file says it."""


class Lookup(NamedTuple):
    """Which operand of an operator selects the rows, and which are the tables."""

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
    """Declare the traits of an operator. Raises RuntimeError if it has some already."""
    if (domain, name) in TRAITS:
        raise RuntimeError(f"{domain}::{name} has traits already")
    TRAITS[domain, name] = traits
    if looks_up is not None:
        LOOKUPS[domain, name] = Lookup(*looks_up)


def collect() -> None:
    """Have all operators declared. They stand above this file, and may not be imported yet."""
    import_module("graphgen.ops")


def traits_of(node: ir.Node) -> Trait:
    """All traits of a node's operator; none if nothing is known about it."""
    if not TRAITS:
        collect()
    return TRAITS.get((node.domain, node.op_type), NONE)


def has(node: ir.Node, traits: Trait) -> bool:
    """Whether a node's operator has one of these traits."""
    # On numbers: passes ask this of every node, and `&` of flags is a function in Python.
    return bool(traits_of(node)._value_ & traits._value_)


def lookup_of(node: ir.Node) -> Lookup | None:
    """Which operands of a node are index and tables, or None if it looks nothing up."""
    if not TRAITS:
        collect()
    return LOOKUPS.get((node.domain, node.op_type))
