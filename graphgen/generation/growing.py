"""Decoders whose cache of keys and values is copied into a larger one at each step."""

from collections.abc import Sequence

import numpy as np

from graphgen.generation.caches import MASK, Decoder, sized, together
from graphgen.generation.prefixes import PAYS, Beginning, common, cost
from graphgen.operands import Array
from graphgen.passes.training.by_row import CHOICE
from graphgen.runtime import Buffer, on_host


class Growing(Decoder):
    """A cache that is copied into a larger one at each step; prompts are padded on the left."""

    together = True
    mask: Array
    length: int
    dropped: Array  # (R,), last tokens that are forgotten, but still there

    def start(
        self,
        rows: Sequence[Sequence[int]],
        more: int,
        beams: int = 1,
        chosen: Array | None = None,
    ) -> Array:
        chosen = np.zeros(len(rows), np.int64) if chosen is None else chosen
        ids, mask = together(rows, left=True)
        size, chunk = ids.shape[1], self._parts(ids.shape[1])
        known = self._known(rows, more, chosen, among=False)
        begin = self._begin(rows, known, more, chosen) if known else 0
        past = {n: np.zeros(sized(n, t, len(rows), begin), t.dtype) for n, t in self.caches.items()}
        self.shared = 0
        for row, old in known.items() if begin else ():  # they end together, so do their beginnings
            count, at = max(0, len(rows[row]) - size + begin), 0
            if count:
                at = self.length - int(self.mask[old.of].sum())
            for name, array in past.items():
                array[row, :, begin - count :] = self._old(name, old.of, slice(at, at + count))
            self.shared += count
        self.past = {name: self.session.place(array) for name, array in past.items()}
        self.mask, self.length, self.chosen, logits = mask[:, :begin], begin, chosen, np.empty(0)
        self.dropped = np.zeros(len(rows), np.int64)
        for at in range(begin, size, chunk):
            logits = self._grow(ids[:, at : at + chunk], mask[:, at : at + chunk])[:, -1]
        rows_of = np.repeat(np.arange(len(rows)), beams)
        if beams > 1:
            self.reorder(rows_of)
        self._hold(rows, rows_of)
        return logits[rows_of]

    def _begin(
        self,
        rows: Sequence[Sequence[int]],
        known: dict[int, Beginning],
        more: int,
        chosen: Array,
    ) -> int:
        """How many columns need not be read, because the cache holds them for all rows.

        What all rows have in common is read here, as a row of its own, if that pays.
        """
        size, count = max(map(len, rows)), len(rows)
        chunk = self._parts(size)
        # Each row reads as many tokens as the one that has most to read.
        own = max(len(row) - known[r].same for r, row in enumerate(rows))
        best = cost(own, chunk, count)
        same = min(common(rows[0][:-1], row[:-1]) for row in rows) if len({*chosen}) == 1 else 0
        if cost(same, chunk) + cost(size - same, chunk, count) < PAYS * best:
            self.start([rows[0][:same]], more, 1, chosen[:1])
            self.held = []
            known |= dict.fromkeys(known, Beginning(0, same, False))
            return same
        return size - own if best < PAYS * cost(size, chunk, count) else 0

    def step(self, tokens: Array) -> Array:
        self._drop()
        logits = self._grow(tokens[:, None], np.ones((len(tokens), 1), bool))[:, -1]
        self._holds_more(tokens[:, None])
        return logits

    def apart(self, rows: int) -> str:
        return ""

    def extend(self, rows: Sequence[int], tokens: Sequence[Sequence[int]]) -> list[Array]:
        """All rows end together, so one with fewer new tokens reads its last ones again."""
        given, size = dict(zip(rows, tokens, strict=True)), max(map(len, tokens))
        ids, mask = (
            np.zeros((len(self.held), size), np.int64),
            np.zeros((len(self.held), size), bool),
        )
        for row, held in enumerate(self.held):
            new = given.get(row, ())
            last = [*held[max(0, len(held) + len(new) - size) :], *new][-size:]
            self.dropped[row] += len(last) - len(new)
            ids[row, size - len(last) :], mask[row, size - len(last) :] = last, True
        self._drop()
        logits = self._grow(ids, mask, size)
        self._holds_more(tokens, rows)
        return [logits[row, size - len(more) :] for row, more in given.items()]

    def forget(self, row: int, count: int) -> None:
        self._holds_less(row, count)
        self.dropped[row] += count

    def _drop(self) -> None:
        """Shorten each row by what it has forgotten; all end at the same place again."""
        if not self.dropped.any():
            return
        less = int(self.dropped.min())
        self.length -= less
        kept = [
            (row, self.length - by, by) for row, by in enumerate((self.dropped - less).tolist())
        ]
        shorter = np.zeros((len(kept), self.length), bool)
        for row, size, by in kept:
            shorter[row, by:] = self.mask[row, :size]
        for name, buffer in self.past.items():
            with on_host(buffer) as array:
                moved = np.zeros((*array.shape[:2], self.length, array.shape[3]), array.dtype)
                for row, size, by in kept:
                    moved[row, :, by:] = array[row, :, :size]
            self.past[name] = self.session.place(moved)
        self.mask, self.dropped = shorter, np.zeros_like(self.dropped)

    def _grow(self, ids: Array, mask: Array, kept: int = 1) -> Array:
        """The last logits after more tokens, (R, T)."""
        self.length += ids.shape[1]
        self.mask = np.concatenate([self.mask, mask], 1)
        places = np.maximum(self.mask.cumsum(1) - 1, 0)[:, -ids.shape[1] :]
        feeds = {"input_ids": ids, MASK: self.mask, "position_ids": places, CHOICE: self.chosen}
        larger = self._caches(len(ids))
        logits = self._run(feeds, self.past, larger, kept)
        self.past = larger
        return logits

    def _caches(self, rows: int) -> dict[str, Buffer]:
        """Room for the keys and values of that many rows, as long as they are now."""
        new = {n: np.empty(sized(n, t, rows, self.length), t.dtype) for n, t in self.caches.items()}
        return {name: self.session.place(array) for name, array in new.items()}

    def reorder(self, rows: Array) -> None:
        self._drop()
        held, self.held = self.held, []
        self.past = self._picked(rows)
        self.mask, self.chosen = self.mask[rows], self.chosen[rows]
        self.dropped = np.zeros(len(rows), np.int64)
        self._hold(held, rows)

    def keep(self, rows: Array) -> None:
        self.reorder(rows)
