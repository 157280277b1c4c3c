"""Whole architectures by name: what they compute, what they cost, what they refuse."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from small_models import ROUNDING

import graphgen as gg
from graphgen import nn
from graphgen.commands import main
from graphgen.graph import parameters
from graphgen.invariants import verify
from graphgen.models import ARCHITECTURES, create, find
from graphgen.models.published.folder import context
from graphgen.nn import count_parameters

SMALL = {"layers": 2, "features": 32, "num_heads": 4, "vocabulary": 50, "length": 6}

ATTENTIONS = {
    "block": 1,
    "decoder": 2,
    "decoder-window": 2,
    "encoder": 2,
    "transformer-base": 6,
    "convs2s": 2,
    "memory-network": 3,
    "dit": 2,
    "conformer": 2,
    "whisper": 6,
    "moe": 2,
}
"""How many nodes for attention there are once the primitives are fused."""

CAPPED = ("gemma",)
"""Attention with a softcap is fused on cuda alone: the CPU's kernel is slower than its body."""


def small(name, **more):
    known = find(name).sizes()
    return create(name, **{k: v for k, v in SMALL.items() if k in known} | more)


def feeds(name, *, length=6):
    rng, found = np.random.default_rng(0), {}
    for key, spec in find(name).inputs().items():
        sizes = [n if isinstance(n, int) else length for n in spec.shape[1:]]
        if spec.dtype == ir.DataType.FLOAT:
            found[key] = rng.standard_normal((2, *sizes), np.float32)
        elif "mask" in key or key == "lengths":
            found[key] = np.full((2, *sizes), 1 if "mask" in key else length - 1)
        else:
            found[key] = rng.integers(0, 2 if "type" in key else 50, (2, *sizes))
    return found


def relative_rms(a, b):
    return np.sqrt(np.mean((a - b) ** 2) / np.mean(b**2))


