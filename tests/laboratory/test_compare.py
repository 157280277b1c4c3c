"""Comparisons: rows, recounted by plain onnx, onnxruntime and numpy; gates; files."""

import errno
import json
import os
import re
import signal
import subprocess
import sys
import time
import warnings
from collections import Counter
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from small_models import ROUNDING

import graphgen as gg
from graphgen import commands
from graphgen.errors import GraphgenError
from graphgen.laboratory import bench, compare, report
from graphgen.laboratory.report import markdown
from graphgen.laboratory.rows import KINDS
from graphgen.laboratory.runs import fingerprint
from graphgen.measure import latency
from graphgen.measure.accuracy import differ, largest_difference
from graphgen.measure.reference import evaluate
from tests.small_models import block, loops

REAL = bench.tried
ROOT = Path(__file__).resolve().parents[2]
FIXTURES = ROOT / "tests" / "fixtures"
SCHEMA = json.loads((ROOT / "docs" / "compare.schema.json").read_text())
BERT, CACHED = FIXTURES / "bert_torchscript_eager_14.onnx", "gpt2_cached_torchscript_eager_18.onnx"
SIZES = {"batch": 2, "sequence": 5}


@pytest.fixture(scope="module")
def bert():
    """Everything that is said of a BERT of two layers; other optimizers have tests of their own."""
    return gg.compare(BERT, dims=SIZES, seconds=0.03, threads=1, kinds=KINDS[1:-1])


@pytest.fixture(scope="module")
def cached():
    """A GPT-2 that takes a past: its prefill and its decode step."""
    sizes = {"batch": 1, "sequence": 4, "past": 3}
    return gg.compare(FIXTURES / CACHED, dims=sizes, seconds=0.03, threads=1, kinds=["cumulative"])


def optimized(path, level, disabled=()):
    """(nodes, providers) of what a plain session makes of a file."""
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = {
        "off": ort.GraphOptimizationLevel.ORT_DISABLE_ALL,
        "basic": ort.GraphOptimizationLevel.ORT_ENABLE_BASIC,
        "extended": ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED,
        "all": ort.GraphOptimizationLevel.ORT_ENABLE_ALL,
    }[level]
    saved = Path(path).with_suffix(".saved.onnx")
    options.optimized_model_filepath = str(saved)
    session = ort.InferenceSession(
        path, options, providers=["CPUExecutionProvider"], disabled_optimizers=list(disabled)
    )
    return session, len(onnx.load(saved).graph.node)


def test_other_providers_have_a_table(tmp_path, capsys, monkeypatch):
    given = ["compare", str(BERT), "--dim", "batch=2", "--dim", "sequence=5", "--seconds", "0.05"]
    given += ["--kinds", "--threads", "1", "--json", str(tmp_path / "r.json"), "--provider", "cpu"]
    asked = []

    def tried(path, feeds, outputs, provider):
        asked.append(provider)
        if len(asked) == 2:
            raise GraphgenError("Session(m): it has no such shader")
        return REAL(path, feeds, outputs, provider)

    monkeypatch.setattr(bench, "tried", tried)
    assert commands.main([*given, "--html", str(tmp_path / "r.html")]) == 0
    found, shown = json.loads((tmp_path / "r.json").read_text()), capsys.readouterr().out
    jsonschema.validate(found, SCHEMA)
    baseline, result = (row["elsewhere"]["cpu"] for row in found["rows"][:2])
    assert baseline["nodes"] == found["rows"][0]["runtime_nodes"] and asked == ["cpu", "cpu"]
    assert (baseline["cpu"], baseline["copies"], baseline["problem"]) == (0, 0, None)
    assert 0 < baseline["error"] == pytest.approx(found["rows"][0]["error"]["rel_rms"])
    table = shown[shown.index("on cpu\n") :].splitlines()
    assert table[1].split("  ")[-1] == "error" and max(map(len, table[1:4])) <= 80
    assert re.search(r"^baseline +\d+ +0 +0 +\d", table[2])
    assert "on cpu: Session(m): it has no such shader" in shown and result["nodes"] == 0
    assert "no such shader" in (tmp_path / "r.html").read_text()
    assert commands.main([*given[:-1], "openvino"]) == 2
    assert "provider='openvino'" in capsys.readouterr().err


