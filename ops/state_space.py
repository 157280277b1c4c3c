"""State-space models: linear recurrences over a sequence."""

import numpy as np

from graphgen.errors import GraphgenError, user_line
from graphgen.infer import describe
from graphgen.ops.control_flow import scan
from graphgen.ops.elementwise import exp
from graphgen.ops.layout import dim, expand, numpy_dtype, rank, squeeze, swap_last, unsqueeze
from graphgen.ops.linalg import matmul
from graphgen.ops.sizes import same_size_at
from graphgen.value import Tensor


def selective_scan(
    x: Tensor, delta: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor | None = None
) -> Tensor:
    """y_t = C_t h_t + D x_t with h_t = exp(Δ_t A) h_(t-1) + Δ_t B_t x_t (arXiv 2312.00752, 3.2).

    Each feature of x, (B, T, F), has a state of N numbers; its step size Δ is `delta`, (B, T, F),
    and A, (F, N), is below 0 for states that decay. B and C, (B, T, N), are for all features of a
    step, D is (F), and y (B, T, F).

    A Scan holds one state, (B, F, N), and takes T steps one after the other; with all steps at once
    T of them would have to be held. Its gradient is a Scan from the end, for which the states of
    all steps are kept.

    Raises GraphgenError if the shapes do not fit.
    """
    if rank(a) != 2:
        problem = "it must be (F, N), a number for each state of each feature of x"
        raise GraphgenError(f"selective_scan: a is {describe(a)}; {problem}{user_line()}")
    features, size = a.shape
    for name, given, leading, axis in (
        ("x", x, ("B", "T"), 0),
        ("delta", delta, ("B", "T"), 0),
        ("b", b, ("B", "T"), 1),
        ("c", c, ("B", "T"), 1),
        ("d", d, (), 0),
    ):
        fits = given is None or rank(given) == 1 + len(leading)
        if given is not None and not (fits and same_size_at(given, -1, a, axis)):
            wanted = ", ".join((*leading, str(a.shape[axis])))
            problem = f"it must be ({wanted}), since a is {describe(a)}"
            raise GraphgenError(
                f"selective_scan: {name} is {describe(given)}; {problem}{user_line()}"
            )

    def step(
        h: Tensor, delta: Tensor, u: Tensor, b: Tensor, c: Tensor
    ) -> tuple[list[Tensor], list[Tensor]]:  # (B, N, F), (B, F) twice, (B, N) twice
        h = exp(unsqueeze(delta, [1]) * rates) * h + unsqueeze(u, [1]) * unsqueeze(b, [2])
        return [h], [squeeze(matmul(unsqueeze(c, [1]), h), [1])]

    rates = swap_last(a)  # features last: they are many, and kernels compute them side by side
    start = expand(np.zeros((), numpy_dtype(x)), [dim(x, 0), size, features])
    _, [y] = scan(step, [start], [delta, delta * x, b, c], axis=1)
    return y if d is None else y + x * d
