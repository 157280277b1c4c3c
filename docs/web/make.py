"""Write the page that trains in a browser, and what it trains: digits, and adapters of a decoder.

python docs/web/make.py SITE    # then copy onnxruntime-web/dist to SITE/dist, and serve SITE

losses.json has the losses of the same steps by `gg.Trainer`: the page shows both.
"""

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.datasets import load_digits

import graphgen as gg
from graphgen import nn, ops
from graphgen.models.decoder import DecoderLM
from graphgen.train.web import write_web

HERE, STEPS, RATE = Path(__file__).resolve().parent, 30, 0.01
TEXT = "A low-rank adapter leaves a weight as it is and trains a small update of it. " * 8


class Digits(nn.Module):
    """Logits of the ten digits, of images (B, 64)."""

    def __init__(self) -> None:
        self.first, self.second = nn.Linear(64, 32), nn.Linear(32, 10)

    def __call__(self, images: Any) -> dict[str, Any]:
        return {"logits": self.second(ops.relu(self.first(images)))}


def digits(folder: Path) -> Iterator[dict[str, Any]]:
    """Batches of 32 of the 1,797 images that come with scikit-learn."""
    model = gg.build(Digits(), images=gg.float32["batch", 64])
    gg.artifacts(model, folder, optimizer=gg.AdamW(weight_decay=0.05, clip_norm=1.0))
    data, random = load_digits(), np.random.default_rng(0)
    for _ in range(STEPS):
        rows = random.integers(len(data.target), size=32)
        images = (data.data[rows] / 16).astype(np.float32)
        yield {"images": images, "labels": data.target[rows].astype(np.int64)}


def adapters(folder: Path) -> Iterator[dict[str, Any]]:
    """Batches of 4 pieces of a text, a letter a token; dropout of the adapters depends on steps."""
    model = gg.build(DecoderLM(128, 32, layers=2, num_heads=2), input_ids=gg.int64["batch", "seq"])
    gg.artifacts(model, folder, lora=gg.LoRA(".", 4, 32.0, dropout=0.1))
    tokens, random = np.frombuffer(TEXT.encode(), np.uint8), np.random.default_rng(0)
    for _ in range(STEPS):
        starts = random.integers(len(tokens) - 33, size=4)
        rows = np.stack([tokens[at : at + 33] for at in starts]).astype(np.int64)
        yield {"input_ids": rows[:, :-1], "labels": rows[:, 1:]}


def main(site: Path) -> None:
    """Write the site."""
    site.mkdir(parents=True, exist_ok=True)
    for file in ("index.html", "train.mjs"):
        shutil.copyfile(HERE / file, site / file)
    losses: dict[str, list[float]] = {}
    for task in (digits, adapters):
        name = task.__name__
        batches = [*task(site / "artifacts" / name)]
        write_web(site / "artifacts" / name, site / name)
        schedule = gg.schedule.constant(RATE)
        trainer = gg.Trainer(site / "artifacts" / name, schedule=schedule, threads=1)
        losses[name] = [line["loss"] for line in trainer.fit(batches, progress=False)]
        losses[name].append(trainer.evaluate(batches[-1:]))
        rows = [{key: array.tolist() for key, array in batch.items()} for batch in batches]
        types = {key: array.dtype.name for key, array in batches[0].items()}
        (site / f"{name}.json").write_text(
            json.dumps({"rate": RATE, "types": types, "batches": rows})
        )
    (site / "losses.json").write_text(json.dumps(losses))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
