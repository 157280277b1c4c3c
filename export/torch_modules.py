"""Models of torch's modules, exported so that each weight stays what it is, by its own name."""

import contextlib
import inspect
import io
import json
import logging
import tempfile
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import onnx_ir as ir

from graphgen import ops
from graphgen.arguments import checked
from graphgen.edit import identity_of, infer_model, tidy
from graphgen.errors import GraphgenError, near, user_line
from graphgen.export.outputs import SIGNATURE
from graphgen.export.read import load
from graphgen.export.torch_gradients import expect_plain, expect_same_gradients, held_apart
from graphgen.export.torch_results import Call, expect_same, keeps, names_of_results
from graphgen.graph import NAMES_OF, ORIGIN, SCALARS, TORCH_KIND, is_float, present_inputs
from graphgen.op import is_a
from graphgen.passes.training.batch_norms import is_by_batch_alone, is_norm, note, note_as_called
from graphgen.passes.training.dropouts import RATE, in_inference, is_site
from graphgen.passes.training.held import HELD, note_held
from graphgen.places import block_of
from graphgen.traits import Trait, has

_SIZES = 1 << 14  # how many numbers are calculated at most
_NEEDED = "from_torch needs torch 2.6 or newer with its ONNX exporter"


@checked
def from_torch(
    module: Callable[..., Any],
    example_inputs: Any,
    *,
    dynamic_shapes: Any = None,
    input_names: Sequence[str] | None = None,
    output_names: Sequence[str] | None = None,
) -> ir.Model:
    """The model of a `torch.nn.Module`, with all its parameters by their names in torch.

    That is what torch.onnx.export(dynamo=True, optimize=False) writes, read by `gg.load`: nothing
    is folded, renamed or merged. A weight that several modules share has the first of its names.
    Parameters of requires_grad=False are not trained unless they are named, buffers neither.

    Args:
        module: A module. One in training mode keeps dropout, which `artifacts(dropout=True)` takes,
            and artifacts of it have norms of its kind, torch.nn.BatchNorm1d and others, use the
            batch and move their running statistics. In the model itself dropout does nothing, and
            these norms use the running statistics.
        example_inputs: A tensor, a tuple of positional arguments, or a dictionary of keyword
            arguments.
        dynamic_shapes: As for torch.export: which axes may have other sizes, such as
            {"x": {0: "batch"}}, by argument.
        input_names: The inputs' names, by default those of the arguments.
        output_names: The names of the outputs, or of the first of them. By default, what a
            dictionary, a named tuple or a dataclass calls them is theirs, as "logits" and
            "hidden_states.0".

    The module and the model run on the example inputs, and, where sizes are symbolic, at others.

    Raises GraphgenError without torch, with one before 2.6, for norms without running statistics,
    if torch cannot export the module, with torch's own reason, and if the model's outputs are not
    those of the module in evaluation mode.
    """
    torch = _import()
    if not isinstance(module, torch.nn.Module):
        raise GraphgenError(
            f"from_torch: {type(module).__name__} is no torch.nn.Module; give one, or gg.build for "
            f"a module of graphgen{user_line()}"
        )
    if isinstance(module, torch.jit.ScriptModule):
        raise GraphgenError(
            f"from_torch: {type(module).__name__} is TorchScript, which torch.export refuses; "
            f"give the torch.nn.Module that it was scripted or traced from{user_line()}"
        )
    called: Any = module
    positional: tuple[Any, ...] = ()
    keyword: dict[str, Any] = {}
    if isinstance(example_inputs, Mapping):
        keyword = dict(example_inputs)
    elif isinstance(example_inputs, tuple | list):
        positional = tuple(example_inputs)
    else:
        positional = (example_inputs,)
    expect_plain(module)
    how: dict[str, Any] = {
        "dynamo": True,
        "optimize": False,
        "external_data": True,
        "verbose": False,
    }
    if input_names is not None:
        how["input_names"] = [*input_names]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        try:
            with _quiet():
                program = torch.onnx.export(
                    module, positional, path, kwargs=keyword, dynamic_shapes=dynamic_shapes, **how
                )
        except Exception as error:  # each of torch's passes has its own
            raise GraphgenError(
                f"from_torch: torch cannot export {type(module).__name__}: "
                f"{_with_mend(_reason(error))}{user_line()}"
            ) from error
        model = _load(path, program, type(module).__name__)
        _fold_sizes(model)
        _name_outputs(model.graph, output_names or (), names_of_results(program))
        _join(model.graph, held_apart(program, called))
        _name(model, called)
        in_inference(model)
        call = Call(called, positional, keyword)
        expect_same(model, path.with_name("as_read.onnx"), call)
        with _quiet():
            expect_same_gradients(program, call)
    for node in filter(is_site, model.graph):
        rate = getattr(_part(called, block_of(node)), "p", None)
        if isinstance(rate, float | int):
            node.metadata_props.setdefault(RATE, str(float(rate)))
    for node in model.graph.all_nodes():
        if is_norm(node):
            _note_norm(node, called, block_of(node))
        note_held(node, "from_torch")
    return model


