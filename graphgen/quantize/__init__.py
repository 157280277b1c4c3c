"""Weights of products and tables as small integers, and what each layer loses by it."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, TypeAlias, cast

import numpy as np
import onnx_ir as ir
from rich.progress import track

from graphgen.arguments import checked
from graphgen.bits import Bits, Blocks, BlockSize, Rows, chunks, layout_of, to_blocks, to_rows
from graphgen.edit import identity_of, to_model
from graphgen.errors import GraphgenError, one_of
from graphgen.graph import ModelLike, bytes_of, constant, model_in, operator_name, parameters
from graphgen.match import (
    UNVERIFIED,
    Engine,
    Outcome,
    Pass,
    PassReport,
    Refusal,
    Rewrite,
    Rule,
    Site as Done,
    run_passes,
)
from graphgen.measure.accuracy import relative
from graphgen.measure.feeds import feeds_of_kind, sizes_of
from graphgen.model import readable
from graphgen.op import Op
from graphgen.operands import Array
from graphgen.ops.quantized import (
    dynamic_quantize_linear,
    matmul_integer_to_float,
    matmul_nbits,
)
from graphgen.passes.clean import clean
from graphgen.passes.verify import parts_of
from graphgen.places import where_is
from graphgen.processor import FITS, INT8_KEY, NEEDS, saturating_product
from graphgen.quantize.calibration import Seen, observed, random_feeds
from graphgen.quantize.effect import Layer, Report, opened
from graphgen.quantize.experts import (
    Treated,
    experts_of,
    layers_of,
    obstacle,
    scores_of_experts,
    treat,
)
from graphgen.quantize.layers import rewritten, rules_of, settle, treat_experts
from graphgen.quantize.sites import (
    SMALL,
    AccuracyLevel,
    Site,
    product,
    reads_rows,
    site_at,
    with_integers,
)
from graphgen.quantize.spool import Spool
from graphgen.record import Tape, recording
from graphgen.targets import Target, TargetName, target as find_target
from graphgen.targets.kernels import EIGHT_BITS
from graphgen.traits import Trait, has
from graphgen.value import adopt
from graphgen.version import minor

Scheme: TypeAlias = Literal["int8", "int4", "weights8"]

THRESHOLDS: dict[Scheme, float] = {"int8": 0.05, "int4": 0.3, "weights8": 0.03}
"""The schemes, and the relative error above which a layer stays in float."""

_NEEDED: dict[str, list[Op]] = {
    "int8": [dynamic_quantize_linear, matmul_integer_to_float],
    "int4": [matmul_nbits],
    "weights8": [matmul_nbits],
}
_OF_SCHEMES = {
    "accuracy_level": ("int4",),
    "block_size": ("int4", "weights8"),
    "full_range": ("int8",),
}
"""The schemes that an argument is of."""
_VERIFIED = (7, 1)  # sizes to start from when verifying a layer
_FLOAT = ir.DataType.FLOAT


@checked
def quantize(
    model: ModelLike,
    scheme: Scheme,
    *,
    target: TargetName = "cpu",
    calibration: Iterable[Mapping[str, Any]] | None = None,
    random: bool = False,
    threshold: float | None = None,
    embeddings: bool = True,
    block_size: BlockSize | None = None,
    accuracy_level: AccuracyLevel = 4,
    full_range: bool = False,
    verify: bool = False,
    stop_after: int | None = None,
    progress: bool = False,
) -> tuple[ir.Model, Report]:
    """A copy of an optimized model with the weights of its products as small integers.

    int8: a scale for each output channel; x is quantized as the model runs, once for all products
    that read it. int4: each block of a channel's weights has the scale and the zero point with the
    least squared error; with `calibration`, weights make up for what others lose (GPTQ, arXiv
    2210.17323). weights8: such blocks with eight bits, which lose least. Weights are read one at a
    time.

    Args:
        model: A float32 model from `optimize`; any other may have less to quantize.
        scheme: int8, int4 or weights8.
        target: cpu, or, for int4, cuda.
        calibration: Feeds to run the model on; errors are then those of each layer's output, else
            of its weight. By default int8 and weights8, which lose most by rounding what they read,
            run on `random_feeds`, and int4 does not run; with `()` none runs.
        random: Whether `calibration` is random: the report says so, and int4 is not fitted to it.
        threshold: The relative error above which a layer stays in float, by default that of
            `THRESHOLDS`.
        embeddings: Whether to quantize tables from which rows are read, too.
        block_size: 16 to 256, of int4 and weights8: larger ones are faster, and lose more. By
            default 16 for weights8; 64 for int4, and 128 with `calibration`.
        accuracy_level: Of int4: at 4 products round what they read to int8, in blocks; at 0 they do
            not, and most processors take up to four times as long for one row.
        full_range: Of int8: weights that need a processor with an instruction for int8 (VNNI, AMX,
            dot products of Arm), or the session option session.x64quantprecision=1: `to_rows`.
        verify: Run each layer before and after, in its place, on random inputs; one that differs
            by more than the threshold, does not run, or ran at no sizes, stays in float.
        stop_after: Quantize only this many layers, to find one at fault.
        progress: Show a progress bar.

    Raises GraphgenError for an unknown scheme or block size, a target without its operators, a
    model that is quantized already or has nothing to quantize, and a weight that is not finite.
    """
    job = Quantizing(
        scheme,
        target,
        calibration,
        random,
        threshold,
        embeddings,
        block_size,
        accuracy_level,
        full_range,
        progress,
    )
    report = Report(scheme, str(job.profile), job.limit)
    engine = Engine(stop_after, partial(_beyond, limit=job.limit) if verify else None)
    model = rewritten("quantize", model, job.as_pass(), engine, report)
    report.layers = job.layers
    return model, report


@dataclass
class Quantizing:
    """The pass that `quantize` runs, and its arguments; `layers` are those of the last run."""

    scheme: Scheme
    target: TargetName = "cpu"
    calibration: Iterable[Mapping[str, Any]] | None = field(default=None, repr=False)
    random: bool = False
    threshold: float | None = None
    embeddings: bool = True
    block_size: BlockSize | None = None
    accuracy_level: AccuracyLevel = 4
    full_range: bool = False
    progress: bool = False
    layers: list[Layer] = field(default_factory=list, repr=False)

    def __post_init__(self) -> None:
        one_of("quantize", Scheme, scheme=self.scheme)
        self.who = f"quantize to {self.scheme}"
        self.feeds = None if self.calibration is None else list(self.calibration)
        self.fitted = self.scheme == "int4" and not self.random
        default = 16 if self.scheme == "weights8" else 128 if self.feeds and self.fitted else 64
        self.size = default if self.block_size is None else self.block_size
        one_of(self.who, BlockSize, block_size=self.size)
        one_of(self.who, AccuracyLevel, accuracy_level=self.accuracy_level)
        for name, schemes in _OF_SCHEMES.items():
            if getattr(self, name) != getattr(Quantizing, name) and self.scheme not in schemes:
                raise GraphgenError(
                    f"{self.who}: {name} is of {' and '.join(schemes)}; leave it out"
                )
        if self.threshold is not None and not self.threshold >= 0.0:
            wanted = "it must be a number of at least 0"
            raise GraphgenError(f"{self.who}: threshold is {self.threshold!r}; {wanted}")
        self.profile = profile_of(self.who, self.scheme, self.target)
        self.limit = THRESHOLDS[self.scheme] if self.threshold is None else self.threshold

    def as_pass(self) -> Pass:
        """Each layer is a rewrite, numbered in the order of the graph."""
        return Pass("quantize", self.run)

    def run(self, model: ir.Model, engine: Engine) -> PassReport:
        """Quantize one weight after another, wherever it is used, in place."""
        sites, others = self._find(model)
        done = engine.run("quantize", model, rules_of(others), forward=True, nodes=[*others])
        self.spool, self.layers = Spool(self.who), []
        feeds, self.random = self.feeds, self.random or self.feeds is None
        if feeds is None:
            feeds = random_feeds(model) if self.scheme != "int4" else []
        groups: dict[object, list[Site]] = {}
        for site in sites:
            key = (site.weight, site.by_rows, self._alone(site))
            groups.setdefault(key, []).append(site)
        read = [{x.x: x.columns for x in group if not x.table} for group in groups.values()]
        work = zip(groups.values(), observed(model, read, feeds, moments=self.fitted), strict=True)
        how: dict[str, Any] = {"total": len(groups), "disable": not self.progress}
        summed = False
        for group, seen in track(work, self.who, transient=True, **how):
            if engine.stopped:
                break
            layers, outcomes = self._treat(model.graph, group, seen)
            nodes = [site.end for site in group]
            rules = rules_of(outcomes)
            found = engine.run("quantize", model, rules, forward=True, nodes=nodes).sites
            done.sites += found
            settle(zip(nodes, layers, strict=True), found)
            for site, layer in zip(group, layers, strict=True):
                summed |= layer.scheme == "int8" and not site.table
            first, in_float = layers[0], [layer.scheme == "float" for layer in layers]
            if all(in_float):
                first.bytes_after = 0  # the integers are not needed
            if any(in_float):
                first.bytes_after += first.bytes_before  # the float weight still is
            self.layers += layers
        self.layers += treat_experts(model, engine, partial(self._experts, model.graph), done)
        if summed:
            model.metadata_props[INT8_KEY] = NEEDS if self.full_range else FITS
        return done

    def _find(self, model: ir.Model) -> tuple[list[Site], dict[ir.Node, Outcome]]:
        """The sites in the order of the nodes, and why other candidates are not sites."""
        tables = {*parameters(model.graph).values()} if self.embeddings else set()
        sites: list[Site] = []
        others: dict[ir.Node, Outcome] = {}
        choosing = scores_of_experts(model)
        for node in model.graph.all_nodes():
            if has(node, Trait.QUANTIZED):
                raise GraphgenError(
                    f"{self.who}: the model is quantized already, it has {node.op_type}; give the "
                    "float32 model that it was made from"
                )
            site = site_at(node, tables)
            if isinstance(site, Site) and site.end.outputs[0] in choosing:
                site = Refusal("its result chooses experts, and another one would change all")
            if isinstance(site, Site):
                # MatMulNBits misreads zero points from outside a branch, up to onnxruntime 1.26.
                site.symmetric = not site.table and node.graph is not model.graph
                sites.append(site)
            elif site is not None:
                others[node] = site
        if not sites and not any(experts_of(model)):
            raise GraphgenError(
                f"{self.who}: the model has no MatMul or Gemm with a constant float32 matrix, and "
                f"no table of {SMALL} weights or more; give a float32 model, as optimize returns it"
            )
        return sites, others

    def _alone(self, site: Site) -> bool:
        """Whether rows cannot be read from the integers of a product."""
        int4 = site.table and self.scheme == "int4"
        return int4 and not reads_rows(self.profile, site.columns, self.size)

    def _treat(
        self, graph: ir.Graph, group: Sequence[Site], seen: Mapping[ir.Value, Seen]
    ) -> tuple[list[Layer], dict[ir.Node, Any]]:
        """The layers of one weight, and the rewrite of each, or why it stays in float.

        If it loses too much at one place, it stays in float at all of them.
        """
        weight, by_rows = group[0].weight, group[0].by_rows
        w = constant(weight)
        assert w is not None
        if not np.isfinite(w).all():
            raise GraphgenError(
                f"{self.who}: the weight {weight.name} is not finite; train it again"
            )
        matrix = w if by_rows else w.T
        # A table takes no time: eight bits are enough.
        alone = self.scheme != "weights8" and all(site.table for site in group)
        # Rows that a Gather reads are independent: none makes up for what another loses.
        products = [] if any(site.table for site in group) else group
        moments = [m for x in products if x.x in seen and (m := seen[x.x].shrunk()) is not None]
        total = np.sum(moments, axis=0) if moments else None
        symmetric = any(site.symmetric for site in group)
        samples = {x.x: np.concatenate(seen[x.x].rows) for x in group if x.x in seen}
        multiplied = [samples[x.x] for x in products if x.x in samples]
        integers = self._integers(matrix, alone, multiplied, total, symmetric)
        shared = by_rows and any(site.table for site in group)
        read_rows: Rows | Blocks = integers
        if isinstance(integers, Blocks) and integers.bits == 8 and any(x.table for x in group):
            read_rows = integers.finer(matrix)
        arrays = layout_of(read_rows, shared)
        if alone:
            arrays["scale"] = arrays["scale"][:, None]
        layers = []
        for site in group:
            read = samples.get(site.x)
            own = read_rows if site.table else integers
            error = _error(matrix, own, arrays, read, shared, self.accuracy_level)
            of = "weight" if read is None else "output" + ", random inputs" * self.random
            path, operator = where_is(site.end), site.node.op_type
            scheme = "int8" if alone else self.scheme
            layers.append(Layer(str(weight.name), path, operator, w.shape, scheme, error, of))
            if read is not None and self.full_range and isinstance(integers, Rows):
                layers[-1].error_saturated = _saturated_error(matrix, integers, read)
            if not error <= self.limit:
                layers[-1].reason = f"its relative error is {error:.3g}, above {self.limit:.3g}"
        layers[0].bytes_before = w.nbytes
        if losing := [layer.path for layer in layers if layer.reason]:
            for layer in layers:
                layer.reason = layer.reason or f"{losing[0]} has the same weight"
            refusals = (Refusal(layer.reason) for layer in layers)
            return layers, dict(zip((site.end for site in group), refusals, strict=True))
        layers[0].bytes_after = sum(array.nbytes for array in arrays.values())
        made = self.spool.weights(graph, str(weight.name), arrays)
        rewrites = dict[ir.Node, Any]()
        for site, layer in zip(group, layers, strict=True):
            why = f"{layer.scheme}, relative error of its {layer.measured_on} {layer.error:.3g}"
            how = (site, made, matrix.shape, why, shared)
            rewrites[site.end] = partial(with_integers, *how, level=self.accuracy_level)
        return layers, rewrites

    def _experts(self, graph: ir.Graph, node: ir.Node) -> Treated:
        if reason := obstacle(node, self.scheme, self.profile):
            return layers_of(node, self.scheme), Refusal(reason)
        keep = partial(self.spool.weights, graph)
        return treat(self.who, node, self.scheme, self.size, self.accuracy_level, self.limit, keep)

    def _integers(
        self,
        w: Array,
        alone: bool,
        samples: Sequence[Array],
        moments: Array | None,
        symmetric: bool,
    ) -> Rows | Blocks:
        """w (N, K) in the scheme; a mere table in int8, since no product sums its integers."""
        if alone or self.scheme == "int8":
            with np.errstate(over="ignore"):  # `to_rows` checks the result
                squares = [np.square(x).mean(axis=0) for x in samples]
                total = np.sum(squares, axis=0) if squares else None
            return to_rows(w, total, full_range=alone or self.full_range)
        bits: Bits = 8 if self.scheme == "weights8" else 4
        return to_blocks(w, moments, bits=bits, block_size=self.size, symmetric=symmetric)


def profile_of(who: str, scheme: Scheme, name: TargetName) -> Target:
    """The target's profile. Raises GraphgenError if it cannot run products of the scheme."""
    if name == "official":
        raise GraphgenError(
            f"{who}: the target official is for training, and integers have no gradient; choose "
            "cpu or cuda"
        )
    if scheme == "weights8" and name != "cpu":
        raise GraphgenError(f"{who}: it was measured on the CPU only; choose cpu, or int4")
    profile = find_target(name)
    if scheme == "weights8" and minor(profile.runtime) < EIGHT_BITS:
        raise GraphgenError(
            f"{who}: {profile} multiplies no weights of eight bits, which 1.23 does; upgrade "
            "onnxruntime, or choose int8"
        )
    for op in _NEEDED[scheme]:
        if op.name not in profile.kernels.get(op.domain, {}):
            other = "int4" if scheme == "int8" else "int8"
            raise GraphgenError(f"{who}: {profile} has no {op.name}; choose {other} or another one")
    return profile