def test_the_report_is_what_the_schema_says(bert, cached):
    for found in (bert, cached):
        jsonschema.validate(found.to_json(), SCHEMA)
        assert found.complete
        for row in found.rows:
            assert row.problem is None
            assert row.latency_ms is not None and row.latency_ms.runs >= 7
            assert row.latency_ms.low <= row.latency_ms.median <= row.latency_ms.high
    kinds = Counter(row.kind for row in bert.rows)
    passes = gg.passes.PIPELINE
    assert kinds["baseline"] == 1 and kinds["cumulative"] == len(passes)
    assert kinds["leave_one_out"] == kinds["only"] == len(set(passes))
    document = bert.to_json()
    document["rows"][1]["name"] = "b[/a].onnx"  # no markup of rich
    assert re.search(r"^b\[/a\]\.onnx ", report.text(document), re.MULTILINE)


@pytest.mark.exhaustive
def test_counts_and_errors_are_what_plain_tools_find(bert, tmp_path):
    """Nodes, sites, what the session makes of it, and errors, of the baseline and the result."""
    feeds = {
        "input_ids": None,
        "attention_mask": np.ones((2, 5), np.int64),
        "token_type_ids": np.zeros((2, 5), np.int64),
    }
    rng = np.random.default_rng(3)
    feeds["input_ids"] = rng.integers(0, 20, (2, 5))
    found = gg.compare(BERT, inputs=feeds, seconds=0.05, threads=1, kinds=["runtime"])
    best = gg.optimize(gg.load(BERT))
    result = gg.export(best, tmp_path / "best.onnx")
    source = tmp_path / "source.onnx"
    source.write_bytes(BERT.read_bytes())
    reference, _ = optimized(source, "off")
    [exact] = evaluate(gg.load(BERT), feeds)
    rows = {(row.name.split(",")[0], row.level, row.disabled): row for row in found.rows}
    last = found["pipeline"].name
    assert found.reference == "float64" and set(found.inputs.values()) == {"given"}
    for (name, level, disabled), row in rows.items():
        file = {"baseline": source, last: result}[name]
        nodes = onnx.load(file).graph.node
        assert row.nodes == sum(node.op_type != "Constant" for node in nodes)
        session, count = optimized(file, level, disabled)
        assert row.runtime_nodes == count
        [got] = session.run(None, feeds)
        difference = got - exact
        assert row.error.max_abs == np.abs(difference).max()
        assert row.error.max_rel == pytest.approx(np.abs(difference).max() / np.abs(exact).max())
        rms = np.sqrt(np.mean(difference**2)) / np.sqrt(np.mean(exact**2))
        assert row.error.rel_rms == pytest.approx(rms)
        assert row.error.argmax_agreement == np.mean(got.argmax(-1) == exact.argmax(-1))
        ulp = np.abs(difference) / np.spacing(np.abs(exact).astype(np.float32))
        assert row.error.ulp == pytest.approx(ulp.max())
    weights = onnx.load(source).graph.initializer
    floats = [w for w in weights if w.data_type == onnx.TensorProto.FLOAT and w.dims]
    assert found["baseline"].parameters == sum(np.prod(w.dims) for w in floats)
    assert reference.run(None, feeds)[0].shape == exact.shape


