"""Tokens guessed ahead and checked together: by looking them up in the row, or by a draft model.

Checking changes no token. Each is chosen from the model's own logits as without guesses, greedily
or drawn with the row's own random numbers, and a guess counts only if it is the token so chosen.
That is speculative sampling (arXiv 2211.17192, 2302.01318) in which the draft draws by the same
random numbers, so not only the distribution but every token stays the same.
"""

import itertools
import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from statistics import median

from graphgen.generation.caches import Decoder
from graphgen.generation.prefixes import common
from graphgen.operands import Array

GUESSES = 10
"""The most tokens that are guessed at a time, by default."""

_LENGTHS = (3, 2, 1)
"""The n-grams that are looked up, the longest first."""

_CLASSES = (1, 2, 3, 4, 8, 16)
"""How many tokens before a guess have to be the same, for each class of chances."""

_HITS, _TRIES = (0.2, 0.5, 1.0, 2.0, 3.6, 3.8), 4.0
"""What is assumed of each class before anything is known: guesses that were right, of how many."""

_MEMORY = 64.0  # guesses of a class; older ones count less and less
_GAIN = 1.03  # what a check has to bring in expectation
_PAUSE, _LONGEST_PAUSE = 8, 512  # steps


class Lookup:
    """Guesses what followed the same last tokens before, in the prompt or behind it.

    Prompt lookup (A. Saxena, 2023): of the row's last three tokens, or else two or one, the latest
    earlier place is taken. How often such a guess is right depends on how many tokens before it are
    the same, and is counted for each such number, also where nothing is checked: it costs nothing.
    """

    cost, blind = 0.0, False

    def __init__(self, rows: int) -> None:
        self._known = [0] * rows
        self._places: list[dict[tuple[int, ...], int]] = [{} for _ in range(rows)]
        self._guess: list[tuple[int, list[int]]] = [(0, []) for _ in range(rows)]
        self._hits, self._tries = [*_HITS], [_TRIES] * len(_HITS)

    def chances(self, row: int, tokens: Sequence[int], most: int) -> list[float]:
        """How likely each of up to `most` guesses is right, if those before it are."""
        places = self._places[row]
        for end in range(max(1, self._known[row]), len(tokens)):
            for n in _LENGTHS[-end:]:
                places[tuple(tokens[end - n : end])] = end
        self._known[row] = len(tokens)
        found = (places.get(tuple(tokens[-n:]), 0) for n in _LENGTHS if n <= len(tokens))
        end = next(filter(None, found), 0)
        if not end:
            self._guess[row] = 0, []
            return []
        same = 1
        while same < min(end, _CLASSES[-1]) and tokens[end - same - 1] == tokens[-same - 1]:
            same += 1
        guess = [*tokens[end : end + most]]
        guess = [*itertools.islice(itertools.cycle(guess), most)]  # what repeats itself goes on so
        self._guess[row] = same, guess
        return [self._chance(same + i) for i in range(most)]

    def guess(self, row: int, tokens: Sequence[int], count: int) -> list[int]:
        """As many of these guesses."""
        return self._guess[row][1][:count]

    def learn(self, row: int, chosen: Sequence[int]) -> None:
        """Count the guesses that were right, up to the first that was not."""
        same, guess = self._guess[row]
        for i, (guessed, token) in enumerate(zip(guess, chosen, strict=False)):
            at = _class(same + i)
            self._hits[at] += guessed == token
            self._tries[at] += 1
            if self._tries[at] > _MEMORY:
                self._hits[at], self._tries[at] = self._hits[at] / 2, self._tries[at] / 2
            if guessed != token:
                break

    def _chance(self, same: int) -> float:
        at = _class(same)
        return self._hits[at] / self._tries[at]


def _class(same: int) -> int:
    return max(i for i, least in enumerate(_CLASSES) if least <= same)


class Draft:
    """Guesses the tokens that a smaller model of the same vocabulary chooses.

    `choose` takes a row's token from the draft's logits as the model's own are taken: given the row
    and how many tokens behind it that is. `context` is the most tokens that the draft can read.
    """

    blind = True

    def __init__(
        self,
        decoder: Decoder,
        rows: Sequence[Sequence[int]],
        more: int,
        choose: Callable[[int, Array, int], int],
        *,
        context: int | None,
    ) -> None:
        self._decoder, self._choose = decoder, choose
        self._context, self._vocabulary = context, decoder.vocabulary
        self._read = [self._known(row) for row in rows]
        decoder.start(self._read, more)
        self._guessed: list[list[int]] = [[] for _ in rows]
        self._right, self._tries, self.cost = 3.0, 4.0, 0.25

    def chances(self, row: int, tokens: Sequence[int], most: int) -> list[float]:
        """How likely each of up to `most` guesses is right, if those before it are."""
        self._guessed[row] = []
        room = most if self._context is None else self._context - len(tokens)
        return [self._right / self._tries] * min(most, room)

    def guess(self, row: int, tokens: Sequence[int], count: int) -> list[int]:
        """As many of these guesses, after reading what the row has had since."""
        read, new = self._read[row], self._known(tokens)
        # The last one gives the logits, so it is read again.
        same = common(read, new[:-1])
        self._decoder.forget(row, len(read) - same)
        del read[same:], new[:same]
        for i in range(count):
            [logits] = self._decoder.extend([row], [new])
            read += new
            new = [self._choose(row, logits[-1], i)]
            self._guessed[row] += new
        return self._guessed[row]

    def learn(self, row: int, chosen: Sequence[int]) -> None:
        """Count the guesses that were right, up to the first that was not."""
        for guessed, token in zip(self._guessed[row], chosen, strict=False):
            self._right += guessed == token
            self._tries += 1
            if guessed != token:
                break
        if self._tries > _MEMORY:
            self._right, self._tries = self._right / 2, self._tries / 2

    def _known(self, tokens: Sequence[int]) -> list[int]:
        """The tokens, but for those that only the model's larger table of embeddings has."""
        if self._vocabulary is None:
            return [*tokens]
        return [token if token < self._vocabulary else 0 for token in tokens]


