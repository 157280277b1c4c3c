"""The house: who imports whom, how large files are, what is public, and what no file may say."""

import ast
import io
import re
import subprocess
import sys
import tokenize
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import graphgen as gg

ROOT = Path(__file__).resolve().parent.parent

STANDS_ON = {
    "errors": [],
    "header": ["errors"],
    "runtime": ["header"],
    "schedule": ["errors"],
    "options": ["errors"],
    "infer": ["errors"],
    "subgraphs": ["infer"],
    "op": ["subgraphs"],
    "places": ["op"],
    "graph": ["places"],
    "ops": ["graph"],
    "nn": ["ops"],
    "models": ["nn"],
    "invariants": ["graph"],
    "match": ["graph"],
    "autodiff": ["ops"],
    "targets": ["ops", "runtime"],
    "passes": ["match", "autodiff", "targets", "invariants"],
    "export": ["passes"],
    "train": ["export", "schedule"],
    "training": ["train", "options"],
    "batch": ["generation"],
    "generate": ["export", "models"],
    "generation": ["generate", "options"],
    "building": ["export", "models", "options"],
    "laboratory": ["export", "models", "options"],
    "cli": ["training", "batch", "generation", "building", "laboratory"],
    "__main__": ["cli"],
}
"""Modules and packages of graphgen, and what each may import, with all that that stands on.

graphgen/__init__ is the roof: it may import anything, and only `cli` may import it.
"""

PUBLIC = set(
    "build optimize compare export load Session generate artifacts Trainer AdamW SGD grad nn ops "
    "schedule GraphgenError GraphgenWarning GateError "
    "float64 float32 float16 bfloat16 int64 int32 bool_".split()
)

SOURCES = sorted(
    path
    for top in ("graphgen", "ops", "export")
    for path in (ROOT / top).rglob("*.py")
    if not any(parent.is_symlink() for parent in path.parents)
)


def name_of(path: Path) -> str:
    """`passes.fuse` for graphgen/passes/fuse.py, `ops.norm` for ops/norm.py, '' for the roof."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = parts[1:] if parts[0] == "graphgen" else parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(path: Path) -> Iterator[tuple[int, str]]:
    """(line, module) of every import of ours, '' where the package itself is imported."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: imports are absolute"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            top, _, rest = name.partition(".")
            if top == "graphgen":
                part = rest.partition(".")[0]
                yield node.lineno, part if part in STANDS_ON else ""


def below(part: str) -> set[str]:
    """Everything that `part` may import."""
    return {part}.union(*(below(lower) for lower in STANDS_ON[part]))


def test_sources_are_found() -> None:
    names = {name_of(path) for path in SOURCES}
    assert {"", "op", "ops.norm", "export.checkpoint", "passes.fuse", "nn.module"} <= names


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_lower_never_imports_higher(path: Path) -> None:
    part = name_of(path).partition(".")[0]
    if not part:
        return
    assert part in STANDS_ON, f"{path} has no place in the house"
    for line, imported in imports_of(path):
        allowed = imported in below(part) if imported else part == "cli"
        assert allowed, f"{path}:{line}: {part} imports {imported or 'graphgen itself'}"


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_a_source_file_is_small(path: Path) -> None:
    lines = path.read_text().splitlines()
    limit = 200 if name_of(path).startswith("models.") else 500
    assert len(lines) < limit, f"{len(lines)} lines"
    assert max(map(len, lines), default=0) <= 100


def test_the_whole_is_small() -> None:
    """The mechanism, in all its lines; with operators and files, in lines that run."""
    counted = [path for path in SOURCES if not name_of(path).startswith("models")]
    core = [path for path in counted if name_of(path).partition(".")[0] not in ("ops", "export")]
    assert sum(len(path.read_text().splitlines()) for path in core) < 8200
    assert sum(lines_of_code(path) for path in counted) < 17600


def lines_of_code(path: Path) -> int:
    """How many lines have something on them that runs."""
    source = path.read_text()
    told: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            told.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    silent = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    lines = {
        line
        for token in tokens
        if token.type not in (*silent, tokenize.ENDMARKER)
        for line in range(token.start[0], token.end[0] + 1)
    }
    return len(lines - told)


def test_public_names_are_the_contract() -> None:
    assert set(gg.__all__) == PUBLIC
    assert all(hasattr(gg, name) for name in PUBLIC)


def test_bare_import_of_ops_is_refused() -> None:
    command = [sys.executable, "-c", "import ops"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.endswith("ImportError: import graphgen.ops, not ops\n")


def test_every_package_is_packaged() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    packages = {
        ".".join(("graphgen", *filter(None, [name_of(path)])))
        for path in SOURCES
        if path.name == "__init__.py"
    }
    assert set(settings["packages"]) == packages
    folders = {("graphgen", *name_of(path).split("."))[:-1] for path in SOURCES if name_of(path)}
    assert {".".join(folder) for folder in folders} <= packages


def files_in_git() -> list[Path]:
    """Tracked files and those that will be; without git (an unpacked sdist) there are none."""
    listed = ["git", "ls-files", "-co", "--exclude-standard"]
    done = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=False)
    return [path for line in done.stdout.splitlines() if (path := ROOT / line).is_file()]


FORBIDDEN = re.compile(
    "|".join(
        [
            "/" + "work/",
            r"\.\./" + "shared",
            "/" + "tmp/w/",
            "pypi" + r"\.org",
            "index" + "-url",
            "download" + r"\.pytorch",
            r"\b[Ii]ssue" + r" #?\d",
        ]
    )
)
"""Paths and hosts of one machine, and references that a reader of the project cannot follow."""


def test_no_file_speaks_of_one_machine() -> None:
    for path in files_in_git():
        try:
            text = path.read_text()
        except UnicodeDecodeError:
            continue
        found = FORBIDDEN.search(text)
        assert found is None, f"{path}: {found and found.group()!r}"
