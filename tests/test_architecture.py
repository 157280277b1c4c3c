"""The house: who imports whom, how large files are, what is public, and what no file may say.

python tests/test_architecture.py --remake    # draw the picture of docs/how-it-works.md anew
"""

import ast
import importlib.util
import os
import re
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import onnx.defs
import pytest
from architecture_picture import BOXES, picture

import graphgen as gg
from graphgen.op import TABLE

ROOT = Path(__file__).resolve().parent.parent
PICTURE = ROOT / "docs" / "packages.svg"

STANDS_ON = {
    "arrays": [],
    "display": [],
    "arguments": ["errors"],
    "errors": [],
    "expansion": ["errors"],
    "files": ["errors"],
    "garbage": [],
    "header": ["expansion", "files", "display"],
    "processor": [],
    "safetensors": ["files"],
    "plan": ["display"],
    "providers": ["errors"],
    "opening": ["header", "providers", "processor", "version"],
    "runtime": ["arguments", "arrays", "opening", "plan", "subnormals"],
    "subnormals": [],
    "traits": [],
    "version": [],
    "repeats": ["traits"],
    "rounded": [],
    "bits": ["operands"],
    "forms": ["repeats", "rounded"],
    "maps": [],
    "infer": ["errors", "operands", "display", "forms", "maps"],
    "operands": ["errors"],
    "parts": ["operands"],
    "subgraphs": ["infer"],
    "value": ["infer", "operands"],
    "record": ["subgraphs", "value"],
    "coerce": ["record"],
    "op": ["arrays", "coerce"],
    "places": ["op"],
    "graph": ["places"],
    "invariants": ["graph"],
    "model": ["graph", "garbage"],
    "folding": ["graph"],
    "schema_functions": ["op"],
    "edit": ["model"],
    "match": ["edit"],
    "targets": ["match", "runtime"],
    "ops": ["match", "arguments"],
    "autodiff": ["ops", "folding", "schema_functions"],
    "nn": ["ops"],
    "models": ["nn", "bits", "files", "parts", "processor", "safetensors"],
    "measure": ["ops"],
    "recognize": ["measure"],
    "passes": ["autodiff", "bits", "parts", "targets", "invariants", "recognize", "version"],
    "export": ["passes", "safetensors"],
    "train": ["export", "models"],
    "quantize": ["export"],
    "generation": ["export", "models"],
    "batch": ["generation"],
    "laboratory": ["export"],
    "deployment": ["quantize", "generation"],
    "commands": ["batch", "train", "deployment", "laboratory"],
    "__main__": ["commands"],
}
"""The rooms, and the files at the root, and what each may import, with all that that stands on.

graphgen/__init__ is the roof: it may import anything, and only `commands` may import it.
"""

PUBLIC = set(
    "build build_folder from_torch optimize compare diff explain bisect assert_graph export load "
    "Session generate artifacts Trainer TrainingSession AdamW SGD LoRA Loss Adapter grad nn ops "
    "Tensor schedule GraphgenError GraphgenWarning GateError float64 float32 float16 bfloat16 "
    "int64 int32 bool_ Group to_checkpoint".split()
)

SOURCES = sorted(
    path
    for top in ("graphgen", "ops", "export")
    for path in (ROOT / top).rglob("*.py")
    if not any(parent.is_symlink() for parent in path.parents)
)


def test_the_picture_shows_every_package() -> None:
    named = {name_of(path).partition(".")[0] for path in SOURCES if path.name == "__init__.py"}
    assert named - {""} == {name[:-1] for name in BOXES if name.endswith("/")} - {"graphgen"}
    assert picture(STANDS_ON) == PICTURE.read_text(), "make goldens draws it anew"


