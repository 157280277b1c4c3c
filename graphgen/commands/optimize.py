"""The command `optimize`."""

import argparse
import json
from collections.abc import Callable
from typing import Any

import graphgen as gg
from graphgen.commands.options import (
    ANEW,
    FLAG,
    MODEL,
    NUMBERS,
    OUT,
    OWN,
    PROCESSOR,
    RUNTIME,
    TARGET,
    N,
    doing,
    keywords,
    numbers,
    print_json,
    show,
    written,
)
from graphgen.errors import GateError

EXAMPLE = "decoder.onnx -o fast.onnx --target cpu --report report.json"


def run(options: argparse.Namespace) -> None:
    """Fuse a model for a target, and report what every pass did."""
    from graphgen.export.write import replacing
    from graphgen.measure.feeds import at_sizes
    from graphgen.passes import word_of, words_of

    expect = numbers("--expect", options.expect)
    for word in expect:
        words_of(word)  # so that an unknown word fails before any work is done
    how: dict[str, Any] = keywords(gg.optimize, options) | {"expect": None}  # checked below
    with doing(f"optimizing {options.model} for {options.target}"):
        best = gg.optimize(at_sizes(gg.load(options.model), numbers("--dim", options.dim)), **how)
        report, unmet = best.report.to_json(), best.report.unmet(expect)
        with replacing("output", *filter(None, [options.report])) as files:
            for file in files:
                file.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
            if not unmet:
                gg.export(best, options.output)
    if unmet:
        raise GateError(f"{options.output} is not written: {'; '.join(unmet)}")
    if options.json:
        print_json(report)
        return
    show(best.report.table())
    for remark in best.report.remarks():
        print(remark)
    for name, (whole, declared) in best.report.whole().items():
        why = best.report.reasons([word_of(name)], inlined=True)
        if whole < declared:
            print(f"{name}: {whole} of {declared}" + (f" ({'; '.join(why)})" if why else ""))
    print(f"{options.output}: {'; '.join(best.report.conclusion())}")


def add_options(add: Callable[..., Any]) -> None:
    """Add the options of `optimize`."""
    add("model", **MODEL)
    add("-o", "--output", required=True, **ANEW)
    add("--target", **TARGET)
    add("--runtime", **RUNTIME)
    add("--processor", **PROCESSOR)
    add("--expect", help="fail with 3 if fewer are fused: attention, norm, gelu, ...", **NUMBERS)
    add("--report", help="write what docs/report.schema.json describes", **OUT)
    add("--dim", help="fix a symbolic dimension", **NUMBERS)
    add("--verify", help="check every rewrite by running both sides", **FLAG)
    repros = "write a minimal model of every site that differs"
    add("--repros", type=written, metavar="DIR", help=repros)
    add("--stop-after", help="apply only the first N rewrites", **N)
    add("--strict-masked-rows", help="keep what the file gives for fully masked rows", **FLAG)
    add("--with", **OWN)
    add("--json", help="print the report", **FLAG)
