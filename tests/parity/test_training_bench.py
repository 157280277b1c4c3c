"""The question of bench/ that needs torch: all contenders learn the same."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="needs torch: make parity")
pytestmark = pytest.mark.parity

SCRIPT = Path(__file__).resolve().parents[2] / "bench" / "training.py"


def test_training_measures_every_contender() -> None:
    options = ["--only", "tiny", "--threads", "1", "--seconds", "1", "--json"]
    done = subprocess.run([sys.executable, SCRIPT, *options], capture_output=True, text=True)
    assert done.returncode in (0, 3), done.stderr  # at this size speed says nothing
    rows = json.loads(done.stdout)["rows"]
    assert [row["contender"] for row in rows] == [
        "torch eager",
        "torch.compile",
        "graphgen",
        "graphgen, recompute auto",
    ]
    for row in rows:
        assert row["error"] < 1e-3
        assert row["median_ms"] > 0 and row["peak_mb"] > 0
