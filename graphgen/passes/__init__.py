"""The pipeline of `optimize`, as a readable list, and its report."""

import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypedDict

import onnx_ir as ir

from graphgen import ops
from graphgen.arguments import checked
from graphgen.display import Tabular, fields, in_notebook, on_screen, preformatted
from graphgen.edit import infer_model, lift_constants, without_defaults
from graphgen.errors import GateError, GraphgenError
from graphgen.graph import DECLARED, ModelLike, count_operators, model_in, operator_name
from graphgen.invariants import verify as check_invariants
from graphgen.match import STATUSES, Engine, Pass, PassReport, Verifier, run_passes, whole
from graphgen.model import readable
from graphgen.passes import plugins
from graphgen.passes.canonicalize import canonicalize
from graphgen.passes.clean import clean
from graphgen.passes.fuse import fuse
from graphgen.passes.fusions import FORMULAS, RECOGNIZED
from graphgen.passes.legalize import legalize
from graphgen.passes.runs import Memory
from graphgen.passes.verify import compare, compare_models
from graphgen.passes.words import count_words, word_of, words_of
from graphgen.processor import Instructions
from graphgen.targets import Target, TargetName, target as find_target
from graphgen.version import VERSION

PIPELINE = (
    "canonicalize",
    "clean",
    "canonicalize",
    "fuse_softmax",
    "fuse_norm",
    "fuse_activation",
    "fuse_recurrent",
    "fuse_rotary",
    "fuse_attention",
    "fuse_sums",
    "legalize",
    "canonicalize",
    "keep_apart",
    "clean",
)
"""The passes of `optimize`, in order."""


def pipeline(with_passes: Sequence[str], passes: Sequence[str] = PIPELINE) -> tuple[str, ...]:
    """`passes` with others in their places: NAME before the fusions, NAME@PASS before that pass.

    >>> pipeline(["mine", "late@legalize"], ["clean", "fuse_softmax", "legalize"])
    ('clean', 'mine', 'fuse_softmax', 'late', 'legalize')
    """
    result = list(passes)
    for given in with_passes:
        name, at, place = given.partition("@")
        if name in PIPELINE:
            problem = "is the name of a built-in pass; one of your own needs another"
            raise GraphgenError(f"with_passes: {name!r} {problem}")
        if at and place not in result:
            raise GraphgenError(f"with_passes: {given!r}: no pass {place!r} runs, but {result}")
        place = place or "fuse_softmax"
        result.insert(result.index(place) if place in result else len(result), name)
    return tuple(result)


def passes_of(
    names: Sequence[str], target: Target, *, strict_masked_rows: bool = False
) -> list[Pass]:
    """The passes with these names, built in or from other distributions, for a target."""
    fused = partial(fuse, target=target, strict_masked_rows=strict_masked_rows)
    fusions = (*RECOGNIZED, *FORMULAS, "keep_apart")
    known = {
        "canonicalize": Pass("canonicalize", partial(canonicalize, target=target)),
        "clean": whole("clean", clean),
        "legalize": Pass("legalize", partial(legalize, target=target)),
        **{name: Pass(name, partial(fused, name=name)) for name in fusions},
    }
    return [known.get(name) or plugins.find(name, target, PIPELINE) for name in names]


def apply(
    model: ir.Model,
    passes: Sequence[Pass],
    engine: Engine,
    after_each: Callable[[str, ir.Model], None] | None = None,
) -> list[PassReport]:
    """Run passes on a model, in place, after moving its constants to where passes expect them."""
    with without_defaults(model):
        lift_constants(model)
        engine.context = infer_model(model)
        return run_passes(model, passes, engine, after_each)