def test_flops_and_bytes_are_what_the_shapes_say(tmp_path):
    """Counted from a plain file: 2 K an element of a product, one an element of anything else."""
    w = np.random.default_rng(0).standard_normal((16, 32)).astype(np.float32)
    weight = onnx.numpy_helper.from_array(w, "w")
    x, y = (
        onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["batch", 7, size])
        for name, size in (("x", 16), ("y", 32))
    )
    nodes = [
        onnx.helper.make_node("MatMul", ["x", "w"], ["a"]),
        onnx.helper.make_node("Tanh", ["a"], ["b"]),
        onnx.helper.make_node("Add", ["a", "b"], ["y"]),
    ]
    graph = onnx.helper.make_graph(nodes, "g", [x], [y], [weight])
    opsets, file = [onnx.helper.make_opsetid("", 18)], tmp_path / "m.onnx"
    onnx.save(onnx.helper.make_model(graph, opset_imports=opsets, ir_version=9), file)
    found = gg.compare(file, dims={"batch": 3}, seconds=0.05, threads=1, kinds=[])
    row = found["baseline"]
    given, made = 3 * 7 * 16, 3 * 7 * 32
    assert row.flops == 2 * 16 * made + made + made
    assert row.bytes == {
        "read": 4 * ((given + w.size) + made + (made + made)),
        "written": 4 * (made + made + made),
        "peak_alive": 4 * (made + made + made),
    }
    assert row.parameters == w.size and row.nodes == 3


