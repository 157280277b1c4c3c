"""onnxruntime-genai as a client of `build --layout genai`: make test-clients.

It lives in an interpreter of its own, which GRAPHGEN_GENAI_PYTHON names. Greedy tokens are the same
there and here.
"""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_models import vary

import graphgen as gg
from graphgen.export.layouts import write_genai
from graphgen.models.config import Config
from graphgen.models.llama import CausalLM

PYTHON = os.environ.get("GRAPHGEN_GENAI_PYTHON", "")
pytestmark = pytest.mark.skipif(
    not PYTHON, reason="GRAPHGEN_GENAI_PYTHON names no Python with onnxruntime-genai 0.18"
)

STEPS = 64
CONFIG: dict[str, Any] = {
    "vocab_size": 200,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
KINDS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "head_dim": 24, "eos_token_id": 9},
    "mistral": {"model_type": "mistral", "sliding_window": 7, "eos_token_id": 9},
    "qwen3": {
        "model_type": "qwen3",
        "head_dim": 32,
        "tie_word_embeddings": True,
        "eos_token_id": [9, 11],
    },
}

CLIENT = """
import json, sys
import numpy as np
import onnxruntime_genai as og

folder, batches, steps = sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3])
model, told = og.Model(folder), []
for rows in batches:
    options = og.GeneratorParams(model)
    length = len(rows[0])
    options.set_search_options(max_length=length + steps, batch_size=len(rows), do_sample=False)
    generator = og.Generator(model, options)
    generator.append_tokens(np.array(rows, np.int32))
    while not generator.is_done():
        generator.generate_next_token()
    told.append([generator.get_sequence(i)[length:].tolist() for i in range(len(rows))])
print(json.dumps(told))
"""


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_tokens_are_ours(kind: str, tmp_path: Path) -> None:
    fields = {**CONFIG, **KINDS[kind]}
    module = vary(CausalLM(Config(fields)))
    (tmp_path / "config.json").write_text(json.dumps(fields))
    best = gg.optimize(gg.build(module, **module.inputs()))
    folder = write_genai(tmp_path, tmp_path / "out", best, fields)
    rng = np.random.default_rng(0)
    batches = [rng.integers(10, 200, size).tolist() for size in ((1, 17), (1, 5), (3, 9), (1, 200))]
    command = [PYTHON, "-c", CLIENT, str(folder), json.dumps(batches), str(STEPS)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for rows, theirs in zip(batches, json.loads(done.stdout.splitlines()[-1]), strict=True):
        found = gg.generate(folder, rows, max_new_tokens=STEPS)
        list(found)
        for own, other in zip(found.tokens, theirs, strict=True):
            ends = own[-1] in np.atleast_1d(fields["eos_token_id"])  # which it may leave out
            own = own[:-1] if ends else own
            assert own == other[: len(own)] and (ends or len(other) == STEPS)
