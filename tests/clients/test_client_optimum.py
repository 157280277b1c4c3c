"""optimum-onnx as a client of `build`: its results are those of transformers. make test-optimum.

They live in an interpreter of their own, which GRAPHGEN_OPTIMUM_PYTHON names. Both read the same
checkpoint; a batch is padded, on the left where it is continued.
"""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from client_programs import CAUSAL, ENCODERS, SEQ2SEQ, check_example, told
from random_checkpoints import random_checkpoint
from small_models import relative_rms

from graphgen.commands import main

PYTHON = os.environ.get("GRAPHGEN_OPTIMUM_PYTHON", "")
pytestmark = pytest.mark.skipif(
    not PYTHON, reason="GRAPHGEN_OPTIMUM_PYTHON names no Python with optimum-onnx 0.1"
)

STEPS, LENGTHS = 64, (12, 7, 3)
TASKS = {
    "text-generation": ("ModelForCausalLM", CAUSAL),
    "text2text-generation": ("ModelForSeq2SeqLM", SEQ2SEQ),
    "fill-mask": ("ModelForMaskedLM", ENCODERS),
    "feature-extraction": ("ModelForFeatureExtraction", ENCODERS),
}
CASES = [(task, kind) for task, (_, kinds) in TASKS.items() for kind in kinds]

CLIENT = """
import json, sys, traceback
import torch, transformers
import optimum.onnxruntime as onnx

def results(source, out, head, feeds):
    name = head.removesuffix("ForFeatureExtraction")
    theirs = getattr(transformers, "Auto" + name).from_pretrained(source).eval()
    ours = getattr(onnx, "ORT" + head).from_pretrained(out)
    feeds = {name: torch.tensor(rows) for name, rows in feeds.items()}
    for model in theirs, ours:
        if head in ("ModelForCausalLM", "ModelForSeq2SeqLM"):
            yield [
                model.generate(
                    **feeds, num_beams=beams, max_new_tokens=STEPS, do_sample=False,
                    eos_token_id=None, pad_token_id=0, no_repeat_ngram_size=1,
                ).tolist()
                for beams in (1, 4)
            ]
        else:
            yield model(**feeds)[0].tolist()

def tried(job):
    try:
        return [*results(*job)]
    except Exception:
        return traceback.format_exc()

with torch.no_grad():
    print(json.dumps([tried(job) for job in json.load(sys.stdin)]))
""".replace("STEPS", str(STEPS))


def batch(kind: str, *, left: bool) -> dict[str, np.ndarray]:
    random, longest = np.random.default_rng(0), max(LENGTHS)
    mask = np.array([[1] * n + [0] * (longest - n) for n in LENGTHS])
    mask = mask[:, ::-1] if left else mask
    feeds = {
        "input_ids": np.where(mask, random.integers(10, 200, mask.shape), 1),
        "attention_mask": mask,
    }
    return feeds | ({"token_type_ids": random.integers(0, 2, mask.shape)} if kind == "bert" else {})


@pytest.fixture(scope="module")
def results(tmp_path_factory: Any) -> dict[tuple[str, str], Any]:
    """For each case what is given, and what transformers and optimum make of it."""
    folder, jobs = tmp_path_factory.mktemp("optimum"), []
    for task, kind in CASES:
        head, kinds = TASKS[task]
        source, out = folder / kind, folder / f"{kind}-{task}"
        if not source.exists():
            random_checkpoint(source, kinds[kind], "fill-mask" if kinds is ENCODERS else None)
        assert main(["build", str(source), "-o", str(out), "--task", task]) == 0
        feeds = {n: x.tolist() for n, x in batch(kind, left=kinds is CAUSAL).items()}
        jobs.append((str(source), str(out), head, feeds))
    return dict(zip(CASES, json.loads(told([PYTHON, "-c", CLIENT], jobs)), strict=True))


@pytest.mark.parametrize(("task", "kind"), CASES)
def test_results_are_those_of_transformers(task: str, kind: str, results: Any) -> None:
    found = results[task, kind]
    assert isinstance(found, list), found
    theirs, ours = found
    if "generation" in task:
        for search, rows, own in zip(("greedy", "beams"), theirs, ours, strict=True):
            assert len({tuple(row) for row in rows}) == len(LENGTHS) and len(rows[0]) > STEPS
            assert own == rows, search
    else:
        kept = batch(kind, left=False)["attention_mask"].astype(bool)
        assert relative_rms(np.array(theirs)[kept], np.array(ours)[kept]) < 1e-5


def test_the_example_of_the_page(tmp_path: Path) -> None:
    check_example("optimum-onnx", [PYTHON, "-c"], tmp_path)
