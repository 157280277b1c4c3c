"""The command `doctor`: what is installed here, what fits it, and whether it works."""

import argparse
import os
import platform
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import graphgen as gg
from graphgen.commands.options import FLAG, print_json
from graphgen.errors import GraphgenError

EXAMPLE = "--json"

LIBRARIES = (
    "numpy onnx onnx-ir onnxscript onnx-shape-inference networkx rich flatbuffers archspec "
    "typing_extensions"
).split()
RUNTIMES = ("onnxruntime", "onnxruntime-gpu")
OPTIONAL = {
    "tokenizers": "text",
    "huggingface-hub": "text",
    "pyarrow": "map",
    "jinja2": "chat",
    "llguidance": "grammar",
    "pillow": "image",
    "ray": "ray",
    "mpi4py": "mpi",
    "netron": "html",
    "shtab": "shell",
    "tensorboard": "log",
    "onnxruntime-ep-webgpu": "webgpu",
    "matplotlib": "demo",
    "babel": "examples",
    "scikit-learn": "examples",
}
"""Packages that an extra installs, and the first such extra."""

_VECTORS = re.compile(r"sse4_2|avx|amx|fma$|f16c|asimd|sve|i8mm|bf16")
_MOST = 1e-5  # relative RMS error of one small attention in float32; it has 2e-7
_REINSTALL = 'run `pip install --force-reinstall "graphgen-onnx[cpu]"`, or [gpu] for CUDA'


def run(options: argparse.Namespace) -> None:
    """Show what is installed here, and check that it works."""
    found = _installation()
    try:
        if lacking := [name for name, there in found["libraries"].items() if there is None]:
            problem = f"{', '.join(lacking)} must be installed"
            raise GraphgenError(
                f'{problem}; run `pip install "graphgen-onnx[cpu]"`, or [gpu] for CUDA'
            )
        found |= _machine()
        found |= _runtime(found["runtimes"])
        found["check"] = _check(found["runtimes"]["onnxruntime-gpu"] is not None)
    except GraphgenError as error:
        found["problem"] = str(error)
    except ImportError as error:
        found["problem"] = f"a library does not import ({error}); {_REINSTALL}"
    except Exception as error:
        problem = f"one small attention ends with {type(error).__name__}: {error}; {_REINSTALL}"
        found["problem"] = f"{problem}; if that does not help, report all of this"
    if options.json:
        print_json(found)
    else:
        print("\n".join(_lines(found)))
    if found["problem"]:  # the concluding line then
        raise GraphgenError(f"doctor: {found['problem']}")


def _versions(names: Iterable[str]) -> dict[str, str | None]:
    from importlib.metadata import PackageNotFoundError, version  # a sixth of the time of --help

    found: dict[str, str | None] = {}
    for name in names:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


def _installation() -> dict[str, Any]:
    """What is known without importing any library; all other members are still empty."""
    usable = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else ()
    return {
        "graphgen": gg.__version__,
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "platform": platform.platform(),
        "processor": platform.machine(),
        "instructions": [],
        "cores": {"all": os.cpu_count(), "usable": len(usable) or os.cpu_count()},
        "memory_bytes": None,
        "libraries": _versions(LIBRARIES),
        "runtimes": _versions(RUNTIMES),
        "optional": _versions(OPTIONAL),
        "providers": [],
        "int8": None,
        "tables": {},
        "check": None,
        "problem": "",
    }


def _machine() -> dict[str, Any]:
    from graphgen.processor import described, memory

    name, flags = described()
    vectors = sorted(flag for flag in flags if _VECTORS.match(flag))
    return {"processor": name, "instructions": vectors, "memory_bytes": memory()}


