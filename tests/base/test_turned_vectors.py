"""Aᵀ v: the runtime's kernel of a transposed matrix and a vector is wrong; nothing reaches it."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from small_models import relative_rms, run_plain

import graphgen as gg
from graphgen import nn, ops
from graphgen.export.write import to_bytes
from graphgen.header import turns_for_vector
from graphgen.targets import target

RNG = np.random.default_rng(0)
FEEDS = {
    "a": RNG.standard_normal((3, 8, 6)).astype(np.float32),
    "v": RNG.standard_normal(8).astype(np.float32),
}
WANTED = np.swapaxes(FEEDS["a"], 1, 2) @ FEEDS["v"]
TURNED = """<ir_version: 8, opset_import: ["": 18]> g (float[3, 8, 6] a, float{shape} v)
    => (float[3, n] y) {{ t = Transpose <perm = {perm}> (a) {before} y = MatMul (t, {right}) }}"""
PERM = [0, 2, 1]


def turned(
    shape: Any = (8,), perm: Any = PERM, before: str = "", right: str = "v"
) -> onnx.ModelProto:
    return onnx.parser.parse_model(
        TURNED.format(shape=[*shape], perm=[*perm], before=before, right=right)
    )


def test_the_runtime_is_still_wrong() -> None:
    """Where this fails, the runtime was mended: then the entry of `REFUSED` needs a version."""
    model = ir.from_onnx_text("""<ir_version: 8, opset_import: ["": 18, "com.microsoft": 1]>
        g (float[3, 8, 6] a, float[8] v) => (float[3, 6] y) {
            y = com.microsoft.FusedMatMul <transA = 1> (a, v) }""")
    assert relative_rms(WANTED, run_plain(model, FEEDS)[0]) > 0.1
    told = "refuses FusedMatMul of a transposed matrix and a vector"
    assert told in str(target("cpu").missing(model.graph[0]))
    best = gg.optimize(model, verify=True)
    assert [node.op_type for node in best.model.graph] == ["MatMul"]
    assert relative_rms(WANTED, gg.Session(best)(FEEDS)[0]) < 1e-6


def test_optimized_it_is_a_product_with_the_vector_in_front(tmp_path: Path) -> None:
    onnx.save(turned(), tmp_path / "m.onnx")
    best = gg.optimize(gg.load(tmp_path / "m.onnx"), verify=True)
    assert [node.op_type for node in best.model.graph] == ["MatMul"]
    assert [value.name for value in best.model.graph[0].inputs] == ["v", "a"]
    assert relative_rms(WANTED, gg.Session(best)(FEEDS)[0]) < 1e-6
    onnx.save(turned((6,), [0, 1, 2]), tmp_path / "m.onnx")  # another order of axes stays
    best = gg.optimize(gg.load(tmp_path / "m.onnx"))
    assert [value.name for value in best.model.graph[0].inputs] == ["a", "v"]


@pytest.mark.parametrize(
    ("how", "at_risk"),
    [
        ({}, True),
        ({"before": "w = Relu (v)", "right": "w"}, True),  # of a rank that the file does not say
        ({"shape": (8, 2)}, False),
        ({"shape": (3,), "perm": (2, 1, 0)}, True),  # two of them might make one that is wrong
    ],
)
def test_a_session_on_the_file_itself_is_right(how: dict[str, Any], at_risk: bool) -> None:
    model = turned(**how)
    assert turns_for_vector(model.SerializeToString()) == at_risk
    session = gg.Session(model.SerializeToString(), provider="cpu")
    assert ("MatmulTransposeFusion" in session.plan.disabled_optimizers) == at_risk
    v = RNG.standard_normal(how.get("shape", (8,))).astype(np.float32)
    a = np.transpose(FEEDS["a"], how.get("perm", PERM))
    right = np.maximum(v, 0) if "before" in how else v
    assert relative_rms(a @ right, session(a=FEEDS["a"], v=v)[0]) < 1e-6


BODIES = {
    "in a branch": (
        "y = If (c) <then_branch = t () => (float[3, n] p) { t = Transpose <perm = [0, 2, 1]> (a)"
        " p = MatMul (t, v) }, else_branch = e () => (float[3, n] q)"
        " { q = MatMul (b, v) }>",
        True,
    ),
    "in a function": ("y = own.turned (a, v)", True),
    "as one": ("t = Transpose <perm = [0, 2, 1]> (a) u = Identity (t) y = MatMul (u, v)", True),
    "scaled": (
        "t = Transpose <perm = [0, 2, 1]> (a) s = Constant <value_float = 2.0> () u = Mul (t, s)"
        " y = MatMul (u, v)",
        True,
    ),
    "in two turns": (
        "t = Transpose <perm = [2, 0, 1]> (a) u = Transpose <perm = [1, 0, 2]> (t)"
        " y = MatMul (u, v)",
        True,
    ),
    "moved": (  # the runtime lets the two cancel each other
        "t = Transpose <perm = [0, 2, 1]> (a) u = Relu (t) w = Transpose <perm = [0, 2, 1]> (u)"
        " z = ReduceSum (w) x = MatMul (u, v) y = Add (x, z)",
        True,
    ),
    "cast": (
        "d = Cast <to = 11> (a) t = Transpose <perm = [0, 2, 1]> (d) u = Cast <to = 1> (t)"
        " y = MatMul (u, v)",
        True,
    ),
    "elsewhere": ("t = Transpose <perm = [1, 0]> (m) x = MatMul (m, t) y = MatMul (b, v)", False),
}


@pytest.mark.parametrize("body", BODIES)
def test_it_is_right_wherever_the_runtime_makes_one_of_them(body: str, tmp_path: Path) -> None:
    text, at_risk = BODIES[body]
    model = onnx.parser.parse_model(
        f"""<ir_version: 10, opset_import: ["": 18, "own": 1]> g (float[3, 8, 6] a, float[8] v,
        float[3, 6, 8] b, float[4, 4] m, bool c) => (float[k, n] y) {{ {text} }}
        <domain: "own", opset_import: ["": 18]> turned (a, v) => (y) {{
            t = Transpose <perm = [0, 2, 1]> (a) y = MatMul (t, v) }}"""
    )
    if "own" not in text:
        del model.functions[:]
    onnx.save(model, tmp_path / "m.onnx")
    feeds = {**FEEDS, "b": np.swapaxes(FEEDS["a"], 1, 2).copy(), "m": np.eye(4, dtype="f")}
    feeds["c"] = np.array(True)
    [wanted] = gg.Session(tmp_path / "m.onnx", optimize=False, provider="cpu")(feeds)
    session = gg.Session(tmp_path / "m.onnx", provider="cpu")
    assert relative_rms(wanted, session(feeds)[0]) < 1e-6
    assert ("MatmulTransposeFusion" in session.plan.disabled_optimizers) == at_risk
    best = to_bytes(gg.optimize(gg.load(tmp_path / "m.onnx")).model)
    others = ort.InferenceSession(best, providers=["CPUExecutionProvider"])  # as any program
    assert relative_rms(wanted, others.run(None, feeds)[0]) < 1e-6


def test_a_batch_that_is_turned_and_cast_does_not_end_the_process() -> None:
    """As onnxruntime 1.32 does, in making one operator of it."""
    model = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["": 18]>
        g (float16[3, 8, 6] a, float[6, 2] w) => (float[8, 3, 2] y) {
            t = Transpose <perm = [1, 0, 2]> (a) u = Cast <to = 1> (t) y = MatMul (u, w) }""")
    a, w = FEEDS["a"].astype(np.float16), np.ones((6, 2), np.float32)
    [found] = gg.Session(model.SerializeToString(), provider="cpu")(a=a, w=w)
    np.testing.assert_allclose(found, np.swapaxes(a, 0, 1).astype("f") @ w, rtol=1e-5, atol=1e-5)


