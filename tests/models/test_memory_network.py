"""The memory network against float64 numpy, its gradients, and what may not change an answer."""

import importlib
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gradients import check_trained_step, checked_gradients
from small_models import ROUNDING, relative_rms, run_plain, vary

import graphgen as gg
from graphgen import ops
from graphgen.models.memory_network import MemoryNetwork, inputs
from graphgen.nn.module import initialize
from graphgen.passes import optimize

RNG = np.random.default_rng(15)
V, D, HOPS, LENGTH = 13, 6, 3, 5
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def stories(batch: int = 3, sentences: int = 5, words: int = 4) -> dict[str, Any]:
    """The second story is shorter, with a sentence in it that is empty; words are fewer, too."""
    story, question = RNG.integers(1, V, (batch, sentences, words)), RNG.integers(1, V, (batch, 3))
    story[1:, -1] = 0
    story[1, 1] = 0
    story[0, 2, 2:] = 0
    question[0, 1:] = 0
    return {"story_ids": story, "question_ids": question}


def network(**sizes: Any) -> MemoryNetwork:
    return MemoryNetwork(V, D, hops=HOPS, length=LENGTH, **sizes)


def sentence(table: Any, ids: Any) -> Any:
    """Equation by equation, one word and feature at a time (4.1)."""
    given = [i for i in ids if i]
    total, big = np.zeros(D), len(given)
    for j, i in enumerate(given, 1):
        for k in range(1, D + 1):
            total[k - 1] += ((1 - j / big) - (k / D) * (1 - 2 * j / big)) * table[i, k - 1]
    return total


def answer(w: dict[str, Any], story: Any, question: Any, *, linear: bool) -> Any:
    tables = [w[f"tables.{i}.weight"] for i in range(HOPS + 1)]
    times = [w[f"times.{i}.weight"] for i in range(HOPS + 1)]
    told = [i for i, ids in enumerate(story) if ids.any()]
    u = sentence(tables[0], question)
    for hop in range(HOPS):
        m, c = (
            np.array([sentence(tables[n], story[i]) + times[n][i] for i in told])
            for n in (hop, hop + 1)
        )
        p = m @ u
        p = p if linear else np.exp(p - p.max()) / np.exp(p - p.max()).sum()
        u = u + p @ c
    return tables[-1] @ u


@pytest.mark.parametrize("linear", [False, True])
def test_answers_are_those_of_the_paper(linear: bool) -> None:
    module, feeds = vary(network(linear=linear)), stories()
    w = {name: p.array.astype(np.float64) for name, p in initialize(module).items()}
    model = gg.build(module, primitives=True, **inputs())
    pairs = zip(feeds["story_ids"], feeds["question_ids"], strict=True)
    wanted = np.stack([answer(w, *pair, linear=linear) for pair in pairs])
    best = optimize(model, verify=True)
    assert best.report.shortfalls() == []
    for graph in (model, best.model):
        assert relative_rms(wanted, run_plain(graph, feeds)[0]) < ROUNDING
    assert relative_rms(wanted, module(**feeds)["logits"]) < ROUNDING


def test_weights_are_tied_between_neighbors() -> None:
    assert len(initialize(network())) == 2 * (HOPS + 1)


@pytest.mark.share(2)
@pytest.mark.parametrize("linear", [False, True])
def test_gradients_are_the_central_difference_and_those_of_a_trained_step(
    linear: bool, tmp_path: Any
) -> None:
    module, batch = vary(network(linear=linear)), stories() | {"labels": np.array([3, 0, 7])}
    labels = {"labels": gg.int64["batch"]}
    gradients = checked_gradients(module, ops.cross_entropy, inputs(), batch, **labels)
    check_trained_step(gg.build(module, training=True, **inputs()), tmp_path, batch, gradients)


def test_a_story_longer_than_the_times_is_refused() -> None:
    session = gg.Session(gg.build(network(), **inputs()))
    with pytest.raises(gg.GraphgenError, match=r"Gather.* out of data bounds"):
        session(stories(sentences=6))
    with pytest.raises(gg.GraphgenError, match="position 5 was never learned"):
        gg.build(network(), **inputs() | {"story_ids": gg.int64["batch", 6, "words"]})


def replay(told: list[str], question: str) -> str:
    """The answer, found by reading the story from its beginning."""
    room: dict[str, str] = {}
    carried: dict[str, set[str]] = {}
    been: dict[str, list[str]] = {}
    for words in map(str.split, told):
        person, verb = words[0], " ".join(words[1:-2] if words[-1] != "there" else words[1:-3])
        if words[-1] != "there":
            room[person] = words[-1]
            for thing in carried.get(person, ()):
                been[thing].append(words[-1])
        elif verb in ("got", "grabbed", "picked up", "took"):
            assert not any(words[-2] in things for things in carried.values())
            carried.setdefault(person, set()).add(words[-2])
            been.setdefault(words[-2], [room[person]])
            assert been[words[-2]][-1] == room[person]
        else:
            carried[person].remove(words[-2])
    *_, last = asked = question.split()
    if asked[:2] == ["where", "is"]:
        return room[last] if len(asked) == 3 else been[last][-1]
    rooms = been[asked[3]]
    return rooms[max(i for i, room in enumerate(rooms) if room == last) - 1]


@pytest.mark.parametrize("facts", [1, 2, 3])
def test_the_stories_of_the_example_tell_their_answers(
    facts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    questions: Any = importlib.import_module("questions")
    rng = random.Random(facts)
    for told, question, given in (questions.story(rng, facts) for _ in range(200)):
        assert replay(told, question) == given
        least, most = questions.SENTENCES[facts]
        assert least <= len(told) <= most
    data = {facts: questions.arrays(rng, facts, 20)}
    one, two = (next(questions.batches(data, (seed,), 8)) for seed in (0, 0))
    assert all(np.array_equal(one[name], two[name]) for name in one)
    # Empty sentences are thrown in between those told, and nothing else.
    known = {array.tobytes() for array in data[facts]["story_ids"].reshape(-1, 6)}
    assert {array.tobytes() for array in one["story_ids"].reshape(-1, 6)} <= known
