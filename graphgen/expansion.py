"""How large a graph becomes when each call of a function is replaced by the function's nodes.

Thirty functions of two lines that call each other twice make a billion nodes, so that is counted
before anyone does it: a file is read, or given to the runtime, only within these bounds.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from graphlib import CycleError, TopologicalSorter
from typing import Any

import onnx

from graphgen.errors import GraphgenError

_NODES, _BYTES, _TIMES = 10_000, 1 << 26, 64
"""Calls of functions may make this many nodes and bytes, and that many times what the file has."""


def inner_graphs(node: onnx.NodeProto) -> Iterator[onnx.GraphProto]:
    """The bodies of an If, Loop or Scan."""
    for attribute in node.attribute:
        yield from [attribute.g] if attribute.HasField("g") else attribute.graphs


def all_nodes(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.NodeProto]:
    """The nodes, and those of their subgraphs."""
    for node in nodes:
        yield node
        for graph in inner_graphs(node):
            yield from all_nodes(graph.node)


def _key(call: Any, name: str) -> tuple[str, str, str]:
    return "" if call.domain == "ai.onnx" else call.domain, name, call.overload


def check_expansion(
    functions: Sequence[onnx.FunctionProto], nodes: Sequence[onnx.NodeProto] = ()
) -> None:
    """Raise GraphgenError unless a graph has a reasonable size with all functions in place.

    Without the graph's nodes, each function is checked by itself.
    """
    if not functions:
        return
    bodies = {_key(f, f.name): list(all_nodes(f.node)) for f in functions}
    calls = {key: Counter(_key(n, n.op_type) for n in body) for key, body in bodies.items()}
    main = list(all_nodes(nodes))
    try:
        order = [
            *TopologicalSorter({k: c.keys() & bodies for k, c in calls.items()}).static_order()
        ]
    except CycleError as error:
        names = ", ".join(sorted({name for _, name, _ in error.args[1]}))
        raise GraphgenError(f"the functions {names} call each other without end") from error
    sizes: dict[tuple[str, str, str], tuple[int, int]] = {}

    def size(called: Counter[tuple[str, str, str]], own: Sequence[onnx.NodeProto]) -> Any:
        nodes, content = len(own), sum(node.ByteSize() for node in own)
        for key, times in called.items():
            inside = sizes.get(key, (0, 0))
            nodes, content = nodes + times * inside[0], content + times * inside[1]
        return nodes, content

    for key in order:
        sizes[key] = size(calls[key], bodies[key])
    every = [main, *bodies.values()]
    graphs = [size(Counter(_key(n, n.op_type) for n in main), main), *sizes.values()]
    expanded = [max(counts) for counts in zip(*graphs, strict=True)]
    has = (sum(map(len, every)), sum(node.ByteSize() for body in every for node in body))
    bounds = [(_NODES + _TIMES * has[0], "nodes"), (_BYTES + _TIMES * has[1], "bytes")]
    for size_there, (most, unit) in zip(expanded, bounds, strict=True):
        if size_there > most:
            raise GraphgenError(
                f"its functions call each other so often that the graph has more than {most:,} "
                f"{unit}; inline them where the file is written"
            )