def test_a_pass_of_another_package_has_rows_and_a_page(tmp_path, monkeypatch):
    """It is removed and run alone like a built-in, and the page tells its sites."""
    (tmp_path / "swapped.py").write_text(
        "from graphgen import ops\n"
        "from graphgen.match import Rewrite\n"
        "from graphgen.record import adopt\n\n\n"
        "def swap(node):\n"
        "    x, y = map(adopt, node.inputs)\n"
        "    return Rewrite(ops.add(y, x), [x, y], 'swapped') if x.const_value is None else None\n"
        "\n\ndef rules(target):\n"
        "    return {'Add': [swap]}\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    name, how = "swapped:rules", {"seconds": 0.05, "threads": 1}
    passes = ["canonicalize", "fuse_softmax"]
    kinds = ["cumulative", "leave_one_out", "only"]
    found = gg.compare(
        block(), dims={"batch": 2, "seq": 3}, passes=passes, with_passes=[name], kinds=kinds, **how
    )
    names = [row.name for row in found.rows]
    assert names[1:4] == ["canonicalize", name, "fuse_softmax"]
    assert {f"without {name}", f"only {name}"} <= {*names}
    assert found[name].fired == found[f"only {name}"].fired == len(found.sites(name)) > 0
    assert name not in found[f"without {name}"].passes and found[name].error.rel_rms < ROUNDING
    found.save(tmp_path / "r.html")
    assert name in (tmp_path / "r.html").read_text()


def test_what_time_is_not_left_for_says_so(monkeypatch):
    """Levels and optimizers of the runtime go first; what the passes make is always measured."""
    monkeypatch.setattr(bench, "_LONGER", 0.0)
    kinds = ["cumulative", "runtime"]
    found = gg.compare(block(), dims={"batch": 2, "seq": 3}, seconds=0.0, threads=1, kinds=kinds)
    assert found.complete
    for row in found.rows:
        assert (row.latency_ms is None) == (row.problem is not None)
        assert row.kind == "runtime" or row.latency_ms is not None
    told = {row.problem for row in found.rows if row.latency_ms is None}
    assert told == {"not measured, the time was up: give more --seconds, or fewer --kinds"}
    jsonschema.validate(found.to_json(), SCHEMA)


def test_rows_of_passes_count_what_optimize_tells(bert):
    some = ("canonicalize", "canonicalize 2", "fuse_attention", "keep_apart", "clean 2")
    rows = [row for row in bert.rows if row.name.removeprefix("only ") in some]
    rows += [bert[f"without {name}"] for name in ("canonicalize", "fuse_norm", "fuse_rotary")]
    model = gg.load(BERT)
    for row in rows:
        done = gg.optimize(model, passes=row.passes).report.passes
        if row.kind != "leave_one_out":
            name = row.name.removeprefix("only ").split()[0]
            done = [one for one in done if one.name == name][-1:]
        assert row.sites == {s: sum(d.count(s) for d in done) for s in row.sites}, row.name
    assert bert["fuse_attention"].fired == 2 and bert["only fuse_attention"].fired == 2
    assert bert["without fuse_attention"].passes.count("canonicalize") == 3
    assert len(bert.sites("attention", status="fired")) == 2
    assert {site.status for site in bert.sites("fuse_sums")} == {"refused"}
    with pytest.raises(
        gg.GraphgenError, match=r"not a pass or an operator; choose from .*attention"
    ):
        bert.sites("attentoin")
    with pytest.raises(gg.GraphgenError, match="there is no row 'nothing'"):
        bert["nothing"]


def test_what_is_the_same_is_measured_once(bert):
    """`fuse_rotary` finds nothing in a BERT: its graph is the one before it."""
    assert bert["fuse_rotary"].fired == 0
    assert bert["fuse_rotary"].measured_as == bert["fuse_activation"].measured_as
    assert bert["fuse_rotary"].latency_ms == bert["fuse_activation"].latency_ms
    assert bert["fuse_attention"].measured_as == "fuse_attention"
    changing = bert.optimizers["baseline"]["changing"]
    assert "LayerNormFusionL2" in changing or "LayerNormFusionL1" in changing
    assert "NchwcTransformer" in bert.optimizers["baseline"]["idle"]
    rows = [row for row in bert.rows if row.disabled]
    assert {name for row in rows for name in row.disabled} <= set(changing)


def test_fingerprints_see_structure_not_names():
    def renamed(model, suffix):
        for node in model.graph:
            node.name += suffix
            for value in node.outputs:
                value.name += "" if value.is_graph_output() else suffix
        return fingerprint(model.graph)

    assert renamed(block(), "_a") == renamed(block(), "_b") != fingerprint(block(8).graph)
    other = block()
    node = next(node for node in other.graph if node.op_type == "MatMul")
    node.inputs[1].const_value = ir.tensor(node.inputs[1].const_value.numpy() + 1)
    assert fingerprint(other.graph) != fingerprint(block().graph)
    assert fingerprint(loops("i").graph) != fingerprint(loops("j").graph)


def test_a_cache_has_a_prefill_and_a_decode_step(cached):
    """The length of the mask, which nobody gave, is that of past and new tokens together."""
    assert cached.dims == {
        "prefill": {"batch": 1, "sequence": 4, "past": 0, "total": 4},
        "decode": {"batch": 1, "sequence": 1, "past": 3, "total": 4},
    }
    for row in cached.rows:
        assert row.decode is not None and row.decode.latency_ms is not None
        assert row.decode.flops < row.flops
        assert row.decode.error.rel_rms < ROUNDING and row.error.rel_rms < ROUNDING
    assert "decode ms" in str(cached) and "prefill ms" in markdown(cached.to_json())


def test_each_run_follows_each_other_one_alike_and_none_itself(monkeypatch):
    """What ran last is in the caches: equal sessions would differ by their place in the order."""
    monkeypatch.setattr(latency, "LEAST", 400)
    order: list[int] = []
    spent = latency.measure([partial(order.append, i) for i in range(5)], 0.0, warm=True)
    assert spent.shape == (400, 5) and len(order) == spent.size
    assert all(sorted(order[i : i + 5]) == [*range(5)] for i in range(0, len(order), 5))
    pairs = Counter(pairwise(order))
    assert {*pairs} == {(i, j) for i in range(5) for j in range(5) if i != j}
    assert min(pairs.values()) > 60  # of 1,999 in 20 kinds
    assert latency.measure([int], 0.0).shape == (400, 1)


def saved(path, nodes, outputs, *initializers, opset=18):
    """A file with the input x, float[2, 3]."""
    x = onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [2, 3])
    graph = onnx.helper.make_graph(nodes, "g", [x], outputs, initializers)
    opsets = [onnx.helper.make_opsetid("", opset)]
    onnx.save(onnx.helper.make_model(graph, opset_imports=opsets, ir_version=9), path)
    return path


