"""Layers that keep states of a fixed size: rows, beams and chunks as the whole graph has them."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from published_decoders import checkpoint, no_past

import graphgen as gg
from graphgen.commands import main
from graphgen.errors import GraphgenError
from graphgen.export.write import to_bytes
from graphgen.generation import Generator, decoder as decoders
from graphgen.match import Miss
from graphgen.models.published import from_folder
from graphgen.version import minor

OLD = minor(ort.__version__) < (1, 24)
"""Whether the runtime does not compute a cache in place."""

KINDS = ("lfm2", "qwen3_5_text")
PROMPTS = [[5, 9, 2, 7, 11], [3, 8], [4, 6, 1, 2, 3, 9, 8]]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Any:
    @cache
    def made(kind: str) -> Any:
        folder: Path = tmp_path_factory.mktemp(kind)
        return gg.optimize(from_folder(checkpoint(folder, kind)).model).model

    return made


def greedy(model: Any, prompt: list[int], count: int) -> list[int]:
    """The tokens that the whole graph chooses, without any cache."""
    tokens, session = [*prompt], gg.Session(to_bytes(model), optimize=False, threads=1)
    past = no_past({name: kind.dims or () for name, kind in session.inputs.items()}, 1)
    for _ in range(count):
        ids = np.array([tokens])
        feeds = {"input_ids": ids, "attention_mask": np.ones_like(ids)}
        feeds["position_ids"] = np.arange(ids.shape[1])[None]
        tokens.append(int(session(feeds | past)[0][0, -1].argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("chunk", [512, 2])
def test_rows_of_different_lengths_keep_their_own_states(built: Any, kind: str, chunk: int) -> None:
    found = gg.generate(built(kind), PROMPTS, max_new_tokens=6, eos=[], chunk=chunk)
    list(found)
    assert type(found._decoder).__name__ == ("Growing" if OLD else "InPlace")
    assert found.tokens == [greedy(built(kind), prompt, 6) for prompt in PROMPTS]


def test_a_row_that_ends_takes_its_states_along(built: Any) -> None:
    """The rows that are left move up in the buffers."""
    wanted = [greedy(built("lfm2"), prompt, 6) for prompt in PROMPTS]
    ends = next(token for token in wanted[0] if not {token} & {*wanted[1], *wanted[2]})
    found = gg.generate(built("lfm2"), PROMPTS, max_new_tokens=6, eos=[ends])
    list(found)
    assert found.tokens[1:] == wanted[1:]
    assert len(found.tokens[0]) < 6


def test_a_growing_cache_gives_the_same(built: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = gg.generate(built("lfm2"), PROMPTS, max_new_tokens=6, beams=3, eos=[])
    list(wanted)
    monkeypatch.setattr(decoders, "in_place", lambda *_: Miss("not today"))
    found = gg.generate(built("lfm2"), PROMPTS, max_new_tokens=6, beams=3, eos=[])
    list(found)
    assert type(found._decoder).__name__ == "Growing"
    assert found.tokens == wanted.tokens


def test_nothing_goes_back_to_an_earlier_token(built: Any) -> None:
    model = built("lfm2")
    with pytest.raises(GraphgenError, match="no guesses can be checked: the states of its layers"):
        gg.generate(model, PROMPTS, speculate="prompt-lookup", max_new_tokens=3)
    with pytest.raises(GraphgenError, match="no guesses can be checked: the states of its layers"):
        gg.generate(model, PROMPTS, draft=model, max_new_tokens=3)
    generator = Generator(model)
    for prompt in ([*range(1, 30)], [*range(1, 30), 7]):
        found = generator([prompt], max_new_tokens=2, eos=[])
        list(found)
        assert found.shared == 0


@pytest.mark.skipif(OLD, reason="onnxruntime below 1.24 computes no such cache in place")
def test_a_folder_for_genai_names_states(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It wants the kinds of layers of LFM2, and knows states of some model types alone."""
    (tmp_path / "in").mkdir()
    source, out = checkpoint(tmp_path / "in", "lfm2"), tmp_path / "out"
    assert main(["build", str(source), "-o", str(out), "--layout", "genai"]) == 0
    told = json.loads((out / "genai_config.json").read_text())["model"]
    assert told["type"] == "lfm2"
    decoder = told["decoder"]
    assert decoder["layer_types"] == ["conv", "full_attention", "conv"]
    assert decoder["num_hidden_layers"] == 3
    assert decoder["inputs"]["past_conv_names"] == "past_conv.%d"
    assert decoder["outputs"]["present_conv_names"] == "present_conv.%d"
    other = checkpoint(tmp_path / "in", "granitemoehybrid, mamba")
    assert main(["build", str(other), "-o", str(tmp_path / "no"), "--layout", "genai"]) == 2
    assert "knows those of lfm2, qwen3_5_text, qwen3_5_moe_text only" in capsys.readouterr().err
