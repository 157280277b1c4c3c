"""Trained folders as checkpoints again: transformers computes the same logits: `make parity`."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from random_checkpoints import CAUSAL, ENCODERS, SEQ2SEQ, random_checkpoint

import graphgen as gg
from graphgen.commands import main

pytestmark = pytest.mark.parity
VIT = {"model_type": "vit", "image_size": 8, "patch_size": 4, "hidden_size": 64}
VIT |= {"intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
CASES: dict[str, tuple[dict[str, Any], str, str]] = {
    **{kind: (fields, "text-generation", "CausalLM") for kind, fields in CAUSAL.items()},
    **{kind: (f, "text-classification", "SequenceClassification") for kind, f in ENCODERS.items()},
    "masked": (ENCODERS["bert"], "fill-mask", "MaskedLM"),
    "vit": (VIT, "image-classification", "ImageClassification"),
    **{kind: (fields, "text2text-generation", "Seq2SeqLM") for kind, fields in SEQ2SEQ.items()},
}


@pytest.mark.parametrize("kind", CASES)
def test_a_trained_folder_goes_back(kind: str, tmp_path: Path) -> None:
    import torch
    import transformers

    fields, task, head = CASES[kind]
    source = random_checkpoint(tmp_path / "source", fields, task)
    out, run, back = tmp_path / "out", tmp_path / "run", tmp_path / "back"
    assert main(["build", str(source), "-o", str(out), "--task", task]) == 0
    several = kind in SEQ2SEQ
    path = out / "onnx" / ("decoder_model_merged.onnx" if several else "model.onnx")
    gg.artifacts(path, tmp_path / "art", output="logits", profile="stock")
    trainer = gg.Trainer(tmp_path / "art", threads=1, schedule=gg.schedule.constant(0.01))
    random, batch = np.random.default_rng(0), dict[str, Any]()
    for name, given in trainer.inputs.items():
        known = {"batch_size": 2}
        sizes = [d if isinstance(d, int) else known.get(str(d), 5) for d in given.dims or ()]
        sizes = [0 if name.startswith("past") and i == 2 else d for i, d in enumerate(sizes)]
        real = np.dtype(given.dtype).kind == "f"
        batch[name] = random.standard_normal(sizes) if real else random.integers(2, 60, sizes)
        batch[name] = batch[name].astype(given.dtype)
        if "attention_mask" in name:
            batch[name] = np.ones_like(batch[name])
        if name in ("token_type_ids", "use_cache_branch"):
            batch[name] = np.zeros_like(batch[name])
        if name == "position_ids":
            batch[name] = np.arange(5) + np.zeros_like(batch[name])
        if name == "labels" and task in ("text-classification", "image-classification"):
            batch[name] = np.array([0, 1])
    trainer.fit([batch] * 2, progress=False, checkpoint=run)
    command = ["export", str(out), "--checkpoint", str(run), "-o", str(back), "--safetensors"]
    assert main(command) == 0
    model, told = getattr(transformers, f"AutoModelFor{head}").from_pretrained(
        back, output_loading_info=True, attn_implementation="eager"
    )
    assert not told["missing_keys"] and not told["unexpected_keys"], told
    trained = trainer.export(path, tmp_path / "trained.onnx")
    session = gg.Session(trained, threads=1, outputs=["logits"])
    given = {name: x for name, x in batch.items() if name != "labels"}
    if several:
        ids = random.integers(2, 60, (2, 6))
        feeds = {"input_ids": ids, "attention_mask": np.ones_like(ids)}
        for name in ("encoder_model", "decoder_model_merged"):
            model_of = gg.load(out / "onnx" / f"{name}.onnx")
            for each, array in trainer.parameters.items():
                if each in model_of.graph.initializers:
                    import onnx_ir as ir

                    model_of.graph.initializers[each].const_value = ir.tensor(array, name=each)
            gg.export(model_of, tmp_path / f"{name}.onnx")
        memory = gg.Session(tmp_path / "encoder_model.onnx", threads=1)(feeds)[0]
        session = gg.Session(tmp_path / "decoder_model_merged.onnx", outputs=["logits"])
        given |= {"encoder_hidden_states": memory}
        given |= {"encoder_attention_mask": feeds["attention_mask"]}
        for name, kind_of in session.inputs.items():
            if name.startswith("past"):
                sizes = [2, kind_of.dims[1], 0, kind_of.dims[3]]  # type: ignore[index]
                given[name] = np.zeros(sizes, np.float32)
        feeds["decoder_input_ids"] = given["input_ids"]
    else:
        for name, kind_of in session.inputs.items():
            if name not in given:
                assert name.startswith("past") and kind_of.dims is not None
                given[name] = np.zeros([2, kind_of.dims[1], 0, kind_of.dims[3]], np.float32)
        feeds = {n: x for n, x in given.items() if not n.startswith("past")}
    [ours] = session({name: given[name] for name in session.inputs})
    with torch.no_grad():
        theirs = model.eval()(**{n: torch.tensor(x) for n, x in feeds.items()}).logits.numpy()
    np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5 * np.abs(theirs).max())
    assert json.loads((back / "config.json").read_text())["model_type"] == fields["model_type"]
