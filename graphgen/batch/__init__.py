"""Batch inference: run the rows of a file through a folder's model, here or on actors of Ray.

Rows go in spans of 16 batches. A span is sorted by length, run batch by batch and put back in
order. So a row meets the same others, and gets the same numbers, whoever takes its span.
"""

import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeAlias, Unpack

from graphgen.arguments import checked
from graphgen.batch.engines import local, on_ray
from graphgen.batch.images import PIXELS, Images
from graphgen.batch.late import KEPT, LateTexts
from graphgen.batch.results import COLUMNS, MANY, SPEECH, Results
from graphgen.batch.sounds import Sounds
from graphgen.batch.texts import MaskedTexts, Text, Texts
from graphgen.errors import GraphgenError, needed, one_of
from graphgen.export.by_row import Given, adapted, numbers_of
from graphgen.export.folders import MODEL, bar
from graphgen.export.read import load
from graphgen.export.rows import Lines, fields, write_parquet
from graphgen.export.tables import Slices, spans_of
from graphgen.files import present
from graphgen.generation import Generator
from graphgen.generation.decoder import session_on, task_of
from graphgen.generation.options import GenerationOptions, read_options
from graphgen.models.published.folder import context
from graphgen.models.published.wav2vec2 import SAMPLES
from graphgen.passes.training.by_row import CHOICE
from graphgen.runtime import Provider, Session

Engine: TypeAlias = Literal["local", "ray"]

_SPAN = 16
"""Batches in a span."""


class _Reads:
    """What a session's outputs say about each row."""

    def __init__(
        self, texts: Texts, base: Path, task: str | None, adapters: dict[str, Any], **how: Any
    ):
        folder = texts.folder
        if not present(folder / MODEL):
            raise GraphgenError(
                f"{folder} has no {MODEL}; give a folder that `graphgen build DIR -o OUT` wrote"
            )
        if any(given is not None for given in adapters.values()):
            [(model, changed)] = adapted([load(folder / MODEL)], "map", **adapters)
            self.session = session_on(model, folder / MODEL, changed, **how)
        else:
            self.session = Session(folder / MODEL, **how)
        self.names = [*(adapters["adapters"] or ())]
        dims = {name: found.dims for name, found in self.session.outputs.items()}
        read = {name: kind for name, kind in self.session.inputs.items() if name != CHOICE}
        self.results = Results(folder, read, dims, task)
        self.columns, pixels = self.results.columns, read.get(PIXELS)
        self.rows: Texts | LateTexts | Images | Sounds = texts
        if pixels is not None:
            self.rows = Images(folder, pixels.dims or (), base)
        elif SAMPLES in read:
            self.rows = Sounds(folder, base)
        elif self.results.fills:
            self.rows = MaskedTexts(folder, texts.limit, truncate=texts.truncate)
        elif MANY in dims:
            self.rows = LateTexts(folder, truncate=texts.truncate)

    def __call__(
        self, batch: Sequence[Any], chosen: Sequence[str | None]
    ) -> Sequence[tuple[Any, ...]]:
        if len(batch) > 1 and isinstance(self.rows, Sounds):  # which run alone
            return [self([one], [name])[0] for one, name in zip(batch, chosen, strict=True)]
        feeds = self.rows.feeds(batch) | {CHOICE: numbers_of("map", self.names, chosen, len(batch))}
        given = {name: feeds[name] for name in self.session.inputs}
        outputs = dict(zip(self.session.outputs, self.session(given), strict=True))
        found = self.results.read(outputs, feeds.get(KEPT, feeds.get("attention_mask")))
        if isinstance(self.rows, MaskedTexts):
            return [self.rows.filled(ids, *row) for ids, row in zip(batch, found, strict=True)]
        return found


class _Continues:
    """What `generate` adds to each row. It keeps a cache, so each thread opens its own."""

    def __init__(self, texts: Texts, task: str, options: Any, **how: Any):
        read_options(texts.folder, **options)  # an error comes before any row runs
        self.rows, self.how, self.options = texts, how, options
        self.columns = COLUMNS[task][: 1 + (texts.tokenizer is not None)]
        self.own = threading.local()

    def begin(self) -> None:
        """Forget the rows of earlier spans, so that results do not depend on who took them."""
        if hasattr(self.own, "generator"):
            self.own.generator.decoder.held = []

    def __call__(
        self, batch: Sequence[Text], chosen: Sequence[str | None]
    ) -> Sequence[tuple[Any, ...]]:
        if not hasattr(self.own, "generator"):
            self.own.generator = Generator(self.rows.folder, **self.how)
        rows = [text.ids for text in batch]
        found = self.own.generator(rows, adapter=chosen, **self.options)
        list(found)
        columns = [found.tokens, *([found.texts()] if len(self.columns) > 1 else [])]
        return list(zip(*columns, strict=True))


class StageOptions(GenerationOptions, total=False):
    """The options of `Stage`, as arguments of `map_file`."""

    task: str | None
    batch: int
    threads: int
    provider: Provider | None
    strict: bool
    truncate: bool
    adapter: Given | None
    adapters: Mapping[str, Given] | None


