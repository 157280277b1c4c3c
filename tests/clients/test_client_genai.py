"""onnxruntime-genai as a client of `build --layout genai`: make test-genai.

It lives in an interpreter of its own, which GRAPHGEN_GENAI_PYTHON names. Greedy tokens are the same
there and here.
"""

import json
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from client_programs import CAUSAL, STATEFUL, check_example, told
from random_checkpoints import random_checkpoint

import graphgen as gg
from graphgen.commands import main
from graphgen.export.checkpoint import Checkpoint

PYTHON = os.environ.get("GRAPHGEN_GENAI_PYTHON", "")
pytestmark = pytest.mark.skipif(
    not PYTHON, reason="GRAPHGEN_GENAI_PYTHON names no Python with onnxruntime-genai 0.18"
)

STEPS = 64
KINDS: dict[str, dict[str, Any]] = {
    **CAUSAL,
    **STATEFUL,
    "llama": {**CAUSAL["llama"], "head_dim": 24},
    "qwen3": {
        **CAUSAL["qwen2"],
        "model_type": "qwen3",
        "head_dim": 32,
        "eos_token_id": [9, 11],
    },
}

CLIENT = """
import json, sys
import numpy as np
import onnxruntime_genai as og

folder, batches, steps = json.load(sys.stdin)
model, told = og.Model(folder), []
for rows in batches:
    options = og.GeneratorParams(model)
    length = len(rows[0])
    options.set_search_options(
        max_length=length + steps, batch_size=len(rows), do_sample=False, repetition_penalty=3.0
    )
    generator = og.Generator(model, options)
    generator.append_tokens(np.array(rows, np.int32))
    while not generator.is_done():
        generator.generate_next_token()
    told.append([generator.get_sequence(i)[length:].tolist() for i in range(len(rows))])
print(json.dumps(told))
"""


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_tokens_are_ours(kind: str, tmp_path: Path) -> None:
    fields, folder = KINDS[kind], tmp_path / "out"
    source = random_checkpoint(tmp_path / "in", fields)
    assert main(["build", str(source), "-o", str(folder), "--layout", "genai"]) == 0
    rng = np.random.default_rng(0)
    batches = [rng.integers(10, 200, size).tolist() for size in ((1, 17), (1, 5), (3, 9), (1, 200))]
    results = told([PYTHON, "-c", CLIENT], (str(folder), batches, STEPS))
    for rows, theirs in zip(batches, json.loads(results), strict=True):
        found = gg.generate(folder, rows, max_new_tokens=STEPS, repetition_penalty=3.0)
        list(found)
        for own, other in zip(found.tokens, theirs, strict=True):
            ends = own[-1] in np.atleast_1d(fields["eos_token_id"])  # which it may leave out
            own = own[:-1] if ends else own
            assert own == other[: len(own)] and (ends or len(other) == STEPS)


@pytest.mark.parametrize(
    "said", [{"repetition_penalty": 3.0, "max_length": 30}, {"num_beams": 3}, {"min_length": 20}]
)
def test_it_chooses_tokens_as_the_folder_says(said: dict[str, Any], tmp_path: Path) -> None:
    source = random_checkpoint(tmp_path / "in", CAUSAL["llama"])
    text = json.dumps({"max_length": 25, "eos_token_id": [0, 9], **said})
    (source / "generation_config.json").write_text(text)
    assert main(["build", str(source), "-o", str(tmp_path / "out"), "--layout", "genai"]) == 0
    program = re.sub(r"options.set_search_options\(.*?\n    \)", "", CLIENT, flags=re.DOTALL)
    row = [5, 9, 2, 7]
    [[theirs]] = json.loads(told([PYTHON, "-c", program], (str(tmp_path / "out"), [[row]], 0)))
    found = gg.generate(tmp_path / "out", row)
    list(found)
    [own] = found.tokens
    assert theirs in (own, own[:-1])  # it may leave out the token that ends a row


ADAPTED = """
import json, sys
import onnxruntime_genai as og

folder, row, steps = json.load(sys.stdin)
model, told = og.Model(folder), []
adapters = og.Adapters(model)
for name in ("a", "b"):
    adapters.load(f"{folder}/{name}.onnx_adapter", name)
for name in (None, "a", "b"):
    options = og.GeneratorParams(model)
    options.set_search_options(max_length=len(row) + steps, do_sample=False)
    generator = og.Generator(model, options)
    if name is not None:
        generator.set_active_adapter(adapters, name)
    generator.append_tokens(row)
    while not generator.is_done():
        generator.generate_next_token()
    told.append(generator.get_sequence(0)[len(row):].tolist())
print(json.dumps(told))
"""


def test_adapters_beside_a_base(tmp_path: Path) -> None:
    """Trained on the plain folder, run on that for onnxruntime-genai."""
    source = random_checkpoint(tmp_path / "in", CAUSAL["llama"])
    for layout in ("plain", "genai"):
        words = ["build", str(source), "-o", str(tmp_path / layout), "--layout", layout]
        assert main(words) == 0
    random, folder = np.random.default_rng(0), tmp_path / "beside"
    for name in ("a", "b"):
        gg.artifacts(
            tmp_path / "plain" / "onnx" / "model.onnx",
            tmp_path / name,
            output="logits",
            lora="query|up:4",
        )
        saved = Checkpoint.load(tmp_path / name / "checkpoint")
        for array in saved.trainable.values():
            array[...] = 0.3 * random.standard_normal(array.shape)
        saved.save(tmp_path / name / "checkpoint")
    both = ["--model", str(tmp_path / "genai"), "--base", str(folder)]
    for name, more in (("a", both), ("b", [])):
        words = ["adapter", str(tmp_path / name), "-o", str(folder / f"{name}.onnx_adapter")]
        assert main([*words, *more]) == 0
    row, wanted = [5, 9, 2, 7], []
    for adapter in (None, tmp_path / "a", folder / "b.onnx_adapter"):
        found = gg.generate(tmp_path / "plain", row, max_new_tokens=STEPS, adapter=adapter)
        list(found)
        wanted += found.tokens
    told_of = json.loads(told([PYTHON, "-c", ADAPTED], (str(folder), row, STEPS)))
    for own, other in zip(wanted, told_of, strict=True):
        own = own[:-1] if len(own) < STEPS else own  # the token that ends it may be left out
        assert own == other[: len(own)]
    assert wanted[0] != wanted[1] != wanted[2]


def test_the_example_of_the_page(tmp_path: Path) -> None:
    check_example("onnxruntime-genai", [PYTHON, "-c"], tmp_path, "--layout", "genai")
