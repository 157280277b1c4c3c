"""Quantized graphs of a folder, what quantizing costs, and the report on all of them."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from graphgen.display import on_screen
from graphgen.operands import Array
from graphgen.quantize import Scheme, quantize
from graphgen.quantize.calibration import random_feeds
from graphgen.quantize.effect import Effect, Measure, Report, effect, feeds_of

REPORT = "quantization.json"
"""The file in which quantized folders report on each layer."""

_RUNS = 48  # of windows; their differences separate chance from the text


@dataclass
class Quantized:
    """A model with integer weights, and what that costs on a text, if measured."""

    model: ir.Model
    report: Report
    effect: Effect | None = None

    @on_screen
    def __repr__(self) -> Iterator[str]:
        effect = "" if self.effect is None else f"; {self.effect}"
        yield f"Quantized({self.report.scheme}: {len(self.report.layers):,} layers{effect})"
        yield from repr(self.model).splitlines()

    def remarks(self, name: str) -> list[str]:
        """A line for each layer that stays in float, and one for the effect on the graph `name`."""
        return self.report.kept() + ([] if self.effect is None else [f"{name}: {self.effect}"])


def quantized(
    model: ir.Model, scheme: Scheme, tokens: Array, *, run: bool = True, **options: Any
) -> Quantized:
    """`quantize`, and the effect on windows of tokens (N, T): perplexity of a decoder, else cosine.

    Every third window measures; the rest calibrate. Without tokens, or for a model that reads more
    than tokens, int8 and weights8 are measured on random numbers and tokens, and int4 is not
    measured; without `run`, none is.
    """
    third = np.arange(len(tokens)) % 3 == 0
    calibration = feeds_of(model, tokens[~third], rows=max(1, len(tokens) // _RUNS))
    feeds = feeds_of(model, tokens[third])
    random = not feeds and run and scheme != "int4"
    if random:
        feeds = calibration = random_feeds(model)
    found = Quantized(*quantize(model, scheme, calibration=calibration, random=random, **options))
    if feeds:
        decoder = any(str(value.name).startswith("past_") for value in model.graph.inputs)
        measure: Measure = "perplexity" if decoder and not random else "cosine"
        found.effect = effect(model, found.model, feeds, measure=measure, random=random)
    return found


def reports(done: Mapping[str, Quantized]) -> dict[str, str]:
    """The file `REPORT`, with a member for each graph by its name; none if there is no graph."""
    document = {
        Path(name).name: {
            **one.report.to_json(),
            "effect": None if one.effect is None else asdict(one.effect),
        }
        for name, one in done.items()
    }
    return {REPORT: json.dumps(document, indent=2) + "\n"} if document else {}
