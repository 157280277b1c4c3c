"""The command `completion`: a script by which a shell completes commands, options and choices."""

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from graphgen.commands.options import rewritten, written
from graphgen.errors import GraphgenError

EXAMPLE = """bash > ~/.local/share/bash-completion/completions/graphgen
  graphgen completion zsh > ~/.zfunc/_graphgen      # a folder in $fpath
  graphgen completion fish > ~/.config/fish/completions/graphgen.fish"""

_DATA = ("data", "eval")  # of `train`: files, or functions in Python


def run(options: argparse.Namespace) -> None:
    """Print the script that completes commands in a shell."""
    from graphgen import commands
    from graphgen.providers import Name
    from graphgen.targets import TargetName

    try:
        import shtab
    except ImportError as error:
        need = "shtab, which writes the script, is not installed"
        how = 'run `pip install "graphgen-onnx[shell]"`'
        raise GraphgenError(f"completion: {need}; {how}") from error
    parser = commands._parser([], listed=True)
    names = {"target": get_args(TargetName), "provider": get_args(Name)}
    _add_values(parser, names, shtab.FILE, shtab.DIRECTORY)
    print(shtab.complete(parser, shell=options.shell))


def _add_values(
    parser: argparse.ArgumentParser, names: Mapping[str, Sequence[str]], file: Any, folder: Any
) -> None:
    """Complete options that take one of some names, and arguments that name files or folders."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                _add_values(command, names, file, folder)
        elif action.dest in names:
            action.choices = action.choices or names[action.dest]
        elif action.metavar in ("DIR", "NAME | DIR"):
            action.complete = folder  # type: ignore[attr-defined]
        elif action.type in (Path, written, rewritten) or action.dest in _DATA:
            action.complete = file  # type: ignore[attr-defined]


def add_options(add: Callable[..., Any]) -> None:
    """Add the options of `completion`."""
    add("shell", choices=("bash", "zsh", "fish"), help="which shell the script is for")
