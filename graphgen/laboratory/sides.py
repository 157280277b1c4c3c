"""What `bisect --against` compares with: a provider, a runtime, a precision, a pass, a file."""

import json
import os
import subprocess
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias, cast

import numpy as np
import onnx.parser
import onnx_ir as ir

from graphgen import ops
from graphgen.errors import GraphgenError, GraphgenWarning, choices_of
from graphgen.export.session import Session, model_of
from graphgen.export.write import to_bytes
from graphgen.laboratory.align import Alignment
from graphgen.match import Engine, Pass, run_passes
from graphgen.measure.feeds import at_sizes, given_sizes
from graphgen.operands import Array
from graphgen.passes.clean import clean
from graphgen.passes.legalize import runnable
from graphgen.passes.repros import DIFFERENCE, script_against, script_against_python
from graphgen.passes.verify import BOUNDS
from graphgen.providers import CPU, Name, Provider, runtime_message
from graphgen.traits import Trait, has

HALVES = {"float16": ir.DataType.FLOAT16, "bfloat16": ir.DataType.BFLOAT16}
Against: TypeAlias = Provider | str | Pass

_LOWEST = -1e38
"""Masks hide with numbers below."""

_SECONDS = 600.0
"""How long another interpreter may run one model."""


class Side:
    """What runs the pieces of a graph: by default the CPU of this runtime.

    `model` is its graph, at the sizes of the arrays; `named` leads from values of the first graph
    to those of this one that mean the same; `tolerance` is the relative RMS that is allowed where
    none is given.
    """

    tolerance, script = 1e-5, DIFFERENCE
    alone = False  # its graph is the first one's
    rebuilt = False  # it may have other operators in the place of one

    def __init__(self, name: str, model: ir.Model, named: Mapping[str, str]) -> None:
        self.name, self.model, self.named = name, model, dict(named)
        self.placement: dict[str, int] = {}

    def check(self) -> None:
        """Raise GraphgenError if nothing runs here."""

    def check_that_it_ran(self) -> None:
        """Raise GraphgenError if something else ran all that was asked of it."""

    def seen(self, x: Array) -> Array:
        """What of a value is compared."""
        return x

    def run(self, model: ir.Model, feeds: Mapping[str, Array]) -> list[Array]:
        """The outputs of a model. Raises GraphgenError."""
        return Session(model, provider="cpu", optimize=False)(feeds)


class OnProvider(Side):
    """Another execution provider of this runtime."""

    alone = True

    def __init__(self, provider: Provider, model: ir.Model, names: Sequence[str]) -> None:
        super().__init__(str(provider), model, {name: name for name in names})
        self._provider: Provider = provider
        self.ran = set[str]()

    @property
    def script(self) -> str:  # type: ignore[override]
        return script_against(self._provider)

    def check(self) -> None:
        check_provider("bisect", self._provider)

    def check_that_it_ran(self) -> None:
        if self.ran == {CPU} and self._provider != "cpu":
            raise GraphgenError(
                f"bisect: {self.name} runs no node of this model, and the CPU ran all of them, so "
                "nothing was compared; optimize the model otherwise, or give another provider"
            )

    def run(self, model: ir.Model, feeds: Mapping[str, Array]) -> list[Array]:
        with warnings.catch_warnings(action="ignore", category=GraphgenWarning):  # placement tells
            session = Session(model, provider=self._provider, optimize=False)
        self.placement = self.placement or session.plan.placement
        self.ran |= {*session.plan.placement}
        return session(feeds)


class InPython(Side):
    """The CPU of the runtime that another interpreter has; it needs onnxruntime and numpy alone."""

    alone = True

    def __init__(self, python: Path, model: ir.Model, names: Sequence[str]) -> None:
        super().__init__(str(python), model, {name: name for name in names})
        self.python = python
        self.name = f"onnxruntime {self._call()} of {python}"

    @property
    def script(self) -> str:  # type: ignore[override]
        return script_against_python(str(self.python.absolute()))

    def run(self, model: ir.Model, feeds: Mapping[str, Array]) -> list[Array]:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            Path(folder, "m.onnx").write_bytes(to_bytes(model))
            for i, x in enumerate(feeds.values()):
                np.save(Path(folder, f"{i}.npy"), _plain(x), allow_pickle=False)
            Path(folder, "feeds.json").write_text(json.dumps([*feeds]), encoding="utf-8")
            count = int(self._call(folder))
            return [np.load(Path(folder, f"y{i}.npy")) for i in range(count)]

    def _call(self, *arguments: str) -> str:
        """What the child prints. Raises GraphgenError, in one line, for whatever goes wrong."""
        command = [str(self.python), "-I", "-c", _CHILD, *arguments]
        who = f"bisect: {self.python}"
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, errors="replace", timeout=_SECONDS,
                stdin=subprocess.DEVNULL,
            )  # fmt: skip
        except subprocess.TimeoutExpired as error:
            raise GraphgenError(f"{who} did not end within {_SECONDS:g} s") from error
        except OSError as error:
            problem = f"{who} does not run: {error.strerror}"
            raise GraphgenError(f"{problem}; give a Python that has onnxruntime") from error
        if done.returncode == 0:
            return done.stdout.strip()
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        reason = runtime_message(lines[-1]) if lines else f"it ended with {done.returncode}"
        if done.returncode < 0:
            reason = f"it crashed with signal {-done.returncode}"
        raise GraphgenError(f"{who}: {reason}")


