"""Batches from files and functions: their order, what is refused, how a stream goes on."""

import itertools
import json
import threading

import numpy as np
import pytest

from graphgen.errors import GraphgenError
from graphgen.plan import TensorType
from graphgen.train.batches import stream
from graphgen.train.data import Dataset
from graphgen.train.sources import read

INT, FLOAT = np.dtype(np.int64), np.dtype(np.float32)
INPUTS = {"ids": TensorType(INT, ("n", "t")), "labels": TensorType(INT, ("n", "t"))}
REGRESSION = {"x": TensorType(FLOAT, ("n", "t")), "labels": TensorType(FLOAT, ("n",))}


def numbered(count, size, **kwargs):
    return Dataset({"x": np.arange(count)}, size, **kwargs)


def seen(batches):
    return [batch["x"].tolist() for batch in batches]


def test_every_epoch_has_every_sample_in_an_order_of_its_own():
    data = numbered(10, 4, seed=3)
    assert len(data) == 3
    epochs = [seen(itertools.islice(stream(data, first, again=True), 3)) for first in (0, 3, 6)]
    assert [len(batch) for batch in epochs[0]] == [4, 4, 2]
    for epoch in epochs:
        assert sorted(itertools.chain(*epoch)) == list(range(10))
    assert epochs[0] != epochs[1] != epochs[2]
    assert epochs[0] == seen(data) == seen(numbered(10, 4, seed=3))
    assert epochs[0] != seen(numbered(10, 4, seed=4))
    assert seen(numbered(3, 8, seed=None)) == [[0, 1, 2]]


@pytest.mark.parametrize("make", [lambda: numbered(10, 4), lambda: list(numbered(10, 4))])
def test_a_stream_that_can_seek_takes_no_batch_before(make, monkeypatch):
    wanted = seen(itertools.islice(stream(make(), again=True), 9))
    taken, at = [], Dataset.at
    monkeypatch.setattr(Dataset, "at", lambda self, i: taken.append(i) or at(self, i))
    data = make()
    taken.clear()
    assert seen(itertools.islice(stream(data, 7, again=True), 2)) == wanted[7:]
    assert taken in ([7, 8], [7, 8, 9], [])
    assert seen(stream(make(), 2)) == wanted[2:3]
    assert not [*stream([], again=True)]


def test_a_batch_is_made_while_the_one_before_is_used(monkeypatch):
    made, at = {i: threading.Event() for i in range(4)}, Dataset.at

    def make(self, number):
        batch = at(self, number)
        made[number].set()
        if number == 2:
            raise GraphgenError("no third batch")
        return batch

    monkeypatch.setattr(Dataset, "at", make)
    data = numbered(10, 4, seed=3)
    batches = stream(data)
    first = next(batches)
    assert made[1].wait(10), "before it is asked for"
    assert not np.array_equal(first["x"], at(data, 3)["x"]), "another epoch's order, for now"
    second = next(batches)
    assert made[2].wait(10)
    assert np.array_equal(second["x"], at(numbered(10, 4, seed=3), 1)["x"])
    with pytest.raises(GraphgenError, match="no third batch"):
        next(batches)


def test_a_stream_of_anything_else_reads_through():
    data = [{"x": np.array([i])} for i in range(3)]
    function = lambda: iter(data)  # noqa: E731
    assert seen(itertools.islice(stream(function, 4, again=True), 3)) == [[1], [2], [0]]
    assert seen(stream(function, 1)) == [[1], [2]]
    assert seen(stream(iter(data), again=True)) == [[0], [1], [2]]


