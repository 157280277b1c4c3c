"""The engine: numbered rewrites, remarks, verification, invariants, determinism."""

import gc
import re
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from small_models import ROUNDING, block, relative_rms, run_plain

import graphgen as gg
from graphgen import ops, passes
from graphgen.edit import infer_model
from graphgen.errors import GraphgenError
from graphgen.graph import count_operators
from graphgen.invariants import verify
from graphgen.laboratory.text import short_text
from graphgen.match import (
    Engine,
    Miss,
    Outcome,
    Pass,
    PassReport,
    Replacement,
    Rewrite,
    run_passes,
    whole,
)
from graphgen.measure.feeds import sizes_of
from graphgen.measure.reference import evaluate
from graphgen.nn.module import build
from graphgen.op import TABLE, read_attributes
from graphgen.passes import PIPELINE, optimize
from graphgen.passes.runs import Memory
from graphgen.passes.training.products import products
from graphgen.passes.verify import _differ, _of_sizes, compare, compare_models
from graphgen.value import adopt

X = gg.float32["b", "s", 8]


def relu_twice(node: ir.Node) -> Outcome:
    """A right rule: Relu(Relu(x)) = Relu(x)."""
    inner = node.inputs[0].producer() if node.inputs[0] is not None else None
    if inner is None or inner.op_type != "Relu":
        return Miss("its input is not a Relu")
    return Rewrite(ops.relu(adopt(inner.inputs[0])), [inner.inputs[0]], "one of two")


def relu_is_nothing(node: ir.Node) -> Outcome:
    """A wrong rule."""
    return Rewrite(adopt(node.inputs[0]), [node.inputs[0]], "nothing")


def three_relus() -> ir.Model:
    return build(lambda x: ops.relu(ops.relu(ops.relu(x))), x=X)


def test_every_candidate_leaves_a_remark_with_its_number() -> None:
    model = three_relus()
    report = Engine(context=infer_model(model)).run("once", model, {"Relu": [relu_twice]})
    told = [(site.status, site.reason, site.number) for site in report.sites]
    assert told == [("missed", "its input is not a Relu", None), ("fired", "one of two", 1)]
    assert count_operators(model) == {"Relu": 2}
    assert [value.name for value in model.graph.outputs] == ["output"]


def test_stop_after_applies_the_first_rewrites_only() -> None:
    model = block(causal=True)
    whole = optimize(model)
    numbers = [s.number for p in whole.report.passes for s in p.sites if s.number is not None]
    assert sorted(numbers) == list(range(1, len(numbers) + 1))
    texts = []
    x = np.random.default_rng(0).standard_normal((2, 5, 16)).astype(np.float32)
    wanted = run_plain(model, {"x": x})[0]
    for n in range(len(numbers) + 1):
        part = optimize(model, stop_after=n)
        fired = sum(s.number is not None for p in part.report.passes for s in p.sites)
        assert fired == n
        texts.append(short_text(part.model))
        assert relative_rms(wanted, run_plain(part.model, {"x": x})[0]) < ROUNDING
    assert texts[-1] == short_text(whole.model)
    assert texts[0] != texts[-1]


@pytest.mark.parametrize("count", [-1, 2.5])
def test_only_whole_numbers_of_rewrites_can_be_applied(count: Any) -> None:
    wanted = r"an int(eger of at least 0| or None) \(test_engine.py:\d+\)$"
    told = f"stop_after is {count}; it must be {wanted}"
    with pytest.raises(GraphgenError, match=told):
        optimize(three_relus(), stop_after=count)


def test_a_wrong_rewrite_is_not_applied_when_verified() -> None:
    model = three_relus()
    rules = {"Relu": [relu_is_nothing]}
    report = Engine(verify=compare, context=infer_model(model)).run("wrong", model, rules)
    # Of Relu(Relu(Relu(x))) the outer two do nothing; only the innermost is needed.
    statuses = [site.status for site in report.sites]
    assert statuses.count("missed") >= 1
    assert all("relative RMS" in s.reason for s in report.sites if s.status == "missed")
    x = np.random.default_rng(0).standard_normal((2, 3, 8)).astype(np.float32)
    assert np.array_equal(run_plain(model, {"x": x})[0], np.maximum(x, 0))
    unverified = three_relus()
    Engine(context=infer_model(unverified)).run("wrong", unverified, rules)
    assert np.array_equal(run_plain(unverified, {"x": x})[0], x)


