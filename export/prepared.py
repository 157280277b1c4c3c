"""Models of training as they are made of a model: with a loss, gradients and passes to come."""

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import onnx_ir as ir
from onnx_ir.passes import common

from graphgen import ops
from graphgen.arguments import checked
from graphgen.autodiff import backward
from graphgen.display import on_screen
from graphgen.edit import claim, infer_model
from graphgen.errors import GraphgenError, one_of, positive
from graphgen.export.adapters import Adapter
from graphgen.export.artifact_files import LOSS
from graphgen.export.attached import attach
from graphgen.export.chosen import Parts, all_parts
from graphgen.export.documents import keep_apart
from graphgen.export.inference import evaluated
from graphgen.export.joined import joined
from graphgen.export.losses import AnyLoss, InputType, attach_loss
from graphgen.export.optimizers import AdamW, Optimizer, check_profile
from graphgen.export.past import without_past
from graphgen.export.precision import DTYPES, LOSS_SCALE, Precision
from graphgen.export.session import model_of
from graphgen.export.torch_files import expect_projections
from graphgen.export.trainable import choose_trainable
from graphgen.export.weights import Weights
from graphgen.graph import ModelLike, count_operators, parameters
from graphgen.match import Engine, Pass, run_passes
from graphgen.op import TABLE, is_a
from graphgen.passes import Report
from graphgen.passes.runs import Memory
from graphgen.passes.training.accumulate import into_buffers, results
from graphgen.passes.training.adapters import LoRA, trained_whole
from graphgen.passes.training.batch_norms import by_batch, in_evaluation, statistics
from graphgen.passes.training.dropouts import Dropout, put_dropout
from graphgen.passes.training.held import hold
from graphgen.passes.training.lowering import lowering, remove_dropout
from graphgen.passes.training.packed import Base, pack
from graphgen.passes.training.recompute import RECOMPUTE, Recompute, recomputation, step_bytes
from graphgen.passes.verify import compare, compare_models
from graphgen.places import where_is
from graphgen.record import recording
from graphgen.runtime import OPTIONS_KEY
from graphgen.targets import Target, TargetName, target
from graphgen.value import adopt

Profile: TypeAlias = Literal["official", "stock"]

_PROFILES: dict[Profile, TargetName] = {"official": "official", "stock": "cpu"}