def test_rows_may_be_lists_and_a_column_is_no_number():
    [batch] = Dataset({"x": [[1, 2], [3]], "labels": ([4, 5], [6])}, 2, seed=None)
    np.testing.assert_array_equal(batch["x"], [[1, 2], [3, 0]])
    np.testing.assert_array_equal(batch["labels"], [[4, 5], [6, -100]])
    [batch] = Dataset({"x": [[1, 2], [0.5]], "y": [np.int32(1), 2.5]}, 2, seed=None)
    np.testing.assert_array_equal(batch["x"], [[1, 2], [0.5, 0]])
    np.testing.assert_array_equal(batch["y"], [1, 2.5])
    with pytest.raises(GraphgenError, match="data has samples: x 0; "):
        Dataset({"x": np.float32(3)}, 2)
    for column, message in (
        ([[1, 2], [3, "4"]], r"data: 'x', row 1, is \[3, '4'\]; give numbers"),
        ([0, "1"], "data: 'x', row 1, is '1'; give numbers"),
        ([0, None], "data: 'x', row 1, is None; give numbers"),
        ([[[1], [2, 3]]], r"row 0, is \[\[1\], \[2, 3\]\]; give numbers"),
        ([0, True], "row 1, is True, and row 0 0; give truth values in every row, or numbers"),
        (np.array(["0", "1"]), "data: 'x' is an array of <U1; give numbers"),
    ):
        with pytest.raises(GraphgenError, match=message):
            Dataset({"x": column}, 2)


def test_by_length_samples_of_similar_length_make_a_batch():
    random = np.random.default_rng(0)
    rows = [np.arange(size) for size in random.integers(1, 100, 1003)]
    plain, sorted_ = (Dataset({"x": rows}, 8, by_length=way) for way in (False, True))
    epochs = [[sorted_.at(i)["x"] for i in range(at, at + len(sorted_))] for at in (0, 126)]
    for epoch in epochs:
        sizes = sorted((row > 0).sum() + 1 for batch in epoch for row in batch)
        assert sizes == sorted(map(len, rows)), "every sample once"
        assert [len(batch) for batch in epoch] == [8] * 125 + [3]
        assert sum(batch.size for batch in epoch) < 0.6 * sum(b["x"].size for b in plain)
        widths = [batch.shape[1] for batch in epoch]
        assert widths != sorted(widths), "batches are shuffled"
    assert not np.array_equal(epochs[0][0], epochs[1][0])
    again = Dataset({"x": rows}, 8, by_length=True)
    for i in (130, 3, 200):  # a function of its number alone
        np.testing.assert_array_equal(again.at(i)["x"], [*epochs[0], *epochs[1]][i])
    held_out = Dataset({"x": rows}, 8, by_length=True, seed=None)
    widths = [batch["x"].shape[1] for batch in held_out]
    assert widths == sorted(widths)


def lines(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_json_lines(tmp_path):
    source = lines(tmp_path / "a.jsonl", *({"labels": i, "x": [i, 2 * i]} for i in range(4)))
    [batch] = stream(read(source, REGRESSION, seed=None))
    assert (batch["x"].dtype, batch["labels"].dtype) == (FLOAT, FLOAT)
    np.testing.assert_array_equal(batch["x"], [[0, 0], [1, 2], [2, 4], [3, 6]])
    np.testing.assert_array_equal(batch["labels"], [0, 1, 2, 3])


def test_padding_is_by_batch(tmp_path):
    rows = ([7, 8], [9], [1, 2, 3], [])
    source = lines(tmp_path / "a.jsonl", *({"ids": row, "labels": row} for row in rows))
    first, second = stream(read(source, INPUTS, batch=2, seed=None, pad=True))
    np.testing.assert_array_equal(first["ids"], [[7, 8], [9, 0]])
    np.testing.assert_array_equal(first["labels"], [[7, 8], [9, -100]])
    np.testing.assert_array_equal(second["ids"], [[1, 2, 3], [0, 0, 0]])
    np.testing.assert_array_equal(second["labels"], [[1, 2, 3], [-100] * 3])
    assert first["ids"].dtype == INT


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([[1, 2]], "line 2: a list, not an object"),
        ([{"ids": [1, 2]}], "line 2: it has no 'labels'"),
        ([{"ids": [1, 2], "labels": [1, "a"]}], "line 2: 'labels' is not a list of numbers that"),
        ([{"ids": [1, True], "labels": [1, 2]}], "line 2: 'ids' has true or false, but its input"),
        ([{"ids": [1, 2], "labels": False}], "line 2: 'labels' has true or false"),
        ([{"ids": [1, 2.5], "labels": [1, 2]}], "'ids' is not a list of numbers that fit int64"),
        ([{"ids": [[1], [1, 2]], "labels": [1, 2]}], "'ids' is not a list of numbers"),
        (
            [{"ids": [1, 2, 3], "labels": [1]}],
            r"'ids' has shape \[3\], but \[2\] in the first line;",
        ),
        ([{"ids": [[1, 2]], "labels": [1, 2]}], "line 2: 'ids' is not nested as in the first line"),
    ],
)
def test_a_line_that_does_not_fit_is_one_error(tmp_path, rows, message):
    source = lines(tmp_path / "a.jsonl", {"ids": [1, 2], "labels": [1, 2]}, *rows)
    with pytest.raises(GraphgenError, match=message):
        read(source, INPUTS)


