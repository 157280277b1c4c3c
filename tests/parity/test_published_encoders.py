"""Encoders of every published family, small and random, against transformers, in every task."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from published_encoders import ENCODERS, fields, weight

import graphgen as gg
from graphgen.models.published import FAMILIES, from_folder

torch = pytest.importorskip("torch", reason="needs torch (make parity)")
transformers = pytest.importorskip("transformers", reason="needs transformers (make parity)")

from test_encoders import HEADS, named  # noqa: E402
from test_families import LENGTH, relative_rms, session  # noqa: E402

pytestmark = pytest.mark.parity

BOUND = 1e-5  # relative RMS in float32
TASKS = [
    (which, task)
    for which in ENCODERS
    for task in FAMILIES[which.split(",")[0]].tasks
    if "," not in which or task in ("fill-mask", "text-classification")
]


def save(which: str, task: str, folder: Path) -> Any:
    """A checkpoint, and the module of torch."""
    given = fields(which) | ({"num_labels": 2} if task == "question-answering" else {})
    config = transformers.AutoConfig.for_model(**given)
    head = "" if task == "feature-extraction" else HEADS[task].removeprefix("For")
    name = f"AutoModelFor{head}" if head else "AutoModel"
    module = getattr(transformers, name).from_config(config).eval()
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.copy_(torch.from_numpy(weight(name, tuple(parameter.shape))))
    module.save_pretrained(folder)
    return module


def padded(which: str, side: str, rows: int) -> dict[str, Any]:
    padding = fields(which).get("pad_token_id", 0)
    ids = np.random.default_rng(0).integers(6, 40, (rows, LENGTH))
    mask = np.ones_like(ids)
    for row in range(1, rows):
        mask[row, slice(0, 9 * row) if side == "left" else slice(LENGTH - 9 * row, LENGTH)] = 0
    ids[mask == 0] = padding
    return {"input_ids": ids, "attention_mask": mask, "token_type_ids": ids % 2}


@pytest.mark.parametrize(("which", "task"), TASKS)
def test_outputs(which: str, task: str, tmp_path: Path) -> None:
    module = save(which, task, tmp_path)
    layers = fields(which)["num_hidden_layers"]
    best = gg.optimize(from_folder(tmp_path, task).model, expect={"attention": layers})
    assert not [node.op_type for node in best.model.graph if node.op_type == "Softmax"]
    run = session(best, tmp_path)
    inputs = [x.name for x in run.get_inputs()]
    for side, rows in (("left", 1), ("left", 3), ("right", 3)):
        feeds = {name: x for name, x in padded(which, side, rows).items() if name in inputs}
        with torch.no_grad():
            wanted = module(**{name: torch.tensor(x) for name, x in feeds.items()})
        got = named(run, feeds)
        assert set(got) == set(wanted) - {"pooler_output"}
        kept = feeds["attention_mask"].astype(bool)
        for name, array in got.items():
            reference = wanted[name].numpy()
            assert array.shape == reference.shape
            if array.shape[:2] == kept.shape:
                array, reference = array[kept], reference[kept]
            elif "deberta" in which:  # a text that begins with padding: its vector sees nothing
                array, reference = array[kept[:, 0]], reference[kept[:, 0]]
            assert relative_rms(array, reference) < BOUND


@pytest.mark.parametrize("which", ENCODERS)
def test_attentions(which: str, tmp_path: Path) -> None:
    module = save(which, "feature-extraction", tmp_path)
    module.set_attn_implementation("eager")
    run = session(gg.optimize(from_folder(tmp_path, attentions=True).model), tmp_path)
    inputs = [x.name for x in run.get_inputs()]
    feeds = {name: x for name, x in padded(which, "right", 3).items() if name in inputs}
    with torch.no_grad():
        given = {name: torch.tensor(x) for name, x in feeds.items()}
        wanted = module(**given, output_attentions=True)
    got, kept = named(run, feeds), feeds["attention_mask"].astype(bool)
    del got["last_hidden_state"]
    assert len(got) == fields(which)["num_hidden_layers"]
    for array, weights in zip(got.values(), wanted.attentions, strict=True):
        each = (x.transpose(0, 2, 1, 3)[kept] for x in (array, weights.numpy()))
        assert relative_rms(*each) < BOUND
