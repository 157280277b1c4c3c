"""Samples of tokens, and a report of the rows that they were made of."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from graphgen.display import rich_table
from graphgen.export.named_losses import IGNORED
from graphgen.operands import Array

if TYPE_CHECKING:
    from rich.table import Table as Shown


class Sample(NamedTuple):
    """The tokens of one row, what they should predict, and how many tokens were cut off."""

    ids: Array
    labels: Array
    types: Array | None = None
    target: Array | None = None  # what an encoder-decoder's decoder reads
    cut: int = 0


@dataclass
class Report:
    """What became of the rows of a table."""

    source: str
    kind: str = ""
    rows: int = 0
    tokens: int = 0
    labels: int = 0
    cut_rows: int = 0
    cut_tokens: int = 0
    dropped_rows: int = 0
    without_answer: int = 0
    packed_rows: int = 0
    classes: dict[str, int] = field(default_factory=dict)

    def add(self, sample: Sample | None) -> bool:
        """Count a row; whether it stays."""
        labels = np.zeros(0) if sample is None else sample.labels
        counted = labels.size - int(np.sum((labels == IGNORED) & (labels.dtype.kind in "iu")))
        if sample is not None and sample.cut:
            self.cut_rows, self.cut_tokens = self.cut_rows + 1, self.cut_tokens + sample.cut
        if sample is None or not counted or not len(sample.ids):
            self.dropped_rows += 1
            return False
        self.rows, self.labels = self.rows + 1, self.labels + counted
        self.tokens += len(sample.ids) + (0 if sample.target is None else len(sample.target))
        return True


def table(reports: Sequence[Report]) -> "Shown":
    """What became of the rows, to print."""
    names = ["rows", "tokens", "labels", "cut rows", "cut tokens", "dropped rows"]
    optional = ("without answer", "packed rows")
    names += [n for n in optional if any(getattr(r, n.replace(" ", "_")) for r in reports)]
    rows = [["data", "kind", *names]]
    for report in reports:
        values = (getattr(report, name.replace(" ", "_")) for name in names)
        rows.append([report.source, report.kind, *(f"{value:,}" for value in values)])
    return rich_table("", rows)
