"""Multi-head attention."""

from collections.abc import Callable
from typing import Any, Protocol

from graphgen import ops
from graphgen.errors import GraphgenError, positive, user_line
from graphgen.nn.linear import Dropout, Linear
from graphgen.nn.module import Module, Parameter, zeros
from graphgen.value import Tensor


class KeysAndValues(Protocol):
    """Where a layer's keys and values go, and where those it attends to come from."""

    def append(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Add the new ones, (B, G, T, D); return all there are, (B, G, S, D)."""
        ...


class Attention(Module):
    """Multi-head attention (arXiv 1706.03762, 3.2.2); grouped (2305.13245) if kv_heads < num_heads.

    Self-attention on x, (B, T, features); cross-attention with `memory`, (B, S, memory_features);
    its features are as many as those of x by default. A bool `mask` keeps what is True: (B, S) for
    padding of the keys, or anything that broadcasts to (B, H, T, S); a float mask is added to the
    scores. A query with nothing to look at gives zeros.

    Queries and keys are turned by `rotary`, cosines and sines (B, T, R/2) for the first R features
    of each head (arXiv 2104.09864), as pairs of neighbors if `interleaved`, after `query_norm` and
    `key_norm` if `norm` makes them: of each head (arXiv 2302.05442), or of all heads at once
    (arXiv 2501.00656) if `wide_norm`; they are normalized after they are turned if `normed_last`.
    With `clip`, projections are cut off at ±clip before they are turned. A third tensor, (B, T, 1),
    multiplies the queries. With a `cache`, the queries are the last of its tokens.

    With a `softcap` c, the scores are c · tanh(scores / c) before they are masked (2408.00118).

    With `sinks`, each head has one more score, a parameter, without a value (arXiv 2508.10925).

    With a `pattern`, such as `partial(ops.window_attention, window=256)`, queries see only the keys
    in it: this is self-attention, with a mask for padding only.

    If `weights` is a list, each call is written out in full and appends its own, (B, H, T, S).
    """

    weights: list[Tensor] | None = None

    def __init__(
        self,
        features: int,
        *,
        num_heads: int,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        memory_features: int | None = None,
        causal: bool = False,
        bias: bool = True,
        output_bias: bool | None = None,
        scale: float | None = None,
        softcap: float = 0.0,
        norm: Callable[[int], Module] | None = None,
        wide_norm: bool = False,
        normed_last: bool = False,
        clip: float | None = None,
        interleaved: bool = False,
        sinks: bool = False,
        dropout: float = 0.0,
        pattern: Callable[..., Tensor] | None = None,
    ):
        who = type(self).__name__
        positive(who, features=features, num_heads=num_heads, kv_heads=kv_heads, head_dim=head_dim)
        positive(who, memory_features=memory_features)
        self.features, self.num_heads, self.causal = features, num_heads, causal
        self.kv_heads = num_heads if kv_heads is None else kv_heads
        if head_dim is None and features % num_heads:
            raise GraphgenError(
                f"Attention({features}, num_heads={num_heads}): the heads must divide the features"
                f"{user_line()}"
            )
        if num_heads % self.kv_heads:
            raise GraphgenError(
                f"Attention(num_heads={num_heads}, kv_heads={kv_heads}): kv_heads must divide "
                f"num_heads{user_line()}"
            )
        self.head_dim = features // num_heads if head_dim is None else head_dim
        self.query = Linear(features, num_heads * self.head_dim, bias=bias)
        self.memory_features = features if memory_features is None else memory_features
        self.key = Linear(self.memory_features, self.kv_heads * self.head_dim, bias=bias)
        self.value = Linear(self.memory_features, self.kv_heads * self.head_dim, bias=bias)
        self.output = Linear(
            num_heads * self.head_dim, features, bias=bias if output_bias is None else output_bias
        )
        if softcap < 0.0:
            given = f"{who}(softcap={softcap})"
            raise GraphgenError(f"{given}: it must be above 0, or 0 for none{user_line()}")
        self.scale, self.softcap = scale, softcap
        self.wide_norm, self.interleaved = wide_norm, interleaved
        self.normed_last, self.clip = normed_last, clip
        wide = (num_heads, self.kv_heads) if wide_norm else (1, 1)
        self.query_norm, self.key_norm = (
            None if norm is None else norm(count * self.head_dim) for count in wide
        )
        self.sinks = Parameter((num_heads,), initialize=zeros) if sinks else None
        if sinks and pattern is not None:
            given = f"{who}(sinks=True, pattern=...)"
            raise GraphgenError(f"{given}: a pattern has no sinks; leave one out{user_line()}")
        self.dropout, self.pattern = Dropout(dropout), pattern

    def __call__(
        self,
        x: Tensor,
        memory: Tensor | None = None,
        *,
        mask: Tensor | None = None,
        rotary: tuple[Tensor, ...] | None = None,
        cache: KeysAndValues | None = None,
    ) -> Tensor:
        if self.pattern is not None and any(y is not None for y in (memory, cache, self.weights)):
            raise GraphgenError(
                "Attention(pattern=...): a pattern is for self-attention without a memory, a cache "
                f"or a list of weights; leave the pattern out{user_line()}"
            )
        if memory is None and self.memory_features != self.features:
            raise GraphgenError(
                f"Attention({self.features}, memory_features={self.memory_features}): it was given "
                f"no memory to attend to; call it with x and a memory{user_line()}"
            )
        memory = x if memory is None else memory  # (B, S, memory_features)
        self.expect_last(x, self.features, rank=3)
        self.expect_last(memory, self.memory_features, rank=3, name="memory")
        if mask is not None and ops.rank(mask) == 2:
            mask = ops.unsqueeze(mask, [1, 2])  # (B, 1, 1, S)
        q, k, v = self.query(x), self.key(memory), self.value(memory)  # (B, T or S, heads·D)
        q, k = (q, k) if self.normed_last else self._normed(q, k)
        if self.clip is not None:
            q, k, v = (ops.clip(y, -self.clip, self.clip) for y in (q, k, v))
        if rotary is not None:
            size = 2 * rotary[0].shape[-1] % self.head_dim  # 0 means all features of a head
            turn: dict[str, Any] = {
                "interleaved": int(self.interleaved),
                "rotary_embedding_dim": size,
            }
            q = ops.rotate(q, *rotary[:2], num_heads=self.num_heads, **turn)
            k = ops.rotate(k, *rotary[:2], num_heads=self.kv_heads, **turn)
            q = q * rotary[2] if len(rotary) > 2 else q
        q, k = self._normed(q, k) if self.normed_last else (q, k)
        heads: dict[str, Any] = {"q_num_heads": self.num_heads, "kv_num_heads": self.kv_heads}
        if cache is not None:
            q = ops.split_heads(q, self.num_heads)
            k, v = cache.append(*(ops.split_heads(y, self.kv_heads) for y in (k, v)))
            heads = {}
        options = {"is_causal": int(self.causal), "scale": self.scale, **heads}
        if self.softcap:
            options["softcap"] = self.softcap
        if self.sinks is None and self.weights is None:
            y = (self.pattern or ops.attention)(q, k, v, mask, **options)
        else:
            y, weights = ops.attention_with_weights(q, k, v, mask, sinks=self.sinks, **options)
            if self.weights is not None:
                self.weights.append(weights)
        return self.result(y if cache is None else ops.merge_heads(y), x)

    def result(self, y: Tensor, x: Tensor) -> Tensor:
        """The vectors of tokens x, (B, T, features), of what their heads found, (B, T, H·D)."""
        return self.dropout(self.output(y))

    def _normed(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        if self.query_norm is None or self.key_norm is None:
            return q, k
        return self._one_normed(q, self.query_norm), self._one_normed(k, self.key_norm)

    def _one_normed(self, x: Tensor, norm: Module) -> Tensor:
        if self.wide_norm:
            return norm(x)  # type: ignore[no-any-return]
        sizes = [ops.dim(x, 0), ops.dim(x, 1)]
        y = norm(ops.reshape(x, [*sizes, -1, self.head_dim]))
        return ops.reshape(y, [*sizes, x.shape[-1]])
