"""Models of types that share little with others, small and random, against transformers."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from published_others import OTHERS, inputs, kept, weight

import graphgen as gg
from graphgen.models.published import from_folder

torch = pytest.importorskip("torch", reason="needs torch (make parity)")
transformers = pytest.importorskip("transformers", reason="needs transformers (make parity)")

from test_families import relative_rms, session  # noqa: E402

pytestmark = pytest.mark.parity


@pytest.mark.parametrize("which", OTHERS)
def test_outputs(which: str, tmp_path: Path) -> None:
    """Of the file that transformers saves, and, for a decoder, also from the middle on."""
    kind, task, fields = OTHERS[which]
    config = transformers.AutoConfig.for_model(**fields, attn_implementation="eager")
    module, given = getattr(transformers, kind)(config).eval(), inputs(which)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.copy_(torch.from_numpy(weight(name, tuple(parameter.shape))))
        found = module(**{n: torch.from_numpy(x) for n, x in given.items()}, return_dict=True)
    module.save_pretrained(tmp_path)
    run = session(gg.optimize(from_folder(tmp_path, task).model).model, tmp_path)
    wanted, names = next(iter(found.values())).numpy(), [x.name for x in run.get_outputs()]
    feeds: dict[str, Any] = dict(given)
    if task != "text-generation":
        results = dict(zip(names, run.run(None, feeds), strict=True))
        result = results["last_hidden_state" if "logits" not in names else "logits"]
    else:
        past = {x.name: np.zeros((3, x.shape[1], 0, 8), np.float32) for x in run.get_inputs()[3:]}
        begin = {name: x[:, :5] for name, x in feeds.items()}
        first = dict(zip(names, run.run(None, begin | past), strict=True))
        rest = {n: x if n == "attention_mask" else x[:, 5:] for n, x in feeds.items()}
        past = {n: first[n.replace("past_key_values", "present")] for n in past}
        second = dict(zip(names, run.run(None, rest | past), strict=True))
        result = np.concatenate([first["logits"], second["logits"]], 1)
    assert relative_rms(kept(which, result), kept(which, wanted)) < 1e-5
