"""`graphgen diff`: how two models differ, each change once and where it is."""

import os
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, TypeAlias

import onnx_ir as ir

from graphgen.arguments import checked
from graphgen.display import in_notebook, on_screen
from graphgen.edit import lift_constants
from graphgen.export.session import model_of
from graphgen.graph import ModelLike, count_nodes
from graphgen.header import read_header
from graphgen.infer import describe
from graphgen.laboratory.align import Alignment, module_of
from graphgen.laboratory.changes import Change, Comparison
from graphgen.laboratory.notebook import as_page
from graphgen.passes import PIPELINE, optimize
from graphgen.record import PATH
from graphgen.version import VERSION

_CANONICAL = [name for name in PIPELINE if name not in ("fuse_sums", "legalize", "keep_apart")]
"""Passes that give the same computation the same form, whether or not it pays."""

_STYLES = {"removed": ("-", "red"), "added": ("+", "green"), "replaced": ("~", "yellow")}

_Given: TypeAlias = str | os.PathLike[str] | ModelLike
_Interface: TypeAlias = dict[str, dict[str, tuple[str, Any]]]


@dataclass
class Diff:
    """What `diff` found. `pairs` maps ids of nodes of A to those of the same nodes of B."""

    a: dict[str, Any]
    b: dict[str, Any]
    changes: list[Change]
    pairs: dict[str, str]
    graphs: tuple[ir.Model, ir.Model] = field(repr=False)
    same: dict[ir.Node, ir.Node] = field(repr=False)

    def to_json(self) -> dict[str, Any]:
        """The object that docs/diff.schema.json describes."""
        changes = [asdict(change) for change in self.changes]
        head = {"graphgen": VERSION, "equal": not changes}
        return head | {"a": self.a, "b": self.b, "changes": changes, "pairs": self.pairs}

    def count(self) -> str:
        """How many differences there are, in words."""
        return f"{len(self.changes) or 'no'} difference{'s' * (len(self.changes) != 1)}"

    def lines(self) -> Iterator[tuple[str, str]]:
        """The text, each line with its style; equal changes of repeated layers are one line."""
        for sign, side in (("A", self.a), ("B", self.b)):
            opsets = ", ".join(f"{name or 'opset'} {n}" for name, n in side["opsets"].items())
            yield f"{sign}  {side['name']}: {side['nodes']} nodes, {opsets}", "bold"
        yield f"{len(self.pairs)} nodes are in both; {self.count()}", ""
        blocks: dict[str, dict[tuple[str, str], list[Change]]] = {}
        for change in self.changes:
            text = _starred(change.text) if change.kind == "weight" else change.text
            groups = blocks.setdefault(_starred(change.where), {})
            groups.setdefault((change.kind, text), []).append(change)
        for block, groups in blocks.items():
            places = {change.where for same in groups.values() for change in same}
            title = block if len(places) > 1 else min(places)
            yield f"{title or 'the whole model'}:", "bold"
            for (kind, text), same in groups.items():
                sign, style = _STYLES.get(kind, ("~", "cyan"))
                largest = [c.largest for c in same if c.largest is not None]
                count, single = len({change.where for change in same}), same[0].text
                yield (
                    f"  {sign} {text if len(same) > 1 else single}"
                    + (f", by up to {max(largest):.3g}" if largest else "")
                    + (f"  in {count} blocks" if count > 1 else "")
                    + (f"  {len(same)} times" if len(same) > count else ""),
                    style,
                )

    def __str__(self) -> str:
        return "\n".join(line for line, _ in self.lines())

    @on_screen
    def __repr__(self) -> Iterator[str]:
        yield "Diff of two models"
        yield from (line for line, _ in self.lines())

    @in_notebook
    def _repr_html_(self) -> str:
        names = [side["name"] for side in (self.a, self.b)]
        graphs = [*zip(names, self.graphs, strict=True)]
        return as_page(self, self.to_json(), graphs, same=self.same)


@checked
def diff(a: _Given, b: _Given, *, canonical: bool = False) -> Diff:
    """Align two models by structure and list what differs.

    Names of nodes and values, the order of nodes and of a sum's operands, defaults that are written
    out, and names of symbolic sizes do not count; inputs and outputs are matched by name. A change
    is listed where it is made; what only follows from it is not.

    Args:
        a: A model, what `optimize` returned, or the path of an ONNX file.
        b: Another.
        canonical: Compare both after our passes: in canonical form, with softmax, norms,
            activations, rotary embeddings and attention as one operator each. Different forms
            from exporters are then not a difference.
    """
    (left, mine), (right, theirs) = (_prepare(model, canonical) for model in (a, b))
    aligned = Alignment(left, right)
    declared = _declared(_interface(left, mine, canonical), _interface(right, theirs, canonical))
    changes = [*declared, *Comparison(aligned).changes()]
    pairs = {aligned.a.ids[x]: aligned.b.ids[y] for x, y in aligned.pairs.items()}
    return Diff(mine, theirs, changes, pairs, (left, right), aligned.pairs)


def _prepare(given: _Given, canonical: bool) -> tuple[ir.Model, dict[str, Any]]:
    """A copy to work on, whose nodes keep their blocks, and the report's entry on the model."""
    model = model_of(given, "diff")
    if isinstance(given, str | os.PathLike):
        imports = {i.domain: i.version for i in read_header(given)[1].opset_import}
        name = os.fspath(given)
    else:
        model, name, imports = model.clone(), str(model.graph.name), model.graph.opset_imports
    lift_constants(model)
    for node in model.graph.all_nodes():
        if path := module_of(node):
            node.metadata_props[PATH] = path
    if canonical:
        model = optimize(model, passes=_CANONICAL).model
    nodes = count_nodes(model)
    return model, {"name": name, "nodes": nodes, "opsets": dict(sorted(imports.items()))}


def _interface(model: ir.Model, side: dict[str, Any], canonical: bool) -> _Interface:
    """What a file declares: texts to show, and keys to compare, in which symbols have no names."""
    opsets = {} if canonical else side["opsets"]
    found: _Interface = {"opset": {f"of {d or 'ONNX'}": (str(n), n) for d, n in opsets.items()}}
    for kind, values in (("input", model.graph.inputs), ("output", model.graph.outputs)):
        found[kind] = {}
        for v in values:
            sizes = [d if isinstance(d, int) else None for d in v.shape or ()]
            found[kind][str(v.name)] = (describe(v), (v.dtype, v.shape is None, sizes))
    return found


def _declared(a: _Interface, b: _Interface) -> Iterator[Change]:
    """Versions, inputs and outputs that only one has, or that differ."""
    for kind, mine in a.items():
        theirs, none = b[kind], ("none", None)
        for name in dict.fromkeys([*mine, *theirs]):
            (text, x), (other, y) = mine.get(name, none), theirs.get(name, none)
            if x != y:
                yield Change(kind, "", f"{kind} {name}: {text} -> {other}")
        if list(mine) != list(theirs) and mine.keys() == theirs.keys():
            yield Change(kind, "", f"{kind}s in another order")


def _starred(text: str) -> str:
    """A path with its numbers as stars: what repeated layers have in common."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", text)
