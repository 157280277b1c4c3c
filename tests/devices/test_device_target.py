"""Graphs made for a device: where their nodes run, and what they compute there."""

import os
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import published_encoders
import published_vision
import pytest
from devices_here import WEBGPU, There
from published_decoders import DECODERS, RESULTS, checkpoint, ids, mask
from random_checkpoints import random_checkpoint
from small_models import relative_rms
from test_models import feeds as feeds_of, small

import graphgen as gg
from graphgen.export.write import to_bytes
from graphgen.measure.reference import evaluate
from graphgen.models import ARCHITECTURES, find
from graphgen.models.published import from_folder
from graphgen.providers import devices_of, floats_elsewhere, placement
from graphgen.runtime import import_runtime

pytestmark = pytest.mark.filterwarnings("ignore::graphgen.GraphgenWarning")
FIXTURES = Path(__file__).resolve().parents[1] / "fixtures"
EXPORTS = [path for path in sorted(FIXTURES.glob("*.onnx")) if path.stem != "layer_dynamo_20"]
MOVED = {"Transpose", "Gather"}
"""What the runtime itself makes of sizes and masks when it loads a file."""

ROUNDED = {"falcon, alibi": {"Cast"}}
"""What rounds to bfloat16, as transformers does: WebGPU has no such type."""

NAMES = [name for name in ARCHITECTURES if name != "transformer-big"]
"""Of architectures; ALL=1 tries every one, else every third is tried."""

SOME = ["smollm3", "mixtral", "gemma2", "cohere2", "glm4", "gptj", "bloom"]
"""Decoders that differ in positions, norms, feed-forward or attention; ALL=1 tries every one."""

SHORT = {"window": 8, "block": 4, "image_size": 8}
"""Sizes that leave attention less than 32 queries: with more, the software device is wrong."""


def check(
    there: There,
    model: ir.Model,
    feeds: dict[str, Any],
    known: list[Any],
    wanted: list[Any],
    also: Iterable[str] = (),
) -> None:
    """No floats on the CPU but by `also`, and what is wanted, within 1e-5."""
    data = to_bytes(gg.optimize(model, target=there.name))
    session = gg.Session(data, provider=there.name)
    assert {*floats_elsewhere(data, placement(session._session), there.own)} <= MOVED | {*also}
    for exact, result, where in zip(wanted, session(feeds), known, strict=True):
        assert relative_rms(exact[where], result[where]) < 1e-5


@pytest.mark.parametrize("name", NAMES if "ALL" in os.environ else NAMES[::3])
def test_every_architecture_stays_on_the_device(there: There, name: str) -> None:
    sizes = {size: n for size, n in SHORT.items() if size in find(name).sizes()}
    specs, feeds = find(name).specs(**sizes), feeds_of(name)
    model = gg.build(small(name, **sizes), **specs)
    if name == "dit":
        feeds["image"] = feeds["image"][..., :8, :8]
    check(there, model, feeds, [slice(None)] * len(model.graph.outputs), evaluate(model, feeds))


@pytest.mark.parametrize("which", DECODERS if "ALL" in os.environ else SOME)
def test_decoders_give_there_the_numbers_of_transformers(
    there: There, which: str, tmp_path: Path
) -> None:
    model = from_folder(checkpoint(tmp_path, which)).model
    kept = mask()
    places = np.maximum(kept.cumsum(1) - 1, 0)
    feeds = {"input_ids": ids(), "attention_mask": kept, "position_ids": places}
    names = [str(value.name) for value in model.graph.inputs]
    for name, value in zip(names, model.graph.inputs, strict=True):
        if name.startswith("past") and value.shape is not None:
            feeds[name] = np.zeros((3, value.shape[1], 0, value.shape[3]), np.float32)
    [logits] = [value for value in model.graph.outputs if value.name == "logits"]
    model.graph.outputs[:] = [logits]
    given = {n: feeds[n] for n in names}
    check(there, model, given, [kept.astype(bool)], [RESULTS[which]], ROUNDED.get(which, ()))


OTHERS = {
    **dict.fromkeys(published_encoders.ENCODERS, published_encoders),
    **dict.fromkeys(published_vision.VISION, published_vision),
}


@pytest.mark.parametrize("which", OTHERS if "ALL" in os.environ else ["modernbert"])
def test_encoders_and_models_of_images_stay_on_the_device(
    there: There, which: str, tmp_path: Path
) -> None:
    source = OTHERS[which]
    model = from_folder(random_checkpoint(tmp_path / "in", source.fields(which))).model
    names = [str(value.name) for value in model.graph.inputs]
    given = {name: array for name, array in source.inputs(which).items() if name in names}
    kept = given["attention_mask"].astype(bool) if source is published_encoders else slice(None)
    wanted = evaluate(model, given)
    check(there, model, given, [kept if w.ndim == 3 else slice(None) for w in wanted], wanted)


@WEBGPU.alone
@pytest.mark.filterwarnings("default::graphgen.GraphgenWarning")
def test_attention_of_software_is_told() -> None:
    """If it becomes right for 32 queries, the warning has to go."""

    def attend(x: Any) -> Any:
        return gg.ops.attention(x, x, x, q_num_heads=2, kv_num_heads=2)

    best = gg.optimize(gg.build(attend, x=gg.float32[1, "t", 16]), target="webgpu")
    [device, *_] = devices_of("test", import_runtime(), "webgpu")
    if device.device.type.name != "CPU":
        pytest.skip("the WebGPU device is none of software")
    with pytest.warns(gg.GraphgenWarning, match="software, .*: 1 MultiHeadAttention"):
        session = gg.Session(best, provider="webgpu")
    for t, right in ((31, True), (32, False)):
        x = np.random.default_rng(0).standard_normal((1, t, 16), np.float32)
        [wanted] = evaluate(best.model, {"x": x})
        assert (relative_rms(wanted, session(x=x)[0]) < 1e-5) is right


@WEBGPU.alone
@pytest.mark.filterwarnings("default::graphgen.GraphgenWarning")
def test_channels_that_are_mixed_are_told_and_become_zeros() -> None:
    """If 6 channels become right as they are, the warning has to go."""
    w = np.random.default_rng(1).standard_normal((8, 6, 3, 3), np.float32)
    model = gg.build(lambda x: gg.ops.conv(x, w), x=gg.float32[1, 6, 9, 9])
    x = np.random.default_rng(0).standard_normal((1, 6, 9, 9), np.float32)
    [wanted] = evaluate(model, {"x": x})
    with pytest.warns(gg.GraphgenWarning, match="1 Conv of 6 channels to 8 wrong"):
        session = gg.Session(model, provider="webgpu")
    assert relative_rms(wanted, session(x=x)[0]) > 0.5
    with warnings.catch_warnings(action="error"):
        session = gg.Session(gg.optimize(model, target="webgpu"), provider="webgpu", strict=True)
    assert relative_rms(wanted, session(x=x)[0]) < 1e-6


@pytest.mark.parametrize("path", EXPORTS, ids=lambda path: path.stem)
def test_what_others_exported_stays_on_the_device(there: There, path: Path) -> None:
    """What a padded row gives is only compared where torch defines it."""
    model = gg.load(path)
    with np.load(FIXTURES / f"{path.stem.rsplit('_', 3)[0]}.npz") as file:
        arrays = dict(file)
    feeds = {str(value.name): arrays.pop(str(value.name)) for value in model.graph.inputs}
    known = [~np.isnan(wanted) for wanted in arrays.values()]
    check(there, model, feeds, known, evaluate(model, feeds))
