"""What holds for all tests."""

import gc
from typing import Any

import pytest


def pytest_collection_finish() -> None:
    """Let no garbage collection look through modules and collected tests again.

    They are most of the objects there are, and each trainer that is opened collects: 0.2 s.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _figures_of_one_processor(monkeypatch: Any) -> None:
    """What pays depends on the processor: tests have the same figures on all of them.

    Those that compare processors name them.
    """
    monkeypatch.setattr("graphgen.targets.instructions", lambda: "avx512")
