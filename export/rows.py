"""Rows in files: JSON lines, read in spans from anywhere in the file, and Parquet."""

import itertools
import json
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from graphgen.errors import GraphgenError, needed
from graphgen.export.write import replacing
from graphgen.files import parse_json, regular

Span = dict[str, int]
Row = dict[str, Any]


class Lines(NamedTuple):
    """A file of JSON lines, the types of all its columns, and the spans of lines it consists of.

    The columns `as_text` hold JSON as texts: with a type of their own, objects would have to have
    the same fields, and get those of the others as nulls.
    """

    file: Path
    schema: Any
    spans: list[Span]
    as_text: Sequence[str] = ()

    def read(self, span: Span) -> Any:
        """The rows of a span, a pyarrow.Table of the schema."""
        with self.file.open("rb") as stream:
            stream.seek(span["offset"])
            lines = stream.read(span["size"]).split(b"\n")
        rows = [_as_text(json.loads(line), self.as_text) for line in lines if line.strip()]
        return needed("pyarrow").Table.from_pylist(rows, self.schema)


def _as_text(row: Row, columns: Sequence[str]) -> Row:
    """A row in which these columns are JSON, if they are not texts as they are."""
    nested = {n: x for n in columns if (x := row.get(n)) is not None and not isinstance(x, str)}
    return row | {name: json.dumps(value, ensure_ascii=False) for name, value in nested.items()}


def scan(
    file: Path, count: int, check: Callable[[Row, str], Any], as_text: Sequence[str] = ()
) -> Lines:
    """Spans of `count` lines; `check` sees each row with its place: its file and line.

    The columns `as_text` are JSON as texts. Empty lines are skipped. Raises GraphgenError for a
    line that is not an object, and for columns without a common type.
    """
    pa, where = needed("pyarrow"), str(file)
    schema, spans, number, offset = pa.schema([]), list[Span](), 1, 0
    try:
        with regular(file).open("rb") as stream:
            size = os.fstat(stream.fileno()).st_size  # a file may grow for ever, its last line too
            inside = iter(lambda: stream.readline(size - stream.tell()), b"")
            while lines := list(itertools.islice(inside, count)):
                rows = []
                for i, line in enumerate(lines):
                    where = f"{file}, line {number + i}"
                    if line.strip():
                        row = parse_json(line)
                        if not isinstance(row, dict):
                            raise ValueError(f"a {type(row).__name__}, not an object")
                        check(row := _as_text(row, as_text), where)
                        rows.append(row)
                taken = sum(map(len, lines))
                if rows:
                    where = f"{file}, lines {number} to {number + len(lines) - 1}"
                    found = pa.schema([*(kind := pa.array(rows).type)])
                    if any(b"true" in line or b"false" in line for line in lines):
                        _check_truths(rows, kind)
                    schema = pa.unify_schemas([schema, found], promote_options="permissive")
                    spans.append({"offset": offset, "size": taken})
                offset, number = offset + taken, number + len(lines)
    except (OSError, ValueError, TypeError, OverflowError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise GraphgenError(f"{where}: {reason}; give a file of JSON lines") from error
    if not spans:
        raise GraphgenError(f"{file} has no lines; give a file of JSON lines")
    return Lines(file, schema, spans, as_text)


def _check_truths(value: Any, kind: Any, name: str = "") -> None:
    """Raise ValueError for true or false where pyarrow found floats, which would make it a number.

    `value` is of the type `kind`, or a list of such.
    """
    types = needed("pyarrow").types
    if isinstance(value, bool) and types.is_floating(kind):
        raise ValueError(f"{name!r} has {str(value).lower()} among numbers")
    if isinstance(value, list):
        for one in value:
            _check_truths(one, kind.value_type if types.is_list(kind) else kind, name)
    elif isinstance(value, dict) and types.is_struct(kind):
        for field in kind:
            _check_truths(value.get(field.name), field.type, name or field.name)


def write_parquet(out: Path, schema: Any, tables: Iterable[Any]) -> int:
    """Write tables, a row group each, as one file that is complete or absent; return the row count.

    Raises GraphgenError for values that their column cannot hold.
    """
    count, parquet = 0, needed("pyarrow.parquet")
    try:
        with replacing("map", out) as [file], parquet.ParquetWriter(file, schema) as writer:
            for table in tables:
                writer.write_table(table)
                count += table.num_rows
    except needed("pyarrow").ArrowException as error:
        raise GraphgenError(
            f"map: {out} cannot hold these rows: {error}; change the columns"
        ) from error
    return count


def fields(names: Sequence[str]) -> list[Any]:
    """The columns of results: `score` is a number, `label` a text; plural names are lists."""
    pa = needed("pyarrow")
    real, text = pa.float32(), pa.string()
    types = {
        "embedding": pa.list_(real),
        "embeddings": pa.list_(pa.list_(real)),
        "label": text,
        "score": real,
        "labels": pa.list_(text),
        "scores": pa.list_(real),
        "generated_tokens": pa.list_(pa.int64()),
        "generated_text": text,
    }
    return [pa.field(name, types[name]) for name in names]
