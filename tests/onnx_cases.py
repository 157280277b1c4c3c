"""ONNX's own tests as it generates them, and what becomes of one: see conformance.py."""

import re
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import ModelProto, TensorProto, helper, numpy_helper

from graphgen.runtime import _array, _ort_value
from graphgen.traits import Trait, has

WHOLE = "whole models"
BAD = ("wrong", "invalid", "crash")


@dataclass(frozen=True)
class Case:
    """A model, and what it is fed with and should give, once or more often."""

    name: str
    operator: str
    model: bytes
    data: list[tuple[list[Any], list[Any]]]
    rtol: float
    atol: float


@dataclass
class Verdict:
    """What became of a case."""

    name: str
    operator: str
    verdict: str
    why: str = ""
    fused: list[str] = field(default_factory=list)
    gradient: str = ""  # "yes", or why not


def cases(only: str = "", modules: Sequence[str] | None = None) -> list[Case]:
    """All tests whose name a pattern finds, or those of some modules of ...test.case.node.

    To generate all takes six seconds.
    """
    from onnx.backend.test.case import node as package
    from onnx.backend.test.loader import load_model_tests

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of NumPy, at the ends of dtypes
        if modules is None:
            package.collect_testcases(None)
        for name in modules or ():
            import_module(f"{package.__name__}.{name}")
    found, operators = [], dict[str, str]()
    for case in package._NodeTestCases:
        base = re.sub(r"_expanded.*", "", case.name)
        nodes = sorted({_named(node) for node in case.model.graph.node})
        operator = operators.setdefault(base, ", ".join(nodes))
        if re.search(only, case.name):
            data = [([*map(_plain, x)], [*map(_plain, y)]) for x, y in case.data_sets]
            content = case.model.SerializeToString()
            found.append(Case(case.name, operator, content, data, case.rtol, case.atol))
    for kind in () if modules else ("simple", "pytorch-operator", "pytorch-converted"):
        for case in load_model_tests(kind=kind):
            if re.search(only, case.name):
                folder, name = Path(case.model_dir), f"{case.name} ({kind})"
                content = (folder / "model.onnx").read_bytes()
                found.append(Case(name, WHOLE, content, [*_read(folder)], case.rtol, case.atol))
    return found


def _named(node: onnx.NodeProto) -> str:
    return f"{node.domain}.{node.op_type}" if node.domain else str(node.op_type)


def _read(folder: Path) -> Iterator[tuple[list[Any], list[Any]]]:
    model = onnx.load(folder / "model.onnx")
    for data in sorted(folder.glob("test_data_set_*")):
        pair: tuple[list[Any], list[Any]] = ([], [])
        for role, values, found in zip(
            ("input", "output"), (model.graph.input, model.graph.output), pair, strict=True
        ):
            for i, value in enumerate(values):
                if (file := data / f"{role}_{i}.pb").exists():
                    kind = (
                        onnx.SequenceProto if value.type.HasField("sequence_type") else TensorProto
                    )
                    found.append(_plain(kind.FromString(file.read_bytes())))
        yield pair


def _plain(value: Any) -> Any:
    """Arrays, lists of them, and None instead of protos."""
    if isinstance(value, TensorProto):
        return numpy_helper.to_array(value)
    if isinstance(value, onnx.SequenceProto):
        return numpy_helper.to_list(value)
    if isinstance(value, onnx.OptionalProto):
        return numpy_helper.to_optional(value)
    return value


# What one test is made to do, in a process of its own.


@cache
def _runtime() -> Any:
    import onnxruntime

    onnxruntime.set_default_logger_severity(4)
    return onnxruntime


class BrokenError(Exception):
    """The runtime does not open or run a model."""


def run(model: bytes | Path, feeds: Sequence[Any], *, optimize: bool) -> list[Any]:
    """What a model gives on the runtime."""
    ort = _runtime()
    options = ort.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 4, 1
    if not optimize:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    try:
        source = model if isinstance(model, bytes) else str(model)
        session = ort.InferenceSession(source, options, providers=["CPUExecutionProvider"])
        names = [x.name for x in session.get_inputs()]
        given = {name: _given(x) for name, x in zip(names, feeds, strict=False)}
        known = [x.type for x in (*session.get_inputs(), *session.get_outputs())]
        if not any(re.search("bfloat16|float8", kind) for kind in known):
            return list(session.run(None, given))
        values = {name: _ort_value(x.copy(order="C")) for name, x in given.items()}
        return [_array(y) for y in session.run_with_ort_values(None, values)]
    except Exception as error:  # the runtime's own, each of its own type
        raise BrokenError(" ".join(str(error).split())) from error


