"""What a file of torch's exporters says of the module: its parameters, and what became of them.

TorchScript's names nodes by the path of their module. Dynamo's lists all parameters, and notes with
each node what its call in torch had.
"""

import json
import re
from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise, permutations

import numpy as np
import onnx_ir as ir

from graphgen import ops
from graphgen.errors import GraphgenError
from graphgen.export.uses import SCRIPTS, Uses, listed
from graphgen.graph import (
    CONSTANT,
    ORIGIN,
    TORCH_CALL,
    TORCH_KIND,
    constant,
    is_constant_name,
    present_inputs,
)
from graphgen.op import is_a
from graphgen.operands import Array
from graphgen.places import block_of

_SIGNATURE = "pkg.torch.export.ExportedProgram.graph_signature"

_CALCULATES = r"_?(mul|div|add|sub|rsub|weight_norm\w*|exp|tanh|sigmoid|softplus|pow)(_\d+)?"
"""How torch calls the result of operators that change numbers."""

_MOVES = (
    r"(val|numpy_\w+|m?[tT]|transpose|permute|view|reshape|getitem|slice|select|cat|stack|split|"
    r"chunk|clone|contiguous|alias|unsqueeze|squeeze|(un)?flatten|movedim|swapaxes|unbind)(_\d+)?"
)
"""How it calls what it only moves; and a part of a call."""


_FOLDED = "pkg.onnxscript.optimizer.folded_from"
"""Metadata of a value that its optimizer calculated: all names that went into it, at any depth."""

OF_CONSTANTS = "calculated of constants"

_WRAPPED = r"\.base_layer(?:\.|$)"
"""Between what PEFT puts in place of a layer, and the layer."""

_ZEROS = 0.01
"""The part of a weight's numbers that are 0 from which it may be one times a mask."""

_KINDS = {"BUFFER": "a buffer", "CONSTANT_TENSOR": "a constant in torch"}
"""What torch's exporter calls what is no parameter."""

NO_PARAMETERS = (*_KINDS.values(), OF_CONSTANTS)
"""Why something is no parameter, if its file says so."""


