"""The four training artifacts of ONNX Runtime, written from a model by our own reverse mode.

- training_model.onnx: from the model's inputs, `labels`, the parameters, for every trainable p a
  `<p>_grad.accumulation.buffer`, and `lazy_reset_grad`, to the loss and, for every trainable p,
  `<p>_grad.accumulation.out`.
- eval_model.onnx: from the model's inputs, `labels` and the parameters to the loss, no dropout.
- optimizer_model.onnx: one update of sequences of parameters, gradients and moments.
- checkpoint: the parameters, trainable and frozen ones separately.

The official runtime 1.19.2 trains those of the profile `official` directly;
`graphgen.train.lower` prepares them for the stock runtime.
"""

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import onnx
import onnx_ir as ir
from onnx_ir.passes import common

from graphgen import ops
from graphgen.arguments import checked
from graphgen.autodiff import backward
from graphgen.display import on_screen
from graphgen.edit import claim, infer_model
from graphgen.errors import GraphgenError, one_of, positive
from graphgen.export.adapters import LORA
from graphgen.export.artifact_files import (
    CHECKPOINT,
    EVAL,
    LOSS,
    OPTIMIZER,
    TRAINING,
    replaced,
)
from graphgen.export.checkpoint import Checkpoint
from graphgen.export.documents import keep_apart
from graphgen.export.inference import evaluated
from graphgen.export.joined import joined
from graphgen.export.losses import AnyLoss, InputType, attach_loss
from graphgen.export.opset import hide_from_checker, keeps_meaning, stamp
from graphgen.export.optimizers import AdamW, Optimizer, check_profile
from graphgen.export.past import without_past
from graphgen.export.precision import DTYPES, LOSS_SCALE, Precision
from graphgen.export.session import model_of
from graphgen.export.trainable import Parts, Weights, choose_trainable
from graphgen.export.trained import BASE
from graphgen.export.write import replacing
from graphgen.files import path_of
from graphgen.graph import ModelLike, count_operators, parameters
from graphgen.match import Engine, Pass, run_passes
from graphgen.op import TABLE, is_a
from graphgen.passes import Report
from graphgen.passes.runs import Memory
from graphgen.passes.training.accumulate import into_buffers, results
from graphgen.passes.training.adapters import LoRA, adapt, trained_whole
from graphgen.passes.training.batch_norms import by_batch, in_evaluation, statistics
from graphgen.passes.training.dropouts import Dropout, put_dropout
from graphgen.passes.training.held import hold
from graphgen.passes.training.lowering import lowering, remove_dropout
from graphgen.passes.training.packed import Base, pack
from graphgen.passes.training.recompute import RECOMPUTE, Recompute, recomputation, step_bytes
from graphgen.passes.verify import compare, compare_models
from graphgen.places import where_is
from graphgen.record import recording
from graphgen.targets import Target, TargetName, target
from graphgen.value import adopt

Profile: TypeAlias = Literal["official", "stock"]

_PROFILES: dict[Profile, TargetName] = {"official": "official", "stock": "cpu"}