def test_results_of_all_kinds_have_errors(tmp_path):
    """Texts, integers, bfloat16, infinities, which warn of nothing, and sequences."""
    node, value = onnx.helper.make_node, onnx.helper.make_tensor_value_info
    table, other = (
        onnx.numpy_helper.from_array(np.array(texts, object), "table")
        for texts in (["cat", "ö"], ["cat", "o"])
    )
    zero = onnx.numpy_helper.from_array(np.zeros(1, np.float32), "zero")
    nodes = [
        node("Greater", ["x", "zero"], ["above"]),
        node("Cast", ["above"], ["i"], to=onnx.TensorProto.INT64),
        node("Gather", ["table", "i"], ["text"]),
        node("Softmax", ["x"], ["share"]),
        node("Cast", ["share"], ["bfloat"], to=onnx.TensorProto.BFLOAT16),
        node("Div", ["x", "zero"], ["infinite"]),
    ]
    kinds = {"text": "STRING", "i": "INT64", "bfloat": "BFLOAT16", "infinite": "FLOAT"}
    outputs = [value(n, getattr(onnx.TensorProto, k), [2, 3]) for n, k in kinds.items()]
    feeds = {"x": np.random.default_rng(0).standard_normal((2, 3)).astype(np.float32)}
    how = {"seconds": 0.0, "threads": 1, "inputs": feeds, "kinds": []}
    file = saved(tmp_path / "a.onnx", nodes[::-1], outputs, table, zero)  # in whatever order
    with warnings.catch_warnings(action="error"):
        found = gg.compare(file, **how)
        found.save(tmp_path / "r.html")
    assert found.reference == "float64" and 0 < found["baseline"].error.ulp <= 0.51
    against = saved(tmp_path / "b.onnx", nodes, outputs, other, zero)
    assert gg.compare(file, against=against, **how)["b.onnx"].error.rel_rms == np.inf
    parts = onnx.helper.make_tensor_sequence_value_info("parts", onnx.TensorProto.FLOAT, None)
    split = [node("SplitToSequence", ["x"], ["parts"], axis=1)]
    found = gg.compare(saved(tmp_path / "s.onnx", split, [parts]), **how)
    assert found["pipeline"].error.rel_rms == 0


def test_an_integer_is_a_unit_in_the_last_place():
    one, other = np.array([5, 9], np.int64), np.array([5, 7], np.int64)
    assert differ([one], [other]).ulp == 2.0
    assert differ([[one, one]], [[one]]).rel_rms == np.inf


def test_files_are_compared(tmp_path):
    """An identical file ties; one that is wrong differs; one of other inputs does not run."""
    source = gg.export(block(), tmp_path / "a.onnx")
    same = gg.export(gg.optimize(block()), tmp_path / "b.onnx")
    wrong = gg.load(source)
    weight = next(v for v in wrong.graph.initializers.values() if len(v.shape) == 2)
    weight.const_value = ir.tensor(weight.const_value.numpy() * 1.01)
    other = gg.export(block(mask=True), tmp_path / "c.onnx")
    sizes = {"batch": 2, "seq": 3}
    found = {
        path: gg.compare(source, dims=sizes, against=path, kinds=[], seconds=0.05, threads=1)
        for path in (same, gg.export(wrong, tmp_path / "w.onnx"), other)
    }
    right, differs, refused = found.values()
    assert [row.name for row in right.rows] == ["baseline", "b.onnx"]
    assert right["pipeline"].error.rel_rms < ROUNDING and not right.failures(None, 1e-5, {})
    [told] = differs.failures(None, 1e-5, {})
    assert told.startswith("w.onnx differs by ") and told.endswith("at most 1e-05 wanted")
    assert "mask" in refused["pipeline"].problem and refused.failures(None, None, {})


def test_a_file_with_text_that_is_not_utf_8_is_compared(tmp_path):
    """The baseline is the file's own graph, which nothing that reads files has gone over."""
    proto = onnx.load(gg.export(block(), tmp_path / "a.onnx"))
    proto.graph.node[0].metadata_props.add(key="where", value="in a block")
    data = proto.SerializeToString().replace(b"in a block", b"in \xb1 block")
    (tmp_path / "a.onnx").write_bytes(data)
    report = gg.compare(
        tmp_path / "a.onnx", dims={"batch": 2, "seq": 3}, kinds=[], seconds=0, threads=1
    )
    assert not report["baseline"].problem


