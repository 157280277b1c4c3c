"""Tables of rows in files: JSON lines, CSV, TSV, Parquet, Arrow, and folders of `datasets`."""

import csv
import io
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from graphgen.errors import GraphgenError, needed, warn
from graphgen.export.columns import Chunk, Column, Rows, read_number
from graphgen.export.named_losses import IGNORED
from graphgen.export.rows import Lines, Row, Span, scan
from graphgen.files import parse_json, present, read_bytes, read_json, regular
from graphgen.operands import Array

KINDS = (".jsonl", ".csv", ".tsv", ".parquet", ".pq", ".arrow")

_SPLITS = "train|training|validation|valid|val|dev|test|testing|eval|evaluation"
_SPLIT = re.compile(rf"(?<![^\W\d_])({_SPLITS})(?![^\W\d_])")
"""A word in a file's name for which `datasets` takes it as a part of a split, not of the whole."""

_PART = re.compile(r"-\d+-of-(\d+)$")
"""At the end of a name, in how many files the rows of a split are."""


def in_words(names: Sequence[str]) -> str:
    """Names of columns, for a message: in quotes where a blank would not be seen."""
    return ", ".join(n if n and n == n.strip() else repr(n) for n in names) or "nothing"


class Table(ABC):
    """Rows with the columns `names`, which a row of JSON lines may lack."""

    names: Sequence[str]

    def __init__(self, path: Path) -> None:
        self.path = path

    @abstractmethod
    def __len__(self) -> int: ...

    def where(self, row: int) -> str:
        """The place of a row, for an error."""
        return f"{self.path}, row {row + 1}"

    @abstractmethod
    def rows(self, names: Sequence[str]) -> Iterator[dict[str, Any]]:
        """The rows as objects of Python, with these columns."""

    @abstractmethod
    def arrow(self) -> Any:
        """All rows, a pyarrow.Table."""

    @abstractmethod
    def numbers(self, name: str, dtype: Any, *, pad: bool = False) -> Column:
        """A column of numbers, or lists of them; of different lengths only with `pad`."""

    def classes(self, name: str) -> list[str] | None:
        """The names of the classes that are numbers in a column, if the file has them."""
        return None

    @abstractmethod
    def renamed(self, names: Mapping[str, str]) -> "Table":
        """The same with other names of some columns: the new one of each that it has."""


class Objects(Table):
    """The rows of a file of JSON lines, or of CSV, whose cells are numbers if they read as JSON."""

    def __init__(self, path: Path, rows: Sequence[tuple[int, dict[str, Any]]], texts: bool) -> None:
        super().__init__(path)
        self._rows, self._texts = rows, texts
        self.names = [*dict.fromkeys(name for _, row in rows for name in row)]

    def __len__(self) -> int:
        return len(self._rows)

    def where(self, row: int) -> str:
        return f"{self.path}, line {self._rows[row][0]}"

    def rows(self, names: Sequence[str]) -> Iterator[dict[str, Any]]:
        return ({name: row.get(name) for name in names} for _, row in self._rows)

    def arrow(self) -> Any:
        return needed("pyarrow").Table.from_pylist([row for _, row in self._rows])

    def renamed(self, names: Mapping[str, str]) -> "Objects":
        rows = [(i, {names.get(n, n): x for n, x in row.items()}) for i, row in self._rows]
        return Objects(self.path, rows, self._texts)

    def numbers(self, name: str, dtype: Any, *, pad: bool = False) -> Column:
        column: list[Array] = []
        for number, (_, row) in enumerate(self._rows):
            try:
                if name not in row:
                    raise ValueError(f"it has no {name!r}")
                value = row[name]
                if self._texts:
                    try:
                        value = parse_json(value)
                    except ValueError:
                        value = None
                array = read_number(name, value, dtype)
                if column and array.ndim != column[0].ndim:
                    raise ValueError(f"{name!r} is not nested as in the first line")
                if column and array.shape != column[0].shape and not pad:
                    raise ValueError(_lengths(name, array.shape, column[0].shape))
            except (ValueError, RecursionError) as error:
                raise GraphgenError(f"{self.where(number)}: {error}") from error
            column.append(array)
        return np.stack(column) if len({array.shape for array in column}) == 1 else column


