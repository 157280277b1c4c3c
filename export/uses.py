"""What exporters did to the weights of a model, as far as a file shows it.

They rename weights that they transpose, store equal ones once, fold norms into them, and store what
they calculate of them, beside constants. Module paths of nodes show some of that.
"""

import re
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import onnx_ir as ir

from graphgen import ops
from graphgen.graph import TORCH_KIND, constant, present_inputs
from graphgen.op import find_op, is_a
from graphgen.places import block_of
from graphgen.traits import Trait, has

EXPORT = (
    "export with gg.from_torch, `graphgen import` or torch.onnx.export(..., dynamo=True, "
    "optimize=False), which keep weights and their names"
)

SCRIPTS = r"onnx::|/|_v_\d+$|\d+$"
"""How names begin that TorchScript's exporter makes, where others are the module's."""

_TAKE_NORMS = (ops.conv, ops.conv_transpose, ops.gemm)  # into which exporters fold a norm


_FOLDED = (
    r"onnx::Conv(Transpose)?_\d+|_v_\d+|(ConvBn|ConvMul|MatMulBn)Fusion_.*|"
    r"(getitem(_\d+)?|/.*Normalization_output_0)_(weight|bias)"
)
"""What torch, onnxsim, onnxruntime and onnxslim call a weight into which they folded a norm."""


class Uses:
    """The modules in which a graph from another tool uses a weight, and hence its names there."""

    def __init__(
        self,
        value: ir.Value,
        foreign: bool,
        tied: Sequence[str],
        *,
        known: bool,
        scripted: bool,
    ) -> None:
        nodes = [*_readers(value)] if foreign else []
        self.name, self.tied = str(value.name), tied
        self.blocks = sorted({*map(block_of, nodes)} - {""})
        path = self.name.replace("/", ".")
        self.own = [b for b in self.blocks if path.startswith(f"{b}.")]
        torchs = value.metadata_props.get(TORCH_KIND) == "PARAMETER"  # so is the name
        made = bool(re.match(SCRIPTS, self.name)) if scripted else "." not in path
        self.renamed = bool(self.blocks) and made and not (self.own or torchs)
        copies = [str(n.outputs[0].name) for n in value.consumers() if is_a(n, ops.identity)]
        self.others = [name for name in copies if scripted and not re.match(SCRIPTS, name)]
        size = None if value.shape is None else [*value.shape]
        self.in_product = any(
            has(node, Trait.PRODUCT) or is_a(node, ops.prelu) for node in _through_views(nodes)
        )
        ones = size is not None and all(d == 1 for d in size)
        slope = any(is_a(node, ops.prelu) for node in nodes)
        self.is_folded_constant = self.renamed and ones and not slope
        self.renamed_product = self.renamed and self.in_product
        self.folded = "" if known or not nodes else _statistic(value) or self._folded(nodes)

    def names(self) -> dict[str, str]:
        """The name that the weight has in each of its modules."""
        own = max(self.own, key=len, default=None)
        leaf = self.name[len(own) + 1 :] if own is not None else self.name.rpartition(".")[2]
        leaf = "weight" if self.renamed else leaf
        return {block: f"{block}.{leaf}" for block in self.blocks}

    def _folded(self, nodes: list[ir.Node]) -> str:
        """What an exporter has folded into the weight of a convolution or a linear layer, or "".

        A norm after it, by whose module the node is then called; its weight keeps its own name, and
        the shift gets a name that no module has.
        """
        if not all(is_a(node, *_TAKE_NORMS) for node in nodes):
            return ""
        if re.fullmatch(_FOLDED, self.name) or any(map(self._is_slimmed, nodes)):
            where = listed(self.blocks) or "a convolution"
            return f"a weight of {where} into which a norm was folded"
        beside = {str(value.name) for node in nodes for value in present_inputs(node)}
        own, _, leaf = self.name.rpartition(".")
        if leaf.endswith("_bias") and self.name.removesuffix("_bias") in beside:
            return f"the shift of a norm that was folded into {self.name.removesuffix('_bias')}"
        near = (b == own or b.startswith(f"{own}.") or own.startswith(f"{b}.") for b in self.blocks)
        scripted = any(str(node.name or "").startswith("/") for node in nodes)
        if not own or not self.blocks or scripted or any(near):  # TorchScript repeats some names
            return ""
        return f"used in {listed(self.blocks)} alone, a norm that was folded into it"

    def _is_slimmed(self, node: ir.Node) -> bool:
        """Whether onnxslim has called it by the norm, whose output the node has now.

        Files of MXNet call a weight by its node, and the output so, too.
        """
        [made] = node.outputs[:1]
        named = re.fullmatch(r"(.*)_(weight|bias)", self.name)
        return named is not None and named[1] == made.name != (node.name or made.name)

    def places(self) -> str:
        """The modules that have it, and the names in torch of what was equal."""
        return listed(self.blocks if len(self.blocks) > 1 else [self.name, *self.others])

    def known(self) -> str:
        """What is known about a weight that is trained."""
        of = listed(self.blocks)
        if self.tied:
            return f"tied: also {listed(self.tied)}"
        if self.others:
            return f"also {listed(self.others)}: tied, or stored once since equal"
        if len(self.blocks) > 1:
            return f"one weight of {of}: tied, or stored once since equal"
        if self.renamed:
            return f"the weight of {of}, renamed" if self.in_product else f"of {of}: a constant?"
        return f"used in {of}" if self.blocks and not self.own else ""


