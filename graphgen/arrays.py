"""What callers give for arrays: of NumPy, of torch, or lists of numbers."""

from typing import Any

import numpy as np


def as_array(x: Any) -> np.ndarray[Any, Any]:
    """`x` as an array; of a tensor of torch, without the history that NumPy does not read.

    Raises ValueError for masked entries: no graph knows of a mask, so their data would count.
    """
    if np.ma.is_masked(x):
        raise ValueError("some of its entries are masked, and would count: call .filled(...)")
    return np.asarray(x.detach() if getattr(x, "requires_grad", False) else x)
