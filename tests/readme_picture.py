"""README's picture: the graph that torch exported, and what `optimize` makes of it, as SVG.

A dot is a node; its place from left to right is the longest path that leads to it.
"""

import re
from collections.abc import Iterator

import networkx as nx
import onnx_ir as ir

KINDS = {
    "attention": ("#7c4fc4", r"Attention"),
    "product": ("#2a6fdb", r"MatMul|Gemm"),
    "softmax, norm, activation": ("#0e8a86", r".*Norm.*|Softmax|Gelu"),
    "layout and sizes": (
        "#b3afa8",
        r"Reshape|Transpose|.*[Ss]queeze|Concat|Slice|Gather|Shape|Identity|Cast.*|Split|Expand",
    ),
    "arithmetic": ("#8a7428", r".*"),
}
NAMED = {"Attention", "Softmax"}
WIDTH, STEP, MARGIN, TITLE = 900, 13, 20, 26


def kind(node: ir.Node) -> str:
    return next(name for name, (_, ops) in KINDS.items() if re.fullmatch(ops, node.op_type))


def layers(model: ir.Model) -> list[list[ir.Node]]:
    """The nodes by depth, those of a depth ordered by where their inputs are."""
    graph: nx.DiGraph[ir.Node] = nx.DiGraph()
    graph.add_nodes_from(model.graph)
    for node in model.graph:
        graph.add_edges_from((maker, node) for maker in node.predecessors())
    found, place = [], dict[ir.Node, float]()
    for layer in nx.topological_generations(graph):
        means = {n: [place[maker] for maker in graph.predecessors(n)] for n in layer}
        layer.sort(key=lambda n: sum(means[n]) / len(means[n]) if means[n] else 0.0)
        place |= {node: i - (len(layer) - 1) / 2 for i, node in enumerate(layer)}
        found.append(layer)
    return found


def panel(title: str, found: list[list[ir.Node]], width: float, top: float) -> Iterator[str]:
    """One graph below its title, each layer `width` units to the right of the one before."""
    middle = top + TITLE + max(map(len, found)) * STEP / 2
    at = {
        node: (MARGIN + width * (depth + 0.5), middle + STEP * (i - (len(layer) - 1) / 2))
        for depth, layer in enumerate(found)
        for i, node in enumerate(layer)
    }
    yield f'<text class="title" x="{MARGIN}" y="{top + 8:.0f}">{title}</text>'
    for node, (x, y) in at.items():
        for a, b in (at[maker] for maker in node.predecessors()):
            bend = f"C{a + width:.1f} {b:.1f} {x - width:.1f} {y:.1f}"
            yield f'<path d="M{a:.1f} {b:.1f}{bend} {x:.1f} {y:.1f}"/>'
    for node, (x, y) in at.items():
        name, radius = node.op_type, 7 if kind(node) == "attention" else 4.5
        dot = f'cx="{x:.1f}" cy="{y:.1f}" r="{radius}" fill="{KINDS[kind(node)][0]}"'
        yield f"<circle {dot}><title>{name}</title></circle>"
        if name in NAMED:
            yield f'<text x="{x - 5:.1f}" y="{y - 12:.1f}">{name}</text>'


def picture(before: ir.Model, after: ir.Model) -> str:
    """Both graphs, one above the other, in one scale."""
    graphs = {"As torch exports it": layers(before), "After graphgen optimize": layers(after)}
    width = (WIDTH - 2 * MARGIN) / max(map(len, graphs.values()))
    drawn, x, top = [], MARGIN, 50.0
    for name, (color, _) in KINDS.items():
        drawn.append(f'<circle cx="{x + 5}" cy="18" r="5" fill="{color}"/>')
        drawn.append(f'<text x="{x + 16}" y="22">{name}</text>')
        x += 44 + 7 * len(name)
    for title, found in graphs.items():
        drawn += panel(f"{title}: {sum(map(len, found))} nodes", found, width, top)
        top += TITLE + max(map(len, found)) * STEP + 24
    style = (
        "text{font:13px sans-serif;fill:#333}.title{font-weight:bold}path{fill:none;stroke:#bbb}"
    )
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {top:.0f}" role="img">',
            f'<style>{style}</style><rect width="100%" height="100%" fill="#fff"/>',
            *drawn,
            "</svg>\n",
        ]
    )
