"""A language model of selective state spaces, without attention: Mamba (arXiv 2312.00752)."""

import math
from typing import Any

import numpy as np

from graphgen import nn, ops
from graphgen.errors import positive
from graphgen.nn.module import int64, ones
from graphgen.value import Tensor


def rates(rng: np.random.Generator, shape: tuple[int, ...]) -> Any:
    """log n for the n-th state of each feature: it decays by exp(-n Δ) in a step (3.6)."""
    return np.broadcast_to(np.log(np.arange(1, shape[1] + 1, dtype=np.float32)), shape)


def steps(rng: np.random.Generator, shape: tuple[int, ...]) -> Any:
    """The inverse of softplus at step sizes between 0.001 and 0.1, uniform in their logarithm."""
    sizes = np.exp(rng.uniform(math.log(0.001), math.log(0.1), shape))
    return (sizes + np.log(-np.expm1(-sizes))).astype(np.float32)


class MambaBlock(nn.Module):
    """x + W (scan(u) ⊙ silu(z)), u and z from norm(x), u through a causal convolution (3.4).

    The scan is of E features, each with a state of N numbers; step sizes Δ and what goes into and
    out of the states, B and C, depend on u.
    """

    def __init__(self, features: int, *, expand: int, state: int, kernel: int):
        inner, rank = expand * features, math.ceil(features / 16)
        self.sizes = [rank, state, state]
        self.norm = nn.RMSNorm(features)
        self.input = nn.Linear(features, 2 * inner, bias=False)
        self.convolution = nn.Convolution(inner, inner, kernel=kernel, groups=inner, causal=True)
        self.select = nn.Linear(inner, rank + 2 * state, bias=False)
        self.delta = nn.Linear(rank, inner)
        self.delta.bias = nn.Parameter((inner,), initialize=steps)
        self.log_rates = nn.Parameter((inner, state), initialize=rates)
        self.skip = nn.Parameter((inner,), initialize=ones)
        self.output = nn.Linear(inner, features, bias=False)

    def __call__(self, x: Tensor) -> Tensor:  # (B, T, D)
        u, z = ops.split(self.input(self.norm(x)), num_outputs=2, axis=-1)  # (B, T, E)
        u = ops.silu(self.convolution(u))
        delta, b, c = ops.split(self.select(u), self.sizes, num_outputs=3, axis=-1)  # (B, T, N)
        delta = ops.softplus(self.delta(delta))  # (B, T, E)
        y = ops.selective_scan(u, delta, -ops.exp(self.log_rates), b, c, self.skip)
        return x + self.output(y * ops.silu(z))


class Mamba(nn.Module):
    """The logits of each next token, (B, T) to (B, T, vocabulary), in time linear in T.

    Args:
        vocabulary: The number of tokens.
        features: D, the size of each token's vector.
        layers: The number of blocks.
        expand: E / D, for the inner size E of a block.
        state: N, the size of the state of each of E features.
        kernel: How many tokens a convolution sees, the last ones.
    """

    def __init__(
        self,
        vocabulary: int = 8192,
        features: int = 256,
        *,
        layers: int = 4,
        expand: int = 2,
        state: int = 16,
        kernel: int = 4,
    ):
        positive("Mamba", vocabulary=vocabulary, features=features, layers=layers)
        positive("Mamba", expand=expand, state=state, kernel=kernel)
        sizes = {"expand": expand, "state": state, "kernel": kernel}
        self.embedding = nn.Embedding(vocabulary, features)
        self.layers = [MambaBlock(features, **sizes) for _ in range(layers)]
        self.norm = nn.RMSNorm(features)

    def __call__(self, input_ids: Tensor) -> dict[str, Tensor]:  # (B, T)
        x = self.embedding(input_ids)  # (B, T, D)
        for layer in self.layers:
            x = layer(x)
        return {"logits": self.embedding.logits(self.norm(x))}  # (B, T, vocabulary)


def inputs() -> dict[str, Any]:
    """What `build` needs to know about the arguments."""
    return {"input_ids": int64["batch", "seq"]}
