"""The encoder of wav2vec 2.0 (arXiv 2006.11477), HuBERT (2106.07447) and WavLM (2110.13900)."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from graphgen import nn, ops
from graphgen.models.published.config import ACTIVATIONS, Config
from graphgen.models.published.layer import Layer
from graphgen.models.published.specification import EncoderSpecification, Sight
from graphgen.models.published.wavlm import GatedAttention
from graphgen.nn import feed_forward
from graphgen.nn.feed_forward import Activation
from graphgen.nn.module import Parameter, ones, zeros
from graphgen.value import Tensor


class Features(nn.Module):
    """A convolution of one step, a norm if there is one, and an activation: (B, C, S) to (B, D, T).

    The norm is of each frame, or of each feature over all frames if it `spans` them.
    """

    def __init__(
        self, sizes: tuple[int, int, int, int], *, bias: bool, norm: str, kind: Activation
    ):
        inner, features, self.kernel, self.stride = sizes
        self.conv = nn.Convolution(inner, features, kernel=self.kernel, bias=bias)
        self.layer_norm = nn.LayerNorm(features) if norm == "layer" else None
        spans = norm == "group"
        self.gain = Parameter((features,), initialize=ones) if spans else None
        self.shift = Parameter((features,), initialize=zeros) if spans else None
        self.kind: Activation = kind

    def __call__(self, x: Tensor) -> Tensor:
        x = ops.conv(x, self.conv.weight, self.conv.bias, strides=[self.stride])
        if self.gain is not None and self.shift is not None:
            x = ops.instance_normalization(x, self.gain, self.shift, epsilon=1e-5)
        if self.layer_norm is not None:
            x = ops.swap_last(self.layer_norm(ops.swap_last(x)))
        y: Tensor = feed_forward.ACTIVATIONS[self.kind](x)
        return y


class Hearing(nn.Module):
    """Samples, (B, S), as vectors of frames, (B, T, D), and which of them are sound, (B, T)."""

    def __init__(self, config: Config):
        take = config.take
        self.features, heads = take("hidden_size", int, 768), take("num_attention_heads", int, 12)
        epsilon = take("layer_norm_eps", float, 1e-5)
        activation: Activation = config.choose("feat_extract_activation", ACTIVATIONS, "gelu")
        kind = config.choose("feat_extract_norm", {"group": "group", "layer": "layer"}, "group")
        self.masked = kind == "layer"  # the others were not trained with a mask
        sizes = _sizes(config)
        bias = take("conv_bias", bool, False)
        others = [kind if self.masked else ""] * (len(sizes) - 1)
        self.frames = [
            Features(size, bias=bias, norm=norm, kind=activation)
            for size, norm in zip(sizes, [kind, *others], strict=True)
        ]
        last = sizes[-1][1]
        normed = config.model_type != "hubert" or take("feat_proj_layer_norm", bool, True)
        self.first_norm = nn.LayerNorm(last, epsilon=epsilon) if normed else None
        self.projection = nn.Linear(last, self.features)
        self.kernel = take("num_conv_pos_embeddings", int, 128)
        groups = take("num_conv_pos_embedding_groups", int, 16)
        how: dict[str, Any] = {"kernel": self.kernel, "groups": groups, "padding": self.kernel // 2}
        self.near = nn.Convolution(self.features, self.features, **how)
        self.activation: Activation = activation
        self.stable = take("do_stable_layer_norm", bool, False)
        hidden = take("intermediate_size", int, 3072)
        inner: Activation = config.choose("hidden_act", ACTIVATIONS, "gelu")
        gated = config.model_type == "wavlm"
        attend = GatedAttention if gated else nn.Attention
        self.relative = None
        if gated:
            config.ignore("num_ctc_classes")  # of its loss in training
            count, furthest = take("num_buckets", int, 320), take("max_bucket_distance", int, 800)
            if not 0 < count // 4 < furthest:
                config.refuse("num_buckets", count, "4 or more, and below 4 max_bucket_distance")
            self.relative = nn.RelativeBias(heads, count=count, furthest=furthest)
        spec = EncoderSpecification(
            vocabulary=1,
            features=self.features,
            layers=[Sight()] * take("num_hidden_layers", int, 12),
            norm=partial(nn.LayerNorm, epsilon=epsilon),
            attention=lambda number: attend(self.features, num_heads=heads),
            feed_forward=lambda number: nn.FeedForward(self.features, hidden, activation=inner),
            norms=("norm1", "norm2") if self.stable else ("after1", "after2"),
            post=not self.stable,
        )
        self.norm = spec.norm(self.features)
        self.layers = [Layer(spec, number) for number in range(len(spec.layers))]
        config.expect("adapter_attn_dim")
        for name in ("add_adapter", "conv_pos_batch_norm"):
            config.expect(name, False)
        for name in ("adapter_kernel_size", "adapter_stride", "num_adapter_layers"):
            config.raw(name)  # of adapters

    def __call__(
        self, input_values: Tensor, attention_mask: Tensor | None = None
    ) -> tuple[list[Tensor], Tensor | None]:
        """Those before and after each layer, and then the result; and what of it is sound."""
        x = ops.unsqueeze(ops.cast_like(input_values, self.projection.weight), [1])  # (B, 1, S)
        for frame in self.frames:
            x = frame(x)
        x = ops.swap_last(x)  # (B, T, C)
        kept = None if attention_mask is None else self._kept(attention_mask, ops.dim(x, 1))
        x = self.projection(x if self.first_norm is None else self.first_norm(x))
        if kept is not None:
            x = ops.where(ops.unsqueeze(kept, [2]), x, 0.0)
        near = self.near(x)
        if self.kernel % 2 == 0:
            near = ops.slice_(near, [0], [-1], [1])
        x = x + feed_forward.ACTIVATIONS[self.activation](near)
        x = x if self.stable else self.norm(x)
        found = [x]
        how: dict[str, Any] = {}
        if self.relative is not None:
            places = ops.arange(ops.dim(x, 1))
            how["bias"] = self.relative(places, places)
        for layer in self.layers:
            found.append(x := layer(x, mask=kept, **how))
        return ([*found, self.norm(x)] if self.stable else [*found, x]), kept

    def _kept(self, mask: Tensor, length: Any) -> Tensor:
        """Which frames are of the sound: what reaches beyond it is not."""
        count = ops.reduce_sum(mask, axis=1, keepdims=True)  # (B, 1)
        for frame in self.frames:
            count = ops.div(count - frame.kernel, frame.stride) + 1
        return ops.less(ops.unsqueeze(ops.arange(length), [0]), count)


def _sizes(config: Config) -> list[tuple[int, int, int, int]]:
    """Of each convolution: what it reads, what it makes, its kernel and its step."""
    given = {
        "conv_dim": config.raw("conv_dim", [512] * 7),
        "conv_kernel": config.raw("conv_kernel", [10, 3, 3, 3, 3, 2, 2]),
        "conv_stride": config.raw("conv_stride", [5, 2, 2, 2, 2, 2, 2]),
    }
    for name, sizes in given.items():
        fits = isinstance(sizes, list) and 0 < len(sizes) < 100
        if not fits or not all(type(n) is int and 0 < n < 1 << 16 for n in sizes):
            config.refuse(name, sizes, "a list of sizes")
        if len(sizes) != len(given["conv_dim"]):
            config.refuse(name, sizes, f"{len(given['conv_dim'])} sizes, as conv_dim has")
    config.expect("num_feat_extract_layers", len(given["conv_dim"]))
    features = given["conv_dim"]
    return [
        *zip([1, *features], features, given["conv_kernel"], given["conv_stride"], strict=False)
    ]


def shortest(fields: Mapping[str, Any]) -> int:
    """The fewest samples that make a frame, by the fields of a configuration."""
    least = 1
    sizes = _sizes(Config({"model_type": "", **fields}))
    for *_, kernel, stride in reversed(sizes):
        least = (least - 1) * stride + kernel
    return least