@checked
def artifacts(
    model: str | os.PathLike[str] | ModelLike,
    directory: str | os.PathLike[str],
    *,
    loss: AnyLoss = "cross_entropy",
    optimizer: Optimizer | None = None,
    output: str | None = None,
    trainable: Parts | None = None,
    frozen: Parts | None = None,
    lora: LoRA | str | None = None,
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
    verify: bool = False,
    stop_after: int | None = None,
    report: str | os.PathLike[str] | None = None,
    **inputs: InputType,
) -> Weights:
    """Write the four training artifacts of `model` into `directory`; return what is trained.

    That is a `Weight` for each initializer: name, type, whether it is trained, and why not or as
    what.

    Args:
        model: The path of an ONNX file, or of a folder of `graphgen build`, whose encoder and
            decoder become one graph, a model, or an object with one as `.model`.
        directory: Made if missing; the artifacts in it are replaced once the new ones are complete.
        loss: "cross_entropy" of the output, float[..., C], with the input `labels`, int64[...],
            where -100 is ignored; "binary_cross_entropy", "mse", "l1", "huber" or "smooth_l1" of
            the output with `labels` of its shape and dtype; the name of a scalar output that is the
            loss; one of these with options, as `gg.Loss("cross_entropy", axis=1)` or the text
            "cross_entropy:axis=1"; a function in the operators of `gg.ops`, which gets outputs and
            inputs of the model, and new inputs, by the names of its arguments, and returns a
            scalar, or (scalar, weight): for how much a batch counts in a mean over batches, what
            the loss divides its sum by; or a list of several, which are summed.
        optimizer: `AdamW()` by default, or `SGD()`; groups and momentum need the profile "stock".
        output: The output to train; by default the only float one not called present.*.
        trainable: A regular expression, searched in the parameters' names, one whole name, a module
            of what `gg.build` or `gg.from_torch` made the model of, or a list of these; by default
            every float32 parameter that the loss depends on. A pattern that matches running
            statistics or initial states is refused, and so is one that names a part of weights
            that an exporter merged, or a weight that it renamed; a whole name says that it is
            meant.
        frozen: What is not trained of these, given in the same ways.
        lora: Low-rank adapters, `gg.LoRA("query|value", rank=8)` or "query|value:8": they are
            trained, and of the model's own weights only those that `trainable` names.
        base: "int8", with a scale for each row, or "int4", with one for each 64 weights: how
            frozen weights of products are kept (QLoRA, arXiv 2305.14314). Each is restored to
            float32 while a product reads it; tables of rows are int8 in both.
        label_smoothing: s in [0, 1): the target is 1 - s on the label plus s/C on every class.
        z_loss: z of cross-entropy's z · mean((log Σ exp logits)²), over the labels that count,
            which keeps logits small (PaLM, arXiv 2204.02311, uses 1e-4).
        accumulate: Of how many batches the trainer takes the mean gradient for one update; the
            official runtime leaves that to its caller.
        documents: A decoder's `attention_mask` numbers the documents of a row, from 1, and a token
            sees those of its own; 0 stays padding.
        outputs: Outputs of the model that the evaluation returns, too, beside the loss. The
            trainer's metrics can use these, and those that the loss is computed from.
        dropout: Where a graph of another tool drops out in training: "declared" for the rates of
            its modules, a rate for all of them, or rates by patterns of their names, {"attn": 0.1}.
            By default as the file says, which rarely has it switched on. The masks are a function
            of seed and step, as those of `ops.dropout`.
        profile: "official" uses only what the official runtime 1.19.2 has, opset 21 and IR 10;
            "stock" what the installed one has, which may be newer.
        dtype: "fp32"; or "fp16" or "bf16", for products only, on CUDA and in the profile "stock":
            weights, gradients and moments stay float32, and the trainer scales the loss of fp16.
        recompute: What the backward pass calculates again instead of keeping: "none" means only
            activations and norms; "full" all but the residual stream between sublayers, for less
            than half the memory and a sixth more time; "auto" as little of that as fits into
            `memory`, attention weights first, or full without it.
        memory: The bytes that weights, gradients, moments and the step may take together.
        dims: The sizes of the symbolic dimensions for counting memory.
        verify: Compare each site before and after, and recomputation as a whole, with the runtime's
            own optimizations off, which is slow; a site that differs is left as it was.
        stop_after: Apply only the first so many rewrites to the training model, to find one at
            fault; too few leave operators that the profile lacks.
        report: A file outside `directory` for what each pass did to the training model
            (docs/report.schema.json).
        inputs: A dtype with sizes for each new input of a loss that is a function, as for `build`:
            `weights=gg.float32["batch"]`.

    Raises GraphgenError for a loss, output, pattern or weight that cannot be trained, an operator
    without a gradient or that the profile lacks, a directory that cannot be written, and less
    memory than is needed.
    """
    directory = path_of(directory, "artifacts")
    if report is not None:
        report = path_of(report, "artifacts: report")
        folder, place = Path(os.path.realpath(directory)), Path(os.path.realpath(report))
        if place.is_relative_to(folder):
            raise GraphgenError(
                f"artifacts: the report {report} would lie in the folder of the artifacts, which "
                f"holds nothing else; choose a place outside {directory}"
            )
    optimizer = AdamW() if optimizer is None else optimizer
    made = Prepared.of(
        model,
        loss=loss,
        optimizer=optimizer,
        output=output,
        trainable=trainable,
        frozen=frozen,
        lora=lora,
        base=base,
        label_smoothing=label_smoothing,
        z_loss=z_loss,
        accumulate=accumulate,
        documents=documents,
        dropout=dropout,
        outputs=outputs,
        profile=profile,
        dtype=dtype,
        recompute=recompute,
        memory=memory,
        dims=dims,
        **inputs,
    )
    done = made.run(verify=verify, stop_after=stop_after)
    names = [weight.name for weight in made.table if weight.trained]
    others = {name: array for name, array in made.weights.items() if name not in names}
    checkpoint = Checkpoint({name: made.weights[name] for name in names}, others)
    for name, key in (("lora", LORA), ("base", BASE)):
        if name in made.described:
            checkpoint.properties[key] = json.dumps(made.described[name], sort_keys=True)
    with ExitStack() as files:
        if report is not None:  # first, since no artifacts are replaced if it cannot be written
            [beside] = files.enter_context(replacing("artifacts: report", report))
            beside.write_text(json.dumps(done.to_json(), indent=2) + "\n", encoding="utf-8")
        new = files.enter_context(replaced(directory))
        for one, file in ((made.training, TRAINING), (made.evaluation, EVAL)):
            (new / file).write_bytes(_to_bytes(one, made.runtime))
        data = optimizer.official().SerializeToString(deterministic=True)
        (new / OPTIMIZER).write_bytes(data)
        checkpoint.save(new / CHECKPOINT)
    return made.table


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
        lora: LoRA | str | None = None,
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
        one_of("artifacts", Profile, profile=profile)
        one_of("artifacts", Precision, dtype=dtype)
        one_of("artifacts", Recompute, recompute=recompute)
        one_of("artifacts", Base | None, base=base)
        positive("artifacts", accumulate=accumulate)
        half = _half_dtype(dtype, profile)
        runtime = target(_PROFILES[profile] if half is None else "cuda")
        optimizer = AdamW() if optimizer is None else optimizer
        training = _copy(model)
        without_past(training)
        put_dropout(training, dropout)
        in_evaluation(training)
        if documents:
            keep_apart(training)
        all_outputs = [*training.graph.outputs]
        described = attach_loss(
            training, loss, output, inputs, label_smoothing=label_smoothing, z_loss=z_loss
        )
        described |= {"documents": True} if documents else {}
        if accumulate > 1:
            described["accumulate"] = accumulate
        if half is not None:
            described["dtype"] = dtype
        if lora is not None:
            lora = LoRA.read(lora) if isinstance(lora, str) else lora
            described["lora"] = adapt(training, lora, few_bits=base is not None)
        table = choose_trainable(training, trainable, frozen, adapters=lora is not None)
        names = [weight.name for weight in table if weight.trained]
        if lora is not None:
            described["lora"]["saved"] = trained_whole(training, described["lora"], names)
        counts = described.get("weights") or ()
        if found := evaluated(training, all_outputs, outputs, counts):
            described["outputs"] = found
        check_profile(optimizer, names, profile == "official")
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
        hold(training)
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


