"""Models and comparisons in notebooks: their page, in a frame of its own."""

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

import onnx_ir as ir

from graphgen.display import preformatted, safe
from graphgen.errors import GraphgenError
from graphgen.graph import count_nodes
from graphgen.laboratory import page

_NODES = 5000
"""The most nodes to draw, in all graphs: a notebook keeps up to 500 bytes for each."""


def of_model(model: ir.Model) -> str:
    """A model in a few lines, and its graph, folded by modules."""
    name = str(model.graph.name)
    return as_page(model, {"title": name}, [(name, model)])


def as_page(
    shown: object,
    report: Mapping[str, Any],
    graphs: Sequence[tuple[str, ir.Model]],
    *,
    same: Mapping[ir.Node, ir.Node] | None = None,
) -> str:
    """The repr of what is shown, for readers that run no scripts, and its page: see `page.render`.

    Very large graphs are left out of it, and so is the page where its layout is not installed.
    """
    plain, note = preformatted(repr(shown)), ""
    count = sum(count_nodes(model) for _, model in graphs)
    if count > _NODES:
        graphs, same = [], None
        note = f"<p>{count:,} nodes are too many to draw in a notebook.</p>"
    try:
        drawn = (
            _framed(page.render(report, graphs, same=same)) if graphs or "rows" in report else ""
        )
    except GraphgenError as error:
        return f"{plain}<p>{safe(str(error))}</p>"
    return f"{plain}{drawn}{note}"


def _framed(html: str) -> str:
    """A page inside another one, with scripts that reach nothing outside it."""
    return (
        f'<iframe srcdoc="{escape(html)}" sandbox="allow-scripts" loading="lazy" '
        'style="width: 100%; height: 640px; border: 0"></iframe>'
    )