def _lengths(name: str, found: Sequence[int], first: Sequence[int]) -> str:
    return (
        f"{name!r} has shape {[*found]}, but {[*first]} in the first line; "
        f"--pad pads with 0, labels with {IGNORED}"
    )


def _json_lines(path: Path) -> Objects:
    rows = []
    for number, line in enumerate(read_bytes(path).split(b"\n"), 1):
        try:
            if line.strip():
                row = parse_json(line.decode("utf-8-sig"))
                if not isinstance(row, dict):
                    raise ValueError(f"a {type(row).__name__}, not an object")
                rows.append((number, row))
        except (ValueError, RecursionError) as error:
            raise GraphgenError(f"{path}, line {number}: {error}") from error
    return Objects(path, rows, texts=False)


def _csv(path: Path) -> Objects:
    rows, number = list[tuple[int, dict[str, Any]]](), 1
    limit = csv.field_size_limit()  # of the whole process
    try:
        text = read_bytes(path).decode("utf-8-sig")
        csv.field_size_limit(max(len(text), limit))
        between = "\t" if path.suffix == ".tsv" else ","
        reader = csv.reader(io.StringIO(text, newline=""), delimiter=between, strict=True)
        names = next(reader, [])
        if len({*names}) < len(names):
            raise ValueError("two columns have one name")
        number = reader.line_num + 1
        for cells in reader:
            if cells and len(cells) != len(names):
                raise ValueError(f"{len(cells)} cells, but {len(names)} names in the first line")
            if cells:
                rows.append((number, dict(zip(names, cells, strict=True))))
            number = reader.line_num + 1
    except (ValueError, csv.Error) as error:
        kind = path.suffix[1:].upper()
        raise GraphgenError(f"{path}, line {number}: {error}; give a file of {kind}") from error
    finally:
        csv.field_size_limit(limit)
    return Objects(path, rows, texts=True)


class Arrow(Table):
    """A table of pyarrow; what is mapped from a file stays there."""

    def __init__(self, path: Path, table: Any, classes: Mapping[str, list[str]]) -> None:
        super().__init__(path)
        self.table, self.names, self._classes = table, table.column_names, classes

    def __len__(self) -> int:
        return int(self.table.num_rows)

    def rows(self, names: Sequence[str]) -> Iterator[dict[str, Any]]:
        for batch in self.table.select(list(names)).to_batches():
            yield from batch.to_pylist()

    def arrow(self) -> Any:
        return self.table

    def classes(self, name: str) -> list[str] | None:
        return self._classes.get(name)

    def renamed(self, names: Mapping[str, str]) -> "Arrow":
        table = self.table.rename_columns([names.get(name, name) for name in self.names])
        classes = {names.get(name, name): x for name, x in self._classes.items()}
        return Arrow(self.path, table, classes)

    def numbers(self, name: str, dtype: Any, *, pad: bool = False) -> Column:
        chunks, first = list[Chunk](), 0
        for array in self.table.column(name).chunks:
            if len(array):
                chunks.append(_chunk(self, name, array, first))
            first += len(array)
        if len({chunk.values.shape[1:] for chunk in chunks}) > 1:
            raise GraphgenError(f"{self.path}: rows of {name!r} have different shapes")
        rows = Rows(f"{self.path}: {name!r}", chunks, dtype)
        if len(rows.shapes) > 1 and not pad:
            other = int(np.argmax(rows.sizes != rows.sizes[0]))
            reason = _lengths(name, rows[other].shape, rows[0].shape)
            raise GraphgenError(f"{self.where(other)}: {reason}")
        return rows


