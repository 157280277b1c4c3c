"""The command `compare`: the report of a model, in the terminal and in files, and gates on it."""

import json
from argparse import SUPPRESS, Namespace
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import graphgen as gg
from graphgen.commands.options import (
    ARRAYS,
    FILE,
    FLAG,
    MODEL,
    NUMBERS,
    OUT,
    OWN,
    N,
    keywords,
    numbers,
    provider,
    share,
)
from graphgen.errors import GateError, GraphgenError

PROVIDERS: dict[str, Any] = {"type": provider, "nargs": "+", "action": "extend", "default": []}
PROVIDERS |= {"metavar": "NAME", "help": "also count nodes, copies and errors on other providers"}

EXAMPLE = """bert.onnx --dim batch=1 --dim seq=128 --html report.html
  graphgen compare old.onnx --against new.onnx --fail-if-slower 3% --fail-if-differs 1e-5
  graphgen compare llama --against llama-int4 --text held-out.txt"""


def run(options: Namespace) -> None:
    """Measure what each pass does, what time it saves, and what it costs."""
    if options.text is not None:
        _on_text(options)
        return
    for option in ("fail_if_worse", "fail_if_diverges"):
        if getattr(options, option) is not None:
            raise GraphgenError(f"--{option.replace('_', '-')} needs --text; add that option")
    from graphgen.export.arrays import feeds
    from graphgen.laboratory.report import markdown, place
    from graphgen.passes import words_of

    expect = numbers("--expect", options.expect)
    for word in expect:
        words_of(word)  # so that an unknown word fails before any work is done
    if expect and options.against is not None:
        raise GraphgenError("--expect counts what passes fuse: leave it out, or --against")
    forms = {".html": options.html, ".json": options.json}
    with ExitStack() as stack:
        places = [place(path, form) for form, path in forms.items() if path is not None]
        writers = [stack.enter_context(context) for context in places]
        given: dict[str, Any] = keywords(gg.compare, options)
        given["providers"] = options.provider
        given["dims"] = numbers("--dim", options.dim)
        found = gg.compare(options.model, **given, inputs=feeds(options.input), progress=True)
        for write in writers:
            write(found.to_json(), found.stages, of=found)
    print(markdown(found.to_json()) if options.markdown else found)
    if not found.complete:
        raise KeyboardInterrupt
    if failures := found.failures(options.fail_if_slower, options.fail_if_differs, expect):
        raise GateError("; ".join(failures))


def _on_text(options: Namespace) -> None:
    """Print how far two folders differ on a text, or on rows with labels or answers."""
    from graphgen.batch.scores import Scores, scores
    from graphgen.export.write import replacing
    from graphgen.generation.quality import Quality, of_text

    rows = options.text.suffix == ".jsonl"
    used = {"model", "against", "text", "threads", "target", "json", "fail_if_worse"}
    used |= set() if rows else {"fail_if_diverges"}
    defaults = {action.dest: action.default for action in options.actions}
    for name, default in defaults.items():
        if name not in used and getattr(options, name, default) != default:
            option = name.replace("_", "-")
            given = f"--text {options.text.name}" if rows else "--text"
            raise GraphgenError(f"compare: --{option} has no effect with {given}; leave it out")
    if options.against is None or not all(map(Path.is_dir, (options.model, options.against))):
        raise GraphgenError("compare: --text is for two folders of decoders: DIR --against DIR")
    folders = (options.model, options.against)
    found = (scores if rows else of_text)(*folders, options.text, threads=options.threads)
    if options.json is not None:
        document = {"graphgen": gg.__version__, "kind": getattr(found, "kind", "text")}
        text = json.dumps(document | asdict(found), indent=2, allow_nan=False) + "\n"
        with replacing("compare", options.json) as [file]:
            file.write_text(text, encoding="utf-8")
    print(found)
    failures = []
    most = options.fail_if_worse
    if (
        most is not None
        and isinstance(found, Quality)
        and not found.after <= found.before * (1 + most)
    ):
        rise = found.after / found.before - 1
        failures.append(f"perplexity rises by {rise:.2%}, more than {most:.2%}")
    if most is not None and isinstance(found, Scores) and not found.after >= found.before - most:
        fall = found.before - found.after
        failures.append(f"{fall:.2%} fewer rows are right, more than {most:.2%}")
    most = options.fail_if_diverges
    if most is not None and isinstance(found, Quality) and not found.divergence <= most:
        failures.append(f"the divergence is {found.divergence:.3g} nats, more than {most:.3g}")
    if failures:
        raise GateError("; ".join(failures))


def add_options(add: Callable[..., Any]) -> None:
    """Add the options of `compare`."""
    add("model", **MODEL)
    add("--target", default="cpu", choices=("cpu", "cuda"), help="where it runs (cpu)")
    add("--dim", help="the size of a symbolic dimension for the runs", **NUMBERS)
    add("--input", **ARRAYS)
    passes = "the pipeline, in order (that of optimize)"
    add("--passes", nargs="+", default=SUPPRESS, metavar="PASS", help=passes)
    add("--with", **OWN)
    add("--against", help="compare with this file, not with what the passes make", **FILE)
    text = "two folders on a text (perplexity, divergence), or on rows with answers: FILE.jsonl"
    add("--text", help=text, **FILE)
    names = ("cumulative", "leave_one_out", "only", "runtime", "other")
    kinds = f"rows in addition to the baseline and the whole pipeline: {', '.join(names)} (all; "
    kinds += "none if you name none)"
    add("--kinds", nargs="*", choices=names, metavar="KIND", help=kinds)
    add("--provider", **PROVIDERS)
    add("--json", help="write what docs/compare.schema.json describes", **OUT)
    add("--html", help="write the report as an HTML page", **OUT)
    add("--markdown", help="print tables as GitHub shows them", **FLAG)
    add("--seconds", type=float, default=30.0, help="for all measurements together (30)")
    add("--threads", help="of each session (the runtime's default)", **N)
    slower = "fail with 3 if the pipeline, or the other file, is slower than the baseline by more"
    add("--fail-if-slower", type=share, metavar="3%", help=slower)
    differs = "fail with 3 if its relative RMS error is larger"
    add("--fail-if-differs", type=share, metavar="1e-5", help=differs)
    worse = (
        "with --text: fail with 3 if perplexity rises, or the share of right rows falls, by more"
    )
    add("--fail-if-worse", type=share, metavar="1%", help=worse)
    apart = "with --text: fail with 3 if the divergence is larger, in nats"
    add("--fail-if-diverges", type=share, metavar="0.01", help=apart)
    add("--expect", help="fail with 3 if fewer are fused: attention, norm, gelu, ...", **NUMBERS)