@dataclass
class Prepared:
    """A differentiated model, and the passes that make what is written of it.

    The outputs of `training` are the loss and a gradient for each trained weight; `weights` are
    inputs of both models. `graphgen.laboratory.bisect.search` takes `training` and `passes`.
    """

    training: ir.Model
    evaluation: ir.Model
    passes: list[Pass]
    evaluation_passes: list[Pass]
    table: Weights
    weights: dict[str, np.ndarray[Any, Any]]
    runtime: Target
    described: dict[str, Any]
    state: int  # bytes of weights, gradients and moments
    dims: Mapping[str, int]
    outputs: list[str]  # that `evaluation` returns, too

    @on_screen
    def __repr__(self) -> Iterator[str]:
        yield f"Prepared for {self.runtime}: {self.table.summary()}"
        yield from repr(self.training).split("\n")

    @classmethod
    @checked
    def of(
        cls,
        model: str | os.PathLike[str] | ModelLike,
        *,
        loss: AnyLoss = "cross_entropy",
        optimizer: Optimizer | None = None,
        output: str | None = None,
        trainable: Parts | None = None,
        frozen: Parts | None = None,
        lora: LoRA | Adapter | str | None = None,
        base: Base | None = None,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        accumulate: int = 1,
        documents: bool = False,
        dropout: Dropout | None = None,
        outputs: Sequence[str] = (),
        profile: Profile = "official",
        dtype: Precision = "fp32",
        recompute: Recompute = "none",
        memory: int | None = None,
        dims: Mapping[str, int] | None = None,
        **inputs: InputType,
    ) -> "Prepared":
        """What `artifacts` makes of the same arguments, before any pass."""
        _check_words(profile=profile, dtype=dtype, recompute=recompute, base=base)
        positive("artifacts", accumulate=accumulate)
        half = _half_dtype(dtype, profile)
        runtime = target(_PROFILES[profile] if half is None else "cuda")
        optimizer = AdamW() if optimizer is None else optimizer
        training = _to_train(model, dropout, documents=documents)
        all_outputs = [*training.graph.outputs]
        described = attach_loss(
            training, loss, output, inputs, label_smoothing=label_smoothing, z_loss=z_loss
        )
        asked = {"documents": documents, "accumulate": accumulate, "dtype": dtype}
        usual = {"documents": False, "accumulate": 1, "dtype": "fp32"}
        described |= {n: value for n, value in asked.items() if value != usual[n]}
        if lora is not None:
            described["lora"], whole = attach(training, lora, few_bits=base is not None)
            trainable = all_parts(trainable, whole)
        table = choose_trainable(training, trainable, frozen, adapters=lora is not None)
        names = [weight.name for weight in table if weight.trained]
        if lora is not None:
            described["lora"]["saved"] = trained_whole(training, described["lora"], names)
        counts = described.get("weights") or ()
        if found := evaluated(training, all_outputs, outputs, counts):
            described["outputs"] = found
        check_profile(optimizer, names, profile == "official")
        table = table.updated(optimizer)
        rest = [name for name in parameters(training.graph) if name not in names]
        moved = statistics(training)
        if moved:
            _check_statistics(moved, names)
            rest += moved
            table = table.moved(moved)
        if base is not None:
            packed = pack(training, base, rest)
            described["base"] = {name: [*weight] for name, weight in packed.items()}
            table = table.packed({name: weight.scheme for name, weight in packed.items()})
            parts = [part for name, weight in packed.items() for part in weight.names(name)]
            rest = [name for name in rest if name not in packed] + parts
        weights = {name: _array(training, name) for name in (*names, *rest)}
        evaluation = training.clone()
        training.graph.outputs[:] = training.graph.outputs[:1]
        remove_dropout(evaluation)
        for one in (training, evaluation):  # first, since constants are folded
            _weights_to_inputs(one, weights)
        hold(training, names, chosen=trainable is not None or lora is not None)
        if moved:
            described["statistics"] = by_batch(training)
            _check_readers(training, moved, profile)
        _differentiate(training, names, scaled=dtype == "fp16")
        state = (1 + len(optimizer.moments)) * sum(weights[name].nbytes for name in names)
        state += sum(array.nbytes for array in weights.values())
        again = recomputation(weights, recompute, memory=memory, state=state, dims=dims)
        passes = lowering(runtime, half)
        return cls(
            training,
            evaluation,
            [*passes, *again, into_buffers(names)],
            passes,
            table,
            weights,
            runtime,
            described,
            state,
            dims or {},
            [*outputs],
        )

    def run(self, *, verify: bool = False, stop_after: int | None = None) -> Report:
        """Make both models what is written; what each pass did to `training`.

        `verify` and `stop_after` are as for `artifacts`; the official form is always made.
        """
        run_passes(self.evaluation, self.evaluation_passes, Engine())
        [loss, *others] = self.evaluation.graph.outputs
        self.evaluation.graph.outputs[:] = [loss, *(x for x in others if x.name in self.outputs)]
        _check_kernels(self.evaluation, self.runtime)
        engine, [*passes, official] = Engine(stop_after), self.passes
        if verify:
            engine.verify = partial(compare, memory=Memory())
            engine.verify_whole = _compare_results
        done = Report(self.runtime.name, self.runtime.runtime)
        done.ops_before = count_operators(self.training)
        done.passes = run_passes(self.training, passes, engine, partial(self._after, engine))
        engine.stop_after = None
        done.passes += run_passes(self.training, [official], engine)
        done.ops_after = count_operators(self.training)
        described = dict(self.described)
        if "lora" in described:  # the checkpoint has these numbers
            described["lora"] = {n: x for n, x in described["lora"].items() if n != "base"}
        self.training.metadata_props[LOSS] = json.dumps(described, sort_keys=True)
        return done

    def _after(self, engine: Engine, name: str, model: ir.Model) -> None:
        if name == RECOMPUTE:
            self.described["peak_bytes"] = self.state + step_bytes(model, self.dims)
            few = f"; only {engine.applied} rewrites were applied: give a larger stop_after"
            _check_kernels(model, self.runtime, few * engine.stopped)


def _compare_results(name: str, before: ir.Model, after: ir.Model) -> str | None:
    """What differs between the losses and gradients of two training models, or None."""
    return compare_models(name, results(before), results(after))


