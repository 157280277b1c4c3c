"""Adapters by the names that a checkpoint has for the modules, for PEFT."""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from graphgen.errors import GraphgenError
from graphgen.operands import Array
from graphgen.passes.training.adapters import BASE, MAGNITUDE, A, B, LoRA

if TYPE_CHECKING:
    from graphgen.export.adapters import Adapter


def as_published(adapter: "Adapter") -> "Adapter":
    """The same by the checkpoint's names.

    Updates of parts of one weight are one update of it, block by block: of all their ranks.
    """
    assert adapter.published is not None
    split = {n for n in adapter.whole if n in adapter.published and adapter.published[n].of > 1}
    if odd := sorted({*adapter.modules, *adapter.whole} - adapter.published.keys() | split):
        raise GraphgenError(
            f"adapter: the checkpoint has no name for {odd[0]} as a module, so PEFT could not "
            "load what was trained: write the whole model with graphgen export"
        )
    if twice := [name for name in adapter.modules if BASE in adapter.published[name].name]:
        raise GraphgenError(
            f"adapter: {twice[0]} is the last product of torch's attention, whose update PEFT "
            "leaves out or adds twice: write the whole model with graphgen export"
        )
    groups = dict[str, list[str]]()
    for name in adapter.modules:
        groups.setdefault(adapter.published[name].name, []).append(name)
    matrices, own, spots = dict[str, Array](), dict[str, LoRA](), dict[str, Array]()
    for name, modules in groups.items():
        first, lora = adapter.published[modules[0]], adapter.settings(modules[0])
        if adapter.dora and sum(adapter.published[m].width for m in modules) < first.of:
            raise GraphgenError(
                f"adapter: the checkpoint has {name} as one weight, and the adapter has "
                "magnitudes of a part of it, which PEFT cannot hold: adapt all parts, or write "
                "the whole model with graphgen export"
            )
        places = _ranks(adapter, modules)
        rank = max(place.stop for place in places)
        size, out = adapter.matrices[modules[0] + A].shape[1], len(adapter.matrices[modules[0] + B])
        whole = first.whole(out)
        magnitude = np.zeros(whole, np.float32)
        a, b = np.zeros((rank, size), np.float32), np.zeros((whole, rank), np.float32)
        for module, place in zip(modules, places, strict=True):
            rows = adapter.published[module].outputs(whole)
            scale = np.float32(adapter.settings(module).scale / lora.scale)
            a[place] = adapter.matrices[module + A]
            b[rows, place] = scale * adapter.matrices[module + B]
            magnitude[rows] = adapter.matrices.get(module + MAGNITUDE, 0)
            if module in adapter.spots:
                found = adapter.spots[module].copy()
                found[:, 0] = rows[found[:, 0].astype(np.int64)]
                spots[name] = np.concatenate([spots.get(name, found[:0]), found])
        matrices |= {name + A: a, name + B: b}
        matrices |= {name + MAGNITUDE: magnitude} if adapter.dora else {}
        own[name] = lora.of_rank(rank)
    saved = dict[str, Array]()
    for name, array in adapter.saved.items():
        module, _, part = name.rpartition(".")
        saved[f"{adapter.published[module].name}.{part}"] = array
    usual = LoRA("", adapter.rank, adapter.alpha, adapter.dropout, adapter.rank_stabilized)
    if not adapter.own:  # what reads no patterns reads this
        usual = usual.of_rank(max((lora.rank for lora in own.values()), default=adapter.rank))
        for name in own:
            a, b = matrices[name + A], matrices[name + B]
            more = usual.rank - len(a)
            matrices[name + A] = np.pad(a, ((0, more), (0, 0)))
            matrices[name + B] = np.pad(b, ((0, 0), (0, more)))
    settings = {n: (x.rank, x.alpha or 0.0) for n, x in own.items() if adapter.own}
    return replace(
        adapter, matrices=matrices, rank=usual.rank, alpha=usual.alpha or 0.0, published=None,
        saved=saved, spots=spots, own=settings,
    )  # fmt: skip


def _ranks(adapter: "Adapter", modules: Sequence[str]) -> list[slice]:
    """Where the update of one weight has the ranks of its parts: in one place, if A is one."""
    first, ranks = modules[0], [adapter.settings(module).rank for module in modules]
    if all(
        adapter.settings(m) == adapter.settings(first)
        and np.array_equal(adapter.matrices[m + A], adapter.matrices[first + A])
        for m in modules
    ):
        return [slice(0, rank) for rank in ranks]
    ends = [*itertools.accumulate(ranks)]
    return [slice(end - rank, end) for end, rank in zip(ends, ranks, strict=True)]
