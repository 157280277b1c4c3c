"""Text goldens of one layer of each kind, unfused and fused; `make goldens` writes them afresh."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx_ir as ir
import pytest

import graphgen as gg
from graphgen import nn
from graphgen.laboratory.text import short_text
from graphgen.passes import optimize

FOLDER = Path(__file__).parent / "goldens"
X, MEMORY = gg.float32["batch", "seq", 16], gg.float32["batch", "source", 16]
OPTIONS: dict[str, Any] = {"num_heads": 4, "hidden": 32, "activation": "relu"}


def encoder() -> ir.Model:
    layer = nn.EncoderLayer(16, placement="post", **OPTIONS)
    return gg.build(layer, primitives=True, x=X, mask=gg.bool_["batch", "seq"])


def decoder() -> ir.Model:
    layer = nn.EncoderLayer(16, placement="pre", norm="rms", causal=True, **OPTIONS)
    return gg.build(layer, primitives=True, x=X)


def encoder_decoder() -> ir.Model:
    layer = nn.DecoderLayer(16, placement="post", **OPTIONS)
    return gg.build(
        layer, primitives=True, x=X, memory=MEMORY, memory_mask=gg.bool_["batch", "source"]
    )


LAYERS: dict[str, Callable[[], ir.Model]] = {
    "encoder": encoder,
    "decoder": decoder,
    "encoder_decoder": encoder_decoder,
}


def texts() -> dict[str, str]:
    found = {}
    for name, make in LAYERS.items():
        model = make()
        found[f"{name}_unfused"] = short_text(model, nested=True)
        found[f"{name}_fused"] = short_text(optimize(model).model, nested=True)
    return found


@pytest.mark.parametrize("name", [f"{n}_{s}" for n in LAYERS for s in ("unfused", "fused")])
def test_golden(name: str, all_texts: dict[str, str]) -> None:
    wanted = (FOLDER / f"{name}.txt").read_text()
    assert all_texts[name] == wanted, "read the difference; `make goldens` if it is meant"
    assert len(wanted.splitlines()) < 60


@pytest.fixture(scope="module")
def all_texts() -> dict[str, str]:
    return texts()


if __name__ == "__main__" and sys.argv[1:] == ["--remake"]:
    FOLDER.mkdir(exist_ok=True)
    for golden, text in texts().items():
        (FOLDER / f"{golden}.txt").write_text(text)
        print(f"{golden}: {len(text.splitlines())} lines")
