"""Decoders that keep keys and values, and those that keep them in buffers in place."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from graphgen.display import on_screen
from graphgen.errors import GraphgenError
from graphgen.generation.huge_pages import huge_pages
from graphgen.generation.prefixes import Beginning, beginnings, pays
from graphgen.operands import Array
from graphgen.passes.decoding import KEPT
from graphgen.passes.training.by_row import CHOICE
from graphgen.plan import TensorType
from graphgen.runtime import Buffer, Session, on_host

PAST, PRESENT, MASK = "past_key_values", "present", "attention_mask"


@dataclass
class Reader:
    """A second session on the same cache, which reads `least` tokens or more faster.

    It opens when it is first needed.
    """

    open: Callable[[], Session]
    least: int

    @cached_property
    def session(self) -> Session:
        found = self.open()
        huge_pages()
        return found


class Decoder:
    """Rows of tokens, each continued by one token at a time.

    Keys and values stay in the memory of the session's device from step to step. `note` says
    why they are copied into larger buffers at each step, or is empty; `bound` why a token's logits
    depend on the tokens that are read together with it. `user` is whoever started it last.
    Prompts of more than `turn` tokens are read whole: their angles follow the last token of a call.
    `held` are the tokens that each row of the cache holds. As far as `shares` allows it, a prompt
    may begin with them; `shared` is how many tokens of the last prompts were there.
    `together` says whether `extend` reads several rows in one call. `stateful` decoders also keep
    states of a fixed size: these hold all tokens so far, and cannot go back to an earlier one.
    """

    together = False

    def __init__(self, session: Session, chunk: int = 512, note: str = "", bound: str = "") -> None:
        self.session, self.chunk, self.note, self.bound = session, chunk, note, bound
        self.caches = {name: t for name, t in session.inputs.items() if name.startswith("past_")}
        self.stateful = not all(map(grows, self.caches))
        self.past: dict[str, Buffer] = {}
        self.user: object = None
        self.turn: int | None = None
        self.chosen = np.zeros(0, np.int64)
        self.shares, self.shared, self.held = True, 0, list[list[int]]()
        self._lends = False  # whether a later prompt may begin with what is held
        self._logits = list(session.outputs).index("logits")
        huge_pages()

    @on_screen
    def __repr__(self) -> Iterator[str]:
        yield f"{type(self).__name__} decoder: {repr(self.session).partition(chr(10))[0]}"

    def _parts(self, longest: int) -> int:
        """How many tokens of prompts, of which the longest has that many, are read at once."""
        return longest if self.turn is not None and longest > self.turn else self.chunk

    def _known(
        self, rows: Sequence[Sequence[int]], more: int, chosen: Array, *, among: bool
    ) -> dict[int, Beginning]:
        """What rows share with those that are held, or `among` them; {} if they may share nothing.

        Tokens of int8 products, and of longrope beyond its first length, depend on what is read
        together with them; states are those after all tokens. On a device, it was not measured what
        copies of the cache cost.
        """
        turns = self.turn is not None and max(map(len, rows)) + more > self.turn
        held, self.held = self.held if self._lends else [], []  # until the new ones are read
        on_cpu = self.session.plan.device == "cpu"
        apart = self.bound or turns or self.stateful
        self._lends = self.shares and not apart and on_cpu
        if not self._lends:
            return {}
        return beginnings(rows, chosen, held, self.chosen, among=among)

    def _old(self, name: str, row: int, part: slice) -> Array:
        """Keys or values of a row of the cache, (G, part, D)."""
        with on_host(self.past[name]) as array:
            return array[row, :, part]

    def _hold(self, rows: Sequence[Sequence[int]], copies: Array) -> None:
        """Note what the rows of the cache hold."""
        self.held = [[*rows[row]] for row in copies] if rows else []

    def _holds_more(
        self, tokens: Iterable[Iterable[int]], rows: Sequence[int] | None = None
    ) -> None:
        """Note that rows of the cache, by default all, hold more tokens."""
        every = range(len(self.held)) if rows is None else rows
        for row, more in zip(every if self.held else (), tokens, strict=False):
            self.held[row] += map(int, more)

    def _holds_less(self, row: int, count: int) -> None:
        """Note that a row of the cache no longer holds its last tokens."""
        if self.held:
            del self.held[row][len(self.held[row]) - count :]

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

    @property
    def onward(self) -> str:
        """Why `forget` cannot go back to earlier tokens, or ""."""
        return "the states of its layers cannot go back to earlier tokens" if self.stateful else ""

    def unchecked(self, rows: int) -> str:
        """Why `extend` cannot tell what would follow each of several tokens, or ""."""
        if reason := self.bound or self.onward or self.apart(rows):
            return reason
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
        session: Session | None = None,
        ends: Array | None = None,
    ) -> Array:
        """Return the last logits, (R, kept, vocabulary); write keys and values into `present`."""
        outputs = {present_of(name): array for name, array in present.items()}
        fitted = self._fit({**feeds, KEPT: kept})
        bound = (session or self.session).bind({**fitted, **past}, outputs)
        return self._last(bound(), kept, ends)

    def _picked(self, rows: Any, part: str = "") -> dict[str, Buffer]:
        """These rows, or what slices choose, of the keys and values with `part` in their names."""
        picked: dict[str, Buffer] = {}
        for name, buffer in self.past.items():
            if part in name:
                with on_host(buffer) as array:
                    picked[name] = self.session.place(np.ascontiguousarray(array[rows]))
        return picked

    def _last(self, outputs: Sequence[Array], kept: int = 1, ends: Array | None = None) -> Array:
        """The logits of the last tokens, (R, kept, vocabulary), in float32.

        Rows have `ends` tokens, with padding behind them, or all as many. Graphs that choose the
        last themselves give no others.
        """
        logits = outputs[self._logits]
        if ends is not None and logits.shape[1] > kept:
            places = ends[:, None] + np.arange(-kept, 0)
            logits = np.take_along_axis(logits, places[:, :, None], axis=1)
        return logits[:, -kept:].astype(np.float32, copy=False)

    def _fit(self, feeds: Mapping[str, Any]) -> dict[str, Array]:
        """Copies of those feeds that the graph has as inputs, in its dtypes."""
        known = self.session.inputs
        return {n: np.array(x, known[n].dtype, order="C") for n, x in feeds.items() if n in known}


class InPlace(Decoder):
    """The cache in buffers with room for all tokens to come; each row has its own length.

    With a `reader`, that reads prompts, if they have enough tokens.
    """

    def __init__(
        self, session: Session, chunk: int = 512, bound: str = "", reader: Reader | None = None
    ) -> None:
        super().__init__(session, chunk, bound=bound)
        self.reader = reader

    def start(
        self,
        rows: Sequence[Sequence[int]],
        more: int,
        beams: int = 1,
        chosen: Array | None = None,
    ) -> Array:
        chosen = np.zeros(len(rows), np.int64) if chosen is None else chosen
        known = self._known(rows, more, chosen, among=True)
        self.lengths, self.chosen = np.array([len(row) for row in rows]), chosen
        longest = int(self.lengths.max())
        count, capacity, chunk = len(rows), longest + more, self._parts(longest)
        shapes = {n: sized(n, t, count * beams, capacity) for n, t in self.caches.items()}
        past = {n: np.zeros(shape, self.caches[n].dtype) for n, shape in shapes.items()}
        order = known
        if not (known and pays(known, rows, chunk)):
            order = dict.fromkeys(range(count), Beginning(0, 0, False))
        self.shared = sum(found.same for found in order.values())
        # Padding behind a row would change its states.
        alike = not self.stateful or min(self.lengths) == longest
        if longest <= chunk and not self.shared and alike:
            logits = self._part(past, slice(0, count), *together(rows), 0, prompt=True)[:, -1]
        else:  # after a past, only one row can take more than one token
            parts: dict[int, Array] = {}
            for r, (of, same, new) in order.items():
                for name, array in past.items() if same else ():
                    part = slice(0, same)
                    array[r, :, part] = array[of, :, part] if new else self._old(name, of, part)
                for at in range(same, len(rows[r]), chunk):
                    ids = np.asarray([rows[r][at : at + chunk]])
                    ones = np.ones((1, at + ids.shape[1]))
                    parts[r] = self._part(past, slice(r, r + 1), ids, ones, at, prompt=True)[:, -1]
            logits = np.concatenate([parts[r] for r in range(count)])
        self.lengths = np.repeat(self.lengths, beams)
        rows_of = np.repeat(np.arange(count), beams)
        self.chosen = self.chosen[rows_of]
        self.past = {name: self.session.place(array) for name, array in past.items()}
        self._bind(capacity)
        if beams > 1:
            self.reorder(rows_of)
        self._hold(rows, rows_of)
        return logits[rows_of]

    def _part(
        self,
        past: Mapping[str, Buffer],
        rows: slice,
        ids: Array,
        mask: Array,
        at: int,
        kept: int = 1,
        prompt: bool = False,
    ) -> Array:
        whole = next(iter(past.values())).shape[0] == 1  # which may be on a device
        own = past if whole else {n: x[rows] for n, x in past.items() if isinstance(x, np.ndarray)}
        places = np.broadcast_to(np.arange(at, at + ids.shape[1]), ids.shape)
        feeds = {"input_ids": ids, MASK: mask, "position_ids": places, CHOICE: self.chosen[rows]}
        # Tokens that are only checked have to give what reading them one by one gives.
        reader = self.reader if prompt else None
        other = reader.session if reader is not None and ids.size >= reader.least else None
        ends = np.asarray(mask).sum(axis=1, dtype=np.int64) - at
        return self._run(feeds, own, own, kept, other, ends)

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
        # Kernels read a state before they write the next one, so that both may be in one place.
        outputs = {present_of(name): buffer for name, buffer in self.past.items()}
        if self.vocabulary is not None:  # otherwise each step makes a new array
            sizes, kind = (len(self.lengths), 1, self.vocabulary), self.session.outputs["logits"]
            outputs["logits"] = np.empty(sizes, kind.dtype)
        self._bound = self.session.bind({**self.feeds, **self.past}, outputs)

    def step(self, tokens: Array) -> Array:
        self.feeds["input_ids"][:, 0] = tokens
        self.feeds[MASK][self._rows, self.lengths] = 1
        logits = self._last(self._bound())[:, -1]
        self.lengths += 1
        self._holds_more(tokens[:, None])
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
            self._holds_more([more], [row])
        return [found[row] for row in rows]

    def forget(self, row: int, count: int) -> None:
        until = int(self.lengths[row])
        self._holds_less(row, count)
        self.lengths[row] = until - count
        self.feeds[MASK][row, until - count : until] = 0

    def reorder(self, rows: Array) -> None:
        changed = np.flatnonzero(rows != np.arange(len(rows)))
        longest = int(self.lengths.max())
        held, self.held = self.held, []
        for name, buffer in self.past.items() if len(changed) else ():
            with on_host(buffer) as array:
                part = (slice(None), slice(longest)) if grows(name) else ()
                array[(changed, *part)] = array[(rows[changed], *part)]
        self._hold(held, rows)

    def keep(self, rows: Array) -> None:
        self.reorder(rows)
        self.lengths, self.chosen = self.lengths[rows], self.chosen[rows]
        self.past = self._picked(slice(len(rows)))
        self._bind(self.feeds[MASK].shape[1])


def together(rows: Sequence[Sequence[int]], *, left: bool = False) -> tuple[Array, Array]:
    """Rows of different lengths as one array, padded on one side, and where their tokens are."""
    lengths = np.array([len(row) for row in rows])
    longest = lengths.max()
    mask = np.arange(longest) < lengths[:, None]
    mask = mask[:, ::-1] if left else mask
    ids = np.zeros(mask.shape, np.int64)
    ids[mask] = np.concatenate(rows)
    return ids, mask


def grows(name: str) -> bool:
    """Whether an input of a cache holds something of each token: not a state of all."""
    return name.startswith(PAST)


def present_of(name: str) -> str:
    """The output that follows an input of a cache."""
    return name.replace(PAST, PRESENT) if grows(name) else name.replace("past", PRESENT, 1)


def sized(name: str, kind: TensorType, rows: int, length: int) -> tuple[int, ...]:
    """The shape of a buffer of a cache, (B, G, S, D), or of a state, whose sizes are fixed."""
    _, *dims = kind.dims or (0,)
    if grows(name):
        dims[1:2] = [length]
    numbers = [d for d in dims if isinstance(d, int)]
    if len(numbers) < len(dims):
        raise GraphgenError(
            f"a cache of the decoder is {kind}; its second and last sizes, heads and features, "
            "must be numbers: build or export the folder again"
        )
    return rows, *numbers
