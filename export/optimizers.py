"""The optimizers: their settings, the official optimizer graph, and our own update.

The official graph holds one node of the official runtime, over sequences of tensors. Training on
the stock runtime reads the settings from that graph and computes `update()`, on arrays in place
(`graphgen.train.in_place`) or, in a browser, as a graph.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, NamedTuple

import numpy as np
import onnx
from onnx import helper

from graphgen.arguments import checked, searched
from graphgen.errors import GraphgenError
from graphgen.ops.elementwise import sqrt
from graphgen.value import Tensor


@checked
@dataclass(frozen=True)
class Group:
    """Parameters with a learning rate or weight decay of their own: see `AdamW` and `SGD`.

    Args:
        pattern: A regular expression, searched in the parameters' names.
        rate: What the learning rate is multiplied by.
        weight_decay: Instead of the optimizer's, if given.
    """

    pattern: str
    rate: float = 1.0
    weight_decay: float | None = None

    def __post_init__(self) -> None:
        searched(f"{self}: pattern", self.pattern)
        numbers = [self.rate, self.weight_decay or 0.0]
        if not all(type(x) in (int, float) and 0 <= x < math.inf for x in numbers):
            raise GraphgenError(f"{self}: rate and weight_decay must be at least 0 and finite")

    @classmethod
    def read(cls, text: str) -> "Group":
        """Group("embed", rate=0.1) of the text "embed:rate=0.1"; the last colon counts."""
        pattern, _, rest = text.rpartition(":")
        given: dict[str, float] = {}
        for part in rest.split(","):
            name, _, value = part.partition("=")
            try:
                if name not in ("rate", "weight_decay") or name in given:
                    raise ValueError(name)
                given[name] = float(value)
            except ValueError:
                raise GraphgenError(
                    f"group {text!r}: give PATTERN:rate=X,weight_decay=Y, or one of them"
                ) from None
        return cls(pattern, **given)


class Setting(NamedTuple):
    """What one parameter is updated with."""

    rate: float  # a factor
    weight_decay: float


def _settings(groups: Sequence[Group], weight_decay: float, name: str) -> Setting:
    for group in groups:
        if re.search(group.pattern, name):
            own = group.weight_decay
            return Setting(group.rate, weight_decay if own is None else own)
    return Setting(1.0, weight_decay)


def _check_groups(optimizer: "Optimizer") -> None:
    if not all(isinstance(group, Group) for group in optimizer.groups):
        raise GraphgenError(f"{optimizer}: groups must be a tuple of gg.Group")


def _attributes_of(optimizer: "Optimizer") -> dict[str, Any]:
    """What the official node does not know, and therefore refuses."""
    found: dict[str, Any] = {}
    if isinstance(optimizer, AdamW):
        found |= {} if optimizer.no_decay is None else {"no_decay": optimizer.no_decay}
    else:
        own = {n: float(getattr(optimizer, n)) for n in ("momentum", "nesterov", "weight_decay")}
        found |= {name: value for name, value in own.items() if value}
    if optimizer.groups:
        found["groups"] = json.dumps(
            [[g.pattern, g.rate, g.weight_decay] for g in optimizer.groups]
        )
    return found


def check_profile(optimizer: "Optimizer", names: Sequence[str], official: bool) -> None:
    """Raise GraphgenError for what the official runtime lacks, and patterns without an effect."""
    if official and (unknown := _attributes_of(optimizer)):
        what = "no momentum and no decay"
        if unknown.keys() & {"no_decay", "groups"}:
            what = "one group of parameters, which all decay"
        raise GraphgenError(
            f"artifacts: {optimizer}: the official optimizer has {what}; choose profile='stock', "
            f"or leave {min(unknown)} out"
        )
    patterns = {f"group {g.pattern!r}": g.pattern for g in optimizer.groups}
    if isinstance(optimizer, AdamW) and optimizer.no_decay is not None:
        patterns["no_decay"] = optimizer.no_decay
    for what, pattern in patterns.items():
        if not any(re.search(pattern, name) for name in names):
            raise GraphgenError(
                f"artifacts: {optimizer}: {what} matches no trainable parameter; there are "
                + ", ".join(names[:6])
            )


@checked
@dataclass(frozen=True)
class AdamW:
    """Adam with decoupled weight decay (Loshchilov & Hutter, arXiv 1711.05101), as in torch.

    m ← β₁ m + (1 - β₁) g, v ← β₂ v + (1 - β₂) g²,
    p ← p (1 - η λ) - η / (1 - β₁ᵗ) · m / (√(v / (1 - β₂ᵗ)) + ε), at step t = 1, 2, ... with the
    learning rate η. λ is 0 for parameters whose name matches `no_decay`, a regular expression: only
    in the profile `stock`, because the official optimizer has one group of parameters. The same is
    true of `groups`, of which the first whose pattern matches a name gives η a factor, or λ. With
    `clip_norm` c, g is first scaled by min(1, c / (‖g‖ + 1e-6)), with ‖g‖ over all parameters.

    With weight_decay=0 it is Adam (Kingma & Ba, arXiv 1412.6980), and torch.optim.Adam without its
    weight_decay: the official optimizer has no node for decay that is added to the gradient.
    """

    weight_decay: float = 0.01
    betas: tuple[float, float] = (0.9, 0.999)
    epsilon: float = 1e-8
    clip_norm: float | None = None
    no_decay: str | None = None
    groups: tuple[Group, ...] = ()

    moments: ClassVar[tuple[str, ...]] = ("m", "v")

    def __post_init__(self) -> None:
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise GraphgenError(f"{self}: betas must be two numbers of at least 0 and below 1")
        if not 0 <= self.weight_decay < math.inf or not 0 < self.epsilon < math.inf:
            raise GraphgenError(
                f"{self}: weight_decay must be at least 0 and epsilon positive, both finite"
            )
        _check_clip_norm(self)
        searched(f"{self}: no_decay", self.no_decay or "")
        _check_groups(self)

    def setting(self, name: str) -> Setting:
        """What the parameter of this name is updated with."""
        found = _settings(self.groups, self.weight_decay, name)
        spared = self.no_decay is not None and re.search(self.no_decay, name)
        return found._replace(weight_decay=0.0) if spared else found

    def official(self) -> onnx.ModelProto:
        """The graph of optimizer_model.onnx.

        `no_decay` and `groups` are attributes of its node that the official runtime does not know,
        so it refuses the file; otherwise it would let all parameters decay.
        """
        node = (
            "AdamWOptimizer <alpha: float = {}, beta: float = {}, epsilon: float = {}, "
            "weight_decay: float = {}, adam_mode: int = 0, correct_bias: int = 1> (learning_rate, "
            "step, params, {{gradients}}, first_order_moments, second_order_moments)"
        ).format(*map(float, (*self.betas, self.epsilon, self.weight_decay)))
        moments = ["first_order_moments", "second_order_moments"]
        return _official(node, moments, _ADAMW, self)

    def update(
        self,
        *,
        p: Tensor,
        g: Tensor,
        m: Tensor,
        v: Tensor,
        decay: Tensor,
        rate: Tensor,
        epsilon: Tensor,
        scale: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """The next p, m and v; `scalars` gives what changes from step to step, except the scale.

        Each operator is a pass over memory: 13, and one more with a scale. The correction c of √v
        is in `rate` and in ε: rate m / (c √v + ε) = (rate / c) m / (√v + ε / c).
        """
        a, b = self.betas
        g = g if scale is None else g * scale
        m = m * a + g * (1 - a)
        v = v * b + g * g * (1 - b)
        return {"p": p * decay - m * rate / (sqrt(v) + epsilon), "m": m, "v": v}

    def scalars(self, learning_rate: Any, step: Any, setting: Setting) -> dict[str, Any]:
        """decay, rate and epsilon of the update at `step`, counted from 1, in float64."""
        a, b = self.betas
        root = 1.0 - b**step
        correction = 1.0 / (math.sqrt(root) if isinstance(root, float) else sqrt(root))
        learning_rate = learning_rate * setting.rate
        return {
            "decay": 1.0 - learning_rate * setting.weight_decay,
            "rate": learning_rate / (1.0 - a**step) / correction,
            "epsilon": self.epsilon / correction,
        }


@checked
@dataclass(frozen=True)
class SGD:
    """p ← p - η d, with the learning rate η and d as in torch.optim.SGD.

    d is g + λ p, with the gradient g and the weight decay λ. With `momentum` μ,
    m ← μ m + g + λ p, and d is m, or g + λ p + μ m with `nesterov` (Nesterov, 1983; Sutskever et
    al., 2013). `clip_norm` and `groups` are as for `AdamW`. The official optimizer has only g, so
    all but `clip_norm` needs the profile `stock`.
    """

    clip_norm: float | None = None
    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0
    groups: tuple[Group, ...] = ()

    def __post_init__(self) -> None:
        _check_clip_norm(self)
        _check_groups(self)
        if not 0 <= self.momentum < 1 or not 0 <= self.weight_decay < math.inf:
            raise GraphgenError(
                f"{self}: momentum must be at least 0 and below 1, and weight_decay at least 0"
            )
        if self.nesterov and not self.momentum:
            raise GraphgenError(f"{self}: nesterov must be False without a momentum")

    @property
    def decaying(self) -> bool:
        """Whether some parameters decay."""
        return bool(self.weight_decay) or any(group.weight_decay for group in self.groups)

    @property
    def moments(self) -> tuple[str, ...]:
        """The buffers that it keeps beside the parameters."""
        return ("m",) if self.momentum else ()

    def setting(self, name: str) -> Setting:
        """What the parameter of this name is updated with."""
        return _settings(self.groups, self.weight_decay, name)

    def official(self) -> onnx.ModelProto:
        """The graph of optimizer_model.onnx; the official runtime needs a moment even here."""
        node = "SGDOptimizerV2 (learning_rate, params, {gradients})"
        return _official(node, ["first_order_moments"], _SGD, self)

    def update(
        self,
        *,
        p: Tensor,
        g: Tensor,
        rate: Tensor,
        decay: Tensor,
        m: Tensor | None = None,
        scale: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """The next p, and m with a momentum; without one and decay, the scale costs nothing."""
        if m is None and not self.decaying:
            return {"p": p - g * (rate if scale is None else rate * scale)}
        d = g if scale is None else g * scale
        d = d + p * decay if self.decaying else d
        if m is None:
            return {"p": p - d * rate}
        m = m * self.momentum + d
        return {"p": p - (d + m * self.momentum if self.nesterov else m) * rate, "m": m}

    def scalars(self, learning_rate: Any, step: Any, setting: Setting) -> dict[str, Any]:
        """The rate and the decay of the update."""
        return {"rate": learning_rate * setting.rate, "decay": setting.weight_decay}


Optimizer = AdamW | SGD


def named(name: str, *, clip_norm: float | None = None, **settings: Any) -> Optimizer:
    """`adamw`, `adam`, which is AdamW without decay, or `sgd`; a setting of None is not given.

    Raises GraphgenError for a setting that has no effect with it.
    """
    momentum = ("momentum", "nesterov")
    refused = {
        "sgd": ("no_decay", "betas", "epsilon"),
        "adam": ("weight_decay", "no_decay", *momentum),
        "adamw": momentum,
    }[name]
    given = {n: v for n, v in settings.items() if v is not None and v is not False and v != ()}
    if wrong := [n for n in refused if n in given]:
        raise GraphgenError(
            f"--{wrong[0].replace('_', '-')} has no effect with {name}; leave it out, or choose "
            f"--optimizer {'sgd' if wrong[0] in momentum else 'adamw'}"
        )
    if name == "sgd":
        return SGD(clip_norm=clip_norm, **given)
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
        given = nodes["SGDOptimizerV2"]
        return SGD(
            clip_norm=clip_norm,
            momentum=given.get("momentum", 0.0),
            nesterov=bool(given.get("nesterov", 0.0)),
            weight_decay=given.get("weight_decay", 0.0),
            groups=_groups_in(given, who),
        )
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
        groups=_groups_in(given, who),
    )


def _groups_in(attributes: Mapping[str, Any], who: str) -> tuple[Group, ...]:
    try:
        return tuple(Group(*fields) for fields in json.loads(attributes.get("groups", b"[]")))
    except (ValueError, TypeError, RecursionError) as error:
        raise GraphgenError(
            f"{who}: its attribute groups is damaged ({error}); write the artifacts again"
        ) from None


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
    node: str, moments: list[str], function: str, optimizer: "Optimizer"
) -> onnx.ModelProto:
    clip_norm = optimizer.clip_norm
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
    for name, value in _attributes_of(optimizer).items():
        model.graph.node[-1].attribute.append(helper.make_attribute(name, value))
        model.functions[-1].attribute.append(name)
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
