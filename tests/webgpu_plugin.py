"""Whether the WebGPU plugin finds a device here, and what the tests of it share."""

import pytest

from graphgen.errors import GraphgenError
from graphgen.providers import devices_of
from graphgen.runtime import import_runtime

try:
    devices_of("test", import_runtime(), "webgpu")
    LACKS = ""
except GraphgenError as error:
    LACKS = str(error)

MARKS = [pytest.mark.webgpu, pytest.mark.skipif(bool(LACKS), reason=LACKS)]
OWN, CPU = "WebGpuExecutionProvider", "CPUExecutionProvider"
