"""ONNX's own tests of its operators, each through `optimize` for the CPU and through `artifacts`.

The tests come from the installed onnx package. What they give runs with the runtime's optimizations
off; what graphgen makes of it, with them off and on; then both again without any known size of an
input. Gradients of float inputs are compared with differences. A verdict is one of

- runs: the results are what the given model gives, or what ONNX expects;
- wrong: other results, sizes or gradients; invalid: the runtime does not run what was written;
- crash: an error that is no GraphgenError, 20 s, or 2 GB;
- refused: by graphgen, although the runtime runs it;
- no kernel: the runtime does not run the given model, at whichever opset; all else may not happen.

docs/conformance.md shows them by operator; --page writes it. Five minutes. The exit code is 3 if
anything is wrong, invalid, a crash or refused.
"""

import argparse
import datetime
import json
import multiprocessing
import re
import sys
import warnings
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from multiprocessing.connection import Connection
from pathlib import Path

import onnx
import onnxruntime
from onnx_cases import BAD, Case, Verdict, cases, check

SECONDS, BYTES = 20, 2 << 30
"""What one test may take."""

PAGE = Path(__file__).resolve().parents[1] / "docs" / "conformance.md"
INTRODUCTION = """\
# ONNX's own tests

`make conformance` takes every test of an operator that the onnx package has, and its small models,
through `gg.optimize` for the CPU: {count:,} tests. Each test runs
twice, as given and without any known size of an input. The new file has to give what the given
one gives, or what ONNX expects; inferred sizes have to be those of the run. If the result has a
gradient in float inputs, the artifacts for training are written, and the gradient of the sum of the
squared result is compared with finite differences.

Made on {date} with graphgen {graphgen}, onnx {onnx} and onnxruntime {runtime}: {summary}.

## What does not run

onnxruntime has no complex numbers, so a file with complex numbers is written but runs nowhere.

If this runtime has no kernel for a test, the test is tried at older opsets. If none of them runs,
`optimize` must still either work or raise an error of one sentence. Such tests do not count as
failures here.

## By operator

*runs*: in how many tests the results are the same. *becomes*: the operators into which a fusion
turned it or its formula. *gradient*: in how many tests with float inputs the gradient is right, and
why the others have none. *not run*: the reason, as the first such test gives it.

| operator | runs | becomes | gradient | not run |
|---|---|---|---|---|
{rows}
"""


# Processes, one at a time, of which a test may take no more than its share.


def work(connection: Connection) -> None:
    """Answer each case with its verdict."""
    with suppress(ImportError):
        import resource

        resource.setrlimit(resource.RLIMIT_DATA, (BYTES, BYTES))
    warnings.simplefilter("ignore")
    while True:
        try:
            case = connection.recv()
        except EOFError:
            return
        try:
            connection.send(check(case))
        except Exception as error:  # of the test itself, or one out of memory
            connection.send(Verdict(case.name, case.operator, "crash", repr(error)))


class Worker:
    """A process that checks cases; a new one after each that it does not survive."""

    def __init__(self) -> None:
        self.start()

    def start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=work, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()

    def check(self, case: Case) -> Verdict:
        self.connection.send(case)
        problem = f"longer than {SECONDS} s"
        try:
            if self.connection.poll(SECONDS):
                verdict: Verdict = self.connection.recv()
                return verdict
        except EOFError:
            self.process.join()
            problem = f"the process ended with {self.process.exitcode}"
        self.stop()
        self.start()
        return Verdict(case.name, case.operator, "crash", problem)

    def stop(self) -> None:
        self.process.kill()
        self.process.join()
        self.connection.close()


def failures(found: Sequence[Verdict]) -> list[str]:
    """A line for each test that is not as it should be."""
    lines = []
    for v in found:
        if v.verdict in (*BAD, "refused"):
            lines.append(f"{v.verdict}: {v.name}: {v.why}")
        if re.match("wrong|crash|invalid", v.gradient):
            lines.append(f"gradient: {v.name}: {v.gradient}")
    return lines


def page(found: Sequence[Verdict]) -> str:
    """The page in docs/."""
    import graphgen as gg

    counts = Counter(v.verdict for v in found)
    by_operator: dict[str, list[Verdict]] = {}
    for verdict in found:
        by_operator.setdefault(verdict.operator, []).append(verdict)
    return INTRODUCTION.format(
        count=len(found),
        date=datetime.date.today().isoformat(),
        graphgen=gg.__version__,
        onnx=onnx.__version__,
        runtime=onnxruntime.__version__,
        summary=", ".join(f"{count:,} {name}" for name, count in counts.most_common()),
        rows="\n".join(
            _row(name, by_operator[name]) for name in sorted(by_operator, key=str.lower)
        ),
    )


def _row(operator: str, found: list[Verdict]) -> str:
    runs = sum(v.verdict == "runs" for v in found)
    gradients = [v.gradient for v in found if v.gradient]
    right = gradients.count("yes")
    others = [short(text) for text in gradients if text != "yes"]
    gradient = f"{right} of {len(gradients)}" if gradients else ""
    gradient += f": {others[0]}" if others else ""
    becomes = sorted({name.removeprefix("com.microsoft::") for v in found for name in v.fused})
    rest = next((f"{v.verdict}: {short(v.why)}" for v in found if v.verdict != "runs"), "")
    cells = [f"`{operator}`", f"{runs} of {len(found)}", ", ".join(becomes), gradient, rest]
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def short(text: str) -> str:
    """An error in a few words: without its place, status, node and advice."""
    text = re.sub(
        r"\[ONNXRuntimeError\] : \d+ : \w+ : |gradient: | \(\w+\.py:\d+\)|/\S+ ", "", text
    )
    text = re.sub(r" node with name.*| \(\w+_\d+\)| \(node:.*", "", text).split(";")[0]
    return text if len(text) < 90 else text[:90].rpartition(" ")[0] + " ..."


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="example: python tests/conformance.py --only 'lstm|gru' --json",
    )
    parser.add_argument("--only", default="", metavar="REGEX", help="tests with such names")
    parser.add_argument("--page", action="store_true", help=f"write {PAGE.name} anew")
    parser.add_argument("--json", action="store_true", help="print the verdicts")
    args = parser.parse_args()
    from rich.console import Console
    from rich.progress import track

    found, worker = [], Worker()
    try:
        for case in track(cases(args.only), "checking", console=Console(stderr=True)):
            found.append(worker.check(case))
    finally:
        worker.stop()
    told = failures(found)
    if args.json:
        print(json.dumps({"tests": [asdict(v) for v in found], "failures": told}, indent=2))
    else:
        print(*told, sep="\n", end="\n" if told else "")
        counts = Counter(v.verdict for v in found).most_common()
        print(", ".join(f"{count} {verdict}" for verdict, count in counts))
    if args.page:
        PAGE.write_text(page(found), encoding="utf-8")
    return 3 if told else 0


if __name__ == "__main__":
    sys.exit(main())
