"""What holds for all tests."""

import gc


def pytest_collection_finish() -> None:
    """Let no garbage collection look through modules and collected tests again.

    They are most of the objects there are, and each trainer that is opened collects: 0.2 s.
    """
    gc.collect()
    gc.freeze()
