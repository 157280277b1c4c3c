"""What commands share: reading options and printing."""

import argparse
import json
import math
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graphgen.errors import GraphgenError

if TYPE_CHECKING:
    from rich.table import Table

FLAG: dict[str, Any] = {"action": "store_true"}
FILE: dict[str, Any] = {"type": Path, "metavar": "FILE"}
MODEL: dict[str, Any] = FILE | {"help": "an ONNX file"}


def written(path: str) -> Path:
    """The type of an option that names what a command writes: no other option may name it."""
    return Path(path)


def rewritten(path: str) -> Path:
    """The same, but it may be the model that is read."""
    return Path(path)


OUT: dict[str, Any] = {"type": written, "metavar": "FILE"}
ANEW: dict[str, Any] = {"type": rewritten, "metavar": "FILE"}
ANEW |= {"help": "where to write it; may be the file that is read"}

TARGET: dict[str, Any] = {
    "default": "cpu",
    "help": "cpu, cuda, webgpu or official (onnxruntime 1.19)",
}
RUNTIME: dict[str, Any] = {"metavar": "1.20"}
RUNTIME |= {"help": "the runtime's version (with cpu, the installed one)"}
PROCESSOR: dict[str, Any] = {"metavar": "avx2"}
PROCESSOR |= {"help": "whose timings decide what pays: avx2 or avx512 (this machine's)"}


def provider(text: str) -> str | Path:
    """The name of a provider, or the path of a plugin's library: that has a separator."""
    return Path(text) if "/" in text or os.sep in text else text


PROVIDER: dict[str, Any] = {"type": provider, "metavar": "NAME"}
PROVIDER |= {"help": "as `graphgen providers` lists them, or a library's path (cuda, else cpu)"}
STRICT: dict[str, Any] = {"help": "fail if the provider leaves floats to the CPU"} | FLAG
ADAPTER: dict[str, Any] = {"action": "append", "default": [], "metavar": "PATH | NAME=PATH"}
ADAPTER |= {"help": "merge what a run, PEFT's folder or a file .onnx_adapter holds; with names, "}
ARRAYS: dict[str, Any] = {"nargs": "+", "action": "extend", "default": []}
ARRAYS |= {"metavar": "NAME=X.npy | X.npz", "help": "arrays for inputs; the others are random"}

_WIDTH = 1000  # of tables that go into a file or a pipe, at most


def count(text: str) -> int:
    """A number of at least 0."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 0")
    return int(text)


def share(text: str) -> float:
    """Read `3%` and `0.03` as 0.03; `3` could mean 3 or 3% and is an error."""
    whole, most = (100, math.inf) if text.endswith("%") else (1, 1)
    try:
        value = float(text.removesuffix("%")) / whole
    except ValueError:
        value = -1.0
    if not 0 <= value < most:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a share of at least 0, such as 0.03 or 3%"
        )
    return value


N: dict[str, Any] = {"type": count, "metavar": "N"}
OWN: dict[str, Any] = {"dest": "with_passes", "action": "append", "default": []}
OWN |= {"metavar": "NAME[@PASS]", "help": "also run a pass of your own: docs/writing-a-pass.md"}


def _number(text: str) -> tuple[str, int]:
    name, equals, size = text.partition("=")
    if not name or not equals or not size.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=INT")
    return name, int(size)


NUMBERS: dict[str, Any] = {"type": _number, "metavar": "NAME=INT"}
NUMBERS |= {"action": "append", "default": []}


def numbers(option: str, given: Sequence[tuple[str, int]]) -> dict[str, int]:
    """What `NUMBERS` has read, by name. Raises GraphgenError if a name is given twice."""
    for name, times in Counter(name for name, _ in given).items():
        if times > 1:
            raise GraphgenError(f"{option} {name} is given {times} times; give it once")
    return dict(given)


def adapters_of(given: Sequence[str]) -> dict[str, Any]:
    """What the values of `ADAPTER` name: one adapter to merge, or several by name."""
    named = [re.fullmatch(r"([^/\\=]+)=(.+)", text) for text in given]
    if len(given) == 1 and not named[0]:
        return {"adapter": Path(given[0]), "adapters": None}
    found: dict[str, Path] = {}
    for text, match in zip(given, named, strict=True):
        if match is None:
            raise GraphgenError(f"--adapter {text} needs a name beside others: NAME={text}")
        if match[1] in found:
            raise GraphgenError(f"--adapter {match[1]} is given twice; give it once")
        found[match[1]] = Path(match[2])
    return {"adapter": None, "adapters": found or None}


def check_places(options: argparse.Namespace) -> None:
    """Raise GraphgenError if a command would write what it reads, or one place twice.

    `options.actions` are those of its parser.
    """
    named = [(a, path) for a in options.actions for path in _paths(getattr(options, a.dest, None))]
    for action, path in (one for one in named if one[0].type in (written, rewritten)):
        for other, at in (one for one in named if one[0] is not action):
            anew = action.type is rewritten and other.dest == "model"
            if not anew and _same(path, at):
                names = [(a.option_strings or [a.metavar])[0] for a in (action, other)]
                raise GraphgenError(f"{' and '.join(names)} are both {path}; give two files")


def _paths(value: Any) -> Iterator[Path]:
    """The paths in an option's value, also in NAME=X.npy; a text without an ending is not one."""
    for one in value if isinstance(value, list) else [value]:
        if isinstance(one, str) and Path(one).suffix:
            yield Path(one.rpartition("=")[2])
        elif isinstance(one, Path):
            yield one


def _same(one: Path, other: Path) -> bool:
    try:
        return one.samefile(other)
    except OSError:  # one of them does not exist yet
        return os.path.realpath(one) == os.path.realpath(other)


def keywords(function: Callable[..., Any], options: argparse.Namespace) -> dict[str, Any]:
    """The options that a function takes by their names."""
    import inspect  # with all that it imports, a tenth of the time of --help

    known = inspect.signature(function).parameters.values()
    names = [p.name for p in known if p.kind is p.KEYWORD_ONLY]
    return {name: value for name, value in vars(options).items() if name in names}


def print_json(value: Any) -> None:
    """Print a document as JSON; NaN is an error, since JSON has none."""
    print(json.dumps(value, indent=2, allow_nan=False))


def show(table: "Table") -> None:
    """Print a table if it has rows: columns of text alone, unless to a terminal.

    Not by rich, which ends the process on a broken pipe.
    """
    from rich.console import Console

    terminal = sys.stdout is not None and sys.stdout.isatty()
    console = Console(width=None if terminal else _WIDTH)
    if not terminal:
        table.box, table.pad_edge = None, False
    with console.capture() as captured:
        console.print(table)
    if table.row_count:
        print("\n".join(line.rstrip() for line in captured.get().splitlines()))


@contextmanager
def doing(what: str) -> Iterator[Callable[[str], None]]:
    """Say on a terminal what is being done, and what is done next: names in it stay as they are."""
    from rich.console import Console
    from rich.text import Text

    from graphgen.display import plain

    with Console(stderr=True).status(Text(plain(what))) as status:
        yield lambda what: status.update(Text(plain(what)))


def tokens_and_rows(text: str) -> tuple[int, int]:
    """`512x8` as 512 tokens in each of 8 rows; `512` is one row."""
    length, _, rows = text.partition("x")
    if not length.isdecimal() or not (rows or "1").isdecimal() or not int(length) * int(rows or 1):
        raise argparse.ArgumentTypeError(f"{text!r} is not TOKENS or TOKENSxROWS, such as 512x8")
    return int(length), int(rows or 1)