class Program:
    """The parameters of a module, and what its calls had, as dynamo's exporter wrote them.

    Nothing is known of files that others wrote.
    """

    def __init__(self, graph: ir.Graph, uses: Mapping[str, Uses]) -> None:
        signature = graph.metadata_props.get(_SIGNATURE, "")
        found = re.findall(
            r"^(\w+): (PARAMETER|BUFFER) target='(.*?)'( |$)", signature, re.MULTILINE
        )
        self._names = {holder: name for holder, kind, name, _ in found if kind == "PARAMETER"}
        self.mutated = {
            *re.findall(r"^\w+: BUFFER_MUTATION target='(.*?)'", signature, re.MULTILINE)
        }
        """The buffers that each call of the module changes."""
        self.parameters = [*self._names.values()]
        buffers = {name for _, kind, name, _ in found if kind == "BUFFER"}
        self._absent = {h for h, name in self._names.items() if name not in graph.initializers}
        self._made_of = {
            name: {*re.findall(r"'([^']+)'", value.metadata_props.get(_FOLDED, ""))}
            for name, value in graph.initializers.items()
        }
        self._lost, self._read, self._blocks = set[str](), set[str](), dict[str, set[str]]()
        self.calculated = set[str]()
        """Operands of products that are no weight which is only called otherwise."""
        calls = dict[str, list[ir.Node]]()
        for node in graph.all_nodes() if self._names else ():
            calls.setdefault(node.metadata_props.get(TORCH_CALL, ""), []).append(node)
        for call, nodes in calls.items():
            named = [h for h in dict.fromkeys(re.findall(r"%(\w+)", call)) if h in self._names]
            self._read.update(named)
            for node in nodes:
                names = self._blocks.setdefault(block_of(node), set())
                names.update(self._names[h] for h in named)
            values = {str(v.name) for n in nodes for v in present_inputs(n) if v.is_initializer()}
            others = values - buffers - {*self._names.values()}
            others = {n for n in others if n in uses and uses[n].in_product}
            cell = any(is_a(n, ops.lstm, ops.gru, ops.rnn) for n in nodes)  # joins four in three
            if not cell:  # a weight comes before its bias
                self._lost.update([h for h in named if h in self._absent][len(others) :])
            if not cell and len(others) > len([h for h in named if self._names[h] not in values]):
                self.calculated |= {
                    n
                    for n in others
                    if call
                    and (
                        n[:4] == "val_"
                        or not re.fullmatch(_MOVES, n)
                        or self._changed(n, graph.initializers)
                    )
                }

    def _changed(self, name: str, stored: Mapping[str, ir.Value]) -> bool:
        """Whether what is called as if it was moved was calculated, or holds a weight twice."""
        parts = self._made_of.get(name, set()) - {*self._names, *self._names.values(), *stored}
        joined = any(re.match(r"(cat|stack)(_\d+)?$", part) for part in (name, *parts))
        return any(not re.fullmatch(_MOVES, part) for part in parts) or (
            joined and _repeats(constant(stored[name]))
        )

    def of_constants(self) -> list[str]:
        """What the file says was calculated, and of no parameter: angles, masks, cut buffers.

        Only if it says of every parameter where it is: one that was stored as an equal buffer would
        be named as that. Equal numbers may be a weight as it begins, too.
        """
        every = {*self._names, *self._names.values()}
        known = self._read.union(*self._made_of.values())
        if not self._names or any(not known & {h, self._names[h]} for h in self._absent):
            return []
        return [n for n, made in self._made_of.items() if made and every.isdisjoint(made)]

    def made_of(self, name: str, others: Collection[str]) -> bool:
        """Whether the file says that one of `others` went into what an exporter has calculated."""
        return not self._made_of.get(name, set()).isdisjoint(others)

    def of_parameters(self) -> set[str]:
        """What the file says was calculated of parameters, among them weights that were moved."""
        every = {*self._names, *self._names.values()}
        return {name for name in self._made_of if self.made_of(name, every)}

    def missing(self, calculated: Sequence[str]) -> list[str]:
        """The parameters, by their names there, that a file lacks: folded, joined or left out.

        One that no call has is unused, or another name of a tied one, unless something that is
        not a part of a call was `calculated`.
        """
        found = set(self._lost)
        folded = self.calculated or any(not re.match(r"val_\d+$", n) for n in calculated)
        for holder in self._absent - self._read if folded else ():
            name = re.sub(r"parametrizations\.(\w+)\.original\d*$", r"\1", self._names[holder])
            block, _, leaf = name.rpartition(".")
            near = (other.rpartition(".") for other in self._blocks.get(block, ()))
            tied = any(other != block and end == leaf for other, _, end in near)
            if block in self._blocks and not tied:
                found.add(holder)
        return [name for holder, name in self._names.items() if holder in found]


def _repeats(array: Array | None) -> bool:
    """Whether two slices along an axis are equal, and no constants: trained, they would differ."""
    if array is None:
        return False
    for axis, size in enumerate(array.shape):
        slices = np.moveaxis(array, axis, 0).reshape(size, -1 if array.size else 0)
        varied = [part.tobytes() for part in slices if np.unique(part).size > 1]
        if len(varied) > len({*varied}):
            return True
    return False


def expect_projections(model: ir.Model) -> None:
    """Raise GraphgenError for a file of an LSTM with projections, which dynamo's leaves out."""
    if found := re.search(
        r"target='(.*)weight_hr_l0'", model.graph.metadata_props.get(_SIGNATURE, "")
    ):
        raise GraphgenError(
            f"artifacts: {found[1].strip('.') or 'the module'} is an LSTM with proj_size, which "
            "torch's exporter writes without its projection: make it without, or as a loop of "
            "LSTMCells"
        )


