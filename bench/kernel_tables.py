"""Which kernels does an ONNX Runtime release have: one compact JSON table per provider.

A table answers, without a GPU and without those releases installed, whether a kernel exists for
(provider, release, domain, operator, opset, element types). Its shape:

    {"provider": "CPUExecutionProvider", "source": "...", "runtimes": {"1.19.2": 21, ...},
     "kernels": {domain: {operator: [[first, last, {parameter: "dtype ..."}, since, until], ...]}}}

`runtimes` has one release of each minor version, with the newest opset that it reads. An entry
holds from release `since` up to `until`; both are left out if they are the first and the newest
release, and `until` alone if it is the newest. It serves a node whose schema's since-version (Add
at opset 21: 14) lies in first..last; with `null` for last it only serves `first`, because the
runtime refuses an open-ended kernel for a schema newer than the kernel. Kernels that end before
opset 13, the lowest that is written, are left out. A parameter is a `type_str` of the operator's
schema ("T", "T1"), or an input's name where the schema fixes its type; it admits the listed element
types ("float" is `tensor(float)`), and a parameter that is not listed is unconstrained. An entry
admits the whole product of its lists: kernels are merged only where they differ in one parameter.

Each call adds one release to those in the file:

    python bench/kernel_tables.py --output graphgen/targets/kernels_cpu.json
    python bench/kernel_tables.py --release 1.20 --output graphgen/targets/kernels_cpu.json
    python bench/kernel_tables.py --provider CUDA --markdown OperatorKernels.md --release 1.31.1 \
        --opset 27 --output graphgen/targets/kernels_cuda.json
    python bench/kernel_tables.py --plugin webgpu --opset 21 \
        --output graphgen/targets/kernels_webgpu.json

A plugin's table is that of its installed version, on the installed runtime; `--opset` is the newest
that a graph for it should have, if at newer ones it lacks kernels: WebGPU has Cos up to 21.
"""

import argparse
import importlib.metadata
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

from graphgen.errors import GraphgenError
from graphgen.providers import KNOWN
from graphgen.runtime import import_runtime
from graphgen.targets import newest_opset, registered
from graphgen.targets.tables import Kernels, kernels_of, minor, plain

DOMAINS = ("", "com.microsoft")
OLDEST = 13

Types = dict[str, frozenset[str]]
Release = tuple[int, Kernels]
"""The newest opset of a release, and its kernels."""


def documented(text: str, provider: str) -> Kernels:
    """The kernels that the runtime's docs/OperatorKernels.md lists for `provider`.

    The document gives the union of the types of each parameter, so a product read from it can be
    larger than what is registered.
    """
    _, found, section = text.partition(f"## Operators implemented by {provider}\n")
    if not found:
        raise GraphgenError(
            f"kernel_tables: the document has no section 'Operators implemented by {provider}'; "
            "give docs/OperatorKernels.md of an ONNX Runtime release"
        )
    kernels: Kernels = {}
    domain = operator = ""
    for line in section.partition("\n## ")[0].splitlines():
        if heading := re.match(r"\|\*\*Operator Domain:\*\* \*(.+)\*\|", line):
            domain = "" if heading[1] == "ai.onnx" else heading[1]
            continue
        row = re.fullmatch(r"\|([^|]*)\|([^|]*)\|\[?(\d+)(\+|, (\d+)\])?\|(.*)\|", line)
        if not row:
            continue
        operator = row[1] or operator
        first = int(row[3])
        last = None if row[4] == "+" else int(row[5] or first)
        types = {
            parameter: [plain(name) for name in names.split(", ")]
            for parameter, names in re.findall(r"\*\*(\w+)\*\* = ([^<]+)", row[6])
        }
        kernels.setdefault(domain, {}).setdefault(operator, []).append((first, last, types))
    return kernels


def merged(alternatives: Iterable[Types]) -> list[Types]:
    """The same set of admitted type tuples in fewer entries.

    Two entries with the same parameters join when they differ in one of them only:
    {A}×{B} ∪ {A'}×{B} = {A∪A'}×{B}. Any other join would admit tuples that no kernel has.
    """
    entries: list[Types] = []
    for new in alternatives:
        while True:
            for position, old in enumerate(entries):
                if old.keys() != new.keys():
                    continue
                differing = [name for name in new if old[name] != new[name]]
                if len(differing) <= 1:
                    new = new | {name: old[name] | new[name] for name in differing}
                    del entries[position]
                    break
            else:
                entries.append(new)
                break
    return entries


def entries(kernels: Kernels) -> list[tuple[str, ...]]:
    """Domain, operator and the text of each entry, merged, of what the tables are about."""
    result: set[tuple[str, ...]] = set()
    for domain in DOMAINS:
        for operator, rows in kernels.get(domain, {}).items():
            groups: dict[tuple[int, int | None], list[Types]] = {}
            for first, last, types in rows:
                if last is None or last >= OLDEST:
                    sets = {name: frozenset(types[name]) for name in sorted(types)}
                    groups.setdefault((first, last), []).append(sets)
            for span, alternatives in groups.items():
                for types in merged(sorted(alternatives, key=lambda x: str(_written(x)))):
                    result.add((domain, operator, json.dumps([*span, _written(types)])))
    return sorted(result)


