"""The command line. `graphgen COMMAND --help` shows an example of each command.

Files are written before anything is printed, each to a temporary file that is then renamed.

A command imports what it runs when it runs: `--help` and bad options are answered without any
library, in a tenth of the time that importing them takes (bench/start.py).
"""

import argparse
import contextlib
import os
import re
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import chain, takewhile
from typing import Any, NoReturn

import graphgen as gg
from graphgen.commands import (
    adapter,
    artifacts,
    bisect,
    build,
    compare,
    completion,
    demo,
    diff,
    doctor,
    explain,
    export,
    generate,
    import_,
    inspect,
    map,
    optimize,
    providers,
    run,
    train,
)
from graphgen.commands.options import check_places
from graphgen.display import cut, printable
from graphgen.errors import OURS, GateError, GraphgenError, GraphgenWarning, near

_LONGEST = 2000  # characters of an error: names in it may have any length

GROUPS: dict[str, tuple[Any, ...]] = {
    "start here": (demo, doctor, providers),
    "make a model": (build, import_, optimize),
    "understand it": (inspect, explain, compare, diff, bisect),
    "run it": (run, generate, map),
    "train it": (artifacts, train, export, adapter),
    "in your shell": (completion,),
}
"""The commands, in the order of use.

A command is a module: `run` and its docstring of one line, what `add_options` adds, and an
`EXAMPLE`. Options that take an import to know are added by its `add_more`, which is
called only for the command to be run, with all arguments.
"""

COMMANDS = tuple(chain.from_iterable(GROUPS.values()))

EXIT_CODES = """exit codes:
  0 done, 1 a fault in graphgen, 2 bad input, 3 a gate was not met,
  130 interrupted, 143 terminated"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. An error is one line on stderr, never raised."""
    _reserve_streams()
    with _terminable() as terminated:
        return _run(sys.argv[1:] if arguments is None else arguments, terminated)


def _reserve_streams() -> None:
    """Open what a caller has closed of stdin, stdout and stderr: a file could get its number.

    What libraries write to stderr would go into a model, for one.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)


@contextlib.contextmanager
def _terminable() -> Iterator[list[int]]:
    """Let SIGTERM end a command as an interrupt does; the list then holds its number.

    A handler that the caller has set stays. Only the main thread can have handlers.
    """
    terminated: list[int] = []

    def terminate(number: int, _: object) -> None:
        signal.signal(number, signal.SIG_IGN)  # `timeout` and others send it twice
        terminated.append(number)
        raise KeyboardInterrupt

    main_thread = threading.current_thread() is threading.main_thread()
    ours = main_thread and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    if ours:
        signal.signal(signal.SIGTERM, terminate)
    try:
        yield terminated
    finally:
        if ours:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


class _Escaping:
    """A stream that escapes what would harm a terminal, or is not in its encoding.

    Names in what commands print come from files of others.
    """

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        self._stream.write(printable(text, getattr(self._stream, "encoding", None)))
        return len(text)

    def flush(self) -> None:
        self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextlib.contextmanager
def _escaped() -> Iterator[None]:
    """Print through an `_Escaping` stream. A stream that someone else sets meanwhile stays."""
    stream = sys.stdout
    if stream is None:  # a caller has closed it
        yield
        return
    with contextlib.redirect_stdout(_Escaping(stream)):
        yield


def _tell(line: str) -> None:
    """One line on stderr, clipped."""
    if sys.stderr is None:  # closed by a caller; print would take stdout
        return
    text = f"graphgen: {cut(' '.join(line.split()), _LONGEST)}"
    print(printable(text, getattr(sys.stderr, "encoding", None)), file=sys.stderr, flush=True)


def _run(arguments: Sequence[str], terminated: Sequence[int]) -> int:
    try:
        options = _parser(arguments).parse_args(arguments)
        check_places(options)
        with _warnings_in_one_line(), _escaped():
            options.run(options)
        if sys.stdout is not None:  # None where a caller has closed it
            sys.stdout.flush()
        return 0
    except SystemExit:  # from --help, --version, or rich on a broken pipe
        return 0
    except BrokenPipeError:  # the reader has stopped; files were written before
        _silence()
        return 0
    except KeyboardInterrupt:
        reason = "terminated" if terminated else "interrupted"
        return _fail(arguments, reason, 128 + next(iter(terminated), signal.SIGINT))
    except GateError as error:
        return _fail(arguments, str(error), 3)
    except GraphgenError as error:
        return _fail(arguments, str(error), 2)
    except OSError as error:
        _silence()
        return _fail(arguments, f"{error.filename or 'stdout'}: {error.strerror}", 2)
    except MemoryError as error:
        return _fail(arguments, f"not enough memory: {error}; choose smaller sizes", 2)
    except Exception as error:
        message = f"{type(error).__name__}: {error}; this is a fault in graphgen: please report it "
        report = "with what the same command prints with --debug, and with `graphgen doctor`"
        return _fail(arguments, message + report, 1)


@contextlib.contextmanager
def _warnings_in_one_line() -> Iterator[None]:
    """Show each warning once, as one line on stderr; leave those of a user's own code alone.

    What libraries warn of or log, such as parts of a file that they leave out, becomes such lines
    too. Numbers of a file that are too large get no line of NumPy's: what is made of them has an
    error of ours.
    """
    import logging

    with warnings.catch_warnings():
        warnings.simplefilter("always", GraphgenWarning)
        warnings.filterwarnings("ignore", ".+ encountered in ", RuntimeWarning)
        others, shown = warnings.showwarning, set[str]()
        logged, logging.lastResort = logging.lastResort, logging.Handler(logging.WARNING)
        logging.lastResort.emit = lambda record: _tell(  # type: ignore[method-assign]
            f"{record.name.partition('.')[0]}: {record.getMessage()}"
        )

        def show_one(
            message: Any, category: Any, filename: str, *more: Any, **further: Any
        ) -> None:
            line = " ".join(str(message).split())
            library = re.search(r"(?:site|dist)-packages[/\\](\w+)", filename)
            if issubclass(category, GraphgenWarning) or filename.startswith(OURS):
                pass
            elif library:
                line = f"{library[1]}: {line}"
            else:
                others(message, category, filename, *more, **further)
                return
            if line not in shown:
                shown.add(line)
                _tell(line)

        warnings.showwarning = show_one
        try:
            yield
        finally:
            logging.lastResort = logged


def _fail(arguments: Sequence[str], message: str, code: int) -> int:
    if "--debug" in arguments:
        traceback.print_exc()
    _tell(message)
    if parallel := sys.modules.get("graphgen.train.parallel"):  # else there is one process
        parallel.abort(code)
    return code


def _silence() -> None:
    """Let the interpreter flush stdout into nothing when it ends."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are ours, and name what a misspelled word was meant to be."""

    def parse_known_args(self, args: Any = None, namespace: Any = None, **_: Any) -> Any:
        # First, because argparse would say that a required option is missing, not misspelled.
        own = (lambda w: w.startswith("-")) if self._subparsers else (lambda w: w != "--")
        known, helped = self._option_string_actions, {"-h", "--help"} & {*args}
        for option in (w.partition("=")[0] for w in takewhile(own, args) if w.startswith("--")):
            if not (helped or " " in option or any(name.startswith(option) for name in known)):
                self.error(f"there is no option {option}{near(option, known)}")
        found, further = super().parse_known_args(args, namespace)
        if further:  # raised here, `--help` is that of the command
            self.error(f"unrecognized arguments: {' '.join(further)}")
        return found, further

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            error.message += near(value, action.choices or ())
            raise

    def error(self, message: str) -> NoReturn:
        see = " See" if message.endswith("?") else "; see"
        raise GraphgenError(f"{message}{see} `{self.prog} --help`")


