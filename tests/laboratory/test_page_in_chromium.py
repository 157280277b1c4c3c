"""The page of a report as people use it, opened from the disk: with Chromium, by mouse and keys."""

import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from chromium import Tab, chromium
from small_models import Block, namesakes, vary

import graphgen as gg
from graphgen import nn
from graphgen.laboratory import page
from graphgen.laboratory.diff import diff

pytestmark = pytest.mark.skipif(
    not shutil.which("chromium"), reason="there is no chromium on the PATH"
)

BAD = "<img src=x onerror=document.title='broken'>"
TITLES = {"passes": BAD, "diff": f"a.onnx, {BAD}", "rows": "graphgen"}
PASSES = len(gg.passes.PIPELINE)
COUNT = "document.querySelectorAll('#{} [data-key^=n]').length"


class Layers(nn.Module):
    """Layers that are alike."""

    def __init__(self) -> None:
        self.layers = [Block(16, num_heads=4) for _ in range(3)]

    def __call__(self, x: Any) -> Any:
        for layer in self.layers:
            x = layer(x)
        return x


def row(name: str, kind: str, median: float, **more: Any) -> dict[str, Any]:
    latency = {"median": median, "low": median - 0.1, "high": median + 0.1, "runs": 9}
    return {"name": name, "kind": kind, "latency_ms": latency, **more}


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    with chromium(tmp_path_factory.mktemp("user")) as tab:
        yield tab


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    model = gg.build(
        vary(Layers()), primitives=True, weights=None, x=gg.float32["batch", "seq", 16]
    )
    model.graph[5].name = BAD
    graphs = [("as given", model)]
    optimized = gg.optimize(model, after_each=lambda name, x: graphs.append((name, x.clone())))
    passes = optimized.report.to_json()["passes"]
    names = [done["name"] for done in passes]
    error = {"rel_rms": float("inf"), "ulp": 3.0}
    rows = [row("as given", "baseline", 2.0, error=error)]
    rows += [row(n, "cumulative", 1.9, decode=row("", "", 0.5)) for n in names]
    remarks = [{"pass": done["name"], **site} for done in passes for site in done["sites"]]
    report = {"model": BAD, "target": "cpu", "dims": {"": {"batch": 1}}, "rows": rows}
    values = [{str(n.name): 0.01 * i for i, n in enumerate(x.graph)} for _, x in graphs]
    folder = tmp_path_factory.mktemp("pages")
    change = {"kind": "removed", "where": "layers.0", "text": "is gone", "a": [BAD], "b": []}
    both = {"a": {"name": "a.onnx"}, "b": {"name": BAD}, "changes": [change]}
    two = [
        ("a.onnx", model),
        ("the_same_exported_by_torchscript_for_opset_14.onnx", optimized.model),
    ]
    found = diff(namesakes(0.1, "Neg"), namesakes(0.2, "Abs"))
    one_name = [*zip("ab", found.graphs, strict=True)]
    medians = [
        2.0 - 0.3 * ("fuse_norm" in names[:i]) - 0.7 * ("fuse_attention" in names[:i])
        for i in range(len(names) + 1)
    ]
    timed = [row("as given", "baseline", 2.0), *(row(n, "cumulative", 0.0) for n in names)]
    for each, median in zip(timed, medians, strict=True):
        each["latency_ms"] = {"median": median, "low": median - 0.1, "high": median + 0.1}
    verdict = {"model": BAD, "conclusion": f"{BAD}: 2.00 times as fast as given", "rows": timed}
    return {
        "verdict": page.write(folder / "verdict.html", verdict, graphs),
        "one_name": page.write(folder / "n.html", found.to_json(), one_name, same=found.same),
        "passes": page.write(
            folder / "passes.html",
            {**report, "remarks": remarks},
            graphs,
            {"time": page.Overlay("ms", values)},
        ),
        "diff": page.write(folder / "diff.html", both, two, same={}),
        "notebook": notebook(folder / "notebook.html", optimized),
        "rows": page.write(folder / "rows.html", {"rows": [{"name": "x"}, {}], "remarks": [BAD]}),
    }


def notebook(path: Path, best: Any) -> Path:
    """What a notebook shows of a model, in frames that the test may look into."""
    model = best.model.clone()
    model.graph[0].name = BAD
    html = model._repr_html_().replace(' sandbox="allow-scripts"', "")
    path.write_text(f"<!doctype html><body>{html}{best.report._repr_html_()}", "utf-8")
    return path


