"""All positions at once against one by one: the same loss and gradient, and what each way costs.

Under the causal mask a position sees no later one, so one run gives the losses of all positions and
their gradients (teacher forcing). A decoder with attention is compared

- with itself, one position at a time: a run for each prefix, whose loss counts the last position
  only, and the mean of the gradients of all runs;
- with a recurrent model of about as many parameters, whose single run has steps that wait for one
  another;
- with itself and that model when they decode: a run for each token, keys and values or states kept.

Runs take turns in one process, and the shortest run of each is shown; nothing is trained.
"""

import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from command import command, figure

import graphgen as gg
from graphgen import nn, ops
from graphgen.graph import parameters
from graphgen.models.published.cache import PAST, Cache, cache_inputs
from graphgen.models.published.config import Config
from graphgen.models.published.decoder import Decoder
from graphgen.models.published.gpt2 import gpt2
from graphgen.nn import count_parameters

VOCABULARY, LONGEST, BATCH = 512, 256, 4
BOUND = 1e-5  # relative, of loss, gradient and logits in float32
WANTED = 20.0  # times as fast at the longest length

Runs = dict[str, Callable[[int], Any]]  # of the length


class Model(nn.Module):
    """A language model that goes on from a state.

    `state(batch)` names the inputs for what was read before, each with its array when that is
    nothing; a call gives the logits (B, T, vocabulary) and that state behind the tokens, in order.
    """

    def loss(self, input_ids: Any, labels: Any) -> Any:
        """The mean cross-entropy over the labels that are not -100, of a text from its start."""
        model: Any = self
        return ops.cross_entropy(model(input_ids)["logits"], labels)


class Attentive(Model):
    """The decoder of GPT-2; its state is the keys and values of all tokens before."""

    def __init__(self, features: int):
        sizes = {"n_embd": features, "n_layer": 2, "n_head": 4, "n_positions": LONGEST}
        config = Config({"model_type": "gpt2", "vocab_size": VOCABULARY, **sizes})
        self.decoder = Decoder(gpt2(config))

    def state(self, count: int) -> dict[str, tuple[Any, Any]]:
        attentions = [layer.attention for layer in self.decoder.layers]
        inputs = cache_inputs(attentions)
        heads, size = attentions[0].num_heads, attentions[0].head_dim
        empty = np.zeros((count, heads, 0, size), np.float32)
        return {name: (spec, empty) for name, spec in inputs.items()}

    def __call__(self, input_ids: Any, **state: Any) -> dict[str, Any]:
        count, before = ops.dim(input_ids, 1), 0
        if state:
            before = ops.dim(state[f"{PAST}.0.key"], 2)
        places = ops.unsqueeze(ops.arange(count) + before, [0])  # (1, T)
        mask = ops.expand(np.ones((1, 1), np.int64), [1, count + before])  # nothing is padding
        cache = Cache(state) if state else None
        x = self.decoder.states(input_ids, mask, places, cache)  # (B, T, D)
        logits = self.decoder.embedding.logits(x)
        return {"logits": logits, **(cache.present if cache else {})}


class Recurrent(Model):
    """GRUs, one on another; its state is theirs."""

    def __init__(self, features: int):
        self.embedding = nn.Embedding(VOCABULARY, features)
        self.layers = [nn.Recurrent(features, features) for _ in range(4)]

    def state(self, count: int) -> dict[str, tuple[Any, Any]]:
        features = self.embedding.features
        spec = gg.float32[1, "batch_size", features], np.zeros((1, count, features), np.float32)
        return {f"state{i}": spec for i in range(len(self.layers))}

    def __call__(self, input_ids: Any, **state: Any) -> dict[str, Any]:
        x, after = self.embedding(input_ids), {}  # (B, T, D)
        for i, layer in enumerate(self.layers):
            x, [after[f"after{i}"]] = layer(x, *([state[f"state{i}"]] if state else []))
        return {"logits": self.embedding.logits(x), **after}


class Measured:
    """A model's training and reading graph on the runtime, and the ways to go through tokens."""

    def __init__(self, module: Any, ids: Any, labels: Any, options: Namespace):
        self.ids, self.labels, self.begin = ids, labels, module.state(len(ids))
        tokens = gg.int64["batch_size", "seq"]
        loss = gg.build(module.loss, seed=options.seed, input_ids=tokens, labels=tokens)
        step = gg.optimize(gg.grad(loss, wrt=[*parameters(loss.graph)]))
        state: Any = {name: spec for name, (spec, _) in self.begin.items()}
        reader = gg.optimize(gg.build(module, seed=options.seed, input_ids=tokens, **state))
        self.step, self.reader = (gg.Session(m, threads=options.threads) for m in (step, reader))

    def at_once(self, length: int) -> list[Any]:
        """The loss and the gradients of all positions in one run."""
        ids, labels = self.ids[:, :length].copy(), self.labels[:, :length].copy()
        return self.step(input_ids=ids, labels=labels)

    def by_prefixes(self, length: int) -> list[Any]:
        """The same of one position in each run, and their means."""
        total: list[Any] = []
        for end in range(1, length + 1):
            labels = np.full((len(self.ids), end), -100)
            labels[:, -1] = self.labels[:, end - 1]
            found = self.step(input_ids=self.ids[:, :end].copy(), labels=labels)
            total = [a + b for a, b in zip(total or [0.0] * len(found), found, strict=True)]
        return [array / np.float32(length) for array in total]

    def read(self, length: int, *, each: int) -> Any:
        """The logits of all positions, `each` of them in one run."""
        state, logits = [array for _, array in self.begin.values()], []
        for start in range(0, length, each):
            given = dict(zip(self.begin, state, strict=True))
            given["input_ids"] = self.ids[:, start : start + each].copy()
            found, *state = self.reader(given)
            logits.append(found)
        return np.concatenate(logits, axis=1)


