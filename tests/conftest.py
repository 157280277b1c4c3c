"""What holds for all tests."""

import gc
import os
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from typing import Any

import onnxruntime as ort
import pytest

from graphgen import passes
from graphgen.match import UNVERIFIED

LONGEST = """
test_examples test_operators test_models test_quantize test_bench test_train test_foreign
test_recompute test_fuzz_files test_parallel test_tutorials test_systems test_compare
test_quantized_graphs test_bisect_training test_fuzz test_docs test_checkpoints test_architecture
test_bisect test_artifacts
""".split()
"""The files that take longest, in this order."""


def pytest_configure(config: pytest.Config) -> None:
    config.option.loadscopereorder = False  # of xdist, which sorts files by their numbers of tests
    gc.disable()  # while tests are collected, which makes no garbage: a fifth of that time


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """The second of two workers begins at the end: in a new clone, each compiles half of the tests.

    Otherwise both compile all of them at the same time. The items are sorted afterwards.
    """
    report = yield
    if os.environ.get("PYTEST_XDIST_WORKER") == "gw1" and isinstance(collector, pytest.Directory):
        report.result = [*reversed(report.result or ())]
    return report


@pytest.hookimpl(tryfirst=True)  # before pytest selects by marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what `make test` leaves out, and share files out among the workers.

    Of a test marked `share(n)`, it runs the first case and every nth after it. The longest files
    come first, so that the workers end together.
    """
    cases = Counter[str]()
    for item in items:
        test = item.nodeid.partition("[")[0]
        share = item.get_closest_marker("share")
        if share is not None and cases[test] % share.args[0]:
            item.add_marker(pytest.mark.exhaustive)
        cases[test] += 1
    tests = Counter(item.path for item in items)
    rank = {name: number for number, name in enumerate(LONGEST)}
    last = len(rank)
    items.sort(key=lambda i: (rank.get(i.path.stem, last), -tests[i.path], i.path))


def pytest_collection_finish() -> None:
    """Let no garbage collection look through modules and collected tests again.

    They are most of the objects there are, and each trainer that is opened collects: 0.2 s. Others
    are seldom: graphs are large, and live as long as their test.
    """
    gc.enable()
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000)  # not 700: a twentieth of the processor time


class OneThread(ort.InferenceSession):  # type: ignore[misc]
    """A session with one thread, unless a test wants more."""

    def __init__(self, model: Any, sess_options: Any = None, *more: Any, **given: Any) -> None:
        options = sess_options or ort.SessionOptions()
        options.intra_op_num_threads = options.intra_op_num_threads or 1
        super().__init__(model, options, *more, **given)


TAKEN_BACK: list[str] = []
"""The rewrites of one test that verification has taken back."""


def watched(of: Callable[..., str | None]) -> Callable[..., str | None]:
    def compare(*arguments: Any, **options: Any) -> str | None:
        problem = of(*arguments, **options)
        if problem and not problem.startswith(UNVERIFIED):
            TAKEN_BACK.append(problem)
        return problem

    return compare


@pytest.fixture(autouse=True, scope="session")
def _what_holds_for_all() -> Iterator[None]:
    """Also for fixtures of whole modules. One, because each takes its time at each test."""
    with pytest.MonkeyPatch.context() as patch:
        # What pays depends on the processor; tests that compare processors name them.
        patch.setattr("graphgen.targets.instructions", lambda: "avx512")
        # Two workers share two cores, and idle threads spin: a sixth of the processor time.
        patch.setattr(ort, "InferenceSession", OneThread)
        # Files outlive the processes of tests, not the machine: each fsync takes milliseconds.
        patch.setattr(os, "fsync", lambda descriptor: None)
        for name in ("compare", "compare_models"):
            patch.setattr(passes, name, watched(getattr(passes, name)))
        yield


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Verification takes a wrong rewrite back, so that a test would not see it.

    Tests that are about such rewrites are marked `wrong_rewrites`.
    """
    TAKEN_BACK.clear()
    yield
    assert not TAKEN_BACK or item.get_closest_marker("wrong_rewrites"), TAKEN_BACK
