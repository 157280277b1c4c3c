"""What holds for all tests."""

import gc
from collections import Counter
from collections.abc import Iterator

import pytest

LONGEST = (
    *("test_fuzz_files", "test_bench", "test_fuzz", "test_examples", "test_layouts"),
    *("test_bisect_training", "test_tutorials", "test_fuzz_dsl", "test_fuzz_sizes"),
)
"""Files that take longer than their number of tests shows."""


def pytest_configure(config: pytest.Config) -> None:
    config.option.loadscopereorder = False  # of xdist, which sorts files by their numbers of tests


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Share files out among the workers in this order, so that these end together."""
    tests = Counter(item.path for item in items)
    items.sort(key=lambda item: (item.path.stem not in LONGEST, -tests[item.path], item.path))


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
