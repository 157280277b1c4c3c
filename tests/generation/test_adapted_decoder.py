"""A decoder's folder: trained by rows without a cache, and continued with its adapter."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from random_checkpoints import CAUSAL, SEQ2SEQ, random_checkpoint
from small_models import relative_rms

import graphgen as gg
from graphgen.commands import main
from graphgen.errors import GraphgenError
from graphgen.export.checkpoint import Checkpoint
from graphgen.export.past import without_past
from graphgen.generation import Generator, decoder, speculation
from graphgen.generation.options import LOOKUP
from graphgen.generation.speculation import Lookup
from graphgen.graph import PUBLISHED
from graphgen.passes.training.adapters import linears, published_names

RNG = np.random.default_rng(0)
IDS = RNG.integers(5, 90, (2, 7))
MASK = (np.arange(7) >= np.array([[3], [0]])).astype(np.int64)
ROWS = {
    "input_ids": IDS,
    "attention_mask": MASK,
    "position_ids": np.maximum(MASK.cumsum(1) - 1, 0),
}
LABELS = np.where(MASK == 1, RNG.integers(5, 90, (2, 7)), -100)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: Any) -> Path:
    place: Path = tmp_path_factory.mktemp("adapted")
    source = random_checkpoint(place / "source", CAUSAL["llama"])
    assert main(["build", str(source), "-o", str(place / "out")]) == 0
    return place


@pytest.fixture(scope="module")
def run(folder: Path) -> Path:
    """Twelve steps at a large rate, so that other tokens follow."""
    model = folder / "out" / "onnx" / "model.onnx"
    gg.artifacts(model, folder / "art", output="logits", lora="query|value|up:4")
    trainer = gg.Trainer(folder / "art", schedule=gg.schedule.constant(0.1), threads=1)
    batch = {**ROWS, "labels": LABELS}
    trainer.fit([batch], steps=12, checkpoint=folder / "run", progress=False)
    return folder / "run"


def test_it_trains_on_rows_alone(folder: Path, run: Path) -> None:
    """The loss is that of the file, whose cache is empty."""
    trainer = gg.Trainer(folder / "art", threads=1)
    assert {*trainer.inputs} == {*ROWS, "labels"}
    session = gg.Session(folder / "out" / "onnx" / "model.onnx", threads=1, outputs=["logits"])
    caches = {n: k.dims or () for n, k in session.inputs.items() if n.startswith("past")}
    empty = {n: np.zeros((2, d[1], 0, d[3]), np.float32) for n, d in caches.items()}  # type: ignore[arg-type]
    logits = session({**ROWS, **empty})[0].astype(np.float64)
    logits -= logits.max(-1, keepdims=True)
    chances = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    counted = LABELS >= 0
    loss = -chances[counted, LABELS[counted]].mean()
    assert trainer.evaluate([{**ROWS, "labels": LABELS}]) == pytest.approx(loss, rel=1e-6)


def test_its_adapter_goes_into_generation(
    folder: Path, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes, session = [], decoder.Session

    def spy(model: Any, **options: Any) -> Any:
        sizes.append(len(model))
        return session(model, **options)

    monkeypatch.setattr(decoder, "Session", spy)
    out, prompts = folder / "out", [[5, 9, 2], [7]]

    def tokens(model: Any, **options: Any) -> list[list[int]]:
        found = gg.generate(model, prompts, max_new_tokens=12, threads=1, **options)
        list(found)
        return found.tokens

    found = gg.Adapter.load(run)
    merged = gg.export(found.merged(out / "onnx" / "model.onnx"), tmp_path / "merged.onnx")
    wanted = tokens(merged)
    assert tokens(out) != wanted
    assert tokens(out, adapter=run) == wanted
    assert tokens(out, adapter=found.save(tmp_path / "peft")) == wanted
    weights = 4 * 118_208
    assert sizes[2] < 0.6 * weights < sizes[0]  # what was not changed is read from the folder
    assert main(["generate", str(out), "--ids", "5,9,2", "--adapter", str(tmp_path / "peft")]) == 0


def test_folders_with_trained_weights_and_beside_adapters(
    folder: Path, run: Path, tmp_path: Path, capsys: Any
) -> None:
    out, new, beside = folder / "out", tmp_path / "new", tmp_path / "beside"
    assert main(["export", str(out), "--checkpoint", str(run), "-o", str(new)]) == 0
    file = beside / "a.onnx_adapter"
    words = ["adapter", str(run), "-o", str(file), "--model", str(out), "--base", str(beside)]
    assert main(words) == 0
    names = {p.relative_to(out) for p in out.rglob("*")}
    assert {p.relative_to(new) for p in new.rglob("*")} == names
    assert {p.relative_to(beside) for p in beside.rglob("*") if p != file} == names
    found = [
        gg.generate(model, [5, 9, 2], max_new_tokens=8, threads=1, adapter=adapter)
        for model, adapter in ((new, None), (out, run), (beside, None), (out, None))
    ]
    tokens = [(list(one), one.tokens)[1] for one in found]
    assert tokens[0] == tokens[1] != tokens[2] == tokens[3]
    source = str(folder / "source")
    assert main(["export", source, "--checkpoint", str(run), "-o", str(tmp_path / "x")]) == 2
    assert "is not a folder of graphgen build with onnx/model.onnx" in capsys.readouterr().err


def test_prompts_have_adapters_of_their_own(
    folder: Path, run: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens are those of each adapter merged, also of rows that go on, by beams and in chunks."""
    monkeypatch.setattr(speculation, "_GAIN", 0.0)  # whatever a check costs
    monkeypatch.setattr(Lookup, "chances", lambda *_: [0.9, 0.9])
    monkeypatch.setattr(Lookup, "guess", lambda self, row, tokens, count: tokens[-count:])
    out, prompts = folder / "out", [[5, 9, 2], [7], [11, 3, 3, 8], [5, 9, 2]]
    other = gg.Adapter.load(run)
    other.matrices = {n: x[:3] if "A" in n else -x[:, :3] for n, x in other.matrices.items()}
    other.rank = 3
    adapters: dict[str, Any] = {"a": run, "b": other}
    names = ["a", None, "b", "b"]
    generator = Generator(out, adapters=adapters, threads=1, chunk=3)
    merged = {name: Generator(out, adapter=adapters.get(name or ""), threads=1) for name in names}
    for how in ({}, {"beams": 2}, {"stop": [generator([5, 9, 2], adapter="b").__next__()[0]]}):
        wanted = []
        for name, prompt in zip(names, prompts, strict=True):
            one = merged[name]([prompt], max_new_tokens=8, **how)
            list(one)
            wanted += one.tokens
        found = generator(prompts, adapter=names, max_new_tokens=8, **how)
        list(found)
        assert found.tokens == wanted and wanted[0] != wanted[3]
        if "beams" not in how:  # several tokens of one row at once, each with its adapter
            guessed = generator(prompts, adapter=names, max_new_tokens=8, speculate=LOOKUP, **how)
            assert (list(guessed), guessed.tokens)[1] == wanted
            assert guessed.speculation is not None and guessed.speculation.checked
    long = [[*range(5, 45), *prompt] for prompt in prompts]  # rows of one adapter share these
    plain = Generator(out, adapters=adapters, threads=1, prefix_cache=False)
    for least, order in ((40, names), (120, ["b", "a", "a", None])):
        one, two = (g(long, adapter=order, max_new_tokens=8) for g in (plain, generator))
        assert [*one] == [*two] and least <= two.shared < 4 * 40 + 4
    words = ["generate", str(out), "--ids", "5,9,2", "--ids", "5,9,2", "--max-new-tokens", "8"]
    assert main([*words, "--adapter", f"a={run}", "--use", "a", "--use", ""]) == 0
    base = merged[None]([5, 9, 2], max_new_tokens=8)
    one = merged["a"]([5, 9, 2], max_new_tokens=8)
    rows = [",".join(map(str, row)) for x in (one, base) for row in (list(x), x.tokens)[1]]
    assert capsys.readouterr().out.splitlines()[:2] == rows
    for more, told in (
        (["--use", "a"], "adapter is 'a'; none is open"),
        (["--adapter", str(run), "--adapter", f"a={run}"], "needs a name beside others"),
        (["--adapter", f"a={run}", "--adapter", f"a={run}"], "--adapter a is given twice"),
        (["--adapter", f"a={run}", *["--use", "a"] * 3], "names 3 rows, and there are 2"),
    ):
        assert main([*words, *more]) == 2
        assert told in capsys.readouterr().err
    with pytest.raises(GraphgenError, match="give one of the two"):
        Generator(out, adapter=run, adapters=adapters)


