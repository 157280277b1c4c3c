"""What integer weights cost: the error of each layer, and perplexity or cosine of the whole."""

import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import onnx_ir as ir

from graphgen.arguments import checked
from graphgen.display import Tabular, in_bytes, listed, on_screen
from graphgen.errors import GraphgenError, one_of
from graphgen.export.write import export
from graphgen.graph import ModelLike, model_in
from graphgen.match import PassReport
from graphgen.measure.accuracy import divergence
from graphgen.operands import Array
from graphgen.runtime import Session

_IDS, _MASK, _LOGITS = "input_ids", "attention_mask", "logits"
_ALIKE = 4  # layers that each have a line, though it says the same

Measure: TypeAlias = Literal["perplexity", "cosine"]


@dataclass
class Layer:
    """What became of one product or table."""

    name: str  # of its weight
    path: str  # of its module, or the name of its node
    operator: str
    shape: tuple[int, ...]
    scheme: str  # float if it was left unchanged
    error: float  # √(mean (y - ŷ)² / mean y²)
    measured_on: str  # its output, its output for random inputs, or its weight
    bytes_before: int = 0  # of its weight, if it is the first to use it
    bytes_after: int = 0
    reason: str = ""  # why it stays in float, or not in the bits of a checkpoint
    error_saturated: float | None = None  # of full range, on processors that cut sums off

    @on_screen
    def __repr__(self) -> Iterator[str]:
        why = f", because {self.reason}" * bool(self.reason)
        error = f"error {self.error:.4f} of its {self.measured_on}"
        yield f"Layer({self.path}: {self.scheme}, {error}{why})"


@dataclass(repr=False)
class Report(Tabular):
    """What `quantize` did: a line for each layer, and the bytes of all tensors before and after."""

    scheme: str
    target: str
    threshold: float
    bytes_before: int = 0
    bytes_after: int = 0
    layers: list[Layer] = field(default_factory=list)
    sites: PassReport = field(default_factory=lambda: PassReport("quantize"))

    def to_json(self) -> dict[str, Any]:
        """The report as plain data; `sites` are the remarks of the same layers, and left out."""
        own = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "sites"}
        return {**own, "layers": [asdict(layer) for layer in self.layers]}

    def kept(self) -> list[str]:
        """What stays in float, or is not in its own bits, and why; of many alike, a few names."""
        kept = [x for x in self.layers if x.reason]
        told = {(x.path, x.reason) for x in kept}
        alike = dict[tuple[str, str], list[str]]()
        for x in kept:
            alike.setdefault((x.scheme, x.reason), []).append(f"{x.path}: {x.name}")
        for site in self.sites.sites:
            if site.status != "fired" and (site.where, site.reason) not in told:
                alike.setdefault(("float", site.reason), []).append(site.where)
        lines = []
        for (scheme, reason), names in alike.items():
            one, many = ("stays in", "stay in") if scheme == "float" else ("has", "have")
            if len(names) > _ALIKE:
                lines.append(f"{listed(names, len(names), 2)} {many} {scheme}: {reason}")
            else:
                lines += [f"{name} {one} {scheme}: {reason}" for name in names]
        return lines

    def heading(self) -> str:
        sizes = f"{in_bytes(self.bytes_before)} to {in_bytes(self.bytes_after)}"
        return f"Report of quantize to {self.scheme} for {self.target}: {sizes}"

    def cells(self) -> list[list[str]]:
        """A row for each layer."""
        saturated = any(x.error_saturated is not None for x in self.layers)
        errors = ["error", "where sums are cut off"][: 1 + saturated]
        rows = [["layer", "shape", "scheme", *errors, "of its"]]
        for x in self.layers:
            shape, cut = " x ".join(map(str, x.shape)), x.error_saturated
            figures = [f"{x.error:.4f}", "" if cut is None else f"{cut:.4f}"][: len(errors)]
            rows.append([x.path, shape, x.scheme, *figures, x.measured_on])
        return rows


@dataclass(frozen=True)
class Effect:
    """`before` and `after` of one measure: perplexity, or the cosine with the output before."""

    measure: Measure
    before: float
    after: float
    tokens: int  # how many predictions, or vectors, it averages
    error: float  # √(Σ (y - ŷ)² / Σ y²) of the compared output y
    random: bool = False  # whether the model read random numbers and tokens
    divergence: float | None = None  # with perplexity: mean Σ p log(p / q) of the next token, nats

    def __str__(self) -> str:
        figures = (
            f"{self.measure} {self.before:.4f} before, {self.after:.4f} after, error of outputs "
        )
        if self.divergence is not None:
            figures += f"{self.error:.4f}, divergence {self.divergence:.2e} nats a token"
            return f"{figures} ({self.tokens:,}{', random inputs' * self.random})"
        return f"{figures}{self.error:.4f} ({self.tokens:,}{', random inputs' * self.random})"


@contextmanager
def opened(model: ir.Model) -> Iterator[Session]:
    """A CPU session on the model, in a temporary file that is deleted afterwards."""
    with tempfile.TemporaryDirectory() as folder:
        yield Session(export(model, Path(folder) / "model.onnx"), provider="cpu")


