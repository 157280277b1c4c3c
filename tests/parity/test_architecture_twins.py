"""Architectures against their twins in torch: outputs and all gradients of the same weights."""

from typing import Any

import numpy as np
import pytest
from torch_twins import check, of_module

from graphgen.models import create, find

torch = pytest.importorskip("torch", reason="needs torch: make parity")
from twins import conformer, dit, gemma, mamba, moe, whisper  # noqa: E402

pytestmark = pytest.mark.parity
RNG = np.random.default_rng(23)


def normal(*shape: int) -> Any:
    return RNG.standard_normal(shape, np.float32)


def test_dit() -> None:
    sizes = {"features": 8, "layers": 1, "num_heads": 2, "classes": 5}
    sizes |= {"channels": 3, "image_size": 6, "patch_size": 2}

    def twin(w: Any, **feeds: Any) -> Any:
        kernel = w["patches.weight"].reshape(2, 2, 3, 8).permute(3, 2, 0, 1)  # (D, C, p, p)
        return run({**w, "patches.weight": kernel}, **feeds)

    run = of_module(
        dit.DiT(**sizes),
        {
            "attention.out_proj": "attention.output",
            r"feed_forward\.0": "feed_forward.up",
            r"feed_forward\.2": "feed_forward.down",
            r"time\.0": "time1",
            r"time\.2": "time2",
            r"modulation\.1": "modulation",
        },
    )
    feeds = {"image": normal(3, 3, 6, 6), "time": np.array([0, 3.5, 20], np.float32)}
    feeds["class_ids"] = np.array([0, 5, 2])
    check(create("dit", **sizes), twin, find("dit").specs(**sizes), feeds, spread=0.4)


@pytest.mark.parametrize("frames", [1, 14])
def test_conformer(frames: int) -> None:
    sizes = {"vocabulary": 7, "features": 8, "layers": 2, "num_heads": 2, "kernel": 3, "mels": 5}
    names = {r"(feed_forward\d)\.0": r"\1.up", r"(feed_forward\d)\.2": r"\1.down"}
    feeds = {"frames": normal(3, frames, 5), "lengths": np.array([frames, frames // 2 + 1, 1])}
    twin = of_module(conformer.Conformer(**sizes), names)
    check(create("conformer", **sizes), twin, find("conformer").specs(**sizes), feeds, spread=0.4)


@pytest.mark.parametrize("frames", [1, 9])
def test_whisper(frames: int) -> None:
    sizes = {"vocabulary": 7, "features": 8, "layers": 2, "num_heads": 2, "mels": 5, "length": 6}
    names = {
        "positions$": "positions.weight",
        "self_attn": "attention",
        "multihead_attn": "cross_attention",
        "out_proj": "output",
        "linear1": "feed_forward.up",
        "linear2": "feed_forward.down",
        r"norm(\d)": r"residual\1.norm",
    }
    feeds = {"frames": normal(2, frames, 5), "input_ids": RNG.integers(0, 7, (2, 4))}
    twin = of_module(whisper.Whisper(**sizes), names)
    check(create("whisper", **sizes), twin, find("whisper").specs(**sizes), feeds, spread=0.4)


@pytest.mark.parametrize("tokens", [1, 8])
def test_gemma(tokens: int) -> None:
    sizes = {"vocabulary": 7, "features": 8, "layers": 2, "num_heads": 4, "kv_heads": 2}
    sizes |= {"head_dim": 6, "hidden": 10, "window": 3}
    twin = of_module(gemma.Gemma(**sizes), {})
    feeds = {"input_ids": RNG.integers(0, 7, (3, tokens))}
    check(create("gemma", **sizes), twin, find("gemma").specs(**sizes), feeds)


@pytest.mark.parametrize("tokens", [1, 8])
def test_moe(tokens: int) -> None:
    sizes = {"vocabulary": 7, "features": 16, "layers": 2, "num_heads": 4, "kv_heads": 2}
    sizes |= {"hidden": 10, "experts": 5}
    twin = of_module(moe.MoEDecoder(**sizes), {})
    feeds = {"input_ids": RNG.integers(0, 7, (3, tokens))}
    check(create("moe", **sizes), twin, find("moe").specs(**sizes), feeds)


@pytest.mark.parametrize("tokens", [1, 8])
def test_mamba(tokens: int) -> None:
    sizes = {"vocabulary": 7, "features": 20, "layers": 2, "state": 3}
    twin = of_module(mamba.Mamba(**sizes), {})
    feeds = {"input_ids": RNG.integers(0, 7, (3, tokens))}
    check(create("mamba", **sizes), twin, find("mamba").specs(**sizes), feeds, spread=0.4)
