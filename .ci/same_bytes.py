"""Prove that a change of the source does not change a byte of what graphgen writes.

Public commands and functions write files: models of all architectures, folders of checkpoints in
all forms, optimized models with the reports of their passes, training artifacts, and what a few
steps of training leave. The SHA-256 digests of these files are one table, which is compared with
the table of another revision. Make both tables on one machine and in one environment: the runtime
decides what is fused, and the processor decides in which order a sum is taken.

All files are made in one folder under fixed relative names, so its place does not matter. Times in
reports are left out. Printed text is not compared.
"""

import argparse
import contextlib
import hashlib
import io
import json
import re
import runpy
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, TypeAlias
from unittest import mock

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
FIXTURES = ROOT / "tests" / "fixtures"
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]  # this tree, not the one that is installed

import random_checkpoints as random  # noqa: E402

import graphgen as gg  # noqa: E402

EXAMPLE = """example:
  python .ci/same_bytes.py -o before.json           # at the old revision
  python .ci/same_bytes.py --against before.json    # at the new one

exit codes: 0 all is the same, 2 bad input, 3 a file differs, is new or is missing
"""
Items: TypeAlias = Iterator[tuple[str, Callable[[], object]]]

SIZES = {"--vocabulary": 50, "--features": 32, "--layers": 2, "--num-heads": 4, "--length": 16}
SIZES |= {"--window": 16, "--stride": 8, "--block": 8}
VARIANTS = {
    "decoder-dropout": "decoder --dropout 0.1",
    "decoder-llama": "decoder --norm rms --gated --activation silu --positions rotary --kv-heads 2",
    "decoder-t5": "decoder --positions t5",
    "encoder-logits": "encoder --logits --dropout 0.1",
    "recurrent-lstm": "recurrent-additive --kind lstm",
}
"""More models: an architecture with further options."""
FORMS = {"plain": "", "primitives": "--primitives", "training": "--training"}
TARGETS = ("cpu", "cuda", "official")

FAMILIES = {**random.CAUSAL, **random.SEQ2SEQ, **random.ENCODERS}
FAMILIES["qwen3"] = {**random.GROUPED, "head_dim": 32}
FAMILIES["xlm-roberta"] = FAMILIES["roberta"]
FAMILIES["vit"] = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
FAMILIES["vit"] |= {"num_attention_heads": 4, "image_size": 8, "patch_size": 4}
CLASSES = {"num_labels": 5, "pad_token_id": 3}
LAYOUTS = {"plain": "", "half": "--target cuda --dtype fp16", "int4": "--quantize int4"}
LAYOUTS |= {"int8": "--quantize int8 --no-run"}
GENAI = {"genai": "--layout genai", "genai-int4": "--layout genai --quantize int4"}

TRAINED = {
    "decoder-dropout": {"input_ids": 50},
    "encoder-logits": {"input_ids": 50, "attention_mask": 2, "token_type_ids": 2},
    "recurrent-additive": {"source_ids": 50, "source_mask": 2, "target_ids": 50},
}
"""Models that are trained, with the number of values that each input may have."""
ARTIFACTS: dict[str, dict[str, Any]] = {
    "official": {},
    "official-recompute": {"recompute": "full", "accumulate": 4},
    "official-sgd": {"optimizer": gg.SGD(), "label_smoothing": 0.1, "z_loss": 1e-4},
    "stock": {"profile": "stock"},
    "stock-recompute": {"profile": "stock", "recompute": "full"},
    "stock-groups": {"profile": "stock", "optimizer": gg.AdamW(clip_norm=1, no_decay=r"bias$")},
    "fp16": {"profile": "stock", "dtype": "fp16"},
    "bf16": {"profile": "stock", "dtype": "bf16", "accumulate": 2},
}


def graphgen(command: str, *paths: object) -> str:
    """What a command prints. It runs in this process; RuntimeError where it fails."""
    given, printed = ["graphgen", *command.split(), *map(str, paths)], io.StringIO()
    with mock.patch.object(sys, "argv", given), contextlib.redirect_stdout(printed):
        try:
            runpy.run_module("graphgen", run_name="__main__")
        except SystemExit as done:
            if done.code:
                raise RuntimeError(f"{' '.join(given)}: exit code {done.code}") from None
    return printed.getvalue()


def models(listed: str) -> Items:
    """All architectures and the variants, small, in all forms; optimized for all targets."""
    lines = listed.splitlines()
    pairs = zip(lines[::2], lines[1::2], strict=True)
    sizes = {told.split()[0]: options.split() for told, options in pairs}
    for name, options in ({name: name for name in sizes} | VARIANTS).items():
        for option in filter(SIZES.get, sizes[options.split()[0]]):
            options += f" {option} {SIZES[option]}"
        for form, flag in FORMS.items():
            out = f"models/{name}-{form}.onnx"
            yield out, partial(graphgen, f"build {options} {flag} -o {out}")
        yield from optimized(Path(f"models/{name}-primitives.onnx"))


