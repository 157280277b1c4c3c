"""How long until graphgen can be used: `import graphgen`, its rooms, and `graphgen --help`?

Each program is a process of its own, as the user starts it; all run in turn, with the order swapped
every time, so that the machine's drift affects all equally. The processor's time counts, which
other work on the machine does not change much: imports run on one thread. `--version` and `--help`,
also of a command, may take at most three times as long as `import numpy`; `import graphgen`,
`Session`, and `nn` with `ops` at most 1.3 times as long as importing numpy, onnx_ir and
onnxruntime. Exit 3 if one takes longer. The others are only shown.
"""

import argparse
import json
import platform
import resource
import statistics
import subprocess
import sys

from rich.console import Console
from rich.table import Table

from graphgen.processor import processor

BESIDE = {"numpy": "import numpy", "libraries": "import numpy, onnx_ir, onnxruntime"}
LIMITS: dict[str, tuple[str, float | None]] = {
    "graphgen --version": ("numpy", 3.0),
    "graphgen --help": ("numpy", 3.0),
    "graphgen build --help": ("numpy", 3.0),
    "import graphgen": ("libraries", 1.3),
    "from graphgen import Session": ("libraries", 1.3),
    "from graphgen import nn, ops": ("libraries", 1.3),
    "from graphgen import optimize": ("libraries", None),
    "from graphgen import *": ("libraries", None),
}
"""Programs; what each is compared with, and how many times as long it may take."""


def command(program: str) -> list[str]:
    """The process of a command line, or of a line of Python."""
    name, *arguments = program.split()
    return [sys.executable, *(["-m", name, *arguments] if name == "graphgen" else ["-c", program])]


def used() -> float:
    """Seconds of the processor's time that all finished processes have taken."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def measure(programs: list[str], rounds: int) -> dict[str, float]:
    """Median seconds of the processor's time of each program."""
    times: dict[str, list[float]] = {program: [] for program in programs}
    for turn in range(-1, rounds):
        for program in programs:
            start = used()
            subprocess.run(command(program), check=True, stdout=subprocess.DEVNULL)
            if turn >= 0 or not rounds:  # the first compiles modules and reads files into memory
                times[program].append(used() - start)
        programs.reverse()
    return {program: statistics.median(found) for program, found in times.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15, help="processes of each kind (15)")
    parser.add_argument("--quick", action="store_true", help="four programs once; nothing fails")
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    args = parser.parse_args()
    programs = ["pass", *BESIDE.values(), *[*LIMITS][: 4 if args.quick else None]]
    medians = measure(programs, 0 if args.quick else args.rounds)
    rows = []
    for program, seconds in sorted(medians.items(), key=lambda item: item[1]):
        beside, limit = LIMITS.get(program, (None, None))
        ratio = None if beside is None else seconds / medians[BESIDE[beside]]
        row = {"program": program, "ms": seconds * 1e3, "beside": beside, "ratio": ratio}
        rows.append({**row, "limit": limit})
    slow = [row for row in rows if row["limit"] is not None and row["ratio"] > row["limit"]]
    machine = f"{processor()}, {platform.system()}, Python {platform.python_version()}"
    if args.json:
        print(json.dumps({"machine": machine, "rows": rows}, indent=2))
    else:
        table = Table(title=machine)
        for heading in rows[0]:
            table.add_column(
                heading, justify="left" if heading in ("program", "beside") else "right"
            )
        for row in rows:
            cells = (f"{v:.3g}" if isinstance(v, float) else str(v or "") for v in row.values())
            table.add_row(*cells)
        Console().print(table)
        for row in slow:
            print(f"{row['program']} takes {row['ratio']:.2f} of {BESIDE[row['beside']]}")
    return 3 if slow and not args.quick else 0


if __name__ == "__main__":
    sys.exit(main())