@checked
class Stage:
    """A table of rows in, the same with columns of the model's results out.

    `Texts`, `LateTexts`, `Images` and `Sounds` describe rows; paths of files are relative to
    `base`. For rows from anywhere else, it is a stage of Ray Data:
    `dataset.map_batches(Stage, fn_constructor_args=[folder], batch_format="pyarrow", ...)`.
    If the model continues texts, `options` are those of `generate`. `adapter` is merged into the
    weights; of `adapters`, which run beside them, each row has the one that its column `adapter`
    names, or none.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        task: str | None = None,
        batch: int = 32,
        threads: int = 1,
        provider: Provider | None = None,
        strict: bool = False,
        truncate: bool = False,
        base: str | Path = "",
        adapter: Given | None = None,
        adapters: Mapping[str, Given] | None = None,
        **options: Unpack[GenerationOptions],
    ) -> None:
        folder, self.batch = Path(folder), batch
        found, limit = task_of(folder), context(folder)
        if found and (found not in COLUMNS or found == SPEECH):
            raise GraphgenError(f"{folder} is for {found}, word by word: use graphgen generate")
        if found and limit:
            limit -= 1  # one more token has to fit
        given = {name: value for name, value in options.items() if value is not None}
        if given and not found:
            option = next(iter(given)).replace("_", "-")
            raise GraphgenError(f"--{option} needs a model that continues texts; {folder} has none")
        if found and task not in (None, found):
            raise GraphgenError(f"{folder} is for {found}, not for {task}")
        texts = Texts(folder, limit, truncate=truncate, chat=bool(found))
        self.as_text = texts.columns
        how: dict[str, Any] = {"threads": threads, "provider": provider, "strict": strict}
        both: dict[str, Any] = {"adapter": adapter, "adapters": adapters}
        if None not in both.values():
            raise GraphgenError(
                "map: adapter is merged into the weights, and adapters run beside them; give one "
                "of the two"
            )
        self.adapters = [*(adapters or ())]
        self.run: _Reads | _Continues = (
            _Continues(texts, found, given, **how, **both)
            if found
            else _Reads(texts, Path(base), task, both, **how)
        )
        self.columns = self.run.columns
        self.reads = [*self.run.rows.reads, *([CHOICE] if self.adapters else [])]

    def look(self, row: dict[str, Any], where: str) -> Any:
        """A row as the model reads it. Raises GraphgenError if it cannot."""
        if self.adapters:
            numbers_of(where, self.adapters, [row.get(CHOICE)], 1)
        return self.run.rows.look(row, where)

    def __call__(self, rows: Any) -> Any:
        """The rows, a pyarrow.Table, with the columns of the results added at the end."""
        given = rows.select([n for n in rows.column_names if n in self.reads]).to_pylist()
        found = [self.look(row, f"row {i}") for i, row in enumerate(given, 1)]
        names = [row.get(CHOICE) if self.adapters else None for row in given]
        order = sorted(range(len(found)), key=lambda i: found[i].size)
        results: dict[int, tuple[Any, ...]] = {}
        if isinstance(self.run, _Continues):
            self.run.begin()
        for start in range(0, len(order), self.batch):
            chosen = order[start : start + self.batch]
            made = self.run([found[i] for i in chosen], [names[i] for i in chosen])
            results |= zip(chosen, made, strict=True)
        for i, field in enumerate(fields(self.columns)):
            column = [results[row][i] for row in range(len(found))]
            rows = rows.append_column(field, needed("pyarrow").array(column, field.type))
        return rows


class Spans(Stage):
    """A stage whose rows are in a file: it gets a table of one row that says where."""

    def __init__(
        self, lines: Lines | Slices, folder: str | Path, **settings: Unpack[StageOptions]
    ) -> None:
        super().__init__(folder, **settings)
        self.lines = lines

    def __call__(self, spans: Any) -> Any:
        [span] = spans.to_pylist()
        return super().__call__(self.lines.read(span))


@checked
def map_file(
    folder: str | Path,
    data: str | Path,
    out: str | Path,
    *,
    engine: Engine = "local",
    workers: int = 1,
    **settings: Unpack[StageOptions],
) -> int:
    """Write the rows of `data` with the model's results as Parquet; return the count.

    `data` is a file of JSON lines, CSV, Parquet or Arrow, or a folder that `datasets` saved.
    `settings` are those of `Stage`. Both engines write the same rows in the same order with the
    same numbers. Raises GraphgenError for a row that the model cannot read before any row runs,
    and leaves nothing half-written.
    """
    one_of("map", Engine, engine=engine)
    if (kind := Path(out).suffix) not in ("", ".parquet", ".pq"):
        raise GraphgenError(f"map writes Parquet, and {out} ends in {kind}; name it .parquet")
    if engine == "ray":
        needed("ray.data")
    # Workers may run in other directories. Path.resolve raises RuntimeError for a link to itself.
    file = Path(os.path.realpath(data))
    where: dict[str, Any] = {"folder": Path(os.path.realpath(folder)), "base": file.parent}
    if isinstance(one := settings.get("adapter"), str | os.PathLike):
        settings["adapter"] = os.path.realpath(one)
    if some := settings.get("adapters"):
        paths = {n: a for n, a in some.items() if isinstance(a, str | os.PathLike)}
        settings["adapters"] = {**some, **{n: os.path.realpath(a) for n, a in paths.items()}}
    stage = Stage(**where, **settings)
    lines = spans_of(file, stage.batch * _SPAN, stage.look, stage.as_text, reads=stage.reads)
    added = fields(stage.columns)
    if twice := [field.name for field in added if field.name in lines.schema.names]:
        raise GraphgenError(f"{data} has a column {twice[0]!r}, which the result adds; rename it")
    del stage  # the workers need its memory
    tables = ENGINES[engine](lines, workers, {**where, **settings})
    schema = needed("pyarrow").schema([*lines.schema, *added])
    return write_parquet(Path(out), schema, bar(tables, str(data), len(lines.spans)))


ENGINES: dict[Engine, Callable[..., Iterator[Any]]] = {
    "local": partial(local, stage=Spans),
    "ray": partial(on_ray, stage=Spans),
}
