"""The optimizers: their settings, the official optimizer graph, and our own update.

The official graph holds one node of the official runtime, over sequences of tensors. Training on
the stock runtime reads the settings from that graph and runs `update()`: flat chunks, bound in
place, which is also faster.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import numpy as np
import onnx
from onnx import helper

from graphgen.errors import GraphgenError


@dataclass(frozen=True)
class AdamW:
    """Adam with decoupled weight decay (Loshchilov & Hutter, arXiv 1711.05101), as in torch.

    m ← β₁ m + (1 - β₁) g, v ← β₂ v + (1 - β₂) g²,
    p ← p (1 - η λ) - η / (1 - β₁ᵗ) · m / (√(v / (1 - β₂ᵗ)) + ε), at step t = 1, 2, ... with the
    learning rate η. λ is 0 for parameters whose name matches `no_decay`, a regular expression: only
    in the profile `stock`, because the official optimizer has one group of parameters. With
    `clip_norm` c, g is first scaled by min(1, c / (‖g‖ + 1e-6)), with ‖g‖ over all parameters.

    With weight_decay=0 it is Adam (Kingma & Ba, arXiv 1412.6980), and torch.optim.Adam without its
    weight_decay: the official optimizer has no node for decay that is added to the gradient.
    """

    weight_decay: float = 0.01
    betas: tuple[float, float] = (0.9, 0.999)
    epsilon: float = 1e-8
    clip_norm: float | None = None
    no_decay: str | None = None

    moments: ClassVar[tuple[str, ...]] = ("m", "v")

    def __post_init__(self) -> None:
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise GraphgenError(f"{self}: betas must be two numbers of at least 0 and below 1")
        if not 0 <= self.weight_decay < math.inf or not 0 < self.epsilon < math.inf:
            raise GraphgenError(
                f"{self}: weight_decay must be at least 0 and epsilon positive, both finite"
            )
        _check_clip_norm(self)
        try:
            re.compile(self.no_decay or "")
        except re.error as error:
            raise GraphgenError(f"{self}: no_decay must be a regular expression: {error}") from None

    def decays(self, name: str) -> bool:
        """Whether the weight decay applies to the parameter of this name."""
        return self.no_decay is None or not re.search(self.no_decay, name)

    def official(self) -> onnx.ModelProto:
        """The graph of optimizer_model.onnx.

        `no_decay` is an attribute of its node that the official runtime does not know, so it
        refuses the file; otherwise it would let all parameters decay.
        """
        node = (
            "AdamWOptimizer <alpha: float = {}, beta: float = {}, epsilon: float = {}, "
            "weight_decay: float = {}, adam_mode: int = 0, correct_bias: int = 1> (learning_rate, "
            "step, params, {{gradients}}, first_order_moments, second_order_moments)"
        ).format(*map(float, (*self.betas, self.epsilon, self.weight_decay)))
        moments = ["first_order_moments", "second_order_moments"]
        model = _official(node, moments, _ADAMW, self.clip_norm)
        if self.no_decay is not None:
            model.graph.node[-1].attribute.append(helper.make_attribute("no_decay", self.no_decay))
            model.functions[-1].attribute.append("no_decay")
        return model

    def update(self, *, scaled: bool) -> onnx.ModelProto:
        """One step on a chunk of n elements; `scalars` gives what changes from step to step.

        Each of p, m and v is read before it is written, so p_next may be p's own buffer. Each node
        is a pass over memory: 13, and one more if g is `scaled`. The correction c of √v is in
        `rate` and in ε: rate m / (c √v + ε) = (rate / c) m / (√v + ε / c).
        """
        a, b = self.betas
        given, scale = ("gradient", "gradient = Mul (g, scale)") if scaled else ("g", "")
        return onnx.parser.parse_model(f"""
            <ir_version: 8, opset_import: ["" : 17]>
            adamw (float[n] p, float[n] m, float[n] v, float[n] g, {"float scale," * scaled}
                   float decay, float rate, float epsilon) => (float[n] p_next, float[n] m_next,
                   float[n] v_next)
            <float a = {{{a!r}}}, float b = {{{b!r}}}, float a1 = {{{1 - a!r}}},
             float b1 = {{{1 - b!r}}}> {{
                {scale}
                m_old = Mul (m, a)
                m_new = Mul ({given}, a1)
                m_next = Add (m_old, m_new)
                square = Mul ({given}, {given})
                v_old = Mul (v, b)
                v_new = Mul (square, b1)
                v_next = Add (v_old, v_new)
                root = Sqrt (v_next)
                below = Add (root, epsilon)
                above = Mul (m_next, rate)
                change = Div (above, below)
                p_old = Mul (p, decay)
                p_next = Sub (p_old, change)
            }}""")

    def scalars(self, learning_rate: float, step: int) -> dict[str, float]:
        """decay, rate and epsilon of the update at `step`, counted from 1."""
        a, b = self.betas
        correction = 1.0 / math.sqrt(1.0 - b**step)
        return {
            "decay": 1.0 - learning_rate * self.weight_decay,
            "rate": learning_rate / (1.0 - a**step) / correction,
            "epsilon": self.epsilon / correction,
        }


@dataclass(frozen=True)
class SGD:
    """p ← p - η g, with the learning rate η; `clip_norm` as for `AdamW`."""

    clip_norm: float | None = None

    moments: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        _check_clip_norm(self)

    def decays(self, name: str) -> bool:
        """Always: there is no decay to exclude a parameter from."""
        return True

    def official(self) -> onnx.ModelProto:
        """The graph of optimizer_model.onnx; the official runtime needs a moment even here."""
        node = "SGDOptimizerV2 (learning_rate, params, {gradients})"
        return _official(node, ["first_order_moments"], _SGD, self.clip_norm)

    def update(self, *, scaled: bool) -> onnx.ModelProto:
        """One step on a chunk of n elements; the scale costs nothing here."""
        return onnx.parser.parse_model("""
            <ir_version: 8, opset_import: ["" : 17]>
            sgd (float[n] p, float[n] g, float scale, float rate) => (float[n] p_next) {
                factor = Mul (rate, scale)
                change = Mul (g, factor)
                p_next = Sub (p, change)
            }""")

    def scalars(self, learning_rate: float, step: int) -> dict[str, float]:
        """The rate of the update."""
        return {"rate": learning_rate}


Optimizer = AdamW | SGD


def named(name: str, *, clip_norm: float | None = None, **settings: Any) -> Optimizer:
    """`adamw`, `adam`, which is AdamW without decay, or `sgd`; a setting of None is not given.

    Raises GraphgenError for a setting that has no effect with it.
    """
    decay = ("weight_decay", "no_decay")
    refused = {"sgd": (*decay, "betas", "epsilon"), "adam": decay, "adamw": ()}[name]
    given = {n: v for n, v in settings.items() if v is not None}
    if wrong := [n for n in refused if n in given]:
        raise GraphgenError(
            f"--{wrong[0].replace('_', '-')} has no effect with {name}; leave it out, or choose "
            "--optimizer adamw"
        )
    if name == "sgd":
        return SGD(clip_norm=clip_norm)
    if name == "adam":
        given["weight_decay"] = 0.0
    if "betas" in given:
        given["betas"] = tuple(given["betas"])
    return AdamW(clip_norm=clip_norm, **given)


def read_optimizer(model: onnx.ModelProto, who: str) -> Optimizer:
    """The settings in an optimizer graph, ours or an official one."""
    nodes = {node.op_type: _attributes(node) for node in model.graph.node}
    clip_norm: float | None = None
    if "InplaceClipGradNorm" in nodes:
        clip_norm = nodes["InplaceClipGradNorm"].get("max_norm", 1.0)
    if "SGDOptimizerV2" in nodes:
        return SGD(clip_norm=clip_norm)
    if "AdamWOptimizer" not in nodes:
        raise GraphgenError(
            f"{who}: it has neither AdamWOptimizer nor SGDOptimizerV2; write the artifacts again"
        )
    given = nodes["AdamWOptimizer"]
    if given.get("adam_mode", 0) != 0 or given.get("correct_bias", 1) != 1:
        raise GraphgenError(
            f"{who}: only adam_mode=0 with correct_bias=1 (torch's AdamW) trains here"
        )
    return AdamW(
        weight_decay=given.get("weight_decay", 1e-2),
        betas=(given.get("alpha", 0.9), given.get("beta", 0.999)),
        epsilon=given.get("epsilon", 1e-8),
        clip_norm=clip_norm,
        no_decay=given["no_decay"].decode() if "no_decay" in given else None,
    )


def in_short(optimizer: Optimizer) -> str:
    """`AdamW(clip_norm=1.0)`: the settings that differ from the defaults.

    Files hold them as float32; 0.9 stands for 0.8999999761581421, which is the same float32.
    """

    def short(x: Any) -> Any:
        if isinstance(x, tuple):
            return tuple(map(short, x))
        return float(str(np.float32(x))) if isinstance(x, float) else x

    given = {f.name: (short(getattr(optimizer, f.name)), f.default) for f in fields(optimizer)}
    shown = ", ".join(f"{name}={x!r}" for name, (x, default) in given.items() if x != default)
    return f"{type(optimizer).__name__}({shown})"


def clip_scale(norm: float, clip_norm: float | None) -> float:
    """The factor for the gradients: min(1, clip_norm / (norm + 1e-6))."""
    return 1.0 if clip_norm is None else min(1.0, clip_norm / (norm + 1e-6))


def _attributes(node: onnx.NodeProto) -> Mapping[str, Any]:
    return {a.name: helper.get_attribute_value(a) for a in node.attribute}


def _check_clip_norm(optimizer: Any) -> None:
    if optimizer.clip_norm is not None and not optimizer.clip_norm > 0:
        raise GraphgenError(f"{optimizer}: clip_norm must be positive, or None for no clipping")


def _official(
    node: str, moments: list[str], function: str, clip_norm: float | None
) -> onnx.ModelProto:
    sequences = ["params", "gradients", *moments]
    inputs = ", ".join(f"seq(float[]) {name}" for name in sequences)
    clip = "" if clip_norm is None else _CLIP_NODE.format(float(clip_norm))
    node = node.format(gradients="clipped" if clip else "gradients")
    model = onnx.parser.parse_model(f"""
        <ir_version: 8, opset_import: ["" : 18, "com.microsoft" : 1]>
        optimizer (float[1] learning_rate, int64[1] step, {inputs}) => (bool[1] updated_flag) {{
            {clip}
            updated_flag = com.microsoft.{node}
        }}
        {_CLIP if clip else ""}
        {function}""")
    model.producer_name = "graphgen"
    return model


_CLIP_NODE = "clipped = com.microsoft.InplaceClipGradNorm <max_norm: float = {}> (gradients)"

# The official operators change their operands in place, which no function can do; these only let
# the stock runtime load the file, and return False: nothing was updated.
_CLIP = """
    <domain: "com.microsoft", opset_import: ["" : 18]>
    InplaceClipGradNorm <max_norm: float = 1.0> (gradients) => (clipped) {
        clipped = Identity (gradients)
    }"""

_SGD = """
    <domain: "com.microsoft", opset_import: ["" : 18]>
    SGDOptimizerV2 (rate, params, gradients) => (updated_flag) {
        always = Equal (rate, rate)
        updated_flag = Not (always)
    }"""

_ADAMW = """
    <domain: "com.microsoft", opset_import: ["" : 18]>
    AdamWOptimizer <alpha: float = 0.9, beta: float = 0.999, epsilon: float = 1e-8,
                    weight_decay: float = 1e-2, adam_mode: int = 0, correct_bias: int = 1>
    (rate, step, params, gradients, m, v) => (updated_flag) {
        always = Equal (step, step)
        updated_flag = Not (always)
    }"""
