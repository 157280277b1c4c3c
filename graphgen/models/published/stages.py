"""What sentence-transformers makes of the vectors of tokens: pooled, and what follows."""

from collections.abc import Callable, Sequence
from typing import Any

from graphgen import nn, ops
from graphgen.models.published.config import Config
from graphgen.models.published.poolings import POOLINGS
from graphgen.value import Tensor

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "torch.nn.modules.linear.Identity": ops.identity,
    "torch.nn.modules.activation.Tanh": ops.tanh,
    "torch.nn.modules.activation.ReLU": ops.relu,
    "torch.nn.modules.activation.GELU": ops.gelu,
    "torch.nn.modules.activation.SiLU": ops.silu,
    "torch.nn.modules.activation.Sigmoid": ops.sigmoid,
}
"""The activation of a Dense, by the class in torch."""


class Stage(nn.Module):
    """A part of sentence-transformers that follows the pooling; it gives so many `features`."""

    features: int

    def __init__(self, config: Config, features: int):
        config.expect("module_input_name", "sentence_embedding")
        config.expect("module_output_name", "sentence_embedding", None)  # null: as the input
        self.features = features


class Dense(Stage):
    """f(W x + b), (B, D) to (B, E); plus x, or R x if it has another size, if it is a residual."""

    def __init__(self, config: Config, features: int):
        super().__init__(config, features)
        config.expect("in_features", features)
        self.features = config.take("out_features", int)
        self.linear = nn.Linear(features, self.features, bias=config.take("bias", bool, True))
        self.activation = config.choose(
            "activation_function", ACTIVATIONS, "torch.nn.modules.activation.Tanh"
        )
        self.residual: nn.Linear | None = None
        self.adds = config.take("use_residual", bool, False)
        if self.adds and self.features != features:
            self.residual = nn.Linear(features, self.features, bias=False)

    def __call__(self, x: Tensor) -> Tensor:
        y = self.activation(self.linear(x))
        if not self.adds:
            return y
        return y + (x if self.residual is None else self.residual(x))


class LayerNorm(Stage):
    """A norm of the vectors, (B, D)."""

    def __init__(self, config: Config, features: int):
        super().__init__(config, features)
        config.expect("dimension", features)
        self.norm = nn.LayerNorm(features)

    def __call__(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(x)
        return y


class Normalize(Stage):
    """x / |x|, (B, D)."""

    def __call__(self, x: Tensor) -> Tensor:
        return x / ops.maximum(ops.reduce_l2(x, axis=1), 1e-12)


STAGES: dict[str, type[Stage]] = {"Dense": Dense, "LayerNorm": LayerNorm, "Normalize": Normalize}
"""What may follow the pooling, in any order."""


class SentenceVectors(nn.Module):
    """The vectors of the tokens, and the sentence's: pooled, side by side, and what follows.

    Of the latter, the first `kept` elements are, if it is given.
    """

    def __init__(self, poolings: Sequence[str], stages: Sequence[Stage], kept: int | None = None):
        self.poolings, self.stages, self.kept = poolings, stages, kept

    def __call__(self, x: Tensor, mask: Tensor, encoder: Any) -> dict[str, Tensor]:
        parts = [POOLINGS[name](x, mask) for name in self.poolings]
        y = parts[0] if len(parts) == 1 else ops.concat(*parts, axis=1)
        for stage in self.stages:
            y = stage(y)
        if self.kept is not None:
            y = ops.slice_(y, [0], [self.kept], [1])
        return {"last_hidden_state": x, "sentence_embedding": y}