def _written(types: Types) -> dict[str, str]:
    return {parameter: " ".join(sorted(types[parameter])) for parameter in sorted(types)}


def table(releases: Mapping[str, Release], *, provider: str, source: str) -> dict[str, Any]:
    """The releases as the JSON table described above, everything sorted."""
    order = sorted(releases, key=minor)
    names = [v.rpartition(".")[0] for v in order]
    present: dict[tuple[str, ...], list[int]] = {}
    for number, version in enumerate(order):
        for entry in entries(releases[version][1]):
            present.setdefault(entry, []).append(number)
    kernels: dict[str, dict[str, list[Any]]] = {}
    by_place = sorted(present, key=lambda e: (*e[:2], json.loads(e[2])[0], e[2]))
    for domain, operator, text in by_place:
        rows = kernels.setdefault(domain, {}).setdefault(operator, [])
        numbers = present[domain, operator, text]
        for _, run in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0]):
            along = [names[number] for _, number in run]
            span = [] if along[0] == names[0] else [along[0]]
            if along[-1] != names[-1]:
                span = [along[0], along[-1]]
            rows.append([*json.loads(text), *span])
    runtimes = {version: releases[version][0] for version in order}
    return {"provider": provider, "source": source, "runtimes": runtimes, "kernels": kernels}


def dumps(content: Mapping[str, Any]) -> str:
    """The table as text: one operator a line, so that a release shows as a readable diff."""
    head = {key: value for key, value in content.items() if key != "kernels"}
    domains = []
    for domain, operators in content["kernels"].items():
        lines = ",\n".join(
            f"{json.dumps(name)}:{json.dumps(rows, separators=(',', ':'))}"
            for name, rows in operators.items()
        )
        domains.append(f"{json.dumps(domain)}:{{\n{lines}}}")
    return json.dumps(head)[:-1] + ',\n"kernels": {' + ",\n".join(domains) + "}}\n"


def read(path: Path | None) -> dict[str, Release]:
    """The releases that a table has; none where there is no file yet."""
    if path is None or not path.exists():
        return {}
    content = json.loads(path.read_text("utf-8"))
    return {v: (opset, kernels_of(content, v)) for v, opset in content["runtimes"].items()}


def ask_another(release: str, arguments: list[str]) -> int:
    """Run this script with another release of the runtime, installed for that one run."""
    with tempfile.TemporaryDirectory() as folder:
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", folder]
        subprocess.run([*pip, f"onnxruntime=={release}.*"], check=True)
        path = os.pathsep.join(filter(None, [folder, *sys.path]))
        command = [sys.executable, __file__, *arguments]
        return subprocess.run(command, env={**os.environ, "PYTHONPATH": path}).returncode


def main(arguments: list[str] | None = None) -> int:
    """Write the table to --output or to standard output."""
    parser = argparse.ArgumentParser(
        description="Put one ONNX Runtime release into the JSON table of a provider's kernels.",
        epilog="Without --release the installed runtime is asked.",
    )
    parser.add_argument("--provider", choices=("CPU", "CUDA"), default="CPU")
    parser.add_argument("--plugin", help="a provider by its name, such as webgpu, instead")
    parser.add_argument("--release", help="another one, such as 1.20, which pip installs for this")
    parser.add_argument("--markdown", type=Path, help="docs/OperatorKernels.md of --release")
    parser.add_argument("--opset", type=int, help="the newest; needed with --markdown or --plugin")
    parser.add_argument("--output", type=Path, help="the file to add to (default: write to stdout)")
    options = parser.parse_args(arguments)
    provider = f"{options.provider}ExecutionProvider"
    try:
        releases = read(options.output)
        if options.plugin:
            from probed_kernels import probed  # beside this file, if it runs as a program

            if not options.opset or options.plugin not in KNOWN:
                parser.error(f"--plugin needs one of {', '.join(KNOWN)}, and --opset")
            provider, package = KNOWN[options.plugin]
            runtime, opset = import_runtime().__version__, options.opset
            source = f"placement by {package} {importlib.metadata.version(package)}"
            kernels = probed(options.plugin, DOMAINS)
        elif options.markdown:
            if not options.release or not options.opset:
                parser.error("--markdown needs --release and --opset")
            runtime, source, opset = options.release, "docs/OperatorKernels.md", options.opset
            kernels = documented(options.markdown.read_text("utf-8"), provider)
        elif options.release:
            output = [] if options.output is None else ["--output", str(options.output)]
            return ask_another(options.release, ["--provider", options.provider, *output])
        else:
            runtime, source, opset = (
                import_runtime().__version__,
                "get_all_opkernel_def()",
                newest_opset(),
            )
            kernels = registered(provider)
        if not kernels:
            raise GraphgenError(
                f"kernel_tables: onnxruntime {runtime} has no kernels for {provider}; "
                "ask a build with that provider"
            )
        others = {v: found for v, found in releases.items() if minor(v) != minor(runtime)}
        content = table({**others, runtime: (opset, kernels)}, provider=provider, source=source)
        text = dumps(content)
        if options.output is None:
            sys.stdout.write(text)
        else:
            beside = options.output.with_name(f"{options.output.name}.{os.getpid()}")
            beside.write_text(text, "utf-8")
            beside.replace(options.output)
    except (GraphgenError, OSError, UnicodeDecodeError, subprocess.CalledProcessError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
