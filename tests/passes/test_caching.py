"""Decoders of other exporters: their cache, masks and places, against the exports themselves."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from small_models import relative_rms, vary

import graphgen as gg
from graphgen import nn, ops
from graphgen.export.like import decoder_like
from graphgen.export.read import load
from graphgen.generation import decoder as decoders
from graphgen.generation.decoder import Growing, InPlace, open_decoder
from graphgen.match import Miss
from graphgen.passes.caching import with_cache
from graphgen.passes.decoding import in_place
from graphgen.runtime import Session
from graphgen.targets import target

pytestmark = pytest.mark.skipif(
    "Attention" not in target("cpu").kernels[""], reason="this onnxruntime has no Attention"
)

FIXTURES = Path(__file__).parents[1] / "fixtures"
EXPORTS = (
    "gpt2_dynamo_eager_23",
    "llama_torchscript_eager_14",
    "gpt2_cached_torchscript_eager_18",
    "llama_cached_dynamo_eager_18",
)
ROUNDING = 5e-6  # of kernels that sum in another order, over 8 steps
LENGTHS, STEPS = (13, 6, 1), 8


def alone(path: Path) -> Any:
    """What an export computes for one row of tokens, without padding and a past, as a function."""
    session = Session(path, optimize=False)

    def logits(row: Sequence[int]) -> Any:
        feeds: dict[str, Any] = {}
        for name, kind in session.inputs.items():
            if "past" in name:
                _, heads, _, size = kind.dims or (0, 0, 0, 0)
                feeds[name] = np.zeros((1, int(heads or 0), 0, int(size or 0)), np.float32)
            else:
                feeds[name] = np.ones((1, len(row)), np.int64) if "mask" in name else [[*row]]
        return session({n: np.array(x) for n, x in feeds.items()})[0][0]

    return logits


def errors(decoder: Any, wanted: Any) -> Iterator[float]:
    """How much the logits of each step differ from those for whole rows without padding."""
    rows = [np.random.default_rng(1).integers(1, 60, n).tolist() for n in LENGTHS]
    logits = decoder.start(rows, STEPS)
    for _ in range(STEPS):
        exact = np.stack([wanted(row)[-1] for row in rows])
        yield relative_rms(exact, logits)
        tokens = exact.argmax(1)
        for row, token in zip(rows, tokens, strict=True):
            row.append(int(token))
        logits = decoder.step(tokens)


@pytest.fixture(scope="module", params=EXPORTS)
def export(request: Any) -> Any:
    path = FIXTURES / f"{request.param}.onnx"
    return path, with_cache(load(path))


@pytest.mark.share(2)
@pytest.mark.parametrize("chunk", [512, 4])
@pytest.mark.parametrize("kind", [InPlace, Growing])
def test_each_step_is_that_of_the_export(
    export: Any, kind: Any, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows padded on the right in buffers, on the left in a cache that grows."""
    path, made = export
    if kind is Growing:
        monkeypatch.setattr(decoders, "in_place", lambda model: Miss("asked not to be"))
    decoder = open_decoder(made.model, threads=1, chunk=chunk)
    assert type(decoder) is kind
    assert max(errors(decoder, alone(path))) < ROUNDING


def test_the_names_are_those_of_clients(export: Any) -> None:
    _, made = export
    pasts = [f"past_key_values.{i}.{kind}" for i in (0, 1) for kind in ("key", "value")]
    inputs = {v.name: v for v in made.model.graph.inputs}
    assert [*inputs] == ["input_ids", "attention_mask", "position_ids", *pasts]
    presents = [name.replace("past_key_values", "present") for name in pasts]
    assert [v.name for v in made.model.graph.outputs] == ["logits", *presents]
    total = "past_sequence_length + sequence_length"
    assert [*map(str, inputs["attention_mask"].shape)] == ["batch_size", total]
    past = inputs[pasts[0]].shape
    assert [str(past[0]), str(past[2])] == ["batch_size", "past_sequence_length"]
    assert isinstance(past[1], int) and past[3] == 8


def test_places_counted_from_the_past_are_not_those_in_buffers() -> None:
    """In place, the past is as long as the buffers: a graph that counts from it is refused."""
    model = gg.optimize(load(FIXTURES / "llama_cached_dynamo_eager_18.onnx")).model
    found = in_place(model)
    assert isinstance(found, Miss) and "places are wanted as position_ids" in found.reason


