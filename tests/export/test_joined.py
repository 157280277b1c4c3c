"""The two graphs of an encoder-decoder as one, which is trained, and back into both."""

import json
from pathlib import Path

import numpy as np
import pytest
from published_seq2seq import fields
from random_checkpoints import GROUPED, random_checkpoint, write_weights

import graphgen as gg
from graphgen.commands import main
from graphgen.errors import GraphgenError
from graphgen.export.joined import joined
from graphgen.export.past import without_past
from graphgen.safetensors import read_header

CHECKPOINT = Path(__file__).parents[1] / "fixtures" / "t5_checkpoint"
FIELDS = fields("mbart")
RNG = np.random.default_rng(0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    out = tmp_path_factory.mktemp("joined") / "t5"
    assert main(["build", str(CHECKPOINT), "-o", str(out), "--task", "text2text-generation"]) == 0
    return out


def batch_of(tokens):
    mask = np.ones((3, 5), np.int64)
    mask[1, 3:] = 0
    target = RNG.integers(1, tokens, (3, 4))
    return {
        "input_ids": RNG.integers(1, tokens, (3, 5)),
        "attention_mask": mask,
        "decoder_input_ids": np.roll(target, 1, 1) * (np.arange(4) > 0),
        "labels": target,
    }


def logits(folder, batch):
    """The logits of the decoder's first call."""
    encoder = gg.Session(folder / "onnx" / "encoder_model.onnx")
    decoder = gg.Session(folder / "onnx" / "decoder_model_merged.onnx")
    names = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}
    feeds = {
        "input_ids": batch["decoder_input_ids"],
        "encoder_attention_mask": batch["attention_mask"],
        "encoder_hidden_states": encoder(names)[0],
        "use_cache_branch": np.zeros(1, bool),
    }
    for name, kind in decoder.inputs.items():
        if name.startswith("past_key_values"):
            feeds[name] = np.zeros((3, kind.dims[1], 0, kind.dims[3]), np.float32)
    return decoder(feeds)[0]


def test_the_graph_has_the_logits_of_both(folder):
    model, batch = joined(folder), batch_of(50)
    without_past(model)
    names = ["input_ids", "attention_mask", "decoder_input_ids"]
    assert [value.name for value in model.graph.inputs] == names
    assert [value.name for value in model.graph.outputs] == ["logits"]
    found = gg.Session(model)({name: batch[name] for name in names})[0]
    np.testing.assert_allclose(found, logits(folder, batch), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("lora", [None, "query|value:4"])
def test_what_is_trained_goes_back_into_both(folder, lora, tmp_path):
    batch = batch_of(50)
    how = [] if lora is None else ["--lora", lora]
    assert main(["artifacts", str(folder), "-o", str(tmp_path / "art"), *how]) == 0
    trainer = gg.Trainer(tmp_path / "art", schedule=gg.schedule.constant(0.01))
    trainer.fit([batch] * 5, checkpoint=tmp_path / "run", progress=False)
    args = ["export", str(folder), "--checkpoint", str(tmp_path / "run")]
    assert main([*args, "-o", str(tmp_path / "out")]) == 0
    assert {x.name for x in (tmp_path / "out").iterdir()} == {x.name for x in folder.iterdir()}
    found = logits(tmp_path / "out", batch).astype(np.float64)
    assert np.abs(found - logits(folder, batch)).max() > 0.1
    logp = found - np.log(np.exp(found).sum(-1, keepdims=True))
    loss = -np.take_along_axis(logp, batch["labels"][..., None], -1).mean()
    assert trainer.evaluate([batch]) == pytest.approx(loss, rel=1e-5)


def test_what_transformers_does_not_train_is_frozen_unless_it_is_named(tmp_path):
    """A bias of BART's logits is a buffer there."""
    source = random_checkpoint(tmp_path / "mbart", FIELDS)
    file = source / "model.safetensors"
    arrays = {weight.name: weight.read() for weight in read_header(file)}
    write_weights(file, arrays | {"final_logits_bias": np.ones((1, FIELDS["vocab_size"]), "f")})
    assert main(["build", str(source), "-o", str(tmp_path / "out")]) == 0
    for trainable, trained in ((None, False), ("norm|logits_bias", True)):
        table = gg.artifacts(tmp_path / "out", tmp_path / "art", trainable=trainable)
        [bias] = [weight for weight in table if weight.name == "final_logits_bias"]
        assert bias.trained == trained
        assert trained or bias.why == "not trained in transformers"


def test_constants_of_an_activation_are_not_trained(tmp_path):
    """Apertus stores β and ε of xIELU beside its weights: buffers in transformers."""
    fields = {**GROUPED, "model_type": "apertus", "num_hidden_layers": 1}
    source = random_checkpoint(tmp_path / "apertus", fields)
    assert main(["build", str(source), "-o", str(tmp_path / "out"), "--layout", "plain"]) == 0
    table = gg.artifacts(tmp_path / "out", tmp_path / "art")
    trained = {weight.name.rpartition(".")[2]: weight.trained for weight in table}
    assert not trained["beta"] and not trained["eps"]
    assert trained["alpha_p"] and trained["alpha_n"]


def test_folders_and_runs_that_do_not_fit_are_one_error(folder, tmp_path, capsys):
    with pytest.raises(GraphgenError, match="has neither onnx/model"):
        gg.artifacts(tmp_path, tmp_path / "art")
    gg.artifacts(folder, tmp_path / "art", trainable=r"encoder\.last_norm")
    trainer = gg.Trainer(tmp_path / "art")
    trainer.fit([batch_of(50)], checkpoint=tmp_path / "run", progress=False)
    (tmp_path / "t5" / "onnx").mkdir(parents=True)
    for file in (folder / "onnx").glob("decoder*"):
        (tmp_path / "t5" / "onnx" / file.name).write_bytes(file.read_bytes())
    (tmp_path / "t5" / "config.json").write_text(json.dumps({}))
    args = ["export", str(tmp_path / "t5"), "--checkpoint", str(tmp_path / "run")]
    assert main([*args, "-o", str(tmp_path / "out")]) == 2
    assert "is not a folder of graphgen build with onnx/model.onnx" in capsys.readouterr().err