def _given(x: Any) -> Any:
    """An input as the runtime takes it."""
    if x is None or isinstance(x, list):
        return x
    array = np.asarray(x)
    return array.astype(object) if array.dtype.kind in "STU" else array


def same(found: Any, wanted: Any, rtol: float, atol: float) -> bool:
    """Whether results are of one type and, numbers within a tolerance, the same."""
    if isinstance(found, list | tuple) or isinstance(wanted, list | tuple):
        if not isinstance(found, list | tuple) or not isinstance(wanted, list | tuple):
            return False
        pairs = zip(found, wanted, strict=False)
        return len(found) == len(wanted) and all(same(a, b, rtol, atol) for a, b in pairs)
    if found is None or wanted is None:
        return found is wanted
    a, b = np.asarray(found), np.asarray(wanted)
    texts = [x.dtype.kind in "OSTU" for x in (a, b)]
    if a.shape != b.shape or (texts != [True, True] and a.dtype != b.dtype):
        return False
    if any(texts) or a.dtype.kind in "biu":
        return a.tolist() == b.tolist()
    kind = np.complex128 if a.dtype.kind == "c" else np.float64
    return bool(np.allclose(a.astype(kind), b.astype(kind), rtol, atol, equal_nan=True))


def feedable(case: Case) -> Case:
    """The case without numbers of less than a byte outside, which Python cannot pass on."""
    model = ModelProto.FromString(case.model)
    numbers = {helper.np_dtype_to_tensor_dtype(np.dtype(d)) for d in _small()}
    graph, inner = model.graph, []
    for i, value in reversed([*enumerate(graph.input)]):
        if value.type.tensor_type.elem_type in numbers:
            tensor = numpy_helper.from_array(case.data[0][0][i], value.name)
            graph.initializer.append(tensor)
            inner.append(i)
            del graph.input[i]
    wide = []
    for i, value in enumerate(graph.output):
        if value.type.tensor_type.elem_type in numbers:
            wide.append(i)
            node = helper.make_node("Cast", [value.name], [f"{value.name}_wide"], to=1)
            graph.node.append(node)
            value.name, value.type.tensor_type.elem_type = node.output[0], 1
    if not inner and not wide:
        return case
    data = [
        (
            [x for i, x in enumerate(given) if i not in inner],
            [y.astype(np.float32) if i in wide else y for i, y in enumerate(wanted)],
        )
        for given, wanted in case.data[:1]
    ]
    return replace(case, model=model.SerializeToString(), data=data)


def _small() -> list[Any]:
    import ml_dtypes

    return [getattr(ml_dtypes, n) for n in ("int2", "uint2", "int4", "uint4", "float4_e2m1fn")]


def check(case: Case) -> Verdict:
    """Take one case through `optimize` and compare; then with open sizes; then its gradient."""
    found, feasible = optimized(case), True
    if found.verdict == "no kernel":
        for version in range(27, 12, -1):  # the newest opset comes before the runtime has it
            if (older := at_opset(case, version)) is not None:
                other = optimized(older)
                if other.verdict != "no kernel":
                    found, case = replace(other, name=case.name), older
                    break
        else:
            feasible = False
    if feasible and found.verdict == "runs":
        dynamic = optimized(with_open_sizes(case))
        if dynamic.verdict not in ("no kernel", "runs"):
            found.verdict, found.why = dynamic.verdict, f"with open sizes: {dynamic.why}"
        if "_expanded" not in case.name and case.operator != WHOLE:
            found.gradient = gradient(case)
    return found


def at_opset(case: Case, version: int) -> Case | None:
    """The case at a lower opset, if the model is valid there."""
    model = ModelProto.FromString(case.model)
    standard = [entry for entry in model.opset_import if entry.domain in ("", "ai.onnx")]
    if not standard or standard[0].version <= version:
        return None
    standard[0].version = version
    try:
        onnx.checker.check_model(model)
    except onnx.checker.ValidationError:
        return None
    return replace(case, model=model.SerializeToString())


