"""A model with a repr that one can read: what `build`, `load` and `optimize` return."""

from collections.abc import Iterator
from importlib import import_module
from typing import Any

import onnx_ir as ir

from graphgen.display import fields, in_bytes, in_notebook, listed, on_screen
from graphgen.errors import GraphgenError
from graphgen.garbage import uncollected
from graphgen.graph import bytes_of, count_operators, parameters
from graphgen.infer import describe


class Model(ir.Model):
    """An `ir.Model` that shows itself in a few lines; in all else it is one.

    `print(model)` still gives the whole graph.
    """

    __slots__ = ()

    @uncollected
    def clone(self, *args: Any, **kwargs: Any) -> "Model":
        """As that of `ir.Model`: other graphs, the same weights."""
        try:
            return readable(super().clone(*args, **kwargs))
        except RuntimeError as error:  # it was edited: a node reads what nothing makes
            reason = " ".join(str(error.__cause__ or error).split())
            raise GraphgenError(f"the graph {self.graph.name} is not valid: {reason}") from error

    @on_screen
    def __repr__(self) -> Iterator[str]:
        graph = self.graph
        imports = [f"{domain} {n}".strip() for domain, n in sorted(graph.opset_imports.items())]
        yield f"Model {graph.name}, opset {listed(imports, len(imports))}"
        yield from fields(
            inputs=[f"{v.name}: {describe(v)}" for v in graph.inputs],
            outputs=[f"{v.name}: {describe(v)}" for v in graph.outputs],
            nodes=_nodes(self),
            weights=_weights(graph),
        )

    @in_notebook
    def _repr_html_(self) -> Any:
        # What draws it stands above all that returns models.
        return import_module("graphgen.laboratory.notebook").of_model(self)


def readable(model: ir.Model) -> Model:
    """The same model as a `Model`, which has the same fields."""
    model.__class__ = Model
    assert isinstance(model, Model)
    return model


def _nodes(model: ir.Model) -> str:
    """`226: 97 Add, 73 MatMul and 3 more operators`."""
    counts = count_operators(model)
    most = sorted(counts.items(), key=lambda item: -item[1])
    operators = listed((f"{n:,} {name.rpartition('::')[2]}" for name, n in most), len(most), 5)
    return f"{sum(counts.values()):,}: {operators}"


def _weights(graph: ir.Graph) -> str:
    """Their size, and the elements of those that are trained."""
    tensors = [v.const_value for v in graph.initializers.values() if v.const_value is not None]
    size = sum(map(bytes_of, tensors))
    held = [v.const_value for v in parameters(graph).values() if v.const_value is not None]
    count = sum(tensor.size for tensor in held)
    return f"{in_bytes(size)} in {len(tensors):,} tensors; {count:,} parameters"
