"""Beginnings that prompts share are read once, in a batch and over calls, and no token changes."""

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from published_decoders import checkpoint
from test_generate import folder, graph, model, source

import graphgen as gg
from graphgen.batch import Stage
from graphgen.export.folders import MODEL, write_folder
from graphgen.generation import Generator, decoder as decoders, prefixes
from graphgen.generation.caches import InPlace
from graphgen.generation.few_bits import int8_cache
from graphgen.generation.growing import Growing
from graphgen.generation.prefixes import Beginning, beginnings
from graphgen.match import Miss
from graphgen.models.published import from_folder
from graphgen.quantize import quantize
from graphgen.version import minor

pyarrow = pytest.importorskip("pyarrow")
__all__ = ["folder", "graph", "source"]  # fixtures

BEGIN = np.random.default_rng(0).integers(0, 40, 48).tolist()
ROWS = [[*BEGIN, *own] for own in ([7], [1, 2, 3, 4, 5, 6], [9, 9], [7, 30, 31])]
LONG = {"max_position_embeddings": 256}


def twins(graph: Any, **how: Any) -> tuple[Generator, Generator]:
    plain, cached = (Generator(graph, threads=1, prefix_cache=on, **how) for on in (False, True))
    return plain, cached


def calls(plain: Generator, cached: Generator, prompts: Any, **options: Any) -> list[int]:
    """How many tokens were shared in two calls, of which the second goes on where the first ends.

    Both give the tokens that they give without; so does a third one with nothing in common.
    """
    shared, given = list[int](), prompts
    for turn in range(3):
        wanted, found = (one(given, max_new_tokens=12, **options) for one in (plain, cached))
        assert [*found] == [*wanted] and found.tokens == wanted.tokens
        assert wanted.shared == 0
        shared.append(found.shared)
        copies = options.get("num_return_sequences", 1)
        rows = zip(found.prompts[::copies], found.tokens[::copies], strict=True)
        given = [[*row, *new, 5 + i, 6] for i, (row, new) in enumerate(rows)]
        given = given if turn == 0 else [[39 - i, *row[:20]] for i, row in enumerate(prompts)]
    assert shared.pop() == 0 or len(prompts) == 1
    return shared


OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "drawn": {"temperature": 1.2, "seed": 3},
    "answers": {"temperature": 1.2, "num_return_sequences": 2},
    "beams": {"beams": 3},
    "guesses": {"speculate": "prompt-lookup"},
    "ends": {"eos": [*range(20, 40)]},
}


@pytest.fixture(scope="module", params=["in place", "chunks", "growing", "int8 cache"])
def both(request: Any) -> tuple[Generator, Generator]:
    graph = model(**LONG)
    if request.param == "chunks":
        return twins(graph, chunk=7)
    if request.param == "int8 cache":
        if minor(ort.__version__) < (1, 27):
            pytest.skip("the runtime reads no cache of int8 before 1.27")
        graph = model(**LONG, hidden_size=64)
        return twins(int8_cache(graph, np.array([BEGIN])))
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "growing":
            patch.setattr(decoders, "in_place", lambda model: Miss("asked not to be"))
        made = twins(graph)
    assert isinstance(made[0].decoder, Growing) == (request.param == "growing")
    return made


@pytest.mark.share(5)
@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("name", OPTIONS)
def test_no_token_changes(both: Any, name: str, rows: int) -> None:
    first, second = calls(both[0], both[1], ROWS[:rows], **OPTIONS[name])
    assert first >= (rows - 1) * 40 and second >= rows * 40


@pytest.mark.share(3)
@pytest.mark.parametrize("which", ["bloom", "gemma2", "opt", "gpt_oss"])
def test_no_token_of_a_family_changes(which: str, tmp_path: Path) -> None:
    """Biases by distance, windows and caps, learned positions, experts and sinks."""
    graph = from_folder(checkpoint(tmp_path, which)).model
    folder = write_folder(tmp_path, tmp_path / "out", {MODEL: graph})
    rows = [[*BEGIN[:30], *own] for own in ([7], [1, 2, 3], [9, 9])]
    plain, cached = twins(folder)
    assert min(calls(plain, cached, rows, eos=[])) >= 60


def test_spans_of_map_share_nothing(folder: Path, monkeypatch: Any) -> None:
    """So rows have the same bits whichever spans their worker had before; batches do share."""
    shared = list[int]()
    started = InPlace.start

    def spy(self: Any, *given: Any) -> Any:
        found = started(self, *given)
        shared.append(self.shared)
        return found

    monkeypatch.setattr(InPlace, "start", spy)
    stage = Stage(folder, batch=2, max_new_tokens=3)
    rows = pyarrow.table({"ids": [[*BEGIN[:30], *own] for own in ([1], [2, 3], [4], [5])]})
    first, second = stage(rows), stage(rows)
    assert shared == [30, 60] * 2 and first.equals(second)
    plain = gg.generate(folder, rows["ids"].to_pylist(), max_new_tokens=3)
    assert [*plain] and plain.tokens == first["generated_tokens"].to_pylist()


def test_longrope_shares_below_its_first_length(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(prefixes, "CALL", 0)
    graph = from_folder(checkpoint(tmp_path, "phi3, longrope")).model
    plain, cached = twins(write_folder(tmp_path, tmp_path / "out", {MODEL: graph}))
    rows = [[*BEGIN[:7], own] for own in range(3)]
    for more, shared in ((4, 14), (3, 21), (6, 0), (4, 14)):  # beyond 12 tokens, angles change
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", gg.GraphgenWarning)
            one, other = (g(rows, max_new_tokens=more, eos=[]) for g in (plain, cached))
        assert [*one] == [*other] and other.shared == shared


def test_nothing_is_shared_where_results_depend_on_neighbors(monkeypatch: Any) -> None:
    small = quantize(model(**LONG), "int8", threshold=9.0)[0]
    assert calls(*twins(small), ROWS) == [0, 0]


def test_a_call_that_failed_leaves_nothing(both: Any, monkeypatch: Any) -> None:
    """Of rows that were half read, nothing may be taken over."""
    cached = both[1]
    list(cached(ROWS, max_new_tokens=3))
    with monkeypatch.context() as patch:
        patch.setattr(type(cached.decoder), "_run", lambda *_: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            next(cached([[*BEGIN[:40], 1, 2]], max_new_tokens=3))
    wanted, found = (one(ROWS, max_new_tokens=12) for one in both)
    assert [*found] == [*wanted] and 3 * 47 <= found.shared < 4 * 48


def test_the_longest_beginning_is_found() -> None:
    rows, held = [[1, 2, 3, 4], [9], [1, 2, 3], [1, 2, 5], [1, 2, 3, 4]], [[1, 2], [9, 1]]
    found = beginnings(rows, np.array([0, 0, 0, 0, 1]), held, np.array([0, 1]))
    assert [*found] == [2, 0, 3, 1, 4]
    assert [x.same for x in found.values()] == [2, 3, 2, 0, 0]
    assert found[0] == Beginning(2, 3, True) and found[2] == Beginning(0, 2, False)
    alone = beginnings(rows, np.zeros(5), held, np.zeros(2), among=False)
    assert [alone[i].same for i in range(5)] == [2, 0, 2, 2, 2]
