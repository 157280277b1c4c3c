"""Softmax and its logarithm."""

from graphgen.op import composite
from graphgen.ops.elementwise import exp, is_nan, log, where
from graphgen.ops.reduce import reduce_max, reduce_sum
from graphgen.traits import Trait
from graphgen.value import Tensor, graph_value


@composite("Softmax", traits=Trait.WRITES_OVER)
def softmax(x: Tensor, *, axis: int = -1) -> Tensor:
    """exp(x) / Σ exp(x) along `axis`, with the shape of x.

    The maximum is subtracted first, so that exp cannot overflow. A row of nothing but -∞ gives NaN.
    """
    e = exp(x - reduce_max(x, axis))
    return e / reduce_sum(e, axis)


@softmax.vjp
def _(g: Tensor, y: Tensor, axis: int) -> Tensor:
    """dx = y (g - Σ g y): the Jacobian is diag(y) - y yᵀ.

    If the graph tests y for NaN, rows that a mask of -∞ hides entirely get zeros.
    """
    value = graph_value(y)
    if value is not None and any(use.node.op_type == "IsNaN" for use in value.uses()):
        y = where(is_nan(y), 0.0, y)
    gy = g * y
    return gy - y * reduce_sum(gy, axis)


@composite("LogSoftmax", traits=Trait.REFERENCE_DIFFERS)
def log_softmax(x: Tensor, *, axis: int = -1) -> Tensor:
    """x - log Σ exp(x) along `axis`, with the shape of x.

    The maximum is subtracted first, so that exp cannot overflow.
    """
    z = x - reduce_max(x, axis)
    return z - log(reduce_sum(exp(z), axis))


@log_softmax.vjp
def _(g: Tensor, y: Tensor, axis: int) -> Tensor:
    """dx = g - exp(y) Σ g."""
    return g - exp(y) * reduce_sum(g, axis)
