"""State spaces with one rate a head: Mamba-2 (arXiv 2405.21060)."""

import math
from collections.abc import Callable
from typing import Any

from graphgen import nn, ops
from graphgen.models.published.cache import LAST, SPACE, LayerCache, Stateful
from graphgen.models.published.config import Config
from graphgen.models.published.stateful import convolved, in_float32, spread
from graphgen.nn.module import Parameter, ones, zeros
from graphgen.parts import Part
from graphgen.value import Tensor


class Mamba2(Stateful):
    """W norm(y ⊙ silu(z)) of y_t = S_tᵀ c_t + D u_t, S_t = exp(-e^A Δ_t) S_(t-1) + b_t (Δ_t u_t)ᵀ.

    u, b and c go through a convolution and silu; Δ is softplus(δ + its own), δ of the token. Each
    head has its A, D and Δ, P features of u and a state S of N by P. Groups of heads in a row share
    b and c, (N), and have norms of their own.

    Args:
        features: D, the size of a token's vector.
        heads: The heads.
        head_dim: P, the features of u in a head.
        state: N.
        groups: How many groups of heads there are.
        kernel: How many tokens the convolution sees, the last ones.
        epsilon: That of the norm.
        bias: Whether the products with the token's vector, and W, have a bias.
        convolution_bias: Whether the convolution has one.
    """

    def __init__(
        self,
        features: int,
        *,
        heads: int,
        head_dim: int,
        state: int,
        groups: int,
        kernel: int,
        epsilon: float,
        bias: bool,
        convolution_bias: bool,
    ):
        self.heads, self.head_dim, self.state, self.groups = heads, head_dim, state, groups
        inner = heads * head_dim
        self.sizes = [inner, groups * state, groups * state]
        channels = sum(self.sizes)
        self.states = {LAST: (channels, kernel - 1), SPACE: (heads, state, head_dim)}
        self.gate = nn.Linear(features, inner, bias=bias)
        self.mixed = nn.Linear(features, channels, bias=bias)
        self.step = nn.Linear(features, heads, bias=bias)
        self.convolution = nn.Convolution(
            channels,
            channels,
            kernel=kernel,
            groups=channels,
            causal=True,
            bias=convolution_bias,
        )
        self.log_rates = Parameter((heads,), initialize=zeros)
        self.step_bias = Parameter((heads,), initialize=ones)
        self.skip = Parameter((heads,), initialize=ones)
        self.unit = nn.RMSNorm(inner // groups, epsilon=epsilon, gain=False)
        self.gains = Parameter((inner,), initialize=ones)
        self.result = nn.Linear(inner, features, bias=bias)

    def __call__(
        self, x: Tensor, *, mask: Tensor, rotary: object = None, cache: LayerCache | None = None
    ) -> Tensor:
        x = x * mask  # (B, T, D)
        sizes, inner = [ops.dim(x, 0), ops.dim(x, 1)], self.sizes[0]
        mixed = in_float32(convolved(self.mixed(x), self.convolution, cache, "silu") * mask)
        u, b, c = ops.split(mixed, self.sizes, axis=2, num_outputs=3)
        b, c = (spread(y, self.groups, self.heads // self.groups) for y in (b, c))
        step = ops.softplus(in_float32(self.step(x)) + in_float32(self.step_bias))
        u = ops.reshape(u, [*sizes, self.heads, self.head_dim])
        y, state = ops.linear_attention(
            c,
            b,
            ops.reshape(u * ops.unsqueeze(step, [3]), [*sizes, inner]),
            None if cache is None else cache.state(SPACE),
            -ops.exp(in_float32(self.log_rates)) * step,
            q_num_heads=self.heads,
            kv_num_heads=self.heads,
            update_rule="gated",
            scale=1.0,
        )
        if cache is not None:
            cache.keep(SPACE, state)
        skip = ops.unsqueeze(in_float32(self.skip), [1])  # (H, 1)
        y = y + ops.reshape(u * skip, [*sizes, inner])
        y = ops.cast_like(y, x) * ops.silu(self.gate(x))
        y = self.unit(ops.reshape(y, [*sizes, self.groups, inner // self.groups]))
        return self.result(ops.reshape(y, [*sizes, inner]) * self.gains)


def mamba2(config: Config, features: int) -> Callable[[int], Mamba2]:
    """What makes such a layer of the fields that begin with mamba_."""
    heads = config.take("mamba_n_heads", int, 128)
    inner = config.take("mamba_expand", int, 2) * features
    size = config.raw("mamba_d_head", "auto")
    if inner % heads or size not in ("auto", inner // heads):
        wanted = f"auto, where mamba_n_heads divides mamba_expand times hidden_size, {inner}"
        config.refuse("mamba_d_head", size, wanted)
    # transformers writes infinity as an object, and has no limit where tokens come one by one.
    config.expect("time_step_limit", [0, math.inf], [0, {"__float__": "Infinity"}])
    config.expect("hidden_act", "silu", "swish")  # which is also the convolution's
    groups = config.take("mamba_n_groups", int, 1)
    if heads % groups:
        config.refuse("mamba_n_groups", groups, f"a divisor of {heads}, mamba_n_heads")
    kernel = config.take("mamba_d_conv", int, 4)
    if kernel < 2:
        config.refuse("mamba_d_conv", kernel, "2 at least")
    config.ignore("mamba_chunk_size", "time_step_min", "time_step_max", "time_step_floor")
    options: dict[str, Any] = {
        "heads": heads,
        "head_dim": inner // heads,
        "state": config.take("mamba_d_state", int, 256),
        "groups": groups,
        "kernel": kernel,
        "epsilon": config.take("rms_norm_eps", float, 1e-6),
        "bias": config.take("mamba_proj_bias", bool, False),
        "convolution_bias": config.take("mamba_conv_bias", bool, True),
    }
    return lambda number: Mamba2(features, **options)


def _part(number: int) -> Callable[[Mamba2], Part]:
    """Gates, what the convolution mixes, or steps (0, 1, 2) of one weight, in a row."""

    def part(of: Mamba2) -> Part:
        widths = [of.sizes[0], sum(of.sizes), of.heads]
        return Part("in_proj", sum(widths[:number]), sum(widths), 1, widths[number])

    return part


NAMES: dict[str, Any] = {
    "attention.gate": _part(0),
    "mixed": _part(1),
    "step": _part(2),
    "convolution": "conv1d",
    "log_rates": "A_log",
    "step_bias": "dt_bias",
    "skip": "D",
    "gains": "norm.weight",
    "result": "out_proj",
}
"""What checkpoints call its weights."""