def beside_bases(uses: Mapping[str, Uses]) -> tuple[list[str], list[str]]:
    """The weights of layers that PEFT has wrapped, and what it calls the parts beside them.

    It freezes these weights, and all others that it does not train; no file has this.
    """
    places = {name: (name, *used.blocks) for name, used in uses.items()}
    wrapped = [n for n, paths in places.items() if any(re.search(_WRAPPED, p) for p in paths)]
    heads = {re.split(_WRAPPED, p)[0] for n in wrapped for p in places[n] if re.search(_WRAPPED, p)}
    found = dict[str, None]()
    for path in (p for name, paths in places.items() if name not in wrapped for p in paths):
        parts = path.split(".")
        found |= {y: None for i, y in enumerate(parts) if i and ".".join(parts[:i]) in heads}
        found |= dict.fromkeys(part for part in parts if part == "modules_to_save")
    return wrapped, [*found]


def is_scripted(model: ir.Model) -> bool:
    """Whether TorchScript's exporter of torch wrote a file, whose nodes are called as paths."""
    values = model.graph.initializers.values()
    return (
        model.producer_name == "pytorch"
        and not any(TORCH_KIND in value.metadata_props for value in values)
        and any(str(node.name or "").startswith("/") for node in model.graph)
    )


def buffers_by_name(names: Collection[str]) -> dict[str, str]:
    """What spectral_norm and prune of torch keep beside the parameter weight_orig, and what it is.

    TorchScript's exporter keeps their names, and does not say that they are buffers.
    """
    found = ((name, re.fullmatch(r"(.+)_(u|v|mask)", name)) for name in names)
    return {n: _KINDS["BUFFER"] for n, match in found if match and f"{match[1]}_orig" in names}


def made_in_steps(graph: ir.Graph) -> set[str]:
    """What TorchScript's exporter has calculated in several steps, and all that it made after that.

    It numbers what it makes, so what a step before the last one made leaves a gap: a weight that is
    scaled, then transposed, takes two numbers, and that of a Linear one. Sizes and equal weights
    leave gaps, too: where one is read since the last number, nothing is known.
    """
    copies = [node.outputs[0] for node in graph if is_a(node, ops.identity)]
    made = {}
    for value in (*graph.initializers.values(), *copies):
        if found := re.fullmatch(r"onnx::\w+_(\d+)", str(value.name)):
            made[int(found[1])] = value
    places = {node: at for at, node in enumerate(graph) if not is_a(node, ops.identity)}
    read = {n: sorted(places[x] for x in v.consumers() if x in places) for n, v in made.items()}
    unknown = {at for ats in read.values() for at in ats[1:]}
    for node, at in places.items():
        given = [v for v in present_inputs(node) if v.is_initializer()]
        if any(v.meta.get(CONSTANT) or str(v.name).startswith("/") for v in given):
            unknown.add(at)
    products = [n for n, v in made.items() if any(is_a(x, ops.matmul) for x in v.consumers())]
    results = (str(value.name) for node in graph for value in node.outputs)
    ends = [int(name) for name in results if re.fullmatch(r"\d+", name)]
    read |= {max(ends): [-1]} if ends else {}
    start = max(ends, default=min(products, default=0))
    for last, number in pairwise(sorted(n for n in read if n >= start)):
        if number in products and number - last > 1 and read[last] and read[number]:
            first, end = sorted((read[last][0], read[number][0]))
            if unknown.isdisjoint(range(first + 1, end + 1)):
                return {str(made[n].name) for n in products if n >= number}
    return set()