def with_open_sizes(case: Case) -> Case:
    """The case with a name for each size of its inputs, and no shapes of its outputs."""
    model = ModelProto.FromString(case.model)
    for i, value in enumerate(model.graph.input):
        if value.type.HasField("tensor_type"):
            for j, dim in enumerate(value.type.tensor_type.shape.dim):
                dim.dim_param = f"size_{i}_{j}"
    for value in model.graph.output:
        for dim in value.type.tensor_type.shape.dim:
            dim.Clear()
    return replace(case, model=model.SerializeToString())


def optimized(case: Case) -> Verdict:
    """Take one case through `optimize`, and compare."""
    import graphgen as gg

    found = Verdict(case.name, case.operator, "runs")
    case = feedable(case)
    plain, drawn = [], False
    try:
        for feeds, _ in case.data:
            plain.append(run(case.model, feeds, optimize=False))
    except BrokenError as error:
        found.verdict, found.why = "no kernel", str(error)
    with tempfile.TemporaryDirectory() as folder:
        given, made = Path(folder) / "given.onnx", Path(folder) / "made.onnx"
        given.write_bytes(case.model)
        try:
            model = gg.load(given)
            drawn = any(has(node, Trait.RANDOM) for node in model.graph.all_nodes())
            best = gg.optimize(model, target="cpu")
            gg.export(best, made)
        except gg.GraphgenError as error:
            if found.verdict == "runs":
                found.verdict, found.why = "refused", str(error)
            return found
        except Exception as error:
            found.verdict, found.why = "crash", f"{type(error).__name__}: {error}"
            return found
        if any(p.count("fired") for p in best.report.passes if p.name.startswith("fuse_")):
            found.fused = sorted({*best.report.ops_after} - {*best.report.ops_before})
        for i, (feeds, wanted) in enumerate(case.data):
            if plain and (problem := misfit(case, model, feeds, plain[i])):
                found.verdict, found.why = "wrong", problem
                return found
            results = [plain[i]] if found.verdict == "runs" else []
            problem = _compare(case, made, feeds, [*results, wanted], drawn)
            if problem is not None and (results or problem[0] == "wrong"):
                found.verdict, found.why = problem
            elif problem is None and not results:
                found.verdict, found.why = "runs", f"the given model does not: {found.why}"
    return found


def misfit(case: Case, model: Any, feeds: Sequence[Any], results: Sequence[Any]) -> str:
    """What is wrong with the types that were inferred for the outputs, at the sizes of these."""
    sizes, inputs = {}, ModelProto.FromString(case.model).graph.input
    for value, x in zip(inputs, feeds, strict=False):
        dims = value.type.tensor_type.shape.dim
        if isinstance(x, np.ndarray | np.generic):
            sizes |= {d.dim_param: n for d, n in zip(dims, x.shape, strict=True) if d.dim_param}
    for value, y in zip(model.graph.outputs, results, strict=True):
        if value.shape is None or not isinstance(y, np.ndarray | np.generic):
            continue
        fits = len(value.shape) == y.ndim
        for dim, n in zip(value.shape, y.shape, strict=False):
            inferred = dim if isinstance(dim, int) else dim.evaluate(sizes)
            if not isinstance(inferred, int):  # a new symbol, which has one value everywhere
                inferred = sizes.setdefault(str(inferred), n)
            fits &= inferred == n
        if not fits:
            return f"inferred {value.name} as {value.shape}, which is {list(y.shape)} at {sizes}"
    return ""


def _compare(
    case: Case, made: Path, feeds: Sequence[Any], wanted: list[Any], drawn: bool
) -> tuple[str, str] | None:
    """What is wrong with the results of the new file, which may be any of those wanted."""
    for optimize in (False, True):
        how = "as it is" if not optimize else "with the runtime's optimizations"
        try:
            got = run(made, feeds, optimize=optimize)
        except BrokenError as error:
            if optimize and not _runs(case, feeds):
                continue
            return "invalid", f"{how}: {error}"
        if drawn:
            right = _shapes(got) == _shapes(wanted[0])
        else:
            right = any(same(got, results, case.rtol, case.atol) for results in wanted)
        if not right and optimize and _runs(case, feeds):  # they may be at fault
            right = same(got, run(case.model, feeds, optimize=True), case.rtol, case.atol)
        if not right:
            return "wrong", " ".join(f"{how}: {got} instead of {wanted[0]}".split())[:300]
    return None


def _runs(case: Case, feeds: Sequence[Any]) -> bool:
    """Whether the given model runs with the runtime's own optimizations."""
    try:
        run(case.model, feeds, optimize=True)
    except BrokenError:
        return False
    return True


