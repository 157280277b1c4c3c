"""Decoders that keep keys and values: in buffers in place, in ones that grow, behind an encoder."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from graphgen.display import on_screen
from graphgen.errors import GraphgenError
from graphgen.generation.huge_pages import huge_pages
from graphgen.generation.speech import FEATURES
from graphgen.operands import Array
from graphgen.passes.decoding import KEPT
from graphgen.passes.training.by_row import CHOICE
from graphgen.plan import TensorType
from graphgen.runtime import Buffer, Session, on_host

PAST, PRESENT, MASK = "past_key_values", "present", "attention_mask"
_STATES = "encoder_hidden_states"
_OWN = ".decoder."  # in the names of a cache of the decoder's own tokens


class Decoder:
    """Rows of tokens, each continued by one token at a time.

    Keys and values stay in the memory of the session's device from step to step. `note` says
    why they are copied into larger buffers at each step, or is empty; `bound` why a token's logits
    depend on the tokens that are read together with it. `user` is whoever started it last.
    Prompts of more than `turn` tokens are read whole: their angles follow the last token of a call.
    """

    def __init__(self, session: Session, chunk: int = 512, note: str = "", bound: str = "") -> None:
        self.session, self.chunk, self.note, self.bound = session, chunk, note, bound
        self.caches = {name: t for name, t in session.inputs.items() if name.startswith(PAST)}
        self.past: dict[str, Buffer] = {}
        self.user: object = None
        self.turn: int | None = None
        self._logits = list(session.outputs).index("logits")
        huge_pages()

    @on_screen
    def __repr__(self) -> Iterator[str]:
        yield f"{type(self).__name__} decoder: {repr(self.session).partition(chr(10))[0]}"

    def _parts(self, longest: int) -> int:
        """How many tokens of prompts, of which the longest has that many, are read at once."""
        return longest if self.turn is not None and longest > self.turn else self.chunk

    @property
    def vocabulary(self) -> int | None:
        """How many tokens there are, if the graph says so."""
        size = (self.session.outputs["logits"].dims or (None,))[-1]
        return size if isinstance(size, int) else None

    def start(
        self,
        rows: Sequence[Sequence[int]],
        more: int,
        beams: int = 1,
        chosen: Array | None = None,
    ) -> Array:
        """Read prompts in chunks; return the logits after each, (rows · beams, vocabulary).

        Prompt r is continued `beams` times, in the rows from r · beams on, by up to `more` tokens.
        `chosen`, (R,), holds the number of each prompt's adapter, for a graph that has some; it is
        0, the base alone, for all prompts by default.
        """
        raise NotImplementedError

    def step(self, tokens: Array) -> Array:
        """Read one more token for each row, (R,); return the logits after it, (R, vocabulary).

        The next step may overwrite them.
        """
        raise NotImplementedError

    def apart(self, rows: int) -> str:
        """Why `extend` cannot read more of some of that many rows than of others, or ""."""
        raise NotImplementedError

    def unchecked(self, rows: int) -> str:
        """Why `extend` cannot tell what would follow each of several tokens, or ""."""
        if self.bound or self.apart(rows):
            return self.bound or self.apart(rows)
        if (self.session.outputs["logits"].dims or (None, None))[1] != 1:
            return ""
        return "the graph gives the logits of the last token alone: build it with --layout plain"

    def extend(self, rows: Sequence[int], tokens: Sequence[Sequence[int]]) -> list[Array]:
        """Read more tokens of some rows; return the logits after each, (T, vocabulary) a row."""
        raise NotImplementedError

    def forget(self, row: int, count: int) -> None:
        """Go on as if a row's last `count` tokens had not been read."""
        raise NotImplementedError

    def reorder(self, rows: Array) -> None:
        """Let row i go on as row rows[i], another beam of the same prompt."""
        raise NotImplementedError

    def keep(self, rows: Array) -> None:
        """Go on with only these rows, in rising order."""
        raise NotImplementedError

    def _run(
        self,
        feeds: Mapping[str, Any],
        past: Mapping[str, Buffer],
        present: Mapping[str, Buffer],
        kept: int = 1,
    ) -> Array:
        """Return the last logits, (R, kept, vocabulary); write keys and values into `present`."""
        outputs = {name.replace(PAST, PRESENT): array for name, array in present.items()}
        bound = self.session.bind({**self._fit({**feeds, KEPT: kept}), **past}, outputs)
        return self._last(bound(), kept)

    def _picked(self, rows: Any, part: str = "") -> dict[str, Buffer]:
        """These rows, or what slices choose, of the keys and values with `part` in their names."""
        picked: dict[str, Buffer] = {}
        for name, buffer in self.past.items():
            if part in name:
                with on_host(buffer) as array:
                    picked[name] = self.session.place(np.ascontiguousarray(array[rows]))
        return picked

    def _last(self, outputs: Sequence[Array], kept: int = 1) -> Array:
        """The logits of the last tokens, (R, kept, vocabulary), in float32."""
        return outputs[self._logits][:, -kept:].astype(np.float32, copy=False)

    def _fit(self, feeds: Mapping[str, Any]) -> dict[str, Array]:
        """Copies of those feeds that the graph has as inputs, in its dtypes."""
        known = self.session.inputs
        return {n: np.array(x, known[n].dtype, order="C") for n, x in feeds.items() if n in known}


