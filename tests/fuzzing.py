"""How the fuzzers draw: the same examples each time, or as many new ones as GRAPHS says."""

import os

import pytest
from hypothesis import HealthCheck, Phase, settings

NEW = "GRAPHS" in os.environ


def count(default: int) -> int:
    """GRAPHS, or the default without it."""
    return int(os.environ.get("GRAPHS", default))


def examples(most: int, *, shrinks: bool = NEW) -> settings:
    """Sessions take their time, and what is drawn is often no graph: neither is unhealthy here."""
    return settings(
        max_examples=most,
        deadline=None,
        database=None,
        derandomize=not NEW,
        suppress_health_check=list(HealthCheck),
        report_multiple_bugs=False,
        # Shrinking takes minutes: `make fuzz` does it.
        phases=[Phase.generate, *([Phase.shrink] if shrinks else [])],
    )


def again(arguments: str, config: pytest.Config) -> str:
    """The command that draws the same examples again."""
    command = f"python -m pytest {arguments}"
    if not NEW:
        return command
    seed = config.getoption("--hypothesis-seed")
    return f"GRAPHS={os.environ['GRAPHS']} {command} --hypothesis-seed={seed}"