@pytest.mark.share(2)
@pytest.mark.parametrize("stabilized", [False, True])
def test_parts_of_one_weight_are_saved_as_one_update(tmp_path: Path, stabilized: bool) -> None:
    """A GPT-2 has query, key and value in c_attn: their updates are blocks of one."""
    source = random_checkpoint(tmp_path / "source", CAUSAL["gpt2"])
    assert main(["build", str(source), "-o", str(tmp_path / "out")]) == 0
    model = tmp_path / "out" / "onnx" / "model.onnx"
    lora = gg.LoRA("0.attention.(query|value)|0.feed_forward.up", 2, 3.0, 0, stabilized)
    gg.artifacts(model, tmp_path / "art", output="logits", lora=lora)
    ours = gg.Adapter.load(tmp_path / "art")
    for array in ours.matrices.values():
        array[...] = RNG.standard_normal(array.shape)
    saved = gg.Adapter.load(ours.save(tmp_path / "peft"))
    assert saved.modules == ["transformer.h.0.attn.c_attn", "transformer.h.0.mlp.c_fc"]
    assert saved.rank == 4
    updates, joined = ours.updates(), saved.updates()["transformer.h.0.attn.c_attn"]
    query, key, value = np.split(joined.b @ joined.a, 3)
    for part, module in ((query, "query"), (value, "value")):
        own = updates[f"layers.0.attention.{module}"]
        np.testing.assert_allclose(part, own.b @ own.a, rtol=1e-5)
    assert not key.any()
    weights = [
        {n: v.const_value.numpy() for n, v in m.graph.initializers.items() if v.const_value}
        for m in (ours.merged(model), saved.merged(model))
    ]
    for name, array in weights[0].items():
        np.testing.assert_allclose(array, weights[1][name], rtol=1e-5, atol=1e-6)
    with pytest.raises(GraphgenError, match="has one module of the adapter as"):
        saved.base(model)
    saved.matrices["transformer.h.0.attn.c_attn.lora_B.weight"] = np.ones((191, 4), np.float32)
    with pytest.raises(GraphgenError, match="c_attn as 3 weights"):
        saved.merged(model)
    loaded = gg.load(model)
    for damage in (
        "[",
        '{"layers.0.attention.query": ["x", 3, 3]}',
        '{"a": 1}',
        '{"a": [1, 0, 1]}',
    ):
        loaded.metadata_props[PUBLISHED] = damage
        with pytest.raises(GraphgenError, match=f"metadata '{PUBLISHED}' is damaged"):
            saved.merged(loaded)
    del ours.published["layers.0.attention.query"]  # type: ignore[union-attr]
    with pytest.raises(GraphgenError, match="the checkpoint has no name for layers"):
        ours.save(tmp_path / "peft")


