"""Options that are words: one Literal says which, for type checkers and at run time alike."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any, get_args

import numpy as np
import pytest

import graphgen as gg
from graphgen import commands, models, nn, ops
from graphgen.errors import choices_of, one_of
from graphgen.export import precision, prepared
from graphgen.generation.options import GenerationOptions, Options
from graphgen.laboratory import rows
from graphgen.models import sparse
from graphgen.nn import blocks, feed_forward, recurrent
from graphgen.passes import OptimizeOptions
from graphgen.quantize import THRESHOLDS, Scheme, quantize
from graphgen.targets import Device


def block() -> Any:
    return gg.build(nn.Linear(2, 2), x=gg.float32["n", 2])


ONES = np.ones((1, 1, 3), np.float32)

WRONG: list[tuple[str, Callable[[], Any], str]] = [
    ("activation", lambda: nn.FeedForward(2, 4, activation="sil"), "silu"),
    ("placement", lambda: nn.EncoderLayer(2, num_heads=1, placement="prae"), "pre"),
    ("norm", lambda: nn.Encoder(2, layers=1, num_heads=1, norm="LayerNorm"), "layer"),
    ("attribute approximate", lambda: ops.gelu(ONES, approximate="tan"), "tanh"),
    ("attribute auto_pad", lambda: ops.conv(ONES, ONES, auto_pad="same_uper"), "SAME_UPPER"),
    ("kind", lambda: nn.Recurrent(2, 2, kind="LTSM"), "lstm"),
    ("positions", lambda: models.create("decoder", positions="learnt"), "learned"),
    ("pattern", lambda: sparse.SparseDecoder(pattern="block"), "blocks"),
    ("score", lambda: models.create("recurrent", score="aditive"), "additive"),
    ("target", lambda: gg.optimize(block(), target="cudda"), "cuda"),
    ("target", lambda: gg.compare(block(), target="CPU"), "cpu"),
    ("kinds", lambda: gg.compare(block(), kinds=["onli"]), "only"),
    ("provider", lambda: gg.Session(block(), provider="CUDAExecutionProvider"), ""),
    ("provider", lambda: gg.Session(block(), provider="gpu"), "webgpu"),
    ("profile", lambda: gg.artifacts(block(), "x", profile="stocks"), "stock"),
    ("dtype", lambda: gg.artifacts(block(), "x", dtype="f16"), "fp16"),
    ("recompute", lambda: gg.artifacts(block(), "x", recompute="ful"), "full"),
    ("scheme", lambda: quantize(block(), "int4_0"), "int4"),
    ("block_size", lambda: quantize(block(), "int4", block_size=48), ""),
]


@pytest.mark.parametrize(("name", "call", "meant"), WRONG)
def test_a_wrong_word_is_refused_at_its_line(
    name: str, call: Callable[[], Any], meant: str, tmp_path: Any, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(gg.GraphgenError) as caught:
        call()
    told = str(caught.value)
    assert f": {name} is " in told and ("choose " in told or "one of " in told)
    assert (f"; did you mean {meant!r}?" in told) if meant else ("did you mean" not in told)
    line = call.__code__.co_firstlineno
    assert told.endswith(f"(test_words.py:{line})")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("literal", "table"),
    [
        (feed_forward.Activation, feed_forward.ACTIVATIONS),
        (blocks.Norm, blocks.NORMS),
        (recurrent.Kind, recurrent._GATES),
        (recurrent.Kind, recurrent._OPERATORS),
        (recurrent.Kind, recurrent._CELLS),
        (sparse.Pattern, sparse.PATTERNS),
        (prepared.Profile, prepared._PROFILES),
        (precision.Precision, precision.DTYPES),
        (Scheme, THRESHOLDS),
        (rows.Kind, dict.fromkeys(rows.KINDS)),
    ],
)
def test_every_word_has_its_meaning(literal: Any, table: Mapping[str, object]) -> None:
    assert set(get_args(literal)) == set(table)


def test_none_is_a_word_where_the_option_may_be_left_out() -> None:
    assert choices_of(Device | None) == ("cpu", "cuda", None)
    one_of("Session", Device | None, provider=None)
    with pytest.raises(gg.GraphgenError, match="provider is None; choose 'cpu' or 'cuda'"):
        one_of("Session", Device, provider=None)


def test_a_command_has_no_line(tmp_path: Any, capsys: Any) -> None:
    """Its caller is a script that the installer made."""
    wrong = ["build", "decoder", "--positions", "learnt", "-o", str(tmp_path / "m.onnx")]
    assert commands.main(wrong) == 2
    assert capsys.readouterr().err.endswith("; did you mean 'learned'?\n")


def test_generate_takes_the_options_that_there_are() -> None:
    assert GenerationOptions.__annotations__.keys() == Options.__dataclass_fields__.keys()


def test_what_calls_optimize_takes_its_options() -> None:
    own = inspect.signature(gg.optimize).parameters.keys() - {"model", "passes"}
    assert OptimizeOptions.__annotations__.keys() == own


@pytest.mark.parametrize("room", [gg, gg.schedule])
def test_a_room_shows_its_public_names(room: Any) -> None:
    assert [name for name in dir(room) if not name.startswith("__")] == sorted(room.__all__)
    assert all(hasattr(room, name) for name in room.__all__)
