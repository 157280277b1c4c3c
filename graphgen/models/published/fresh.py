"""Fresh heads: weights of a task that a checkpoint lacks, or has for other labels."""

import re
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np
import onnx_ir as ir

from graphgen.errors import GraphgenError
from graphgen.models.published.weights import lazily
from graphgen.nn.module import Parameter
from graphgen.operands import Array

_NAMES = re.compile(r"[^\W\d]\w*(\.\w+)*")


class Head(NamedTuple):
    """A head by its name in the checkpoint, and what its labels are called, if it has new ones."""

    name: str
    labels: tuple[str, ...] = ()

    @classmethod
    def read(cls, text: str) -> "Head":
        """classifier, classifier:3 or classifier:negative,neutral,positive."""
        name, _, given = text.partition(":")
        labels = tuple(given.split(",")) if given else ()
        if given.isdecimal():
            labels = tuple(f"LABEL_{i}" for i in range(min(int(given), 1 << 16)))
        if not _NAMES.fullmatch(name) or len({*labels}) != len(labels) or "" in labels:
            raise GraphgenError(
                f"build: --head is {text!r}; give the name of the head in the checkpoint, and the "
                "labels or their number: classifier:3, classifier:negative,neutral,positive"
            )
        if given and not labels:
            raise GraphgenError(f"build: --head is {text!r}; a head has at least 1 label")
        return cls(name, labels)

    def fields(self) -> dict[str, Any]:
        """The fields of config.json for new labels."""
        if not self.labels:
            return {}
        names = {str(i): label for i, label in enumerate(self.labels)}
        return {"id2label": names, "label2id": {label: i for i, label in enumerate(self.labels)}}


@dataclass
class Fresh:
    """Which weights may be fresh: those of a head, and those that are not in the `body`."""

    head: Head
    body: frozenset[str]
    seed: int = 0
    made: list[str] = field(default_factory=list)

    def covers(self, name: str) -> bool:
        """Whether it belongs to a head: the one that is named, or another part of the task's."""
        return self.of_head(name) or name not in self.body

    def of_head(self, name: str) -> bool:
        """Whether it belongs to the head that is named."""
        return name.startswith(f"{self.head.name}.")

    def may_replace(self, name: str, stored: Collection[str]) -> bool:
        """Whether a weight that is not stored, or does not fit, may be fresh."""
        return self.of_head(name) or (self.covers(name) and name not in stored)

    def make(
        self, path: str, parameter: Parameter, dtype: ir.DataType, names: list[str]
    ) -> ir.TensorProtocol:
        """The first value of a parameter, a function of the seed and its path."""
        self.made += names
        key = [self.seed, crc32(path.encode())]

        def read() -> Array:
            array: Array = parameter.initialize(np.random.default_rng(key), parameter.shape)
            return array

        return lazily(parameter.shape, dtype, path, read)

    def line(self) -> str:
        """What is fresh, in a line."""
        return f"fresh weights from seed {self.seed}: {', '.join(self.made) or 'none'}"