def _load(path: Path, program: Any, who: str) -> ir.Model:
    """Read the file; one in which a buffer has two values is not valid."""
    try:
        return load(path)
    except GraphgenError as error:
        changed = [*program.exported_program.graph_signature.buffers_to_mutate.values()]
        if mine := [name for name in changed if f"'{name}'" in str(error)]:
            raise keeps(f"from_torch: {who}", f"changes {mine[0]}, and reads it") from error
        raise


def _note_norm(node: ir.Node, module: Any, path: str) -> None:
    """Let a norm use the batch in training, if its module is in training mode."""
    part = _part(module, path)
    known = hasattr(part, "track_running_stats")
    if not is_by_batch_alone(node) and known and part.training and part.momentum is not None:
        note(node, float(part.momentum), unbiased=True)
    elif not note_as_called(node) and getattr(part, "training", False):
        raise GraphgenError(
            f"from_torch: {path or 'the module'} is in training mode and calls batch_norm itself, "
            "and torch's exporter does not say whether it uses the batch: use "
            f"torch.nn.BatchNorm2d, or call eval(){user_line()}"
        )


def from_function(source: str) -> ir.Model:
    """The model of what `module:function` returns: a module, its inputs, and dynamic shapes if any.

    Raises GraphgenError for what is raised there, and for anything else that is returned.
    """
    from importlib import import_module

    who, (name, _, function) = f"import {source}", source.partition(":")
    try:
        holder = import_module(name)
    except Exception as error:
        raise GraphgenError(f"{who}: {type(error).__name__}: {error}") from error
    call = getattr(holder, function, None)
    if not callable(call):
        raise GraphgenError(
            f"{who}: {name} has no function {function!r}{near(function, vars(holder))}"
        )
    try:
        found = call()
    except Exception as error:
        raise GraphgenError(f"{who}: {type(error).__name__}: {error}") from error
    if not isinstance(found, tuple) or len(found) not in (2, 3):
        raise GraphgenError(
            f"{who} returned {type(found).__name__}; it must return a module and its example "
            "inputs, and may return dynamic shapes: return model, (x,), {'x': {0: 'batch'}}"
        )
    return from_torch(found[0], found[1], dynamic_shapes=found[2] if len(found) > 2 else None)


def _import() -> Any:
    try:
        import torch
        import torch.onnx
    except ImportError as error:
        raise GraphgenError(f"{_NEEDED}: {error}; run `pip install torch`{user_line()}") from error
    if not {"dynamo", "optimize"} <= {*inspect.signature(torch.onnx.export).parameters}:
        raise GraphgenError(
            f"{_NEEDED}, and this is {torch.__version__}; run `pip install --upgrade torch`"
            f"{user_line()}"
        )
    return torch


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without what the exporter prints, warns of and logs: what matters it raises."""
    before = logging.root.manager.disable
    with (
        warnings.catch_warnings(),
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
    ):
        warnings.simplefilter("ignore")
        logging.disable(logging.CRITICAL)
        try:
            yield
        finally:
            logging.disable(before)


def _reason(error: BaseException) -> str:
    """The first line of the innermost cause."""
    while error.__cause__ is not None:
        error = error.__cause__
    line = next((line for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {line.strip()}"


def _with_mend(reason: str) -> str:
    """The reason, and what to do."""
    if "register a pytree" in reason:
        reason, _, _ = reason.partition(". ")
        return (
            f"{reason}: call torch.export.register_dataclass for a dataclass first, and set "
            "config.use_cache = False for a cache of transformers"
        )
    if reason.endswith("object has no attribute 'name'"):
        return f"{reason}; if the module returns numbers or texts, leave them out"
    return f"{reason}; see whether torch.export.export takes it"


def _join(graph: ir.Graph, held: Mapping[str, str]) -> None:
    """Let what torch's exporter took for constants be the parameters that they are."""
    values = graph.initializers
    for constant, name in held.items():
        if constant in values and name in values:
            values[constant].replace_all_uses_with(values[name], replace_graph_outputs=True)
            del values[constant]
        elif constant in values:
            value = values.pop(constant)
            value.name = name
            value.metadata_props[TORCH_KIND] = "PARAMETER"
            values[name] = value


