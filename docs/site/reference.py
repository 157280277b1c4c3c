"""The reference, written anew for each build from signatures, docstrings and parsers.

A page says where it goes: the line `<!-- reference: NAME -->` becomes the entries of a module's
`__all__`, of one function or class, of all operators (`graphgen.ops`), or of all commands
(`graphgen.commands`). Entries are MyST, https://myst-parser.readthedocs.io.
"""

import ast
import contextlib
import dataclasses
import inspect
import io
import os
import re
import textwrap
from collections.abc import Callable, Iterator
from importlib import import_module
from types import ModuleType
from typing import Any

from graphgen import commands, ops
from graphgen.nn import Module

MARK = re.compile(r"^<!-- reference: ([\w.]+) -->$", re.MULTILINE)
FAMILIES = {
    "Elementwise": "elementwise trigonometry integers activation",
    "Sums, norms and softmax": "reduce norm softmax",
    "Products of matrices": "linalg experts",
    "Attention and positions": "attention group_query merged_attention sparse_attention "
    "hashed_attention rotary embedding",
    "Shapes and indices": "layout rearranging padding scatter sizes",
    "Convolution, pooling and Fourier transforms": "convolution sampling fourier",
    "Recurrence and control flow": "recurrent state_space linear_attention control_flow",
    "Losses and dropout": "loss dropout",
}
"""The files of ops/ under each heading."""


def expand(text: str) -> str:
    """A page with its reference filled in."""
    return MARK.sub(lambda found: written(found[1]), text)


def written(name: str) -> str:
    """The entries of what has this dotted name."""
    if name == ops.__name__:
        return "\n\n".join(operators())
    if name == commands.__name__:
        return "\n\n".join(command_lines())
    thing = resolve(name)
    if isinstance(thing, ModuleType):
        return "\n\n".join(entry(f"{name}.{each}", getattr(thing, each)) for each in thing.__all__)
    return entry(name, thing)


def resolve(name: str) -> Any:
    """What has this dotted name: an attribute before a module."""
    if "." not in name:
        return import_module(name)
    holder, _, last = name.rpartition(".")
    found = getattr(resolve(holder), last, None)
    return import_module(name) if found is None else found


def operators() -> Iterator[str]:
    """All operators, each under the heading of its file. Raises KeyError for a new file."""
    heading = {file: title for title, files in FAMILIES.items() for file in files.split()}
    found: dict[str, list[str]] = {title: [] for title in FAMILIES}
    for name in ops.__all__:
        found[heading[getattr(ops, name).__module__.rpartition(".")[2]]].append(name)
    for title, names in found.items():
        yield f"## {title}"
        links = (f"[{name}](#graphgen.ops.{name})" for name in names)
        yield ", ".join(links)
        yield from (entry(f"graphgen.ops.{name}", getattr(ops, name)) for name in names)


def command_lines() -> Iterator[str]:
    """What `--help` prints, of every command."""
    yield f"```text\n{help_of()}```"
    for module in commands.COMMANDS:
        name = commands.name_of(module)
        yield f"## graphgen {name}\n\n```text\n{help_of(name)}```"


def help_of(*words: str) -> str:
    """`graphgen WORDS --help` at 90 columns."""
    printed, columns = io.StringIO(), os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = "90"
    with contextlib.redirect_stdout(printed):
        commands.main([*words, "--help"])
    os.environ.pop("COLUMNS") if columns is None else os.environ.update(COLUMNS=columns)
    return printed.getvalue()


def entry(name: str, thing: Any) -> str:
    """The entry of one function, operator, class or value."""
    if inspect.isclass(thing):
        return of_class(name, thing)
    if not (inspect.isroutine(thing) or hasattr(thing, "function")):
        text = inspect.getdoc(thing) if thing.__class__.__module__.startswith("graphgen") else None
        return directive("data", name, markdown(text or "") or f"`{thing}`")
    body = [markdown(inspect.getdoc(thing) or "")]
    if hasattr(thing, "function"):
        body.append(source(thing.function))
    return directive("function", name + signature(thing), *body)


