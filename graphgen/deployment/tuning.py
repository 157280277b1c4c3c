"""What `build` adds to a decoder by measuring or on request: a cache of int8, prompts in int8."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from graphgen.deployment.options import Options
from graphgen.display import rich_table
from graphgen.errors import GraphgenError
from graphgen.measure.choices import Choice

if TYPE_CHECKING:
    from rich.table import Table

TUNING = "tuning.json"
"""The file of a folder that says what was measured, on which machine, and what was picked."""

_MEASURED = 16  # windows that are read token by token
_LATER = 64  # tokens that follow a prompt


class Decoding:
    """One decoder, as it becomes: its graph, and what a cache and prompts in few bits need."""

    def __init__(
        self, who: str, kind: str, models: Mapping[str, Any], tokens: Any, context: int | None
    ) -> None:
        names = {str(value.name) for one in models.values() for value in one.graph.inputs}
        if len(models) > 1:
            raise GraphgenError(f"{who}: {kind} has {' and '.join(models)}; give a decoder")
        if not any(name.startswith("past_") for name in names):
            raise GraphgenError(f"{who}: {kind} has no cache; give a decoder")
        [self.model], self.who = models.values(), who
        self.tokens, self.random, self.context = tokens, not len(tokens), context
        words = next(y.shape[-1] for y in self.model.graph.outputs if y.name == "logits")
        if self.random:
            sizes = (3 * _MEASURED, min(64, context or 64))
            self.tokens = np.random.default_rng(0).integers(0, words, sizes)
        third = np.arange(len(self.tokens)) % 3 == 0
        self.judged, self.calibrating = self.tokens[third][:_MEASURED], self.tokens[~third]

    def int8_cache(self) -> Any:
        """A copy of the decoder with a cache of int8."""
        from graphgen.generation.few_bits import int8_cache

        return int8_cache(self.model, self.calibrating, longest=self.context)

    def int8_prompts(self) -> tuple[Any, Any]:
        """A second graph that reads prompts in int8, and the report on it."""
        from graphgen.match import Miss
        from graphgen.passes.decoding import CAPACITY, in_place
        from graphgen.quantize.prompts import int8_prompts

        shapes = [value.shape or () for value in self.model.graph.inputs]
        placed = None if any(CAPACITY in map(str, s) for s in shapes) else in_place(self.model)
        if isinstance(placed, Miss):
            problem = f"the cache cannot be in place: {placed.reason}; leave it out"
            raise GraphgenError(f"{self.who}: {problem}")
        return int8_prompts(self.model)

    def cost(self, after: Any, prompts: Any = None) -> Any:
        """How far the decoder and another differ on a third of the text."""
        from graphgen.generation.quality import quality

        return quality(self.model, after, self.judged, random=self.random, prompts=prompts)


class Tuning:
    """What was measured on this machine, and picked."""

    def __init__(self, wanted: tuple[int, int], context: int | None) -> None:
        length, self.batch = wanted
        self.prompt = max(1, min(length, (context or length + _LATER) - _LATER))
        self.choices, self.picks, self.notes = list[Choice](), dict[str, Any](), list[str]()

    @contextmanager
    def measuring(self, what: str) -> Iterator[None]:
        """Say on a terminal what is measured."""
        from rich.console import Console

        console = Console(stderr=True)
        if not console.is_terminal:
            yield
            return
        with console.status(f"measuring {what}"):
            yield

    def blocks(self, options: Options, model: Any) -> None:
        """Pick what is left open of the blocks of `--quantize`, if it has any."""
        from graphgen.quantize.tuning import tune_blocks

        scheme, level = options.quantize, options.accuracy_level
        if scheme is None or scheme == "int8":
            return
        with self.measuring("products"):
            found, named = tune_blocks(
                model,
                scheme,
                batch=self.batch,
                sizes=[options.block_size] if options.block_size else [],
                levels=[] if level is None else [level],
            )
        options.block_size, level = named[found.picked]
        self.choices.append(found)
        self.picks["block_size"] = options.block_size
        if scheme == "int4":
            self.picks["accuracy_level"] = options.accuracy_level = level

    def cache(self, decoding: Decoding) -> Any:
        """The decoder with a cache of int8 if that is worth it, or None."""
        from graphgen.generation.tuning import tune_cache

        self.picks["kv"] = "float32"
        try:
            made = decoding.int8_cache()
        except GraphgenError as error:  # an old runtime, or a cache that cannot be in place
            self.notes.append(str(error))
            return None
        with self.measuring("the cache"):
            found = tune_cache(decoding.model, made, self.prompt, self.batch)
        self.choices.append(found)
        self.picks["kv"] = found.picked
        return made if found.picked == "int8" else None

    def prompts(self, decoding: Decoding) -> tuple[Any, Any, int | None]:
        """The second graph for prompts, its report, and from how many tokens on it is read.

        The last is None if that does not pay; all are if there can be no such graph.
        """
        from graphgen.generation.tuning import tune_prompts
        from graphgen.quantize.prompts import has_four_bits

        self.picks |= {"prompts": None, "prompts_from": None}
        if not has_four_bits(decoding.model):
            return None, None, None
        try:
            made, report = decoding.int8_prompts()
        except GraphgenError as error:
            self.notes.append(str(error))
            return None, None, None
        with self.measuring("prompts"):
            found, least = tune_prompts(decoding.model, made, self.prompt, self.batch)
        self.choices += found
        self.picks |= {"prompts": "int4" if least is None else "int8", "prompts_from": least}
        return made, report, least

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        from graphgen.processor import described, processor
        from graphgen.runtime import import_runtime

        return {
            "machine": str(processor()),
            "flags": sorted(f for f in described()[1] if f.startswith(("avx", "amx", "asimd"))),
            "onnxruntime": import_runtime().__version__,
            "prompt": self.prompt,
            "batch": self.batch,
            "picks": self.picks,
            "notes": self.notes,
            "choices": [choice.to_json() for choice in self.choices],
        }

    def told(self) -> "Iterator[Table | str]":
        """A table of all that was measured, why something was picked, and further lines."""
        about = f"a prompt of {self.prompt:,} tokens, rows: {self.batch}"
        rows = [["measured", "rows", "way", "ms", "times as fast", "error", ""]]
        for choice in self.choices:
            for way in choice.ways:
                error = "" if way.error is None else f"{way.error:.4f}"
                picked = "picked: " + choice.why if way.name == choice.picked else ""
                cells = (f"{choice.rows:,}", way.name, f"{way.ms:.4g}", f"{way.times:.2f}")
                rows.append([choice.what, *cells, error, picked])
        yield rich_table(f"Tuned on this machine for {about}", rows)
        yield from self.notes
        worst = max((choice.disturbed for choice in self.choices), default=1.0)
        if worst > 1.5:
            yield (
                f"times varied by a factor of {worst:.1f}: other programs ran; to be sure, build "
                "again on an idle machine"
            )