@dataclass(repr=False)
class Report(Tabular):
    """What every pass did to a model; nodes and operators of subgraphs count, too."""

    target: str
    runtime: str
    passes: list[PassReport] = field(default_factory=list)
    ops_before: dict[str, int] = field(default_factory=dict)
    ops_after: dict[str, int] = field(default_factory=dict)
    declared: dict[str, int] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """The object that docs/report.schema.json describes."""
        fields = ("name", "seconds", "nodes_before", "nodes_after")
        passes = [
            {key: getattr(done, key) for key in fields}
            | {"sites": [s.to_json() for s in done.sites]}
            for done in self.passes
        ]
        return {"graphgen": VERSION, **vars(self), "passes": passes}

    def whole(self) -> dict[str, tuple[int, int]]:
        """How many of each declared operator are whole in the result, and how many were declared.

        A softmax that was fused into an attention is whole in it.
        """
        after = self.fused()
        after["softmax"] += max(0, after["attention"] - self.declared.get(_ATTENTION, 0))
        return {
            name: (min(after[word_of(name)], count), count)
            for name, count in self.declared.items()
            if name in _COUNTED
        }

    def shortfalls(self) -> list[str]:
        """`Attention: 11 of 12` for each declared operator that is not whole in the result."""
        return [f"{name}: {n} of {count}" for name, (n, count) in self.whole().items() if n < count]

    def fused(self) -> Counter[str]:
        """How many of each fused operator the result has, variants included, by its word."""
        return count_words(self.ops_after)

    def unmet(self, expect: Mapping[str, int]) -> list[str]:
        """Operators of which the result has too few, with the reasons of up to three sites.

        A word is an operator's name: `attention`, `layer_norm`, `gelu`, ...; `norm` is both norms.
        Raises GraphgenError for another word.
        """
        fused, unmet = self.fused(), []
        for word, wanted in expect.items():
            words = words_of(word)
            found = sum(fused[w] for w in words)
            if found < wanted:
                why = "; ".join(self.reasons(words)) or "no other candidate was seen"
                unmet.append(f"{word}: found {found}, wanted {wanted} ({why})")
        return unmet

    def reasons(self, words: Sequence[str], *, inlined: bool = False) -> list[str]:
        """Why sites of these operators were not fused, or fused and inlined; each reason once.

        With `inlined`, only of the latter, which `remarks` leaves out, since their pass fired.
        """
        found = []
        for done in self.passes:
            own = {word_of(op.name) for op, *_ in FORMULAS.get(done.name, ())}
            own = own or {done.name.removeprefix("fuse_")}
            for site in done.sites:
                if site.inlined and site.node is not None:
                    ours = {word_of(operator_name(site.node))}
                else:
                    ours = set() if inlined or site.status == "fired" else own
                found += [(site.reason, site.where)] if ours.intersection(words) else []
        reasons = [f"{places}: {reason}" for reason, places in _places(found)]
        return [*reasons[:3], *([f"{len(reasons) - 3} more reasons"] if reasons[3:] else [])]

    def remarks(self) -> list[str]:
        """A line for each reason why sites of a pass did not fire."""
        found = [
            ((site.status, done.name, site.reason), site.where)
            for done in self.passes
            for site in done.sites
            if site.status != "fired"
        ]
        return [f"{s} {name} at {places}: {why}" for (s, name, why), places in _places(found)]

    def cells(self) -> list[list[str]]:
        """A row for each pass: sites, nodes and time."""
        rows = [["pass", *STATUSES, "nodes before", "after", "ms"]]
        for p in self.passes:
            figures = [*map(p.count, STATUSES), p.nodes_before, p.nodes_after]
            rows.append([p.name, *map(str, figures), f"{p.seconds * 1e3:.1f}"])
        return rows

    def summary(self) -> str:
        """The runtime, and how many nodes there were before and after, subgraphs included."""
        before, after = (sum(ops.values()) for ops in (self.ops_before, self.ops_after))
        return f"{self.target} (onnxruntime {self.runtime}), {before:,} -> {after:,} nodes"

    def conclusion(self) -> list[str]:
        """`96 -> 73 nodes` and `3 attentions of 3, 7 norms of 7`: how many the result has whole.

        Of those that the model declared, or, from another tool, of those it had and those seen.
        """
        before, after = (sum(ops.values()) for ops in (self.ops_before, self.ops_after))
        there, fused, parts = count_words(self.ops_before), self.fused(), []
        for word in ("attention", "norm"):
            words = words_of(word)
            own = [pair for name, pair in self.whole().items() if word_of(name) in words]
            done, wanted = sum(n for n, _ in own), sum(n for _, n in own)
            if not self.declared:
                sites = [s for p in self.passes if p.name == f"fuse_{word}" for s in p.sites]
                seen = [s for s in sites if s.node is None or word_of(s.node.op_type) not in words]
                wanted = sum(there[w] for w in words) + len(seen)
                done = min(sum(fused[w] for w in words), wanted)
            parts += [f"{done} {word}{'s' * (wanted != 1)} of {wanted}"] if wanted else []
        return [f"{before:,} -> {after:,} nodes", *filter(None, [", ".join(parts)])]

    def heading(self) -> str:
        return f"Report of optimize for {self.summary()}"


_ATTENTION = ops.scaled_dot_product_attention.name
_NORMS = (ops.layer_normalization, ops.rms_normalization)
_COUNTED = {_ATTENTION, *(op.name for op in (ops.softmax, *_NORMS, ops.gelu))}