def test_other_optimizers_are_rows(monkeypatch):
    """One that fails says why; what it wrote is measured like any other graph."""

    def others(source, folder, target, stop):
        yield "broken", "ValueError: it did not like the file"
        yield "wrong file", FIXTURES / "README.md"
        yield "the same", gg.export(gg.load(source), folder / "same.onnx")

    monkeypatch.setattr(compare, "optimized_by_others", others)
    found = gg.compare(BERT, dims=SIZES, seconds=0.05, threads=1, kinds=["other"])
    assert [row.name for row in found.rows[-3:]] == ["broken", "wrong file", "the same"]
    assert found["broken"].problem == "ValueError: it did not like the file"
    assert found["wrong file"].problem and found["wrong file"].nodes is None
    assert found["the same"].error == found["baseline"].error and found["the same"].verdict
    jsonschema.validate(found.to_json(), SCHEMA)


def test_a_decode_step_is_measured_of_a_file_that_only_the_runtime_reads(monkeypatch):
    """Its columns had the figures of the prefill."""

    def others(source, folder, target, stop):
        yield "the same", gg.export(gg.load(source), folder / "same.onnx")

    def load(path):
        raise GraphgenError("no operator is known")

    monkeypatch.setattr(compare, "optimized_by_others", others)
    monkeypatch.setattr(compare, "load", load)
    sizes, how = {"batch": 1, "sequence": 4, "past": 3}, {"kinds": ["other"], "seconds": 0.01}
    found = gg.compare(
        FIXTURES / CACHED, dims=sizes, threads=1, passes=["canonicalize"], **how
    ).rows[-1]
    assert found.name == "the same" and found.flops is None
    assert found.decode.latency_ms and found.decode.latency_ms != found.latency_ms


def test_a_slow_pipeline_fails_the_gate(tmp_path):
    """A file that does four times the work is slower; the baseline against itself is not."""
    with_more = block(features=64)
    node = next(node for node in reversed(with_more.graph) if node.op_type == "Add")
    source = gg.export(with_more, tmp_path / "a.onnx")
    sizes, how = {"batch": 4, "seq": 64}, {"kinds": [], "threads": 1, "seconds": 0.3}
    proto = onnx.load(source)
    last = proto.graph.output[0].name
    for x in proto.graph.node[-1].output:
        assert x == last
    proto.graph.node[-1].output[0] = "slow_0"
    for i in range(300):
        proto.graph.node.append(onnx.helper.make_node("Exp", [f"slow_{i}"], [f"half_{i}"]))
        proto.graph.node.append(onnx.helper.make_node("Log", [f"half_{i}"], [f"slow_{i + 1}"]))
    proto.graph.node.append(onnx.helper.make_node("Identity", ["slow_300"], [last]))
    onnx.save(proto, tmp_path / "slow.onnx")
    slow = gg.compare(source, dims=sizes, against=tmp_path / "slow.onnx", **how)
    assert slow["pipeline"].verdict == "slower" and node is not None
    [told] = slow.failures(0.03, None, {})
    assert told.startswith("slow.onnx takes ") and "of the baseline, at most 1.030 wanted" in told


def command(*arguments):
    return commands.main(["compare", *map(str, arguments)])


SMALL = ["--dim", "batch=1", "--dim", "sequence=4", "--seconds", "0.05", "--threads", "1"]
TINY = ["--dim", "batch=1", "--dim", "seq=4", "--seconds", "0.05", "--threads", "1"]