def test_files_that_do_not_fit_are_one_error(tmp_path):
    (tmp_path / "text.jsonl").write_text("one\n")
    with pytest.raises(GraphgenError, match="line 1: Expecting value"):
        read(str(tmp_path / "text.jsonl"), INPUTS)
    (tmp_path / "twice.jsonl").write_text('{"ids": [1], "labels": [1], "ids": [2]}\n')
    with pytest.raises(GraphgenError, match="line 1: two values of an object are called 'ids'"):
        read(str(tmp_path / "twice.jsonl"), INPUTS)
    for name, text in (
        ("large.jsonl", '{"ids": [1], "labels": [1e400]}\n'),
        ("large.csv", "ids,labels\n[1],[-1e400]\n"),
    ):
        (tmp_path / name).write_text(text)
        with pytest.raises(GraphgenError, match=f"{name}, line [12]: "):
            read(str(tmp_path / name), INPUTS | {"labels": TensorType(np.float32, ("b", "n"))})
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(GraphgenError, match=r"empty.jsonl has no rows; give at least one"):
        read(str(tmp_path / "empty.jsonl"), INPUTS)
    np.savez(tmp_path / "a.npz", ids=np.zeros((9, 2), int), mask=np.zeros((9, 2)))
    with pytest.raises(GraphgenError, match="has ids, mask; the artifacts take ids, labels"):
        read(str(tmp_path / "a.npz"), INPUTS)
    np.savez(tmp_path / "b.npz", ids=np.zeros((9, 2), int), labels=np.array(1))
    with pytest.raises(GraphgenError, match="ids 9, labels 0; --batch is 8; all arrays need"):
        read(str(tmp_path / "b.npz"), INPUTS)
    source = lines(tmp_path / "b.jsonl", {"x": [1], "labels": 0})
    with pytest.raises(GraphgenError, match="cannot mark labels of float32 as ignored"):
        read(source, REGRESSION, pad=True)


def test_a_number_that_its_dtype_cannot_hold_is_one_error(tmp_path):
    source = lines(
        tmp_path / "a.jsonl", {"x": [1.0, 2.0], "labels": 0}, {"x": [1, 1e39], "labels": 0}
    )
    with pytest.raises(
        GraphgenError, match=r"line 2: 'x' is not a list of numbers that fit float32"
    ):
        read(source, REGRESSION)


def test_a_line_that_is_nested_without_end_is_one_error(tmp_path):
    (tmp_path / "a.jsonl").write_text("[" * 200_000)
    with pytest.raises(GraphgenError, match="line 1: maximum recursion depth"):
        read(str(tmp_path / "a.jsonl"), REGRESSION)


MODULE = """
import numpy as np
def batches():
    return lambda: ({"x": np.array([i])} for i in range(3))
def once():
    yield {"x": np.array([0])}
    raise KeyError("lost")
def array():
    return [{"x": np.array([i])} for i in range(2)]
def broken():
    return 1 / 0
"""


def test_batches_from_a_function(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "module_of_batches.py").write_text(MODULE)
    (tmp_path / "module_in_error.py").write_text("import nothing_of_this_name")
    data = read("module_of_batches:batches", INPUTS)
    assert seen(itertools.islice(stream(data, 2, again=True), 3)) == [[2], [0], [1]]
    assert len(read("module_of_batches:array", INPUTS)) == 2
    broken = stream(read("module_of_batches:once", INPUTS))
    assert seen([next(broken)]) == [[0]]
    with pytest.raises(GraphgenError, match="--data module_of_batches:once: KeyError: 'lost'"):
        next(broken)
    with pytest.raises(GraphgenError, match="ZeroDivisionError: division by zero"):
        read("module_of_batches:broken", INPUTS)
    with pytest.raises(GraphgenError, match=r"--eval module_in_error:x: ModuleNotFoundError: .*of"):
        read("module_in_error:x", INPUTS, option="--eval")
