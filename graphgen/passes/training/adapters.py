"""Low-rank adapters beside products with weights: what is trained instead of the weights."""

import json
import math
import re
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import onnx_ir as ir

from graphgen import ops
from graphgen.arguments import checked, searched
from graphgen.errors import GraphgenError, check_seed
from graphgen.graph import FORMER, PUBLISHED, constant, produced_by
from graphgen.match import Engine, Miss, Pass, PassReport, Rewrite, Rule, run_passes
from graphgen.op import Op, find_op, is_a, read_attributes
from graphgen.operands import Array
from graphgen.parts import Part, parts_in
from graphgen.passes.training.numbers import random_numbers
from graphgen.passes.training.updates import norms
from graphgen.places import block_of
from graphgen.recognize.axes import permutation_of
from graphgen.value import Tensor, Value, adopt

A, B, MAGNITUDE = ".lora_A.weight", ".lora_B.weight", ".lora_magnitude_vector"
"""What follows a module's name in the names of its matrices, as in PEFT's files."""

ADAPTERS = r"\.lora_([AB]\.weight|magnitude_vector)$"
"""The pattern of these names."""

PRODUCTS: tuple[Op, ...] = (ops.matmul, ops.gemm, ops.fused_matmul)
BASE = ".base_layer."
"""In PEFT's names of what is inside a module that it adapts as one."""

_SPOTS = 8  # how many numbers of a weight are enough to know it again
SAME, FEW_BITS = 0.005, 0.5
"""How far the same weights may be apart, relative: bfloat16 rounds by less than the first, and few
bits by less than the second (int4 by 0.15); others differ by about 1.4."""
_SITES = 1 << 20  # the first number of a mask of ours; those of a model count from 0


@checked
@dataclass(frozen=True)
class LoRA:
    """Low-rank adaptation: y = x W + s · dropout(x) Aᵀ Bᵀ, of which only A and B are trained.

    A is float[rank, in], uniform in ±1 / √in as torch's Linear begins, and B is float[out, rank],
    zeros: at first y is as it was (Hu et al., arXiv 2106.09685). s is alpha / rank, or, with
    `rank_stabilized`, alpha / √rank (Kalajdzievski, arXiv 2312.03732).

    With `dora`, each output also has a magnitude m that is trained (Liu et al., arXiv 2402.09353):
    y = m / ‖W + s Aᵀ Bᵀ‖ · (x W + s x Aᵀ Bᵀ), with the norm of the column of each output, which
    gradients take as a constant. At first m is that norm. With dropout, only the difference of y to
    x W has it, as in PEFT.

    Args:
        targets: A regular expression, searched in the names of modules: "query|value". If no module
            has such a name, it is searched in those of the checkpoint, as PEFT's "q_proj|v_proj".
        rank: The rank of the update, from 1.
        alpha: The factor above, by default `rank`.
        dropout: The part of x that is zeroed in training, from 0 and below 1.
        rank_stabilized: Whether s divides by √rank.
        dora: Whether magnitudes are trained, too.
        seed: For the random numbers of A.
    """

    targets: str
    rank: int = 8
    alpha: float | None = None
    dropout: float = 0.0
    rank_stabilized: bool = False
    seed: int = 0
    dora: bool = False

    def __post_init__(self) -> None:
        searched(f"LoRA: targets={self.targets!r}", self.targets)
        if self.rank < 1:
            raise GraphgenError(f"LoRA: rank is {self.rank!r}; it must be an integer from 1")
        check_seed("LoRA", self.seed)
        if not 0.0 < self.scale < math.inf:
            raise GraphgenError(f"LoRA: alpha is {self.alpha!r}; it must be positive and finite")
        if not 0.0 <= self.dropout < 1.0:
            raise GraphgenError(f"LoRA: dropout is {self.dropout!r}; it must be from 0, below 1")

    @classmethod
    def read(cls, text: str) -> "LoRA":
        """LoRA("query|value", 8, alpha=16.0) of the text "query|value:8,alpha=16"."""
        found = re.fullmatch(r"(.+):([0-9]{1,6})((?:,\w+=[^,=]*)*)", text)
        try:
            if found is None:
                raise ValueError(text)
            targets, rank, rest = found.groups()
            pairs = [part.split("=") for part in rest.split(",")[1:]]
            given = {name: _READ[name](value) for name, value in pairs}
            if len(given) < len(pairs):
                raise ValueError(text)
        except (KeyError, ValueError):
            raise GraphgenError(
                f"LoRA: {text!r} is not PATTERN:RANK, such as 'query|value:8', a regular "
                "expression for the names of modules and a number, or "
                "PATTERN:RANK,alpha=16,dropout=0.1,rank_stabilized=true,dora=true,seed=0 with some "
                "of these; nor is it the path of an adapter, to go on with"
            ) from None
        return cls(targets, int(rank), **given)

    def of_rank(self, rank: int) -> "LoRA":
        """The same of another rank, with the alpha that has the same s."""
        alpha = self.rank if self.alpha is None else self.alpha
        times = rank / self.rank
        return replace(
            self, rank=rank, alpha=alpha * (times**0.5 if self.rank_stabilized else times)
        )

    def start(self, site: "Linear") -> dict[str, Array]:
        """The first A and B of a module, by name; a function of the seed and the name alone."""
        size, out = site.sizes
        random = np.random.default_rng([self.seed, zlib.crc32(site.module.encode())])
        a = random.uniform(-1.0, 1.0, (self.rank, size)) / math.sqrt(size)
        zeros = np.zeros((out, self.rank), np.float32)
        found = {site.module + A: a.astype(np.float32), site.module + B: zeros}
        if self.dora:
            found[site.module + MAGNITUDE] = norms(site.matrix())
        return found

    @property
    def scale(self) -> float:
        """s, the factor of the update."""
        alpha = self.rank if self.alpha is None else self.alpha
        return alpha / (math.sqrt(self.rank) if self.rank_stabilized else self.rank)


