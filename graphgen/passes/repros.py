"""Folders that show a fault without graphgen: a model or two, inputs, a script."""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from textwrap import indent
from urllib.parse import quote

import numpy as np
import onnx_ir as ir

from graphgen.errors import GraphgenError
from graphgen.operands import Array
from graphgen.providers import KNOWN, Provider

BOTH: tuple[str, str] = ("before", "after")
"""The names that `DIFFERENCE` and `TIME` read."""

_LARGE = 1 << 24
"""Weights with more bytes go next to the model."""

DIFFERENCE = '''"""Where after.onnx differs from before.onnx: python run.py"""
from pathlib import Path
from urllib.parse import unquote
import numpy as np
import onnxruntime as ort
here, options = Path(__file__).parent, ort.SessionOptions()
options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
sessions = [ort.InferenceSession(here / f, options) for f in ("before.onnx", "after.onnx")]
feeds = {unquote(f.stem): np.load(f) for f in here.glob("*.npy")}
flat = lambda results: [x for y in results for x in (y if isinstance(y, list) else [y])]
for old, new in zip(*(flat(session.run(None, feeds)) for session in sessions)):
    change = f"shape {new.shape}, was {old.shape}"
    if old.shape == new.shape:
        error, scale = (np.sqrt(np.mean(np.square(x * 1.0))) for x in (new * 1.0 - old, old))
        change = f"relative RMS difference {error / scale:.2e}"
    print("before", old, "after", new, change, sep="\\n")
'''
"""The script for a wrong result."""

TIME = '''"""How much slower after.onnx is than before.onnx: python run.py"""
from pathlib import Path
from time import time
from timeit import timeit
from urllib.parse import unquote
import numpy as np
import onnxruntime as ort
here, all_ = Path(__file__).parent, ort.get_available_providers()
sessions = [ort.InferenceSession(here / f, providers=all_) for f in ("before.onnx", "after.onnx")]
feeds = {unquote(f.stem): np.load(f) for f in here.glob("*.npy")}
times, stop = [], time() + 2
while time() < stop:
    times.append([timeit(lambda: s.run(None, feeds), number=1) for s in sessions])
before, after = np.median(times, axis=0) * 1e3
print(f"before {before:.4f} ms, after {after:.4f} ms: {after / before:.2f} x")
'''
"""The script for a slow one."""


AGAINST = '''"""Where {name} differs from the CPU: python run.py"""
from pathlib import Path
from urllib.parse import unquote
import numpy as np
import onnxruntime as ort
here, sessions = Path(__file__).parent, []
for provider in ("CPUExecutionProvider", {ep_name!r}):
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    providers = None
    if provider in ort.get_available_providers():
        providers = [provider]
    else:
{library}
        ort.register_execution_provider_library(provider, library)
        devices = [d for d in ort.get_ep_devices() if d.ep_metadata.get("library_path") == library]
        options.add_provider_for_devices(devices[:1], {{}})
    sessions.append(ort.InferenceSession(here / "node.onnx", options, providers=providers))
feeds = {{unquote(f.stem): np.load(f) for f in here.glob("*.npy")}}
for old, new in zip(*(session.run(None, feeds) for session in sessions)):
    error, scale = (np.sqrt(np.mean(np.square(x * 1.0))) for x in (new * 1.0 - old, old))
    print("cpu", old, {name!r}, new, f"relative RMS difference {{error / scale:.2e}}", sep="\\n")
'''
"""The script for a node that a provider computes otherwise."""


PYTHON = '''"""Where another onnxruntime differs from this one: python run.py"""
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote
import numpy as np
import onnxruntime as ort
here, options = Path(__file__).parent, ort.SessionOptions()
options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
node = str(here / "node.onnx")
session = ort.InferenceSession(node, options, providers=["CPUExecutionProvider"])
results = session.run(None, {{unquote(f.stem): np.load(f) for f in here.glob("*.npy")}})
if sys.argv[1:]:
    sys.exit(np.savez(sys.argv[1], *results, version=ort.__version__))
saved = here / "other.npz"
subprocess.run([{python!r}, __file__, str(saved)], check=True)
with np.load(saved) as others:
    for i, one in enumerate(results):
        other = others[f"arr_{{i}}"]
        print(ort.__version__, one, others["version"], other, sep="\\n")
        if one.shape == other.shape:
            error, scale = (np.sqrt(np.mean(np.square(x * 1.0))) for x in (other * 1.0 - one, one))
            print(f"relative RMS difference {{error / scale:.2e}}")
'''
"""The script for a node that another version computes otherwise."""


def script_against_python(python: str) -> str:
    """`PYTHON`, for an interpreter."""
    return PYTHON.format(python=python)


def script_against(provider: Provider) -> str:
    """`AGAINST`, for a provider: a plugin's library is where its package says, or the path."""
    if isinstance(provider, os.PathLike):
        path = Path(provider)
        how, ep_name, name = [f"library = {str(path.absolute())!r}"], path.stem, path.name
    else:
        ep_name, package = KNOWN[provider]
        module, name = package.replace("-", "_"), provider
        how = [
            f"import {module} as plugin",
            'where = getattr(plugin, "get_library_path", None) or plugin.library_path',
            "library = str(Path(where()).absolute())",
        ]
    library = indent("\n".join(how), " " * 8)
    return AGAINST.format(name=name, ep_name=ep_name, library=library)


def write(
    repros: Path,
    name: str,
    models: Mapping[str, ir.Model],
    feeds: Mapping[str, Array],
    script: str,
) -> Path:
    """Write NUMBER-NAME: STEM.onnx for each model, inputs as .npy, run.py; complete or absent.

    In the name, anything but letters and digits becomes `_`: no system accepts every character.
    """
    name = re.sub(r"[^\w-]", "_", name)
    try:
        repros.mkdir(parents=True, exist_ok=True)
        number = 1 + len(list(repros.glob("[0-9]*-*")))
        with TemporaryDirectory(dir=repros, prefix=".") as beside:
            folder = Path(beside, name)
            folder.mkdir()
            for stem, model in models.items():
                weights = [v.const_value for v in model.graph.initializers.values()]
                large = sum(tensor.nbytes for tensor in weights if tensor is not None) > _LARGE
                beside_it = f"{stem}.onnx_data" if large else None
                ir.save(model, folder / f"{stem}.onnx", external_data=beside_it)
            for key, array in feeds.items():
                np.save(folder / f"{quote(key, safe='')}.npy", array)
            (folder / "run.py").write_text(script, encoding="utf-8")
            return folder.rename(repros / f"{number}-{name}")
    except OSError as e:
        problem = f"{e.filename or repros}: {e.strerror or e}"
        raise GraphgenError(f"repros: {problem}; give another folder") from e