def _chunk(table: Arrow, name: str, array: Any, first: int | None) -> Chunk:
    """The values of an array of pyarrow, not copied; its rows begin with `first` of the table."""
    pa = needed("pyarrow")
    if array.null_count:
        row = int(np.argmax(array.is_null().to_numpy(zero_copy_only=False)))
        where = table.path if first is None else table.where(first + row)
        raise GraphgenError(f"{where}: {name!r} has a null; give numbers in every row")
    kind = array.type
    if pa.types.is_dictionary(kind):
        return _chunk(table, name, array.dictionary_decode(), first)
    if isinstance(kind, pa.BaseExtensionType):
        return _chunk(table, name, array.storage, first)
    if any(is_(kind) for is_ in (pa.types.is_integer, pa.types.is_floating, pa.types.is_boolean)):
        return Chunk(array.to_numpy(zero_copy_only=False))
    lists = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)
    if not any(is_(kind) for is_ in lists):
        raise GraphgenError(f"{table.path}: {name!r} are {kind}; give numbers, or lists of them")
    inner = array.flatten()
    values, ends = _chunk(table, name, inner, None)
    if ends is not None:  # nested lists: all but the outermost have one length
        sizes = np.unique(np.diff(ends))
        if len(sizes) > 1:
            raise GraphgenError(f"{table.path}: {name!r} has lists of different lengths in a row")
        size = int(sizes[0]) if len(sizes) else 0
        values = values.reshape(len(inner), size, *values.shape[1:])
    lengths = needed("pyarrow.compute").list_value_length(array).to_numpy(zero_copy_only=False)
    return Chunk(values, np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]))


def _classes(table: Any) -> dict[str, list[str]]:
    """By column, the names of the classes that its numbers, or those of its lists, stand for.

    As `datasets` saves them.
    """
    try:
        given = json.loads((table.schema.metadata or {})[b"huggingface"])
        features = given["info"]["features"].items()
        features = [(n, f.get("feature", f) if isinstance(f, dict) else f) for n, f in features]
        found = {n: f["names"] for n, f in features if f.get("_type") == "ClassLabel"}
    except (KeyError, ValueError, TypeError, AttributeError, RecursionError):
        return {}
    return {n: [*map(str, x)] for n, x in found.items() if isinstance(x, list)}


def _check_alike(file: Path, table: Any, first: Path, of_first: Any) -> None:
    """Refuse a file whose columns, or classes, are not those of the first file of the table."""
    ours: Any = sorted(table.column_names)
    theirs: Any = sorted(of_first.column_names)
    if len({*ours}) < len(ours):
        raise GraphgenError(f"{file} has two columns of one name; rename one")
    what = "the columns"
    if ours == theirs:
        what, ours, theirs = "the classes", _classes(table), _classes(of_first)
    if ours != theirs:
        raise GraphgenError(
            f"{file} has {what} {ours}, but {first.name} has {theirs}: give files of one table"
        )


def _arrow(path: Path, files: Sequence[Path]) -> Arrow:
    """Files of one table, in order: .parquet is read, .arrow is mapped."""
    pa, tables = needed("pyarrow"), []
    file = path
    try:
        for file in files:
            regular(file)
            if file.suffix in (".parquet", ".pq"):
                tables.append(needed("pyarrow.parquet").ParquetFile(file, memory_map=True).read())
                continue
            source = pa.memory_map(str(file))
            with source:
                magic = source.read(6)
                source.seek(0)
                ipc = pa.ipc.open_file if magic == b"ARROW1" else pa.ipc.open_stream
                tables.append(ipc(source).read_all())
        for file, table in zip(files, tables, strict=True):
            _check_alike(file, table, files[0], tables[0])
        table = pa.concat_tables(tables, promote_options="permissive")
        table.validate(full=True)  # offsets out of range would end the process
    except (pa.ArrowException, OSError, ValueError, TypeError) as error:
        reason = getattr(error, "strerror", None) or str(error).partition("\n")[0]
        raise GraphgenError(f"{file} cannot be read: {reason}; write it again") from error
    return Arrow(path, table, _classes(table))


