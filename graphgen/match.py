"""Passes, and the engine, through which alone they change a graph.

A rule looks at one node and returns a replacement, a reason why not, or None if it has nothing to
say. It never edits the graph: it records new nodes, and the engine checks and splices them. A pass
without sites, such as folding, returns another whole model, which the engine puts in place.
"""

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, TypeVar, get_args

import onnx_ir as ir

from graphgen.display import on_screen
from graphgen.edit import infer_model, prune, rewire, splice
from graphgen.errors import GraphgenError, user_line
from graphgen.garbage import uncollected
from graphgen.graph import count_nodes, operator_name, present_inputs
from graphgen.infer import incompatible
from graphgen.op import Op
from graphgen.places import source_of, where_is
from graphgen.record import PATH, Tape, recording
from graphgen.subgraphs import nodes_of
from graphgen.traits import Trait, has
from graphgen.value import graph_value


@dataclass(frozen=True)
class Miss:
    """A candidate that a rule could not take: the predicate that failed, with both values."""

    reason: str
    anchor: ir.Node | None = None


@dataclass(frozen=True)
class Refusal:
    """A site that could be rewritten but is not worth rewriting, with the figures."""

    reason: str
    anchor: ir.Node | None = None


CHANNELS = "channels"
"""The layout of a norm between two transposes, along the axis before those of images."""


@dataclass
class Rewrite:
    """A replacement for a node's outputs.

    There is one result for each used output, and None for an unused one; that of a single output
    may stand alone. `inputs` are the values at which the matched region ends. `reason` says what
    was found, `caveat` what changes where the graph leaves a result undefined. With `may_share`,
    parts of the region that are also used elsewhere simply stay. With `untrimmed`, recorded nodes
    that no result needs go in, too, and count in names until the graph is tidied. `inlined` says
    that an operator becomes its body, for want of a kernel that is there or pays. `anchor` is the
    node that revealed the candidate: of several that fail at one anchor only the last is reported.
    `results` may be a function that records them, if `fused`, the operator that has to pay, stands.
    `layout` names figures of its own for that operator, as where it is `channels` that it sums.
    Values of the region in `also` are replaced too: their results follow those of the outputs.
    """

    results: Any
    inputs: Sequence[ir.Value]
    reason: str = ""
    caveat: str = ""
    may_share: bool = False
    untrimmed: bool = False
    inlined: bool = False
    anchor: ir.Node | None = None
    fused: Any = None
    layout: str = ""
    also: Sequence[ir.Value] = ()

    def __post_init__(self) -> None:
        # Rules may calculate with what they name here, as with the source of a View.
        self.inputs = [graph_value(x) for x in self.inputs]

    def every(self) -> Sequence[Any]:
        """The results, also of a rule that gives one alone, or a function that records it."""
        if callable(self.results):
            self.results = self.results()
        return self.results if isinstance(self.results, (tuple, list)) else [self.results]


@dataclass
class Rewired:
    """Other values in the place of some operands of a node, which stays; by their index.

    What it reads is compared when the whole pass is verified, not at the site.
    """

    operands: Mapping[int, Any]
    reason: str = ""


@dataclass
class Replacement:
    """Another model in place of the whole; it may be the same object, changed.

    Without a `reason` only types have changed, so it is not a rewrite. `context` is what
    `infer_model` returned, if types were inferred again.
    """

    model: ir.Model
    reason: str = ""
    context: Any = None


Outcome: TypeAlias = Rewrite | Rewired | Miss | Refusal | None
Rule: TypeAlias = Callable[[ir.Node], Outcome]
"""Looks at one node, inside a recording."""
_Kind = TypeVar("_Kind", bound=str | Op)
Verifier: TypeAlias = Callable[[ir.Node, Tape, Rewrite, Sequence[ir.Value | None]], str | None]
"""Takes a node, a recording, the rewrite and its recorded results; says what differs, or None."""
WholeVerifier: TypeAlias = Callable[[str, ir.Model, ir.Model], str | None]
"""Takes a pass's name and the models before and after it; says what differs, or None."""
UNVERIFIED = "could not be verified"
"""How a verifier's answer begins if it could not decide."""