def straight_through(graph: ir.Graph) -> ir.Node | None:
    """The sum (a - y) + y, or y - (y - a), if there is one: a - y was detached.

    So y has all the gradient.
    """
    for node in graph:
        given = present_inputs(node)
        if is_a(node, ops.add):
            pairs, place = [*permutations(given, 2)], 1
        elif is_a(node, ops.sub):
            pairs, place = [(given[0], given[1])], 0
        else:
            continue
        for y, x in pairs:
            made = x.producer()
            if made is not None and is_a(made, ops.sub) and present_inputs(made)[place] is y:
                return node
    return None


def in_doubt(names: Sequence[str]) -> str:
    """What a file of TorchScript's does not say of weights that are trained, or ""."""
    own = r"(^onnx::|(^|\.)(in_proj_)?(weight|bias)\w*$)"  # of torch's modules: weight_ih_l0
    buffers = [n for n in names if not re.search(own, n)]
    moved = [n for n in names if n.startswith("onnx::")]
    doubts = [f"parameters from buffers: {listed(buffers)}"] if buffers else []
    doubts += [f"weights that it moved from calculated ones: {listed(moved)}"] if moved else []
    return "; nor ".join(doubts)


def calculated_by_torch(
    names: Sequence[str],
    values: Mapping[str, ir.Value],
    uses: Mapping[str, Uses],
    scripted: bool,
    told: Collection[str] = (),
    parameters: Collection[str] = (),
) -> list[str]:
    """What torch's exporters have calculated and stored beside the parameters that they know.

    That is a mask, a zero state, or what it made of a parameter, such as an expanded one. Operands
    of products, and of cells, are weights that it transposed or joined, unless they are called like
    another operator: a weight that a module normalizes; or `told` to be no weights. A file may
    list its `parameters`, and have none by its name. TorchScript's has the weight of a Gemm by its
    own name, and what has zeros may be a weight times a mask.
    """
    known = {n for n in values if TORCH_KIND in values[n].metadata_props} | {*parameters}
    made = {
        n
        for n in names
        if (known and n not in known) or (scripted and (uses[n].renamed or re.match(SCRIPTS, n)))
    }
    other = {n for n in made if known and re.fullmatch(_CALCULATES, n)} | {*told}
    if scripted:
        other |= {n for n in made if n.startswith("onnx::Gemm_") or _has_zeros(values[n])}
    return [n for n in names if (n in made or n in told) and (n in other or not uses[n].in_product)]


def _has_zeros(value: ir.Value) -> bool:
    array = constant(value)
    return array is not None and _ZEROS <= float(np.mean(array == 0) if array.size else 1) < 1


def calculated_numbers(
    values: Mapping[str, ir.Value], uses: Mapping[str, Uses], scripted: bool
) -> list[str]:
    """Numbers that are the result of a node that torch's exporters have calculated.

    Those that stand in a program are called val_0, val_1, ..., or are nodes.
    """
    known = any(TORCH_KIND in value.metadata_props for value in values.values())
    made = "onnx::" if scripted else r"(?!val_\d+$)" if known else r"\b\B"
    return [
        n
        for n in uses
        if re.match(made, n)
        and not is_constant_name(n)
        and not values[n].meta.get(CONSTANT)
        and TORCH_KIND not in values[n].metadata_props
        and (shape := values[n].shape) is not None
        and all(d == 1 for d in shape)
    ]


def origin_of(model: ir.Model) -> tuple[dict[str, str], dict[str, list[str]]]:
    """Why weights are not trained by default, and other names of weights, as their maker says."""
    kinds = {n: v.metadata_props.get(TORCH_KIND) for n, v in model.graph.initializers.items()}
    found = {name: _KINDS[kind] for name, kind in kinds.items() if kind in _KINDS}
    try:
        noted = json.loads(model.metadata_props.get(ORIGIN, "{}"))
        found |= {str(name): str(why) for name, why in noted.get("frozen", {}).items()}
        tied = {str(name): [*map(str, names)] for name, names in noted.get("tied", {}).items()}
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise GraphgenError(
            f"artifacts: the model's metadata {ORIGIN!r} is damaged: {error}; import it again"
        ) from None
    return found, tied
