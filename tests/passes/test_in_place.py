"""Caches in place against the growing graph, on rows of different length, and what is refused."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from small_models import ROUNDING, relative_rms, sums_alike, vary

import graphgen as gg
from graphgen import nn, ops
from graphgen.export.write import to_bytes
from graphgen.graph import count_operators
from graphgen.match import Engine, Miss
from graphgen.measure.reference import evaluate
from graphgen.models.published.cache import Cache, cache_inputs, token_inputs
from graphgen.models.published.config import Config
from graphgen.models.published.decoder import CausalLM
from graphgen.models.published.gpt_oss import gpt_oss
from graphgen.models.published.named import specification
from graphgen.ops.attention import cached_mask
from graphgen.passes.decoding import in_place, keep_last
from graphgen.targets import target

pytestmark = pytest.mark.skipif(
    "Attention" not in target("cpu").kernels[""], reason="this onnxruntime has no Attention"
)

LENGTHS, STEPS, CAPACITY = np.array([13, 6, 1]), 32, 48
ROWS, LONGEST = len(LENGTHS), int(LENGTHS.max())
SIZES = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
KINDS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "mistral, a window": {"model_type": "mistral", "sliding_window": 4},
    "qwen3, windows in some layers": {
        "model_type": "qwen3",
        "head_dim": 16,
        "use_sliding_window": True,
        "sliding_window": 5,
        "max_window_layers": 1,
    },
    "gpt_oss, sinks": {
        "model_type": "gpt_oss",
        "head_dim": 16,
        "num_key_value_heads": 1,
        "layer_types": ["full_attention", "sliding_attention"],
        "sliding_window": 5,
        "num_local_experts": 3,
        "num_experts_per_tok": 2,
    },
}


def growing(**fields: Any) -> Any:
    declared = gpt_oss if fields["model_type"] == "gpt_oss" else specification
    module = vary(CausalLM(declared(Config({**SIZES, **fields}))))
    return gg.optimize(gg.build(module, **module.inputs())).model


@pytest.fixture(scope="module", params=KINDS)
def models(request: Any) -> Any:
    """The growing model, that in place, random tokens, and each row's logits without a past.

    Once as float32 has them, once as float64.
    """
    model = growing(**KINDS[request.param])
    tokens = np.random.default_rng(0).integers(0, 50, (ROWS, LONGEST + STEPS))
    runner, rows = Runner(model), [row[: n + STEPS] for row, n in zip(tokens, LENGTHS, strict=True)]
    logits = [[run(row) for row in rows] for run in (runner.whole, partial(exactly, model, runner))]
    return model, in_place(model), tokens, *logits


def test_each_layer_is_a_rewrite() -> None:
    """The buffers, an attention for each layer, and what it gives back for its keys and values."""
    engine = Engine()
    assert not isinstance(in_place(growing(**KINDS["llama"]), engine), Miss)
    assert engine.applied == 1 + 2 + 2 * 2
    for stop_after in range(engine.applied):
        assert isinstance(in_place(growing(**KINDS["llama"]), Engine(stop_after)), Miss)


class Runner:
    """A session without the runtime's optimizations, on a cache of some rows."""

    def __init__(self, model: Any) -> None:
        options = ort.SessionOptions()
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        self.session = ort.InferenceSession(to_bytes(model), options)
        self.past = {x.name: x for x in self.session.get_inputs() if x.name.startswith("past")}

    def empty(self, rows: int, capacity: int) -> dict[str, Any]:
        """A cache; what is in a buffer before tokens are must not matter."""
        shape = {n: (rows, x.shape[1], capacity, x.shape[3]) for n, x in self.past.items()}
        return {name: np.full(size, np.float32(7.0)) for name, size in shape.items()}

    def __call__(self, ids: Any, mask: Any, positions: Any, cache: dict[str, Any]) -> Any:
        """The logits; present keys and values are written where the past ones are."""
        binding = self.session.io_binding()
        feeds = {"input_ids": ids, "attention_mask": mask, "position_ids": positions}
        feeds = {n: np.ascontiguousarray(x, np.int64) for n, x in feeds.items()}
        bound = {n: ort.OrtValue.ortvalue_from_numpy(x) for n, x in {**feeds, **cache}.items()}
        for name, value in bound.items():
            binding.bind_ortvalue_input(name, value)
        for output in self.session.get_outputs():
            past = output.name.replace("present", "past_key_values")
            if past in cache:
                binding.bind_ortvalue_output(output.name, bound[past])
            else:
                binding.bind_output(output.name)
        self.session.run_with_iobinding(binding)
        return binding.get_outputs()[0].numpy()

    def whole(self, ids: Any) -> Any:
        """The logits of one row without a past, from a graph whose cache grows."""
        return self.session.run(["logits"], self.feeds(ids))[0][0]

    def feeds(self, ids: Any) -> dict[str, Any]:
        """One row without a past."""
        n = len(ids)
        feeds = {"input_ids": ids[None], "attention_mask": np.ones((1, n), np.int64)}
        return feeds | {"position_ids": np.arange(n)[None], **self.empty(1, 0)}