def _check_words(**given: object) -> None:
    """Raise for an option that is none of its words."""
    words = {"profile": Profile, "dtype": Precision, "recompute": Recompute, "base": Base | None}
    for name, value in given.items():
        one_of("artifacts", words[name], **{name: value})


def _to_train(
    model: str | os.PathLike[str] | ModelLike, dropout: Dropout | None, *, documents: bool
) -> ir.Model:
    """A copy of the model in the form in which it is trained."""
    training = _copy(model)
    expect_projections(training)
    without_past(training)
    put_dropout(training, dropout)
    in_evaluation(training)
    if documents:
        keep_apart(training)
    return training


def _copy(model: str | os.PathLike[str] | ModelLike) -> ir.Model:
    """A copy to work on, without functions: operators of our table, or their nodes inlined."""
    if isinstance(model, (str, os.PathLike)) and Path(model).is_dir():
        model = joined(Path(model))
    result = model_of(model, "artifacts").clone()
    for key in [key for key in result.functions if key[:2] in TABLE]:
        del result.functions[key]
    if result.functions:
        common.InlinePass()(result)
    result.metadata_props.pop(OPTIONS_KEY, None)  # it is of a graph without a loss
    return result


def _check_readers(training: ir.Model, moved: Sequence[str], profile: Profile) -> None:
    """Raise for statistics that the official runtime might move before something reads them."""
    for value in [x for x in training.graph.inputs if x.name in moved] * (profile == "official"):
        others = [use.node for use in value.uses() if not is_a(use.node, ops.add, ops.sub)]
        if others or len(value.uses()) > 2:  # s + (new - s) momentum
            raise GraphgenError(
                f"artifacts: each batch moves {value.name}, which something else reads, too, and "
                "the official runtime might do either first: choose profile='stock' (--profile "
                "stock), or bring the module in evaluation mode"
            )


def _check_statistics(moved: Sequence[str], names: Sequence[str]) -> None:
    if wrong := sorted({*moved} & {*names}):
        raise GraphgenError(
            f"artifacts: {wrong[0]} is moved by each batch, since its norm is in training mode: no "
            "gradient may change it; leave it out of trainable="
        )


def _half_dtype(dtype: Precision, profile: Profile) -> ir.DataType | None:
    if DTYPES[dtype] is not None and profile == "official":
        raise GraphgenError(
            f"artifacts: dtype is {dtype}, which was never tried with the official runtime; choose "
            "profile='stock', or dtype='fp32'"
        )
    return DTYPES[dtype]


def _differentiate(model: ir.Model, names: Sequence[str], *, scaled: bool) -> None:
    graph = model.graph
    inputs = {value.name: value for value in graph.inputs}
    wanted = [inputs[name] for name in names]
    loss = graph.outputs[0]
    if scaled:
        with recording(context=infer_model(model)) as tape:
            factor = tape.input(LOSS_SCALE, ir.DataType.FLOAT, [])
            loss = tape.operand(adopt(loss) * factor)
            graph.extend(tape.nodes)
            graph.inputs.append(factor.value)
            tape.kept = True
        claim(graph, {LOSS_SCALE: factor.value})
    gradients = backward(model, loss, wanted)
    graph.outputs[1:1] = gradients
    claim(graph, {f"{name}_grad": g for name, g in zip(names, gradients, strict=True)})


def _weights_to_inputs(model: ir.Model, names: Iterable[str]) -> None:
    graph = model.graph
    for name in names:
        value = graph.initializers.pop(name)
        value.const_value = None
        if not value.is_graph_input():  # in a file from another tool it may be one already
            graph.inputs.append(value)


def _check_kernels(model: ir.Model, runtime: Target, hint: str = "") -> None:
    """Raise where the runtime lacks an operator."""
    # A session on CUDA runs on the CPU what CUDA has not.
    rest = target("cpu") if runtime.name == "cuda" else runtime
    for node in model.graph.all_nodes():
        if runtime.lacks(node) and (lacking := rest.lacks(node)):
            instead = "; profile 'stock' may have it" if runtime.name == "official" else ""
            raise GraphgenError(f"artifacts: {where_is(node)}: {lacking}{hint or instead}")


def _array(model: ir.Model, name: str) -> np.ndarray[Any, Any]:
    tensor = model.graph.initializers[name].const_value
    assert tensor is not None
    return tensor.numpy()
