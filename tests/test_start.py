"""Nothing is imported before it is used: which libraries a program loads, and when."""

import ast
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import graphgen as gg

ROOF = Path(gg.__file__)


def run(program: str) -> list[str]:
    """The lines that a program prints, in a process of its own."""
    command = [sys.executable, "-c", textwrap.dedent(program)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


LIBRARIES = """
import sys

STARTED = set(sys.modules)  # by the interpreter and its .pth files

def libraries():
    tops = {name.partition(".")[0] for name in set(sys.modules) - STARTED}
    return sorted(tops - sys.stdlib_module_names - {"graphgen", "__mp_main__"})

def rooms():
    return sorted(name for name in sys.modules if name.startswith("graphgen."))
"""
"""What a program has imported since it began."""


def test_import_graphgen_imports_no_library():
    """Nor what needs none: the version, what there is, and errors."""
    printed = run(
        LIBRARIES
        + """
import graphgen as gg

print(rooms())
assert "build" in dir(gg) and gg.__version__ and issubclass(gg.GateError, gg.GraphgenError)
assert not hasattr(gg, "flaot32")
print(libraries())
"""
    )
    assert printed == ["['graphgen.version']", "[]"]


def test_help_and_wrong_options_import_no_library():
    """Of all commands; and of our own files those of the command line, and the errors."""
    printed = run(
        LIBRARIES
        + """
import contextlib, io

from graphgen.commands import COMMANDS, main

names = [command.__name__.rpartition(".")[2].rstrip("_") for command in COMMANDS]
given = [[name, "--help"] for name in names] + [["--help"], ["--version"]]
for arguments in given:
    with contextlib.redirect_stdout(io.StringIO()) as text:
        assert main(arguments) == 0
    assert text.getvalue() and not libraries(), (arguments, libraries())
for arguments in (["frobnicate"], ["run"], ["inspect", "m.onnx", "--dim", "4"], ["build"]):
    with contextlib.redirect_stderr(io.StringIO()):
        assert main(arguments) == 2
    assert not libraries(), (arguments, libraries())
print(*sorted({name.split(".")[1] for name in rooms()}))
"""
    )
    assert printed == ["commands display errors version"]


def test_names_import_the_libraries_they_need(tmp_path):
    """Those that have not been imported before; a session on a file needs the runtime alone."""
    gg.export(gg.build(gg.ops.softmax, x=gg.float32[2]), path := tmp_path / "m.onnx")
    printed = run(
        LIBRARIES
        + f"""
import graphgen as gg

known = {{"numpy", "onnx", "onnxruntime", "onnx_ir", "onnxscript", "networkx", "rich"}}

def show(_):
    print(*sorted(known.intersection(libraries())))
    known.difference_update(libraries())

show(gg.Session)
show(gg.Session({str(path)!r})(x=[1, 2]))
show((gg.nn, gg.ops, gg.build, gg.load, gg.grad, gg.optimize, gg.generate))
show(gg.optimize(gg.load({str(path)!r})))
show(gg.Trainer)
show(gg.compare)
show(gg.batch)
"""
    )
    assert printed == [
        "numpy onnx",
        "onnxruntime",
        "onnx_ir",
        "onnxscript",
        "rich",
        "",
        "",
    ]


def test_public_names_are_told_once_for_types_and_once_for_the_import():
    """Type checkers read the block that never runs; `_HOMES` is what is imported."""
    [block] = [node for node in ast.parse(ROOF.read_text()).body if isinstance(node, ast.If)][1:]
    told = {}
    for node in block.body:
        assert isinstance(node, ast.ImportFrom)
        names = [alias.name for alias in node.names]
        assert [alias.asname for alias in node.names] == [None] * len(names)
        told |= dict.fromkeys(names, node.module)
    assert set(told) == set(gg.__all__)
    assert {name: told.pop(name) for name in ("nn", "ops")} == dict.fromkeys(
        ("nn", "ops"), "graphgen"
    )
    assert told == gg._HOME_OF


def test_a_star_a_file_and_a_room_are_imported_when_they_are_named():
    printed = run(
        """
        from graphgen import *
        import graphgen as gg

        assert all(globals()[name] is getattr(gg, name) for name in gg.__all__)
        print(export.__name__, nn.__name__, gg.__version__ in globals())
        print(gg.batch.map_file.__name__, gg.laboratory.compare.compare is compare)
        try:
            gg.flaot32
        except AttributeError as error:
            print(error, error.name, error.obj is gg)
        """
    )
    assert printed == [
        "export graphgen.nn False",
        "map_file True",
        "graphgen has no flaot32; did you mean 'float32'? flaot32 True",
    ]


def test_a_missing_library_is_not_a_missing_name():
    printed = run(
        """
        import sys
        import graphgen as gg

        sys.modules["numpy"] = None
        try:
            hasattr(gg, "nn")
        except ModuleNotFoundError as error:
            print(error)
        """
    )
    assert len(printed) == 1 and "numpy" in printed[0]


def test_export_is_the_function_in_whatever_order_modules_are_imported():
    printed = run(
        """
        import sys
        from types import ModuleType

        ORDERS = (
            "import graphgen.export",
            "import graphgen.export.protobuf",
            "from graphgen.export import protobuf",
            "import graphgen as gg; import graphgen.export; gg.export",
            "import graphgen as gg; gg.export; from graphgen.export.session import Session",
            "import graphgen.export.session",
        )
        for order in ORDERS:
            for name in [name for name in sys.modules if name.partition(".")[0] == "graphgen"]:
                del sys.modules[name]
            exec(order, {})
            import graphgen as gg

            assert not isinstance(vars(gg).get("export"), ModuleType), order
            if "graphgen.export.write" in sys.modules:
                assert gg.export is sys.modules["graphgen.export.write"].export, order
        print(len(ORDERS))
        """
    )
    assert printed == ["6"]


def test_operators_are_known_to_whoever_asks_first():
    """Files below `ops/` find them, though nobody has imported them."""
    [printed] = run(
        """
        import sys
        import onnx_ir as ir

        gelu = ir.Node("com.microsoft", "QuickGelu", [])
        reshape, gather = ir.Node("", "Reshape", []), ir.Node("", "Gather", [])
        asked = (
            "import graphgen.infer as i; i.new_context();"  # first: the library keeps its rules
            "found = i.registry.get('graphgen', 'CrossEntropy', version=1) is not None",
            "import graphgen.op as op; found = op.find_op(gelu).name == 'QuickGelu'",
            "import graphgen.op as op; found = op.is_a(reshape, op.Trait.VIEW)",
            "import graphgen.traits as t; found = t.has(reshape, t.Trait.VIEW)",
            "import graphgen.traits as t; found = t.lookup_of(gather) is not None",
            "import graphgen.op as op\\ntry: op.composite('Softmax')(lambda x: x)\\n"
            "except RuntimeError as error: found = 'is declared twice' in str(error)",
        )
        for program in asked:
            for name in [name for name in sys.modules if name.partition(".")[0] == "graphgen"]:
                del sys.modules[name]
            own = {"gelu": gelu, "reshape": reshape, "gather": gather}
            exec(program, own)
            assert own["found"], program
        print(len(asked))
        """
    )
    assert printed == "6"


@pytest.mark.parametrize("where", ["graphgen.commands", "graphgen.commands.optimize", "signal"])
def test_an_interrupt_of_the_first_imports_is_one_line(where: str) -> None:
    program = f"""
    import sys

    class Interrupting:
        def find_spec(self, name, path=None, target=None):
            if name == {where!r}:
                raise KeyboardInterrupt

    from graphgen.__main__ import start

    sys.modules.pop({where!r}, None)
    sys.meta_path.insert(0, Interrupting())
    start()
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (130, "graphgen: interrupted\n")