@pytest.mark.share(5)
@pytest.mark.parametrize("primitives", [False, True], ids=["composites", "primitives"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_architecture_runs_as_it_computes_on_arrays(name, primitives):
    module = small(name)
    model = gg.build(module, primitives=primitives, **find(name).inputs())
    best = gg.optimize(model)
    if name in CAPPED:
        assert best.report.shortfalls() == ["Attention: 0 of 2"]
        # The first layer looks at a window of the past only, by a mask.
        stands_for = ("products, a sum and Softmax", "its body")
        for reason, instead in zip(best.report.reasons(["attention"]), stands_for, strict=True):
            assert f"Attention takes longer than {instead}: " in reason
    else:
        assert best.report.shortfalls() == []
        if primitives and name in ATTENTIONS:
            assert best.report.fused()["attention"] == ATTENTIONS[name]
    wanted = module(**feeds(name))
    for name_, result in zip(wanted, gg.Session(best)(feeds(name)), strict=True):
        assert relative_rms(result, wanted[name_]) < ROUNDING


def test_inputs_have_the_sizes_that_the_name_stands_for():
    dit = find("dit")
    rgb = replace(dit, preset={"channels": 3})
    assert dit.specs()["image"].shape == ("batch", 4, 32, 32)
    assert rgb.specs()["image"].shape == ("batch", 3, 32, 32)
    assert rgb.specs(image_size=8, layers=9)["image"].shape == ("batch", 3, 8, 8)


@pytest.mark.share(5)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_architecture_is_declared_at_its_default_sizes(name):
    module, found = create(name), find(name)
    weights = {  # zeros that take no memory
        path: np.broadcast_to(np.float32(0), item.shape)
        for path, item in nn.module.members(module)
        if isinstance(item, nn.Parameter)
    }
    model = gg.build(module, weights=weights, **found.inputs())
    verify(model)
    last = {"encoder": "features", "dit": "image_size"}.get(name, "vocabulary")
    for value in model.graph.outputs:
        size = "contexts" if name == "word-vectors" else found.sizes()[last]
        assert value.dtype == ir.DataType.FLOAT and value.shape[-1] == size


TINY = SMALL | {"layers": 1, "features": 8, "num_heads": 2, "dropout": 0.0, "experts": 3}
STEPPED = ("bytenet", "convs2s", "neural-gpu", "memory-network", "word-vectors")
"""Models whose step of training is compared with their gradients in tests of their own."""


@pytest.mark.share(5)
@pytest.mark.parametrize(
    "name", [n for n in ARCHITECTURES if n not in (*STEPPED, "transformer-big")]
)
def test_every_architecture_is_built_by_name_and_trains(name, tmp_path):
    """Two steps from the file that `graphgen build` writes; the first loss is that of arrays."""
    output = "noise" if name == "dit" else "logits"
    sizes = {size: value for size, value in TINY.items() if size in find(name).sizes()}
    options = [f"--{size.replace('_', '-')}={value}" for size, value in sizes.items()]
    if name == "encoder":
        sizes["logits"], options = True, [*options, "--logits"]
    file, module, batch = tmp_path / "m.onnx", create(name, **sizes), feeds(name)
    assert main(["build", name, "--training", "-o", str(file), *options]) == 0
    nn.initialize(module, seed=0)
    y, rng = module(**batch)[output].astype(np.float64), np.random.default_rng(1)
    if output == "logits":
        loss, batch["labels"] = "cross_entropy", rng.integers(0, 50, y.shape[:-1])
        picked = np.take_along_axis(y, batch["labels"][..., None], -1)[..., 0]
        wanted = (np.log(np.exp(y).sum(-1)) - picked).mean()
    else:
        loss, batch["labels"] = "mse", rng.standard_normal(y.shape, np.float32)
        wanted = ((y - batch["labels"]) ** 2).mean()
    optimizer = gg.AdamW(weight_decay=0.0)  # which moves what has any gradient at all
    gg.artifacts(file, tmp_path / "art", output=output, loss=loss, optimizer=optimizer)
    trainer = gg.Trainer(tmp_path / "art", schedule=gg.schedule.constant(1e-2), threads=1)
    before = trainer.parameters
    first, second = (row["loss"] for row in trainer.fit([batch] * 2, steps=2, progress=False))
    assert first == pytest.approx(wanted, rel=1e-5)
    assert second < first
    after = trainer.parameters
    assert not [path for path in after if np.array_equal(after[path], before[path])]


@pytest.mark.parametrize("name", CAPPED)
def test_every_attention_with_a_softcap_is_one_node_on_cuda(name):
    model = gg.build(small(name), primitives=True, **find(name).inputs())
    best = gg.optimize(model, target="cuda")
    assert best.report.shortfalls() == []
    assert best.report.fused()["attention"] == 2


@pytest.mark.parametrize(("name", "millions"), [("transformer-base", 65), ("transformer-big", 213)])
def test_transformer_has_the_parameters_of_its_paper(name, millions):
    assert count_parameters(create(name)) == pytest.approx(millions * 1e6, rel=0.04)


def test_bert_base_has_its_published_parameters():
    sizes = {"vocabulary": 30522, "features": 768, "layers": 12, "num_heads": 12}
    without_pooler = 109_482_240 - 768 * 769
    assert count_parameters(create("encoder", **sizes)) == without_pooler


def test_gpt2_has_its_published_parameters():
    sizes = {"vocabulary": 50257, "features": 768, "layers": 12, "num_heads": 12, "length": 1024}
    assert count_parameters(create("decoder", **sizes)) == 124_439_808


def test_padding_does_not_change_what_the_encoder_says_of_tokens():
    module, given = small("encoder", logits=True), feeds("encoder")
    gg.nn.initialize(module)
    given["attention_mask"][:, 4:] = 0
    before = module(**given)
    given["input_ids"][:, 4:] = 7
    after = module(**given)
    for name in ("last_hidden_state", "logits"):
        np.testing.assert_array_equal(before[name][:, :4], after[name][:, :4])
        assert not np.array_equal(before[name][:, 4:], after[name][:, 4:])


def test_the_decoder_is_tied():
    model = gg.build(small("decoder"), **find("decoder").inputs())
    table = model.graph.initializers["embedding.weight"]
    assert sorted(use.node.op_type for use in table.uses()) == ["Gather", "Transpose"]


def test_training_keeps_dropout():
    model = gg.build(small("decoder", dropout=0.1), training=True, **find("decoder").inputs())
    assert [v.name for v in model.graph.inputs] == ["input_ids", "seed", "step"]
    assert "graphgen::Dropout" in gg.optimize(model, passes=()).report.ops_before


def test_methods_build_the_parts_of_a_model_with_the_same_weights():
    model = small("transformer-base", dropout=0.1)
    whole = gg.build(model, seed=3, **find("transformer-base").inputs())
    weights = {path: p.array for path, p in nn.initialize(model, seed=3).items()}
    ids, mask = gg.int64["batch", "seq"], gg.bool_["batch", "seq"]
    memory = gg.float32["batch", "seq", 32]
    encoder = gg.build(model.encode, weights=weights, source_ids=ids, mask=mask)
    decoder = gg.build(model.decode, weights=weights, target_ids=ids, memory=memory, mask=mask)
    given = feeds("transformer-base")
    given["source_mask"][1, 4:] = 0
    kept = given["source_mask"] > 0
    [encoded] = gg.Session(encoder)(source_ids=given["source_ids"], mask=kept)
    [parts] = gg.Session(decoder)(target_ids=given["target_ids"], memory=encoded, mask=kept)
    np.testing.assert_allclose(parts, gg.Session(whole)(given)[0], rtol=1e-4, atol=1e-5)
    names = [{*parameters(one.graph)} for one in (encoder, decoder, whole)]
    assert names[0] & names[1] == {"embedding.weight"} and names[0] | names[1] == names[2]
    with pytest.raises(gg.GraphgenError, match="called with x: missing a required argument"):
        gg.build(model.encode, x=ids)


COUNTED = {"layers", "features", "num_heads", "vocabulary", "hidden", "kernel", "width", "hops"}


@pytest.mark.parametrize(
    ("name", "size"),
    [
        (name, size)
        for name in ARCHITECTURES
        for size in sorted(COUNTED & find(name).sizes().keys())
    ],
)
@pytest.mark.parametrize("value", [0, -1, 1.5])
def test_a_size_below_one_is_refused(name, size, value):
    with pytest.raises(gg.GraphgenError, match=f"{size} is {value}; it must be an integer"):
        create(name, **{size: value})


def test_an_absurd_size_is_refused_with_what_it_would_take():
    one, two = (count_parameters(create("decoder", layers=n)) for n in (1, 2))
    count = one + (10**9 - 1) * (two - one)
    with pytest.raises(gg.GraphgenError, match=f"{count:,} parameters.*choose smaller sizes"):
        create("decoder", layers=10**9)


@pytest.mark.parametrize(
    ("name", "sizes", "told"),
    [
        ("gpt", {}, "no model 'gpt'; there are block, decoder"),
        ("block", {"layers": 2}, "block has no size 'layers'; it has vocabulary, features"),
        ("block", {"num_heads": 3}, "the heads must divide the features"),
        ("decoder", {"num_heads": 3}, "the heads must divide the features"),
        ("decoder", {"kv_heads": 3}, "kv_heads must divide num_heads"),
        ("decoder", {"activation": "step"}, "activation is 'step'; choose 'relu', 'gelu'"),
        ("decoder", {"dropout": 1.0}, "at least 0 and below 1"),
        ("decoder", {"positions": "relative"}, "'relative'; choose 'learned', 'sinusoidal'"),
        ("decoder", {"positions": "rotary", "features": 12}, "a head has 3 features"),
        ("transformer-base", {"features": 15, "num_heads": 1}, "features must be even"),
        ("dit", {"features": 6}, r"features=6, image_size=32, patch_size=2\): 4 must divide f"),
        ("dit", {"patch_size": 3}, "must divide features, and patch_size image_size"),
    ],
)
def test_sizes_that_fit_no_model_are_refused(name, sizes, told):
    with pytest.raises(gg.GraphgenError, match=told):
        create(name, **sizes)


def test_a_model_file_is_read_in_one_sitting():
    for file in Path(sys.modules[create.__module__].__file__).parent.glob("*.py"):
        assert len(file.read_text().splitlines()) < 200


@pytest.mark.parametrize(
    ("config", "tokenizer", "most"),
    [
        ({"max_position_embeddings": 512}, {"model_max_length": 1e30}, 512),
        ({"n_positions": 1024}, {"model_max_length": 128}, 128),
        ({"max_position_embeddings": None, "n_ctx": 64}, {}, 64),
        ({"model_type": "roberta", "max_position_embeddings": 514, "pad_token_id": 1}, {}, 512),
        ({"model_type": "roberta", "max_position_embeddings": 514, "pad_token_id": "a"}, {}, 512),
        ({"model_type": "camembert", "max_position_embeddings": 514}, {}, 512),
        (
            {"model_type": "mpnet", "max_position_embeddings": 514, "pad_token_id": 9}
            | {"relative_attention_num_buckets": 32},
            {},
            512,
        ),
        ({"n_positions": 512, "relative_attention_num_buckets": 32}, {}, None),
        ({}, {"model_max_length": int(1e30)}, None),
        ({"max_position_embeddings": -1}, {"model_max_length": float("inf")}, None),
    ],
)
def test_how_long_a_text_may_be(config, tokenizer, most, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    assert context(tmp_path) == most