_READ: Mapping[str, Callable[[str], Any]] = {
    "alpha": float,
    "dropout": float,
    "rank_stabilized": {"true": True, "false": False}.__getitem__,
    "dora": {"true": True, "false": False}.__getitem__,
    "seed": int,
}
"""How an option of `LoRA.read` is read."""


def spots_in(weight: Array, within: float = SAME) -> Array:
    """Some numbers of a weight, float[out, in]: rows of output, input, number, `within`; float64.

    Files of adapters keep them, to tell whether they run beside the weights they were trained with:
    these may differ by a part of their size.
    """
    i, (out, size) = np.arange(_SPOTS), weight.shape
    rows = (2 * i + 1) * out // (2 * _SPOTS)
    columns = (2 * (3 * i % _SPOTS) + 1) * size // (2 * _SPOTS)
    numbers = np.nan_to_num(weight[rows, columns]).astype(np.float64)
    return np.stack([rows, columns, numbers, np.full(_SPOTS, within)], axis=1)


class Linear(NamedTuple):
    """A product α x W + ... with a weight, (out, in) if `by_rows`, else (in, out)."""

    module: str
    weight: ir.Value
    by_rows: bool
    alpha: float
    sizes: tuple[int, int]
    """In and out."""

    def matrix(self) -> Array:
        """The weight, float[out, in]."""
        weight = constant(self.weight)
        assert weight is not None
        return weight if self.by_rows else weight.T


