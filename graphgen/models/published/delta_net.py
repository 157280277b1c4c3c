"""Linear attention that replaces what a key stands for: Gated DeltaNet (arXiv 2412.06464)."""

from typing import Any

from graphgen import nn, ops
from graphgen.models.published.cache import LAST, SUMMED, LayerCache, Stateful
from graphgen.models.published.stateful import convolved, in_float32, spread
from graphgen.nn.module import Parameter, ones, zeros
from graphgen.parts import Part
from graphgen.value import Tensor


class GatedDeltaNet(Stateful):
    """W (norm(y) ⊙ silu(z)) of y_t = S_tᵀ q_t, S_t as `ops.linear_attention` of `gated_delta`.

    Queries, keys and values go through a convolution and silu, and the first two have length 1. The
    decay of a head is exp(-e^A softplus(a + b)), A and b its own, a of the token, and β is σ of the
    token. Heads of values are a multiple of those of keys, each of which serves several in a row.

    Args:
        features: D, the size of a token's vector.
        key_heads: The heads of queries and keys, of `key_dim` features.
        value_heads: The heads of values, of `value_dim` features.
        kernel: How many tokens the convolution sees, the last ones.
        epsilon: That of the norm.
    """

    def __init__(
        self,
        features: int,
        *,
        key_heads: int,
        value_heads: int,
        key_dim: int,
        value_dim: int,
        kernel: int,
        epsilon: float,
    ):
        self.key_heads, self.value_heads = key_heads, value_heads
        self.key_dim, self.value_dim = key_dim, value_dim
        keys, values = key_heads * key_dim, value_heads * value_dim
        self.states = {
            LAST: (2 * keys + values, kernel - 1),
            SUMMED: (value_heads, key_dim, value_dim),
        }
        self.query = nn.Linear(features, keys, bias=False)
        self.key = nn.Linear(features, keys, bias=False)
        self.value = nn.Linear(features, values, bias=False)
        self.gate = nn.Linear(features, values, bias=False)
        self.step = nn.Linear(features, value_heads, bias=False)
        self.beta = nn.Linear(features, value_heads, bias=False)
        channels = 2 * keys + values
        self.convolution = nn.Convolution(
            channels, channels, kernel=kernel, groups=channels, causal=True, bias=False
        )
        # x / √(Σ x² + 1e-6), but for a factor of √K.
        self.unit = nn.RMSNorm(key_dim, epsilon=1e-6 / key_dim, gain=False)
        self.log_rates = Parameter((value_heads,), initialize=zeros)
        self.step_bias = Parameter((value_heads,), initialize=ones)
        self.norm = nn.RMSNorm(value_dim, epsilon=epsilon)
        self.result = nn.Linear(values, features, bias=False)

    def __call__(
        self, x: Tensor, *, mask: Tensor, rotary: object = None, cache: LayerCache | None = None
    ) -> Tensor:
        x = x * mask  # (B, T, D)
        mixed = ops.concat(self.query(x), self.key(x), self.value(x), axis=2)
        mixed = in_float32(convolved(mixed, self.convolution, cache, "silu"))
        keys, values = self.key_heads * self.key_dim, self.value_heads * self.value_dim
        q, k, v = ops.split(mixed, [keys, keys, values], axis=2, num_outputs=3)
        q, k = self._heads(q), self._heads(k) * self.key_dim**-0.5
        step = ops.softplus(in_float32(self.step(x)) + in_float32(self.step_bias))
        y, state = ops.linear_attention(
            q,
            k,
            v,
            None if cache is None else cache.state(SUMMED),
            -ops.exp(in_float32(self.log_rates)) * step,
            in_float32(ops.sigmoid(self.beta(x))),
            q_num_heads=self.value_heads,
            kv_num_heads=self.value_heads,
            scale=1.0 / self.key_dim,
        )
        if cache is not None:
            cache.keep(SUMMED, state)
        sizes = [ops.dim(x, 0), ops.dim(x, 1)]
        y = ops.cast_like(ops.reshape(y, [*sizes, self.value_heads, self.value_dim]), x)
        y = ops.reshape(self.norm(y), [*sizes, values]) * ops.silu(self.gate(x))
        return self.result(y)

    def _heads(self, x: Tensor) -> Tensor:
        """(B, T, heads of keys · K) to vectors of length √K, one for each head of values."""
        sizes = [ops.dim(x, 0), ops.dim(x, 1)]
        y = self.unit(ops.reshape(x, [*sizes, self.key_heads, self.key_dim]))
        y = ops.reshape(y, [*sizes, self.key_heads * self.key_dim])
        return spread(y, self.key_heads, self.value_heads // self.key_heads)


def _of_all(name: str, number: int) -> Any:
    """Queries, keys or values (0, 1, 2) of one weight, in a row."""

    def part(of: GatedDeltaNet) -> Part:
        keys, values = of.key_heads * of.key_dim, of.value_heads * of.value_dim
        first = [0, keys, 2 * keys][number]
        return Part(name, first, 2 * keys + values, 1, values if number == 2 else keys)

    return part


def _of_heads(name: str, number: int) -> Any:
    """What one weight has of each head of keys: queries, keys, values and gates (0 to 3)."""

    def part(of: GatedDeltaNet) -> Part:
        keys, values = of.key_dim, of.value_heads // of.key_heads * of.value_dim
        first = [0, keys, 2 * keys, 2 * keys + values][number]
        width = keys if number < 2 else values
        return Part(name, first, 2 * (keys + values), of.key_heads, width)

    return part


_SAME: dict[str, Any] = {
    "step_bias": "dt_bias",
    "log_rates": "A_log",
    "convolution": "conv1d",
    "result": "out_proj",
}
APART = _SAME | {
    "query": _of_all("in_proj_qkv", 0),
    "key": _of_all("in_proj_qkv", 1),
    "value": _of_all("in_proj_qkv", 2),
    "gate": "in_proj_z",
    "beta": "in_proj_b",
    "step": "in_proj_a",
}
"""What Qwen3.5's checkpoints call its weights."""

BY_HEAD = _SAME | {
    "query": _of_heads("in_proj_qkvz", 0),
    "key": _of_heads("in_proj_qkvz", 1),
    "value": _of_heads("in_proj_qkvz", 2),
    "gate": _of_heads("in_proj_qkvz", 3),
    "beta": lambda of: Part("in_proj_ba", 0, 2, of.key_heads),
    "step": lambda of: Part("in_proj_ba", 1, 2, of.key_heads),
}
"""What Qwen3-Next's call them."""
