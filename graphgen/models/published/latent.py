"""Attention to one latent vector of each token (DeepSeek-V2, arXiv 2405.04434, 2.1.2)."""

from collections.abc import Callable
from functools import partial
from typing import Any

from graphgen import nn, ops
from graphgen.models.published.absent import absent
from graphgen.models.published.config import Config
from graphgen.models.published.family import Source
from graphgen.models.published.frequencies import temperature
from graphgen.models.published.rope import given_parameters, rotary
from graphgen.models.published.specification import Sight
from graphgen.nn.attention import KeysAndValues
from graphgen.nn.module import Module
from graphgen.parts import Part
from graphgen.value import Tensor


class LatentAttention(nn.Attention):
    """Attention of H heads to c, a vector that stands for all keys and values of a token.

    A head's keys are c K and its values c V, beside R features of keys that all heads share and
    that alone are turned. Its scores q (c K)ᵀ are (q Kᵀ) cᵀ, and its result w (c V) is (w c) V: so
    it is attention with one head of keys, c and the turned features, which are the values as well,
    and these C + R numbers are all that the cache has of a token.

    Args:
        features: D, the size of a token's vector.
        num_heads: H.
        latent: C, the size of c.
        turned: R.
        plain: The features of a head's queries and keys that are not turned.
        value_dim: Those of its values.
        query_latent: The size of the vector that queries are made of; None for D's own.
        norm: Makes the norms of both vectors.
        scale: The factor of scores.
        bias: Whether the products with D features on a side have one, except queries' own.
        interleaved: Whether neighbors are turned.
    """

    def __init__(
        self,
        features: int,
        *,
        num_heads: int,
        latent: int,
        turned: int,
        plain: int,
        value_dim: int,
        query_latent: int | None,
        norm: Callable[[int], Module],
        scale: float,
        bias: bool,
        interleaved: bool,
    ):
        self.features, self.num_heads, self.latent = features, num_heads, latent
        self.plain, self.turned, self.value_dim = plain, turned, value_dim
        self.kv_heads, self.head_dim = 1, latent + turned  # of the cache
        self.scale = scale
        self.turn: dict[str, Any] = {"interleaved": int(interleaved)}
        self.query_down = self.query_norm = None
        if query_latent is not None:
            self.query_down = nn.Linear(features, query_latent, bias=bias)
            self.query_norm = norm(query_latent)
        width = query_latent or features
        self.query = nn.Linear(width, num_heads * plain, bias=False)
        self.query_turned = nn.Linear(width, num_heads * turned, bias=False)
        self.to_latent = nn.Linear(features, latent, bias=bias)
        self.latent_norm = norm(latent)
        self.key_turned = nn.Linear(features, turned, bias=bias)
        self.key = nn.Linear(latent, num_heads * plain, bias=False)
        self.value = nn.Linear(latent, num_heads * value_dim, bias=False)
        self.output = nn.Linear(num_heads * value_dim, features, bias=bias)

    def __call__(  # type: ignore[override]
        self,
        x: Tensor,
        *,
        mask: Tensor,
        rotary: tuple[Tensor, ...],
        cache: KeysAndValues | None = None,
    ) -> Tensor:
        y = x if self.query_down is None or self.query_norm is None else self._queries_of(x)
        keys, values = (  # (C, H, plain), (C, H, value_dim)
            ops.reshape(w.weight, [self.latent, self.num_heads, -1]) for w in (self.key, self.value)
        )
        q = ops.split_heads(self.query(y), self.num_heads)  # (B, H, T, plain)
        q = ops.matmul(q, ops.transpose(keys, perm=[1, 2, 0]))  # (B, H, T, C)
        turned = ops.rotate(self.query_turned(y), *rotary, num_heads=self.num_heads, **self.turn)
        q = ops.concat(q, ops.split_heads(turned, self.num_heads), axis=3)
        shared = ops.rotate(self.key_turned(x), *rotary, num_heads=1, **self.turn)
        k = ops.unsqueeze(ops.concat(self.latent_norm(self.to_latent(x)), shared, axis=2), [1])
        k, v = (k, k) if cache is None else cache.append(k, k)  # (B, 1, S, C + R)
        if self.weights is None:
            z = ops.attention(q, k, v, mask, scale=self.scale)
        else:
            z, weights = ops.attention_with_weights(q, k, v, mask, scale=self.scale)
            self.weights.append(weights)
        z = ops.slice_(z, [0], [self.latent], [3])  # (B, H, T, C)
        z = ops.matmul(z, ops.transpose(values, perm=[1, 0, 2]))
        return self.output(ops.merge_heads(z))

    def _queries_of(self, x: Tensor) -> Tensor:
        assert self.query_down is not None and self.query_norm is not None
        return self.query_norm(self.query_down(x))  # type: ignore[no-any-return]


