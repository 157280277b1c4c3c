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
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import onnx
import onnx_ir as ir
from onnx_ir.passes import common

from graphgen.arguments import checked
from graphgen.errors import GraphgenError
from graphgen.export.adapters import LORA, Adapter
from graphgen.export.artifact_files import (
    CHECKPOINT,
    EVAL,
    OPTIMIZER,
    TRAINING,
    replaced,
)
from graphgen.export.checkpoint import Checkpoint
from graphgen.export.chosen import Parts
from graphgen.export.losses import AnyLoss, InputType
from graphgen.export.opset import hide_from_checker, keeps_meaning, stamp
from graphgen.export.optimizers import AdamW, Optimizer
from graphgen.export.precision import Precision
from graphgen.export.prepared import Prepared, Profile
from graphgen.export.trained import BASE
from graphgen.export.weights import Weights
from graphgen.export.write import replacing
from graphgen.files import path_of
from graphgen.graph import ModelLike
from graphgen.passes.training.adapters import LoRA
from graphgen.passes.training.dropouts import Dropout
from graphgen.passes.training.packed import Base
from graphgen.passes.training.recompute import Recompute
from graphgen.places import where_is
from graphgen.targets import Target


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
            trained, and of the model's own weights only those that `trainable` names. An `Adapter`,
            or the path of one, goes on from where its training ended.
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
