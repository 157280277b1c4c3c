"""Why a pass rewrote its candidates or did not, and which lines of the source they come from."""

import argparse
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from rich.console import Console

from graphgen.errors import GraphgenError
from graphgen.export.files import load
from graphgen.match import Site
from graphgen.ops.inputs import at_sizes
from graphgen.options import FILE, FLAG, NUMBERS, keywords, numbers, print_json
from graphgen.passes import PIPELINE, optimize, pipeline

EXPLAIN = "decoder.onnx --pass fuse_attention --where layers.3"

_FEW = 10  # as many equal sites, or places, are told one by one


@dataclass
class Explanation:
    """Every candidate of one pass, and how many nodes it looked at, by operator."""

    name: str
    target: str
    runtime: str
    tried: Counter[str]
    sites: list[Site]

    def to_json(self) -> dict[str, Any]:
        """As docs/explain.schema.json describes it."""
        told = {"graphgen": version("graphgen-onnx"), "pass": self.name, "target": self.target}
        sites = [site.to_json() for site in self.sites]
        return {**told, "runtime": self.runtime, "tried": self.tried, "sites": sites}

    def text(self, *, every: bool = False) -> str:
        """By reason, what fired at the end; of more than ten sites three, or with `every` all."""
        count = Counter(site.status for site in self.sites)
        told = ", ".join(f"{count[status]} {status}" for status in ("fired", "missed", "refused"))
        tried = ", ".join(f"{n} {operator}" for operator, n in sorted(self.tried.items()))
        lines = [f"{self.name} for {self.target} (onnxruntime {self.runtime}): {told}"]
        lines.append(f"looked at {tried or 'the whole graph'}")
        groups: dict[tuple[str, str], list[Site]] = {}
        for site in sorted(self.sites, key=lambda site: site.status == "fired"):
            groups.setdefault((site.status, site.reason), []).append(site)
        for (status, reason), sites in groups.items():
            few = sites if every or len(sites) <= _FEW else sites[:3]
            lines += ["", f"{status}, {len(sites)}: {reason}", *map(_line, few)]
            if few is not sites:
                lines.append(f"  and {len(sites) - len(few)} more; --all lists them")
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.text()


def _line(site: Site) -> str:
    """The place of a site, its node, the number of the rewrite, and the line it comes from."""
    at = site.to_json()
    number = f"rewrite {site.number}" if site.number else ""
    told = dict.fromkeys(["", site.where, at["operator"], at["node"], number])
    return "  ".join(told) + (at["source"] and f"\n      {at['source']}")


def explain(
    model: Any,
    pass_name: str,
    where: str | None = None,
    *,
    with_passes: Sequence[str] = (),
    **options: Any,
) -> Explanation:
    """What a pass did at each of its candidates, after the passes before it.

    Args:
        model: What `build` or `load` returned.
        pass_name: One of `PIPELINE`, or one of another distribution as `optimize` takes it.
        where: Only sites of this module, or else whose place or node has this in its name.
        with_passes: As in `optimize`.
        options: Of `optimize`, too: `target`, `runtime`, `verify`, ...

    Raises GraphgenError for a pass that there is not, and where no site is at `where`.
    """
    name = pass_name.partition("@")[0]
    known = [*PIPELINE, *(given.partition("@")[0] for given in with_passes)]
    passes = pipeline([*with_passes, *([] if name in known else [pass_name])])
    upto = passes[: len(passes) - passes[::-1].index(name)]
    report = optimize(model, passes=upto, **options).report
    done = [p for p in report.passes if p.name == name]
    sites = [site for p in done for site in p.sites]
    if where is not None:
        chosen = [s for s in sites if f"{s.where}.".startswith(f"{where}.")]
        chosen = chosen or [s for s in sites if where in f"{s.where} {s.node and s.node.name}"]
        if not chosen:
            places = list(dict.fromkeys(site.where for site in sites))
            more = f" and {len(places) - _FEW} more" if places[_FEW:] else ""
            told = ", ".join(places[:_FEW]) + more or "none at all"
            raise GraphgenError(f"explain: {name} has no candidate at {where!r}; it has {told}")
        sites = chosen
    tried = sum((p.tried for p in done), Counter[str]())
    return Explanation(name, report.target, report.runtime, tried, sites)


def explain_(options: argparse.Namespace) -> None:
    """Tell why a pass rewrote its candidates or did not, and where in the source they are."""
    given = keywords(optimize, options)
    with Console(stderr=True).status(f"optimizing {options.model} for {options.target}"):
        model = at_sizes(load(options.model), numbers("--dim", options.dim))
        found = explain(model, options.pass_, options.where, **given)
    if options.json:
        print_json(found.to_json())
    else:
        print(found.text(every=options.all))


def add_explain(add: Callable[..., Any]) -> None:
    """Add the options of `explain`."""
    add("model", **FILE)
    add("--pass", dest="pass_", required=True, metavar="NAME", help="fuse_attention, ...")
    add("--where", metavar="PATH", help="only in this module, or where names have this")
    add("--target", default="cpu", help="cpu, cuda or official (onnxruntime 1.19)")
    add("--runtime", metavar="1.20", help="its version; by default cpu is what is installed")
    add("--dim", help="fix a symbolic dimension", **NUMBERS)
    told = "run a pass of your own before it"
    add("--with", dest="with_passes", metavar="NAME", help=told, action="append", default=[])
    add("--verify", help="check every rewrite by running both sides", **FLAG)
    add("--all", help="list every site, however many are alike", **FLAG)
    add("--json", help="print what docs/explain.schema.json describes", **FLAG)
