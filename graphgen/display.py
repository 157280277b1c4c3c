"""What objects show at a prompt and in notebooks: at most a screen, and never an error.

Decorate `__repr__` with `on_screen` and `_repr_html_` with `in_notebook`; what is a table inherits
from `Tabular`. Names may come from files of others: control characters are written as escapes, and
HTML and markup are escaped.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import wraps
from itertools import islice
from reprlib import recursive_repr
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from rich.table import Table

_T = TypeVar("_T")

LINES, WIDTH = 20, 100
"""A screen: the most lines, and the most characters of each."""

_ROWS = 200  # the most rows of a table in a notebook, where it scrolls


def on_screen(write: Callable[[_T], Iterable[str]]) -> Callable[[_T], str]:
    """A `__repr__` of the lines that `write` gives; of too many, the first and the last.

    What is only half made, such as an object whose `__init__` failed, shows its class.
    """

    @recursive_repr()  # the error for a name that a half-made object lacks shows the object
    @wraps(write)
    def text(self: _T) -> str:
        try:
            return "\n".join(fitted(list(write(self))))
        except Exception:
            return f"<{type(self).__name__}, incomplete>"

    return text


def in_notebook(write: Callable[[_T], str | None]) -> Callable[[_T], str | None]:
    """A `_repr_html_`, or the `__repr__` where `write` fails or gives None."""

    @wraps(write)
    def html(self: _T) -> str | None:
        try:
            return write(self)
        except Exception:
            return None

    return html


def fitted(lines: Sequence[str]) -> list[str]:
    """The lines without control characters, cut to a screen."""
    if len(lines) > LINES:
        left_out = f"... {len(lines) - LINES + 1:,} more lines"
        lines = [*lines[: LINES - 2], left_out, lines[-1]]
    return [cut(plain(line)) for line in lines]


def plain(text: str) -> str:
    """The text with escapes for what does not print: control characters, lone surrogates."""
    if text.isprintable():
        return text
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text
    )


_UNSAFE = re.compile(
    r"(\x1b\[[\d;]*m)|[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]"
)
"""Colors, which stay, and what moves the cursor, changes the direction or the settings."""


def printable(text: str, encoding: str | None) -> str:
    """A text that a terminal of this encoding shows: escapes for what harms it or is not in it.

    Unlike `plain`, it keeps lines, tabs, colors and every kind of space.
    """
    text = _UNSAFE.sub(lambda m: m[1] or m[0].encode("unicode_escape").decode("ascii"), text)
    codec = encoding or "utf-8"
    return text.encode(codec, "backslashreplace").decode(codec)


def cut(text: str, width: int = WIDTH) -> str:
    """The text, or its beginning and `...` if it is longer than `width`."""
    return text if len(text) <= width else f"{text[: width - 3]}..."


def in_bytes(size: int) -> str:
    """`46.8 MB`, or `8,896 bytes` below 0.1 MB."""
    return f"{size / 1e6:,.1f} MB" if size >= 1e5 else f"{size:,} bytes"


def listed(items: Iterable[Any], count: int, most: int = 6) -> str:
    """`a, b and 3 more`: the first few of `count` items."""
    found = ", ".join(plain(str(item)) for item in islice(items, most))
    return found + (f" and {count - most:,} more" if count > most else "")


def fields(**texts: str | Sequence[str]) -> list[str]:
    """Indented lines, each with a name; of several texts, one line for each of the first few."""
    lines = []
    for name, given in texts.items():
        every = [given] if isinstance(given, str) else [*given]
        shown = every if len(every) <= 5 else [*every[:4], f"and {len(every) - 4:,} more"]
        heads = [name, *[""] * len(shown)]
        lines += [f"  {head:<11}{text}" for head, text in zip(heads, shown, strict=False)]
    return lines


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """The cells of a table as lines; columns of numbers are flush right."""
    flush = _of_numbers(rows)
    rows = [[cut(plain(cell), WIDTH // 2) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(row, widths, flush, strict=True)
        ).rstrip()
        for row in rows
    ]


def table(title: str, rows: Sequence[Sequence[str]]) -> str:
    """The same cells as HTML, with a head; of very many, the first."""
    sides = ["right" if right else "left" for right in _of_numbers(rows)]

    def row(kind: str, cells: Sequence[str]) -> str:
        written = (
            f'<{kind} style="text-align: {side}">{safe(cell)}</{kind}>'
            for cell, side in zip(cells, sides, strict=True)
        )
        return f"<tr>{''.join(written)}</tr>"

    head, *body = rows
    parts = [row("th", head), *(row("td", cells) for cells in body[:_ROWS])]
    if body[_ROWS:]:
        more = f"{len(body) - _ROWS:,} more rows"
        parts.append(f'<tr><td colspan="{len(head)}">{more}</td></tr>')
    return (
        '<div style="max-height: 32em; overflow: auto"><table>'
        f'<caption style="text-align: left">{safe(title)}</caption>{"".join(parts)}</table></div>'
    )


def rich_table(title: str, rows: Sequence[Sequence[str]]) -> "Table":
    """The same cells as a table for a command to print, whole."""
    from rich.markup import escape  # commands print tables, prompts do not
    from rich.table import Column, Table

    head, *body = ([escape(plain(cell)) for cell in row] for row in rows)
    flush = _of_numbers(rows)
    columns = (
        Column(name, justify="right" if right else "left")
        for name, right in zip(head, flush, strict=True)
    )
    made = Table(*columns, title=escape(plain(title)) or None, title_justify="left")
    for row in body:
        made.add_row(*row)
    return made


class Tabular:
    """A table: its heading and first and last rows at a prompt, and HTML in a notebook."""

    def heading(self) -> str:
        """What it is a table of, in a line that begins with what it is."""
        raise NotImplementedError

    def cells(self) -> list[list[str]]:
        """A head, and a row for each item."""
        raise NotImplementedError

    def table(self) -> "Table":
        """The same for a command to print."""
        return rich_table(self.heading(), self.cells())

    @on_screen
    def __repr__(self) -> Iterator[str]:
        yield self.heading()
        yield from aligned(self.cells())

    @in_notebook
    def _repr_html_(self) -> str:
        return table(self.heading(), self.cells())


def safe(text: str) -> str:
    """A text in one line as HTML."""
    return _escaped(plain(text))


def preformatted(text: str) -> str:
    """What `on_screen` gave as HTML, as a terminal shows it."""
    return f"<pre>{_escaped(text)}</pre>"


def _escaped(text: str) -> str:
    from html import escape  # its table of names is not needed at a prompt

    return escape(text)


def _of_numbers(rows: Sequence[Sequence[str]]) -> list[bool]:
    """For each column, whether the cells below its head begin with digits, and there are some."""
    columns = zip(*rows[1:], strict=True) if rows[1:] else [()] * len(rows[0])
    return [
        any(column) and all(cell.lstrip("-")[:1].isdigit() for cell in column if cell)
        for column in columns
    ]