def _name(model: ir.Model, module: Any) -> None:
    """Give each weight the first name that its parameter has in torch, and note the others."""
    graph = model.graph
    every = [*module.named_parameters(remove_duplicate=False)]
    aliases = dict[int, list[str]]()
    for name, parameter in every:
        aliases.setdefault(id(parameter), []).append(name)
    kept, frozen, tied = dict[str, Any](), dict[str, str](), dict[str, list[str]]()
    for name, parameter in every:
        first, *others = aliases[id(parameter)]
        if name in graph.initializers and first not in graph.initializers:
            value = graph.initializers.pop(name)
            value.name = first
            graph.initializers[first] = value
        if first not in graph.initializers:  # no output depends on it
            continue
        kept[first] = weakref.ref(parameter)
        if others:
            tied[first] = others
        if not parameter.requires_grad:
            frozen[first] = "requires_grad=False in torch"
    values = graph.initializers
    constants = [n for n, v in values.items() if is_float(v) and n not in kept]
    frozen |= dict.fromkeys(constants, "a constant in torch")
    buffers = dict.fromkeys((n for n, _ in module.named_buffers()), "a buffer")
    frozen |= {name: what for name, what in buffers.items() if name in graph.initializers}
    model.metadata_props[ORIGIN] = json.dumps({"frozen": frozen, "tied": tied}, sort_keys=True)
    shapes = {name: graph.initializers[name].shape for name in kept}
    if scalars := sorted(n for n, s in shapes.items() if s is not None and not len(s)):
        graph.metadata_props[SCALARS] = json.dumps(scalars)
    graph.meta[NAMES_OF] = partial(_names_of, kept)


def _fold_sizes(model: ir.Model) -> None:
    """Calculate the sizes that are known, and with them the shapes that they decide.

    Floats stay nodes: what is stored beside the weights would be trained as they are. So does what
    is found of weights, such as their signs: training changes it.
    """
    from graphgen.folding import fold_constants  # it takes as long to import as all the rest

    def is_folded(node: ir.Node) -> bool | None:
        sequences = (v is not None and isinstance(v.type, ir.SequenceType) for v in node.inputs)
        floats = any(map(is_float, node.outputs)) and not any(sequences)
        weights = (v.is_initializer() and is_float(v) for v in present_inputs(node))
        changes = any(weights) and not has(node, Trait.SHAPE)
        return False if floats or changes or has(node, Trait.RANDOM) else None

    kept = [n for n in model.graph.all_nodes() if is_a(n, ops.identity) and is_float(n.outputs[0])]
    for node in kept:  # onnxscript leaves out what it knows as an Identity: a dropout, or a detach
        node.domain = HELD
    folded = fold_constants(model, _SIZES, is_folded)
    for node in kept:
        node.domain = ""
    if folded:
        tidy(model)
        infer_model(model)


def _name_outputs(graph: ir.Graph, names: Sequence[str], keys: Sequence[str | None]) -> None:
    """Name the outputs; a value that is returned twice is two, and so is one that is an input.

    Torch's exporter would call the input what it calls the output. Without `names`, those of the
    module do, where no weight or input has them.
    """
    outputs = graph.outputs
    if len({*names}) < len(names) or len(names) > len(outputs):
        raise GraphgenError(
            f"from_torch: output_names is {[*names]}, and there are {len(outputs)} outputs: give "
            f"each a name of its own{user_line()}"
        )
    given: list[str | None] = [*names, *[None] * (len(outputs) - len(names))]
    if len(keys) == len(outputs):
        taken = {*names, *(v.name for v in graph.inputs), *graph.initializers, ""}
        for i in range(len(names), len(outputs)):
            given[i] = keys[i] if keys[i] not in taken else None
            taken.add(keys[i])
    for i, (name, value) in enumerate(zip(given, tuple(outputs), strict=True)):
        if value in outputs[:i] or (name is not None and value.is_graph_input()):
            graph.append(identity_of(value))
            [outputs[i]] = graph[-1].outputs
            outputs[i].name = f"{value.name}_{i}"
    wanted = {name: v for name, v in zip(given, outputs, strict=True) if name is not None}
    made = (value for node in graph.all_nodes() for value in node.outputs)
    for value in (*graph.inputs, *graph.initializers.values(), *made):
        if wanted.get(str(value.name), value) is value:
            continue
        if value.producer() is None:
            raise GraphgenError(
                f"from_torch: output_names has {value.name!r}, and so is a weight or an input "
                f"called; choose another name{user_line()}"
            )
        value.name = f"{value.name}_value"
    signature = graph.meta[SIGNATURE]
    signature |= {n: signature.get(v.name, v.shape) for n, v in wanted.items()}
    for name, value in wanted.items():
        value.name = name


def _names_of(kept: Mapping[str, Any], part: object) -> list[str] | None:
    """The names of the parameters of a module of torch, or of one parameter."""
    own = [part] if not hasattr(part, "parameters") else [*part.parameters()]
    ids = {*map(id, own)}
    return [name for name, parameter in kept.items() if id(parameter()) in ids] or None


def _part(module: Any, path: str) -> Any:
    try:
        return module.get_submodule(path)
    except AttributeError:
        return None