def _places(found: Iterable[tuple[Any, str]]) -> Iterator[tuple[Any, str]]:
    """Each reason with its first place, and how many more places there are."""
    grouped: dict[Any, list[str]] = {}
    for reason, place in found:
        grouped.setdefault(reason, []).append(place)
    for reason, (place, *more) in grouped.items():
        yield reason, place + (f" and {len(more)} more" if more else "")


@dataclass
class Optimized:
    """The result of `optimize`. `export` writes the options into the file, for sessions to read."""

    model: ir.Model
    report: Report
    session_options: dict[str, str] = field(default_factory=dict)  # ours need none

    @on_screen
    def __repr__(self) -> Iterator[str]:
        yield f"Optimized for {self.report.summary()}"
        whole = [f"{n} of {wanted} {name}" for name, (n, wanted) in self.report.whole().items()]
        yield from fields(fused=", ".join(whole)) if whole else []
        yield from repr(self.model).splitlines()

    @in_notebook
    def _repr_html_(self) -> str:
        model = getattr(self.model, "_repr_html_", lambda: None)()
        return f"{model or preformatted(repr(self))}{self.report._repr_html_()}"


class OptimizeOptions(TypedDict, total=False):
    """The options of `optimize` but `passes`, for what calls it."""

    target: TargetName
    runtime: str | None
    processor: Instructions | None
    verify: bool | Verifier
    repros: str | os.PathLike[str] | None
    stop_after: int | None
    strict_masked_rows: bool
    expect: Mapping[str, int] | None
    with_passes: Sequence[str]
    after_each: Callable[[str, ir.Model], None] | None


@checked
def optimize(
    model: ModelLike,
    *,
    target: TargetName = "cpu",
    runtime: str | None = None,
    processor: Instructions | None = None,
    verify: bool | Verifier = False,
    repros: str | os.PathLike[str] | None = None,
    stop_after: int | None = None,
    strict_masked_rows: bool = False,
    expect: Mapping[str, int] | None = None,
    passes: Sequence[str] = PIPELINE,
    with_passes: Sequence[str] = (),
    after_each: Callable[[str, ir.Model], None] | None = None,
) -> Optimized:
    """Fuse a model for a target, on a copy; weights are shared, not copied.

    Args:
        model: What `build` or `load` returned.
        target: `cpu`, `cuda`, `webgpu` or `official`, onnxruntime 1.19 with its trainer.
        runtime: The version of onnxruntime, such as "1.20"; by default the installed one for
            `cpu`, and the newest known one for `cuda` and `webgpu`.
        processor: `avx2` or `avx512`, whose timings decide what pays on the CPU; by default
            those of this machine.
        verify: Compare each site before and after, on random inputs and edge cases, with the
            runtime's own optimizations off; a site that differs is left unchanged. `clean`, which
            has no sites, is compared as a whole. Or a function to call at each site instead.
        repros: A folder; with `verify`, each site that differs leaves NUMBER-OPERATOR there, with
            both parts, the inputs, and a script that shows the difference.
        stop_after: Apply only this many rewrites, to find one at fault.
        strict_masked_rows: Refuse fusions that may change rows which a mask hides entirely.
        expect: How many fused operators the result must have, such as `{"attention": 12}`.
        passes: Names from `PIPELINE`, or of passes from other distributions.
        with_passes: Passes from other distributions to run as well, by name or `module:function`;
            before the fusions, or with `NAME@PASS` before that pass. See docs/writing-a-pass.md.
        after_each: Called with the name and the model after every pass.

    Raises GraphgenError for an unknown target, version, processor, pass or expectation, and when a
    pass fails or breaks the graph; GateError if less was found than expected.
    """
    profile = find_target(target, runtime, processor)
    for word in expect or ():
        words_of(word)  # so that an unknown word fails before any work is done
    model = model_in(model, "optimize")
    if repros is not None and verify is not True:
        raise GraphgenError("optimize: repros needs verify=True, which finds the sites: give both")
    model = readable(model.clone())
    report = Report(target, profile.runtime, ops_before=count_operators(model))
    report.declared = json.loads(model.metadata_props.get(DECLARED, "{}"))
    some = passes_of(pipeline(with_passes, passes), profile, strict_masked_rows=strict_masked_rows)
    engine = Engine(stop_after, verify if callable(verify) else None)
    if verify is True:
        folder = None if repros is None else Path(repros)
        engine.verify = partial(compare, repros=folder, memory=Memory())
        engine.verify_whole = partial(compare_models, repros=folder)
    report.passes = apply(model, some, engine, after_each)
    check_invariants(model, "optimize")
    report.ops_after = count_operators(model)
    if unmet := report.unmet(expect or {}):
        raise GateError(f"optimize for {profile}: {'; '.join(unmet)}")
    return Optimized(model, report)