class Rounded(Side):
    """Storage in half precision: each node's floats are rounded before and after, sums are not."""

    def __init__(self, dtype: str, model: ir.Model, names: Sequence[str]) -> None:
        self.tolerance = BOUNDS[dtype]
        super().__init__(dtype, _rounded(model, HALVES[dtype]), {name: name for name in names})

    def seen(self, x: Array) -> Array:
        """The lowest float32, with which masks hide, is rounded to -inf, which hides as well."""
        return np.where(x < _LOWEST, -np.inf, x) if x.dtype == np.float32 else x


class After(Side):
    """What a pass makes of the graph; values that keep their names mean the same."""

    rebuilt = True

    def __init__(self, one: Pass, model: ir.Model) -> None:
        copy = model.clone()
        run_passes(copy, [one], Engine())
        clean(copy)
        mine, theirs = (
            {str(y.name) for node in m.graph for y in node.outputs} for m in (model, copy)
        )
        super().__init__(one.name, runnable(copy), {name: name for name in sorted(mine & theirs)})


class Other(Side):
    """Another file: values are the same if `diff` pairs their nodes, or if they have one name."""

    rebuilt = True

    def __init__(
        self, path: str | os.PathLike[str], model: ir.Model, feeds: Mapping[str, Array]
    ) -> None:
        other = model_of(path, "bisect")
        inputs = {str(x.name): x for x in other.graph.inputs}
        if lacking := [n for n, x in inputs.items() if n not in feeds and x.const_value is None]:
            raise GraphgenError(
                f"bisect: {Path(path).name} has the input {lacking[0]!r}, which the model lacks; "
                "give two models of the same inputs"
            )
        given = {name: x for name, x in feeds.items() if name in inputs}
        for name, x in given.items():
            _read_as(other, inputs[name], ir.DataType.from_numpy(x.dtype), Path(path).name)
        other = runnable(at_sizes(other, given_sizes(other, {}, given), least=0))
        self.given = [*given]
        aligned = Alignment(model, other)
        pairs = [
            (x, y)
            for a, b in aligned.pairs.items()
            if a.graph is model.graph and b.graph is other.graph
            for x, y in zip(a.outputs, b.outputs, strict=False)
        ]
        named = {str(x.name): str(y.name) for x, y in pairs if x.name and y.name}
        self.structure, taken = len(named), {*named.values()}
        known = {str(y.name) for node in other.graph for y in node.outputs}
        own = {str(x.name) for node in model.graph for x in node.outputs}
        self.by_name = sorted((own - {*named}) & known - taken)
        super().__init__(Path(path).name, other, named | {name: name for name in self.by_name})
        outputs, others = ([str(y.name) for y in m.graph.outputs] for m in (model, other))
        if {*outputs} != {*others}:
            if len(outputs) != len(others):
                raise GraphgenError(
                    f"bisect: {Path(path).name} has the outputs {', '.join(others)}, and the model "
                    f"{', '.join(outputs)}; give two models of the same outputs"
                )
            self.named |= dict(zip(outputs, others, strict=True))
        else:
            self.named |= dict(zip(outputs, outputs, strict=True))
        floats = {v.dtype for node in other.graph for v in node.outputs if v.dtype is not None}
        halves = [BOUNDS[name] for name, dtype in HALVES.items() if dtype in floats]
        self.tolerance = max([self.tolerance, *halves])


def check(against: Any) -> None:
    """Raise GraphgenError if it names nothing to compare with."""
    known = [*choices_of(Name)[1:], *HALVES]
    if not isinstance(against, os.PathLike | Pass) and against not in known:
        raise GraphgenError(
            f"bisect: against={against!r} is none of {', '.join(known)}, nor the path of an .onnx "
            "file or a provider's library"
        )