def latent_attention(config: Config) -> dict[str, Any]:
    """The attention of a configuration, and what its layers see: terms of a specification."""
    features, heads = config.take("hidden_size", int), config.take("num_attention_heads", int)
    turned = config.take("qk_rope_head_dim", int, 64)
    plain = config.take("qk_nope_head_dim", int, absent(config, "plain", 128))
    config.expect("num_key_value_heads", heads)
    config.expect("head_dim", turned)
    config.expect("qk_head_dim", plain + turned)
    options: dict[str, Any] = {
        "num_heads": heads,
        "latent": config.take("kv_lora_rank", int, 512),
        "turned": turned,
        "plain": plain,
        "value_dim": config.take("v_head_dim", int, absent(config, "value_dim", 128)),
        "query_latent": config.optional("q_lora_rank", int, absent(config, "query_latent")),
        "norm": partial(nn.RMSNorm, epsilon=1e-6),  # whatever rms_norm_eps is
        "scale": (plain + turned) ** -0.5 * _growth(config) ** 2,
        "bias": config.take("attention_bias", bool, False),
        "interleaved": True,
    }
    if config.model_type != "deepseek_v2":
        options["interleaved"] = config.take("rope_interleave", bool, True)
    sight = Sight(None, rotary(config, turned))
    return {
        "attention": lambda number: LatentAttention(features, **options),
        "sights": [sight] * config.take("num_hidden_layers", int),
    }


def _growth(config: Config) -> float:
    """What yarn multiplies queries and keys by, beside the angles."""
    given = given_parameters(config)
    factor, mscale = (given.get(name, 0.0) for name in ("factor", "mscale_all_dim"))
    if given.get("rope_type", given.get("type")) != "yarn" or not mscale:
        return 1.0
    if not all(type(x) in (int, float) for x in (factor, mscale)):
        config.refuse("rope_parameters", given, "with numbers for factor and mscale_all_dim")
    return temperature(float(factor), float(mscale))


def _part(name: str, first: str, other: str, which: int) -> Callable[[Any], Part]:
    """The first or other part (0, 1) of outputs whose sizes are fields of the attention.

    Where they are of heads, each head has both.
    """

    def part(of: LatentAttention) -> Part:
        sizes = getattr(of, first), getattr(of, other)
        groups = 1 if first == "latent" else of.num_heads
        own = "q_proj" if name == "q_b_proj" and of.query_down is None else name
        return Part(own, sizes[0] * which, sum(sizes), groups, sizes[which])

    return part


NAMES: dict[str, Source] = {
    "query_down": "q_a_proj",
    "query_norm": "q_a_layernorm",
    "query": _part("q_b_proj", "plain", "turned", 0),
    "query_turned": _part("q_b_proj", "plain", "turned", 1),
    "to_latent": _part("kv_a_proj_with_mqa", "latent", "turned", 0),
    "key_turned": _part("kv_a_proj_with_mqa", "latent", "turned", 1),
    "latent_norm": "kv_a_layernorm",
    "key": _part("kv_b_proj", "plain", "value_dim", 0),
    "value": _part("kv_b_proj", "plain", "value_dim", 1),
}
"""What checkpoints call its weights."""
