"""Damaged and malicious files: every command refuses them in one line, or is right about them.

Each mutant (file_mutants.py) is read by a command in a process of its own, forked from one in which
everything is imported, with limits for time and memory. What `optimize` writes is run beside the
mutant. `make fuzz-files` makes new ones.

One of them again: python tests/test_fuzz_files.py --seed 7 --only 12 --keep DIR.
"""

import argparse
import faulthandler
import gc
import importlib
import multiprocessing
import os
import pkgutil
import re
import resource
import select
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import numpy as np
import onnx
from file_mutants import mutate
from file_originals import MADE, write_originals

from graphgen.commands import main

MUTANTS = 30
SECONDS, WAIT, MEMORY = 20, 120, 2 << 30
"""Of a command: processor time, time on a busy machine, and what it may take besides libraries."""

TARGETS = ["cpu", "cuda", "official"]
MODEL = [
    *("optimize MODEL -o out.onnx --target TARGET",) * 6,
    "optimize MODEL -o MODEL --verify --report report.json",
    "inspect MODEL",
    "run MODEL --input ARRAYS -o out.npz",
    "compare MODEL --input ARRAYS --seconds 0 --kinds cumulative --html out.html",
    "compare models/block.onnx --against MODEL --input ARRAYS --seconds 0 --kinds",
    "bisect MODEL --input ARRAYS --tolerance 1e-3 --target TARGET -o found",
    "bisect MODEL --input ARRAYS --tolerance 1 --quantize int8 -o found",
    "diff MODEL models/block.onnx --canonical --html out.html",
    "explain MODEL --pass fuse_attention --target TARGET",
    "artifacts MODEL -o new --loss mse --profile stock",
    "artifacts MODEL -o new --loss mse",
    "export MODEL --checkpoint art -o out.onnx",
]
TRAIN = "train art --batch 2 --threads 1 --schedule constant --data"
COMMANDS = {
    "models/*.onnx": MODEL,
    "models/weights": [line.replace("MODEL", "models/outside.onnx") for line in MODEL],
    "models/*.npz": [line for line in MODEL if "ARRAYS" in line],
    "llama/*": [
        "build llama -o new",
        "build llama -o new --target cuda --dtype fp16",
        "build llama -o new --quantize int4 --text llama/text.txt --block-size 32",
        "build llama -o new --layout genai",
    ],
    "bert/*": ["build bert -o new", "build bert -o new --quantize int8 --text bert/text.txt"],
    "llama-built/**/*": [
        "generate llama-built --ids 1,2 --max-new-tokens 3 --threads 1",
        "generate llama-built --prompt w1 --max-new-tokens 3 --beams 2 --threads 1",
        "map llama-built --data rows.jsonl --out out.parquet --max-new-tokens 2",
    ],
    "bert-built/**/*": ["map bert-built --data rows.jsonl --out out.parquet"],
    "art/*": [
        f"{TRAIN} data.npz --steps 1",
        "export models/block.onnx --checkpoint art -o out.onnx",
        "bisect art --tolerance 1e-3 --dim batch=2 --dim seq=3 -o found",
    ],
    "run/*": [
        f"{TRAIN} data.npz --steps 3 --checkpoint run --resume",
        "export models/block.onnx --checkpoint run -o out.onnx",
    ],
    "data.*": [f"{TRAIN} DATA --steps 1", f"{TRAIN} data.npz --eval DATA --steps 1"],
    "rows.jsonl": [
        "map bert-built --data rows.jsonl --out out.parquet --batch 2",
        "map llama-built --data rows.jsonl --out out.parquet --max-new-tokens 2",
    ],
}
"""What is read, and the commands that read it."""

WEIGHTS = [14, 1, 1, 3, 2, 2, 1, 2, 1, 1, 1]


class Ended(NamedTuple):
    """How a process has ended: what it wrote, its peak of memory, and a limit that it passed."""

    code: int
    out: str
    error: str
    seconds: float
    grown: int
    hung: bool