def exactly(model: Any, runner: Runner, ids: Any) -> Any:
    """What `Runner.whole` gives, by the operators' meanings in float64."""
    return evaluate(model, runner.feeds(ids))[0][0]


def continued(run: Runner, tokens: Any, cache: dict[str, Any]) -> Iterator[Any]:
    """Logits of one token after the other, at a length that each row has for itself."""
    mask = np.arange(CAPACITY) < LENGTHS[:, None]
    for step in range(STEPS):
        places = (LENGTHS + step)[:, None]
        mask |= np.arange(CAPACITY) == places  # as long as the buffers: it is bound only once
        yield run(np.take_along_axis(tokens, places, 1), mask, places, cache)[:, 0]


@pytest.mark.share(3)
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("chunk", [LONGEST, 4])
def test_in_place_is_growing(models: Any, chunk: int, last: bool) -> None:
    _, placed, tokens, wanted, exact = models
    run = Runner(kept(placed) if last else placed)
    cache = run.empty(ROWS, CAPACITY)
    if chunk == LONGEST:  # all rows at once, padded on the right
        mask = np.arange(LONGEST) < LENGTHS[:, None]
        places = np.broadcast_to(np.arange(LONGEST), mask.shape)
        first = list(run(tokens[:, :LONGEST], mask, places, cache))
    else:
        first = []
        for b, n in enumerate(LENGTHS):
            own, parts = {name: x[b : b + 1] for name, x in cache.items()}, []
            for start in range(0, n, chunk):
                ids = tokens[b : b + 1, start : min(start + chunk, n)]
                end = start + ids.shape[1]
                parts.append(run(ids, np.ones((1, end)), np.arange(start, end)[None], own)[0])
            first.append(parts[-1] if last else np.concatenate(parts))
    given = [row[:n] for row, n in zip(first, LENGTHS, strict=True)]
    given += [np.stack(rows) for rows in zip(*continued(run, tokens, cache), strict=True)]
    starts = [n - 1 if last else 0 for n in LENGTHS]
    parts = [
        [row[i:n] for row, i, n in zip(rows, starts, LENGTHS, strict=True)]
        + [row[n:] for row, n in zip(rows, LENGTHS, strict=True)]
        for rows in (exact, wanted)
    ]
    assert sums_alike(*(np.concatenate(rows) for rows in (*parts, given)))


def kept(model: Any) -> Any:
    model = model.clone()
    assert keep_last(model)
    assert model.graph.outputs[0].shape[1] == 1
    return model


def test_the_reference_has_the_same_cache(models: Any) -> None:
    """In float64, by the operators' bodies: rows of two lengths, one token behind each."""
    _, placed, tokens, *_ = models
    run = Runner(placed)
    cache = run.empty(ROWS, 16)
    mask = np.arange(LONGEST) < LENGTHS[:, None]
    run(tokens[:, :LONGEST], mask, np.broadcast_to(np.arange(LONGEST), mask.shape), cache)
    places = LENGTHS[:, None]
    feeds: dict[str, Any] = {"input_ids": tokens[:, :1], "position_ids": places}
    feeds["attention_mask"] = (np.arange(16) <= places).astype(np.int64)
    logits, *present = evaluate(placed, {**feeds, **cache})
    given = run(tokens[:, :1], feeds["attention_mask"], places, cache)
    assert relative_rms(logits, given) < ROUNDING
    for wanted, buffer in zip(present, cache.values(), strict=True):
        assert relative_rms(wanted, buffer) < ROUNDING


def test_what_is_an_output_too_has_all_tokens(models: Any) -> None:
    model, _, tokens, *_ = models
    model = model.clone()
    states = next(v for v in model.graph.outputs[0].producer().inputs if v.producer() is not None)
    model.graph.outputs.append(states)
    whole, last = Runner(model), Runner(kept(model))
    (logits, wanted), (own, found) = (
        run.session.run(["logits", states.name], run.feeds(tokens[0])) for run in (whole, last)
    )
    assert found.shape == wanted.shape and relative_rms(wanted, found) < ROUNDING
    assert relative_rms(logits[:, -1:], own) < ROUNDING