@pytest.mark.share(2)
@pytest.mark.parametrize("kind", ["t5", "bart"])
def test_an_encoder_and_a_decoder_have_an_adapter_by_row(kind: str, tmp_path: Path) -> None:
    """Tokens are those of each adapter merged into both graphs, also by beams and PEFT's names."""
    source, out = random_checkpoint(tmp_path / "source", SEQ2SEQ[kind]), tmp_path / "out"
    assert main(["build", str(source), "-o", str(out)]) == 0
    graphs = [gg.load(file) for file in sorted((out / "onnx").glob("*.onnx"))]

    def random_adapter(targets: str, rank: int, dora: bool) -> gg.Adapter:
        matrices, names = dict[str, Any](), dict[str, Any]()
        for graph in graphs:
            for site in linears(graph).values():
                if re.search(targets, site.module):
                    size, columns = site.sizes
                    shapes = {".lora_A.weight": (rank, size), ".lora_B.weight": (columns, rank)}
                    shapes |= {".lora_magnitude_vector": (columns,)} if dora else {}
                    for part, shape in shapes.items():
                        array = RNG.standard_normal(shape)
                        matrices[site.module + part] = np.abs(array.astype(np.float32)) + 0.5
                        if "lora_A" in part:
                            matrices[site.module + part] *= RNG.choice([-1, 1], shape)
            names |= published_names(graph)
        return gg.Adapter(matrices, rank, 1.0, published=names)

    a = random_adapter("encoder.*query|cross_attention.value", 2, False)
    b = random_adapter("encoder.*up|decoder.*down|cross_attention.key", 3, True)
    assert {name.partition(".")[0] for name in a.modules} == {"encoder", "decoder"}
    prompts, adapters = [[5, 9, 2], [7], [11, 3, 3]], {"a": a, "b": b.save(tmp_path / "peft")}
    generator = Generator(out, adapters=adapters, threads=1)
    for how in ({}, {"beams": 2}):
        wanted = []
        for adapter, prompt in zip((a, None, b), prompts, strict=True):
            one = gg.generate(out, [prompt], adapter=adapter, max_new_tokens=6, threads=1, **how)
            list(one)
            wanted += one.tokens
        found = generator(prompts, adapter=["a", None, "b"], max_new_tokens=6, **how)
        list(found)
        assert found.tokens == wanted
    again = generator(prompts, adapter=["b", None, "a"], max_new_tokens=6)
    list(again)
    assert again.tokens[0] != wanted[0] and again.tokens[1] == generator_tokens(out, prompts[1])
    b.matrices = {name.replace("up", "other"): x for name, x in b.matrices.items()}
    with pytest.raises(GraphgenError, match=r"no graph of the folder has the module .*other"):
        gg.generate(out, [[5]], adapter=b)