def name_of(path: Path) -> str:
    """`passes.fuse` for graphgen/passes/fuse.py, `ops.norm` for ops/norm.py, '' for the roof."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = parts[1:] if parts[0] == "graphgen" else parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(path: Path) -> Iterator[tuple[int, str]]:
    """(line, module) of every import of ours, '' where the package itself is imported."""
    for node in nodes_of(path):
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


@cache
def below(part: str) -> set[str]:
    """Everything that `part` may import."""
    return {part}.union(*(below(lower) for lower in STANDS_ON[part]))


def test_sources_are_found() -> None:
    names = {name_of(path) for path in SOURCES}
    assert {"", "op", "ops.norm", "export.checkpoint", "passes.fuse", "nn.module"} <= names


def test_lower_never_imports_higher() -> None:
    for path in SOURCES:
        part = name_of(path).partition(".")[0]
        if not part:
            continue
        assert part in STANDS_ON, f"{path} has no place in the house"
        for line, imported in imports_of(path):
            allowed = imported in below(part) if imported else part == "commands"
            assert allowed, f"{path}:{line}: {part} imports {imported or 'graphgen itself'}"


def test_a_source_file_is_small() -> None:
    for path in SOURCES:
        lines = path.read_text().splitlines()
        limit = 200 if name_of(path).startswith("models.") else 500
        assert len(lines) < limit, f"{path}: {len(lines)} lines"
        assert max(map(len, lines), default=0) <= 100, path


NAMED = {
    "graphgen/edit.py": 2,  # Identity and Constant, which edits put between values, stand above it
    "graphgen/laboratory/others.py": 2,  # runs in another process, which has no graphgen
    "graphgen/coerce.py": 1,  # Concat joins sizes of a call, and is declared above it
}
"""How often a file outside ops/, recognize/ and targets/ names an operator in a string.

What is known of an operator belongs to its declaration: these numbers may only fall.
"""


def names_of_operators(path: Path) -> int:
    """The words of its strings that are operators, but for docstrings, texts and `__all__`.

    The `type` of a dictionary is a part of tokenizer.json, of which some have an operator's name.
    """
    known, nodes, texts = operators(), nodes_of(path), set[ast.AST]()
    for n in nodes:
        if isinstance(n, ast.Expr):
            texts.add(n.value)
        elif isinstance(n, ast.JoinedStr):
            texts.update(n.values)
        elif isinstance(n, ast.Assign) and "__all__" in ast.unparse(n.targets[0]):
            texts.update(ast.walk(n))
        elif isinstance(n, ast.Dict):
            pairs = zip(n.keys, n.values, strict=True)
            texts.update(v for k, v in pairs if isinstance(k, ast.Constant) and k.value == "type")
    count = 0
    for n in nodes:
        if isinstance(n, ast.Constant) and isinstance(n.value, str) and n not in texts:
            words = [word.split("::")[-1] for word in n.value.split()]
            count += len(words) if known.issuperset(words) else 0
    return count


@cache
def operators() -> set[str]:
    """The names of all that are declared here or in onnx."""
    return {name for _, name in TABLE} | {s.name for s in onnx.defs.get_all_schemas()}


@cache
def nodes_of(path: Path) -> list[ast.AST]:
    """All of a file's syntax."""
    return [*ast.walk(ast.parse(path.read_text()))]


def test_operators_are_named_where_they_are_declared() -> None:
    rooms = ("ops.", "recognize", "targets")
    found = {
        path.relative_to(ROOT).as_posix(): count
        for path in SOURCES
        if not name_of(path).startswith(rooms) and (count := names_of_operators(path))
    }
    assert found == NAMED, "fewer? then lower the numbers here"


@pytest.mark.parametrize("room", ["ops.", "recognize."])
def test_parameters_have_types_that_prove_something(room: str) -> None:
    """Few say Any, or nothing; what a body is given and gives is a `record.Tensor`."""
    total, untyped = 0, 0
    for path in SOURCES:
        if not name_of(path).startswith(room):
            continue
        for node in nodes_of(path):
            if isinstance(node, ast.FunctionDef):
                a = node.args
                given = [*a.posonlyargs, *a.args, a.vararg, *a.kwonlyargs, a.kwarg]
                given = [p for p in given if p is not None and p.arg not in ("self", "cls")]
                types = [p.annotation for p in given if p is not None]
                total += len(types)
                untyped += sum(t is None or "Any" in ast.unparse(t) for t in types)
    assert total and untyped < 0.05 * total, f"{untyped} of {total} parameters say Any, or nothing"


def test_options_are_read_in_commands_only() -> None:
    others = [path for path in SOURCES if not name_of(path).startswith("commands")]
    assert not [path for path in others if "argparse" in path.read_text()]


def test_public_names_are_the_contract() -> None:
    assert set(gg.__all__) == PUBLIC
    assert all(hasattr(gg, name) for name in PUBLIC)