def test_the_command_writes_files_prints_and_fails_at_gates(tmp_path, capsys):
    file, start = tmp_path / "r.json", [gg.export(block(), tmp_path / "m.onnx"), *TINY, "--kinds"]
    gates = ["--expect", "attention=2", "--fail-if-differs", "1e-9"]
    files = ["--json", file, "--html", tmp_path / "r.html"]
    assert command(*start, "cumulative", *gates, *files, "--markdown") == 3
    assert "fuse_attention" in (tmp_path / "r.html").read_text()
    printed = capsys.readouterr()
    jsonschema.validate(json.loads(file.read_text()), SCHEMA)
    row = next(line for line in printed.out.splitlines() if line.startswith("| fuse_attention |"))
    assert "| 1 | 0 | 0 |" in row
    last = printed.out.splitlines()[-1]
    assert re.search(
        r"m\.onnx: .* as given.*; \d+ -> \d+ nodes; error \de-\d+; 1 attention of 1", last
    )
    assert last == json.loads(file.read_text())["conclusion"]
    assert "attention: found 1, wanted 2" in printed.err and "differs by" in printed.err
    assert command(*start, "cumulative", "--expect", "attention=1") == 0
    assert "fuse_attention" in capsys.readouterr().out
    assert command(BERT, *SMALL, "--kinds", "--expect", "attention=2") == 0
    out = capsys.readouterr().out
    assert len(re.findall(r"^(?:baseline|clean 2) +\d", out, re.MULTILINE)) == 2
    assert not set(out) & set("┃━│─")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([BERT], "dimensions without a size; give --dim batch=... --dim sequence=..."),
        ([BERT, *SMALL, "--dim", "heads=2"], "dimension 'heads' is in no input"),
        ([BERT, "--dim", "batch=1", "--dim", "sequence=64"], "not take batch=1 sequence=64: Add("),
        ([BERT, *SMALL, "--json", "{}/no/r.json"], "cannot be written: No such file or directory"),
        ([BERT, *SMALL, "--expect", "attentoin=2"], "is not a fused operator"),
        ([BERT, "--passes", "fuse_nrom"], "there is no pass 'fuse_nrom'; there are canonicalize, "),
        (
            [BERT, *SMALL, "--fail-if-slower", "lots"],
            "'lots' is not a share of at least 0, such as",
        ),
        ([BERT, *SMALL, "--fail-if-slower", "3"], "'3' is not a share of at least 0, such as 0.03"),
        ([BERT, *SMALL, "--seconds", "nan"], "compare: seconds is nan; it must be at least 0"),
        (["missing.onnx"], "missing.onnx cannot be read"),
    ],
)
def test_bad_input_is_told_in_one_line(arguments, told, tmp_path, capsys):
    start = time.perf_counter()
    assert command(*(str(a).format(tmp_path) for a in arguments)) == 2
    err = capsys.readouterr().err
    assert told in err and err.count("\n") == 1
    assert time.perf_counter() - start < 20 and not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"dims": {"batch": 1.5}}, "compare: dims['batch'] is 1.5; it must be an int"),
        ({"dims": {"batch": "1"}}, "compare: dims['batch'] is '1'; it must be an int"),
        ({"dims": SIZES, "passes": []}, "compare: there are no passes"),
        ({"dims": SIZES, "against": 3}, "compare: against is 3; it must be a path or None"),
        ({"dims": SIZES, "kinds": "only"}, "compare: kinds is 'only'; it must be a list or None"),
        ({"dims": {**SIZES, "sequence": 4}}, "for input_ids is of shape [2, 5], and sequence is 4"),
        ({"inputs": {"input_ids": np.ones((2, 5), np.int32)}}, "is int32[2, 5], not int64[batch"),
    ],
)
def test_bad_arguments_are_told(options, told):
    inputs = {"input_ids": np.ones((2, 5), np.int64)} | options.pop("inputs", {})
    with pytest.raises(gg.GraphgenError, match=re.escape(told)):
        gg.compare(BERT, inputs=inputs, seconds=0.0, **options)


def test_a_narrow_terminal_shows_tables_in_parts(cached, monkeypatch):
    """Nothing is cut off, in a terminal or a pipe, and the name of a row is in each part."""
    wide = str(cached)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "80")
    narrow = re.sub("\x1b\\[[0-9]+m", "", str(cached))
    words = {*re.split(r"[\s─]+", narrow)} - {""}
    assert {*wide.split()} == words and "…" not in wide
    title, *lines = narrow.splitlines()
    rows = [line for line in lines if line.startswith(" ")]
    verdicts = next(line for line in rows if line.split()[:1] == ["fuse_attention"]).split()
    assert {*verdicts} & {"faster", "slower", "tie"}  # what decides comes first
    assert max(map(len, rows)) <= 80 and title == wide.splitlines()[0]
    assert sum(line.split()[:1] == ["fuse_attention"] for line in rows) > 1