def _beyond(
    root: ir.Node,
    tape: Tape,
    rewrite: Rewrite,
    results: Sequence[ir.Value | None],
    *,
    limit: float,
) -> str | None:
    """Where a layer, in its place, differs by more than the limit on random inputs, or None."""
    _, before, after = parts_of(root, tape, rewrite, results)
    ran: list[tuple[dict[str, Array], list[Array]]] = []
    try:
        with opened(before) as session:
            for base in _VERIFIED:
                for sizes in sizes_of(before, base):
                    with suppress(GraphgenError):  # sizes that do not fit together
                        feed = feeds_of_kind(before, sizes, "normal", seed=base)
                        ran.append((feed, session(feed)))
    except GraphgenError as error:
        return f"{UNVERIFIED}: {error}"
    try:
        with opened(after) as session:
            for feed, wanted in ran:
                lost = relative(zip(wanted, session(feed), strict=True))
                if not lost <= limit:
                    return f"its relative error in its place is {lost:.3g}, above {limit:.3g}"
    except GraphgenError as error:
        return f"in its place it does not run: {error}"
    return None if ran else f"{UNVERIFIED}: no sizes were found at which it runs"


def _error(
    w: Array,
    integers: Rows | Blocks,
    arrays: Mapping[str, Array],
    x: Array | None,
    shared: bool,
    level: AccuracyLevel,
) -> float:
    """√(mean (y - ŷ)² / mean y²) of y = x Wᵀ as the runtime computes it; without x, of W (N, K)."""
    if x is None:
        pairs: Iterable[tuple[Array, Array]] = (
            (w[part], integers.dequantized(part)) for part in chunks(w.shape)
        )
    else:
        with recording() as tape:
            value = tape.input("x", _FLOAT, ["rows", w.shape[1]]).value
            node = identity_of(value)
            site = Site(node, node, value, value, True)
            made = {k: tape.constant(array) for k, array in arrays.items()}
            model = to_model(
                tape, {"y": tape.operand(product(site, made, w.shape, shared, level=level))}
            )
        with opened(model) as session:
            pairs = [(x @ w.T, session(x=x)[0])]
    return relative(pairs)


def _saturated_error(w: Array, rows: Rows, x: Array) -> float:
    """The same for int8 on a processor that adds two products in 16 bits, simulated."""
    low, high = min(x.min(), 0), max(x.max(), 0)
    scale = np.float32((high - low) / 255) or np.float32(1)
    zero = np.clip(np.rint(-low / scale), 0, 255)
    q = np.clip(np.rint(x / scale) + zero, 0, 255).astype(np.uint8)
    total = saturating_product(q, rows.integers.T) - zero * rows.integers.sum(axis=1, dtype=int)
    return relative([(x @ w.T, total * (scale * rows.scales))])