def apart(work: Callable[[], int], folder: Path) -> Ended:
    """Call it in a new process with limits, in this folder."""
    folder.mkdir(exist_ok=True)
    streams = folder.parent / "stdout", folder.parent / "stderr"
    before = _status("VmHWM")
    if (pid := os.fork()) == 0:
        code = 70
        try:
            for number, path in enumerate(streams, 1):
                os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
            sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
            sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115
            faulthandler.enable()
            faulthandler.register(signal.SIGXCPU, chain=True)
            faulthandler.dump_traceback_later(WAIT - 1)
            resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS + 1))
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            space = _status("VmSize") + MEMORY
            resource.setrlimit(resource.RLIMIT_AS, (space, space))
            os.chdir(folder)
            code = work()
        except BaseException:
            faulthandler.dump_traceback()
            sys.excepthook(*sys.exc_info())
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    waiting = os.pidfd_open(pid)
    hung = not select.select([waiting], [], [], WAIT)[0]
    if hung:
        os.kill(pid, signal.SIGKILL)
    _, status, usage = os.wait4(pid, 0)
    os.close(waiting)
    out, error = (path.read_text(errors="replace") for path in streams)
    code = os.waitstatus_to_exitcode(status)
    seconds = usage.ru_utime + usage.ru_stime
    return Ended(code, out, error, seconds, usage.ru_maxrss * 1024 - before, hung)


def _pipes(folder: str, names: list[str]) -> list[str]:
    return [name for name in names if Path(folder, name).is_fifo()]


def _few(text: str) -> str:
    """The ends of a text: one may be a traceback from its last frame, or from its first."""
    lines = [line[:500] for line in text.splitlines()]
    return "\n".join(lines if len(lines) < 30 else [*lines[:14], "...", *lines[-14:]])