def _folder(path: Path) -> Table:
    """What `datasets` saved, or a folder of Parquet files."""
    if present(path / "dataset_dict.json"):
        splits = sorted(x.parent.name for x in path.glob("*/state.json"))
        raise GraphgenError(f"{path} has the splits {', '.join(splits)}; give one: {path}/SPLIT")
    if present(path / "state.json"):
        state = read_json(path / "state.json")
        try:
            files = [path / one["filename"] for one in state["_data_files"]]
        except (KeyError, TypeError) as error:
            raise GraphgenError(f"{path / 'state.json'} names no files; save it again") from error
        if not files:
            raise GraphgenError(f"{path} has no rows; give at least one")
        if state.get("_indices_data_files"):
            raise GraphgenError(f"{path} was saved by an old version of datasets; save it again")
        return _arrow(path, files)
    if files := sorted(path.glob("*.parquet")):
        splits = sorted({x[0] for file in files if (x := _SPLIT.search(file.stem))})
        if len(splits) > 1:
            raise GraphgenError(
                f"{path} has files of the splits {', '.join(splits)}; give one file, or a folder "
                "with the files of one split"
            )
        wanted = {int(x[1]) for file in files if (x := _PART.search(file.stem))}
        if len(wanted) == 1 and len(files) < max(wanted):
            warn(f"{path} has {len(files)} of {max(wanted)} files by their names: rows are missing")
        return _arrow(path, files)
    raise GraphgenError(
        f"{path} has neither state.json, which save_to_disk writes, nor .parquet files"
    )


def open_table(path: Path, columns: Mapping[str, str] | None = None) -> Table:
    """The rows in a file or folder; `columns` gives some of them another name: {name: column}.

    Raises GraphgenError if it cannot be read, has no rows, or lacks such a column.
    """
    try:
        if path.is_dir():
            table = _folder(path)
        elif path.suffix == ".jsonl":
            table = _json_lines(path)
        elif path.suffix in (".csv", ".tsv"):
            table = _csv(path)
        else:
            table = _arrow(path, [path])
    except OSError as error:
        raise GraphgenError(f"{path} cannot be read: {error.strerror}; give a file") from error
    if not len(table):
        raise GraphgenError(f"{path} has no rows; give at least one")
    names = {column: name for name, column in (columns or {}).items()}
    left = [name for name in table.names if name not in names]
    if not names.keys() <= {*table.names} or {*names.values()} & {*left}:
        raise GraphgenError(
            f"{path} has {in_words(table.names)}; columns that are renamed have to be there, and "
            f"their new names have not: {', '.join(f'{n}={c}' for c, n in names.items())}"
        )
    return table.renamed(names) if names else table


class Slices(NamedTuple):
    """A pyarrow.Table, the types of its columns, and the spans of rows it consists of."""

    table: Any
    schema: Any
    spans: list[Span]

    def read(self, span: Span) -> Any:
        """The rows of a span, a pyarrow.Table of the schema."""
        return self.table.slice(span["offset"], span["size"])


def spans_of(
    path: Path,
    count: int,
    check: Callable[[Row, str], Any],
    as_text: Sequence[str] = (),
    *,
    reads: Sequence[str],
) -> Lines | Slices:
    """The rows of a file or folder, in spans of `count`; `check` sees each with its place.

    It sees the columns `reads` of a table: Python cannot hold each value of the others, such as
    times in nanoseconds. A file of any other kind is one of JSON lines, which stay in the file
    until a span is read; their columns `as_text` become JSON as texts.
    Raises GraphgenError if it cannot be read or has no rows.
    """
    if not path.is_dir() and path.suffix not in set(KINDS) - {".jsonl"}:
        return scan(path, count, check, as_text)
    rows = open_table(path)
    for number, row in enumerate(rows.rows([name for name in rows.names if name in reads])):
        check(row, rows.where(number))
    table = rows.arrow()
    starts = range(0, len(rows), count)
    spans = [{"offset": start, "size": min(count, len(rows) - start)} for start in starts]
    return Slices(table, table.schema, spans)