class InPlace(Decoder):
    """The cache in buffers with room for all tokens to come; each row has its own length."""

    def start(
        self,
        rows: Sequence[Sequence[int]],
        more: int,
        beams: int = 1,
        chosen: Array | None = None,
    ) -> Array:
        self.lengths = np.array([len(row) for row in rows])
        self.chosen = np.zeros(len(rows), np.int64) if chosen is None else chosen
        longest = int(self.lengths.max())
        count, capacity, chunk = len(rows), longest + more, self._parts(longest)
        shapes = {name: sized(t, count * beams, capacity) for name, t in self.caches.items()}
        past = {n: np.zeros(shape, self.caches[n].dtype) for n, shape in shapes.items()}
        if longest <= chunk:
            logits = self._part(past, slice(0, count), *_together(rows), 0)[:, -1]
        else:  # after a past, only one row can take more than one token
            parts: list[Array] = []
            for r, row in enumerate(rows):
                last = np.empty(0)
                for at in range(0, len(row), chunk):
                    ids = np.asarray([row[at : at + chunk]])
                    ones = np.ones((1, at + ids.shape[1]))
                    last = self._part(past, slice(r, r + 1), ids, ones, at)[:, -1]
                parts.append(last)
            logits = np.concatenate(parts)
        self.lengths = np.repeat(self.lengths, beams)
        rows_of = np.repeat(np.arange(count), beams)
        self.chosen = self.chosen[rows_of]
        self.past = {name: self.session.place(array) for name, array in past.items()}
        self._bind(capacity)
        if beams > 1:
            self.reorder(rows_of)
        return logits[rows_of]

    def _part(
        self,
        past: Mapping[str, Buffer],
        rows: slice,
        ids: Array,
        mask: Array,
        at: int,
        kept: int = 1,
    ) -> Array:
        whole = next(iter(past.values())).shape[0] == 1  # which may be on a device
        own = past if whole else {n: x[rows] for n, x in past.items() if isinstance(x, np.ndarray)}
        places = np.broadcast_to(np.arange(at, at + ids.shape[1]), ids.shape)
        feeds = {"input_ids": ids, MASK: mask, "position_ids": places, CHOICE: self.chosen[rows]}
        return self._run(feeds, own, own, kept)

    def _bind(self, capacity: int) -> None:
        """Bind all buffers for every step to come; the mask is as long as they are."""
        feeds = {
            "input_ids": np.zeros((len(self.lengths), 1)),
            MASK: np.arange(capacity) < self.lengths[:, None],
            "position_ids": self.lengths[:, None],
            CHOICE: self.chosen,
            KEPT: 1,
        }
        self.feeds = self._fit(feeds)
        if "position_ids" in self.feeds:  # equal to the lengths before each step
            self.lengths = self.feeds["position_ids"][:, 0]
        self._rows = np.arange(len(self.lengths))
        outputs = {name.replace(PAST, PRESENT): buffer for name, buffer in self.past.items()}
        if self.vocabulary is not None:  # otherwise each step makes a new array
            sizes, kind = (len(self.lengths), 1, self.vocabulary), self.session.outputs["logits"]
            outputs["logits"] = np.empty(sizes, kind.dtype)
        self._bound = self.session.bind({**self.feeds, **self.past}, outputs)

    def step(self, tokens: Array) -> Array:
        self.feeds["input_ids"][:, 0] = tokens
        self.feeds[MASK][self._rows, self.lengths] = 1
        logits = self._last(self._bound())[:, -1]
        self.lengths += 1
        return logits

    def apart(self, rows: int) -> str:
        if rows > 1 and self.session.plan.device != "cpu":
            return "on a device, several tokens of one row only are read: give one prompt at a time"
        return ""

    def extend(self, rows: Sequence[int], tokens: Sequence[Sequence[int]]) -> list[Array]:
        single = [row for row, more in zip(rows, tokens, strict=True) if len(more) == 1]
        if len(single) < min(2, len(self.lengths)):
            single = []
        found: dict[int, Array] = {}
        given = dict(zip(rows, tokens, strict=True))
        if single:  # the other rows read any token, and forget it
            step = [given[row][0] if row in single else 0 for row in range(len(self.lengths))]
            logits = self.step(np.array(step))
            for row in {*range(len(step))} - {*single}:
                self.forget(row, 1)
            found = {row: logits[row : row + 1].copy() for row in single}
        for row in given.keys() - found.keys():
            at, more = int(self.lengths[row]), given[row]
            ids, until = np.array([more]), at + len(more)
            part = slice(row, row + 1), ids, np.ones((1, until)), at, len(more)
            [found[row]] = self._part(self.past, *part)
            self.feeds[MASK][row, at:until] = 1
            self.lengths[row] = until
        return [found[row] for row in rows]

    def forget(self, row: int, count: int) -> None:
        until = int(self.lengths[row])
        self.lengths[row] = until - count
        self.feeds[MASK][row, until - count : until] = 0

    def reorder(self, rows: Array) -> None:
        changed = np.flatnonzero(rows != np.arange(len(rows)))
        longest = int(self.lengths.max())
        for buffer in self.past.values() if len(changed) else ():
            with on_host(buffer) as array:
                array[changed, :, :longest] = array[rows[changed], :, :longest]

    def keep(self, rows: Array) -> None:
        self.reorder(rows)
        self.lengths, self.chosen = self.lengths[rows], self.chosen[rows]
        self.past = self._picked(slice(len(rows)))
        self._bind(next(iter(self.past.values())).shape[2])


