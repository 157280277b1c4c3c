"""The page of a report: what is in the file. test_page_in_chromium.py is what it does."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from small_models import block, namesakes

import graphgen as gg
from graphgen.graph import operator_name
from graphgen.infer import describe
from graphgen.laboratory import page
from graphgen.laboratory.diff import diff
from graphgen.laboratory.report import place
from graphgen.passes import PIPELINE
from graphgen.record import PATH
from graphgen.targets import newest_opset

ROW = {
    "kind": "baseline",
    "latency_ms": {"median": 2.0, "low": 1.9, "high": 2.2, "runs": 9},
    "error": {"max_abs": float("inf"), "rel_rms": float("nan"), "argmax_agreement": 1.0},
    "sites": {"fired": 1, "missed": 0, "refused": 2},
    "verdict": "tie",
}

Graphs = list[tuple[str, ir.Model]]


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    return {"model": "a block", "target": "cpu", "rows": [{"name": "as given", **ROW}]}


@pytest.fixture(scope="module")
def graphs(report: dict[str, Any]) -> Graphs:
    """A block as given and after each pass; the report has the remarks."""
    graphs: Graphs = [("baseline", block())]
    optimized = gg.optimize(
        graphs[0][1], after_each=lambda name, model: graphs.append((name, model.clone()))
    )
    passes = optimized.report.to_json()["passes"]
    report["remarks"] = [{"pass": p["name"], **site} for p in passes for site in p["sites"]]
    return graphs


def data_of(file: Path) -> Any:
    found = re.search(r'id="data">(.*?)</script>', file.read_text("utf-8"), re.DOTALL)
    assert found
    return json.loads(found[1])


def stages_of(data: Any) -> list[dict[int, Any]]:
    """Each stage's nodes, put together as the page does it."""
    rows: set[int] = set()
    stages = []
    for stage in data["stages"]:
        rows = (rows - set(stage["drop"])) | set(stage["add"])
        stages.append({data["nodes"][row][0]: data["nodes"][row] for row in sorted(rows)})
    return stages


def test_every_graph_is_there(graphs: Graphs, report: Any, tmp_path: Path) -> None:
    data = data_of(page.write(tmp_path / "page.html", report, graphs))
    texts, stages = data["texts"], stages_of(data)
    assert [stage["name"] for stage in data["stages"]] == [name for name, _ in graphs]
    for told, (_, model) in zip(stages, graphs, strict=True):
        by_name = {row[1]: row for row in told.values()}
        ends = [*model.graph.inputs, *model.graph.outputs]
        assert len(told) == model.graph.num_nodes() + len(ends)
        for node in model.graph:
            _, _, operator, path, inputs, _, outputs, _ = by_name[str(node.name)]
            assert texts[operator] == operator_name(node)
            assert texts[path] == node.metadata_props.get(PATH, "").replace(".", "/")
            assert [(n, texts[t]) for n, t in outputs] == [
                (v.name, describe(v)) for v in node.outputs
            ]
            for given, value in zip(inputs, node.inputs, strict=True):
                name = getattr(value, "name", "")
                if isinstance(given, str):
                    assert given.startswith(name)
                else:
                    assert told[given[0]][6][given[1]][0] == name
    assert data["report"]["rows"][0]["error"] == {
        "max_abs": None,
        "rel_rms": None,
        "argmax_agreement": 1.0,
    }


@pytest.mark.skipif(newest_opset() < 23, reason="where Attention is another operator in the end")
def test_nodes_keep_their_numbers(graphs: Graphs, report: Any, tmp_path: Path) -> None:
    """What stays is the same node in all graphs; what a pass makes is a new one."""
    data = data_of(page.write(tmp_path / "page.html", report, graphs))
    stages = stages_of(data)

    def numbers(stage: dict[int, Any], operator: str) -> set[int]:
        return {n for n, row in stage.items() if data["texts"][row[2]] == operator}

    kept = numbers(stages[-1], "MatMul")
    assert kept and kept < numbers(stages[0], "MatMul")
    [attention] = numbers(stages[-1], "Attention")
    assert attention not in stages[0]
    at = [name for name, _ in graphs].index("fuse_attention")
    [remark] = [r for r in data["stages"][at]["remarks"] if r[0] == "fired"]
    assert attention in remark[4]
    assert set(remark[4]) - stages[at].keys() == stages[at - 1].keys() - stages[at].keys()
    told = sum(len(stage["remarks"]) for stage in data["stages"])
    assert told == len(report["remarks"]) > 0


def test_a_graph_that_another_one_is(tmp_path: Path) -> None:
    """Given which nodes are the same, a second graph's nodes take their numbers."""
    a, b = block(), block(activation="relu")
    pairs = zip(a.graph, b.graph, strict=False)
    same = {x: y for x, y in pairs if x.op_type == y.op_type}
    report = {"a": {"name": "a.onnx"}, "pairs": {"x": "y"}}
    graphs = [("a.onnx", a), ("b.onnx", b)]
    data = data_of(page.write(tmp_path / "diff.html", report, graphs, same=same))
    before, after = stages_of(data)
    assert data["view"] == "diff"
    ends = len(a.graph.inputs) + len(a.graph.outputs)
    assert len(before.keys() & after.keys()) == len(same) + ends


def test_a_report_replaces_its_file_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replaced, replace = list[str](), Path.replace

    def counted(self: Path, target: Path) -> Path:
        replaced.append(target.name)
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", counted)
    with place(tmp_path / "r.html") as write:
        write({"model": "a block"}, [])
    assert replaced == ["r.html"]
    assert data_of(tmp_path / "r.html")["report"] == {"model": "a block"}