class Decoder(nn.Module):
    """One attention over all tokens so far, with more that a test adds, under other names."""

    def __init__(self, mixed: Any = None, bias: Any = None, causal: bool = True) -> None:
        self.embedding, self.mixed, self.bias = nn.Embedding(20, 16), mixed, bias
        self.attention, self.causal = nn.Attention(16, num_heads=2, head_dim=8), causal

    def __call__(self, words: Any, kept: Any) -> dict[str, Any]:
        x, length = self.embedding(words), ops.dim(words, 1)
        mask = ops.unsqueeze(ops.cast(kept, to=np.bool_), [1, 2])
        if self.causal:
            mask = ops.logical_and(mask, ops.causal_mask(length, length))
        if self.bias is not None:
            mask = ops.where(mask, self.bias(length), -1e30)
        y = x + self.attention(x, mask=mask)
        return {"scores": self.embedding.logits(y if self.mixed is None else self.mixed(y))}


def built(tmp_path: Path, **how: Any) -> tuple[Path, Path]:
    """The file of such a decoder, and a folder with a configuration for it."""
    tokens = gg.int64["rows", "length"]
    model = gg.build(vary(Decoder(**how)), words=tokens, kept=tokens)
    gg.export(model, tmp_path / "export.onnx")
    (tmp_path / "like").mkdir()
    fields = {"model_type": "none", "vocab_size": 20, "num_hidden_layers": 1, "eos_token_id": 2}
    (tmp_path / "like" / "config.json").write_text(json.dumps(fields))
    return tmp_path / "export.onnx", tmp_path / "like"


def slopes(length: Any) -> Any:
    """What ALiBi adds to scores: slopes times the place of the key, (H, 1, S)."""
    places = ops.cast(ops.unsqueeze(ops.arange(length), [0, 1]), to=np.float32)
    return places * np.array([0.5, 0.125], np.float32).reshape(2, 1, 1)


def test_parts_are_found_by_how_they_are_connected(tmp_path: Path) -> None:
    found = decoder_like(*built(tmp_path))
    names = {ours: name for ours, name in found.names.items() if "." not in ours}
    assert names == {"input_ids": "words", "attention_mask": "kept", "logits": "scores"}
    assert not isinstance(in_place(found.model), Miss)


def test_a_bias_of_places_is_computed_for_all_tokens_so_far(tmp_path: Path) -> None:
    path, like = built(tmp_path, bias=slopes)
    found = decoder_like(path, like)
    assert "a mask stays as it is" in found.line()
    decoder = open_decoder(found.model, threads=1, chunk=4)
    assert isinstance(decoder, Growing) and max(errors_of_words(decoder, path)) < ROUNDING


def folded(words: Any, kept: Any, past_key: Any, past_value: Any) -> dict[str, Any]:
    """Attention as BLOOM's exports have it: heads in the batch, and a mask of any length."""
    table = np.random.default_rng(3).normal(size=(20, 16)).astype(np.float32)
    x = ops.gather(table, words)
    rows, length, seen = ops.dim(words, 0), ops.dim(words, 1), ops.dim(kept, 1)
    q, k, v = (ops.split_heads(x @ table[i : i + 16], 2) for i in (0, 2, 4))
    k, v = ops.concat(past_key, k, axis=2), ops.concat(past_value, v, axis=2)
    biases = ops.cast(ops.cumsum(kept, 1) - 1, to=np.float32)
    biases = ops.unsqueeze(biases, [1]) * np.array([[0.5], [0.125]], np.float32)
    q, keys, values = (ops.reshape(t, [rows * 2, -1, 8]) for t in (q, k, v))
    scores = q @ ops.swap_last(keys) * 0.35 + ops.reshape(biases, [rows * 2, 1, seen])
    places, total = ops.arange(length) + ops.dim(past_key, 2), ops.dim(k, 2)
    causal = ops.unsqueeze(ops.arange(total), [0]) <= ops.unsqueeze(places, [1])
    padding = ops.unsqueeze(ops.cast(kept, to=np.bool_), [1, 2])
    mask = ops.where(ops.logical_and(padding, causal), 0.0, np.finfo(np.float32).min)
    weights = ops.softmax(ops.reshape(scores, [rows, 2, length, -1]) + mask)
    y = ops.reshape(weights, [rows * 2, length, -1]) @ values
    y = x + ops.merge_heads(ops.reshape(y, [rows, 2, length, 8]))
    return {"scores": y @ table.T, "present_key": k, "present_value": v}


