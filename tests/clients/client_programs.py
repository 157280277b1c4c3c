"""Programs that run where a client is installed, and those of docs/clients.md."""

import json
import re
import subprocess
from pathlib import Path
from typing import Any

from random_checkpoints import CAUSAL, random_checkpoint

import graphgen as gg
from graphgen.commands import main

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
