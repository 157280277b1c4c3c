"""The picture of docs/how-it-works.md: the packages, and which builds on which, as SVG.

The lines are those of `STANDS_ON`, without those that follow from others. Light boxes with dark
words and gray lines are legible on a light page and on a dark one.
"""

from collections.abc import Mapping, Sequence

import networkx as nx

COLUMN, ROW, WIDTH, HEIGHT = 176, 76, 160, 48
BOXES = {  # (row, first column, last column), and what is in it
    "graphgen/": ((0, 0, 3), "operators, recordings, graphs, and the engine that rewrites them"),
    "targets/": ((1, 0, 0), "what runs, what pays"),
    "ops/": ((1, 2, 2), "what operators mean"),
    "autodiff/": ((2, 1, 1), "gradients"),
    "measure/": ((2, 2, 2), "reference, cost"),
    "nn/": ((2, 3, 3), "blocks"),
    "recognize/": ((3, 2, 2), "graphs read back"),
    "models/": ((3, 3, 3), "architectures"),
    "passes/": ((4, 0, 2), "from graph to graph"),
    "export/": ((5, 0, 2), "ONNX files, training artifacts"),
    "train/": ((6, 0, 0), "on the stock runtime"),
    "quantize/": ((6, 1, 1), "int8, int4"),
    "laboratory/": ((6, 2, 2), "what a pass does"),
    "generation/": ((6, 3, 3), "text from decoders"),
    "deployment/": ((7, 1, 2), "folders of checkpoints"),
    "batch/": ((7, 3, 3), "rows of a file"),
    "commands/": ((8, 0, 3), "the command line"),
}


def packages(stands_on: Mapping[str, Sequence[str]]) -> list[tuple[str, str]]:
    """Pairs of boxes: the lower one builds on the upper. Files at the root are one box."""
    names = {name.rstrip("/").removesuffix(".py"): name for name in BOXES}
    found: nx.DiGraph[str] = nx.DiGraph()
    for part, lower in stands_on.items():
        for each in lower:
            ends = names.get(each, "graphgen/"), names.get(part, "graphgen/")
            if ends[0] != ends[1] and part != "__main__":
                found.add_edge(*ends)
    return sorted(nx.transitive_reduction(found).edges)  # of a set: in no order


def columns(box: str) -> set[int]:
    (_, first, last), _ = BOXES[box]
    return {*range(first, last + 1)}


def middle(of: set[int]) -> float:
    return COLUMN * (min(of) + max(of) + 1) / 2


def line(upper: str, lower: str) -> str:
    """Straight down a column that both have, else bent from column to column."""
    a, b = columns(upper), columns(lower)
    start, end = (a & b, a & b) if a & b else ({min(a, key=lambda c: abs(c - min(b)))}, b)
    top, bottom = BOXES[upper][0][0] * ROW + HEIGHT + 8, BOXES[lower][0][0] * ROW + 2
    x, y, half = middle(start), middle(end), (top + bottom) / 2
    bend = f"C{x:g} {half:g} {y:g} {half:g} {y:g} {bottom}" if x != y else f"V{bottom}"
    return f'<path d="M{x:g} {top}{bend}" marker-end="url(#tip)"/>'


def picture(stands_on: Mapping[str, Sequence[str]]) -> str:
    drawn = [line(*pair) for pair in packages(stands_on)]
    for name, ((row, first, last), words) in BOXES.items():
        x, y = COLUMN * first + 8, ROW * row + 8
        width, center = WIDTH + COLUMN * (last - first), middle(columns(name))
        drawn.append(f'<rect x="{x}" y="{y}" width="{width}" height="{HEIGHT}" rx="6"/>')
        drawn.append(f'<text class="name" x="{center:g}" y="{y + 20}">{name}</text>')
        drawn.append(f'<text x="{center:g}" y="{y + 38}">{words}</text>')
    style = (
        "text{font:14px sans-serif;fill:#222;text-anchor:middle}.name{font-weight:bold}"
        "rect{fill:#eef2fa;stroke:#7c8db5}path{fill:none;stroke:#8a8f98;stroke-width:1.5}"
        "marker path{fill:#8a8f98;stroke:none}"
    )
    size = f"0 0 {4 * COLUMN} {9 * ROW - 10}"
    tip = '<marker id="tip" markerWidth="8" markerHeight="8" refX="6" refY="4" orient="auto">'
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{size}" role="img">',
            f'<style>{style}</style>{tip}<path d="M0 1L7 4L0 7z"/></marker>',
            *drawn,
            "</svg>\n",
        ]
    )
