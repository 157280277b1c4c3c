"""Why a pass rewrote its candidates or did not, and which source lines they come from."""

import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Unpack

from graphgen.arguments import checked
from graphgen.display import on_screen
from graphgen.errors import GraphgenError
from graphgen.export.session import model_of
from graphgen.graph import ModelLike
from graphgen.match import PassReport, Site
from graphgen.passes import OptimizeOptions, optimize, pipeline
from graphgen.version import VERSION

_FEW = 10  # the most equal sites, or places, to list one by one


@dataclass
class Explanation:
    """Every candidate of one pass, and how many nodes it looked at, by operator."""

    name: str
    target: str
    runtime: str
    tried: Counter[str]
    sites: list[Site]

    def to_json(self) -> dict[str, Any]:
        """The object that docs/explain.schema.json describes."""
        fields = {"graphgen": VERSION, "pass": self.name, **vars(self)}
        del fields["name"]
        return fields | {"sites": [site.to_json() for site in self.sites]}

    def text(self, *, every: bool = False, command: bool = False) -> str:
        """The sites by reason, fired ones last; of more than ten, three, or all with `every`.

        It names the way to all of them: `every`, or with `command` the option of the command.
        """
        counts = PassReport(self.name, sites=self.sites).counts()
        full = "--all" if command else "text(every=True)"
        tried = ", ".join(f"{n} {operator}" for operator, n in sorted(self.tried.items()))
        lines = [f"{self.name} for {self.target} (onnxruntime {self.runtime}): {counts}"]
        lines.append(f"looked at {tried or 'the whole graph'}")
        groups: dict[tuple[str, str], list[Site]] = {}
        for site in sorted(self.sites, key=lambda site: site.status == "fired"):
            groups.setdefault((site.status, site.reason), []).append(site)
        for (status, reason), sites in groups.items():
            few = sites if every or len(sites) <= _FEW else sites[:3]
            lines += ["", f"{status}, {len(sites)}: {reason}", *map(_line, few)]
            if few is not sites:
                lines.append(f"  and {len(sites) - len(few)} more; {full} lists them")
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.text()

    @on_screen
    def __repr__(self) -> Iterator[str]:
        first, *rest = self.text().split("\n")
        yield f"Explanation of {first}"
        yield from rest


def _line(site: Site) -> str:
    """A site's place and node, the number of its rewrite, and the line it comes from."""
    at = site.to_json()
    number = f"rewrite {site.number}" if site.number else ""
    parts = dict.fromkeys(["", site.where, at["operator"], at["node"], number])
    return "  ".join(parts) + (at["source"] and f"\n      {at['source']}")


@checked
def explain(
    model: str | os.PathLike[str] | ModelLike,
    pass_name: str,
    where: str | None = None,
    **options: Unpack[OptimizeOptions],
) -> Explanation:
    """What a pass did at each of its candidates, after the passes before it.

    The model is a path, or what `build` or `load` returned. The pass is one of `PIPELINE` or, as in
    `optimize`, of another distribution. `where` keeps only sites in modules with these parts in
    their path, or else those whose place or node has this in its name. The options are those of
    `optimize`.

    Raises GraphgenError for an unknown pass, and if no site is at `where`.
    """
    name, own = pass_name.partition("@")[0], options.pop("with_passes", ())
    passes = pipeline(own)
    passes = passes if name in passes else pipeline([*own, pass_name])
    upto = passes[: len(passes) - passes[::-1].index(name)]
    report = optimize(model_of(model, "explain"), passes=upto, **options).report
    found = Explanation(name, report.target, report.runtime, Counter(), [])
    for done in (done for done in report.passes if done.name == name):
        found.tried += done.tried
        found.sites += done.sites
    if where is not None:
        found.sites = _within(where, found)
    return found


def _within(where: str, found: Explanation) -> list[Site]:
    """The sites in a module, or those whose place or node has this in its name."""
    inside = [s for s in found.sites if f".{where}." in f".{s.where}."]
    inside = inside or [s for s in found.sites if where in f"{s.where} {s.node and s.node.name}"]
    if not inside:
        places = list(dict.fromkeys(site.where for site in found.sites))
        known = ", ".join(places[:_FEW]) or "none at all"
        known += f" and {len(places) - _FEW} more" if places[_FEW:] else ""
        raise GraphgenError(f"explain: {found.name} has no candidate at {where!r}; it has {known}")
    return inside
