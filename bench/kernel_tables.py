"""Which kernels does an ONNX Runtime release have: one compact JSON table per provider.

A table answers, without a GPU and without that release installed, whether a kernel exists for
(provider, domain, operator, opset, element types). Its shape:

    {"provider": "CUDAExecutionProvider", "runtime": "1.31.1", "source": "...",
     "kernels": {domain: {operator: [[first, last, {parameter: [dtype, ...]}], ...]}}}

An entry serves a node whose schema's since-version (Add at opset 21: 14) lies in first..last; with
`null` for last it serves `first` alone, because the runtime refuses an open-ended kernel for a
schema newer than the kernel. A parameter is a `type_str` of the operator's schema ("T", "T1"), or
an input's name where the schema fixes its type; it admits the listed element types ("float" is
`tensor(float)`), and a parameter that is not listed is unconstrained. An entry admits the whole
product of its lists: kernels are merged only where they differ in one parameter.

    python bench/kernel_tables.py --provider CPU --output graphgen/kernels_cpu.json
    python bench/kernel_tables.py --provider CUDA --markdown OperatorKernels.md --runtime 1.31.1
"""

import argparse
import json
import os
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from graphgen.errors import GraphgenError

DOMAINS = ("", "com.microsoft")
OPEN_END = 2**31 - 1  # how the runtime spells "and every later version"

Types = dict[str, frozenset[str]]
Table = dict[str, Any]


class Kernel(NamedTuple):
    """One registered kernel: its operator, its since-version range and its element types."""

    domain: str
    operator: str
    first: int
    last: int | None
    types: Types


def element_type(text: str) -> str:
    """`tensor(float)` -> `float`; other kinds keep their wrapper: `seq(float)`."""
    return re.sub(r"\btensor\((\w+)\)", r"\1", text)


def installed_kernels(provider: str) -> tuple[str, list[Kernel]]:
    """The installed runtime's version and its kernels for `provider`.

    The CUDA build loads its provider library to answer, so it needs a GPU and the CUDA libraries.
    """
    try:
        import onnxruntime
        from onnxruntime.capi import onnxruntime_pybind11_state as state
    except ImportError as error:
        raise GraphgenError(
            "kernel_tables: onnxruntime is not installed; install onnxruntime or onnxruntime-gpu, "
            "or pass --markdown"
        ) from error
    kernels = []
    for definition in state.get_all_opkernel_def():
        if definition.provider != provider:
            continue
        first, last = definition.version_range
        types = {
            parameter: frozenset(map(element_type, names))
            for parameter, names in definition.type_constraints.items()
        }
        kernels.append(
            Kernel(
                definition.domain,
                definition.op_name,
                first,
                None if last == OPEN_END else last,
                types,
            )
        )
    return str(onnxruntime.__version__), kernels


def documented_kernels(text: str, provider: str) -> Iterator[Kernel]:
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
            parameter: frozenset(element_type(name) for name in names.split(", "))
            for parameter, names in re.findall(r"\*\*(\w+)\*\* = ([^<]+)", row[6])
        }
        yield Kernel(domain, operator, first, last, types)


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


def table(kernels: Iterable[Kernel], *, provider: str, runtime: str, source: str) -> Table:
    """The kernels of `DOMAINS` as the JSON table described above, everything sorted."""
    groups: dict[tuple[str, str, int, int | None], list[Types]] = {}
    for kernel in kernels:
        if kernel.domain in DOMAINS:
            groups.setdefault(kernel[:4], []).append(kernel.types)
    operators: dict[str, dict[str, list[Any]]] = {}
    for (domain, operator, first, last), alternatives in groups.items():
        rows = operators.setdefault(domain, {}).setdefault(operator, [])
        for types in merged(sorted(alternatives, key=_listed_text)):
            rows.append([first, last, _listed(types)])
    return {
        "provider": provider,
        "runtime": runtime,
        "source": source,
        "kernels": {
            domain: {name: sorted(rows, key=_row_order) for name, rows in sorted(by_name.items())}
            for domain, by_name in sorted(operators.items())
        },
    }


def _listed(types: Types) -> dict[str, list[str]]:
    return {parameter: sorted(types[parameter]) for parameter in sorted(types)}


def _row_order(row: list[Any]) -> tuple[int, str]:
    return row[0], json.dumps(row)


def _listed_text(types: Types) -> str:
    return json.dumps(_listed(types))


def dumps(content: Table) -> str:
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


def main(arguments: list[str] | None = None) -> int:
    """Write the table to --output or to standard output."""
    parser = argparse.ArgumentParser(
        description="Write the table of an ONNX Runtime provider's kernels as JSON.",
        epilog="Without --markdown the installed runtime is asked.",
    )
    parser.add_argument("--provider", choices=("CPU", "CUDA"), default="CPU")
    parser.add_argument("--markdown", type=Path, help="docs/OperatorKernels.md of a release")
    parser.add_argument("--runtime", help="that release's version; needed with --markdown")
    parser.add_argument("--output", type=Path, help="the file to write (default: standard output)")
    options = parser.parse_args(arguments)
    if bool(options.markdown) != bool(options.runtime):
        parser.error("--markdown and --runtime go together")
    provider = f"{options.provider}ExecutionProvider"
    kernels: Iterable[Kernel]
    try:
        if options.markdown:
            runtime, source = options.runtime, "docs/OperatorKernels.md"
            kernels = documented_kernels(options.markdown.read_text("utf-8"), provider)
        else:
            runtime, kernels = installed_kernels(provider)
            source = "get_all_opkernel_def()"
        content = table(kernels, provider=provider, runtime=runtime, source=source)
        if not content["kernels"]:
            raise GraphgenError(
                f"kernel_tables: onnxruntime {runtime} has no kernels for {provider}; "
                "ask a build with that provider"
            )
        text = dumps(content)
        if options.output is None:
            sys.stdout.write(text)
        else:
            beside = options.output.with_name(f"{options.output.name}.{os.getpid()}")
            beside.write_text(text, "utf-8")
            beside.replace(options.output)
    except (GraphgenError, OSError, UnicodeDecodeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