def generator_tokens(out: Path, prompt: list[int]) -> list[int | None]:
    """What the folder alone continues with."""
    found = gg.generate(out, [prompt], max_new_tokens=6, threads=1)
    list(found)
    return found.tokens[0]


def cached(*caches: str, batches: tuple[str, ...] = ("b", "b"), empty: bool = False) -> ir.Model:
    """A graph whose outputs are its caches, after a node or without any."""
    rows = onnx.helper.make_tensor_value_info("x", 1, ["b", 3])
    mask = onnx.helper.make_tensor_value_info("mask", 1, ["b", "past + 1"])
    past = [
        onnx.helper.make_tensor_value_info(f"past_key_values.{name}", 1, [batch, 2, "past", 4])
        for name, batch in zip(caches, batches, strict=False)
    ]
    nodes = [] if empty else [onnx.helper.make_node("Neg", ["x"], ["y"])]
    outputs = past if empty else [onnx.helper.make_tensor_value_info("y", 1, ["b", 3]), *past]
    graph = onnx.helper.make_graph(nodes, "g", [rows, mask, *past], outputs)
    return ir.from_proto(onnx.helper.make_model(graph))


def test_caches_that_lose_their_positions() -> None:
    model = cached("0.key", "0.value")
    without_past(model)
    assert [value.name for value in model.graph.inputs] == ["x", "mask"]
    assert [*(model.graph.inputs[1].shape or ())] == ["b", 1]


@pytest.mark.parametrize(
    "model",
    [
        cached("0.key", "0.encoder.key"),  # it would attend to nothing of the encoder's
        cached("0.key", "0.value", batches=("b", "c")),
        cached("0.key", empty=True),
    ],
)
def test_caches_that_stay(model: ir.Model) -> None:
    before = [str(value) for value in model.graph.inputs]
    without_past(model)
    assert [str(value) for value in model.graph.inputs] == before


def test_each_graph_of_an_encoder_decoder_has_a_file_beside_its_base(
    tmp_path: Path, capsys: Any
) -> None:
    source = random_checkpoint(tmp_path / "source", SEQ2SEQ["bart"])
    out, beside, run = tmp_path / "out", tmp_path / "beside", tmp_path / "run"
    assert main(["build", str(source), "-o", str(out)]) == 0
    assert main(["artifacts", str(out), "-o", str(tmp_path / "art"), "--lora", "query:2"]) == 0
    found, random = Checkpoint.load(tmp_path / "art" / "checkpoint"), np.random.default_rng(0)
    for array in found.trainable.values():
        array[...] = random.standard_normal(array.shape) / 3
    found.save(run)
    capsys.readouterr()
    file = str(beside / "a.onnx_adapter")
    words = ["adapter", str(run), "-o", file, "--model", str(out), "--base", str(beside)]
    assert main(words) == 0
    assert capsys.readouterr().out.count("rank 2 at ") == 2
    own, ids = gg.Adapter.load(run), np.array([[5, 7, 9, 4]])
    hidden = random.standard_normal((1, 4, 64), np.float32)
    for name, modules in (("encoder_model", 2), ("decoder_model_merged", 6)):
        part = own.within(gg.load(out / "onnx" / f"{name}.onnx"))
        assert len(part.modules) == modules
        merged = gg.export(part.merged(out / "onnx" / f"{name}.onnx"), tmp_path / f"{name}.onnx")
        active = ort.RunOptions()
        adapter = ort.LoraAdapter()
        adapter.Load(str(beside / f"a.{name}.onnx_adapter"))
        active.add_active_adapter(adapter)
        results = []
        for path, options in ((beside / "onnx" / f"{name}.onnx", active), (merged, None)):
            session = ort.InferenceSession(path)
            given = {"input_ids": ids, "encoder_hidden_states": hidden}
            given |= dict.fromkeys(("attention_mask", "encoder_attention_mask"), ids // ids)
            given["use_cache_branch"] = np.zeros(1, bool)
            feeds = {
                x.name: given[x.name]
                if x.name in given
                else np.zeros((1, x.shape[1], 0, x.shape[3]), np.float32)
                for x in session.get_inputs()
                if not x.name.endswith(".weight")
            }
            results.append(session.run(None, feeds, options)[0])
        assert relative_rms(results[1], results[0]) < 1e-5
