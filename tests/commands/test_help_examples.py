"""What `--help` shows of a decoder works when it is pasted, one command after the other."""

import shlex
from pathlib import Path

import numpy as np
import pytest

from graphgen import commands

ORDER = "build inspect optimize run explain bisect artifacts train export".split()
SHORTER = {"--features 256": "--features 32", "--steps 1000 --warmup 100": "--steps 2 --warmup 1"}


def test_the_examples_of_a_decoder_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    rows = np.ones((16, 8), np.int64)
    np.save("ids.npy", rows[:1])
    np.savez("a.npz", input_ids=rows, labels=rows)
    for name in ORDER:
        text = f"graphgen {name} {getattr(commands, name).EXAMPLE}"
        for long, short in SHORTER.items():
            text = text.replace(long, short)
        made = [shlex.split(line, comments=True)[1:] for line in text.splitlines()]
        present = [
            words for words in made if {"decoder", "decoder.onnx", "fast.onnx", "art"} & {*words}
        ]
        assert present, name
        for words in present:
            assert commands.main(words) == 0, words