def difference(wanted: Sequence[Any], given: Sequence[Any]) -> float:
    """|given - wanted| / |wanted|, of all elements together."""
    first, second = (
        np.concatenate([np.ravel(array).astype(np.float64) for array in arrays])
        for arrays in (wanted, given)
    )
    return float(np.linalg.norm(second - first) / np.linalg.norm(first))


def milliseconds(
    runs: Runs, lengths: Sequence[int], rounds: int, clock: Callable[[], float]
) -> dict[str, list[float]]:
    """The shortest of each at each length, in turn: what else a machine does only adds to it."""
    found: dict[str, list[float]] = {name: [] for name in runs}
    for length in lengths:
        spent: dict[str, list[float]] = {name: [] for name in runs}
        for _ in range(rounds):
            for name, run in runs.items():
                begin = clock()
                run(length)
                spent[name].append(1e3 * (clock() - begin))
        for name, times in spent.items():
            found[name].append(min(times))
    return found


def plot(found: dict[str, list[float]], lengths: Sequence[int], path: Path) -> None:
    """Milliseconds against the length, on logarithmic scales: training, and reading."""
    with figure(path, panels=2, size=(12, 4.5)) as all_axes:
        for axes, kind in zip(all_axes, ("training", "reading"), strict=True):
            for name, times in found.items():
                if name.startswith(kind):
                    axes.loglog(lengths, times, "o-", markersize=4, label=name)
            axes.set(xlabel="positions", ylabel="ms", xticks=lengths, xticklabels=lengths)
            axes.minorticks_off()
            axes.grid(alpha=0.3)
            axes.legend()


def run(options: Namespace) -> tuple[float, str]:
    """Measure, compare and plot."""
    options.output.mkdir(parents=True, exist_ok=True)
    lengths = [2, 4] if options.quick else [16, 32, 64, 128, 256]
    features = 16 if options.quick else 128
    tokens = np.random.default_rng(options.seed).integers(0, VOCABULARY, (BATCH, LONGEST + 1))
    models: dict[str, Measured] = {}
    for name, module in (("attention", Attentive(features)), ("GRU", Recurrent(features))):
        print(f"{name}: {count_parameters(module):,} parameters")
        models[name] = Measured(module, tokens[:, :-1], tokens[:, 1:], options)
    attention, recurrent = models.values()
    runs: Runs = {
        "training, attention at once": attention.at_once,
        "training, attention, a run for each": attention.by_prefixes,
        "training, GRU": recurrent.at_once,
        "reading, attention at once": lambda n: attention.read(n, each=n),
        "reading, attention, a run for each": lambda n: attention.read(n, each=1),
        "reading, GRU": lambda n: recurrent.read(n, each=n),
        "reading, GRU, a run for each": lambda n: recurrent.read(n, each=1),
    }
    # Where one thread does it all its own time is told, of which other processes take none.
    clock = time.thread_time if options.threads == 1 else time.perf_counter
    found = milliseconds(runs, lengths, 2 if options.quick else 5, clock)
    print(f"{'ms':40}" + "".join(f"{n:>9}" for n in lengths))
    for name, times in found.items():
        print(f"{name:40}" + "".join(f"{value:9.2f}" for value in times))
    plot(found, lengths, options.output / "parallel.png")
    last = lengths[-1]
    (loss, *slopes), (loss2, *slopes2) = attention.at_once(last), attention.by_prefixes(last)
    apart = {
        "loss": difference([loss], [loss2]),
        "gradient": difference(slopes, slopes2),
        "logits": difference(*([attention.read(last, each=each)] for each in (last, 1))),
    }
    once, each, gru, *_ = (times[-1] for times in found.values())
    told = (
        f"{last} positions at once train {each / once:.0f} times as fast as one by one and "
        f"{gru / once:.1f} times as fast as the GRU; the difference is "
        + ", ".join(f"{value:.0e} of the {name}" for name, value in apart.items())
    )
    if not all(x <= BOUND for x in apart.values()) or (not options.quick and each / once < WANTED):
        raise gg.GateError(f"{told}; wanted are {WANTED:.0f} times, and {BOUND:.0e} at most")
    return each / once, told


if __name__ == "__main__":
    command(run, about=str(__doc__).splitlines()[0], steps=1)