def _runtime(installed: dict[str, str | None]) -> dict[str, Any]:
    """The runtime's providers, what it multiplies int8 with, and the tables that fit it."""
    from graphgen.processor import described, instructions, processor
    from graphgen.runtime import import_runtime
    from graphgen.targets.kernels import measured
    from graphgen.targets.tables import committed
    from graphgen.version import minor

    ort = import_runtime()
    providers, (_, flags) = ort.get_available_providers(), described()
    tables = {}

    def add(table: str, of: str, versions: Iterable[str], fits: bool = True) -> None:
        fits = fits and minor(ort.__version__) in map(minor, versions)
        tables[table] = {"of": of, "fits": fits}

    for provider in ("cpu", "cuda"):
        first, *further = committed(provider)["runtimes"]
        span = " to ".join([first, *further[-1:]])
        add(f"kernels_{provider}.json", f"onnxruntime {span}", [first, *further])
    for vectors, figures in measured().items():
        for dtype, one in figures.items():
            of = f"onnxruntime {one['onnxruntime']}, {one['machine']}"
            ours = vectors == instructions() and any(flag.startswith(vectors) for flag in flags)
            ours = ours or (vectors == "cuda" and "CUDAExecutionProvider" in providers)
            add(f"pays.json {vectors} {dtype}", of, [one["onnxruntime"]], ours)
    return {"providers": providers, "int8": processor().int8, "tables": tables}


def _check(cuda: bool) -> dict[str, Any]:
    """Build, optimize and run one small attention on the CPU. Raises GraphgenError if it is wrong.

    With `cuda` a session is also opened there, which tells whether driver and libraries load.
    """
    import numpy as np

    from graphgen.measure.accuracy import differ
    from graphgen.measure.reference import evaluate

    attention = gg.nn.Attention(32, num_heads=4)
    model = gg.build(attention, primitives=True, x=gg.float32["batch", "seq", 32])
    best = gg.optimize(model)
    feeds = {"x": np.random.default_rng(0).normal(size=(2, 8, 32)).astype(np.float32)}
    error = differ(evaluate(model, feeds), gg.Session(best, provider="cpu")(feeds)).rel_rms
    if not error <= _MOST:
        wrong = f"one small attention has a relative RMS error of {error:.1e}, at most {_MOST:.0e}"
        raise GraphgenError(f"{wrong} is right; {_REINSTALL}; if that does not help, report this")
    [(fused, wanted)] = best.report.whole().values()
    note = gg.Session(best).plan.note or "works" if cuda else None
    return {"fused": fused, "of": wanted, "rel_rms": error, "cuda": note}


def _lines(found: dict[str, Any]) -> Iterator[str]:
    """One screen: a name at the left, and what there is to tell of it."""
    memory, check = found["memory_bytes"], found["check"]
    cores = "{usable} of {all}".format(**found["cores"])
    missing = [
        f"{name} (extra [{OPTIONAL[name]}])" for name, v in found["optional"].items() if not v
    ]
    rows = {
        "graphgen": found["graphgen"],
        "Python": f"{found['python']} on {found['platform']}",
        "processor": found["processor"] + (f", int8 by {found['int8']}" if found["int8"] else ""),
        "instructions": " ".join(found["instructions"]),
        "cores": cores + (f", {memory / 2**30:,.1f} GiB of memory" if memory else ""),
        "libraries": _told(found["libraries"]),
        "runtime": _told(found["runtimes"]),
        "providers": ", ".join(found["providers"]),
        "optional": _told(found["optional"]),
        "not installed": ", ".join(missing),
        **{
            table: f"{one['of']}: {'fits' if one['fits'] else 'does not fit'}"
            for table, one in found["tables"].items()
        },
    }
    if check:
        rows["CUDA"] = check["cuda"] or ""
        attention = f"{check['fused']} of {check['of']} attentions fused"
        rows["check"] = f"{attention}, relative RMS error {check['rel_rms']:.1e} on the CPU"
    wide = max(map(len, rows)) + 2
    for name, text in rows.items():
        if text:
            first, *further = textwrap.wrap(text, 100 - wide, break_on_hyphens=False)
            yield f"{name:<{wide}}{first}"
            yield from (" " * wide + line for line in further)
    if not found["problem"]:
        yield "all is well"


def _told(versions: dict[str, str | None]) -> str:
    return ", ".join(f"{name} {found}" for name, found in versions.items() if found) or "none"


def add_options(add: Callable[..., Any]) -> None:
    """Add the options of `doctor`."""
    add("--json", help="print what docs/doctor.schema.json describes", **FLAG)