def linear_at(node: ir.Node) -> Linear | None:
    """The product of rows x with a float32 weight that a node is, if it is one."""
    if not is_a(node, *PRODUCTS):
        return None
    x, matrix = node.inputs[:2]
    turn = produced_by(matrix, ops.transpose)
    turned = turn is not None and permutation_of(turn) == [1, 0]
    weight = turn.inputs[0] if turn is not None and turned else matrix
    if x is None or weight is None or weight.is_graph_input() or not weight.is_initializer():
        return None
    if weight.dtype is not ir.DataType.FLOAT or weight.shape is None or len(weight.shape) != 2:
        return None
    if any(node.attributes.get_int(n, 0) for n in ("transA", "transBatchA", "transBatchB")):
        return None
    by_rows = turned != bool(node.attributes.get_int("transB", 0))
    alpha = node.attributes.get_float("alpha", 1.0)
    rows, columns = weight.shape.numpy()
    sizes = (columns, rows) if by_rows else (rows, columns)
    module = module_of(node, weight, str(weight.name))
    return Linear(module, weight, by_rows, 1.0 if alpha is None else alpha, sizes)


def module_of(node: ir.Node, weight: ir.Value, name: str) -> str:
    """The name of the module of a product: that of its weight, if only one module has it."""
    own, block = name.removesuffix(".weight"), block_of(node)
    renamed = own == name and "." not in name.replace("/", ".")
    readers = {use.node for use in weight.uses() if not for_norm(use.node)}
    elsewhere = readers != {node} and not own.endswith(block)
    return block if block and (renamed or elsewhere) else own.replace("/", ".")


def for_norm(node: ir.Node) -> bool:
    """Whether a node is the sum of a weight and an update whose norm is taken."""
    uses = node.outputs[0].uses() if is_a(node, ops.add) else ()
    return bool(uses) and all(is_a(use.node, ops.reduce_l2) for use in uses)


@dataclass
class Adapting:
    """The pass that adds the adapters, and the `modules` that have one.

    Modules of `own` have other settings than `lora`, and those of `shared` read the A of another.
    """

    lora: LoRA
    own: Mapping[str, LoRA] = field(default_factory=dict)
    shared: dict[str, str] = field(default_factory=dict)
    modules: dict[str, Linear] = field(default_factory=dict)

    def as_pass(self) -> Pass:
        """The pass. Raises GraphgenError if nothing is a target."""
        return Pass("adapters", self._run)

    def _run(self, model: ir.Model, engine: Engine) -> PassReport:
        self.modules = {}
        found = linears(model)
        matched = [n for n, s in found.items() if re.search(self.lora.targets, s.module)]
        if not matched:  # as PEFT would search
            names = {module: part.name for module, part in published_names(model).items()}
            known = {n: names[s.module] for n, s in found.items() if s.module in names}
            matched = [n for n, name in known.items() if re.search(self.lora.targets, name)]
            first = dict[str, str]()
            for node in matched:  # parts of one module have one A
                module = found[node].module
                if (other := first.setdefault(known[node], module)) != module:
                    self.shared[module] = other
        if not matched:
            raise GraphgenError(
                f"artifacts: lora={self.lora.targets!r} matches no module with a product; there "
                f"are {some_of(found.values())}"
            )
        _check_names(model, {found[node].module for node in matched})
        numbers = random_numbers(model.graph, "dropout of adapters") if self.lora.dropout else None
        values: dict[str, ir.Value] = {}
        masks: dict[tuple[str, ir.Value | None], int] = {}
        rule = partial(self._adapted, found, values, numbers, masks)
        report = engine.run("adapters", model, products_by(rule), forward=True, nodes=matched)
        for value in values.values():
            model.graph.register_initializer(value)
        if clash := next((site.reason for site in report.sites if site.status != "fired"), ""):
            raise GraphgenError(f"artifacts: lora={self.lora.targets!r}: {clash}")
        return report

    def _adapted(
        self,
        found: Mapping[ir.Node, Linear],
        values: dict[str, ir.Value],
        numbers: tuple[ir.Value, ir.Value] | None,
        masks: dict[tuple[str, ir.Value | None], int],
        node: ir.Node,
    ) -> Rewrite | Miss:
        site, op = found[node], find_op(node)
        assert op is not None
        lora, first_part = self.own.get(site.module, self.lora), self.shared.get(site.module)
        if (first := self.modules.setdefault(site.module, site)).weight is not site.weight:
            both = f"{first.weight.name} and {site.weight.name}"
            return Miss(f"module {site.module} has two weights, {both}: export it with names")
        owner = first_part or site.module
        if site.module + B not in values:
            start = lora.start(site)
            values.setdefault(owner + A, initializer(owner + A, start.pop(site.module + A)))
            values |= {name: initializer(name, x) for name, x in start.items()}
        x: Tensor = adopt(node.inputs[0])  # not site.x, which may have an adapter since
        if numbers is not None:
            ratio = np.asarray(self.lora.dropout, np.float32)
            number = _SITES + [*found].index(node)
            if owner in self.shared.values():  # PEFT draws once for all of them
                number = masks.setdefault((owner, node.inputs[0]), number)
            place = np.asarray(number, np.int64)
            x = ops.dropout(x, ratio, adopt(numbers[0]), adopt(numbers[1]), place)
        a, b = Value(values[owner + A]), Value(values[site.module + B])
        update = ops.matmul(ops.matmul(x, ops.swap_last(a)), ops.swap_last(b))
        update = update * np.float32(lora.scale * site.alpha)
        given, attributes = [*map(adopt, node.inputs)], read_attributes(op, node)
        if not self.lora.dora:
            result = op(*given, **attributes) + update
        else:
            m = Value(values[site.module + MAGNITUDE])
            product, gain = op(x, given[1], **attributes), _gain(lora, site, a, b, m)
            if numbers is not None:
                result = op(*given, **attributes) + (gain * (product + update) - product)
            else:
                result = gain * (product + update)
                if len(given) > 2 and given[2] is not None:
                    result = result + given[2] * np.float32(attributes.get("beta", 1.0))
        inputs = [value for value in node.inputs if value is not None]
        return Rewrite(result, inputs, f"rank {lora.rank}", may_share=True)


