"""DINOv3 (arXiv 2508.10104): images of any size, whose patches turn queries and keys."""

from typing import Any

import numpy as np
import onnx_ir as ir

from graphgen import nn, ops
from graphgen.models.published.config import ACTIVATIONS, Config
from graphgen.models.published.family import Family
from graphgen.models.published.vision import Layer, Parts, Patches, picture
from graphgen.nn.module import Parameter, TensorSpec, float32, normal
from graphgen.operands import Array
from graphgen.value import Tensor


class Images(nn.Module):
    """The learned vectors and then one for each patch, by rows: (B, C, H, W) to (B, T, D)."""

    def __init__(self, config: Config):
        features = config.take("hidden_size", int, 384)
        heads = config.take("num_attention_heads", int, 6)
        size, rest = divmod(features, heads)
        if rest or size % 4:
            config.refuse("num_attention_heads", heads, f"{features} by a multiple of 4")
        theta = config.take("rope_theta", float, 100.0)
        # A quarter of a head's features turn by the row, and the same by the column.
        self.frequencies: Array = theta ** -np.arange(0, 1, 4 / size, dtype=np.float32)
        biased = {n: config.take(f"{n}_bias", bool, n != "key") for n in ("query", "key", "value")}
        last = config.take("proj_bias", bool, True)
        hidden = config.take("intermediate_size", int, 1536)
        bias = config.take("mlp_bias", bool, True)
        gated = config.take("use_gated_mlp", bool, False)
        kind = config.choose("hidden_act", ACTIVATIONS, "gelu")
        config.ignore("layerscale_value", "drop_path_rate", "apply_layernorm", "stage_names")
        config.ignore("reshape_hidden_states", "out_features", "out_indices")
        config.ignore("pos_embed_shift", "pos_embed_jitter", "pos_embed_rescale")  # in training

        def attention() -> nn.Attention:
            made = nn.Attention(features, num_heads=heads, output_bias=last)
            for name in (name for name, has in biased.items() if not has):
                setattr(made, name, nn.Linear(features, features, bias=False))
            return made

        epsilon = config.take("layer_norm_eps", float, 1e-5)
        own = Parts(
            features=features,
            norm=lambda size: nn.LayerNorm(size, epsilon=epsilon),
            attention=attention,
            feed_forward=lambda: nn.FeedForward(
                features, hidden, activation=kind, gated=gated, bias=bias
            ),
            scaled=True,
        )
        self.features, self.picture = features, picture(config, 16)
        count = config.count("num_register_tokens", 0)
        self.patches = Patches(features, self.picture)
        self.whole = Parameter((1, 1, features), initialize=normal(0.02))
        # Of none, the checkpoint has a tensor, too.
        self.registers = Parameter((1, count, features), initialize=normal(0.02))
        self.layers = [Layer(own) for _ in range(config.take("num_hidden_layers", int, 12))]
        self.norm = own.norm(features)

    def __call__(self, pixel_values: Tensor) -> dict[str, Tensor]:
        y = self.patches(ops.cast_like(pixel_values, self.whole))  # (B, D, rows, columns)
        x = ops.swap_last(ops.reshape(y, [0, self.features, -1]))
        learned = (self.whole, self.registers)
        x = ops.concat(*(ops.expand(p, [ops.dim(x, 0), 1, 1]) for p in learned), x, axis=1)
        angles = self._angles(ops.dim(y, 2), ops.dim(y, 3))
        turn = tuple(ops.cast_like(turned, x) for turned in (ops.cos(angles), ops.sin(angles)))
        for layer in self.layers:
            x = layer(x, rotary=turn)
        x = self.norm(x)
        return {"last_hidden_state": x}

    def _angles(self, rows: Any, columns: Any) -> Tensor:
        """Those of the middles of patches, from -2π to 2π times a frequency, (1, T, R/2)."""
        size = len(self.frequencies)
        parts = [ops.unsqueeze(_middles(rows), [1, 2]), ops.unsqueeze(_middles(columns), [0, 2])]
        shape = [rows, columns, size]
        each = [ops.expand(p * (self.frequencies * np.float32(2 * np.pi)), shape) for p in parts]
        patches = ops.reshape(ops.concat(*each, axis=2), [1, -1, 2 * size])
        still = np.zeros((1, 1 + self.registers.shape[1], 2 * size), np.float32)
        return ops.concat(still, patches, axis=1)

    def inputs(self) -> dict[str, TensorSpec]:
        """Images of any size."""
        return {"pixel_values": float32["batch_size", self.picture.image[0], "height", "width"]}


def _middles(count: Any) -> Tensor:
    """From -1 to 1, of so many parts of equal width, float32."""
    places = ops.cast(ops.arange(count), to=ir.DataType.FLOAT)
    made: Tensor = (places + 0.5) / (ops.reduce_max(places, axis=0) + 1.0) * 2.0 - 1.0
    return made


FAMILIES = {
    "dinov3_vit": Family(
        tasks={"feature-extraction": Images},
        names={
            "patches": "embeddings.patch_embeddings",
            "whole": "embeddings.cls_token",
            "registers": "embeddings.register_tokens",
            "layers": "layer",
            "query": "q_proj",
            "key": "k_proj",
            "value": "v_proj",
            "output": "o_proj",
            "scale1": "layer_scale1.lambda1",
            "scale2": "layer_scale2.lambda1",
            "feed_forward": "mlp",
            "up": "up_proj",
            "gate": "gate_proj",
            "down": "down_proj",
        },
        older={r"model\.layer\.(.*)": r"layer.\1"},
        unused=r"embeddings\.mask_token",
        renamed={r"layer\.(.*)": r"model.layer.\1"},
    )
}
