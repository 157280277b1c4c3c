"""Keys and values as int8: the kernel against its meaning, scales, and what does not matter."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
from random_checkpoints import GROUPED, SIZES, random_checkpoint, write_weights

import graphgen as gg
from graphgen.commands import main
from graphgen.errors import GraphgenError
from graphgen.export.write import to_bytes
from graphgen.generation import decoder as decoders
from graphgen.generation.decoder import open_decoder
from graphgen.generation.few_bits import int8_cache
from graphgen.generation.quality import quality
from graphgen.measure.reference import evaluate
from graphgen.models.published import from_folder
from graphgen.quantize.effect import feeds_of
from graphgen.runtime import QUIET, Session
from graphgen.safetensors import read_header
from graphgen.version import minor

pytestmark = pytest.mark.skipif(
    minor(ort.__version__) < (1, 27), reason="the runtime reads no cache of int8 before 1.27"
)
TOKENS = np.random.default_rng(3).integers(0, 200, (4, 24))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: Any) -> Path:
    path: Path = tmp_path_factory.mktemp("llama")
    random_checkpoint(path, {"model_type": "llama", **GROUPED})
    return path


@pytest.fixture(scope="module")
def decoder(folder: Path) -> ir.Model:
    return gg.optimize(from_folder(folder).model).model


def test_the_kernel_computes_what_the_operator_means(decoder: ir.Model) -> None:
    model = int8_cache(decoder, TOKENS)
    session = Session(to_bytes(model), options=QUIET)
    past = {n: np.zeros((1, 2, 16, 16), np.int8) for n in session.inputs if n.startswith("past")}
    for at, count in ((0, 9), (9, 1), (10, 1)):
        feed = {
            "input_ids": TOKENS[:1, at : at + count],
            "attention_mask": np.arange(16)[None] < at + count,
            "position_ids": np.arange(at, at + count)[None],
        }
        if at == 0:
            feed["attention_mask"] = np.ones((1, count))
        feed = {n: x.astype(session.inputs[n].dtype) for n, x in feed.items()} | past
        wanted, got = evaluate(model, feed), session(feed)
        assert np.abs(wanted[0] - got[0]).max() < 2e-3 * np.abs(wanted[0]).max()
        for name, a, b in zip([*session.outputs][1:], wanted[1:], got[1:], strict=True):
            held = slice(0, at + count)
            apart = np.abs(a[:, :, held].astype(int) - b[:, :, held])
            assert b.dtype == np.int8 and np.abs(b[:, :, held]).max() > 60
            assert apart.max() <= 1 and (apart > 0).mean() < 0.01, name  # halves, rounded
            past[name.replace("present", "past_key_values")] = b


def test_rows_do_not_depend_on_their_mates_nor_on_chunks(decoder: ir.Model) -> None:
    model, rows = int8_cache(decoder, TOKENS), [TOKENS[0].tolist(), TOKENS[1, :5].tolist()]
    together, alone = open_decoder(model), open_decoder(model, chunk=7)
    both, one = together.start(rows, 6), alone.start(rows[:1], 6)
    assert np.abs(both[0] - one[0]).max() < 2e-3 * np.abs(one).max()
    single = open_decoder(model)
    one = single.start(rows[1:], 6)
    for step in range(6):
        assert np.abs(both[1] - one[0]).max() < 1e-4 * np.abs(one).max()
        both, one = (
            d.step(TOKENS[2, step : step + 1].repeat(n)) for d, n in ((together, 2), (single, 1))
        )


def test_products_of_integers_change_no_token(
    decoder: ir.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = int8_cache(decoder, TOKENS)
    prompts = [TOKENS[0].tolist() * 2, TOKENS[1, :7].tolist()]
    ways: tuple[dict[str, Any], ...] = (
        {},
        {"beams": 3},
        {"speculate": "prompt-lookup"},
    )
    wanted = [list(gg.generate(model, prompts, max_new_tokens=12, **way)) for way in ways]
    monkeypatch.setattr(decoders, "products_pay", lambda queries, features: True)
    kinds = {x.dtype for x in open_decoder(model, provider="cpu").caches.values()}
    assert kinds == {np.dtype(np.uint8), np.dtype(np.int8)}
    for way, found in zip(ways, wanted, strict=True):
        assert list(gg.generate(model, prompts, max_new_tokens=12, **way)) == found


def test_an_old_runtime_is_told_apart(decoder: ir.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onnxruntime.__version__", "1.26.1")
    with pytest.raises(GraphgenError, match=r"onnxruntime 1.26.1 read no such cache.* upgrade it"):
        int8_cache(decoder, TOKENS)


def test_scales_hold_for_places_that_no_window_reaches(tmp_path: Path) -> None:
    fields = {"model_type": "qwen2", **GROUPED, "rope_theta": 300.0}
    random_checkpoint(tmp_path, fields)
    weights = {w.name: w.read() for w in read_header(tmp_path / "model.safetensors")}
    for name, array in weights.items():
        if name.endswith("k_proj.bias"):  # as Qwen2's: one feature of a pair is far from 0
            array[:] = np.where(np.arange(array.size) % 16 < 8, 6.0, 0.0)
    write_weights(tmp_path / "model.safetensors", weights)
    model = gg.optimize(from_folder(tmp_path).model).model
    text = np.random.default_rng(4).integers(0, 200, (2, 160))
    near, far = (
        quality(model, int8_cache(model, TOKENS, longest=n), text).divergence for n in (24, 160)
    )
    assert far < 0.3 * near


def test_a_folder_with_int8_is_built_and_generates(
    folder: Path, decoder: ir.Model, tmp_path: Path, capsys: Any
) -> None:
    out = tmp_path / "out"
    assert main(["build", str(folder), "-o", str(out), "--kv", "int8"]) == 0
    assert "int8 cache: perplexity" in capsys.readouterr().out
    written = gg.load(out / "onnx" / "model.onnx")
    pasts = [v for v in written.graph.inputs if str(v.name).startswith("past")]
    assert {v.dtype for v in pasts} == {ir.DataType.INT8}
    assert len(list(gg.generate(out, [[5, 6, 7]], max_new_tokens=3))) == 3
    with pytest.raises(GraphgenError, match=r"with a cache of 8 bits; build .* without --kv"):
        gg.generate(out, [[5]], provider="webgpu")
    effect = quality(decoder, written, TOKENS)
    assert 0 < effect.divergence < 0.01 and effect.same > 0.8
    session = Session(to_bytes(decoder), options=QUIET)
    [feed] = feeds_of(decoder, TOKENS, rows=len(TOKENS))
    logits = session(feed)[0][:, 5:-1].astype(np.float64)  # the first 6 tokens are read at once
    p = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    wanted = np.exp(-np.log(np.take_along_axis(p, TOKENS[:, 6:, None], 2)).mean())
    assert effect.before == pytest.approx(wanted, rel=1e-4)
    assert effect.after != effect.before == pytest.approx(effect.after, rel=0.02)
    assert quality(decoder, decoder, TOKENS).divergence < 1e-12
    for more in (["--layout", "genai"], ["--dtype", "fp16"], ["--target", "cuda"]):
        assert main(["build", str(folder), "-o", str(tmp_path / "no"), "--kv", "int8", *more]) == 2
        assert "--kv int8 is for --layout plain" in capsys.readouterr().err
    random_checkpoint(tmp_path / "bert", {"model_type": "bert", **SIZES})
    assert main(["build", str(tmp_path / "bert"), "-o", str(tmp_path / "no"), "--kv", "int8"]) == 2
    assert "bert has no cache; give a decoder" in capsys.readouterr().err
