"""What sentence-transformers makes of the vectors of tokens: pooled, and what follows."""

from collections.abc import Callable, Sequence
from typing import Any

from graphgen import nn, ops
from graphgen.models.published.config import Config
from graphgen.models.published.poolings import POOLINGS
from graphgen.value import Tensor

_TORCH = "torch.nn.modules.activation."

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "torch.nn.modules.linear.Identity": ops.identity,
    f"{_TORCH}Tanh": ops.tanh,
    f"{_TORCH}ReLU": ops.relu,
    f"{_TORCH}GELU": ops.gelu,
    f"{_TORCH}SiLU": ops.silu,
    f"{_TORCH}Sigmoid": ops.sigmoid,
    f"{_TORCH}LeakyReLU": lambda x: ops.leaky_relu(x, alpha=0.01),
    f"{_TORCH}ELU": ops.elu,
    f"{_TORCH}CELU": ops.elu,
    f"{_TORCH}SELU": ops.selu,
    f"{_TORCH}Mish": ops.mish,
    f"{_TORCH}Hardswish": ops.hard_swish,
    f"{_TORCH}Softplus": ops.softplus,
    f"{_TORCH}LogSigmoid": lambda x: -ops.softplus(-x),
    f"{_TORCH}Softsign": lambda x: x / (ops.abs(x) + 1),
    f"{_TORCH}Hardtanh": lambda x: ops.minimum(ops.maximum(x, -1), 1),
    f"{_TORCH}ReLU6": lambda x: ops.minimum(ops.relu(x), 6),
}
"""The activation of a Dense, by the class in torch."""


class Stage(nn.Module):
    """A part of sentence-transformers that follows the pooling; it gives so many `features`."""

    features: int
    plain = False  # whether it has no weights

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
    """x / |x|, (B, D), or of each token, (B, T, D)."""

    plain = True

    def __call__(self, x: Tensor) -> Tensor:
        return x / ops.maximum(ops.reduce_l2(x, axis=-1), 1e-12)


class Dropout(Stage):
    """Nothing, outside of training."""

    plain = True

    def __init__(self, config: Config, features: int):
        super().__init__(config, features)
        config.take("dropout", float, 0.2)

    def __call__(self, x: Tensor) -> Tensor:
        return x


STAGES = {kind.__name__: kind for kind in (Dense, Dropout, LayerNorm, Normalize)}
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


class TokenVectors(nn.Module):
    """Vectors of tokens of length 1, (B, T, E), as ColBERT compares them (arXiv 2004.12832)."""

    def __init__(self, stages: Sequence[Stage]):
        self.stages = [*stages, Normalize(Config({"model_type": "Normalize"}), 1)]

    def __call__(self, x: Tensor, mask: Tensor, encoder: Any) -> dict[str, Tensor]:
        for stage in self.stages:
            x = stage(x)
        return {"token_embeddings": x}


class SparseVectors:
    """SPLADE (arXiv 2109.10086): how much of each token of the vocabulary a text has, (B, V).

    Of logits z, (B, T, V), it is the maximum over the tokens of y = log(1 + relu(z)), or the sum;
    with the activation log1p_relu, that of log(1 + y).
    """

    def __init__(self, config: Config):
        config.ignore("embedding_dimension", "word_embedding_dimension")  # that of the logits
        self.sums = config.choose("pooling_strategy", {"max": False, "sum": True}, "max")
        kinds = {"relu": 1, "log1p_relu": 2}
        self.logarithms = config.choose("activation_function", kinds, "relu")

    def __call__(self, outputs: dict[str, Tensor], mask: Tensor) -> dict[str, Tensor]:
        z = outputs["logits"]
        y = ops.relu(z * ops.unsqueeze(ops.cast_like(mask, z), [2]))
        for _ in range(self.logarithms):
            y = ops.log(y + 1.0)
        reduce = ops.reduce_sum if self.sums else ops.reduce_max
        return {"sentence_embedding": reduce(y, axis=1, keepdims=False)}
