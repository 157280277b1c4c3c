"""Folders of checkpoints with fresh heads, and trained ones as checkpoints again."""

import json

import numpy as np
import onnx_ir as ir
import pytest
from published_decoders import fields as decoder
from random_checkpoints import CAUSAL, ENCODERS, SEQ2SEQ, random_checkpoint, write_weights

import graphgen as gg
from graphgen.commands import main
from graphgen.errors import GraphgenError
from graphgen.export.adapters import LORA
from graphgen.export.checkpoint import Checkpoint
from graphgen.models.published import find_family, from_folder
from graphgen.models.published.back import STORED, stored_weights
from graphgen.models.published.config import Config
from graphgen.models.published.fresh import Head
from graphgen.models.published.weights import read_weights
from graphgen.passes.training.adapters import A, B

VIT = {"model_type": "vit", "image_size": 8, "patch_size": 4, "hidden_size": 64}
VIT |= {"intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4}
BACK = {
    **{kind: (SEQ2SEQ[kind], None) for kind in ("t5", "marian")},
    **{kind: (decoder(kind), None) for kind in ("mixtral", "gpt_oss", "phi3", "deepseek_v3")},
    **{kind: (decoder(kind), None) for kind in ("bloom", "falcon", "gemma2", "granitemoeshared")},
    "tokens": (ENCODERS["distilbert"], "token-classification"),
    "images": (VIT, "image-classification"),
}


def test_a_fresh_head(tmp_path, capsys):
    """Of a checkpoint of the body alone, and in the place of a head for other labels."""
    fields = {**ENCODERS["bert"], "id2label": {"0": "no", "1": "yes"}, "num_hidden_layers": 1}
    fields["architectures"] = ["BertModel"]
    for task in ("feature-extraction", "text-classification"):
        source = random_checkpoint(tmp_path / task, fields, task)
        out = tmp_path / "out"
        build = ["build", str(source), "--task", "text-classification", "-o"]
        assert main([*build, str(out), "--head", "classifier:3"]) == 0
        made = "classifier.bias, classifier.weight".split(", ")
        made += ["bert.pooler.dense.weight"] if task == "feature-extraction" else []
        [line] = [n for n in capsys.readouterr().out.splitlines() if n.startswith("fresh weights")]
        assert "from seed 0: " in line and all(name in line for name in made)
        assert ("pooler" in line) == (task == "feature-extraction")
        config = json.loads((out / "config.json").read_text())
        assert config["id2label"] == {str(i): f"LABEL_{i}" for i in range(3)}
        assert config["label2id"] == {f"LABEL_{i}": i for i in range(3)}
        assert "architectures" not in config  # that of another head
        weights = gg.load(out / "onnx" / "model.onnx").graph.initializers
        assert weights["head.classifier.weight"].shape == (64, 3)
        head = Head.read("classifier:a,b,c")
        assert head.fields()["label2id"]["b"] == 1
        again = from_folder(source, "text-classification", head=head, seed=1).model
        other = again.graph.initializers
        same = [n for n in other if np.array_equal(*(x[n].const_value for x in (weights, other)))]
        assert "head.classifier.weight" not in same and "encoder.embedding.weight" in same
        capsys.readouterr()
        for head, problem in (
            ("score:3", "text-classification has no head 'score'; it has bert.pooler.dense, cl"),
            ("classifier:0", "a head has at least 1 label"),
            ("classifier:a,a", "--head is 'classifier:a,a'; give the name"),
        ):
            assert main([*build, str(out), "--head", head]) == 2
            assert problem in capsys.readouterr().err
    write_weights(source / "model.safetensors", {"classifier.weight": np.zeros((2, 64), "f4")})
    assert main([*build, str(out), "--head", "classifier:3"]) == 2
    assert "embeddings.LayerNorm.bias is missing" in capsys.readouterr().err

    source, half = (
        random_checkpoint(tmp_path / "vit", VIT, "feature-extraction"),
        ir.DataType.FLOAT16,
    )
    made = from_folder(source, "image-classification", head=Head.read("classifier:3"), dtype=half)
    weight = made.model.graph.initializers["classifier.weight"].const_value
    assert weight.dtype == half and weight.numpy().dtype == np.float16


@pytest.mark.parametrize("which", BACK)
def test_each_weight_goes_back_to_where_it_was(which, tmp_path):
    """Parts of one weight, rows of a stack, transposed ones: all equal the checkpoint's."""
    fields, task = BACK[which]
    source = random_checkpoint(tmp_path / "source", fields, task)
    found = from_folder(source, task)
    config = Config.read(source / "config.json")
    back = stored_weights(config, find_family(config), [*found.models.values()])
    before = {name: weight.read() for name, weight in read_weights(source).items()}
    assert back.weights.keys() == before.keys() and not back.rounded
    for name, array in back.weights.items():
        np.testing.assert_array_equal(array, before[name], name)


def test_a_trained_folder_goes_back_to_its_checkpoint(tmp_path, capsys):
    """Each weight in the dtype that it had, unless told, and to a folder that is not there yet."""
    bfloat16 = ir.DataType.BFLOAT16.numpy()
    source = random_checkpoint(tmp_path / "gpt2", CAUSAL["gpt2"])
    arrays = {name: weight.read() for name, weight in read_weights(source).items()}
    stored = {
        n.removeprefix("transformer."): x.astype(np.float16 if "ln_" in n else bfloat16)
        for n, x in arrays.items()
    }
    names = sorted(stored)
    for number, part in enumerate((names[::2], names[1::2]), 1):
        file = f"model-{number}-of-2.safetensors"
        write_weights(source / file, {name: stored[name] for name in part})
    listed = {n: f"model-{1 + i % 2}-of-2.safetensors" for i, n in enumerate(names)}
    (source / "model.safetensors.index.json").write_text(json.dumps({"weight_map": listed}))
    (source / "model.safetensors").unlink()
    config = {**CAUSAL["gpt2"], "torch_dtype": "bfloat16"}
    (source / "config.json").write_text(json.dumps(config))
    out, back = tmp_path / "out", tmp_path / "back"
    assert main(["build", str(source), "-o", str(out)]) == 0
    name = "layers.0.feed_forward.up.weight"
    weight = gg.load(out / "onnx" / "model.onnx").graph.initializers[name]
    trained = weight.const_value.numpy() + np.float32(1 / 3)
    Checkpoint({name: trained}, {}).save(tmp_path / "checkpoint")
    command = ["export", str(out), "--checkpoint", str(tmp_path / "checkpoint"), "-o"]
    capsys.readouterr()
    assert main([*command, str(back), "--safetensors"]) == 0
    assert "40 weights by the checkpoint's own names; 1 rounded to its dtype" in (
        capsys.readouterr().out
    )
    after = {name: weight.read() for name, weight in read_weights(back).items()}
    assert {n: x.dtype for n, x in after.items()} == {n: x.dtype for n, x in stored.items()}
    [changed] = [n for n in after if not np.array_equal(after[n], stored[n])]
    assert changed == "h.0.mlp.c_fc.weight"
    np.testing.assert_array_equal(after[changed], trained.astype(bfloat16))
    assert json.loads((back / "config.json").read_text()) == config
    exact = tmp_path / "exact"
    assert main([*command, str(exact), "--safetensors", "--dtype", "fp32"]) == 0
    assert "rounded" not in capsys.readouterr().out
    np.testing.assert_array_equal(read_weights(exact)[changed].read(), trained)
    assert json.loads((exact / "config.json").read_text())["torch_dtype"] == "float32"

    module, ones = name.removesuffix(".weight"), np.ones((1, 64), np.float32)
    adapter = Checkpoint({module + A: ones, module + B: np.full((256, 1), 0.5, np.float32)}, {})
    noted = {"rank": 1, "alpha": 2.0, "rank_stabilized": False, "dropout": 0.0, "modules": [module]}
    adapter.properties[LORA] = json.dumps(noted)
    adapter.save(tmp_path / "adapter")
    merged = tmp_path / "merged"
    words = [*command[:3], str(tmp_path / "adapter"), "-o", str(merged), "--safetensors"]
    assert main([*words, "--dtype", "fp32"]) == 0
    after = read_weights(merged)[changed].read()
    np.testing.assert_allclose(after, stored[changed].astype(np.float32) + 1, rtol=1e-6)

    Checkpoint({name: trained * 1e5}, {}).save(tmp_path / "large")
    Checkpoint({"x": trained}, {}).save(tmp_path / "other")
    Checkpoint({name: trained[:, :5]}, {}).save(tmp_path / "size")
    assert (
        main(["build", str(source), "-o", str(tmp_path / "few"), "--quantize", "int8", "--no-run"])
        == 0
    )
    capsys.readouterr()
    new = ["-o", str(tmp_path / "new"), "--safetensors"]
    for words, problem in (
        ([*command, str(source), "--safetensors"], "gpt2 exists and holds files; remove it, or"),
        ([*command, str(exact / "config.json"), "--safetensors"], "exists and is a file"),
        (["export", str(source), *command[2:4], *new], "has no onnx/*.onnx or no config.json"),
        (["export", str(out / "onnx/model.onnx"), *command[2:4], *new], "not a file in it"),
        ([*command[:3], str(tmp_path / "other"), *new], "parameter x, float32[64, 256], is mis"),
        ([*command[:3], str(tmp_path / "size"), *new], f"{name}, float32[64, 5], is float[64, "),
        ([*command[:3], str(tmp_path / "large"), *new, "--dtype", "fp16"], "is too large for f"),
        (["export", str(tmp_path / "few"), *command[2:4], *new], f"parameter {name}, float32[64"),
        ([*command, str(tmp_path / "m.onnx"), "--dtype", "fp16"], "--dtype needs --safetensors"),
    ):
        assert main(words) == 2
        assert problem in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_an_adapter_of_several_graphs_and_weights_in_several_files(tmp_path):
    """Updates of an encoder's and a decoder's products, in files as transformers cuts them."""
    source = random_checkpoint(tmp_path / "t5", SEQ2SEQ["t5"])
    out, run, back = tmp_path / "out", tmp_path / "run", tmp_path / "back"
    assert main(["build", str(source), "-o", str(out)]) == 0
    random = np.random.default_rng(0)

    def trained(*modules):
        matrices = {}
        for name in modules:
            rows = 200 if name == "shared" else 64
            matrices[name + A] = random.standard_normal((2, 64)).astype(np.float32)
            matrices[name + B] = random.standard_normal((rows, 2)).astype(np.float32)
        noted = {"rank": 2, "alpha": 4.0, "rank_stabilized": False, "dropout": 0.0}
        saved = Checkpoint(matrices, {})
        saved.properties[LORA] = json.dumps({**noted, "modules": [*modules]})
        saved.save(run)
        return matrices

    names = {
        "encoder.layers.1.attention.value": "encoder.block.1.layer.0.SelfAttention.v.weight",
        "decoder.layers.0.cross_attention.key": "decoder.block.0.layer.1.EncDecAttention.k.weight",
    }
    matrices, before = trained(*names), read_weights(source)
    made = gg.to_checkpoint(out, run, back, shard=100_000)
    after = read_weights(back)
    assert after.keys() == made.weights.keys() and {*names.values()} <= after.keys()
    for name, weight in after.items():
        wanted = before[name].read()
        for module in (m for m, own in names.items() if own == name):
            wanted = wanted + 2 * matrices[module + B] @ matrices[module + A]
        np.testing.assert_allclose(weight.read(), wanted, rtol=1e-6, atol=1e-6, err_msg=name)
    index = json.loads((back / "model.safetensors.index.json").read_text())
    files = sorted({*index["weight_map"].values()})
    sizes = dict.fromkeys(files, 0)
    for name, tensor in made.weights.items():
        sizes[index["weight_map"][name]] += tensor.nbytes
    assert len(files) > 5 and sum(sizes.values()) == index["metadata"]["total_size"]
    assert files[0] == f"model-00001-of-{len(files):05}.safetensors"
    assert max(sizes.values()) <= 100_000

    for modules, problem in (
        (["decoder.layers.0.nothing"], "a matrix .* for module decoder.layers.0.nothing"),
        (["shared"], "changes shared.weight for this module only, and .* reads it, too"),
    ):
        trained(*modules)
        with pytest.raises(GraphgenError, match=problem):
            gg.to_checkpoint(out, run, tmp_path / "none")
    trained(*names)
    with pytest.raises(GraphgenError, match="shard is 0"):
        gg.to_checkpoint(out, run, tmp_path / "none", shard=0)
    assert not (tmp_path / "none").exists()


def test_graphs_that_say_nothing_or_have_few_bits_do_not_go_back(tmp_path):
    source = random_checkpoint(tmp_path / "source", ENCODERS["bert"])
    config = Config.read(source / "config.json")
    half = from_folder(source, dtype=ir.DataType.FLOAT16).model
    for model, problem in ((half, "in float32 and of its size"), (half, "what it was built from")):
        with pytest.raises(GraphgenError, match=problem):
            stored_weights(config, find_family(config), [model])
        model.metadata_props[STORED] = '{"task": "feature-extraction", "dtype": "INT8"}'