def test_a_model_that_no_session_loads_is_told_in_one_line(tmp_path, capsys):
    x, y = (onnx.helper.make_tensor_value_info(n, onnx.TensorProto.FLOAT, [2]) for n in "xy")
    node = onnx.helper.make_node("Unheard", ["x"], ["y"], domain="of.nobody")
    opsets = [onnx.helper.make_opsetid("", 18), onnx.helper.make_opsetid("of.nobody", 1)]
    model = onnx.helper.make_model(
        onnx.helper.make_graph([node], "g", [x], [y]), opset_imports=opsets, ir_version=9
    )
    onnx.save(model, tmp_path / "m.onnx")
    assert command(tmp_path / "m.onnx") == 2
    err = capsys.readouterr().err
    assert "Unheard" in err and err.count("\n") == 1


def test_a_full_disk_is_told(tmp_path, monkeypatch):
    """Where the graphs go on the way, and where a report goes."""

    def full(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    found = gg.compare(block(), dims={"batch": 1, "seq": 2}, seconds=0.0, kinds=[])
    monkeypatch.setattr(report, "render", full)
    with pytest.raises(gg.GraphgenError, match=r"compare: \S+/r.html cannot be written: No space"):
        found.save(tmp_path / "r.html")
    assert not [*tmp_path.iterdir()]
    monkeypatch.setattr(compare, "Shelf", full)
    with pytest.raises(gg.GraphgenError, match="No space left on device; set TMPDIR to another"):
        gg.compare(block(), dims={"batch": 1, "seq": 2})


def test_what_is_there_is_kept_when_interrupted(tmp_path, capsys, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(compare.Bench, "measure", interrupted)
    file, source = tmp_path / "r.json", gg.export(block(), tmp_path / "m.onnx")
    assert command(source, *TINY, "--kinds", "cumulative", "--json", file) == 130
    report = json.loads(file.read_text())
    jsonschema.validate(report, SCHEMA)
    assert not report["complete"] and len(report["rows"]) == 1 + len(gg.passes.PIPELINE)
    assert "INTERRUPTED" in capsys.readouterr().out


@pytest.mark.parametrize("form", ["--json", "--html", "--markdown"])
def test_an_interruption_before_the_first_row_leaves_an_empty_report(
    form: str, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(compare, "phases", interrupted)
    source, file = gg.export(block(), tmp_path / "m.onnx"), tmp_path / "report"
    assert command(source, *TINY, form, *([] if form == "--markdown" else [file])) == 130
    assert "INTERRUPTED" in capsys.readouterr().out
    if form == "--json":
        jsonschema.validate(json.loads(file.read_text()), SCHEMA)


@pytest.mark.share(2)
@pytest.mark.skipif(os.name == "nt", reason="Windows has no signals for one process")
@pytest.mark.parametrize(
    ("number", "told"), [(signal.SIGINT, "interrupted"), (signal.SIGTERM, "terminated")]
)
def test_a_signal_ends_the_process_and_keeps_what_there_is(number, told, tmp_path):
    file = tmp_path / "r.json"
    arguments = [BERT, *SMALL, "--seconds", "600", "--json", file]
    started = [sys.executable, "-m", "graphgen", "compare", *map(str, arguments)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}

    def heed() -> None:  # a shell lets what it starts in the background ignore it
        signal.signal(signal.SIGINT, signal.default_int_handler)

    with subprocess.Popen(started, cwd=ROOT, preexec_fn=heed, **pipes) as process:
        try:
            while not [*tmp_path.glob(".*.partial")] and process.poll() is None:
                time.sleep(0.05)  # until the place of the report is open
            time.sleep(1)
            process.send_signal(number)
            out, err = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 128 + number
    assert err.decode().endswith(f"graphgen: {told}\n"), err
    assert [*tmp_path.iterdir()] == [file]
    assert not json.loads(file.read_text())["complete"] and b"INTERRUPTED" in out


def test_a_nan_that_signals_is_no_warning() -> None:
    signals = np.array([0x7F800001], np.uint32).view(np.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert largest_difference(signals, np.ones(1, np.float32)) == np.inf
