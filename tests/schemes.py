"""The schemes of quantization, each with the runtimes that cannot run it."""

import onnxruntime as ort
import pytest

from graphgen.quantize import THRESHOLDS
from graphgen.targets.kernels import EIGHT_BITS
from graphgen.version import minor

EIGHT = pytest.mark.skipif(
    minor(ort.__version__) < EIGHT_BITS, reason="the runtime multiplies four bits only before 1.23"
)

SCHEMES = [pytest.param(s, marks=EIGHT if s == "weights8" else ()) for s in THRESHOLDS]