class Growing(Decoder):
    """A cache that is copied into a larger one at each step; prompts are padded on the left."""

    def start(
        self,
        rows: Sequence[Sequence[int]],
        more: int,
        beams: int = 1,
        chosen: Array | None = None,
    ) -> Array:
        ids, mask = _together(rows, left=True)
        self.mask, self.length = mask[:, :0], 0
        self.chosen = np.zeros(len(rows), np.int64) if chosen is None else chosen
        self.past, logits = self._caches(len(rows)), np.empty(0)
        chunk = self._parts(ids.shape[1])
        for at in range(0, ids.shape[1], chunk):
            logits = self._grow(ids[:, at : at + chunk], mask[:, at : at + chunk])[:, -1]
        if beams > 1:
            rows_of = np.repeat(np.arange(len(rows)), beams)
            self.reorder(rows_of)
            logits = logits[rows_of]
        return logits

    def step(self, tokens: Array) -> Array:
        return self._grow(tokens[:, None], np.ones((len(tokens), 1), bool))[:, -1]

    def apart(self, rows: int) -> str:
        if rows > 1:
            return f"all rows of the cache grow together ({self.note}): give one prompt at a time"
        return ""

    def extend(self, rows: Sequence[int], tokens: Sequence[Sequence[int]]) -> list[Array]:
        ids = np.array(tokens)
        return [*self._grow(ids, np.ones(ids.shape, bool), ids.shape[1])]

    def forget(self, row: int, count: int) -> None:
        if count:
            self.length -= count
            self.mask = self.mask[:, : self.length]
            self.past = self._picked((slice(None), slice(None), slice(self.length)))

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
        new = {n: np.empty(sized(t, rows, self.length), t.dtype) for n, t in self.caches.items()}
        return {name: self.session.place(array) for name, array in new.items()}

    def reorder(self, rows: Array) -> None:
        self.past = self._picked(rows)
        self.mask, self.chosen = self.mask[rows], self.chosen[rows]

    def keep(self, rows: Array) -> None:
        self.reorder(rows)


