"""What `graphgen train --data` reads: arrays, tables of numbers, and functions."""

import importlib
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from graphgen.errors import GraphgenError, warn
from graphgen.export.arrays import read_npz
from graphgen.export.columns import Column
from graphgen.export.named_losses import LABELS
from graphgen.export.tables import KINDS, Table, in_words, open_table
from graphgen.plan import TensorType
from graphgen.train.batches import made
from graphgen.train.data import Batch, Batches, Dataset
from graphgen.train.texts import Texts


def read(
    source: str,
    inputs: Mapping[str, TensorType],
    *,
    batch: int | None = None,
    seed: int | None = 0,
    pad: bool = False,
    option: str = "--data",
    by_length: bool = False,
    texts: Texts | None = None,
    columns: Mapping[str, str] | None = None,
) -> Batches:
    """The batches in a file or folder, or those that `module:function` makes.

    .npz: arrays by the names of `inputs`, samples first. .jsonl, .csv, .tsv, .parquet, .arrow, and
    folders that `datasets` saved: a row a sample, with a list of numbers (or one number) for each
    input; lists of different lengths are refused unless `pad`. Other columns are left out, with a
    warning. If some inputs are missing, `texts` makes them of texts. `columns` says which column
    of the table is called otherwise there, {name: column}.
    module:function: called without arguments, it returns an iterable of batches, or a
    function that makes one. `batch`, 8 if None, and `seed` are only for files.

    Raises GraphgenError for a source that cannot be read or does not have the `inputs`.
    """
    who, path = f"{option} {source}", Path(source)
    table = path.suffix in KINDS or path.is_dir()
    if pad and not table and option == "--data":
        raise GraphgenError(f"{who}: --pad is for rows of lists, not for arrays; leave it out")
    if columns and not table:
        raise GraphgenError(f"{who}: --columns is for tables, as .csv and .jsonl; leave it out")
    if not table and ":" in source and path.suffix != ".npz":
        if batch is not None and option == "--data":
            raise GraphgenError(f"{who}: --batch is for files: a function makes the batches")
        if by_length and option == "--data":
            raise GraphgenError(f"{who}: --by-length is for files: a function makes the batches")
        return _from_function(source, who)
    if not table and path.suffix != ".npz":
        raise GraphgenError(
            f"{who}: give FILE{', FILE'.join(['.npz', *KINDS])}, a folder or module:function"
        )
    how: dict[str, Any] = {}
    size, how = 8 if batch is None else batch, {"seed": seed, "who": who, "by_length": by_length}
    if not table:
        return Dataset(_arrays(source, inputs, who), size, **how)
    rows = open_table(path, columns)
    if texts is None or inputs.keys() <= {*rows.names}:
        return Dataset(_numbers(rows, inputs, who, pad=pad), size, **how)
    if pad:
        raise GraphgenError(f"{who}: --pad is for rows of lists; texts are always padded")
    return Dataset(texts.columns(rows), size, padding=texts.padding(), **how)


def _arrays(source: str, inputs: Mapping[str, TensorType], who: str) -> dict[str, Column]:
    found = read_npz(source)
    _check_names(who, [*found], inputs)
    return {name: found[name] for name in inputs}


def _numbers(
    table: Table, inputs: Mapping[str, TensorType], who: str, *, pad: bool
) -> dict[str, Column]:
    labels = inputs.get(LABELS)
    _check_names(who, table.names, inputs)
    if pad and labels is not None and np.dtype(labels.dtype).kind == "f":
        raise GraphgenError(f"{who}: --pad cannot mark {LABELS} of {labels.dtype} as ignored")
    return {name: table.numbers(name, kind.dtype, pad=pad) for name, kind in inputs.items()}


def _check_names(who: str, names: Sequence[str], inputs: Mapping[str, TensorType]) -> None:
    if not inputs.keys() <= {*names}:
        raise GraphgenError(f"{who} has {in_words(names)}; the artifacts take {', '.join(inputs)}")
    if others := [name for name in names if name not in inputs]:
        warn(f"{who}: the artifacts do not take {in_words(others)}, which are left out")


def _from_function(source: str, who: str) -> Batches:
    """What `module:function` makes; an error in it becomes one line, wherever it is raised."""

    def fault(error: Exception) -> GraphgenError:
        return GraphgenError(f"{who}: {type(error).__name__}: {error}")

    module, _, name = source.partition(":")
    if "" not in sys.path:
        sys.path.insert(0, "")  # the folder where the command runs
    try:
        found = getattr(importlib.import_module(module), name)()
    except Exception as error:
        raise fault(error) from error
    if isinstance(found, (Dataset, Sequence)):
        return found
    if not callable(found) and not isinstance(found, Iterable):
        raise GraphgenError(
            f"{who} returned a {type(found).__name__}; it must return an iterable of batches"
        )

    def batches() -> Iterator[Batch]:
        try:
            yield from made(found)
        except Exception as error:
            raise fault(error) from error

    return batches
