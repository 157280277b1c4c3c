"""An encoder-decoder from sound to text, as Whisper is (Radford et al., arXiv 2212.04356)."""

from typing import Any

from graphgen import nn, ops
from graphgen.errors import positive
from graphgen.nn.module import float32, int64
from graphgen.value import Tensor


class Whisper(nn.Module):
    """The logits of each next token, (B, S, mels) and (B, T) to (B, T, vocabulary).

    Two convolutions make one frame of two (2.2). Positions are sinusoidal for frames, learned for
    tokens, and one table serves the tokens and the output layer.

    Args:
        vocabulary: The number of tokens.
        features: D, the size of each frame's and each token's vector; even.
        layers: The number of layers of the encoder, and of the decoder.
        num_heads: Heads of attention; they divide D.
        mels: The bands of each frame's spectrum.
        length: The number of tokens that have a learned position: the longest text.
    """

    def __init__(
        self,
        vocabulary: int = 8192,
        features: int = 256,
        *,
        layers: int = 4,
        num_heads: int = 4,
        mels: int = 80,
        length: int = 448,
    ):
        positive("Whisper", vocabulary=vocabulary, features=features, layers=layers)
        positive("Whisper", num_heads=num_heads, mels=mels, length=length)
        self.convolution1 = nn.Convolution(mels, features, kernel=3)
        self.convolution2 = nn.Convolution(features, features, kernel=3, stride=2)
        self.frame_positions = nn.SinusoidalPositions(features)
        self.encoder = nn.Encoder(features, layers=layers, num_heads=num_heads)
        self.embedding = nn.Embedding(vocabulary, features)
        self.positions = nn.LearnedPositions(length, features)
        self.decoder = nn.Decoder(features, layers=layers, num_heads=num_heads)

    def encode(self, frames: Tensor) -> Tensor:
        """The memory of the sound, (B, S, mels) to (B, S/2, D)."""
        x = ops.gelu(self.convolution1(frames))  # (B, S, D)
        x = ops.gelu(self.convolution2(x))  # (B, S/2, D)
        return self.encoder(self.frame_positions(x))

    def decode(self, input_ids: Tensor, memory: Tensor) -> Tensor:
        """The logits, from (B, T) and (B, S/2, D) to (B, T, vocabulary)."""
        x = self.decoder(self.positions(self.embedding(input_ids)), memory)  # (B, T, D)
        return self.embedding.logits(x)

    def __call__(self, frames: Tensor, input_ids: Tensor) -> dict[str, Tensor]:
        return {"logits": self.decode(input_ids, self.encode(frames))}


def inputs(mels: int = 80) -> dict[str, Any]:
    """What `build` needs to know about the arguments."""
    return {"frames": float32["batch", "frames", mels], "input_ids": int64["batch", "seq"]}
