"""Every sample of every operator that CUDA's table of kernels has, on the device."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from devices_here import CUDA
from samples import MICROSOFT
from small_models import ROUNDING
from test_operators import arrays_of, cases, check, feeds_of, is_code, is_float, meaning, model_of

import graphgen as gg
from graphgen.errors import GraphgenError
from graphgen.infer import DOMAIN
from graphgen.op import Op
from graphgen.providers import placement
from graphgen.targets import target

pytestmark = [*CUDA.marks, pytest.mark.filterwarnings("ignore::graphgen.GraphgenWarning")]


def has(found: Callable[[Any], Any]) -> Callable[[list[Any]], bool]:
    """Whether an input of a sample has such an element."""
    return lambda arrays: any(np.any(found(x)) for x in arrays if is_float(x))


KNOWN = {
    ("", "Sign"): has(np.isnan),  # gives 0
    ("", "QuantizeLinear"): has(np.isinf),  # rounds it to 0
    # It keeps what a mask of -1 hides.
    (MICROSOFT, "Attention"): lambda arrays: len(arrays) > 3 and arrays[3] is not None,
}
"""Samples of which CUDA makes something else, and nobody is told."""


@cases(lambda op, sample: op.domain != DOMAIN)
def test_meaning_is_that_of_cuda(op: Op, sample: Any) -> None:
    """What the table refuses because kernels fall back may not run there either."""
    model = model_of(op, sample, np.float32)
    cuda, nodes = target("cuda"), list(model.graph)
    missing = [reason for node in nodes if (reason := cuda.missing(node))]
    if missing and " refuses " not in missing[0]:
        pytest.skip(f"the table: {missing[0]}")
    arrays = arrays_of(sample, np.float32)
    wanted = meaning(op, sample._replace(inputs=tuple(arrays)))
    if any(map(is_code, [*arrays, *wanted])):
        pytest.skip("Python has no array of such numbers")
    try:
        session = gg.Session(model, provider="cuda", optimize=False)
        there = {name for name, _ in placement(session._session).get(CUDA.own, [])}
        assert bool(missing) or op.name in there, "the table says that it is native"
        check(session(feeds_of(arrays)), wanted, ROUNDING)
    except (GraphgenError, AssertionError):
        if not missing and not KNOWN.get((op.domain, op.name), lambda arrays: False)(arrays):
            raise
    else:
        assert not missing or op.name not in there, f"it is right, but the table {missing[0]}"