def side_of(
    against: Any, python: Any, model: ir.Model, names: Sequence[str], feeds: Mapping[str, Array]
) -> Side:
    """What `against` or `python` names. Raises GraphgenError if it cannot be used."""
    if python is not None:
        return InPython(Path(python), model, names)
    if isinstance(against, str) and against in HALVES:
        return Rounded(against, model, names)
    if isinstance(against, Pass):
        return After(against, model)
    if isinstance(against, os.PathLike) and Path(against).suffix == ".onnx":
        return Other(against, model, feeds)
    return OnProvider(cast(Provider, against), model, names)


def check_provider(who: str, provider: Provider) -> None:
    """Raise GraphgenError, with who asks, if a provider runs nothing here."""
    try:
        Session(_NOTHING, provider=provider)
    except GraphgenError as error:
        raise GraphgenError(f"{who}: {str(error).partition(': ')[2]}") from error


_NOTHING = onnx.parser.parse_model(
    '<ir_version: 8, opset_import: ["": 18]> g (float[1] x) => (float[1] y) { y = Identity(x) }'
).SerializeToString()

_CHILD = """import json, os, sys
import numpy as np
try:
    import onnxruntime as ort
except ImportError as error:
    sys.exit(f"it has no onnxruntime ({error})")
if len(sys.argv) < 2:
    print(ort.__version__)
    sys.exit()
os.chdir(sys.argv[1])
options = ort.SessionOptions()
options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
options.log_severity_level = 4
try:
    session = ort.InferenceSession("m.onnx", options, providers=["CPUExecutionProvider"])
    names = json.load(open("feeds.json", encoding="utf-8"))
    results = session.run(None, {n: np.load(f"{i}.npy") for i, n in enumerate(names)})
    for i, y in enumerate(results):
        y = np.asarray(y)
        np.save(f"y{i}.npy", y.astype(str) if y.dtype == object else y, allow_pickle=False)
except Exception as error:
    sys.exit(" ".join(str(error).split()))
print(len(results))
"""


def _plain(x: Array) -> Array:
    """An array that numpy alone can save and read back."""
    if x.dtype == np.object_:
        return x.astype(str)
    if x.dtype.isbuiltin != 1:
        raise GraphgenError(
            f"numpy alone has no {x.dtype}, so it cannot be sent to another interpreter"
        )
    return x


def _rounded(model: ir.Model, dtype: ir.DataType) -> ir.Model:
    """A copy whose nodes read and write floats through `dtype`; casts are all that it adds."""
    copy, inner = model.clone(), dict[ir.Value, list[ir.Node]]()
    for node in list(copy.graph):
        if has(node, Trait.CONSTANT):
            continue
        for i, x in enumerate(node.inputs):
            if x is not None and x.dtype is ir.DataType.FLOAT:
                if x not in inner:
                    inner[x] = _casts(x, dtype)
                    copy.graph.insert_before(node, inner[x])
                node.replace_input_with(i, inner[x][-1].outputs[0])
        for y in node.outputs:
            if y.dtype is ir.DataType.FLOAT and y.name:
                casts = _casts(y, dtype)
                result = casts[-1].outputs[0]
                y.replace_all_uses_with(result, replace_graph_outputs=True)
                casts[0].replace_input_with(0, y)
                result.name, y.name = y.name, f"exact:{y.name}"
                copy.graph.insert_after(node, casts)
    return copy


def _read_as(model: ir.Model, x: ir.Value, dtype: ir.DataType, who: str) -> None:
    """Let an input take floats of another width. Raises GraphgenError where it takes no floats."""
    wanted = x.dtype
    if wanted in (None, dtype):
        return
    if wanted is None or not (wanted.is_floating_point() and dtype.is_floating_point()):
        raise GraphgenError(
            f"bisect: {who} takes {wanted} as {x.name!r}, and the model {dtype}; give two models "
            "of the same inputs"
        )
    node = ir.node(ops.cast.name, [x], {"to": wanted})
    node.outputs[0].type, node.outputs[0].shape = x.type, x.shape
    x.replace_all_uses_with(node.outputs[0], replace_graph_outputs=True)
    node.replace_input_with(0, x)
    x.type = ir.TensorType(dtype)
    model.graph.insert_before(model.graph[0], node)


def _casts(x: ir.Value, dtype: ir.DataType) -> list[ir.Node]:
    """To `dtype` and back."""
    made, shape = list[ir.Node](), x.shape
    for to in (dtype, ir.DataType.FLOAT):
        node = ir.node(ops.cast.name, [x], {"to": to})
        x = node.outputs[0]
        x.type, x.shape = ir.TensorType(to), shape
        made.append(node)
    return made