Status: TypeAlias = Literal["fired", "missed", "refused"]
STATUSES: tuple[Status, ...] = get_args(Status)
"""What may happen at a candidate: it was rewritten, did not match, or was not worth it."""


@dataclass
class Site:
    """What happened at one candidate, and where it is."""

    status: Status
    where: str
    reason: str
    number: int | None = None  # of the rewrite, counted over the whole pipeline
    anchor: ir.Node | None = None
    rolled_back: bool = False  # missed, because verification found a difference
    node: ir.Node | None = None  # as it was before
    inlined: bool = False  # fired, and the operator is its body now

    def to_json(self) -> dict[str, Any]:
        """The object that docs/report.schema.json describes."""
        fields = {key: getattr(self, key) for key in ("status", "where", "reason", "number")}
        node = self.node
        made = ("", "", "") if node is None else (operator_name(node), node.name, source_of(node))
        return {**fields, **dict(zip(("operator", "node", "source"), made, strict=True))}

    @on_screen
    def __repr__(self) -> Iterator[str]:
        yield f"Site({self.status} at {self.where}{f': {self.reason}' * bool(self.reason)})"


WHOLE = "the whole model"
"""The place of a rewrite without a site."""


@dataclass
class PassReport:
    """What one pass did; nodes of subgraphs count, too."""

    name: str
    seconds: float = 0.0
    nodes_before: int = 0
    nodes_after: int = 0
    sites: list[Site] = field(default_factory=list)
    tried: Counter[str] = field(default_factory=Counter)  # nodes that rules looked at, by operator

    def count(self, status: Status) -> int:
        """How many sites fired, missed or were refused."""
        return sum(site.status == status for site in self.sites)

    def counts(self) -> str:
        """`12 fired, 0 missed, 3 refused`."""
        return ", ".join(f"{self.count(status):,} {status}" for status in STATUSES)

    @on_screen
    def __repr__(self) -> Iterator[str]:
        nodes = f"{self.nodes_before:,} -> {self.nodes_after:,} nodes"
        yield f"PassReport({self.name}: {self.counts()}; {nodes})"


