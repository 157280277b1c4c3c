"""Where a node comes from: the path of its module, and the line of source that made it."""

import re
from collections.abc import Iterable, Sequence
from itertools import takewhile

import onnx_ir as ir

from graphgen.record import PATH

_CLASSES = "pkg.torch.onnx.class_hierarchy"
_SCOPES, _TRACE = "pkg.torch.onnx.name_scopes", "pkg.torch.onnx.stack_trace"
_NO_MODULE = "_empty_nn_module_stack"  # what torch's exporter writes if there is none
_FRAME = re.compile(
    r'File "(?:.*(?:site|dist)-packages/)?([^"]+)", line (\d+)[^\n]*(?:\n +(\S.*))?'
)


def block_of(node: ir.Node) -> str:
    """The path of the module that a node belongs to, or "" at the top and if it is unknown.

    Our graphs carry it. torch's exporter writes the modules around each node; TorchScript and
    TensorFlow name nodes by the path: /encoder/layer.0/attention/MatMul.
    """
    given = node.metadata_props
    if PATH in given:
        return given[PATH]
    if _SCOPES in given:  # from the whole model down to the operator
        path = "".join(re.findall("'([^']*)'", given[_SCOPES])[-2:-1])
        return "" if path.startswith(_NO_MODULE) else path
    return str(node.name or "").strip("/").rpartition("/")[0].replace("/", ".")


def class_of(node: ir.Node) -> str:
    """The class of the module that a node of torch's exporter belongs to, or ""."""
    return "".join(re.findall("'([^']*)'", node.metadata_props.get(_CLASSES, ""))[-2:-1])


def where_is(node: ir.Node) -> str:
    """The module path of a node, or its name where no module is known."""
    return block_of(node) or node.name or f"an unnamed {node.op_type}"


def shared(blocks: Iterable[Sequence[str]]) -> list[str]:
    """The innermost block that holds all of these, each given by the names from the outermost in.

    >>> shared([("layers", "3", "norm"), ("layers", "3", "attention")])
    ['layers', '3']
    """
    columns = zip(*blocks, strict=False)
    return [names[0] for names in takewhile(lambda names: len({*names}) == 1, columns)]


def source_of(node: ir.Node) -> str:
    """`bert/model.py:12: y = self.attention(x)`, the innermost line outside torch, or ""."""
    frames: list[tuple[str, str, str]] = _FRAME.findall(node.metadata_props.get(_TRACE, ""))
    lines = [f"{file}:{line}: {code}" for file, line, code in frames if file[:6] != "torch/"]
    return lines[-1].removesuffix(": ") if lines else ""
