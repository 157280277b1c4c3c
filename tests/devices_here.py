"""The providers of devices, and whether each finds its device here.

`make test-webgpu` and `make test-cuda` run the tests that are marked for them.
"""

from typing import Any, NamedTuple

import numpy as np
import pytest

import graphgen as gg
from graphgen.errors import GraphgenError

CPU = "CPUExecutionProvider"


class There(NamedTuple):
    """A provider's name and what the runtime calls it; `lacks` says why nothing runs there."""

    name: str
    own: str
    lacks: str

    def alone(self, test: Any) -> Any:
        """Decorates a test of this provider alone."""
        for mark in self.marks:
            test = mark(test)
        return test

    @property
    def marks(self) -> list[pytest.MarkDecorator]:
        """Those of its tests."""
        mark = getattr(pytest.mark, self.name)
        return [mark, pytest.mark.skipif(bool(self.lacks), reason=self.lacks)]


def lacks(name: str) -> str:
    """Why there is no session on this provider here, or ''."""
    try:
        gg.Session(gg.build(lambda x: -x, x=gg.float32[1]), provider=name)(x=np.ones(1, np.float32))  # type: ignore[arg-type]
    except GraphgenError as error:
        return str(error)
    return ""


WEBGPU = There("webgpu", "WebGpuExecutionProvider", lacks("webgpu"))
CUDA = There("cuda", "CUDAExecutionProvider", lacks("cuda"))