def _statistic(value: ir.Value) -> str:
    """What it is to a norm that is written in parts, (y - mean) / √(variance + ε), or "".

    The root may divide a γ that then multiplies the difference, or y and -mean apart.
    """
    for node, read in _reads(value):
        if _variance_in(node) is value:
            return "the variance of a norm that is written in parts"
        if is_a(node, ops.neg) or (is_a(node, ops.sub) and node.inputs[1] is read):
            users = [n for n in _readers(node.outputs[0]) if is_a(n, ops.mul, ops.div)]
            scales = [y for n in users for y in present_inputs(n) if y is not node.outputs[0]]
            if any(map(_divides_by_root, scales)):
                return "the mean of a norm that is written in parts"
    return ""


def _reads(value: ir.Value) -> Iterator[tuple[ir.Node, ir.Value]]:
    """The nodes that use a value, past those that only move it, and what they read."""
    for node in value.consumers():
        if is_a(node, Trait.LAYOUT, ops.identity):
            yield from _reads(node.outputs[0])
        else:
            yield node, value


def _variance_in(node: ir.Node) -> ir.Value | None:
    """What is stored, if something takes the root of it plus a number, or of it, above one."""
    if is_a(node, ops.sqrt) and any(is_a(n, ops.maximum) for n in _readers(node.outputs[0])):
        return _stored(present_inputs(node)[0])
    given = present_inputs(node) if is_a(node, ops.add) else []
    for x, other in zip(given, given[::-1], strict=True):
        one = other.shape is not None and {*other.shape} <= {1}
        if one and (stored := _stored(x)) is not None:
            return stored if any(is_a(n, ops.sqrt) for n in _readers(node.outputs[0])) else None
    return None


def _stored(value: ir.Value) -> ir.Value | None:
    """The initializer that a value is, or is a view of."""
    while (made := value.producer()) is not None and is_a(made, Trait.LAYOUT, ops.identity):
        [value, *_] = present_inputs(made)
    return value if value.is_initializer() else None


def _divides_by_root(value: ir.Value) -> bool:
    """Whether it is a root of a variance, or made of a quotient by one."""
    pending, seen = [value], 0
    while pending and seen < _NEAR:
        made, seen = pending.pop(0).producer(), seen + 1
        if made is not None and _variance_in(made) is not None:
            return True
        pending += [] if made is None else present_inputs(made)
    return False


_NEAR = 16  # values that a quotient may be made of


def is_weight_too(value: ir.Value) -> bool:
    """Whether a norm, or a product, reads a statistic of a norm as a weight."""
    for use in value.uses():
        op = find_op(use.node)
        fixed = [] if op is None else [op.inputs.index(name) for name in op.fixed]
        if has(use.node, Trait.MOVES):
            if any(map(is_weight_too, use.node.outputs)):
                return True
        elif use.idx not in fixed and (fixed or has(use.node, Trait.PRODUCT)):
            return True
    return False


def listed(blocks: Sequence[str]) -> str:
    """Some of them, and how many more there are."""
    more = [f"{len(blocks) - 3} more"] if len(blocks) > 4 else []
    return " and ".join([*blocks[: 3 if more else 4], *more])


def _readers(value: ir.Value) -> Iterator[ir.Node]:
    """The nodes that use a value, past nodes that only rename it."""
    for node in value.consumers():
        if is_a(node, ops.identity):
            yield from _readers(node.outputs[0])
        else:
            yield node


def _through_views(nodes: list[ir.Node]) -> Iterator[ir.Node]:
    for node in nodes:
        yield node
        if is_a(node, Trait.LAYOUT, ops.slice_, ops.concat):
            yield from _through_views([*_readers(node.outputs[0])])


def is_fresh(value: ir.Value) -> bool:
    """Whether it is known to be as weights begin: all elements are equal, or it is the identity."""
    array = constant(value)
    if array is None or not array.size:
        return False
    eye = array.ndim == 2 and bool((array == np.eye(*array.shape)).all())
    return eye or bool((array == array.flat[0]).all())


def is_mask(value: ir.Value) -> bool:
    """Whether it is added to what a softmax reads."""
    sums = [made for node in _readers(value) for made in node.outputs]
    return any(is_a(node, ops.softmax, ops.log_softmax) for one in sums for node in _readers(one))


def copies_in(names: list[str], values: Mapping[str, ir.Value]) -> dict[str, str]:
    """The weight of which another is the transpose: exporters make them from a tied weight."""
    matrices = dict[tuple[int, ...], list[str]]()
    found = dict[str, str]()
    for name in names:
        shape = values[name].shape
        if shape is None or len(shape) != 2 or is_fresh(values[name]):
            continue
        array = constant(values[name])
        if array is None:
            continue
        for other in matrices.get(array.shape[::-1], ()):
            one = constant(values[other])
            if one is not None and np.array_equal(one.T, array):
                found[name] = other
        matrices.setdefault(array.shape, []).append(name)
    return found
