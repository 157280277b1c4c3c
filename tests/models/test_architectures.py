"""Modern architectures: gradients, and what an input must not change."""

from typing import Any

import numpy as np
import pytest
from gradients import checked_gradients
from small_models import vary

from graphgen import nn, ops
from graphgen.models import create, find

RNG = np.random.default_rng(29)
TINY: dict[str, dict[str, Any]] = {
    "dit": {"channels": 2, "image_size": 4, "classes": 3},
    "conformer": {"kernel": 3, "mels": 3},
    "whisper": {"mels": 3, "length": 5},
    "gemma": {"layers": 2, "kv_heads": 1, "head_dim": 4, "hidden": 8, "window": 3},
    "moe": {"kv_heads": 1, "hidden": 8, "experts": 3},
    "mamba": {"state": 3, "kernel": 3},
}


def normal(*shape: int) -> Any:
    return RNG.standard_normal(shape, np.float32)


def ids(count: int, *shape: int) -> Any:
    return RNG.permutation(np.arange(np.prod(shape)) % count).reshape(shape)


FEEDS = {
    "dit": {"image": normal(2, 2, 4, 4), "time": normal(2) * 9, "class_ids": np.array([3, 1])},
    "conformer": {"frames": normal(2, 11, 3), "lengths": np.array([11, 6])},
    "whisper": {"frames": normal(2, 7, 3), "input_ids": ids(5, 2, 4)},
    "gemma": {"input_ids": ids(5, 2, 6)},
    "moe": {"input_ids": ids(5, 2, 6)},
    "mamba": {"input_ids": ids(5, 2, 6)},
}


def sizes_of(name: str) -> dict[str, Any]:
    sizes = {"vocabulary": 5, "features": 8, "layers": 1, "num_heads": 2} | TINY[name]
    return {size: value for size, value in sizes.items() if size in find(name).sizes()}


def total(y: Any) -> Any:
    """A loss that is not linear in y."""
    return ops.reduce_sum(ops.tanh(y), None, keepdims=0)


@pytest.mark.share(3)
@pytest.mark.parametrize("name", TINY)
def test_gradients_are_the_central_difference(name: str) -> None:
    sizes = sizes_of(name)
    module: Any = vary(create(name, **sizes))
    checked_gradients(module, total, find(name).specs(**sizes), FEEDS[name])


def test_a_diffusion_transformer_starts_without_its_blocks() -> None:
    """Gates are zero at first, so all that a fresh model does to patches is linear."""
    module: Any = create("dit", **sizes_of("dit"))
    nn.initialize(module)
    image, time, classes = FEEDS["dit"].values()
    before = module(image, time, classes)["noise"]
    module.blocks = []
    np.testing.assert_array_equal(before, module(image, time, classes)["noise"])
    np.testing.assert_array_equal(before, module(image, time + 1, classes[::-1])["noise"])


def test_padding_does_not_change_what_a_conformer_hears() -> None:
    """Nor do frames that are not there at all."""
    module: Any = vary(create("conformer", **sizes_of("conformer")))
    nn.initialize(module)
    frames, lengths = FEEDS["conformer"].values()
    before = module(frames, lengths)["logits"]
    assert before.shape[1] == 3  # of 11 frames, then 6
    changed = frames.copy()
    changed[1, 6:] = 50.0
    after = module(changed, lengths)["logits"]
    np.testing.assert_array_equal(before[0], after[0])
    np.testing.assert_array_equal(before[1, :2], after[1, :2])  # 6 frames, 3, 2
    alone = module(frames[1:, :6], lengths[1:])["logits"]
    np.testing.assert_allclose(before[1, :2], alone[0], rtol=1e-4, atol=1e-5)
    changed[1, 5] += 1.0
    assert not np.array_equal(before[1, :2], module(changed, lengths)["logits"][1, :2])


def test_a_token_of_whisper_depends_on_all_frames_and_earlier_tokens() -> None:
    module: Any = vary(create("whisper", **sizes_of("whisper")))
    nn.initialize(module)
    frames, tokens = FEEDS["whisper"].values()
    before = module(frames, tokens)["logits"]
    later = tokens.copy()
    later[:, 2] = (later[:, 2] + 1) % 5
    after = module(frames, later)["logits"]
    np.testing.assert_array_equal(before[:, :2], after[:, :2])
    assert (before[:, 2:] != after[:, 2:]).any(-1).all()
    heard = frames.copy()
    heard[:, -1] += 1.0
    assert (before != module(heard, tokens)["logits"]).any(-1).all()


def changed(name: str, position: int, **sizes: Any) -> list[int]:
    """The positions whose logits change with the token at one, in every row."""
    module: Any = vary(create(name, **sizes_of(name) | sizes))
    nn.initialize(module)
    tokens = ids(5, 2, 9)
    other = tokens.copy()
    other[:, position] = (other[:, position] + 1) % 5
    differs = (module(tokens)["logits"] != module(other)["logits"]).any(-1)
    assert (differs[0] == differs[1]).all()
    return [int(i) for i in np.flatnonzero(differs[0])]


def test_a_local_layer_of_gemma_sees_a_window_and_a_global_one_all() -> None:
    assert changed("gemma", 2, layers=1) == [2, 3, 4]
    assert changed("gemma", 2, layers=2) == [2, 3, 4, 5, 6, 7, 8]
    assert changed("gemma", 2, layers=1, window=4) == [2, 3, 4, 5]
