"""Numbers below 2⁻¹²⁶ are 0 to the threads of a session that asks for it, and to no other code."""

import json
import subprocess
import sys

import pytest

from graphgen.subnormals import can_flush

SCRIPT = """
import json, sys
import numpy as np
import onnxruntime as ort
import graphgen as gg

scale = np.float32(2.0**-30)
model = gg.build(lambda x: x * scale, x=gg.float32["n"])
options = {"session.set_denormal_as_zero": "1"}
x = np.full(1 << 22, 2.0**-100, np.float32)
path = gg.export(model, sys.argv[1])

def counts(y):
    return [int((y == 0).sum()), int((y > 0).sum())]

flushing = gg.Session(path, options=options, threads=2)  # the first of the process
y = np.empty_like(x)
bound = flushing.bind({"x": x}, {flushing._output_names[0]: y})
bound()
found = [counts(flushing(x=x)[0]), counts(y), counts(x * scale), counts(gg.Session(path)(x=x)[0])]
print(json.dumps([*found, flushing.plan.config]))
"""


@pytest.mark.skipif(not can_flush(), reason="this thread's register is not set here")
def test_the_thread_that_runs_a_session_flushes_as_long_as_it_runs(tmp_path):
    """In a process of its own: the runtime sets the thread of the first session for good."""
    given = [sys.executable, "-c", SCRIPT, tmp_path / "m.onnx"]
    done = subprocess.run(given, capture_output=True, text=True, check=True)
    called, bound, numpy, plain, config = json.loads(done.stdout)
    assert called == bound == [1 << 22, 0] and numpy == plain == [0, 1 << 22]
    assert config == {"session.set_denormal_as_zero": "1"}