def test_the_last_of_a_growing_graph(models: Any) -> None:
    model, _, tokens, *_ = models
    given = Runner(kept(model)).whole(tokens[0])
    assert relative_rms(Runner(model).whole(tokens[0])[-1:], given) < ROUNDING


def test_no_mask_is_left(models: Any) -> None:
    placed = models[1]
    counts = count_operators(placed)
    assert counts["com.microsoft::GroupQueryAttention"] == 2
    assert not {"Attention", "And", "Range", "Transpose"} & set(counts)
    assert counts.get("Concat", 0) < 2  # two layers' keys and values would be four
    assert counts["ReduceSum"] == 1


class Decoder(nn.Module):
    """One attention with a cache, and a mask that a test gives."""

    def __init__(self, mask: Callable[..., Any], size: int = 8) -> None:
        self.embedding = nn.Embedding(20, 16)
        self.attention = nn.Attention(16, num_heads=2, head_dim=size)
        self.mask = mask

    def __call__(self, input_ids: Any, attention_mask: Any, **past: Any) -> dict[str, Any]:
        cache, x = Cache(past), self.embedding(input_ids)
        mask = self.mask(attention_mask, ops.dim(input_ids, 1))
        y = self.attention(x, mask=mask, cache=cache.of(0))
        return {"logits": self.embedding.logits(y), **cache.present}

    def inputs(self) -> Any:
        return {**token_inputs(), **cache_inputs([self.attention])}


def everything(mask: Any, length: Any) -> Any:
    """Padding alone: the queries see what is behind them."""
    rows = ops.unsqueeze(ops.arange(length), [1]) >= 0
    padding = ops.cast(mask, to=9)
    return ops.logical_and(ops.unsqueeze(rows, [0, 1]), ops.unsqueeze(padding, [1, 2]))


def top_left(mask: Any, length: Any) -> Any:
    """As if there were no past."""
    rows = ops.unsqueeze(ops.arange(length), [1]) >= ops.unsqueeze(
        ops.arange(ops.dim(mask, 1)), [0]
    )
    return ops.logical_and(ops.unsqueeze(rows, [0, 1]), ops.unsqueeze(ops.cast(mask, to=9), [1, 2]))


def without_padding(mask: Any, length: Any) -> Any:
    return cached_mask(ops.constant_of_shape(ops.shape(mask)) + 1, length)


def by_content(mask: Any, length: Any) -> Any:
    return cached_mask(ops.cumsum(mask, 1), length)


@pytest.mark.parametrize(
    "mask, told",
    [
        (everything, "of 2 tokens after 5 its mask keeps 28 of 28 places, wanted the 26 of all"),
        (top_left, "of 2 tokens after 5 its mask keeps 6 of 28 places, wanted the 8 of all"),
        (without_padding, "depends on no input, wanted one input, that of the padding"),
        (by_content, "of 4 tokens after 3 its mask keeps"),
        (lambda mask, length: cached_mask(ops.abs(mask), length), "made by Abs, which is no"),
        (lambda mask, length: cached_mask(mask, length, window=0), "wanted the 0 of all before"),
    ],
)
def test_another_mask_is_refused(mask: Any, told: str) -> None:
    module = Decoder(mask)
    found = in_place(gg.optimize(gg.build(module, **module.inputs())).model)
    assert isinstance(found, Miss) and told in found.reason
    assert found.reason.startswith("attention: ")


def test_a_causal_mask_is_taken_and_heads_go_in_eights() -> None:
    for size, told in ((8, ""), (12, "12 and 12 features; wanted as many, in eights")):
        module = Decoder(cached_mask, size)
        found = in_place(gg.optimize(gg.build(module, **module.inputs())).model)
        assert isinstance(found, Miss) == bool(told)
        assert told in getattr(found, "reason", "")


def test_a_graph_without_a_cache_is_refused() -> None:
    found = in_place(gg.build(vary(nn.Linear(4, 4)), x=gg.float32["b", 4]))
    assert isinstance(found, Miss) and "no attention has a past" in found.reason


def test_new_keys_and_values_of_unknown_shapes_are_refused() -> None:
    model = growing(**KINDS["llama"])
    for node in model.graph:
        if node.op_type == "Concat" and node.inputs[0].is_graph_input():
            node.inputs[1].shape, node.inputs[1].producer().domain = None, "of.others"
    found = in_place(model)
    assert isinstance(found, Miss) and "shapes of new keys and values" in found.reason
