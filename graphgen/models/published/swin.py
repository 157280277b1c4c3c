"""Swin (arXiv 2103.14030): attention in windows, which every other layer moves."""

from functools import partial
from typing import Any

from graphgen import nn, ops
from graphgen.models.published.config import Config
from graphgen.models.published.convnext import sizes_of
from graphgen.models.published.family import Family
from graphgen.models.published.heads import labels
from graphgen.models.published.swin_layers import Layer, Merge, Stage
from graphgen.models.published.vision import Patches, picture
from graphgen.nn.module import Parameter, TensorSpec, float32, normal
from graphgen.value import Tensor


class Images(nn.Module):
    """The vectors of the last patches, (B, T, D), and their mean, or the logits of labels."""

    def __init__(self, config: Config, *, classify: bool):
        width = config.take("embed_dim", int, 96)
        depths, heads = (
            sizes_of(config, name, default)
            for name, default in (("depths", [2, 2, 6, 2]), ("num_heads", [3, 6, 12, 24]))
        )
        if len(heads) != len(depths):
            config.refuse("num_heads", heads, f"{len(depths)} numbers, as depths has")
        last = width * 2 ** (len(depths) - 1)
        config.expect("hidden_size", last)
        config.expect("num_layers", len(depths))
        config.ignore("drop_path_rate", "encoder_stride", "path_norm", "stage_names")
        config.ignore("out_features", "out_indices")
        self.picture = picture(config, 4)
        grid: Any = [
            n // step for n, step in zip(self.picture.image[1:], self.picture.patch, strict=True)
        ]
        if any(n % s for n, s in zip(self.picture.image[1:], self.picture.patch, strict=True)):
            config.refuse("image_size", self.picture.image[1:], f"whole {self.picture.patch}")
        self.patches = Patches(width, self.picture)
        self.first_norm = nn.LayerNorm(width)
        self.positions = None
        if config.take("use_absolute_embeddings", bool, False):
            self.positions = Parameter((1, grid[0] * grid[1], width), initialize=normal(0.02))
        self.stages = list[Stage]()
        for number, (depth, count) in enumerate(zip(depths, heads, strict=True)):
            if width % count:
                config.refuse("num_heads", heads, f"{count} a divisor of {width}")
            layers = [Layer(config, width, count, grid, n % 2 == 1) for n in range(depth)]
            ends = number == len(depths) - 1
            self.stages.append(Stage(layers, None if ends else Merge(width, grid)))
            width, grid = 2 * width, tuple((n + 1) // 2 for n in grid)
        self.norm = nn.LayerNorm(last, epsilon=config.take("layer_norm_eps", float, 1e-5))
        self.width = self.patches.weight.shape[0]
        self.classifier = nn.Linear(last, labels(config)) if classify else None

    def __call__(self, pixel_values: Tensor) -> dict[str, Tensor]:
        y = self.patches(ops.cast_like(pixel_values, self.patches.weight))
        x = self.first_norm(ops.swap_last(ops.reshape(y, [0, self.width, -1])))
        x = x if self.positions is None else x + self.positions
        for stage in self.stages:
            x = stage(x)
        x = self.norm(x)
        y = ops.reduce_mean(x, axis=1, keepdims=False)
        if self.classifier is not None:
            return {"logits": self.classifier(y)}
        return {"pooler_output": y, "last_hidden_state": x}

    def inputs(self) -> dict[str, TensorSpec]:
        """Images of the size that the windows are made for."""
        return {"pixel_values": float32["batch_size", *self.picture.image]}


_LAYER = r"(.*\.blocks\.\d+\.)"
FAMILY = Family(
    tasks={
        "image-classification": partial(Images, classify=True),
        "feature-extraction": partial(Images, classify=False),
    },
    names={
        "patches": "swin.embeddings.patch_embeddings.projection",
        "first_norm": "swin.embeddings.norm",
        "positions": "swin.embeddings.position_embeddings",
        "stages": "swin.encoder.layers",
        "norm": "swin.layernorm",
        "layers": "blocks",
        "norm1": "layernorm_before",
        "query": "self.query",
        "key": "self.key",
        "value": "self.value",
        "attention.output": "output.dense",
        "table": "attention.self.relative_position_bias_table",
        "norm2": "layernorm_after",
        "feed_forward": "",
        "up": "intermediate.dense",
        "down": "output.dense",
        "merge": "downsample",
        "merge.norm": "norm",
    },
    unused=r".*relative_position_index|.*\.mask_token|classifier\..*|decoder\..*",
    prefix="swin.",
    renamed={
        rf"{_LAYER}attention\.self\.query": r"\1attention.q_proj",
        rf"{_LAYER}attention\.self\.key": r"\1attention.k_proj",
        rf"{_LAYER}attention\.self\.value": r"\1attention.v_proj",
        rf"{_LAYER}attention\.output\.dense": r"\1attention.o_proj",
        rf"{_LAYER}intermediate\.dense": r"\1mlp.fc1",
        rf"{_LAYER}output\.dense": r"\1mlp.fc2",
    },
)
