"""What holds for all tests."""

import gc
from collections.abc import Iterator

import pytest


def pytest_collection_finish() -> None:
    """Let no garbage collection look through modules and collected tests again.

    They are most of the objects there are, and each trainer that is opened collects: 0.2 s.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def _figures_of_one_processor() -> Iterator[None]:
    """What pays depends on the processor: tests have the same figures on all of them.

    Those that compare processors name them. Fixtures of whole modules have them as well.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("graphgen.targets.instructions", lambda: "avx512")
        yield
