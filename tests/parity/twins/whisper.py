"""The twin of graphgen/models/whisper.py in PyTorch."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def sinusoids(length: int, features: int) -> Tensor:
    rates = torch.exp(torch.arange(0, features, 2) * (-math.log(10000.0) / features))
    angles = torch.arange(length)[:, None] * rates
    return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(1)


class Whisper(nn.Module):
    def __init__(
        self,
        vocabulary: int = 8192,
        features: int = 256,
        layers: int = 4,
        num_heads: int = 4,
        mels: int = 80,
        length: int = 448,
    ):
        super().__init__()
        self.convolution1 = nn.Conv1d(mels, features, 3, padding=1)
        self.convolution2 = nn.Conv1d(features, features, 3, stride=2, padding=1)
        options = {"activation": "gelu", "batch_first": True, "norm_first": True, "dropout": 0.0}
        layer = nn.TransformerEncoderLayer(features, num_heads, 4 * features, **options)
        self.encoder = nn.TransformerEncoder(layer, layers, nn.LayerNorm(features))
        self.embedding = nn.Embedding(vocabulary, features)
        self.positions = nn.Parameter(0.02 * torch.randn(length, features))
        layer = nn.TransformerDecoderLayer(features, num_heads, 4 * features, **options)
        self.decoder = nn.TransformerDecoder(layer, layers, nn.LayerNorm(features))

    def encode(self, frames: Tensor) -> Tensor:  # (B, S, mels)
        x = F.gelu(self.convolution1(frames.mT))  # (B, D, S)
        x = F.gelu(self.convolution2(x)).mT  # (B, S / 2, D)
        return self.encoder(x + sinusoids(*x.shape[1:]))

    def decode(self, input_ids: Tensor, memory: Tensor) -> Tensor:  # (B, T), (B, S / 2, D)
        length = input_ids.shape[1]
        x = self.embedding(input_ids) + self.positions[:length]  # (B, T, D)
        causal = nn.Transformer.generate_square_subsequent_mask(length)
        x = self.decoder(x, memory, tgt_mask=causal, tgt_is_causal=True)
        return x @ self.embedding.weight.T  # (B, T, vocabulary)

    def forward(self, frames: Tensor, input_ids: Tensor) -> Tensor:
        return self.decode(input_ids, self.encode(frames))