@pytest.mark.parametrize("name", ["passes", "diff", "rows"])
@pytest.mark.parametrize(("width", "dark"), [(1400, False), (390, True)])
def test_it_opens(tab: Tab, files: dict[str, Path], name: str, width: int, dark: bool) -> None:
    """Without a complaint or a request, and no wider than the screen."""
    tab.complaints.clear()
    tab.open(files[name], width, 844, dark=dark)
    assert tab.tell("document.documentElement.scrollWidth") <= width
    paper = tab.tell("getComputedStyle(document.body).backgroundColor")
    light = sum(map(int, paper.removeprefix("rgb(").removesuffix(")").split(","))) > 384
    assert light is not dark
    assert tab.tell("document.title") == TITLES[name]
    assert tab.complaints == []


def test_the_table(tab: Tab, files: dict[str, Path]) -> None:
    tab.open(files["passes"])
    assert tab.tell("document.querySelectorAll('#rows td .plot').length") == 1 + PASSES
    assert "prefill 1.9 (1.8–2); decode 0.5 (0.4–0.6)" in tab.tell(
        "document.getElementById('rows').textContent"
    )
    columns = tab.tell("[...document.querySelectorAll('#rows thead th')].map((x) => x.innerText)")
    assert {"relative RMS", "ULP"} <= {*columns} and "largest error" not in columns
    cells = tab.tell("[...document.querySelectorAll('#rows tbody tr')][0].innerText").split("\t")
    assert cells[columns.index("relative RMS") :][:2] == ["infinite", "3"]
    tab.click("#rows tbody:last-child tr:nth-last-child(2) button")
    assert "clean" in tab.tell("document.getElementById('pass').textContent")


def test_the_verdict_comes_first(tab: Tab, files: dict[str, Path]) -> None:
    """Then the passes that changed the most, whose names lead to their graphs."""
    tab.open(files["verdict"])
    told = tab.tell("document.querySelector('h1 + *').textContent")
    assert told == "2.00 times as fast as given"  # the name stands above
    assert tab.tell("[...document.querySelectorAll('#matter button')].map((x) => x.innerText)") == [
        "fuse_attention",
        "fuse_norm",
    ]
    told = tab.tell("document.querySelector('#matter li').innerText")
    assert "saves 0.7 ms, 41 %" in told
    tab.click("#matter button")
    assert tab.tell("document.getElementById('pass').textContent").startswith("fuse_attention")
    assert tab.complaints == []


def test_rows_of_unchanged_graphs_are_folded(tab: Tab, files: dict[str, Path]) -> None:
    tab.open(files["verdict"])
    shown = "[...document.querySelectorAll('#rows tbody:last-child tr')].filter((x) => !x.hidden)"
    names = tab.tell(f"{shown}.map((x) => x.querySelector('th').innerText)")
    assert "fuse_attention" in names and "fuse_rotary" not in names
    tab.click("#rows .fold")
    opened = tab.tell(f"{shown}.map((x) => x.querySelector('th').innerText)")
    assert len(opened) > len(names) and "fuse_rotary" in opened


def test_axes_have_round_numbers(tab: Tab, files: dict[str, Path]) -> None:
    tab.open(files["verdict"])
    ticks = tab.tell("[...document.querySelectorAll('.axis text')].map((x) => x.textContent)")
    assert ticks == ["0.5", "1", "1.5", "2", "2.5"]
    assert tab.tell("roundTicks(0.0883, 0.138, 3)") == [0.08, 0.1, 0.12, 0.14]
    assert tab.tell("roundTicks(3, 3, 3)") == [3]


def test_the_slider_moves_the_graph(tab: Tab, files: dict[str, Path]) -> None:
    tab.open(files["passes"])
    assert tab.tell("document.getElementById('before').hidden")
    tab.tell("document.getElementById('slider').focus()")
    seen = set()
    for index in range(1, PASSES + 1):
        tab.press("ArrowRight")
        assert tab.tell("document.getElementById('slider').value") == str(index)
        told = tab.tell("document.getElementById('pass').textContent")
        assert f"{index} of {PASSES}" in told
        if told.startswith("fuse_attention"):
            seen.add("attention")
            assert tab.tell("document.querySelectorAll('#before .node.removed').length") > 5
            assert tab.tell("document.querySelectorAll('#after .node.new.attention').length") == 1
            # Of three layers that changed alike, one is open.
            assert tab.tell("document.querySelectorAll('#after .block:not(.open)').length") >= 2
            assert "3 fired" in tab.tell("document.getElementById('sites').textContent")
    assert seen
    assert tab.complaints == []


