"""Numbers in tables: Parquet, Arrow, CSV and folders that `datasets` saved, as batches."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest

from graphgen.errors import GraphgenError, GraphgenWarning
from graphgen.export.columns import Chunk, Rows
from graphgen.export.tables import open_table
from graphgen.plan import TensorType
from graphgen.train.batches import stream
from graphgen.train.data import Dataset, LabelKind
from graphgen.train.sources import read

pa = pytest.importorskip("pyarrow", reason="pyarrow is missing: the extra [map] installs it")
parquet = pytest.importorskip("pyarrow.parquet")

INT = np.dtype(np.int64)
INPUTS = {"ids": TensorType(INT, ("n", "t")), "labels": TensorType(INT, ("n", "t"))}
EVEN = {"ids": [[1, 2], [3, 4], [5, 6], [7, 8], [9, 0]], "labels": [[i, i] for i in range(5)]}
RAGGED = {"ids": [[1], [2, 3], [], [4, 5, 6], [7]], "labels": [[i] for i in range(5)]}
NARROW = pa.schema([("ids", pa.list_(pa.int32())), ("labels", pa.list_(pa.int8()))])


def save_parquet(folder, columns, schema=NARROW):
    parquet.write_table(pa.table(columns, schema), folder / "a.parquet", row_group_size=2)
    return "a.parquet"


def save_stream(folder, columns, schema=NARROW, name="a.arrow"):
    with pa.ipc.new_stream(folder / name, schema) as writer:
        writer.write_table(pa.table(columns, schema), max_chunksize=2)
    return name


def save_file(folder, columns, schema=NARROW):
    with pa.ipc.new_file(folder / "b.arrow", schema) as writer:
        writer.write_table(pa.table(columns, schema))
    return "b.arrow"


def save_to_disk(folder, columns, schema=NARROW):
    """As `Dataset.save_to_disk` of datasets 4 writes it, in two shards."""
    (folder / "saved").mkdir()
    halves = [{n: x[:3] for n, x in columns.items()}, {n: x[3:] for n, x in columns.items()}]
    names = [
        save_stream(folder / "saved", half, schema, f"data-0000{i}-of-00002.arrow")
        for i, half in enumerate(halves)
    ]
    state = {"_data_files": [{"filename": name} for name in names], "_fingerprint": "ab"}
    (folder / "saved" / "state.json").write_text(json.dumps(state))
    return "saved"


def save_lines(folder, columns):
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    (folder / "a.jsonl").write_text("\n\n".join(map(json.dumps, rows)))
    return "a.jsonl"


def save_csv(folder, columns, name="a.csv", between=","):
    rows = [f'"{a}"{between}"{b}"' for a, b in zip(*columns.values(), strict=True)]
    text = "\r\n".join([between.join(columns), *rows])
    (folder / name).write_text("\ufeff" + text + "\r\n")
    return name


def save_tsv(folder, columns):
    return save_csv(folder, columns, "a.tsv", "\t")


SAVED = [save_parquet, save_stream, save_file, save_to_disk, save_lines, save_csv, save_tsv]


@pytest.mark.parametrize("save", SAVED)
def test_all_kinds_give_the_batches_of_arrays(save, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    np.savez("a.npz", **EVEN)
    found = read(save(tmp_path, EVEN), INPUTS, batch=2)
    for batch, wanted in zip(stream(found), stream(read("a.npz", INPUTS, batch=2)), strict=True):
        for name in INPUTS:
            np.testing.assert_array_equal(batch[name], wanted[name])
            assert batch[name].dtype == INT


@pytest.mark.parametrize("save", SAVED)
def test_lists_of_different_lengths_are_padded_on_request(save, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    columns = RAGGED | {"labels": RAGGED["ids"]}
    source = save(tmp_path, columns)
    with pytest.raises(GraphgenError, match=r"(line|row) [23]: 'ids' has shape \[2\], but \[1\]"):
        read(source, INPUTS)
    first, second, third = stream(read(source, INPUTS, batch=2, seed=None, pad=True))
    np.testing.assert_array_equal(first["ids"], [[1, 0], [2, 3]])
    np.testing.assert_array_equal(second["labels"], [[-100] * 3, [4, 5, 6]])
    np.testing.assert_array_equal(third["ids"], [[7]])


@pytest.mark.parametrize("stored", [True, False])
def test_the_checksum_tells_rows_apart(stored):
    def checksum(*rows):
        arrays = [np.array(row, np.int64) for row in rows]
        starts = np.cumsum([0, *map(len, rows)])
        chunks = [Chunk(np.concatenate(arrays), starts)]
        return Dataset({"x": Rows("x", chunks, INT) if stored else arrays}, 1).checksum()

    assert checksum([1, 2], [3]) == checksum([1, 2], [3])
    assert len({checksum([1, 2], [3]), checksum([1], [2, 3]), checksum([1, 2], [4])}) == 3


def test_a_folder_is_mapped_not_read(tmp_path, monkeypatch):
    """The numbers of a row come from the file at the moment at which they are asked for."""
    monkeypatch.chdir(tmp_path)
    schema = pa.schema([(name, pa.list_(pa.int64())) for name in EVEN])
    data = read(save_to_disk(tmp_path, EVEN, schema), INPUTS, batch=3, seed=None)
    before = pa.total_allocated_bytes()
    [first, _] = data
    np.testing.assert_array_equal(first["ids"], EVEN["ids"][:3])
    [chunk, *_] = data._columns["ids"].chunks
    assert pa.total_allocated_bytes() <= before and not chunk.values.flags.owndata
    assert not chunk.values.flags.writeable


def test_nested_lists_and_single_numbers(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pixels = np.arange(24, dtype=np.float32).reshape(4, 2, 3)
    schema = pa.schema([("x", pa.list_(pa.list_(pa.float32(), 3))), ("labels", pa.int8())])
    source = save_stream(tmp_path, {"x": pixels.tolist(), "labels": range(4)}, schema)
    real = np.dtype(np.float32)
    inputs = {"x": TensorType(real, ("n", 2, 3)), "labels": TensorType(INT, ("n",))}
    [batch] = stream(read(source, inputs, seed=None))
    np.testing.assert_array_equal(batch["x"], pixels)
    np.testing.assert_array_equal(batch["labels"], range(4))


def table(**columns):
    return lambda folder: parquet.write_table(pa.table(columns), folder / "a.parquet")


WRONG = {
    "a null": (table(ids=[[1], None], labels=[[1], [2]]), "row 2: 'ids' has a null; give"),
    "a null inside": (table(ids=[[1], [None]], labels=[[1], [2]]), "a.parquet: 'ids' has a null"),
    "a text": (table(ids=[["a"]], labels=[[1]]), "'ids' are string; give numbers, or lists"),
    "a fraction": (table(ids=[[1.5]], labels=[[1]]), "'ids' has float64 that do not fit int64"),
    "booleans": (table(ids=[[1]], labels=[[True]]), "'labels' has bool that do not fit int64"),
    "two depths": (table(ids=[[[1, 2], [3]]], labels=[[1]]), "'ids' has lists of different len"),
    "no labels": (table(ids=[[1]]), "a.parquet has ids; the artifacts take ids, labels"),
    "no rows": (table(ids=[], labels=[]), "a.parquet has no rows; give at least one"),
    "a name twice": (
        lambda folder: parquet.write_table(
            pa.Table.from_arrays([pa.array([1])] * 2, ["ids", "ids"]), folder / "a.parquet"
        ),
        "a.parquet has two columns of one name",
    ),
    "no Parquet": (
        lambda folder: (folder / "a.parquet").write_text("no Parquet"),
        "a.parquet cannot be read: .*; write it again",
    ),
    "nothing": (lambda folder: (folder / "a.parquet").touch(), "a.parquet cannot be read: "),
    "no file": (lambda folder: None, "a.parquet cannot be read: .*No such file"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_table_that_does_not_fit_is_one_error(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write, message = WRONG[name]
    write(tmp_path)
    with pytest.raises(GraphgenError, match=message) as raised:
        read("a.parquet", INPUTS)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("save", [save_parquet, save_stream, save_file])
def test_damaged_bytes_are_one_error_or_other_numbers(save, tmp_path, monkeypatch):
    """Lengths and offsets out of range would end the process, not raise."""
    monkeypatch.chdir(tmp_path)
    source = save(tmp_path, RAGGED | {"labels": RAGGED["ids"]})
    good, random = Path(source).read_bytes(), np.random.default_rng(0)
    refused = 0
    for _ in range(60):
        bad = bytearray(good)
        bad[random.integers(len(bad))] = random.integers(256)
        Path(source).write_bytes(bad[: random.integers(len(bad))] if _ % 3 == 0 else bad)
        try:
            [*stream(read(source, INPUTS, batch=2, pad=True))]
        except GraphgenError:
            refused += 1
    assert refused > 15


def test_folders_that_are_no_table_are_one_error(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(GraphgenError, match=r"empty has neither state.json, which save_to_disk"):
        read("empty", INPUTS)
    save_to_disk(tmp_path, EVEN)
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["saved"]}')
    with pytest.raises(GraphgenError, match="has the splits saved; give one: "):
        read(".", INPUTS)
    (tmp_path / "saved" / "state.json").write_text('{"_data_files": [{}]}')
    with pytest.raises(GraphgenError, match=r"state.json names no files; save it again"):
        read("saved", INPUTS)
    (tmp_path / "saved" / "state.json").write_text('{"_data_files": []}')
    with pytest.raises(GraphgenError, match=r"saved has no rows; give at least one"):
        read("saved", INPUTS)
    (tmp_path / "saved" / "state.json").write_text('{"_data_files": [{"filename": "x.arrow"}]}')
    with pytest.raises(GraphgenError, match=r"x.arrow cannot be read: .*; write it again"):
        read("saved", INPUTS)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ids,labels\n1\n", "line 2: 1 cells, but 2 names in the first line"),
        ("ids,labels\n[1],two\n", "line 2: 'labels' is not a list of numbers that fit int64"),
        ('ids,labels\n1,"2\n', "line 2: unexpected end of data"),
        ("ids,ids\n1,2\n", "line 1: two columns have one name"),
        ("", "a.csv has no rows; give at least one"),
        ("\xff", "line 1: .*codec can't decode"),
    ],
)
def test_csv_that_does_not_fit_is_one_error(text, message, tmp_path, monkeypatch):
    limit = csv.field_size_limit()
    monkeypatch.chdir(tmp_path)
    Path("a.csv").write_bytes(text.encode("latin-1"))
    with pytest.raises(GraphgenError, match=message):
        read("a.csv", INPUTS)
    assert csv.field_size_limit() == limit  # of the whole process


def test_other_columns_are_left_out_with_a_warning(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    table(ids=[[1]], labels=[[1]], text=["a"], index=[0])(tmp_path)
    with pytest.warns(GraphgenWarning, match="do not take text, index, which are left out"):
        read("a.parquet", INPUTS, batch=1)


def test_labels_out_of_range_are_named_by_row():
    chunks = [Chunk(np.array([0, 1]), np.array([0, 1, 2])), Chunk(np.array([7]), np.array([0, 1]))]
    data = Dataset({"labels": Rows("labels", chunks, INT)}, 1)
    data.check({"labels": LabelKind(8)})
    with pytest.raises(GraphgenError, match="must be 0 to 2: row 2 has 7"):
        data.check({"labels": LabelKind(3)})


def test_the_files_of_a_folder_are_one_table(tmp_path):
    """Columns go by name, whatever integers they are; none is missing, and classes are the same."""
    rows = {"ids": [[1], [2]], "labels": [[1], [2]]}
    names = '{"info": {"features": {"labels": {"_type": "ClassLabel", "names": ["a", "b"]}}}}'

    def write(name, columns, classes=names, **kinds):
        arrays = {n: pa.array(x, kinds.get(n, pa.list_(pa.int64()))) for n, x in columns.items()}
        made = pa.table(arrays).replace_schema_metadata({"huggingface": classes})
        parquet.write_table(made, tmp_path / name)

    write("a.parquet", rows)
    other = {"labels": [[2], [0]], "ids": [[3], [4]]}
    write("b.parquet", other, labels=pa.list_(pa.int8()), ids=pa.list_(pa.int32()))
    [batch] = stream(read(str(tmp_path), INPUTS, batch=4, seed=None))
    assert batch["ids"].tolist() == [[1], [2], [3], [4]]
    assert batch["labels"].tolist() == [[1], [2], [2], [0]]
    write("b.parquet", {"ids": [[3], [4]]})
    told = r"b.parquet has the columns \['ids'\], but a.parquet has \['ids', 'labels'\]"
    with pytest.raises(GraphgenError, match=told):
        read(str(tmp_path), INPUTS)
    write("b.parquet", rows, names.replace('"a", "b"', '"b", "a"'))
    with pytest.raises(GraphgenError, match=r"b.parquet has the classes .*'b', 'a'.*'a', 'b'"):
        read(str(tmp_path), INPUTS)


def test_a_folder_of_parquet_files_is_one_split(tmp_path):
    """As datasets lie on the Hub: rows for the test are not trained, too."""

    def write(*names):
        for name in names:
            parquet.write_table(pa.table(EVEN, NARROW), tmp_path / f"{name}.parquet")

    write("train-00000-of-00002", "train-00001-of-00002", "0000", "latest")
    [batch] = stream(read(str(tmp_path), INPUTS, batch=20, seed=None))
    assert len(batch["ids"]) == 20
    (tmp_path / "train-00001-of-00002.parquet").unlink()
    (tmp_path / "0000.parquet").unlink()
    (tmp_path / "latest.parquet").unlink()
    with pytest.warns(UserWarning, match="has 1 of 2 files by their names: rows are missing"):
        read(str(tmp_path), INPUTS, batch=5)
    write("test-00000-of-00001")
    with pytest.raises(GraphgenError, match="files of the splits test, train; give one file"):
        read(str(tmp_path), INPUTS, batch=20)


@pytest.mark.parametrize("ending", ["csv", "parquet"])
def test_columns_may_have_other_names(ending, tmp_path):
    """That of a class, which a column of datasets has, goes with it."""
    path = tmp_path / f"a.{ending}"
    if ending == "csv":
        path.write_text("review,stars\ngood,1\n")
    else:
        features = {"stars": {"names": ["bad", "good"], "_type": "ClassLabel"}}
        features["tags"] = {"feature": features["stars"], "_type": "List"}
        noted = {"huggingface": json.dumps({"info": {"features": features}})}
        table = pa.table({"review": ["good"], "stars": [1], "tags": [[0]]})
        parquet.write_table(table.replace_schema_metadata(noted), path)
    found = open_table(path, {"text": "review", "label": "stars"})
    assert found.names[:2] == ["text", "label"]
    assert next(found.rows(["text"])) == {"text": "good"}
    assert found.numbers("label", np.int64)[0] == 1
    if ending == "parquet":
        assert found.classes("label") == found.classes("tags") == ["bad", "good"]
    for columns in ({"text": "reviews"}, {"stars": "review"}):
        with pytest.raises(GraphgenError, match="columns that are renamed have to be there"):
            open_table(path, columns)
    with pytest.raises(GraphgenError, match="--columns is for tables"):
        read("a.npz", {}, columns={"text": "review"})