def _gain(lora: LoRA, site: Linear, a: Tensor, b: Tensor, m: Tensor) -> Tensor:
    """m / ‖W + s Aᵀ Bᵀ‖ of each output."""
    update = ops.matmul(b, a) * np.float32(lora.scale)  # float[out, in]
    update = update if site.by_rows else ops.transpose(update, perm=[1, 0])
    changed = Value(site.weight) + update
    size = ops.stop_gradient(ops.reduce_l2(changed, [int(site.by_rows)], keepdims=0))
    return m / ops.where(ops.equal(size, np.float32(0)), np.float32(1), size)


def published_names(model: ir.Model) -> dict[str, Part]:
    """What the checkpoint that a model was built from calls its modules; {} if nothing says so.

    An export of torch's attention has its last product under the name that PEFT has for it.
    """
    if PUBLISHED not in model.metadata_props:
        modules = {site.module for site in linears(model).values()}
        whole = modules | {name.partition(".in_proj_")[0] for name in model.graph.initializers}
        last = {f"{name}.out_proj": f"{name}{BASE}out_proj" for name in whole}
        return {n: Part(last.get(n, n)) for n in modules} if modules & last.keys() else {}
    try:
        return parts_in(json.loads(model.metadata_props.get(PUBLISHED, "{}")))
    except (ValueError, TypeError, RecursionError) as error:
        raise GraphgenError(
            f"the model's metadata {PUBLISHED!r} is damaged ({error}): build the folder again"
        ) from None


def former_names(model: ir.Model) -> dict[str, str]:
    """Other names by which adapters may know a module, by the one of `published_names`."""
    try:
        return {
            str(now): str(old)
            for now, old in json.loads(model.metadata_props.get(FORMER, "{}")).items()
        }
    except (ValueError, AttributeError, RecursionError) as error:
        raise GraphgenError(
            f"the model's metadata {FORMER!r} is damaged ({error}): build the folder again"
        ) from None


