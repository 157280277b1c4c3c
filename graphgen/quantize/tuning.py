"""Which blocks are the fastest on this machine, for the products of a model."""

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, Literal

import numpy as np
import onnx_ir as ir

from graphgen.bits import Bits, BlockSize, layout_of, to_blocks
from graphgen.edit import identity_of, to_model
from graphgen.graph import ModelLike, model_in
from graphgen.measure.accuracy import relative
from graphgen.measure.choices import Choice, choose
from graphgen.operands import Array
from graphgen.quantize.effect import opened
from graphgen.quantize.sites import AccuracyLevel, Site, product, site_at
from graphgen.record import recording

_LARGEST = 1 << 27  # weights that are measured; more take longer in proportion
_SECONDS = 5.0
_JUDGED = (64, 512, 256)  # M, K, N of a product of which the error is told

Shapes = Mapping[tuple[int, int], int]
"""(N, K) of products, and how many of them there are."""


def tune_blocks(
    model: ModelLike,
    scheme: Literal["int4", "weights8"],
    *,
    batch: int = 1,
    sizes: Sequence[BlockSize] = (),
    levels: Sequence[AccuracyLevel] = (),
) -> tuple[Choice, dict[str, tuple[BlockSize, AccuracyLevel]]]:
    """Measure a token's products, of `batch` rows, in blocks of each size at each accuracy level.

    The first way is the default. Errors are those of a product of normally distributed numbers.
    Returns what was measured, and the size and level of each name. The weights are random bytes:
    they are read once for each token, as many as the model has (at most 134 million).
    """
    shapes = Counter[tuple[int, int]]()
    for node in model_in(model, "tune").graph.all_nodes():
        site = site_at(node, ())
        if isinstance(site, Site) and site.weight.shape is not None:
            n, k = site.weight.shape.numpy() if site.by_rows else site.weight.shape.numpy()[::-1]
            shapes[int(n), int(k)] += 1
    bits: Bits = 4 if scheme == "int4" else 8
    sizes = sizes or ((64, 32, 128, 256) if bits == 4 else (16, 32, 64, 128))
    levels = levels or ((4, 0) if bits == 4 else (4,))
    named: dict[str, tuple[BlockSize, AccuracyLevel]] = {
        f"blocks of {size}, level {level}": (size, level) for level in levels for size in sizes
    }
    total = sum(n * k * count for (n, k), count in shapes.items())
    share = min(1.0, _LARGEST / max(total, 1))
    fewer = {shape: max(1, round(count * share)) for shape, count in shapes.items()}
    scale = total / sum(n * k * count for (n, k), count in fewer.items())
    with ExitStack() as stack:
        runs = []
        for name, (size, level) in named.items():
            made = partial(_random, bits=bits, size=size)
            session = stack.enter_context(opened(_products(fewer, made, level)))
            feeds = {f"x{k}": np.ones((batch, k), np.float32) for _, k in fewer}
            runs.append((name, partial(session, feeds), _lost(bits, size, level)))
        return choose("products of a token", batch, runs, seconds=_SECONDS, scale=scale), named


def _random(n: int, k: int, *, bits: Bits, size: int) -> dict[str, Array]:
    rng, blocks = np.random.default_rng(n + k), -(-k // size)
    packed = rng.integers(0, 256, (n, blocks, size * bits // 8), np.uint8)
    zeros = rng.integers(0, 256, (n, -(-blocks * bits // 8)), np.uint8)
    scale = np.full((n, blocks), 0.01, np.float32)
    return {"int4" if bits == 4 else "uint8": packed, "scale": scale, "zero_point": zeros}


def _products(shapes: Shapes, made: Any, level: AccuracyLevel) -> ir.Model:
    """Products with these weights; those with the same K read the same x."""
    outputs, inputs = dict[str, ir.Value](), dict[int, ir.Value]()
    with recording() as tape:
        for (n, k), count in shapes.items():
            if k not in inputs:
                inputs[k] = tape.input(f"x{k}", ir.DataType.FLOAT, ["rows", k]).value
            arrays = made(n, k)
            for _ in range(count):
                node = identity_of(inputs[k])
                site = Site(node, node, inputs[k], inputs[k], True)
                own = {role: tape.constant(array.copy()) for role, array in arrays.items()}
                y = product(site, own, (n, k), False, level=level)
                outputs[f"y{len(outputs)}"] = tape.operand(y)
        return to_model(tape, outputs)


def _lost(bits: Bits, size: int, level: AccuracyLevel) -> float:
    """√(Σ (ŷ - y)² / Σ y²) of a product of normally distributed numbers, as the runtime has it."""
    m, k, n = _JUDGED
    rng = np.random.default_rng(0)
    x, w = rng.standard_normal((m, k), np.float32), rng.standard_normal((n, k), np.float32)
    arrays = layout_of(to_blocks(w, bits=bits, block_size=size), False)
    with opened(_products({(n, k): 1}, lambda *_: arrays, level)) as session:
        return relative([(x.astype(np.float64) @ w.T, session({f"x{k}": x})[0])])
