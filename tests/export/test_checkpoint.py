"""The checkpoint file: round trips, the official runtime, damaged files, bad contents."""

import errno
import json
import os
import runpy
from collections.abc import Callable
from pathlib import Path

import flatbuffers
import ml_dtypes
import numpy as np
import pytest

from graphgen.errors import GraphgenError
from graphgen.export import checkpoint, checkpoint_data
from graphgen.export.checkpoint import Checkpoint, OptimizerState
from graphgen.export.checkpoint_data import Unchanged

FIXTURES = Path(__file__).parents[1] / "fixtures"
OFFICIAL = FIXTURES / "official.ckpt"
MAKE = runpy.run_path(str(FIXTURES / "make_official_checkpoint.py"))
DTYPES = [np.float32, np.float16, ml_dtypes.bfloat16, np.float64, np.int64, np.int32, np.bool_]


def example() -> Checkpoint:
    draw = np.random.default_rng(0)
    weight = draw.normal(size=(5, 7)).astype(np.float32)
    moments = draw.uniform(size=(2, 5, 7)).astype(np.float32)
    return Checkpoint(
        trainable={"z.weight": weight, "a.weight": weight.T},  # the second is not contiguous
        frozen={"ε": np.array(1e-5), "none": np.empty((0, 3), np.float32)},
        optimizer=OptimizerState(
            step=2**40,
            learning_rate=0.125,
            momentum0={"z.weight": moments[0], "a.weight": moments[0].T},
            momentum1={"z.weight": moments[1], "a.weight": moments[1].T},
        ),
        properties={"epoch": -(2**63), "loss": 0.5, "nan": float("nan"), "tokenizer": "größe"},
    )


def assert_same_tensors(actual: dict, expected: dict) -> None:
    assert list(actual) == list(expected)
    for name, array in expected.items():
        assert actual[name].dtype == array.dtype
        np.testing.assert_array_equal(actual[name], array, strict=True)


