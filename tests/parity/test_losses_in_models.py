"""Models of transformers that compute their loss: batches of them are one, as in torch."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import graphgen as gg

torch = pytest.importorskip("torch", reason="needs torch: make parity")
transformers = pytest.importorskip("transformers", reason="needs transformers: make parity")

pytestmark = pytest.mark.parity

SIZES = {"vocab_size": 60, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
BERT = {**SIZES, "intermediate_size": 16, "max_position_embeddings": 16, "num_labels": 3}
GPT2 = {"vocab_size": 60, "n_positions": 16, "n_embd": 16, "n_layer": 1, "n_head": 2}
GPT2 |= {"bos_token_id": 0, "eos_token_id": 0}


def lost(model: Any) -> Any:
    """The model as a module that returns its loss alone."""

    class Loss(torch.nn.Module):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.model = model.eval()

        def forward(self, input_ids: Any, labels: Any) -> Any:
            return self.model(input_ids=input_ids, labels=labels).loss

    return Loss()


@pytest.mark.parametrize(
    ("name", "config", "classes"),
    [
        ("GPT2LMHeadModel", ("GPT2Config", GPT2), 60),  # which shifts the labels
        ("BertForTokenClassification", ("BertConfig", BERT), 3),
        ("BertForMaskedLM", ("BertConfig", BERT), 60),
    ],
)
def test_batches_with_unequal_numbers_of_labels_are_one(
    name: str, config: tuple[str, dict[str, Any]], classes: int, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    kind, fields = config
    module = lost(getattr(transformers, name)(getattr(transformers, kind)(**fields)))
    ids, labels = torch.randint(0, 60, (4, 8)), torch.randint(0, classes, (4, 8))
    labels[0, 2:] = labels[1, 5:] = -100
    rows = {0: torch.export.Dim("batch", min=2, max=64)}
    sizes = {"input_ids": rows, "labels": rows}
    model = gg.from_torch(module, (ids, labels), dynamic_shapes=sizes)
    [output] = model.graph.outputs
    gg.artifacts(model, tmp_path / "art", loss=str(output.name), optimizer=gg.SGD())
    whole = {"input_ids": ids.numpy(), "labels": labels.numpy()}
    parts = [{n: a[at] for n, a in whole.items()} for at in (slice(1), slice(1, 4))]
    wanted, moved = module(ids, labels), {}
    for accumulate, data in ((1, [whole]), (2, parts)):
        schedule = gg.schedule.constant(1.0)
        one = gg.Trainer(tmp_path / "art", accumulate=accumulate, threads=1, schedule=schedule)
        assert one.evaluate(data) == pytest.approx(wanted.item(), rel=1e-6)
        one.fit(data, steps=1, progress=False)
        moved[accumulate] = one.parameters
    for name, array in moved[1].items():
        np.testing.assert_allclose(moved[2][name], array, rtol=1e-5, atol=1e-6)