def _parser(arguments: Sequence[str], *, listed: bool = False) -> argparse.ArgumentParser:
    """The parser, with the options of the command that is named, or of all commands if none is.

    `listed` also names the commands in the list of argparse, which has no groups.
    """
    parser = _Parser(
        prog="graphgen",
        usage="%(prog)s [-h] [--version] [--debug] COMMAND ...",
        description=str(gg.__doc__).replace(": ", ":\n", 1),  # two lines of 80 columns
        epilog=_overview(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=gg.__version__, help="show it")
    parser.add_argument("--debug", action="store_true", help=_DEBUG)
    chosen = next((word for word in arguments if not word.startswith("-")), None)
    hidden: Any = None if listed else argparse.SUPPRESS
    parsers = parser.add_subparsers(metavar="COMMAND", required=True, help=hidden, prog=parser.prog)
    for command in COMMANDS:
        name = name_of(command)
        how: dict[str, Any] = {"help": _summary(command)} if listed else {}
        sub = parsers.add_parser(
            name,
            **how,
            description=command.run.__doc__,
            epilog=f"example:\n  graphgen {name} {command.EXAMPLE}\n\n{EXIT_CODES}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        if chosen not in (name, None):
            continue
        actions: list[argparse.Action] = []
        sub.set_defaults(run=command.run, actions=actions)
        sub.add_argument("--debug", action="store_true", default=argparse.SUPPRESS, help=_DEBUG)
        add = partial(_add, sub, actions)
        command.add_options(add)
        if name == chosen and hasattr(command, "add_more"):
            command.add_more(add, arguments)
    return parser


_DEBUG = "show tracebacks"


def name_of(command: Any) -> str:
    """What a command is called: its module's name, where a word of Python ends in `_`."""
    return str(command.__name__.rpartition(".")[2]).rstrip("_")


def _summary(command: Any) -> str:
    text = str(command.run.__doc__).rstrip(".")
    return text[0].lower() + text[1:]


def _overview() -> str:
    """The groups of commands, each command with its summary."""
    width = 2 + max(len(name_of(command)) for command in COMMANDS)
    lines = []
    for title, members in GROUPS.items():
        lines.append(f"{title}:")
        for command in members:
            lines.append(f"  {name_of(command):<{width}}{_summary(command)}")
        lines.append("")
    lines += ["`graphgen COMMAND --help` shows the options of a command, and an example.", ""]
    return "\n".join([*lines, EXIT_CODES])


def _add(parser: Any, actions: list[argparse.Action], *names: str, **given: Any) -> None:
    actions.append(parser.add_argument(*names, **given))