@checked
def effect(
    before: ModelLike,
    after: ModelLike,
    feeds: Iterable[Mapping[str, Any]],
    *,
    measure: Measure | None = None,
    random: bool = False,
) -> Effect:
    """Measure two models on the same feeds, one after the other.

    perplexity: exp(-Σ log p(next token) / n), from the output `logits` (B, T, V) and the input
    `input_ids` (B, T), with the divergence of the second model's predictions from the first one's:
    the default if a model has both. cosine: the mean of a · b / |a| |b| over the vectors of the
    first output, (B, D) or (B, T, D), which is 1 before. Where `attention_mask`
    is 0, a token is padding and does not count. `random` says whether the feeds are random, and is
    passed on.

    Raises GraphgenError for an unknown measure, no feeds, models that lack what the measure needs,
    and feeds without a token to predict.
    """
    one_of("effect", Measure | None, measure=measure)
    batches = list(feeds)
    if not batches:
        raise GraphgenError("effect: there are no feeds; give at least one batch of inputs")
    with opened(model_in(before, "effect")) as one:
        able = _LOGITS in one.outputs and _IDS in one.inputs
        measure = ("perplexity" if able else "cosine") if measure is None else measure
        if measure == "perplexity" and not able:
            raise GraphgenError(
                f"effect: perplexity needs an output {_LOGITS} and an input {_IDS}; the model has "
                f"{', '.join(one.outputs)} from {', '.join(one.inputs)}: choose cosine"
            )
        output = _LOGITS if measure == "perplexity" else next(iter(one.outputs))
        with opened(model_in(after, "effect")) as two:
            if output not in two.outputs or two.inputs.keys() != one.inputs.keys():
                raise GraphgenError(
                    "effect: the models differ in inputs or outputs; give two with the same ones"
                )
            at = [[*session.outputs].index(output) for session in (one, two)]
            sums, squares, apart = np.zeros(3), np.zeros(2), 0.0
            for feed in batches:
                results = [s(feed)[i] for s, i in zip((one, two), at, strict=True)]
                score = _surprise if measure == "perplexity" else _cosine
                sums += score(feed, *results)
                if measure == "perplexity":
                    counted = _predicting(feed)
                    apart += divergence(*(x[:, :-1][counted] for x in results)).sum()
                a, b = _counted(feed, *results)
                squares += np.square(b - a).sum(), np.square(a).sum()
    if not sums[2]:
        raise GraphgenError("effect: the feeds have nothing to measure; give two tokens or more")
    means = sums[:2] / sums[2]
    first, second = np.exp(means) if measure == "perplexity" else means
    error = float(np.sqrt(squares[0] / squares[1])) if squares[1] else float(squares[0] > 0)
    nats = float(apart / sums[2]) if measure == "perplexity" else None
    return Effect(measure, float(first), float(second), int(sums[2]), error, random, nats)


def feeds_of(model: Any, tokens: Array, *, rows: int = 1) -> Sequence[Mapping[str, Any]]:
    """The feeds of a model of tokens for windows (N, T), `rows` at a time, with an empty past.

    None for a model that reads more than tokens.
    """
    known = {
        "input_ids": tokens,
        "attention_mask": np.ones_like(tokens),
        "token_type_ids": np.zeros_like(tokens),
        "position_ids": np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape),
    }
    inputs = {str(value.name): value for value in model.graph.inputs}
    caches = [
        name for name, x in inputs.items() if name.startswith("past_") and x.shape is not None
    ]
    if set(inputs) - set(known) - set(caches):
        return []
    found = []
    for start in range(0, len(tokens), rows):
        feed = {name: known[name][start : start + rows] for name in inputs if name in known}
        for name in caches:
            sizes = [d if isinstance(d, int) else 0 for d in [*inputs[name].shape][1:]]
            empty = (len(tokens[start : start + rows]), *sizes)
            feed[name] = np.zeros(empty, inputs[name].dtype.numpy())
        found.append(feed)
    return found


def _surprise(feed: Mapping[str, Any], *logits: Array) -> tuple[float, float, int]:
    """Σ -log p(next token) for both models, and the number of tokens."""
    ids = np.asarray(feed[_IDS])
    if logits[0].shape[:-1] != ids.shape:
        raise GraphgenError(
            f"effect: logits are {logits[0].shape} for ids {ids.shape}; perplexity needs logits at "
            "each position"
        )
    counted = _predicting(feed)
    sums = []
    for array in logits:
        rows, wanted = array[:, :-1][counted].astype(np.float64), ids[:, 1:][counted]
        top = rows.max(axis=-1, initial=-np.inf)
        total = top + np.log(np.exp(rows - top[:, None]).sum(axis=-1))
        sums.append(float((total - rows[np.arange(len(rows)), wanted]).sum()))
    return sums[0], sums[1], int(counted.sum())


def _predicting(feed: Mapping[str, Any]) -> Array:
    """The tokens that predict one which is no padding, (B, T - 1)."""
    ids = np.asarray(feed[_IDS])
    mask = np.asarray(feed.get(_MASK, np.ones_like(ids)))[..., -ids.shape[1] :] != 0
    found: Array = mask[:, 1:] & mask[:, :-1]
    return found


def _cosine(feed: Mapping[str, Any], a: Array, b: Array) -> tuple[float, float, int]:
    """Σ cosine of a with itself and with b, and the number of vectors."""
    a, b = _counted(feed, a, b)
    lengths = np.linalg.norm(a, axis=-1) * np.linalg.norm(b, axis=-1)
    same = np.einsum("nd,nd->n", a, b)
    cosine = np.divide(same, lengths, out=np.zeros_like(same), where=lengths > 0)
    return float(len(a)), float(cosine.sum()), len(a)


def _counted(feed: Mapping[str, Any], *outputs: Array) -> list[Array]:
    """The vectors of outputs, except those of padding, in float64."""
    mask = np.asarray(feed.get(_MASK, np.ones(outputs[0].shape[:-1])))
    counted = mask != 0 if mask.shape == outputs[0].shape[:-1] else np.ones(outputs[0].shape[:-1])
    return [x[counted.astype(bool)].astype(np.float64) for x in outputs]