def test_nodes_of_one_name_are_told_apart(tmp_path: Path) -> None:
    """A difference is about the nodes that it names by number: the second, the fourth."""
    found = diff(namesakes(0.1, "Neg"), namesakes(0.2, "Abs"))
    assert [(c.a, c.b) for c in found.changes] == [(["act#2"],) * 2, (["act#4"],) * 2]
    graphs = [("a.onnx", found.graphs[0]), ("b.onnx", found.graphs[1])]
    data = data_of(page.write(tmp_path / "d.html", found.to_json(), graphs, same=found.same))
    gives = [
        [[side[n][6][0][0] for n in at] for side, at in zip(stages_of(data), change, strict=True)]
        for change in data["changed"]
    ]
    assert gives == [[["y2"], ["y2"]], [["y4"], ["y4"]]]


def test_names_are_hostile(tmp_path: Path) -> None:
    """Nothing that a model says can end the script that holds it, or stand for a part."""
    bad = "</script><script>alert(1)</script><!--[[page.js]]\u2028\udc80"
    x = ir.val("x", ir.DataType.FLOAT, [bad, 2])
    nodes = [ir.node("Relu", [x], name=bad)]
    nodes[0].outputs[0].name = bad
    graph = ir.Graph([x], nodes[0].outputs, nodes=nodes, opset_imports={"": 23}, name="g")
    graphs = [(bad, ir.Model(graph, ir_version=10))]
    file = page.write(tmp_path / "page.html", {"model": bad, "rows": [{"name": bad}]}, graphs)
    text = file.read_text("utf-8")
    assert text.count("<script") == text.count("</script") == 3
    assert "alert(1)</" not in text
    data = data_of(file)
    assert data["report"]["model"] == data["stages"][0]["name"] == bad
    assert bad in [row[1] for row in data["nodes"]]


def test_nothing_is_fetched(graphs: Graphs, report: Any, tmp_path: Path) -> None:
    text = page.write(tmp_path / "page.html", report, graphs).read_text("utf-8")
    assert "default-src 'none'" in text
    assert not re.search(r"\bsrc=|<link|@import|url\(|https?://|\bimport[ (]|fetch\(", text)
    assert not re.search(r"\[\[\w+\.(js|css|json)\]\]", text)  # every part is in its place


def test_large_blocks_are_shown_in_pieces(tmp_path: Path) -> None:
    """A flat graph of 10,000 nodes is a hundred blocks, and a small file."""
    x = ir.val("x", ir.DataType.FLOAT, [2])
    nodes: list[ir.Node] = []
    for i in range(10_000):
        nodes.append(ir.node("Relu", [nodes[-1].outputs[0] if nodes else x], name=f"n{i}"))
        nodes[-1].outputs[0].name = f"y{i}"
    graph = ir.Graph([x], nodes[-1].outputs, nodes=nodes, opset_imports={"": 23}, name="g")
    file = page.write(tmp_path / "page.html", {}, [("flat", ir.Model(graph, ir_version=10))])
    assert file.stat().st_size < 2_000_000
    data = data_of(file)
    blocks = {row[3] for row in data["nodes"]}
    assert 80 < len(blocks) < 100
    [first] = [row for row in data["nodes"] if row[1] == "n0"]
    assert data["texts"][first[3]] == "nodes 1 to 40"


@pytest.mark.parametrize(
    ("name", "path", "wanted"),
    [
        ("/encoder/layer.0/attention/self/MatMul_1", "", "encoder layer.0 attention self"),
        ("/model/layers.11/mlp/act_fn/Mul", "", "model layers.11 mlp act_fn"),
        (
            "node_linear",
            "['', 'model', 'model.layer.3', 'model.layer.3.out', 'v']",
            "model layer.3 out",
        ),
        ("MatMul_7", "", ""),
    ],
)
def test_blocks_of_foreign_graphs(name: str, path: str, wanted: str) -> None:
    node = ir.node("Relu", [ir.val("x")], name=name)
    if path:
        node.metadata_props["pkg.torch.onnx.name_scopes"] = path
    assert " ".join(page._block(node)) == wanted


def test_overlays_are_of_each_graph(graphs: Graphs, report: Any, tmp_path: Path) -> None:
    a, b = (str(node.name) for node in list(graphs[-1][1].graph)[:2])
    values: list[dict[str, float]] = [{}] * 13 + [{a: 0.5, "no such node": 1.0, b: np.nan}]
    overlays = {"time": page.Overlay("ms", values)}
    [told] = data_of(page.write(tmp_path / "page.html", report, graphs, overlays))["overlays"]
    assert told["values"][:13] == [{}] * 13
    assert list(told["values"][-1].values()) == [0.5, "Infinity"]


def test_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "page.html").write_text("old")
    with pytest.raises(gg.GraphgenError, match="cannot be written"):
        page.write(tmp_path / "none" / "page.html", {})
    monkeypatch.setattr(page, "find_spec", lambda name: None)
    with pytest.raises(gg.GraphgenError, match=r'pip install "graphgen-onnx\[html\]"'):
        page.write(tmp_path / "page.html", {})
    with pytest.raises(gg.GraphgenError, match="install"):
        page.layout()
    assert (tmp_path / "page.html").read_text() == "old"


def test_the_program_of_the_docs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    docs = Path(__file__).resolve().parents[2] / "docs" / "page.md"
    [program] = re.findall(r"^```python\n(.*?)^```$", docs.read_text(), re.MULTILINE | re.DOTALL)
    monkeypatch.chdir(tmp_path)
    exec(program, {})
    assert len(data_of(tmp_path / "layer.html")["stages"]) == 1 + len(PIPELINE)
