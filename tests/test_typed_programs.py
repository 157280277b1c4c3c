"""What type checkers say about programs of users, who have the wheel and not the source."""

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PROGRAMS = Path(__file__).with_name("typed")
PYTHON = os.environ.get("GRAPHGEN_WHEEL_PYTHON")

CHECKERS = {
    "mypy": ["--strict", "--no-error-summary", "--python-executable"],
    "pyright": ["--pythonpath"],
}


def reported(checker: str, programs: list[Path]) -> dict[str, dict[int, str]]:
    """The lines of each program that a checker reports, with what it says of them."""
    assert PYTHON is not None
    options = [*CHECKERS[checker], PYTHON]
    if checker == "mypy":
        options += ["--cache-dir", str(Path(PYTHON).parents[1] / "mypy_cache")]
    done = subprocess.run(
        [sys.executable, "-m", checker, *options, *programs],
        cwd=PROGRAMS,
        env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"},
        capture_output=True,
        text=True,
        check=False,
    )
    found: dict[str, dict[int, str]] = {path.name: {} for path in programs}
    for line in done.stdout.splitlines():
        if error := re.match(r"\s*(?:.*/)?(\w+\.py):(\d+)(?::\d+)?[ :-]+error: (.*)", line):
            found[error[1]][int(error[2])] = error[3]
    assert done.returncode == 1 and any(found.values()), done.stdout + done.stderr
    return found


@pytest.mark.skipif(PYTHON is None, reason="make check builds the wheel and installs it")
@pytest.mark.parametrize("checker", CHECKERS)
def test_each_mistake_is_reported_where_it_stands(checker: str) -> None:
    found = reported(checker, [PROGRAMS / "right.py", PROGRAMS / "wrong.py"])
    assert found["right.py"] == {}
    lines = (PROGRAMS / "wrong.py").read_text().splitlines()
    wrong = {n for n, line in enumerate(lines, 1) if "  # wrong: " in line}
    missed = {n: lines[n - 1] for n in wrong - set(found["wrong.py"])}
    added = {n: told for n, told in found["wrong.py"].items() if n not in wrong}
    assert missed == {} and added == {}
    assert len(wrong) > 12


@pytest.mark.skipif(PYTHON is None, reason="make check builds the wheel and installs it")
def test_the_checkers_see_the_wheel() -> None:
    assert PYTHON is not None
    command = [PYTHON, "-P", "-c", "import graphgen; print(graphgen.__file__)"]
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    found = subprocess.check_output(command, cwd=PROGRAMS, env=environment, text=True)
    assert Path(PYTHON).parents[1] in Path(found.strip()).parents


@pytest.mark.skipif(PYTHON is None, reason="make check builds the wheel and installs it")
def test_the_demo_runs_from_the_wheel(tmp_path: Path) -> None:
    """What it trains on is in the standard library."""
    assert PYTHON is not None
    command = [PYTHON, "-P", "-m", "graphgen", "demo", "--steps", "2", "-o", "out"]
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    subprocess.run(command, cwd=tmp_path, env=environment, check=True)
    assert (tmp_path / "out" / "decoder.fused.onnx").exists()


def test_the_right_program_runs(tmp_path: Path) -> None:
    program: dict[str, Any] = runpy.run_path(str(PROGRAMS / "right.py"))
    program["main"](tmp_path)
