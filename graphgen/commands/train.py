"""The command `train`."""

import argparse
import contextlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import graphgen as gg
from graphgen.commands.options import (
    ANEW,
    FILE,
    FLAG,
    PROVIDER,
    STRICT,
    N,
    count,
    keywords,
    print_json,
    show,
    written,
)
from graphgen.errors import GraphgenError

EXAMPLE = "art --data a.npz --steps 1000 --warmup 100 --checkpoint runs/a"


def run(options: argparse.Namespace) -> None:
    """Train from a folder of artifacts, which says with which optimizer."""
    from graphgen.train.batches import length
    from graphgen.train.callbacks import log_for
    from graphgen.train.metrics import read_metric
    from graphgen.train.parallel import processes
    from graphgen.train.run import evaluations, plot
    from graphgen.train.schedule import named

    if (options.model is None) != (options.output is None):
        raise GraphgenError("--model and -o write the trained model together; give both or neither")
    _check(options)
    together = processes()
    own: dict[str, Any] = {"processes": together, "schedule": None}
    trainer = gg.Trainer(options.directory, **keywords(gg.Trainer, options) | own)
    data, held_out = _read(options, trainer, shown=not together.rank and not options.json)
    if options.find_rate is not None:
        curve = trainer.find_rate(data)
        curve.plot(options.find_rate)
        print(f"{options.find_rate}: the loss fell fastest at --lr {curve.suggestion:.2g}")
        return
    steps = options.steps
    if steps == 0:
        raise GraphgenError("--steps is 0: nothing would be trained; give at least 1")
    if steps is None and (count := length(data)) is not None:
        steps = -(-count // trainer.accumulate)
    own = {"rate": options.lr, "steps": steps}
    trainer.schedule = named(options.schedule, **keywords(named, options) | own)
    if options.resume_at is not None:
        options.resume = options.resume_at
    own = {
        "evaluate": held_out,
        "evaluate_every": options.eval_every,
        "progress": sys.stdout is not None and sys.stdout.isatty() and not options.json,
        "steps": steps,
        "metrics": options.metric,
        "callbacks": [log_for(kind, options.checkpoint) for kind in options.log],
    }
    history = trainer.fit(data, **keywords(trainer.fit, options) | own)
    if together.rank:
        return  # only the first process writes and prints
    if options.checkpoint is not None and history:
        with contextlib.suppress(ImportError):
            plot(history, options.checkpoint / "loss.png")
    if options.output is not None:
        trainer.export(options.model, options.output)
    if options.json:
        reports = {"data": trainer.plan["data"]} if "data" in trainer.plan else {}
        print_json({"graphgen": gg.__version__, **reports, "steps": history})
    else:
        show(evaluations(history, [read_metric(given) for given in options.metric]))
        print(f"step {trainer.step}" + (f": loss {history[-1]['loss']:.4f}" if history else ""))


_TRIES = """
directory data tokenizer columns max_length pack whole eos stride by_length pad find_rate batch
accumulate seed threads provider strict
""".split()
"""What --find-rate reads."""


_OF_TEXTS = ("max_length", "pack", "whole", "eos", "stride")


def _check(options: argparse.Namespace) -> None:
    """Raise GraphgenError for a schedule that is none, and an option that would do nothing."""
    from graphgen.train.schedule import parsed

    parsed(options.schedule)
    defaults = {action.dest: action.default for action in options.actions}
    given = [name for name in defaults if getattr(options, name) != defaults[name]]
    others = [name for name in given if name not in _TRIES]
    if options.find_rate is not None and others:
        option = others[0].replace("_", "-")
        raise GraphgenError(f"--{option} has no effect with --find-rate, which only tries rates")
    if "save_every" in given and options.checkpoint is None:
        raise GraphgenError("--save-every needs --checkpoint; add that option")
    if options.resume_at == 0:
        raise GraphgenError("--resume-at is 0; give the step of a state that --keep has kept")


def _columns(given: list[str]) -> dict[str, str]:
    """{"text": "review"} of "text=review"."""
    pairs = [text.partition("=") for text in given]
    found = {name: column for name, _, column in pairs if name and column}
    if len({*found.values()}) < len(given):
        raise GraphgenError(f"--columns {' '.join(given)}: give NAME=COLUMN, each of them once")
    return found


def _read(options: argparse.Namespace, trainer: "gg.Trainer", *, shown: bool) -> tuple[Any, Any]:
    """The batches of `--data` and `--eval`; the plan keeps what was cut of texts."""
    from dataclasses import asdict

    from graphgen.train.samples import table
    from graphgen.train.sources import read
    from graphgen.train.texts import texts_for

    how = {name: vars(options)[name] for name in _OF_TEXTS}
    texts = texts_for(trainer, options.directory, options.tokenizer, **how)
    found: dict[str, Any] = {"batch": options.batch, "pad": options.pad}
    found |= {"by_length": options.by_length, "texts": texts}
    found["columns"] = _columns(options.columns)
    data = read(options.data, trainer.inputs, seed=options.seed, **found)
    held_out = None
    if options.eval is not None:
        held_out = read(options.eval, trainer.inputs, seed=None, option="--eval", **found)
    own = ("tokenizer", *_OF_TEXTS)
    useless = [] if texts is None or texts.reports else [x for x in own if vars(options)[x]]
    if useless:
        option = useless[0].replace("_", "-")
        raise GraphgenError(f"--{option} is for texts, and --data has numbers; leave it out")
    if texts is not None and texts.reports:
        texts.check(trainer, data)
        trainer.plan["data"] = [asdict(report) for report in texts.reports]
        if shown:
            show(table(texts.reports))
    return data, held_out


_CURVES = (
    "after the warm-up: cosine (the default, down to 0), linear, polynomial, constant, "
    "inverse_sqrt, noam or warmup_stable_decay; options as in cosine:cycles=3,final=1e-5"
)


def add_options(add: Callable[..., Any]) -> None:
    """Add the options of `train`."""
    data = "FILE.npz (arrays, samples first), .jsonl, .csv, .tsv, .parquet, .arrow, "
    data += "a folder of datasets"
    add("directory", type=Path, metavar="DIR", help="what `graphgen artifacts` wrote")
    add("--data", required=True, help=f"{data} or module:function (which returns batches)")
    add(
        "--tokenizer",
        type=Path,
        metavar="DIR",
        help="for rows of texts: a folder with tokenizer.json (that of the artifacts)",
    )
    add(
        "--columns",
        nargs="+",
        default=[],
        metavar="NAME=COLUMN",
        help="columns of a table with other names: text=review label=stars",
    )
    add("--max-length", help="cut texts to N tokens (the model's context)", **N)
    add("--pack", help="texts share rows of N tokens (see `artifacts --documents`)", **N)
    add("--whole", help="learn prompts and what others than the assistant say, too", **FLAG)
    add("--stride", help="the tokens that windows of a long context share (128)", **N)
    add("--eos", help="put the eos_token at the end of each `text`, too", **FLAG)
    add("--by-length", help="make batches of samples of similar length", **FLAG)
    add("--pad", help="pad shorter lists with 0, labels with -100", **FLAG)
    add("--steps", help="updates in all (once through the data)", **N)
    add("--schedule", default="cosine", metavar="NAME[:OPTION=VALUE,...]", help=_CURVES)
    add("--lr", type=float, help="the highest learning rate (0.0003); noam has none")
    picture = "only try rates from 1e-7 to 1 in 100 steps: draw the losses, and suggest a --lr"
    add("--find-rate", type=written, metavar="FILE.png", help=picture)
    add("--warmup", default=0, help="steps up to the highest learning rate (0)", **N)
    add("--features", help="the model's width, for noam", **N)
    add("--batch", help="samples in a batch from a file (8)", **N)
    add("--accumulate", help="batches per update (as the artifacts say)", **N)
    add("--ema", type=float, help="evaluate and export a moving average of the weights, as 0.999")
    add("--eval", metavar="DATA", help="held-out data, by which the best is kept")
    add("--eval-every", help="evaluate every N steps, not only at the end", **N)
    metric = "at each evaluation: accuracy, f1, matthews, mse, mae, pearson, perplexity (of an "
    metric += "output, if there are several), or a function of predictions and labels; repeatable"
    how = {"action": "append", "default": [], "metavar": "NAME[:OUTPUT]|module:function"}
    add("--metric", **how, help=metric)
    add("--best", default="loss", metavar="NAME", help="the metric of the best evaluation (loss)")
    add("--patience", help="stop after N evaluations that were not better than the best", **N)
    add("--seed", type=count, default=0, help="of the batches' order and of dropout")
    add("--threads", help="of the runtime (its default)", **N)
    add("--provider", **PROVIDER)
    add("--strict", **STRICT)
    add("--checkpoint", type=Path, metavar="DIR", help="the run's state, metrics and loss.png")
    add("--save-every", default=100, help="save the state every N steps (100)", **N)
    add("--keep", default=0, help="keep the last N states, too, as step-.../checkpoint (0)", **N)
    add("--resume", help="continue the run in --checkpoint", **FLAG)
    add("--resume-at", help="continue it from the kept state of step N, and forget the rest", **N)
    kinds = ("csv", "tensorboard", "wandb")
    log = "also log to metrics.csv or tensorboard/ in --checkpoint, or to wandb"
    add("--log", nargs="+", choices=kinds, default=[], metavar="KIND", help=log)
    names = (
        "data",
        "evaluation",
        "optimizer",
        "schedule",
        "accumulate",
        "ema",
        "seed",
        "loss",
        "model",
    )
    changes = f"what may differ from the resumed run: {', '.join(names)}"
    add("--allow-changes", nargs="+", choices=names, default=[], metavar="WHAT", help=changes)
    add("--model", help="the inference model, to be written with the last weights", **FILE)
    add("-o", "--output", **ANEW)
    add("--json", help="print what docs/train.schema.json describes", **FLAG)