def adapt(
    model: ir.Model,
    lora: LoRA,
    *,
    few_bits: bool = False,
    own: Mapping[str, LoRA] | None = None,
    shared: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Add adapters to a model; return what files note of them, for JSON.

    `few_bits` says that the weights beside them will be rounded to these. `own` has the settings of
    modules that have others, and `shared` the module whose A another one reads.
    """
    adapting = Adapting(lora, own or {}, {**(shared or {})})
    run_passes(model, [adapting.as_pass()], Engine())
    alpha = lora.rank if lora.alpha is None else lora.alpha
    stable = lora.rank_stabilized
    noted: dict[str, Any]
    noted = {"rank": lora.rank, "alpha": alpha, "dropout": lora.dropout, "rank_stabilized": stable}
    noted |= {"dora": True} if lora.dora else {}
    if own:
        noted["own"] = {n: [x.rank, x.alpha] for n, x in sorted(own.items())}
    noted |= {"shared": adapting.shared} if adapting.shared else {}
    noted["modules"] = sorted(adapting.modules)
    within = FEW_BITS if few_bits else SAME
    noted["base"] = {n: spots_in(x.matrix(), within).tolist() for n, x in adapting.modules.items()}
    if names := published_names(model):
        noted["names"] = {n: [*names[n]] for n in adapting.modules if n in names}
    return noted


def trained_whole(model: ir.Model, lora: dict[str, Any], trained: Iterable[str]) -> dict[str, Any]:
    """What files note of weights and biases of products that are trained beside adapters, for JSON.

    By the module's name with `.weight` or `.bias`, the parameter, and whether it is the transpose
    of what torch's Linear has. `names` of what `adapt` noted gets what the checkpoint calls them.
    """
    known = {name for name in trained if not re.search(ADAPTERS, name)}
    found, names = dict[str, Any](), published_names(model)
    for site in linears(model).values():
        if len(site.weight.uses()) > 1:  # a tied one is that of another module, too
            continue
        own = {"weight": [str(site.weight.name), not site.by_rows]}
        own["bias"] = [f"{site.module}.bias", False]
        kept = {f"{site.module}.{part}": one for part, one in own.items() if one[0] in known}
        if kept and site.module in names:
            lora.setdefault("names", {})[site.module] = [*names[site.module]]
        found |= kept
    return found


def only(modules: Iterable[str]) -> str:
    """The pattern of these modules alone."""
    return "|".join(f"^{re.escape(name)}$" for name in modules)


def products_by(rule: Rule) -> dict[Op, list[Rule]]:
    """The rule for each of PRODUCTS."""
    return {op: [rule] for op in PRODUCTS}


def linears(model: ir.Model) -> dict[ir.Node, Linear]:
    """The products with weights, with the modules that they are."""
    nodes = {node: linear_at(node) for node in model.graph.all_nodes()}
    return {node: site for node, site in nodes.items() if site is not None}


def some_of(sites: Iterable[Linear]) -> str:
    """The names of the first modules."""
    names = sorted({site.module for site in sites})
    return ", ".join(names[:6]) + ", ..." * (len(names) > 6) or "none"


def initializer(name: str, array: Array) -> ir.Value:
    """A weight for a graph."""
    tensor = ir.tensor(array, name=name)
    kind = ir.TensorType(tensor.dtype)
    return ir.Value(name=name, const_value=tensor, type=kind, shape=ir.Shape(array.shape))


def _check_names(model: ir.Model, modules: Iterable[str]) -> None:
    known = {value.name for value in (*model.graph.inputs, *model.graph.initializers.values())}
    for name in sorted(module + part for module in modules for part in (A, B, MAGNITUDE)):
        if name in known:
            raise GraphgenError(
                f"artifacts: the model has a weight {name} already: give the model without its "
                "adapter, or merge that first"
            )
