"""wav2vec 2.0 (2006.11477), HuBERT (2106.07447), WavLM (2110.13900): what a sound is, or says."""

from functools import partial
from typing import Any

from graphgen import nn, ops
from graphgen.models.published.config import Config
from graphgen.models.published.family import Family
from graphgen.models.published.heads import labels
from graphgen.models.published.hearing import Hearing
from graphgen.nn.module import Parameter, TensorSpec, float32, int64, ones
from graphgen.value import Tensor

SAMPLES = "input_values"


class Sounds(nn.Module):
    """What is made of the frames for a task."""

    one_way = "the convolution of positions has other weights in a checkpoint, g v / |v|"

    def __init__(self, config: Config, *, classify: bool = False, spell: bool = False):
        self.hearing = Hearing(config)
        features = self.hearing.features
        self.lm_head = self.projector = self.classifier = self.shares = None
        size = config.take("classifier_proj_size", int, 256)
        count = config.take("vocab_size", int, 32)
        weighted = config.take("use_weighted_layer_sum", bool, False)
        if spell:
            self.lm_head = nn.Linear(features, count)
        if classify:
            self.projector = nn.Linear(features, size)
            self.classifier = nn.Linear(size, labels(config))
            if weighted:
                self.shares = Parameter((1 + len(self.hearing.layers),), initialize=ones)

    def __call__(
        self, input_values: Tensor, attention_mask: Tensor | None = None
    ) -> dict[str, Tensor]:
        found, kept = self.hearing(input_values, attention_mask)
        x = found[-1]  # (B, T, D)
        if self.lm_head is not None:
            return {"logits": self.lm_head(x)}  # (B, T, vocabulary)
        if self.projector is None or self.classifier is None:
            return {"last_hidden_state": x}
        if self.shares is not None:
            # (B, T, D, L + 1)
            each = ops.concat(*(ops.unsqueeze(y, [3]) for y in found[:-1]), axis=3)
            x = ops.reduce_sum(each * ops.softmax(self.shares, axis=0), axis=3, keepdims=False)
        y = self.projector(x)
        if kept is None:
            mean = ops.reduce_mean(y, axis=1, keepdims=False)
        else:
            weights = ops.unsqueeze(ops.cast_like(kept, y), [2])
            mean = ops.reduce_sum(y * weights, axis=1, keepdims=False)
            mean = mean / ops.reduce_sum(weights, axis=1, keepdims=False)
        return {"logits": self.classifier(mean)}  # (B, labels)

    def inputs(self) -> dict[str, TensorSpec]:
        """Samples, and which of them are no padding, where the checkpoint was trained with that."""
        found: dict[str, TensorSpec] = {SAMPLES: float32["batch_size", "sequence_length"]}
        if self.hearing.masked:
            found["attention_mask"] = int64["batch_size", "sequence_length"]
        return found


def _names(config_type: str) -> dict[str, Any]:
    return {
        "hearing": config_type,
        "frames": "feature_extractor.conv_layers",
        "gain": "layer_norm.weight",
        "shift": "layer_norm.bias",
        "first_norm": "feature_projection.layer_norm",
        "projection": "feature_projection.projection",
        "near": "encoder.pos_conv_embed.conv",
        "norm": "encoder.layer_norm",
        "layers": "encoder.layers",
        "norm1": "layer_norm",
        "after1": "layer_norm",
        "norm2": "final_layer_norm",
        "after2": "final_layer_norm",
        "query": "q_proj",
        "key": "k_proj",
        "value": "v_proj",
        "output": "out_proj",
        "up": "intermediate_dense",
        "down": "output_dense",
        "shares": "layer_weights",
        "relative": "encoder.layers.0.attention.rel_attn_embed",
        "gate": "gru_rel_pos_linear",
        "constant": "gru_rel_pos_const",
    }


FAMILIES = {
    kind: Family(
        tasks={
            "automatic-speech-recognition": partial(Sounds, spell=True),
            "audio-classification": partial(Sounds, classify=True),
            "feature-extraction": Sounds,
        },
        names=_names(kind),
        prefix=f"{kind}.",
        unused=rf"({kind}\.)?masked_spec_embed|quantizer\..*|project_(hid|q)\..*|lm_head\..*|"
        r"(projector|classifier)\..*|layer_weights",
    )
    for kind in ("wav2vec2", "hubert", "wavlm")
}