def _status(name: str) -> int:
    return int(re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024


def contents(folder: Path) -> dict[str, bytes | None]:
    """Every file by name; None for what is not a regular one."""
    return {
        str(p.relative_to(folder)): p.read_bytes() if p.is_file() and not p.is_symlink() else None
        for p in folder.rglob("*")
    }


class Mutant:
    """A folder with one damaged file, and a command that reads it."""

    def __init__(self, originals: Path, folder: Path, seed: int, index: int):
        random = Random(f"{seed} {index}")
        self.folder, self.index = folder, index
        shutil.copytree(originals, folder)
        names, commands = random.choices([*COMMANDS.items()], WEIGHTS)[0]
        self.file = random.choice(sorted(p for p in folder.glob(names) if p.is_file()))
        name = str(self.file.relative_to(folder))
        model = str(Path(name).with_suffix(".onnx"))
        arrays = str(Path(name).with_suffix(".npz")).replace("weights", "outside")
        line = random.choice(commands).replace("TARGET", random.choice(TARGETS))
        line = line.replace("MODEL", model).replace("ARRAYS", arrays).replace("DATA", name)
        self.arguments = line.split()
        self.model = folder / self.arguments[1]
        self.done = f"{name}: {mutate(self.file, random)}"

    def try_(self, told: Counter[str]) -> str | None:
        """Run the command; return what is wrong."""
        (temporary := self.folder.with_name("tmp")).mkdir(exist_ok=True)
        before = contents(self.folder)
        original = self.model

        def work() -> int:
            tempfile.tempdir = str(temporary)
            return main(self.arguments)

        optimizes = self.arguments[0] == "optimize"
        if optimizes:  # it may be what is written
            beside = self.folder.with_name("beside")
            shutil.copytree(self.model.parent, beside, symlinks=True, ignore=_pipes)
            original = beside / self.model.name
        self.ended = ended = apart(work, self.folder)
        command = self.arguments[0]
        told[f"{command} {ended.code}"] += 1
        lines = ended.error.splitlines()
        if ended.hung or ended.code not in (0, 2, 3):
            again = apart(lambda: main([*self.arguments, "--debug"]), self.folder)
            return f"exit code {ended.code}{' hung' * ended.hung}: {_few(again.error)}"
        if any(not line.startswith("graphgen: ") for line in lines):
            return "other lines on stderr"
        if ended.code and not lines:
            return "no reason"
        if ended.grown > MEMORY:
            return f"grown by {ended.grown >> 20} MiB"
        if "not enough memory" in ended.error and command not in ("run", "compare", "bisect"):
            return "would have grown"
        if any(temporary.iterdir()):
            return f"left {[*temporary.iterdir()]}"
        after = contents(self.folder)
        if [name for name in after if ".partial" in name]:
            return "left half-written"
        if ended.code == 2 and command != "train" and after != before:
            changed = {n for n in {*after, *before} if after.get(n, 0) != before.get(n, 0)}
            return f"refused, and wrote {sorted(changed)}"
        if ended.code == 0:
            for name in {*after} - {*before}:
                if name.endswith(".onnx") and not optimizes:
                    onnx.checker.check_model(str(self.folder / name))
        if optimizes and ended.code != 3:
            return self._beside(original, told)
        return None

    def _beside(self, original: Path, told: Counter[str]) -> str | None:
        """Run the mutant and what was made of it."""
        made = self.arguments[self.arguments.index("-o") + 1]
        out = None if self.ended.code else self.folder / made
        target = "cpu" if "--verify" in self.arguments else self.arguments[-1]
        one = apart(lambda: agree(original, out, target), self.folder)
        if one.code == 3:
            told["onnxruntime does not run it either"] += out is None
            return None
        if one.code == 0:
            told["agree"] += 1
            return None
        if one.code == 4:
            return f"REFUSED what onnxruntime runs: {self.ended.error.strip()}"
        if out is None:
            return None  # the runtime itself crashes, or takes too much
        return f"{one.code}: {one.error.strip()}"

    def __str__(self) -> str:
        return f"    {' '.join(self.arguments)}\n    {self.done[:600]}"


def agree(model: Path, out: Path | None, target: str) -> int:
    """3 if the runtime does not run a model, 4 if it does and there is no output, or 0.

    Otherwise raises AssertionError.
    """
    import onnxruntime as ort
    from test_fuzz import Trial, open_session

    import graphgen as gg

    os.chdir(model.parent)
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level, options.intra_op_num_threads = 4, 1
    cpu = ["CPUExecutionProvider"]
    try:
        session = ort.InferenceSession(str(model), options, providers=cpu)
        feeds = invented(session)
        old = session.run(None, feeds)
    except Exception:
        return 3
    if out is None:
        proto = onnx.load(model)
        graphs = (proto.graph, *proto.functions)
        return 3 if any(_cuts_off(node) for graph in graphs for node in graph.node) else 4
    onnx.checker.check_model(str(out))
    try:
        trial = Trial.of(gg.load(model), model, feeds, "mutant")
    except AssertionError:  # the runtime's own kernel is wrong, or infinity is near
        trial = None
    try:
        session = ort.InferenceSession(str(out), options, providers=cpu)
    except Exception:
        assert target != "cpu", "the optimized model does not load"
        return 0
    if trial is not None and trial.old is not None:
        trial.compare(gg.load(out), open_session(out.read_bytes()), target, Counter(), wide=False)
        return 0
    for a, b in zip(old, session.run(None, feeds), strict=True):
        assert np.shape(a) == np.shape(b), f"{np.shape(b)}, was {np.shape(a)}"
        if isinstance(a, np.ndarray) and a.dtype.kind in "fiub":
            np.testing.assert_allclose(b, a, rtol=1e-4, atol=1e-4 * np.abs(a).max(initial=0))
    return 0


def _cuts_off(node: onnx.NodeProto) -> bool:
    """Whether the runtime takes an axis of 64 bits for one of 32: -2⁶³ for 0.

    Functions have other names for an axis.
    """
    return any((a.name == "axis" or node.domain) and abs(a.i) >> 31 for a in node.attribute)


def invented(session: Any) -> dict[str, Any]:
    """Arrays for the inputs of a session."""
    sizes: dict[Any, int] = {}
    random, feeds = np.random.default_rng(0), {}
    for value in session.get_inputs():
        shape = [
            dim if isinstance(dim, int) else sizes.setdefault(dim, 2 + len(sizes) % 2)
            for dim in value.shape
        ]
        if np.prod(shape, dtype=float) > 1e6:
            raise ValueError("too large")
        kind = value.type.removeprefix("tensor(").removesuffix(")")
        kind = {"float": "float32", "double": "float64", "string": "str"}.get(kind, kind)
        array = random.standard_normal(shape)
        feeds[value.name] = (array if "float" in kind else abs(array) > 0.7).astype(kind)
    return feeds


def run(originals: Path, seed: int, indices: range | list[int], keep: Path | None) -> Any:
    """Try some mutants; return what was counted, and the failures."""
    told: Counter[str] = Counter()
    failures = []
    for index in indices:
        with tempfile.TemporaryDirectory() as place:
            mutant = Mutant(originals, Path(place, "in"), seed, index)
            if keep is not None:
                shutil.copytree(mutant.folder, keep, symlinks=True, ignore=_pipes)
            wrong = mutant.try_(told)
            told["seconds"] += mutant.ended.seconds
            told["ms at most"] = max(told["ms at most"], round(1000 * mutant.ended.seconds))
            told["MiB at most"] = max(told["MiB at most"], mutant.ended.grown >> 20)
            if wrong:
                again = f"python {__file__} --seed {seed} --only {index} --keep DIR"
                failures.append(f"{again}\n{mutant}\n    {wrong}\n{_few(mutant.ended.error)}")
                print(failures[-1], flush=True)
            elif len(indices) == 1:
                print(mutant, mutant.ended)
    return told, failures


def test_damaged_files_are_refused_or_right() -> None:
    """In a process of its own: sessions of other tests have threads, which a fork loses."""
    done = subprocess.run([sys.executable, __file__], capture_output=True, text=True)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    told = (part.partition(" ") for part in done.stdout.splitlines()[-1].split(", "))
    counts = {what: float(number) for number, _, what in told}
    assert counts["agree"] > 1 and counts["optimize 2"] > 1


def program() -> int:
    """Try mutants as the arguments say; return 1 if one fails."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=MUTANTS)
    parser.add_argument("--first", type=int, default=0, help="go on at this one of --count")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--only", type=int)
    parser.add_argument("--keep", type=Path, help="a new folder for the mutant that --only names")
    options = parser.parse_args()
    if options.keep is not None and (options.only is None or os.path.lexists(options.keep)):
        parser.error("--keep is a new folder, beside --only")
    import test_fuzz  # noqa: F401

    import graphgen

    for module in pkgutil.walk_packages(graphgen.__path__, "graphgen."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)

    with tempfile.TemporaryDirectory() as place:
        originals = Path(place, "in")
        originals.mkdir()
        write_originals(originals)
        for line in MADE:
            made = apart(lambda line=line: main(line), originals)
            assert made.code == 0, made
        gc.collect()
        gc.freeze()
        told: Counter[str] = Counter()
        failures = []
        indices = (
            [options.only] if options.only is not None else range(options.first, options.count)
        )
        parts = [
            (originals, options.seed, indices[i :: options.jobs], options.keep)
            for i in range(options.jobs)
        ]
        with multiprocessing.get_context("fork").Pool(options.jobs) as pool:
            for counted, failed in pool.starmap(run, parts):
                told = told + counted
                failures += failed
    print(", ".join(f"{n:.5g} {what}" for what, n in sorted(told.items())))
    return int(bool(failures))


if __name__ == "__main__":
    sys.path.append(str(Path(__file__).with_name("ops")))  # as pytest does
    sys.exit(program())