def test_weights_and_other_options_count(tmp_path: Path) -> None:
    model = turned()
    del model.graph.input[1]
    model.graph.initializer.append(onnx.numpy_helper.from_array(FEEDS["v"], "v"))
    onnx.save(model, tmp_path / "m.onnx")
    assert turns_for_vector(tmp_path / "m.onnx")
    key = "optimization.disable_specified_optimizers"
    session = gg.Session(tmp_path / "m.onnx", options={key: "GeluFusion"}, provider="cpu")
    assert session.plan.disabled_optimizers == ("GeluFusion", "MatmulTransposeFusion")
    assert relative_rms(WANTED, session(a=FEEDS["a"])[0]) < 1e-6


class Norm(nn.Module):
    """x W / |Wᵀ v|, as of a spectral norm."""

    def __init__(self) -> None:
        self.linear = nn.Linear(6, 4)

    def __call__(self, x: Any, v: Any) -> Any:
        turned = ops.transpose(self.linear.weight, perm=[1, 0])
        return {"logits": self.linear(x) / ops.reduce_l2(ops.matmul(turned, v), [0])}


def test_a_training_graph_has_no_such_product(tmp_path: Path) -> None:
    """Neither the file, which others open, nor what the trainer makes of it."""
    model = gg.build(Norm(), x=gg.float32["n", 6], v=gg.float32[6])
    gg.artifacts(model, tmp_path / "art")
    file = onnx.load(tmp_path / "art/training_model.onnx")
    assert not turns_for_vector(file.SerializeToString())
    feeds = {"x": FEEDS["a"][0, :3, :6], "v": FEEDS["v"][:6]}
    trainer = gg.Trainer(tmp_path / "art", threads=1)
    batch = {**feeds, "labels": np.array([0, 1, 3])}
    before = trainer.evaluate([batch])
    [line] = trainer.fit([batch], steps=1, progress=False)
    assert line["loss"] == pytest.approx(before, rel=1e-6)