def test_heads_in_the_batch_and_sizes_with_many_names(tmp_path: Path) -> None:
    """Calls have one number of rows, one of a past, and a mask for that and the new tokens."""
    path, like = built(tmp_path)
    past = gg.float32["rows", 2, "past", 8]
    tokens = {"words": gg.int64["rows", "length"], "kept": gg.int64["rows", "length + past"]}
    gg.export(gg.build(folded, **tokens, past_key=past, past_value=past, primitives=True), path)
    file = onnx.load(path)
    for i, axis, name in ((1, 1, "total"), (1, 0, "others"), (3, 2, "held")):
        file.graph.input[i].type.tensor_type.shape.dim[axis].dim_param = name
    del file.graph.value_info[:]
    onnx.save(file, path)
    found = decoder_like(path, like)
    assert found.had_cache and "a mask stays as it is" in found.line()
    assert "Softmax" not in gg.optimize(found.model).report.ops_after
    decoder = open_decoder(found.model, threads=1, chunk=4)
    assert isinstance(decoder, Growing) and max(errors_of_words(decoder, path)) < ROUNDING


def errors_of_words(decoder: Any, path: Path) -> Iterator[float]:
    session = Session(path, optimize=False)

    def logits(row: Sequence[int]) -> Any:
        feeds: dict[str, Any] = {"words": [row], "kept": np.ones((1, len(row)), np.int64)}
        feeds |= {n: np.zeros((1, 2, 0, 8), np.float32) for n in session.inputs if "past" in n}
        return session({n: np.array(x) for n, x in feeds.items()})[0][0]

    rows = [[3, 1, 4, 1, 5, 9], [2, 6]]
    given = decoder.start(rows, 4)
    for token in (5, 3, 5):
        yield relative_rms(np.stack([logits(row)[-1] for row in rows]), given)
        rows = [[*row, token] for row in rows]
        given = decoder.step(np.full(2, token))


@pytest.mark.parametrize(
    "how, told",
    [
        ({"mixed": lambda x: x + 0.1 * ops.cumsum(x, 1)}, "differ by .* connects its tokens"),
        ({"causal": False}, r"its logits differ by .*: of \d tokens after 0 its mask keeps"),
        (
            {"bias": lambda length: slopes(length) * ops.cast(length, to=np.float32)},
            "its logits differ by",
        ),
    ],
)
def test_what_no_cache_can_hold_is_refused(how: Any, told: str, tmp_path: Path) -> None:
    path, like = built(tmp_path, **how)
    with pytest.raises(gg.GraphgenError, match=told):
        decoder_like(path, like)


def test_the_command_writes_a_folder_that_generates(tmp_path: Path, capsys: Any) -> None:
    from graphgen.commands import main

    path, like = built(tmp_path)
    out = tmp_path / "out"
    assert main(["build", str(path), "--like", str(like), "-o", str(out)]) == 0
    said = "attention_mask is kept there; logits is scores there; it got a cache"
    assert said in capsys.readouterr().out
    session = onnx.load(out / "onnx" / "model.onnx", load_external_data=False)
    assert session.graph.input[0].name == "input_ids"
    found = gg.generate(out, [[3, 1, 4], [5]], max_new_tokens=4, eos=[])
    list(found)
    assert [len(row) for row in found.tokens] == [4, 4]
    # Another folder's configuration, an encoder, an option without effect, no folder at all.
    (like / "config.json").write_text('{"model_type": "none", "num_hidden_layers": 2}')
    for arguments, told in (
        ([path, "--like", like], "num_hidden_layers 2, and the graph 1 attentions"),
        ([FIXTURES / "bert_dynamo_eager_18.onnx", "--like", like], "tried with a cache, it fails"),
        ([path, "--like", like, "--dtype", "fp16"], "--dtype has no effect when building from an"),
        ([path, "--like", tmp_path / "none"], "config.json"),
    ):
        assert main(["build", *map(str, arguments), "-o", str(tmp_path / "other")]) == 2
        error = capsys.readouterr().err
        assert told in error and "Traceback" not in error
    assert not (tmp_path / "other").exists()