def test_a_site_that_differs_leaves_a_model_that_shows_it(tmp_path: Path) -> None:
    model = build(ops.relu, x=X)
    verifier = partial(compare, repros=tmp_path / "repros")
    report = Engine(verify=verifier, context=infer_model(model)).run(
        "wrong", model, {"Relu": [relu_is_nothing]}
    )
    (site,) = [site for site in report.sites if site.rolled_back]
    assert [path.name for path in (tmp_path / "repros").iterdir()] == ["1-Relu"]
    folder = tmp_path / "repros" / "1-Relu"
    assert site.reason.endswith(f"{folder} shows it")
    names = sorted(path.name for path in folder.iterdir())
    assert names == ["after.onnx", "before.onnx", "run.py", "x0.npy"]
    command = [sys.executable, str(folder / "run.py")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    told = re.search(r"relative RMS difference (\S+)", done.stdout)
    assert told is not None and float(told[1]) > 0.1
    assert "graphgen" not in (folder / "run.py").read_text()


def test_repros_need_verify_and_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(GraphgenError, match="repros needs verify=True"):
        optimize(three_relus(), repros=tmp_path)
    file = tmp_path / "file"
    file.touch()
    verifier = partial(compare, repros=file)
    model = three_relus()
    with pytest.raises(GraphgenError, match="give another folder"):
        Engine(verify=verifier, context=infer_model(model)).run(
            "wrong", model, {"Relu": [relu_is_nothing]}
        )

    def full(*_: object) -> None:
        raise OSError("4096 requested and 0 written")  # as numpy says it

    monkeypatch.setattr(np, "save", full)
    verifier = partial(compare, repros=tmp_path / "repros")
    with pytest.raises(
        GraphgenError, match=r"repros: \S+repros: 4096 requested and 0 written; give"
    ):
        Engine(verify=verifier, context=infer_model(model)).run(
            "wrong", model, {"Relu": [relu_is_nothing]}
        )


def negated(model: ir.Model) -> Replacement:
    """A wrong pass without sites: a Neg in the place of each Relu."""
    context = infer_model(model)
    rules: Any = {"Relu": [lambda node: Rewrite(-adopt(node.inputs[0]), [], "wrong")]}
    Engine(context=context).run("wrong", model, rules)
    return Replacement(model, "negated", context)


@pytest.mark.wrong_rewrites
def test_a_pass_without_sites_is_compared_as_a_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(passes, "clean", negated)
    best = optimize(three_relus(), passes=["clean"], verify=True, repros=tmp_path)
    (site,) = best.report.passes[0].sites
    assert site.rolled_back and (site.where, site.number) == ("the whole model", None)
    assert (tmp_path / "1-clean" / "run.py").exists()
    assert short_text(best.model) == short_text(three_relus())


def test_a_pass_without_sites_is_one_rewrite() -> None:
    """It has a number, is stopped, and hands on what it inferred; another graph is put in place."""
    twice = Pass("twice", lambda m, engine: engine.run("twice", m, {"Relu": [relu_twice]}))
    fresh = whole("fresh", lambda model: replace(negated(model), model=model.clone()))
    idle = whole("idle", lambda model: Replacement(model, context=infer_model(model)))
    for stop_after, wanted in ((None, {"Neg": 2}), (1, {"Relu": 2}), (0, {"Relu": 3})):
        model, engine = three_relus(), Engine(stop_after)
        engine.context = infer_model(model)
        graph, context = model.graph, engine.context
        done = run_passes(model, [idle, twice, fresh], engine)
        assert [[s.number for s in one.sites if s.number] for one in done] == [
            *([], [1] if stop_after != 0 else []),
            [2] if stop_after is None else [],
        ]
        assert count_operators(model) == wanted
        assert (model.graph is graph) == (stop_after is not None)
        assert (engine.context is context) == (stop_after == 0)
        verify(model)
    assert done[2].name == "fresh"


@pytest.mark.wrong_rewrites
def test_a_wrong_body_is_found_at_its_site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`legalize` has sites: each has a number, and only that which differs stays as it was."""
    mish, swish = TABLE["", "Mish"], TABLE["", "HardSwish"]
    model = build(lambda x: mish(mish(x)) + swish(x), x=X)
    right = optimize(model, passes=["legalize"])
    sites = right.report.passes[0].sites
    assert [s.number for s in sites] == [3, 2, 1]
    first = [s.number for s in sites].index(1)
    for n in range(len(sites) + 1):
        some = optimize(model, passes=["legalize"], stop_after=n)
        assert len(some.report.passes[0].sites) == n
    bodies, calls = passes.legalize.__globals__["bodies"], [0]

    def once_wrong(*given: Any) -> Any:
        calls[0] += 1
        return [y if y is None or calls[0] != 1 else -y for y in bodies(*given)]

    monkeypatch.setitem(passes.legalize.__globals__, "bodies", once_wrong)
    best = optimize(model, passes=["legalize"], verify=True, repros=tmp_path)
    told = [s.rolled_back for s in best.report.passes[0].sites]
    assert told == [i == first for i in range(len(sites))]
    assert len(list(tmp_path.glob("1-*/run.py"))) == 1


def test_a_small_error_in_epsilon_is_found() -> None:
    def wrong(node: ir.Node) -> Outcome:
        x, scale, bias = map(adopt, node.inputs)
        return Rewrite(ops.layer_norm(x, scale, bias, epsilon=1e-4), [x, scale, bias], "wrong")

    model = block(primitives=False)
    report = Engine(verify=compare, context=infer_model(model)).run(
        "wrong", model, {"LayerNormalization": [wrong]}
    )
    assert [site.status for site in report.sites] == ["missed", "missed"]


def softened(x: Any, mask: Any) -> Any:
    return ops.softmax(x + mask)


HOSTILE: dict[str, tuple[Any, str, Any]] = {
    "a wrong epsilon of small rows": (
        lambda x, mask: ops.rms_norm(x, epsilon=1e-6),
        "RMSNormalization",
        lambda x, gain: ops.rms_normalization(x, gain, epsilon=1.2e-6),
    ),
    "masks of the lowest number": (
        softened,
        "Softmax",
        lambda scores: ops.softmax(ops.where(scores > -1e6, scores, -8.0)),
    ),
    "zeros": (
        lambda x, mask: ops.sqrt(x * x + 1e-4),
        "Sqrt",
        lambda square: ops.sqrt(ops.maximum(square, 1.1e-4)),
    ),
    "large numbers": (lambda x, mask: ops.exp(x), "Exp", lambda x: ops.exp(ops.minimum(x, 9.0))),
    "tiny numbers": (
        lambda x, mask: ops.reciprocal(x),
        "Reciprocal",
        lambda x: ops.reciprocal(x + 1e-38),
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_differs_on_hostile_inputs_only_is_found(name: str) -> None:
    """Each wrong rule is right on normal numbers, or within the bound there."""
    function, op_type, wrong = HOSTILE[name]

    def rule(node: ir.Node) -> Outcome:
        return Rewrite(wrong(*map(adopt, node.inputs)), node.inputs, "wrong")

    model = build(function, x=X, mask=gg.float32["s", 8])
    report = Engine(verify=compare, context=infer_model(model)).run(
        "wrong", model, {op_type: [rule]}
    )
    assert [site.rolled_back for site in report.sites] == [True]


def test_what_one_operand_makes_of_another_is_kept() -> None:
    """r·r = r / x, but only where r = 1 / x."""

    def function(x: Any) -> Any:
        r = ops.reciprocal(x)
        return r * r, r

    def quotient(node: ir.Node) -> Outcome:
        a, r = map(adopt, node.inputs)
        x = adopt(r.value.producer().inputs[0])
        return Rewrite(a / x, [a, x], "quotient")

    model = build(function, x=X)
    report = Engine(verify=compare, context=infer_model(model)).run(
        "right", model, {"Mul": [quotient]}
    )
    assert [(site.status, site.reason) for site in report.sites] == [("fired", "quotient")]


def test_equal_rows_and_infinite_masks_find_nothing_wrong_with_what_is_right() -> None:
    def again(node: ir.Node) -> Outcome:
        op = TABLE["", node.op_type]
        inputs = [adopt(x) for x in node.inputs]
        return Rewrite(op.expand(inputs, read_attributes(op, node)), node.inputs, "its body")

    def function(x: Any, mask: Any) -> Any:
        return ops.layer_norm(ops.softmax(x + mask)), ops.rms_norm(x), ops.gelu(x)

    model = build(function, x=X, mask=gg.float32["s", 8])
    names = ("Softmax", "LayerNormalization", "RMSNormalization", "Gelu")
    rules: Any = {name: [again] for name in names}
    report = Engine(verify=compare, context=infer_model(model)).run("bodies", model, rules)
    assert [(site.status, site.reason) for site in report.sites] == [("fired", "its body")] * 4


def test_a_replacement_of_another_type_is_refused() -> None:
    def to_half(node: ir.Node) -> Outcome:
        return Rewrite(ops.cast(adopt(node.inputs[0]), to=ir.DataType.FLOAT16), [], "half")

    def to_sum(node: ir.Node) -> Outcome:
        return Rewrite(ops.reduce_sum(adopt(node.inputs[0]), [0], keepdims=0), [], "sum")

    for rule, reason in ((to_half, "the dtype would change"), (to_sum, "the rank would change")):
        model = three_relus()
        before = short_text(model)
        report = Engine(context=infer_model(model)).run("wrong", model, {"Relu": [rule]})
        assert all(reason in site.reason for site in report.sites)
        assert len(report.sites) == 3
        assert short_text(model) == before


def test_dropped_recordings_leave_no_uses_behind() -> None:
    def misses(node: ir.Node) -> Outcome:
        ops.relu(ops.relu(adopt(node.inputs[0])))
        return Miss("after recording two nodes")

    model = three_relus()

    def uses() -> list[int]:
        values = (value for node in model.graph for value in node.inputs)
        return [len(value.uses()) for value in values if value is not None]

    before = uses()
    Engine(context=infer_model(model)).run("misses", model, {"Relu": [misses]})
    assert uses() == before


def test_invariants_hold_after_every_pass_and_models_run(monkeypatch: Any) -> None:
    names = []

    def after(name: str, model: ir.Model) -> None:
        verify(model, name)
        run_plain(model, {"x": np.ones((1, 3, 16), np.float32)})
        names.append(name)

    optimize(block(causal=True), after_each=after)
    assert tuple(names) == PIPELINE


@pytest.mark.parametrize("fault", ["order", "name", "stray", "stray of an input"])
def test_invariants_find_a_broken_graph(fault: str) -> None:
    model = three_relus()
    first, second, _ = list(model.graph)
    if fault == "order":
        model.graph.remove(first)
        model.graph.insert_after(second, first)
    elif fault == "name":
        second.outputs[0].name = first.outputs[0].name
    elif fault == "stray":
        ir.node("Relu", [first.outputs[0]])
    else:
        ir.node("Relu", [model.graph.inputs[0]])
    with pytest.raises(GraphgenError, match="after fault"):
        verify(model, "fault")


def test_the_same_input_gives_the_same_text() -> None:
    assert short_text(optimize(block()).model) == short_text(optimize(block()).model)


def test_unknown_names_are_refused() -> None:
    with pytest.raises(GraphgenError, match=r"read a file with gg\.load first"):
        optimize("block.onnx")
    with pytest.raises(
        GraphgenError, match="target is 'npu'; choose 'cpu', 'cuda', 'webgpu' or 'official'"
    ):
        optimize(block(), target="npu")
    with pytest.raises(GraphgenError, match="there is no pass 'fuse_everything'"):
        optimize(block(), passes=["fuse_everything"])


@pytest.mark.parametrize("stride", [10, 320])
def test_a_site_behind_convolutions_with_strides_is_verified(stride: int) -> None:
    """Of a short sound they leave nothing, and the runtime refuses it."""

    def body(x: Any) -> Any:
        kernel = np.ones((4, 1, stride + 80), np.float32) / stride
        y = ops.conv(x, kernel, kernel_shape=[stride + 80], strides=[stride])
        return y * 0.5 * (1.0 + ops.erf(y / 2.0**0.5))

    model = build(body, primitives=True, x=gg.float32["b", 1, "t"])
    best = optimize(model, verify=True)
    [site] = next(p.sites for p in best.report.passes if p.name == "fuse_activation")
    assert (site.status, site.reason) == ("fired", "Gelu")
    assert count_operators(best.model) == {"Conv": 1, "Gelu": 1}


def test_equal_bits_need_no_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """Computing it takes longer than all else, and most rewrites change no bit."""
    asked = list[ir.Model]()

    def asks(model: ir.Model, feeds: Any) -> Any:
        asked.append(model)
        return evaluate(model, feeds)

    monkeypatch.setattr("graphgen.passes.verify.evaluate", asks)

    def with_scale(scale: float) -> list[str]:
        def rule(node: ir.Node) -> Outcome:
            x = adopt(node.inputs[0])
            return Rewrite(ops.exp(x) * scale, [x], "scaled")

        model = build(ops.exp, x=X)
        report = Engine(verify=compare, context=infer_model(model)).run("", model, {"Exp": [rule]})
        return [site.status for site in report.sites]

    assert with_scale(1.0) == ["fired"] and asked == []
    assert with_scale(1.0 + 2e-6) == ["missed"] and asked


def test_zeros_and_infinities_do_not_pass_for_equal() -> None:
    def zero(node: ir.Node) -> Outcome:
        x = adopt(node.inputs[0])
        return Rewrite(x * 0.0, [x], "wrong")

    model = build(ops.exp, x=X)
    report = Engine(verify=compare, context=infer_model(model)).run("wrong", model, {"Exp": [zero]})
    assert [site.status for site in report.sites] == ["missed"]
    before, after = np.array([[1, 2, np.inf]], "f"), np.array([[5, 9, np.inf]], "f")
    assert _differ(before, after, lambda: before) is not None
    assert _differ(before, before, lambda: before) is None
    assert _differ(before, np.array([[1, 2, 3]], "f"), lambda: before) is not None


def test_outputs_that_are_left_out_have_no_names() -> None:
    x, gain = (ir.val(n, ir.DataType.FLOAT16, s) for n, s in (("x", ["b", 3, 8]), ("g", [8])))
    node = ir.node("SkipLayerNormalization", [x, x, gain], domain="com.microsoft", num_outputs=4)
    for value, name in zip(node.outputs, ("y", "", "", "sum"), strict=True):
        value.name, value.type, value.shape = name, x.type, x.shape
    imports = {"": 23, "com.microsoft": 1}
    ends = [node.outputs[0], node.outputs[3]]
    model = ir.Model(ir.Graph([x, gain], ends, nodes=[node], opset_imports=imports), ir_version=10)
    assert count_operators(optimize(model).model) == {"com.microsoft::SkipLayerNormalization": 1}


def test_products_reports_what_verification_undid() -> None:
    """In the last round too, in which nothing fires; and no site twice."""
    model = build(
        lambda x, y: (
            ops.gemm(ops.transpose(x, perm=[1, 0]), y),
            ops.gemm(ops.transpose(y, perm=[1, 0]), x),
        ),
        x=gg.float32[4, 3],
        y=gg.float32[4, 5],
    )
    answers = iter([None, "they differ"])
    report = products(model, Engine(verify=lambda *_: next(answers)))
    assert sorted((site.status, site.rolled_back) for site in report.sites) == [
        ("fired", False),
        ("missed", True),
    ]
    report = products(model, Engine(verify=lambda *_: "they differ"))
    assert [(site.reason, site.rolled_back) for site in report.sites] == [("they differ", True)]


def test_garbage_is_collected_again_after_each_pass_and_after_an_error():
    seen = []

    def failing(model, engine):
        seen.append(gc.isenabled())
        raise GraphgenError("no")

    with pytest.raises(GraphgenError, match="no"):
        run_passes(block(), [Pass("failing", failing)], Engine())
    assert (seen, gc.isenabled()) == ([False], True)
    gc.disable()  # by whoever calls
    try:
        run_passes(block(), [Pass("nothing", lambda *_: PassReport("nothing"))], Engine())
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_attention_behind_windows_is_verified_at_sizes_at_which_they_fit() -> None:
    text = """<ir_version: 10, opset_import: ["": 17]>
    g (float[batch,1,time] x, float[8,1,400] w) => (float[b,n,8] y) {
      c = Conv <strides = [320]> (x, w) q = Transpose <perm = [0, 2, 1]> (c)
      s = MatMul (q, c) a = Softmax (s) y = MatMul (a, q) }"""
    best = optimize(ir.from_proto(onnx.parser.parse_model(text)), verify=True)
    assert count_operators(best.model)["Attention"] == 1
    sizes = [size for way in sizes_of(best.model, 5, long=True) for size in way.values()]
    assert max(sizes) > 720


def test_a_number_made_of_sizes_is_not_drawn() -> None:
    text = """<ir_version: 10, opset_import: ["": 17]>
    g (float[batch,4] x) => (float[m,2] y) {
      s = Shape (x) f = Cast <to = 1> (s) h = Mul (f, k) i = Cast <to = 7> (h)
      r = Relu (x) q = Relu (r) y = Reshape (q, i) }"""
    proto = onnx.parser.parse_model(text)
    half = np.array([2, 0.5], np.float32)
    proto.graph.initializer.append(onnx.numpy_helper.from_array(half, "k"))
    model = ir.from_proto(proto)
    infer_model(model)
    mul = next(node for node in model.graph if node.op_type == "Mul")
    relu = next(node for node in model.graph if node.op_type == "Relu")
    assert _of_sizes(mul.outputs[0]) and not _of_sizes(relu.outputs[0])


def far_from_named_sizes() -> ir.Model:
    """Rows that are chosen by what they hold: their number has no name in 100 nodes below it."""
    deep = [f"h{i + 1} = {'Tanh' if i % 9 else 'Relu'}(h{i})" for i in range(99)]
    text = f"""<ir_version: 10, opset_import: ["" : 23]>
    f (float[n, 8] x) => (float[r, k, 4] y)
      <int64[1] zero = {{0}}, int64[1] last = {{1}}, int64[2] two = {{2, 4}}> {{
      largest = ReduceMax <keepdims = 0> (x)  sums = ReduceSum <keepdims = 0> (x, last)
      small = Less(sums, largest)  h0 = Compress <axis = 0> (x, small)
      {" ".join(deep)}
      sizes = Shape(h99)  few = Gather(sizes, zero)  whole = Concat <axis = 0> (few, two)
      y = Reshape(h99, whole)
    }}"""
    return ir.from_proto(onnx.parser.parse_model(text))


@pytest.mark.wrong_rewrites
def test_sizes_without_names_are_those_of_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else each part holds all nodes above it, and time grows with their number squared."""
    parts = list[int]()

    def watched(name: str, before: ir.Model, after: ir.Model, *rest: Any, **how: Any) -> str | None:
        parts.append(before.graph.num_nodes())
        return compare_models(name, before, after, *rest, **how)

    monkeypatch.setattr("graphgen.passes.verify.compare_models", watched)
    model = far_from_named_sizes()
    *_, wrong, last = [node for node in model.graph if node.op_type == "Relu"]

    def spelled(node: ir.Node) -> Outcome:
        """Nothing is below 0 here but in the first, and yet a Relu is not the same as nothing."""
        x = adopt(node.inputs[0])
        return Rewrite(x * 1.0 if node is wrong else ops.relu(ops.relu(x)), [x])

    def turned(node: ir.Node) -> Outcome:
        x, sizes = map(adopt, node.inputs)
        return Rewrite(ops.reshape(x, [2, -1, 4]), [x, sizes])

    verifier = partial(compare, memory=Memory(), repros=tmp_path)
    engine = Engine(verify=verifier, context=infer_model(model))
    report = engine.run("", model, {"Relu": [spelled], "Reshape": [turned]})
    reasons = {site.node: site.reason for site in report.sites if site.rolled_back}
    assert [*reasons] == [wrong, model.graph.node(-1)]
    assert "relative RMS difference" in reasons[wrong]
    told = reasons[model.graph.node(-1)]
    assert re.match(r"the result is float32\[2, \d, 4], was float32\[\d, 2, 4]; ", told)
    [script] = tmp_path.glob("*-Reshape/run.py")
    command = [sys.executable, str(script)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert re.search(r"^shape \(2, \d, 4\), was \(\d, 2, 4\)$", done.stdout, re.MULTILINE)
    assert report.count("fired") == 10 and last.graph is None
    assert max(parts) < 70 < model.graph.num_nodes()


@pytest.mark.wrong_rewrites
def test_sequences_are_compared() -> None:
    """They were a crash."""
    text = """<ir_version: 10, opset_import: ["": 21]>
    g (float[n, 4] x) => (seq(float[n, 4]) y) {
      a = Relu(x) b = Relu(x) c = Exp(x) d = SequenceConstruct(a, c) y = SequenceInsert(d, b) }"""
    model = ir.from_proto(onnx.parser.parse_model(text))
    best = optimize(model, verify=True)
    assert count_operators(best.model)["Relu"] == 1
    assert [s.rolled_back for p in best.report.passes for s in p.sites] == [False]

    def shorter(model: ir.Model) -> Replacement:
        y = model.graph.outputs[0]
        model.graph.outputs[0] = y.producer().inputs[0]
        return Replacement(model, "the last is left out", infer_model(model))

    engine = Engine(verify_whole=compare_models, context=infer_model(model))
    [report] = run_passes(model, [whole("shorter", shorter)], engine)
    assert report.sites[-1].reason == "the sequences hold 2 tensors, held 3"
