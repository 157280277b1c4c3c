"""What stands in the place of attention, and keeps a state of a fixed size."""

from collections.abc import Mapping, Sequence
from typing import Any

import onnx_ir as ir

from graphgen import nn, ops
from graphgen.models.published.cache import LAST, LayerCache, Stateful
from graphgen.models.published.config import Config
from graphgen.models.published.specification import Sight
from graphgen.value import Tensor


def name_of(stateful: str, attention: str = "self_attn") -> Any:
    """What checkpoints call the part of a layer, by its kind."""
    return lambda layer: stateful if isinstance(layer.attention, Stateful) else attention


def beside_states(
    config: Config,
    sights: list[Sight],
    known: Mapping[str, bool],
    default: list[str],
    names: Sequence[str] = ("layer_types",),
) -> list[Sight]:
    """The sights of those layers that attend; others keep states.

    `known` says of each kind in layer_types whether it attends; `default` are the kinds without it.
    """
    name = config.named(*names)
    kinds = config.raw(name, default)
    wanted = f"a list of {len(sights)} of {', '.join(known)}"
    if not isinstance(kinds, list) or len(kinds) != len(sights):
        config.refuse(name, kinds, wanted)
    if not {*map(str, kinds)} <= {*known} or not any(known[str(kind)] for kind in kinds):
        config.refuse(name, kinds, f"{wanted}, and one at least that attends")
    return [
        sight if known[kind] else Sight(stateful=True)
        for sight, kind in zip(sights, kinds, strict=True)
    ]


def convolved(
    x: Tensor, convolution: nn.Convolution, cache: LayerCache | None, activation: Any = "none"
) -> Tensor:
    """A causal convolution of each feature of x, (B, T, C), and of the last tokens in the cache."""
    past = None if cache is None else cache.state(LAST)
    y, state = ops.causal_conv_with_state(
        ops.swap_last(x), convolution.weight, convolution.bias, past, activation=activation
    )
    if cache is not None:
        cache.keep(LAST, state)
    return ops.swap_last(y)


def spread(x: Tensor, groups: int, each: int) -> Tensor:
    """(B, T, groups · N) to (B, T, groups · each · N): N of a group for each of its heads."""
    if each == 1:
        return x
    sizes = [ops.dim(x, 0), ops.dim(x, 1)]
    wide = ops.expand(ops.reshape(x, [*sizes, groups, 1, -1]), [1, 1, 1, each, 1])
    return ops.reshape(wide, [*sizes, each * x.shape[2]])


def in_float32(x: Tensor) -> Tensor:
    """Sums over all tokens, and what decays them, need its digits, whatever the weights have."""
    return ops.cast(x, to=ir.DataType.FLOAT)


class ShortConvolution(Stateful):
    """W (c ⊙ y), y a causal convolution of b ⊙ u; b, c and u of the token (arXiv 2511.23404, 2).

    Args:
        features: D, the size of a token's vector.
        kernel: How many tokens the convolution sees, the last ones.
        bias: Whether its parts have one.
    """

    def __init__(self, features: int, *, kernel: int, bias: bool):
        self.states = {LAST: (features, kernel - 1)}
        self.input = nn.Linear(features, 3 * features, bias=bias)
        self.convolution = nn.Convolution(
            features, features, kernel=kernel, groups=features, causal=True, bias=bias
        )
        self.output = nn.Linear(features, features, bias=bias)

    def __call__(
        self, x: Tensor, *, mask: Tensor, rotary: object = None, cache: LayerCache | None = None
    ) -> Tensor:
        b, c, u = ops.split(self.input(x * mask), num_outputs=3, axis=-1)  # (B, T, D)
        y = convolved(b * u, self.convolution, cache)
        return self.output(c * y)
