"""Passes from other distributions: functions from a target to rules: docs/writing-a-pass.md."""

import importlib
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, TypeAlias

import onnx_ir as ir

from graphgen.edit import tidy
from graphgen.errors import OURS, GraphgenError, near
from graphgen.invariants import verify
from graphgen.match import Engine, Miss, Outcome, Pass, PassReport, Refusal, Rewrite, Rule
from graphgen.places import where_is
from graphgen.targets import Target

_GROUP = "graphgen.passes"

Rules: TypeAlias = Callable[[Target], Mapping[str, Sequence[Rule]]]
"""What a plug-in returns: rules, by the operator of the node that they look at."""


def find(name: str, target: Target, builtins: Sequence[str]) -> Pass:
    """The pass that an installed distribution offers under a name, or `module:function`.

    Raises GraphgenError if there is none or more than one, or if it cannot be imported.
    """
    installed = entry_points(group=_GROUP)
    values = sorted({entry.value for entry in installed if entry.name == name})
    if not values and ":" not in name:
        known = sorted({*builtins, *installed.names})
        raise GraphgenError(
            f"there is no pass {name!r}; there are {', '.join(known)}{near(name, known)}"
        )
    if len(values) > 1:
        problem = f"{' and '.join(values)} both offer it; name one of these instead"
        raise GraphgenError(f"pass {name!r}: {problem}")
    [value] = values or [name]
    try:
        found: Rules = EntryPoint(name, value, _GROUP).load()
    except (Exception, SystemExit) as error:
        raise _fault(name, f"{value!r} cannot be loaded", error) from error
    return Pass(name, partial(_run, name=name, make=found, target=target))


def _run(model: ir.Model, engine: Engine, *, name: str, make: Rules, target: Target) -> PassReport:
    """Run the rules through the engine. Raises GraphgenError for anything wrong with them."""
    at = [""]
    try:
        made = make(target)
        if not isinstance(made, Mapping) or not all(isinstance(r, Sequence) for r in made.values()):
            raise TypeError(f"gave {made!r}, wanted rules by operator: {{'MatMul': [rule]}}")
        rules = {op: [partial(_checked, rule, at) for rule in made[op]] for op in made}
        written = {node: _written(node) for node in model.graph.all_nodes()}
        report = engine.run(name, model, rules)
        for node in model.graph.all_nodes():
            if written.get(node, _written(node)) != _written(node):
                at[0] = f" at {where_is(node)} ({node.op_type})"
                raise TypeError(_EDITED)
    except (Exception, SystemExit) as error:
        raise _fault(name, f"it failed{at[0]}", error) from error
    tidy(model)
    verify(model, f"pass {name}")
    return report


def _checked(rule: Rule, at: list[str], node: ir.Node) -> Outcome:
    at[0] = f" at {where_is(node)} ({node.op_type})"
    before = node.graph, tuple(node.inputs)
    outcome: Any = rule(node)
    if not isinstance(outcome, Rewrite | Miss | Refusal | None):
        raise TypeError(f"gave {outcome!r}, wanted Rewrite, Miss, Refusal or None")
    if before != (node.graph, tuple(node.inputs)):
        raise TypeError(_EDITED)
    return outcome


_EDITED = "a rule has edited this node, wanted a Rewrite that says what is in its place"


def _written(node: ir.Node) -> tuple[Any, ...]:
    """What rewrites around a node leave unchanged in it."""
    return node.domain, node.op_type, *node.attributes.items()


def _fault(name: str, what: str, error: BaseException) -> GraphgenError:
    """One error for anything that a plug-in raised, with its innermost line."""
    files = [(f.filename, f.lineno) for f in traceback.extract_tb(error.__traceback__)]
    not_its = (*OURS, "<frozen", str(Path(importlib.__file__).parent))
    lines = [f"{file}:{n}" for file, n in files if not file.startswith(not_its)]
    cause = f"{type(error).__name__}: {error}" + "".join(f" ({line})" for line in lines[-1:])
    return GraphgenError(f"pass {name!r}: {what}: {cause}; --debug shows all of it")