def test_a_block_opens_and_closes(tab: Tab, files: dict[str, Path]) -> None:
    tab.open(files["passes"])
    block = "#after .block:not(.open)"
    before = tab.tell(COUNT.format("after"))
    key = tab.tell(f"document.querySelector('{block}').dataset.key")
    tab.click(block)
    opened = tab.tell(COUNT.format("after"))
    assert opened > before
    tab.click(f'#after .head[data-key="{key}"]')
    assert tab.tell(COUNT.format("after")) == before
    tab.press("Enter")  # the block has the focus
    assert tab.tell(COUNT.format("after")) == opened
    tab.press("ArrowDown")
    assert tab.tell("document.activeElement.dataset.key") != key


def test_search_finds_a_node(tab: Tab, files: dict[str, Path]) -> None:
    """In a closed layer, by words; its remarks are told, and nothing of its name is run."""
    tab.open(files["passes"])
    tab.tell("go(stages.findIndex((stage) => stage.name === 'fuse_attention'))")
    tab.press("/")
    for letter in "layers.2 attention":
        tab.press(letter, letter)
    assert "found" in tab.tell("document.getElementById('found').textContent")
    choice = "[...document.querySelectorAll('#found button')]"
    at = tab.tell(f"{choice}.findIndex((x) => x.textContent.startsWith('Attention'))")
    tab.click(f"#found button:nth-of-type({at + 1})")
    assert tab.tell("document.querySelectorAll('#after .selected.attention').length") == 1
    told = tab.tell("document.getElementById('node').textContent")
    assert "layers.2 / attention" in told
    assert "fired" in told and "made byfuse_attention" in told
    tab.press("Escape")
    assert tab.tell("document.getElementById('node').hidden")
    tab.tell("go(0)")
    tab.tell("document.getElementById('search').select()")
    for letter in "<img":
        tab.press(letter, letter)
    tab.press("Enter")
    assert BAD in tab.tell("document.getElementById('node').textContent")
    assert tab.tell("document.querySelectorAll('img').length") == 0
    assert tab.complaints == []


def test_colors_and_zoom(tab: Tab, files: dict[str, Path]) -> None:
    tab.open(files["passes"])
    tab.tell("document.getElementById('overlay').value = 'time'")
    tab.tell("document.getElementById('overlay').dispatchEvent(new Event('change'))")
    assert tab.tell("document.querySelectorAll('#after .heated').length") > 3
    assert "ms" in tab.tell("document.getElementById('legend').textContent")
    width = "document.querySelector('#after svg').clientWidth"
    before = tab.tell(width)
    tab.click("#in")
    assert tab.tell(width) > 1.2 * before


def test_both_graphs_move_together(tab: Tab, files: dict[str, Path]) -> None:
    """What a pass changed is in view in both, and what both have stays side by side."""
    tab.open(files["passes"])
    tab.tell("go(stages.findIndex((stage) => stage.name === 'fuse_attention'))")
    for side, mark in (("before", "removed"), ("after", "new")):
        assert tab.tell(f"inView(panes.find((x) => x.side === '{side}'))[0].part.mark") == mark
    height = "Math.round(document.querySelector('#{} [data-key=\"{}\"]').getBoundingClientRect().y)"
    ends = "[...panes[0].items.keys()].filter((x) => panes[1].items.has(x))"
    tab.tell("document.querySelector('#in').click()")
    for scrolled, follows in (("before", "after"), ("after", "before")):
        for share in (0.3, 0.6):
            top = f"document.querySelector('#{scrolled} .scroll')"
            tab.tell(f"{top}.scrollTop = {share} * {top}.scrollHeight")
            tab.frame()
            middle = tab.tell(f"{top}.getBoundingClientRect().y + {top}.clientHeight / 2")
            shared = [key for key in tab.tell(ends) if not key.startswith("b")]
            tops = [tab.tell(height.format(scrolled, key)) for key in shared]
            near = min(range(len(tops)), key=lambda i: abs(tops[i] - middle))
            assert abs(tab.tell(height.format(follows, shared[near])) - tops[near]) < 200
    moved = "panes.map((pane) => pane.scroll.scrollTop)"
    before = tab.tell(moved)
    tab.frame()
    assert tab.tell(moved) == before  # neither pushes the other on
    assert tab.complaints == []


