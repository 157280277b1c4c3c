"""Integers of few bits as checkpoints store them, and the blocks that the runtime reads."""

import numpy as np

from graphgen.bits import Bits, Blocks, packed as to_bytes
from graphgen.errors import GraphgenError
from graphgen.operands import Array

SIZES = (128, 64, 32, 16)  # of blocks, the largest first


def group_order(groups: Array, group: int, name: str) -> Array | None:
    """The columns in the order of their groups, if these are not neighbors; `name` is whose."""
    order = np.argsort(groups, kind="stable")
    if not np.array_equal(groups[order], np.arange(len(groups)) // group):
        raise GraphgenError(
            f"{name}: g_idx has groups of other sizes than {group}, in which its bits cannot be "
            "kept; give the checkpoint of floats"
        )
    return None if np.array_equal(order, np.arange(len(order))) else order


def in_blocks(
    q: Array, zeros: Array, scales: Array, bits: int, group: int, order: Array | None = None
) -> Blocks:
    """Integers q (N, K), of which each `group` has a zero point and a scale (N, groups).

    Of fewer bits than four, or than eight, they are stored in so many. Columns are in this order.
    """
    width: Bits = 4 if bits <= 4 else 8
    rows, columns = q.shape
    size = next((s for s in SIZES if group % s == 0), SIZES[-1])
    count = -(-columns // size)
    of = np.arange(count) * size // group  # the group of each block
    zeros, scales = zeros[:, of], np.ascontiguousarray(scales[:, of], np.float32)
    whole = np.repeat(zeros, size, axis=1)  # beyond K: the zero point
    whole[:, :columns] = q if order is None else q[:, order]
    integers = to_bytes(whole.reshape(rows, count, size), width)
    return Blocks(integers, scales, to_bytes(zeros, width), columns, width, order)


def stream(words: Array, bits: int) -> Array:
    """The integers of so many bits that follow each other in words along the last axis, as uint8.

    The first is in the lowest bits; one of three bits may begin in a word and end in the next.
    """
    starts = np.arange(words.shape[-1] * 32 // bits) * bits
    at, shifts = starts // 32, (starts % 32).astype(np.uint64)
    wide = words.view(np.uint32).astype(np.uint64)
    wide[..., :-1] |= wide[..., 1:] << np.uint64(32)
    found: Array = (wide[..., at] >> shifts & np.uint64(2**bits - 1)).astype(np.uint8)
    return found


def fields(words: Array, bits: int) -> Array:
    """The integers in words of 32 bits along the last axis, as uint8; none is in two words."""
    shifts = np.arange(32 // bits, dtype=np.uint32) * np.uint32(bits)
    each: Array = (words.view(np.uint32)[..., None] >> shifts & np.uint32(2**bits - 1)).astype("u1")
    return each.reshape(*words.shape[:-1], -1)