def _copy(model: str | os.PathLike[str] | ModelLike) -> ir.Model:
    """A copy to work on, without functions: operators of our table, or their nodes inlined."""
    if isinstance(model, (str, os.PathLike)) and Path(model).is_dir():
        model = joined(Path(model))
    result = model_of(model, "artifacts").clone()
    for key in [key for key in result.functions if key[:2] in TABLE]:
        del result.functions[key]
    if result.functions:
        common.InlinePass()(result)
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


def _to_bytes(model: ir.Model, runtime: Target) -> bytes:
    stamp(model)
    opset, newest = model.graph.opset_imports[""], runtime.opset
    ir_version = onnx.helper.find_min_ir_version_for([onnx.helper.make_opsetid("", newest)])
    if opset > newest or model.ir_version > ir_version:
        newer = [n for n in model.graph if not n.domain and not keeps_meaning(n, opset, newest)]
        what = f"{newer[0].op_type} ({where_is(newer[0])})" if newer else "a dtype in it"
        instead = "; profile 'stock' may have it" if runtime.name == "official" else ""
        raise GraphgenError(
            f"artifacts: {what} needs opset {opset} and IR version {model.ir_version}; files for "
            f"{runtime} are limited to {newest} and {ir_version}{instead}"
        )
    common.NameFixPass()(model)  # bodies of a loop and of its gradient begin with the same names
    proto = ir.to_proto(model)
    data: bytes = proto.SerializeToString(deterministic=True)
    hide_from_checker(proto)
    try:
        onnx.checker.check_model(proto)
    except onnx.checker.ValidationError as error:
        reason = " ".join(str(error).split())
        raise GraphgenError(f"artifacts: the model is not valid ONNX: {reason}") from error
    return data


def _array(model: ir.Model, name: str) -> np.ndarray[Any, Any]:
    tensor = model.graph.initializers[name].const_value
    assert tensor is not None
    return tensor.numpy()
