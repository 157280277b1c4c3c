"""On WebGPU: `make test-webgpu` sets up the plugin and an adapter, a software one if need be."""

import os
from pathlib import Path

import numpy as np
import pytest

import graphgen as gg
from graphgen import nn
from graphgen.commands import main
from graphgen.errors import GraphgenError
from graphgen.providers import devices_of
from graphgen.runtime import import_runtime

try:
    devices_of("test", import_runtime(), "webgpu")
    LACKS = ""
except GraphgenError as error:
    LACKS = str(error)

pytestmark = [pytest.mark.webgpu, pytest.mark.skipif(bool(LACKS), reason=LACKS)]
