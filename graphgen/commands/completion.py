"""The command `completion`: a script by which a shell completes commands, options and choices."""

import argparse
from collections.abc import Callable
from typing import Any

from graphgen.errors import GraphgenError

EXAMPLE = """bash > ~/.local/share/bash-completion/completions/graphgen
  graphgen completion zsh > ~/.zfunc/_graphgen      # a folder in $fpath
  graphgen completion fish > ~/.config/fish/completions/graphgen.fish"""


def run(options: argparse.Namespace) -> None:
    """Print the script that completes commands in a shell."""
    from graphgen import commands

    try:
        import shtab
    except ImportError as error:
        need = "shtab, which writes the script, is not installed"
        raise GraphgenError(
            f"completion: {need}; run `pip install graphgen-onnx[shell]`"
        ) from error
    print(shtab.complete(commands._parser([], listed=True), shell=options.shell))


def add_options(add: Callable[..., Any]) -> None:
    """Add the options of `completion`."""
    add("shell", choices=("bash", "zsh", "fish"), help="which shell the script is for")