def test_time_is_added_up(tab: Tab, files: dict[str, Path]) -> None:
    """By operator, the longest first, and by block; next to it that of the first graph."""
    tab.open(files["passes"])
    rows = "[...document.querySelectorAll('#times table:nth-child({}) tbody tr')]"
    cells = ".map((x) => [...x.children].map((y) => y.innerText))"
    times = "Object.values(timed.values[{}])"
    assert tab.tell("document.querySelectorAll('#times thead th').length") == 2 * 5
    for stage in ("0", "stages.findIndex((stage) => stage.name === 'fuse_attention')"):
        tab.tell(f"go({stage})")
        total = tab.tell(times.format("state.index") + ".reduce((x, y) => x + y)")
        assert f"{total:.3g}" in tab.tell("document.getElementById('times-note').innerText")
        found = tab.tell(rows.format(1) + cells)
        assert sum(float(row[-3]) for row in found if row[-3] != "–") == pytest.approx(total, 0.02)
        shares = [int(row[-1].removesuffix(" %")) for row in found if row[-1]]
        assert shares[:-1] == sorted(shares[:-1], reverse=True) and 95 < sum(shares) < 105
    assert "as given" in tab.tell("document.querySelector('#times thead').innerText")
    assert ["Attention", "3", "–"] in [row[:3] for row in found]
    assert ["Exp", "–"] in [row[:2] for row in found]  # it is gone
    assert [row[0] for row in tab.tell(rows.format(2) + cells)] == [f"layers.{i}" for i in range(3)]
    tab.click("#times .fold[data-path='layers.1']")
    names = [row[0] for row in tab.tell(rows.format(2) + cells)]
    assert names[:2] == ["layers.0", "layers.1"] and names[-1] == "layers.2" and len(names) > 5
    assert tab.tell("document.activeElement.dataset.path") == "layers.1"
    tab.click("#times table:first-child tbody button")
    assert tab.tell("document.querySelectorAll('#after .selected').length") == 1
    assert tab.complaints == []


def test_two_graphs(tab: Tab, files: dict[str, Path]) -> None:
    tab.open(files["diff"])
    assert tab.tell("document.getElementById('passes').hidden")
    assert tab.tell("document.querySelector('#before figcaption').textContent").startswith("a.onnx")
    assert tab.tell("document.querySelectorAll('#before .removed').length") > 0
    assert tab.tell("document.querySelectorAll('#after .new').length") > 0
    tab.click("#told button")
    assert "only ina.onnx" in tab.tell("document.getElementById('node').textContent")


def test_nodes_of_one_name_are_marked_and_linked(tab: Tab, files: dict[str, Path]) -> None:
    """Of four nodes that are called `act` the second differs, and the last is another."""
    tab.open(files["one_name"])
    for side, mark in (("before", "removed"), ("after", "new")):
        assert tab.tell(COUNT.format(side)) == 4 + 2  # and the input, the output
        for kind, count in (("edited", 1), (mark, 1)):
            assert tab.tell(f"document.querySelectorAll('#{side} .{kind}').length") == count
    node = "document.getElementById('node').textContent"
    tab.click("#told li:first-child button")
    assert "givesy2" in tab.tell(node) and "alpha=0.2" in tab.tell(node)
    tab.click("#told li:last-child button")
    assert "givesy4" in tab.tell(node) and "only ina" in tab.tell(node)
    assert tab.complaints == []


def test_a_model_in_a_notebook(tab: Tab, files: dict[str, Path]) -> None:
    """Its graph is drawn in the frame, and its blocks open there; the lines stand above it."""
    tab.open(files["notebook"])
    assert tab.tell("document.querySelector('pre').textContent").startswith("Model main, opset")
    assert tab.tell("document.querySelectorAll('table tr').length") == 1 + PASSES
    frame = "document.querySelector('iframe').contentDocument"
    assert tab.tell(f"{frame}.getElementById('passes').hidden")
    count = f"{frame}.querySelectorAll('#after [data-key^=n]').length"
    before = tab.tell(count)
    click = "dispatchEvent(new Event('click', {bubbles: true}))"
    tab.tell(f"{frame}.querySelector('#after .block:not(.open)').{click}")
    assert tab.tell(count) > before > 1
    assert tab.tell("document.querySelectorAll('img').length") == 0
    assert tab.complaints == []


def test_a_frame_that_had_no_width_is_fitted_when_it_has(tab: Tab, files: dict[str, Path]) -> None:
    """As in a notebook that makes its output before it shows it."""
    tab.open(files["notebook"])
    frame = "document.querySelector('iframe')"
    width = f"{frame}.contentDocument?.querySelector('#after svg')?.clientWidth ?? 0"
    deadline = time.monotonic() + 10
    tab.tell(f"{frame}.style.width = '0'; {frame}.srcdoc += ' '")
    while not 0 < tab.tell(width) < 60:
        assert time.monotonic() < deadline
    tab.tell(f"{frame}.style.width = '100%'")
    while tab.tell(width) < 100:
        assert time.monotonic() < deadline