def _shapes(results: Any) -> Any:
    if isinstance(results, list | tuple):
        return [_shapes(y) for y in results]
    return getattr(results, "dtype", None), getattr(results, "shape", None)


LOSS = "the_loss"


def gradient(case: Case) -> str:
    """Whether artifacts give the gradient of Σ y² in all float inputs: "yes", or what else."""
    import graphgen as gg

    model = ModelProto.FromString(case.model)
    feeds = dict(zip([x.name for x in model.graph.input], case.data[0][0], strict=False))
    floats = [x for x in model.graph.input if _is_float(x) and np.ndim(feeds[x.name]) > 0]
    floats = [x for x in floats if feeds[x.name].size]
    noise = np.random.default_rng(1)
    for name in [x.name for x in floats]:  # no two elements are equal, as in the window of a pool
        feeds[name] = feeds[name] + noise.uniform(-0.01, 0.01, feeds[name].shape).astype("f")
    outputs = [y for y in model.graph.output if _is_float(y)]
    if not floats or not outputs:
        return ""
    with_loss(model, outputs[0].name)
    before = model.SerializeToString()
    for value in floats:
        model.graph.initializer.append(numpy_helper.from_array(feeds[value.name], value.name))
        model.graph.input.remove(value)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "given.onnx"
        file.write_bytes(model.SerializeToString())
        try:
            gg.artifacts(file, Path(folder) / "made", loss=LOSS, profile="stock")
        except gg.GraphgenError as error:
            return str(error)
        except Exception as error:
            return f"crash: {type(error).__name__}: {error}"
        training = onnx.load(Path(folder) / "made" / "training_model.onnx")
    names = _give_gradients(training)
    try:
        made = run(
            training.SerializeToString(),
            [feeds[x.name] for x in training.graph.input],
            optimize=False,
        )
    except BrokenError as error:
        return f"invalid: {error}"
    return _differences(before, feeds, dict(zip(names, made, strict=True)))


def _give_gradients(training: ModelProto) -> list[str]:
    """Let a training model give the gradients instead of adding them to buffers; whose they are."""
    graph, names = training.graph, []
    del graph.output[:]
    for node in [n for n in graph.node if n.op_type == "InPlaceAccumulatorV2"]:
        buffer, gradient, _ = node.input
        names.append(buffer.removesuffix("_grad.accumulation.buffer"))
        graph.output.append(helper.make_tensor_value_info(gradient, TensorProto.FLOAT, None))
        graph.node.remove(node)
    for value in [x for x in graph.input if re.search("accumulation.buffer|lazy_reset", x.name)]:
        graph.input.remove(value)
    return names


def _is_float(value: onnx.ValueInfoProto) -> bool:
    return bool(value.type.tensor_type.elem_type == TensorProto.FLOAT)


def with_loss(model: ModelProto, output: str) -> None:
    """Let a model give Σ y² as its only output."""
    nodes = [helper.make_node("Mul", [output, output], ["squares"])]
    nodes.append(helper.make_node("ReduceSum", ["squares"], [LOSS], keepdims=0))
    model.graph.node.extend(nodes)
    del model.graph.output[:]
    model.graph.output.append(helper.make_tensor_value_info(LOSS, TensorProto.FLOAT, []))


def _differences(model: bytes, feeds: dict[str, Any], gradients: dict[str, Any]) -> str:
    """Compare with central differences in one direction, at several distances."""
    rng = np.random.default_rng(0)
    way = {name: rng.standard_normal(g.shape).astype(g.dtype) for name, g in gradients.items()}
    slope = sum(float(np.sum(way[name] * g, dtype=np.float64)) for name, g in gradients.items())
    seen = []
    for step in (1e-1, 1e-2, 1e-3, 3e-4):
        ends = []
        for sign in (1, -1):
            moved = {n: x + np.float32(sign * step) * way[n] for n, x in feeds.items() if n in way}
            try:
                ends.append(float(run(model, [*(feeds | moved).values()], optimize=False)[0]))
            except BrokenError as error:
                return f"not checked: {error}"
        seen.append((ends[0] - ends[1]) / (2 * step))
        near = 0.02 * max(abs(slope), abs(seen[-1])) + 3e-4 * abs(ends[0]) + 1e-6
        if not np.isfinite(seen[-1]) or abs(seen[-1] - slope) < near:
            return "yes"
    return f"wrong: {slope:.5g} where differences give {', '.join(f'{x:.5g}' for x in seen)}"