def optimized(source: Path) -> Items:
    """A file, optimized for all targets, and the reports."""
    for target in TARGETS:
        out = f"optimized/{source.stem}-{target}"
        files = f"-o {out}.onnx --report {out}.json"
        yield out, partial(graphgen, f"optimize --target {target} {files}", source)


def checkpoints(listed: str) -> Items:
    """The committed checkpoints, and random ones of a few families, for all their tasks."""
    lines = listed.splitlines()[1:]
    pairs = zip(lines[::2], lines[1::2], strict=True)
    tasks = {
        kind: found.strip().split(", ") for kinds, found in pairs for kind in kinds.split(", ")
    }
    for source in sorted(FIXTURES.glob("*_checkpoint")):
        family = json.loads((source / "config.json").read_text())["model_type"]
        yield from layouts(source, tasks[family][0])
    for kind in FAMILIES:
        found = tasks[kind]
        for task in found:
            source = Path("checkpoints", f"{kind}-{task}")
            fields = FAMILIES[kind] | {"model_type": kind} | (CLASSES if "class" in task else {})
            yield str(source), partial(random.random_checkpoint, source, fields, task)
            yield from layouts(source, task, few=task != found[0])


def layouts(source: Path, task: str, *, few: bool = False) -> Items:
    """A checkpoint for all clients, or only for a few of them."""
    forms = LAYOUTS | (GENAI if task == "text-generation" else {})
    for layout in ["plain"] if few else forms:
        out = f"checkpoints/{source.name}-{layout}"
        yield out, partial(graphgen, f"build --task {task} {forms[layout]} -o {out}", source)


def training() -> Items:
    """Artifacts of all kinds, and three steps with those that a CPU can train."""
    for name, variant in product(TRAINED, ARTIFACTS):
        yield f"artifacts/{name}-{variant}", partial(train, name, variant)


def train(name: str, variant: str) -> None:
    """Write artifacts, and train with them unless they are in half precision."""
    folder, options = f"{name}-{variant}", ARTIFACTS[variant]
    model = f"models/{name}-training.onnx"
    gg.artifacts(model, f"artifacts/{folder}", output="logits", **options)
    if "dtype" in options:
        return
    rng, limits = np.random.default_rng(0), TRAINED[name] | {"labels": 50}
    batches = [{key: rng.integers(0, n, (2, 8)) for key, n in limits.items()} for _ in range(12)]
    trainer = gg.Trainer(f"artifacts/{folder}", threads=1)
    trainer.fit(batches, steps=3, checkpoint=f"runs/{folder}", progress=False)


def make_all() -> dict[str, str]:
    """Make all files in the current folder; the digest of each."""
    architectures, families, *_ = graphgen("build --list").split("\n\n")
    items = [*models(architectures), *checkpoints(families)]
    items += [item for file in sorted(FIXTURES.glob("*.onnx")) for item in optimized(file)]
    items += training()
    for folder in ("models", "optimized", "checkpoints", "artifacts", "runs"):
        Path(folder).mkdir()
    for number, (name, make) in enumerate(items, 1):
        start = time.perf_counter()
        make()
        seconds = time.perf_counter() - start
        print(f"[{number}/{len(items)}] {name}: {seconds:.1f} s", file=sys.stderr, flush=True)
    return {file.as_posix(): digest(file) for file in sorted(Path().rglob("*")) if file.is_file()}


def digest(file: Path) -> str:
    """The SHA-256 digest of a file, of a report without its times."""
    data = file.read_bytes()
    if file.match("optimized/*.json"):
        data = re.sub(rb'"seconds": [^,\n]+', b"", data)
    return hashlib.sha256(data).hexdigest()


def differences(before: dict[str, str], after: dict[str, str]) -> list[str]:
    """A line for each file that is not the same."""
    return [
        f"{'new' if name not in before else 'missing' if name not in after else 'differs'}: {name}"
        for name in sorted(before.keys() | after.keys())
        if before.get(name) != after.get(name)
    ]


def main() -> int:
    """Make all files, then write their table or compare it; the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLE, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="write the table here")
    parser.add_argument("--against", type=Path, metavar="FILE", help="compare with this table")
    told = "a new folder, to make the files in and keep them: to look at those that differ"
    parser.add_argument("--keep", type=Path, metavar="DIR", help=told)
    options = parser.parse_args()
    try:
        before = json.loads(options.against.read_text()) if options.against else None
        if options.keep:
            options.keep.mkdir()
        if options.output:
            options.output.touch()  # an error now, not minutes later
    except (OSError, ValueError) as error:
        parser.error(str(error))
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(options.keep or folder):
        after = make_all()
    table = json.dumps(after, indent=1) + "\n"
    if options.output:
        options.output.write_text(table)
    elif before is None:
        print(table, end="")
    found = [] if before is None else differences(before, after)
    print(*found, sep="\n", end="\n" if found else "")
    print(f"{len(after)} files, {len(found)} differences", file=sys.stderr)
    return 3 if found else 0


if __name__ == "__main__":
    sys.exit(main())
