"""Small models that several tests share."""

import re
from collections.abc import Iterable
from typing import Any

import numpy as np
import onnx.parser
import onnx_ir as ir
import onnxruntime as ort

import graphgen as gg
from graphgen import nn
from graphgen.edit import to_model
from graphgen.export.write import to_bytes
from graphgen.processor import processor
from graphgen.record import recording


class RowClassifier(nn.Module):
    """Products of rows of tokens, and one of a vector for each row."""

    def __init__(self) -> None:
        self.embedding, self.head = nn.Embedding(11, 8), nn.Linear(8, 3)
        self.stack = nn.Encoder(8, layers=2, num_heads=2, dropout=0.0, hidden=12)

    def __call__(self, ids: Any) -> Any:
        return {"logits": self.head(self.stack(self.embedding(ids))[:, 0])}


class Block(nn.Module):
    """A pre-norm block with everything that the passes fuse."""

    def __init__(
        self, features: int, *, norm: str = "layer", activation: str = "gelu", **heads: Any
    ):
        norms: Any = {"layer": nn.LayerNorm, "rms": nn.RMSNorm}
        self.norm1, self.norm2 = norms[norm](features), norms[norm](features)
        self.attention = nn.Attention(features, **heads)
        self.feed_forward = nn.FeedForward(features, 2 * features, activation=activation)

    def __call__(self, x: Any, mask: Any = None) -> Any:
        x = x + self.attention(self.norm1(x), mask=mask)
        return x + self.feed_forward(self.norm2(x))


U = 2.0**-24  # what a rounding to float32 is off, relative to its result, at most


def order_of_sums(n: int) -> float:
    """What two orders of a float32 sum of `n` terms of random signs differ by, in relative RMS.

    u √(n/3): a partial sum of k terms has the size √k, and its rounding is off by u/√3 of that,
    independently of the others, which makes u √(n/6) of the whole for one order (Higham, Accuracy
    and Stability of Numerical Algorithms, 4.2). Sums one behind the other add their n.
    """
    return float(U * np.sqrt(n / 3))


ROUNDING = 5e-6
"""How far two right float32 results of these tests' models may be apart, in relative RMS.

An instruction set chooses the order of a sum, and no more. No model here sums 2,400 terms from an
input to an output (the fixtures: 720), so `order_of_sums` is below 1.7e-6; the factor of three is
for what a softmax of large scores or a norm of a small variance makes of it.
"""


def block(
    features: int = 16, *, primitives: bool = True, mask: bool = False, **options: Any
) -> ir.Model:
    """One block on float[batch, seq, features]; as primitives there is something to fuse."""
    specs: dict[str, Any] = {"x": gg.float32["batch", "seq", features]}
    if mask:
        specs["mask"] = gg.bool_["batch", "seq"]
    options = {"num_heads": 4, **options}
    return gg.build(vary(Block(features, **options)), primitives=primitives, weights=None, **specs)


def as_in_a_file(function: Any, *, primitives: bool = False, **specs: Any) -> ir.Model:
    """What `gg.build` makes of a function, with sizes as in a file: two names may be one size."""
    with recording(primitives=primitives) as tape:
        ys = function(**{name: tape.input(name, s.dtype, s.shape) for name, s in specs.items()})
        if not isinstance(ys, tuple):
            return to_model(tape, {"output": ys})
        return to_model(tape, {f"output_{i}": y for i, y in enumerate(ys)})


def namesakes(alpha: float, last: str) -> ir.Model:
    """A chain whose nodes have one name; `alpha` is of the second of three that are alike."""
    value, nodes = ir.val("x", ir.DataType.FLOAT, [4]), list[ir.Node]()
    inputs = [value]
    for given in (0.1, alpha, 0.1, None):
        attributes = {} if given is None else {"alpha": given}
        nodes.append(ir.node(last if given is None else "LeakyRelu", [value], attributes))
        nodes[-1].name, value = "act", nodes[-1].outputs[0]
        value.name, value.type, value.shape = f"y{len(nodes)}", inputs[0].type, inputs[0].shape
    graph = ir.Graph(inputs, [value], nodes=nodes, opset_imports={"": 23}, name="g")
    return ir.Model(graph, ir_version=10)


def vary(module: Any) -> Any:
    """Weights of high variance: with small ones, wrong wiring hardly shows."""
    from graphgen.nn.module import Parameter, members

    for _, item in members(module):
        if isinstance(item, Parameter):
            item.initialize = lambda rng, shape: (rng.standard_normal(shape) * 0.7).astype(
                np.float32
            )
    return module


def run_plain(model: ir.Model | bytes, feeds: dict[str, Any]) -> list[Any]:
    """The outputs of a model, or of a file, in ONNX Runtime with its own optimizations off."""
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    file = model if isinstance(model, bytes) else to_bytes(model)
    session = ort.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    return list(session.run(None, feeds))


def is_cut_off(op_type: str, operands: Iterable[Any]) -> bool:
    """Whether a product of bytes may have other integers here than on other processors.

    That is one with a right operand of int8, where `Processor.saturates`.
    """
    if not re.search("MatMulInteger|MatMul$|QGemm|ConvInteger|QLinearConv", op_type):
        return False
    signed = (x.dtype in (np.int8, ir.DataType.INT8) and x.shape != () for x in operands)
    return any(signed) and processor().saturates


def relative_rms(wanted: Any, given: Any) -> float:
    """√(mean (given - wanted)²) / √(mean wanted²)."""
    wanted, given = np.asarray(wanted, np.float64), np.asarray(given, np.float64)
    assert wanted.shape == given.shape
    error, scale = np.sqrt(np.mean((given - wanted) ** 2)), np.sqrt(np.mean(wanted**2))
    return 0.0 if error == 0 else float(error / scale)


def sums_alike(exact: Any, reference: Any, given: Any) -> bool:
    """Whether `given` is `reference` with its float32 sums in another order: it errs no more.

    The order of a sum, which a processor chooses by the width of its registers, changes its
    rounding error but not that error's size (`order_of_sums`). How much of it arrives at the result
    is a matter of the function, so the same for both. The scale is therefore what `reference`
    itself, at this length and on this processor, is off `exact`, in float64: its relative RMS,
    twice, since a few thousand numbers show that of a heavy tail only roughly.
    """
    return relative_rms(exact, given) < 2 * relative_rms(exact, reference) + U


def loops(which: str) -> ir.Model:
    """Two loops, one in the other, that add the number of the outer round, i, or the inner, j."""
    written = """
        <ir_version: 9, opset_import: ["" : 18]>
        g (float[4] x) => (float[4] y) <int64 n = {3}, bool go = {1}> {
            y = Loop (n, go, x) <body = outer (int64 i, bool a, float[4] u)
                => (bool b, float[4] w) {
                b = Identity (a)
                w = Loop (n, go, u) <body = inner (int64 j, bool c, float[4] v)
                    => (bool d, float[4] z) {
                    d = Identity (c)
                    f = Cast <to = 1> (WHICH)
                    z = Add (v, f)
                }>
            }>
        }"""
    return ir.from_proto(onnx.parser.parse_model(written.replace("WHICH", which)))


def pretend_no_placement(monkeypatch: Any) -> None:
    """As if sessions ran on a provider of a runtime that does not tell where nodes run."""
    monkeypatch.setattr("graphgen.runtime.CPU", "AnotherProvider")
    monkeypatch.setattr("graphgen.runtime.can_record", lambda ort: False)