@dataclass
class Engine:
    """Applies rewrites, numbers each and stops after `stop_after` of them.

    `verify`, if given, compares what a node computes with a rewrite's recorded results; a site
    that differs is not rewritten. `verify_whole` compares models. `context` is what is known about
    the sizes of the model, as `infer_model` returns it.
    """

    stop_after: int | None = None
    verify: Verifier | None = None
    verify_whole: WholeVerifier | None = None
    context: Any = field(default=None, repr=False)
    applied: int = 0
    _failed: set[tuple[Rule, ir.Node]] = field(default_factory=set, repr=False)
    _rules: Mapping[str, Sequence[Rule]] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        n = self.stop_after
        if n is not None and (isinstance(n, bool) or not isinstance(n, int) or n < 0):
            problem = f"stop_after is {n!r}; it must be an integer of at least 0"
            raise GraphgenError(f"{problem}{user_line()}")

    @property
    def stopped(self) -> bool:
        """Whether no more rewrites may be applied."""
        return self.stop_after is not None and self.applied >= self.stop_after

    def run(
        self,
        name: str,
        model: ir.Model,
        rules: Mapping[_Kind, Sequence[Rule]],
        *,
        nested: bool = False,
        forward: bool = False,
        nodes: Sequence[ir.Node] | None = None,
    ) -> PassReport:
        """Walk once from the outputs to the inputs, so that the outermost match comes first.

        A subgraph is walked before the node that holds it. With `nested`, the nodes of a rewrite
        are walked at once; with `forward`, the walk goes from the inputs to the outputs. With
        `nodes`, only these are walked, and what nobody reads any more is left to a later pass. Keys
        of the rules are the operator of the node that they look at, or its name.
        """
        named = self._rules = {str(op): rules[op] for op in rules}
        walked = list(nodes_of(model.graph) if nodes is None else nodes)
        operators = map(operator_name, walked)
        report = PassReport(name, tried=Counter(op for op in operators if op in named))
        failed: dict[ir.Node | None, Site] = {}
        with recording(context=self.context) as tape:
            pending = walked[:: -1 if forward else 1]
            while pending and not self.stopped:
                node = pending.pop()
                for rule in named.get(operator_name(node), ()):
                    if node.graph is None or self.stopped:
                        break
                    if (rule, node) in self._failed:
                        continue  # reported, and it would fail again
                    site = self._try(rule, node, tape, pruned=nodes is None)
                    if nested and site is not None and site.status == "fired":
                        pending += tape.nodes
                    tape.discard()
                    if site is None:
                        continue
                    report.sites.append(site)
                    if site.anchor in failed:
                        report.sites.remove(failed.pop(site.anchor))
                    if site.anchor is not None and site.status != "fired":
                        failed[site.anchor] = site
        if not forward:
            report.sites.reverse()
        return report

    def replace(
        self, name: str, model: ir.Model, make: Callable[[ir.Model], Replacement]
    ) -> PassReport:
        """Rewrite the whole model once; `make` may consume it."""
        report = PassReport(name)
        if not self.stopped:
            before, made = count_nodes(model), make(model)
            _put(model, made.model)
            self.context = made.context or self.context
            if made.reason:
                self.applied += 1
                reason = f"{made.reason}: {before} nodes before, {count_nodes(model)} after"
                report.sites.append(Site("fired", WHOLE, reason, self.applied))
        return report

    def _try(self, rule: Rule, node: ir.Node, tape: Tape, *, pruned: bool) -> Site | None:
        tape.path = node.metadata_props.get(PATH, "")
        try:
            outcome = rule(node)
        except GraphgenError as e:  # the operator's own checks refuse the match
            outcome = Miss(str(e))
        results: list[ir.Value | None] = []
        if isinstance(outcome, Rewrite):
            results = [None if x is None else tape.operand(x) for x in outcome.every()]
            outcome = self._checked(node, rule, outcome, results, tape)
        problem = None
        if isinstance(outcome, Rewrite) and self.verify is not None:
            problem = self.verify(node, tape, outcome, results)
        if problem and isinstance(outcome, Rewrite):
            self._failed.add((rule, node))
            return Site("missed", where_is(node), problem, None, outcome.anchor, True, node)
        if outcome is None:
            return None
        if isinstance(outcome, Rewired):
            where = where_is(node)
            rewire(node, tape, outcome.operands)
            self.applied += 1
            return Site("fired", where, outcome.reason, self.applied, node=node)
        if not isinstance(outcome, Rewrite):
            status: Status = "missed" if isinstance(outcome, Miss) else "refused"
            return Site(status, where_is(node), outcome.reason, anchor=outcome.anchor, node=node)
        where, inputs = where_is(node), present_inputs(node)
        splice(node, tape, results, outcome.also)
        if pruned:
            prune(inputs)
        self.applied += 1
        reason = "; ".join(filter(None, (outcome.reason, outcome.caveat)))
        anchor, inlined = outcome.anchor, outcome.inlined
        return Site("fired", where, reason, self.applied, anchor, node=node, inlined=inlined)

    def _checked(
        self,
        node: ir.Node,
        rule: Rule,
        rewrite: Rewrite,
        results: list[ir.Value | None],
        tape: Tape,
    ) -> Rewrite | Miss:
        """The conditions that every rewrite must meet, whatever its rule says.

        No value inside the region is used outside it, except by nodes that the rule would rewrite
        too: once they are rewritten, nothing computes it any more.
        """
        if not rewrite.untrimmed:
            tape.trim([value for value in results if value is not None])
        for old, new in zip([*node.outputs, *rewrite.also], results, strict=True):
            problem = None if new is None else incompatible(old, new, self.context)
            if problem:
                return Miss(problem, rewrite.anchor)
        used = [v for new in tape.nodes for v in present_inputs(new)]  # that stays
        region = region_of(node, [*rewrite.inputs, *used])
        inner = set(region)
        for member in () if rewrite.may_share else region:
            if has(member, Trait.CHEAP) or not _computes_floats(member):
                continue
            for value in member.outputs if member is not node else ():
                for user in () if value in rewrite.also else users_outside(value, inner, node):
                    asked = user is not None and rule in self._rules.get(operator_name(user), ())
                    if user is not None and asked and _takes(rule, user, tape.context):
                        continue
                    by = "a graph output" if user is None else user.name
                    reason = f"the result of {member.op_type} is used elsewhere, by {by}"
                    return Miss(reason, rewrite.anchor)
        return rewrite