@pytest.fixture
def small_room(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A flatbuffer holds few bytes, so that tensors stand in a second file, as beyond 2 GiB."""
    monkeypatch.setattr(checkpoint, "_ROOM", request.param)


# One file; the parameters in a second one; the moments as well.
rooms = pytest.mark.parametrize("small_room", [1 << 30, 700, 100], indirect=True)


@rooms
def test_round_trip(tmp_path: Path, small_room: None) -> None:
    saved = example()
    saved.save(tmp_path / "checkpoint")
    loaded = Checkpoint.load(tmp_path / "checkpoint")
    assert_same_tensors(loaded.trainable, saved.trainable)
    assert_same_tensors(loaded.frozen, saved.frozen)
    assert (loaded.optimizer.step, loaded.optimizer.learning_rate) == (2**40, 0.125)
    assert_same_tensors(loaded.optimizer.momentum0, saved.optimizer.momentum0)
    assert_same_tensors(loaded.optimizer.momentum1, saved.optimizer.momentum1)
    assert repr(loaded.properties) == repr(saved.properties)
    loaded.trainable["z.weight"] += 1  # a writable copy: the file does not change
    again = Checkpoint.load(tmp_path / "checkpoint")
    assert_same_tensors(again.trainable, saved.trainable)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.__name__)
def test_dtypes(dtype: type, tmp_path: Path) -> None:
    arrays = {f"rank{rank}": np.ones((2,) * rank, dtype) for rank in range(5)}
    Checkpoint(arrays).save(tmp_path / "checkpoint")
    assert_same_tensors(Checkpoint.load(tmp_path / "checkpoint").trainable, arrays)


def test_empty_and_without_second_moment(tmp_path: Path) -> None:
    Checkpoint({}).save(tmp_path / "empty")
    empty = Checkpoint.load(tmp_path / "empty")
    assert (empty.trainable, empty.frozen, empty.optimizer, empty.properties) == ({}, {}, None, {})
    weight = {"w": np.ones(3, np.float32)}
    Checkpoint(weight, optimizer=OptimizerState(1, 0.5, weight, {})).save(tmp_path / "one")
    optimizer = Checkpoint.load(tmp_path / "one").optimizer
    assert_same_tensors(optimizer.momentum0, weight)
    assert optimizer.momentum1 == {}


def test_same_contents_same_bytes(tmp_path: Path) -> None:
    example().save(tmp_path / "first")
    Checkpoint.load(tmp_path / "first").save(tmp_path / "second")
    assert (tmp_path / "first").read_bytes() == (tmp_path / "second").read_bytes()


@rooms
def test_a_second_file_has_the_bytes(tmp_path: Path, small_room: None) -> None:
    """Each tensor of more than 64 bytes, at a multiple of 8; a smaller save removes it."""
    saved = example()
    saved.save(tmp_path / "checkpoint")
    own = [array.tobytes() for array in saved.trainable.values()]
    moments = [array.tobytes() for array in [*saved.tensors()][4:]]
    kept = {1 << 30: [], 700: own, 100: own + moments}[checkpoint._ROOM]
    second = tmp_path / "checkpoint.data"
    found = second.read_bytes() if second.exists() else b""
    assert sorted(found[at : at + 140] for at in range(0, len(found), 144)) == sorted(kept)
    Checkpoint(W).save(tmp_path / "checkpoint")
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]


def test_a_file_of_something_else_stays(tmp_path: Path) -> None:
    """As the weights of an ONNX model that is called like a checkpoint."""
    (tmp_path / "model.data").write_bytes(b"weights")
    for _ in range(2):
        Checkpoint(W).save(tmp_path / "model")
    assert (tmp_path / "model.data").read_bytes() == b"weights"


@pytest.mark.parametrize("small_room", [100], indirect=True)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: None, "checkpoint.data, which has its tensors, cannot be read: No such"),
        (lambda data: b"", "checkpoint.data is not the file that was written with it, or damaged"),
        (lambda data: data[:-8], "is not the file that was written with it, or damaged"),
        (lambda data: data[:9] + b"!" + data[10:], "is not the file that was written with it"),
    ],
)
def test_a_second_file_of_another_is_noticed(
    tmp_path: Path, small_room: None, change: Callable[[bytes], bytes | None], message: str
) -> None:
    example().save(tmp_path / "checkpoint")
    second = tmp_path / "checkpoint.data"
    changed = change(second.read_bytes())
    second.unlink() if changed is None else second.write_bytes(changed)
    with pytest.raises(GraphgenError, match=message):
        Checkpoint.load(tmp_path / "checkpoint")


def test_save_replaces_the_file(tmp_path: Path) -> None:
    """A reader that has the old file open goes on reading the old file."""
    Checkpoint({}).save(tmp_path / "checkpoint")
    with (tmp_path / "checkpoint").open("rb") as reader:
        example().save(tmp_path / "checkpoint")
        assert len(reader.read()) < 200 < (tmp_path / "checkpoint").stat().st_size
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]


def adamw_reference() -> dict[str, np.ndarray]:
    """The two steps of make_official_checkpoint.py by the formula of AdamW, in float64."""
    x, target = np.arange(12.0).reshape(4, 3) / 8, 1.0
    weight, first, second = MAKE["WEIGHT"].astype(np.float64), 0.0, 0.0
    for step in (1, 2):
        slope = x.T @ (x @ weight + MAKE["BIAS"] - target) / 4
        first = 0.9 * first + 0.1 * slope
        second = 0.999 * second + 0.001 * slope**2
        root = np.sqrt(second / (1 - 0.999**step)) + 1e-8
        weight = weight * (1 - 0.125 * 0.01) - 0.125 * first / (1 - 0.9**step) / root
    return {"weight": weight, "first": first, "second": second}


def assert_trained(checkpoint: Checkpoint) -> None:
    expected = adamw_reference()
    state = checkpoint.optimizer
    np.testing.assert_allclose(checkpoint.trainable["weight"], expected["weight"], atol=1e-6)
    np.testing.assert_allclose(state.momentum0["weight"], expected["first"], atol=1e-7)
    # The official kernel takes 1 - 0.999 in float32, which is 1.3e-5 too small.
    np.testing.assert_allclose(state.momentum1["weight"], expected["second"], rtol=2e-5)
    assert_same_tensors(checkpoint.frozen, {"bias": MAKE["BIAS"]})
    assert state.step == 2
    assert checkpoint.properties == {"epoch": 3, "loss": 0.5, "tokenizer": "byte-level"}


def test_reads_a_file_of_the_official_runtime() -> None:
    assert_trained(Checkpoint.load(OFFICIAL))


# On the official runtime itself.

official = pytest.mark.skipif(
    "GRAPHGEN_OFFICIAL_PYTHON" not in os.environ,
    reason="GRAPHGEN_OFFICIAL_PYTHON names no interpreter with onnxruntime-training 1.19.2",
)

EXCHANGE = """
import json
state = CheckpointState.load_checkpoint(sys.argv[1])
CheckpointState.save_checkpoint(state, sys.argv[2], include_optimizer_state=True)
parameters = {n: [p.requires_grad, p.data.tolist()] for n, p in state.parameters}
print(json.dumps([parameters, dict(state.properties)]))
"""


@official
@pytest.mark.parametrize("small_room", [1 << 30, 700], indirect=True)
@pytest.mark.parametrize("apart", [False, True])
def test_official_runtime_reads_and_rewrites_ours(
    tmp_path: Path, small_room: None, apart: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint_data, "_SMALL", 0)
    monkeypatch.setattr(checkpoint_data, "_APART", 0)
    ours = example()
    del ours.properties["nan"]  # which equals nothing
    ours.save(tmp_path / "ours", unchanged=Unchanged(ours.frozen.values()) if apart else None)
    printed = MAKE["official"](EXCHANGE, tmp_path / "ours", tmp_path / "theirs")
    parameters, properties = json.loads(printed)
    expected = {n: [True, a.tolist()] for n, a in ours.trainable.items()}
    assert parameters == expected | {n: [False, a.tolist()] for n, a in ours.frozen.items()}
    assert properties == ours.properties
    theirs = Checkpoint.load(tmp_path / "theirs")
    assert_same_tensors(theirs.trainable, dict(sorted(ours.trainable.items())))
    assert_same_tensors(theirs.frozen, dict(sorted(ours.frozen.items())))
    assert_same_tensors(theirs.optimizer.momentum0, dict(sorted(ours.optimizer.momentum0.items())))
    assert_same_tensors(theirs.optimizer.momentum1, dict(sorted(ours.optimizer.momentum1.items())))
    assert (theirs.optimizer.step, theirs.optimizer.learning_rate) == (2**40, 0.125)
    assert theirs.properties == ours.properties


@official
def test_official_runtime_trains_and_resumes_from_ours(tmp_path: Path) -> None:
    """Four steps at once equal two steps, our load and save in between, and two more steps."""
    two, four = MAKE["TRAIN"], MAKE["TRAIN"].replace("range(2)", "range(4)")
    MAKE["write_artifacts"](
        tmp_path, Checkpoint({"weight": MAKE["WEIGHT"]}, {"bias": MAKE["BIAS"]})
    )
    losses = MAKE["official"](four, tmp_path, tmp_path / "straight")
    first = MAKE["official"](two, tmp_path, tmp_path / "half")
    assert_trained(Checkpoint.load(tmp_path / "half"))
    Checkpoint.load(tmp_path / "half").save(tmp_path / "checkpoint")
    assert first + MAKE["official"](two, tmp_path, tmp_path / "resumed") == losses
    assert (tmp_path / "resumed").read_bytes() == (tmp_path / "straight").read_bytes()


# Damaged files: a GraphgenError, or (where only values changed) a checkpoint; nothing else.


@pytest.mark.parametrize("source", ["ours", "official"])
def test_truncated(source: str, tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "short"
    example().save(whole)
    data = (whole if source == "ours" else OFFICIAL).read_bytes()
    for size in [*range(0, len(data), 97), len(data) // 2, len(data) - 16]:
        cut.write_bytes(data[:size])
        with pytest.raises(GraphgenError, match=r"damaged or cut short|not an ONNX"):
            Checkpoint.load(cut)


@pytest.mark.parametrize("source", ["ours", "official"])
def test_flipped_bytes(source: str, tmp_path: Path) -> None:
    whole, flipped = tmp_path / "whole", tmp_path / "flipped"
    example().save(whole)
    data = np.frombuffer((whole if source == "ours" else OFFICIAL).read_bytes(), np.uint8)
    draw = np.random.default_rng(1)
    refused = 0
    for _ in range(300):
        damaged = data.copy()
        where = draw.integers(len(data), size=draw.integers(1, 9))
        damaged[where] = draw.choice([0, 1, 0x7F, 0xFF, draw.integers(256)], size=len(where))
        flipped.write_bytes(damaged.tobytes())
        try:
            Checkpoint.load(flipped)
        except GraphgenError:
            refused += 1
    assert 0 < refused < 300


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (b"z.weight", b"a.weight", "two tensors named 'a.weight'"),
        (b"momentum1", b"momentum2", "moments .*'momentum2'"),
        (b"group0", b"group1", "optimizer group 'group1'"),
    ],
)
def test_unexpected_names(old: bytes, new: bytes, message: str, tmp_path: Path) -> None:
    example().save(tmp_path / "checkpoint")
    data = (tmp_path / "checkpoint").read_bytes()
    (tmp_path / "checkpoint").write_bytes(data.replace(old, new))
    with pytest.raises(GraphgenError, match=message):
        Checkpoint.load(tmp_path / "checkpoint")


def file_with(version: int = 2, nominal: bool = False) -> bytes:
    builder = flatbuffers.Builder()
    builder.StartObject(4)
    builder.PrependBoolSlot(2, nominal, False)
    module = builder.EndObject()
    builder.StartObject(4)
    builder.PrependInt32Slot(0, version, 0)
    builder.PrependUOffsetTRelativeSlot(1, module, 0)
    builder.Finish(builder.EndObject(), b"ODTC")
    return bytes(builder.Output())


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "No such file"),
        (b"", "not an ONNX Runtime training checkpoint"),
        (b"epoch 3, loss 0.5\n", "not an ONNX Runtime training checkpoint"),
        (b"\xff\xff\xff\xffODTC", "damaged or cut short"),
        (file_with(version=1), "its version is 1; it must be 2"),
        (file_with(version=3), "its version is 3; it must be 2"),
        (file_with(nominal=True), "save the complete checkpoint"),
    ],
)
def test_load_refuses(content: bytes | None, message: str, tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(GraphgenError, match=message) as caught:
        Checkpoint.load(path)
    assert str(path) in str(caught.value)


def test_load_refuses_a_folder(tmp_path: Path) -> None:
    with pytest.raises(GraphgenError, match="cannot be read"):
        Checkpoint.load(tmp_path)


W = {"w": np.ones((3, 2), np.float32)}
V = {"v": np.ones((3, 2), np.float32)}
BAD_CONTENTS = {
    "'w' is both trainable and frozen": Checkpoint(W, W),
    "the parameter is not trainable": Checkpoint(W, V, OptimizerState(1, 0.1, V, {})),
    r"the moment of 'w' is \(2, 3\)": Checkpoint(
        W, optimizer=OptimizerState(1, 0.1, {"w": W["w"].T}, {})
    ),
    "'v' has only one of momentum0 and momentum1": Checkpoint(
        W | V, optimizer=OptimizerState(1, 0.1, W, W | V)
    ),
    "'w' has dtype >f4": Checkpoint({"w": np.ones(3, ">f4")}),
    r"'w' has dtype \|O": Checkpoint({"w": np.array(["text"], object)}),
    "'w' has dtype .*int4|'w' has dtype .V1": Checkpoint({"w": np.ones(2, ml_dtypes.int4)}),
    "property 'big'": Checkpoint({}, properties={"big": 2**63}),
    "property 'far'": Checkpoint({}, properties={"far": 1e39}),
    "property 'list'": Checkpoint({}, properties={"list": [1]}),
}


@pytest.mark.parametrize("message", BAD_CONTENTS)
def test_save_refuses(message: str, tmp_path: Path) -> None:
    with pytest.raises(GraphgenError, match=message):
        BAD_CONTENTS[message].save(tmp_path / "checkpoint")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("place", ["missing/checkpoint", "file/checkpoint", "."])
def test_save_refuses_an_unwritable_place(place: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(GraphgenError, match="cannot be written"):
        Checkpoint(W).save(tmp_path / place)


@pytest.mark.parametrize(
    ("failure", "raised"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), GraphgenError),
        (KeyboardInterrupt(), KeyboardInterrupt),
    ],
)
def test_interrupted_save_keeps_the_old_file(
    failure: BaseException,
    raised: type[BaseException],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(_: int) -> None:
        raise failure

    example().save(tmp_path / "checkpoint")
    before = (tmp_path / "checkpoint").read_bytes()
    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(raised):
        Checkpoint(W).save(tmp_path / "checkpoint")
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]
    assert (tmp_path / "checkpoint").read_bytes() == before
