"""Handwritten digits, by a vision transformer on patches of 2 x 2 pixels.

The 1,797 images of 8 x 8 gray pixels come with scikit-learn (Alpaydin & Kaynak, 1998). A patch is
to an image what a word is to a text (arXiv 2010.11929): a linear map makes a vector of it, a
learned position is added, an encoder looks at all of them, and their mean gives the digit. A fifth
of the images, with equal shares of the ten digits, is held out. Training shifts images by up to one
pixel, since 1,437 images are few.
"""

from argparse import Namespace
from collections.abc import Iterator
from typing import Any

import numpy as np
from command import command
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import graphgen as gg
from graphgen import nn, ops

SIZE, PATCH, CLASSES = 8, 2, 10
SIDE = SIZE // PATCH


class VisionTransformer(nn.Module):
    """Logits of the classes, from images (B, 8, 8) to (B, 10)."""

    def __init__(self, features: int, *, layers: int, num_heads: int, dropout: float):
        self.patches = nn.Linear(PATCH * PATCH, features)
        self.positions = nn.LearnedPositions(SIDE * SIDE, features)
        self.encoder = nn.Encoder(features, layers=layers, num_heads=num_heads, dropout=dropout)
        self.head = nn.Linear(features, CLASSES)

    def __call__(self, images: Any) -> dict[str, Any]:
        x = ops.reshape(images, [-1, SIDE, PATCH, SIDE, PATCH])
        x = ops.transpose(x, perm=[0, 1, 3, 2, 4])
        x = ops.reshape(x, [-1, SIDE * SIDE, PATCH * PATCH])  # (B, 16, 4)
        x = self.encoder(self.positions(self.patches(x)))  # (B, 16, D)
        return {"logits": self.head(ops.reduce_mean(x, [1], keepdims=0))}


def batches(images: Any, labels: Any, *, seed: int, size: int) -> Iterator[dict[str, Any]]:
    """Batches for ever of images that are shifted by -1, 0 or 1 pixel along both axes."""
    rng = np.random.default_rng(seed)
    padded = np.pad(images, ((0, 0), (1, 1), (1, 1)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, (SIZE, SIZE), axis=(1, 2))
    while True:
        chosen = rng.integers(len(images), size=size)
        rows, columns = rng.integers(3, size=(2, size))
        yield {"images": windows[chosen, rows, columns], "labels": labels[chosen]}


def run(options: Namespace) -> tuple[float, str]:
    """Train, export, fuse, and classify the images held out."""
    features, layers, size = (16, 1, 8) if options.quick else (64, 3, 64)
    data = load_digits()
    images = (data.images / 16).astype(np.float32)  # 0 to 1
    labels = data.target.astype(np.int64)
    train_images, test_images, train_labels, test_labels = train_test_split(
        images, labels, test_size=0.2, stratify=labels, random_state=options.seed
    )

    model = VisionTransformer(features, layers=layers, num_heads=4, dropout=0.1)
    spec = {"images": gg.float32["batch", SIZE, SIZE]}
    artifacts = options.output / "artifacts"
    gg.artifacts(
        gg.build(model, training=True, seed=options.seed, **spec),
        artifacts,
        optimizer=gg.AdamW(weight_decay=0.05, clip_norm=1.0),
    )
    schedule = gg.schedule.cosine(3e-3, warmup=options.steps // 10, steps=options.steps)
    trainer = gg.Trainer(artifacts, schedule=schedule, seed=options.seed, threads=options.threads)
    trainer.fit(
        lambda: batches(train_images, train_labels, seed=options.seed, size=size),
        steps=options.steps,
    )

    unfused = trainer.export(gg.build(model, **spec), options.output / "digits.onnx")
    best = gg.optimize(gg.load(unfused))
    session = gg.Session(gg.export(best, options.output / "digits.fused.onnx"))
    [logits] = session(images=test_images)
    right = float(np.mean(logits.argmax(axis=-1) == test_labels))
    return right, f"{right:.1%} of {len(test_labels)} digits held out are right"


if __name__ == "__main__":
    command(run, about=str(__doc__).splitlines()[0], steps=3000, wanted=0.97)