@pytest.mark.parametrize("name", ["ops", "export"])
def test_a_bare_import_of_a_top_level_room_is_refused(name: str) -> None:
    command = [sys.executable, "-c", f"import {name}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.endswith(f"ImportError: import graphgen.{name}, not {name}\n")


def test_every_folder_is_a_package() -> None:
    assert all(path.with_name("__init__.py").is_file() for path in SOURCES)


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


def run(*command: str | Path, folder: Path, path: Path | str = "", code: int = 0) -> str:
    done = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(path), "PIP_DISABLE_PIP_VERSION_CHECK": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout


def clone(folder: Path, *, links: bool) -> None:
    if not files_in_git():
        pytest.skip("this tree is no clone of git")
    git = ["git", "-c", f"core.symlinks={links}".lower(), "clone", "--quiet", "--depth", "1"]
    run(*git, ROOT.as_uri(), folder, folder=folder.parent)


PIP = "-m pip install --quiet --no-deps --no-build-isolation".split()


def install_editable(clone: Path, environment: Path) -> Path:
    """The Python of a new environment, which borrows the packages of this one."""
    venv.create(environment)
    packages, programs = (
        Path(sysconfig.get_path(kind, "venv", {"base": str(environment)}))
        for kind in ("purelib", "scripts")
    )
    (packages / "borrowed.pth").write_text(sysconfig.get_path("purelib"))
    python = programs / "python"
    run(python, *PIP, "-e", clone, folder=environment)
    return python


PROGRAM = """
from importlib.metadata import version

import graphgen as gg
from graphgen import nn, ops
from graphgen.export.session import Session
from graphgen.ops.norm import layer_norm

model = gg.build(ops.softmax, x=gg.float32["n", 4])
session: Session = gg.Session(gg.optimize(model))
assert gg.__version__ == version("graphgen-onnx")
print(gg.__file__, session(x=[[1, 1, 1, 1]])[0].sum(), len((nn.LayerNorm, layer_norm)))
"""


WRONG = """
wrong: int = ops.softmax(ops.arange(3))
ops.softmax(session)
ops.softmax(wrong, axes=1)
"""


@pytest.mark.exhaustive
def test_a_clone_without_symbolic_links_installs_and_runs(tmp_path: Path) -> None:
    """As git makes it on Windows, where graphgen/ops and graphgen/export are files."""
    source, there = tmp_path / "clone", tmp_path / "installed"
    clone(source, links=False)
    assert (source / "graphgen" / "ops").is_file()

    run(sys.executable, *PIP, "--target", there, source, folder=tmp_path)
    printed = run(sys.executable, "-c", PROGRAM, folder=tmp_path, path=there)
    assert printed.split() == [str(there / "graphgen" / "__init__.py"), "1.0", "2"]
    roots = [source / "graphgen", source / "ops", source / "export"]
    wanted = {path.relative_to(source) for root in roots for path in root.rglob("*.*")}
    wanted = {p if p.parts[0] == "graphgen" else "graphgen" / p for p in wanted}
    packed = {path.relative_to(there) for path in (there / "graphgen").rglob("*.*")}
    wanted.add(Path("graphgen/examples/demo.py"))
    assert {path for path in packed if path.suffix != ".pyc"} == wanted

    python = install_editable(source, tmp_path / "environment")
    printed = run(python, "-c", PROGRAM, folder=tmp_path)
    assert printed.split() == [str(source / "graphgen" / "__init__.py"), "1.0", "2"]


@pytest.mark.checkers
def test_type_checkers_see_an_editable_install(tmp_path: Path) -> None:
    """From outside, strictly: the types of the package, and which names it shows."""
    checkers = [name for name in ("mypy", "pyright") if importlib.util.find_spec(name)]
    if not checkers:
        pytest.skip("mypy and pyright are missing: make check installs them")
    source, program = tmp_path / "clone", tmp_path / "program.py"
    clone(source, links=True)
    python = install_editable(source, tmp_path / "environment")
    options = {
        "mypy": ["--strict", "--python-executable", python, "--cache-dir", tmp_path / "cache"],
        "pyright": ["--pythonpath", python],
    }
    for name in checkers:
        command = [sys.executable, "-m", name, *options[name], program]
        program.write_text(PROGRAM)
        run(*command, folder=tmp_path)
        program.write_text(PROGRAM + WRONG)
        found = run(*command, folder=tmp_path, code=1)
        assert all(f'"{word}' in found for word in ("int", "Value", "Session", "axes")), found


if __name__ == "__main__" and sys.argv[1:] == ["--remake"]:
    PICTURE.write_text(picture(STANDS_ON))