@dataclass(frozen=True)
class Pass:
    """A pass is a value: a name, and what it does to a model through the engine alone.

    `run` applies rules (`Engine.run`), where each site is a rewrite, or replaces the whole model
    (`Engine.replace`), which is one rewrite. Either each site or the whole pass is verified, and
    undone if it differs.
    """

    name: str
    run: Callable[[ir.Model, Engine], PassReport]
    verify: Literal["site", "whole"] = "site"


def whole(name: str, make: Callable[[ir.Model], Replacement]) -> Pass:
    """The pass without sites that makes this replacement."""
    return Pass(name, lambda model, engine: engine.replace(name, model, make), "whole")


def run_passes(
    model: ir.Model,
    passes: Iterable[Pass],
    engine: Engine,
    after_each: Callable[[str, ir.Model], None] | None = None,
) -> list[PassReport]:
    """Run passes in order on a model, in place; report what each did, its time and node counts."""
    reports, after = list[PassReport](), count_nodes(model)
    for one in passes:
        before, applied, start = after, engine.applied, time.perf_counter()
        # What the sessions of verification leave behind may be large.
        run = _run if engine.verify or engine.verify_whole else uncollected(_run)
        done = run(one, model, engine)
        after = before if engine.applied == applied else count_nodes(model)
        done.nodes_before, done.nodes_after = before, after
        done.seconds = round(time.perf_counter() - start, 6)
        reports.append(done)
        if after_each is not None:
            after_each(one.name, model)
    return reports


def _run(one: Pass, model: ir.Model, engine: Engine) -> PassReport:
    if one.verify == "site" or (engine.verify, engine.verify_whole) == (None, None):
        return one.run(model, engine)
    verify, engine.verify, first = engine.verify, None, engine.applied
    old = None if engine.verify_whole is None else model.clone()
    try:
        done = one.run(model, engine)
    finally:
        engine.verify = verify
    if old is None or engine.verify_whole is None or engine.applied == first:
        return done
    if problem := engine.verify_whole(one.name, old, model):
        if not problem.startswith(UNVERIFIED):
            _put(model, old)
            engine.context, engine.applied = infer_model(model), first
            done.sites = [site for site in done.sites if site.number is None]
        done.sites.append(Site("missed", WHOLE, problem, rolled_back=True))
    return done


def _put(model: ir.Model, new: ir.Model) -> None:
    """Give a model the content of another."""
    if new is not model:
        model.graph = new.graph
        functions = dict(new.functions)
        model.functions.clear()
        model.functions.update(functions)


def users_outside(
    value: ir.Value, inner: Collection[ir.Node], root: ir.Node
) -> Iterator[ir.Node | None]:
    """The users of a value, or of its other layouts, outside a region; None for an output."""
    if value.is_graph_output():
        yield None
    for node in (use.node for use in value.uses() if use.node is not root):
        if node not in inner and node.graph is not None:
            yield node
        elif node in inner and has(node, Trait.CHEAP):
            yield from users_outside(node.outputs[0], inner, root)


def _computes_floats(node: ir.Node) -> bool:
    """Whether a node computes floats; sizes and masks are cheap, and may stay for other users."""
    return any(v.dtype is None or v.dtype.is_floating_point() for v in node.outputs)


def _takes(rule: Rule, node: ir.Node, context: Any) -> bool:
    """Whether a rule would rewrite another node too; the trial leaves nothing behind."""
    with recording(context=context):
        try:
            return isinstance(rule(node), Rewrite)
        except GraphgenError:
            return False


def region_of(root: ir.Node, inputs: Iterable[ir.Value]) -> list[ir.Node]:
    """The nodes from `inputs` to `root`, without those of which only the shape is used."""
    stop, seen, pending, nodes = set(inputs), {root}, [root], []
    while pending:
        node = pending.pop()
        nodes.append(node)
        for value in node.inputs if not has(node, Trait.SHAPE) else ():
            producer = None if value is None or value in stop else value.producer()
            if producer is not None and producer not in seen:
                seen.add(producer)
                pending.append(producer)
    return nodes
