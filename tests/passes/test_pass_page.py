"""docs/passes.md: the list of passes is that of the code.

python tests/passes/test_pass_page.py --remake    # write its tables anew
"""

import ast
import inspect
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from graphgen.op import TABLE, UNDECLARED
from graphgen.passes import PIPELINE
from graphgen.passes.clean import clean
from graphgen.passes.fuse import _apart
from graphgen.passes.fusions import FORMULAS, RECOGNIZED
from graphgen.passes.legalize import legalize
from graphgen.targets.kernels import REFUSED

PAGE = Path(__file__).resolve().parents[2] / "docs" / "passes.md"
OTHERS: dict[str, Callable[..., Any]] = {
    "clean": clean,
    "legalize": legalize,
    "keep_apart": _apart,
}


def told(function: Any, paragraphs: int = 1) -> str:
    """The first paragraphs of a docstring, in one line of a table."""
    text = inspect.getdoc(function)
    assert text, function
    return " ".join(" ".join(text.split("\n\n")[:paragraphs]).split()).replace("|", "\\|")


def name_of(domain: str, name: str) -> str:
    return f"`{domain}::{name}`" if domain else f"`{name}`"


def table(*rows: tuple[str, ...]) -> str:
    lines = [rows[0], ("---",) * len(rows[0]), *rows[1:]]
    return "".join(f"| {' | '.join(row)} |\n" for row in lines)


def fusions() -> str:
    rows = []
    for name in dict.fromkeys(PIPELINE):
        for op, inputs, unknown, fixed in FORMULAS.get(name, ()):
            given = [f"{key} {value}" for key, value in fixed.items()]
            factor = f"{unknown} times any number" if unknown in op.inputs else f"any {unknown}"
            free = [factor] if unknown else []
            how = ", ".join([f"{inputs} input{'s' * (inputs > 1)}", *free, *given])
            rows.append((f"`{name}`", name_of(op.domain, op.name), f"{told(op)} ({how})"))
        for op in RECOGNIZED.get(name, ()):
            assert op.recognizer is not None
            rows.append(
                (
                    f"`{name}`",
                    name_of(op.domain, op.name),
                    f"{told(op.recognizer)} Looked for at {', '.join(op.roots)}.",
                )
            )
    return table(("pass", "makes", "recognizes"), *rows)


ROOMS = ("graphgen.ops.", "graphgen.recognize.")


def reasons(module: Any, seen: set[str]) -> Iterator[str]:
    """The texts of all misses of a module, and of the modules of operators that it imports."""
    if module.__name__ in seen:
        return
    seen.add(module.__name__)
    tree = ast.parse(inspect.getsource(module))
    for node in ast.walk(tree):
        called = isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Miss"
        if called and isinstance(node, ast.Call) and (text := literal(node.args[0], module)):
            yield text
        source = node.module if isinstance(node, ast.ImportFrom) else None
        if isinstance(node, ast.ImportFrom) and source and source.startswith(ROOMS):
            other = import_module(source)
            taken = [getattr(other, alias.name) for alias in node.names]
            made = [x for x in taken if inspect.isfunction(x) or inspect.isclass(x)]
            if any("Miss" in inspect.getsource(x) for x in made):
                yield from reasons(other, seen)


def literal(node: ast.expr, module: Any) -> str:
    """A text as it stands in the code, with … for what is put in; '' for one that is computed."""
    if isinstance(node, ast.JoinedStr):
        return "".join(
            str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values
        )
    if isinstance(node, ast.Name):
        return str(getattr(module, node.id, ""))
    return str(node.value) if isinstance(node, ast.Constant) else ""


def misses() -> str:
    rows = []
    for name in dict.fromkeys(PIPELINE):
        found: dict[str, None] = {}
        for op in RECOGNIZED.get(name, ()):
            found |= dict.fromkeys(reasons(inspect.getmodule(op.recognizer), set()))
        if name in FORMULAS:
            found = {"…: the parts in which the two formulas differ": None}
        rows += [(f"`{name}`", text.replace("|", "\\|")) for text in found]
    return table(("pass", "reason"), *rows)


def refused() -> str:
    return table(
        ("kernel of", "refused where"),
        *((name_of(*key), told(rule)) for key, rules in REFUSED.items() for rule in rules),
    )


def rules() -> str:
    operators: dict[Any, list[str]] = {}
    for (_, name), op in TABLE.items():
        for rule in op.canonical:
            operators.setdefault(rule, []).append(name)
    for name, rules in UNDECLARED.items():
        for rule in rules:
            operators.setdefault(rule, []).append(name)
    return table(
        ("rule", "at", "what it does"),
        *((f"`{rule.__name__}`", ", ".join(at), told(rule)) for rule, at in operators.items()),
    )


def tables() -> dict[str, str]:
    """What stands between the marks of the page."""
    return {
        "pipeline": "".join(f"{i}. `{name}`\n" for i, name in enumerate(PIPELINE, 1)),
        "canonicalize": rules(),
        "fusions": fusions(),
        "misses": misses(),
        "refused": refused(),
        "others": table(
            ("pass", "what it does"),
            *((f"`{name}`", told(function, 2)) for name, function in OTHERS.items()),
        ),
    }


def remade(page: str) -> str:
    for name, text in tables().items():
        begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->\n"
        before, after = page.split(begin)[0], page.split(end)[1]
        page = before + begin + text + end + after
    return page


def test_the_page_is_what_the_code_does() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert remade(page) == page, "run `make goldens`"


def test_every_pass_is_on_the_page() -> None:
    page = PAGE.read_text(encoding="utf-8")
    for name in PIPELINE:
        described = name == "canonicalize" or name in OTHERS or f"| `{name}` |" in fusions()
        assert described and f"`{name}`" in page, name


if __name__ == "__main__" and sys.argv[1:] == ["--remake"]:
    PAGE.write_text(remade(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