class EncoderDecoder(Decoder):
    """An encoder that runs once for each prompt, and a decoder that starts with its own tokens.

    In its first call the decoder computes the keys and values of the encoder's output, and returns
    them; with use_cache_branch, it takes them back. Those of its own tokens grow.
    """

    def __init__(self, encoder: Session, decoder: Session) -> None:
        note = "a decoder that reads an encoder's output grows its cache"
        super().__init__(
            decoder,
            note=note,
            bound="behind an encoder, rows begin with nothing to look up; leave out speculate",
        )
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
                ids, mask = _together(rows)
                read = {"input_ids": ids, MASK: mask.astype(np.int64)}
                given[f"encoder_{MASK}"] = mask
            known = self.encoder.inputs
            feeds = {name: x for name, x in {**read, CHOICE: chosen}.items() if name in known}
            [hidden, *_] = self.encoder(feeds)
            self._read = rows, chosen, {**given, _STATES: hidden}
        return self._read[2]

    def apart(self, rows: int) -> str:
        return self.bound

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
        empty = {n: np.zeros(sized(t, len(rows), 0), t.dtype) for n, t in self.caches.items()}
        values = self.session({**self._fit({**given, **begin}), **empty})
        found = dict(zip(self.session.outputs, values, strict=True))
        logits = self._last(values)[:, -1]
        past = {n: found[n.replace(PAST, PRESENT)].repeat(beams, 0) for n in self.caches}
        self.past = {name: self.session.place(array) for name, array in past.items()}
        self.given = {name: x.repeat(beams, 0) for name, x in given.items()}
        return logits.repeat(beams, 0)

    def step(self, tokens: Array) -> Array:
        grown = {}
        for name, old in self.past.items():
            if _OWN in name:
                rows, heads, length, size = old.shape
                longer = np.empty((rows, heads, length + 1, size), old.dtype)
                grown[name] = self.session.place(longer)
        new = {"input_ids": tokens[:, None], "use_cache_branch": [True]}
        logits = self._run({**self.given, **new}, self.past, grown)[:, -1]
        self.past |= grown
        return logits

    def reorder(self, rows: Array) -> None:
        # All beams of a prompt read the same from the encoder.
        self.past |= self._picked(rows, _OWN)

    def keep(self, rows: Array) -> None:
        self.past = self._picked(rows)
        self.given = {name: array[rows] for name, array in self.given.items()}


def _together(rows: Sequence[Sequence[int]], *, left: bool = False) -> tuple[Array, Array]:
    """Rows of different lengths as one array, padded on one side, and where their tokens are."""
    lengths = np.array([len(row) for row in rows])
    longest = lengths.max()
    mask = np.arange(longest) < lengths[:, None]
    mask = mask[:, ::-1] if left else mask
    ids = np.zeros(mask.shape, np.int64)
    ids[mask] = np.concatenate(rows)
    return ids, mask


def sized(kind: TensorType, rows: int, length: int) -> tuple[int, ...]:
    """The shape of a buffer of a cache (B, G, S, D)."""
    _, heads, _, size = kind.dims or (0, 0, 0, 0)
    if isinstance(heads, str) or isinstance(size, str):
        raise GraphgenError(
            f"a cache of the decoder is {kind}; its second and last sizes, heads and features, "
            "must be numbers: build or export the folder again"
        )
    return rows, heads or 0, length, size or 0