class Speculation:
    """Decides how many guesses of each row are checked, by what that brings and costs here.

    Checking k guesses takes 1 + s · k steps; s is the median of the last that were measured. Rows
    are checked one behind the other, or `together`, each with as many tokens as the longest. Where
    that does not pay, a lookup is still followed, for nothing; a draft model rests, and is tried
    again after pauses that grow.
    """

    def __init__(self, guesser: "Lookup | Draft", most: int, *, together: bool = False) -> None:
        self.guesser, self.most, self._together = guesser, most, together
        self._steps: deque[float] = deque(maxlen=9)
        self._slopes: deque[float] = deque([0.1], maxlen=5)
        self._costs: deque[float] = deque([guesser.cost], maxlen=5)
        self._waited, self._pause = 0, _PAUSE
        self.checked, self.right = 0, 0

    def guesses(self, rows: Mapping[int, Sequence[int]], room: int) -> dict[int, list[int]]:
        """What to check of these rows, given by their tokens: guesses for each, or none at all.

        At most `room` new tokens fit.
        """
        most, counts = min(self.most, room - 1), dict[int, int]()
        gain, spent = math.inf, 0.0
        for row, tokens in rows.items():
            chances = self.guesser.chances(row, tokens, most) if most > 0 else []
            counts[row], brings, cost = self._best(chances)
            gain, spent = min(gain, brings), spent + cost
        if len(self._steps) < 2:  # the first step also makes room
            return {}
        slope = median(self._slopes)
        together = 1 + slope * (len(rows) - 1)
        if self._together:
            guessing = median(self._costs) * sum(counts.values())
            spent = 1 + slope * (len(rows) * (1 + max(counts.values())) - 1) + guessing
        pays = all(counts.values()) and gain * together > _GAIN * spent
        if not pays and self.guesser.blind and most > 0:
            self._waited += 1
            if self._waited >= self._pause:
                self._waited, self._pause = 0, min(2 * self._pause, _LONGEST_PAUSE)
                counts, pays = dict.fromkeys(rows, min(2, most)), True
        elif pays:
            self._waited, self._pause = 0, _PAUSE
        if not pays:
            return {}
        then = time.perf_counter()
        found = {row: self.guesser.guess(row, rows[row], counts[row]) for row in rows}
        if self.guesser.blind:
            each = (time.perf_counter() - then) / sum(counts.values())
            self._costs.append(each / median(self._steps))
        return found

    def took(self, seconds: float, guesses: Mapping[int, Sequence[int]], rows: int) -> None:
        """Learn from a step of `rows` rows, or from a check of guesses."""
        count = sum(map(len, guesses.values()))
        slope = median(self._slopes)
        if not count:
            self._steps.append(seconds / (1 + slope * (rows - 1)))
        elif self._together:
            tokens = rows * (1 + max(map(len, guesses.values())))
            self._slopes.append(max(0.0, (seconds / median(self._steps) - 1) / (tokens - 1)))
        else:
            steps = seconds / median(self._steps)
            self._slopes.append(max(0.0, (steps - len(guesses)) / count))

    def learn(self, row: int, guesses: Sequence[int], right: int, chosen: Sequence[int]) -> None:
        """Learn which tokens were chosen; `right` of the checked guesses were these."""
        self.checked, self.right = self.checked + len(guesses), self.right + right
        self.guesser.learn(row, chosen)

    def _best(self, chances: Sequence[float]) -> tuple[int, float, float]:
        """How many guesses bring most a time; the tokens expected, and the steps they take."""
        each = median(self._slopes) + median(self._costs)
        brings, alike, best = 1.0, 1.0, (0, 1.0, 1.0)
        for count, chance in enumerate(chances, 1):
            alike *= chance
            brings += alike
            cost = 1 + each * count
            if brings * best[2] > best[1] * cost:
                best = count, brings, cost
        return best