def of_class(name: str, thing: type) -> str:
    """The entry of a class, with the methods and properties that its own file declares."""
    if issubclass(thing, BaseException):
        return directive("exception", name, markdown(inspect.getdoc(thing) or ""))
    body = [markdown(inspect.getdoc(thing) or "")]
    members = {n: m for c in thing.__mro__[::-1] if ours(c) for n, m in vars(c).items()}
    for member, value in members.items():
        if member == "__call__" and issubclass(thing, Module) and inspect.isfunction(value):
            body.append(directive("method", f"__call__{signature(value)}", depth=3))
        elif (member == "__call__" or not member.startswith("_")) and inspect.getdoc(value):
            if issubclass(thing, Module) and thing is not Module and member not in vars(thing):
                continue
            text = markdown(inspect.getdoc(value) or "")
            if inspect.isroutine(value) or isinstance(value, (classmethod, staticmethod)):
                called = getattr(value, "__func__", value)
                body.append(directive("method", member + signature(called), text, depth=3))
            elif isinstance(value, property):
                body.append(directive("property", member, text, depth=3))
    if issubclass(thing, Module) and thing is not Module:
        body.append(source(thing))
    return directive("class", name + signature(thing), *body)


def ours(thing: type) -> bool:
    """Whether a class is graphgen's."""
    return thing.__module__.startswith("graphgen")


def signature(thing: Any) -> str:
    """A call as its source writes it: evaluated, types and defaults are long and unreadable."""
    if dataclasses.is_dataclass(thing) and "__init__" not in inspect.getsource(thing):  # type: ignore[arg-type]
        fields = (f for f in dataclasses.fields(thing) if f.init)
        return f"({', '.join(map(of_field, fields))})"
    called = thing.__init__ if inspect.isclass(thing) else getattr(thing, "function", thing)
    try:
        text = textwrap.dedent(inspect.getsource(inspect.unwrap(called)))
    except TypeError:  # the __init__ of object
        return "()"
    [node] = ast.parse(text).body
    assert isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)), thing
    for each in ast.walk(node.args):
        if isinstance(each, ast.arg) and isinstance(each.annotation, ast.Constant):
            each.annotation = ast.Name(str(each.annotation.value))  # a type in quotes
    given = ast.unparse(node.args)
    given = re.sub(r"^self(, /)?(, )?", "", given)
    returned = (
        ""
        if node.returns is None or inspect.isclass(thing)
        else ast.unparse(node.returns).strip("'")
    )
    return f"({given})" + (f" -> {returned}" if returned else "")


def of_field(field: "dataclasses.Field[Any]") -> str:
    """A field of a dataclass, as an argument."""
    kind = field.type if isinstance(field.type, str) else inspect.formatannotation(field.type)
    if field.default is not dataclasses.MISSING:
        return f"{field.name}: {kind} = {field.default!r}"
    return f"{field.name}: {kind}" + " = ..." * (field.default_factory is not dataclasses.MISSING)


def directive(kind: str, heading: str, *body: str, depth: int = 4) -> str:
    """One entry of Sphinx's domain of Python: indexed, with an anchor of its own."""
    fence = ":" * (depth + 2)
    text = "\n\n".join(filter(None, body))
    room = heading.partition("(")[0].rpartition(".")[0]
    option = f":module: {room}\n\n" if room else ""
    return f"{fence}{{py:{kind}}} {heading.removeprefix(f'{room}.')}\n{option}{text}\n{fence}"


def source(thing: Callable[..., Any] | type) -> str:
    """The declaration, folded."""
    text = textwrap.dedent(inspect.getsource(thing)).rstrip()
    file = str(inspect.getmodule(thing).__name__).replace(".", "/")  # type: ignore[union-attr]
    return f"<details><summary>{file}.py</summary>\n\n~~~python\n{text}\n~~~\n\n</details>"


def markdown(docstring: str) -> str:
    """A docstring as MyST: arguments as a list, papers and addresses as links."""
    text = re.sub(r"^(Args|Returns|Yields|Raises):$", r"**\1**\n", docstring, flags=re.MULTILINE)
    text = re.sub(r"^ {4}(\*{0,2}\w+(?:, \*{0,2}\w+)*): (?=\S)", r"- `\1`: ", text, flags=re.M)
    text = re.sub(r"^ {8}(?=\S)", "  ", text, flags=re.MULTILINE)
    parts = re.split(r"(`+[^`]+`+)", text)
    return "".join(part if index % 2 else _prose(part) for index, part in enumerate(parts))


def _prose(text: str) -> str:
    """What is not code: nothing in it is HTML or a heading."""
    text = re.sub(r"(?m)^#|<", lambda found: f"\\{found[0]}", text)
    page = r"(\w+(?:::\w+)?), (as of opset \d+), (https://\S+)"
    text = re.sub(page, r"[\1](\3), \2", text)
    text = re.sub(r"(?<!\()https?://[^\s)>,]*[^\s)>,.;:]", r"<\g<0>>", text)
    return re.sub(r"\barXiv (\d{4}\.\d{4,5})\b", r"[arXiv \1](https://arxiv.org/abs/\1)", text)
