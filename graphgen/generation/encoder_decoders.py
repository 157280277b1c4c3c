"""Decoders behind an encoder, whose output they read: of T5, BART, Whisper and others."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from graphgen.generation.caches import MASK, PAST, PRESENT, Decoder, sized, together
from graphgen.generation.speech import FEATURES
from graphgen.operands import Array
from graphgen.passes.training.by_row import CHOICE
from graphgen.runtime import Session

_STATES = "encoder_hidden_states"
_OWN = ".decoder."  # in the names of a cache of the decoder's own tokens


class EncoderDecoder(Decoder):
    """An encoder that runs once for each prompt, and a decoder that starts with its own tokens.

    In its first call the decoder computes the keys and values of the encoder's output, and returns
    them; with use_cache_branch, it takes them back. Those of its own tokens grow.
    """

    def __init__(self, encoder: Session, decoder: Session, bound: str = "") -> None:
        note = "a decoder that reads an encoder's output grows its cache"
        super().__init__(decoder, note=note, bound=bound)
        self.encoder = encoder
        self.begin: list[list[int]] = []
        self._read: tuple[Any, Any, dict[str, Array]] = (None, None, {})

    @property
    def hears(self) -> tuple[int, int] | None:
        """The bands and frames of the sounds that the encoder reads; None if it reads tokens."""
        found = self.encoder.inputs.get(FEATURES)
        _, bands, frames = (found and found.dims) or (None, None, None)
        return (bands, frames) if isinstance(bands, int) and isinstance(frames, int) else None

    def encode(self, rows: Sequence[Any], chosen: Array | None = None) -> dict[str, Array]:
        """What the decoder is given of these rows, tokens or features (bands, frames)."""
        chosen = np.zeros(len(rows), np.int64) if chosen is None else chosen
        if self._read[0] is not rows or not np.array_equal(self._read[1], chosen):
            given = {CHOICE: chosen}
            if self.hears:
                read = {FEATURES: np.stack(rows)}
            else:
                ids, mask = together(rows)
                read = {"input_ids": ids, MASK: mask.astype(np.int64)}
                given[f"encoder_{MASK}"] = mask
            known = self.encoder.inputs
            feeds = {name: x for name, x in {**read, CHOICE: chosen}.items() if name in known}
            [hidden, *_] = self.encoder(feeds)
            self._read = rows, chosen, {**given, _STATES: hidden}
        return self._read[2]

    def apart(self, rows: int) -> str:
        if self.hears:
            return "a sound has no tokens to look up; leave out speculate"
        if rows > 1:
            return "behind an encoder, all rows have one length: give one prompt at a time"
        return ""

    def start(
        self,
        rows: Sequence[Sequence[int]],
        more: int,
        beams: int = 1,
        chosen: Array | None = None,
    ) -> Array:
        given, own = self.encode(rows, chosen), np.array(self.begin)
        own = np.broadcast_to(own, (len(rows), own.shape[1]))
        begin = {"input_ids": own, "use_cache_branch": [False]}
        empty = {n: np.zeros(sized(n, t, len(rows), 0), t.dtype) for n, t in self.caches.items()}
        values = self.session({**self._fit({**given, **begin}), **empty})
        found = dict(zip(self.session.outputs, values, strict=True))
        logits = self._last(values)[:, -1]
        past = {n: found[n.replace(PAST, PRESENT)].repeat(beams, 0) for n in self.caches}
        self.past = {name: self.session.place(array) for name, array in past.items()}
        self.given = {name: x.repeat(beams, 0) for name, x in given.items()}
        return logits.repeat(beams, 0)

    def step(self, tokens: Array) -> Array:
        return self._grow(tokens[:, None])[:, -1]

    def extend(self, rows: Sequence[int], tokens: Sequence[Sequence[int]]) -> list[Array]:
        return [*self._grow(np.array(tokens))]

    def forget(self, row: int, count: int) -> None:
        if count:
            self.past |= self._picked(np.s_[:, :, :-count], _OWN)

    def _grow(self, ids: Array) -> Array:
        """The logits after each of more tokens, (R, T)."""
        grown = {}
        for name, old in self.past.items():
            if _OWN in name:
                rows, heads, length, size = old.shape
                longer = np.empty((rows, heads, length + ids.shape[1], size), old.dtype)
                grown[name] = self.session.place(longer)
        new = {"input_ids": ids, "use_cache_branch": [True]}
        logits = self._run({**self.given, **new}, self.past, grown, ids.shape[1])
        self.past |= grown
        return logits

    def reorder(self, rows: Array) -> None:
        # All beams of a prompt read the same from the encoder.
        self.past |= self._picked(rows, _OWN)

    def keep(self, rows: Array) -> None:
        self.past = self._picked(rows)
        self.given = {name: array[rows] for name, array in self.given.items()}
