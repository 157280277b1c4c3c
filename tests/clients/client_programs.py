"""Programs that run where a client is installed, and those of docs/clients.md."""

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import published_decoders
import published_encoders
import published_seq2seq
import random_checkpoints
from random_checkpoints import random_checkpoint

import graphgen as gg
from graphgen.commands import main

_LONG = {"vocab_size": 200, "max_position_embeddings": 512}
_DECODERS = {
    kind: published_decoders.fields(kind) | _LONG | {"eos_token_id": 9}
    for kind in ("smollm3", "granite", "olmo2", "gemma3_text", "gpt_oss")
}
_DECODERS["olmo2"]["num_key_value_heads"] = 4  # optimum-onnx knows only some types with fewer
_rope = _DECODERS["gpt_oss"].pop("rope_parameters")  # transformers 4 reads it in two fields
_DECODERS["gpt_oss"] |= {"rope_theta": _rope.pop("rope_theta"), "rope_scaling": _rope}
CAUSAL = random_checkpoints.CAUSAL | _DECODERS
STATEFUL = {
    kind: published_decoders.fields(kind) | _LONG | {"eos_token_id": 9}
    for kind in ("lfm2", "qwen3_5_text")
}
STATEFUL["lfm2"]["layer_types"] = ["conv", "full_attention", "conv"]  # which transformers.js reads
"""Kinds whose layers keep states, of which optimum-onnx knows nothing."""
_HEADS = {"d_model": 32, "encoder_attention_heads": 4, "decoder_attention_heads": 4}
SEQ2SEQ = random_checkpoints.SEQ2SEQ | {
    kind: published_seq2seq.fields(kind) | _LONG | _HEADS | {"eos_token_id": 9}
    for kind in ("mbart", "m2m_100")
}
ENCODERS = random_checkpoints.ENCODERS | {
    kind: published_encoders.fields(kind) | _LONG for kind in ("modernbert", "deberta-v2")
}
"""Kinds of which each client is given a checkpoint."""

PAGE = Path(__file__).parents[2] / "docs" / "clients.md"


def told(command: list[str], given: Any = None, folder: Path | None = None) -> str:
    """The last line that a command prints; it is given JSON, and runs in a folder."""
    done = subprocess.run(
        command, cwd=folder, input=json.dumps(given), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


def check_example(client: str, command: list[str], folder: Path, *options: str) -> None:
    """The code of a client's section, run where OUT is a Llama, prints its tokens."""
    section = rf"^## {client}$.*?^```\w+\n(.*?)^```$"
    found = re.search(section, PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert found, client
    source = random_checkpoint(folder / "in", CAUSAL["llama"])
    assert main(["build", str(source), "-o", str(folder / "OUT"), *options]) == 0
    tokens = re.findall(r"\d+", told([*command, found[1]], folder=folder))
    own = gg.generate(folder / "OUT", [11, 12, 13], max_new_tokens=16)
    list(own)
    assert [int(token) for token in tokens] == [11, 12, 13, *own.tokens[0]]
