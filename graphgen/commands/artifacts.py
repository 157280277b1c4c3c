"""The command `artifacts`."""

import argparse
import re
from collections.abc import Callable
from typing import Any

import graphgen as gg
from graphgen.commands.options import (
    FILE,
    FLAG,
    NUMBERS,
    OUT,
    N,
    keywords,
    numbers,
    print_json,
    show,
    written,
)

EXAMPLE = "decoder.onnx -o art --loss cross_entropy --clip-norm 1"


def run(options: argparse.Namespace) -> None:
    """Write the four training artifacts of a model."""
    from dataclasses import fields

    from graphgen.export.optimizers import Group, named
    from graphgen.export.weights import Weights
    from graphgen.passes.training.dropouts import read_rates

    settings = {f.name for kind in (gg.AdamW, gg.SGD) for f in fields(kind)}
    losses = options.loss or ["cross_entropy"]
    own = {
        "loss": losses[0] if len(losses) == 1 else losses,
        "optimizer": named(
            options.optimizer,
            groups=tuple(map(Group.read, options.group)),
            **{name: getattr(options, name) for name in settings - {"groups"}},
        ),
        "dropout": None if options.dropout is None else read_rates(options.dropout),
        "recompute": options.recompute or ("none" if options.memory is None else "auto"),
        "dims": numbers("--dim", options.dim),
    }
    found = gg.artifacts(options.model, options.directory, **keywords(gg.artifacts, options) | own)
    folders = [options.directory]
    if options.web is not None:
        from graphgen.train.web import write_web

        write_web(options.directory, options.web)
        folders.append(options.web)
    files = {str(folder): sorted(file.name for file in folder.iterdir()) for folder in folders}
    if options.json:
        weights = [weight._asdict() for weight in found]
        print_json({"graphgen": gg.__version__, "files": files, "weights": weights})
        return
    listed = Weights(w for w in found if w.why not in ("a constant", "only float32 is trained"))
    show(listed.table())
    if len(listed) < len(found):
        print(f"and {len(found) - len(listed)} constants")
    for folder, names in files.items():
        print(f"{folder}: {', '.join(names)}")


def _memory(text: str) -> int:
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?(?:([kKMGT])(i?))?B?", text)
    if found is None:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a size such as 1GiB, 800MB or 1073741824"
        )
    number, prefix, binary = found.groups()
    power = " KMGT".index((prefix or " ").upper())
    return int(float(number) * (1024 if binary else 1000) ** power)


def add_options(add: Callable[..., Any]) -> None:
    """Add the options of `artifacts`."""
    add("model", **FILE, help="an ONNX file, or a folder of build")
    add(
        "-o",
        dest="directory",
        required=True,
        type=written,
        metavar="DIR",
        help="the folder to write",
    )
    add(
        "--loss",
        action="append",
        metavar="NAME[:OPTION=VALUE,...]",
        help="cross_entropy (the default), binary_cross_entropy, mse, l1, huber, smooth_l1, or a "
        "scalar output; cross_entropy:axis=1,weight=1/2/0.5 has options of gg.Loss; repeat --loss "
        "for a sum: --loss cross_entropy:output=kinds --loss "
        "l1:output=boxes,labels=boxes_given,factor=0.5",
    )
    add("--optimizer", default="adamw", choices=("adamw", "adam", "sgd"), help="(adamw)")
    add("--weight-decay", type=float, help="of AdamW (0.01), or of SGD (0)")
    add(
        "--no-decay",
        metavar="REGEX",
        help="parameters without weight decay (needs --profile stock)",
    )
    add("--momentum", type=float, help="of SGD (0; needs --profile stock)")
    add("--nesterov", help="let SGD's momentum look ahead", **FLAG)
    add(
        "--group",
        action="append",
        default=[],
        metavar="REGEX:rate=X,weight_decay=Y",
        help="parameters whose learning rate is multiplied by X, or with another decay; repeatable "
        "(needs --profile stock)",
    )
    add("--betas", type=float, nargs=2, metavar="BETA", help="of Adam and AdamW (0.9 0.999)")
    add("--epsilon", type=float, help="of Adam and AdamW (1e-8)")
    add("--clip-norm", type=float, help="the largest norm of all gradients together")
    add("--output", metavar="NAME", help="the output to train")
    names: dict[str, Any] = {"action": "append", "metavar": "REGEX"}
    add("--trainable", help="which parameters to train, by a pattern or a whole name", **names)
    add("--frozen", help="which of them not to train", **names)
    add(
        "--lora",
        metavar="PATTERN:RANK[,OPTION=VALUE,...]|PATH",
        help="train adapters of these modules: 'query|value:8', or "
        "'query|value:8,alpha=16,dropout=0.1,rank_stabilized=true,dora=true,seed=0'; or go on with "
        "the adapter of a run, or of PEFT",
    )
    bits = "keep frozen weights of products, and tables, in few bits (QLoRA)"
    add("--base", choices=("int8", "int4"), help=bits)
    add("--label-smoothing", type=float, default=0.0, help="of cross_entropy (0)")
    add("--z-loss", type=float, default=0.0, help="of cross_entropy, such as 1e-4 (0)")
    add(
        "--dropout",
        action="append",
        metavar="[PATTERN:]RATE",
        help="where a module of torch has dropout: a rate, 'attention:0.1', or 'declared'",
    )
    add("--documents", help="let attention_mask number the documents of a row", **FLAG)
    further = "outputs that the evaluation returns beside the loss, for metrics"
    add("--outputs", nargs="+", default=[], metavar="NAME", help=further)
    add("--accumulate", default=1, help="batches per update (1)", **N)
    add(
        "--profile",
        default="official",
        choices=("official", "stock"),
        help="use operators of onnxruntime-training 1.19.2, or all of the installed runtime's",
    )
    again = "in the backward pass: less memory, more time (auto with --memory, else none)"
    add("--recompute", choices=("none", "full", "auto"), help=again)
    most = "the most that training may take, at the --dim sizes"
    add("--memory", type=_memory, metavar="1GiB", help=most)
    add("--dim", help="the size of a symbolic dimension, for counting memory", **NUMBERS)
    javascript = "also write what onnxruntime-web and onnxruntime-node train from"
    add("--web", type=written, metavar="DIR", help=javascript)
    add("--verify", help="check every rewrite by running both sides", **FLAG)
    add("--stop-after", help="apply only the first N rewrites", **N)
    add("--report", help="write what docs/report.schema.json describes, not into the folder", **OUT)
    add("--json", help="print what docs/artifacts.schema.json describes", **FLAG)
    add(
        "--dtype",
        default="fp32",
        choices=("fp32", "fp16", "bf16"),
        help="of matrix products; half precision needs CUDA and --profile stock",
    )
