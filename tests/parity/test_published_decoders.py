"""Decoders of every published family, small and random, against transformers.

Each is run whole, in chunks, and in 32 steps behind a cache, with padding on each side.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from published_decoders import DECODERS, SLOPED, WRITTEN, fields, no_past, past_of, weight
from random_checkpoints import write_weights

import graphgen as gg
from graphgen.models.published import from_folder

torch = pytest.importorskip("torch", reason="needs torch (make parity)")
transformers = pytest.importorskip("transformers", reason="needs transformers (make parity)")

from test_families import LENGTH, relative_rms, session  # noqa: E402

pytestmark = pytest.mark.parity

BOUND = 1e-5  # relative RMS in float32


def save(which: str, folder: Path, kind: str = "CausalLM", **more: Any) -> Any:
    """A checkpoint, and the module of torch."""
    config = transformers.AutoConfig.for_model(**fields(which) | more)
    auto = getattr(transformers, f"AutoModelFor{kind}" if kind else "AutoModel")
    # Falcon's eager attention adds its slopes twice.
    how = "sdpa" if which == "falcon, alibi" else "eager"
    module = auto.from_config(config, attn_implementation=how).eval()
    with torch.no_grad():
        buffers = [(n, x) for n, x in module.named_buffers() if n.endswith("correction_bias")]
        for name, parameter in [*module.named_parameters(), *buffers]:
            parameter.copy_(torch.from_numpy(weight(name, tuple(parameter.shape))))
    module.save_pretrained(folder)
    return module


def padded(side: str, rows: int) -> tuple[Any, Any]:
    ids = np.random.default_rng(0).integers(1, 40, (rows, LENGTH))
    mask = np.ones_like(ids)
    for row in range(1, rows):
        mask[row, slice(0, 9 * row) if side == "left" else slice(LENGTH - 9 * row, LENGTH)] = 0
    return ids, mask


def logits_in_parts(
    run: Any, ids: Any, mask: Any, positions: Any, ends: list[int]
) -> np.ndarray[Any, Any]:
    """Logits of tokens given part by part, up to each of `ends`."""
    inputs, outputs = run.get_inputs(), [output.name for output in run.get_outputs()]
    past = no_past({x.name: x.shape for x in inputs}, len(ids))
    parts, start = [], 0
    for end in ends:
        given = {
            "input_ids": ids[:, start:end],
            "attention_mask": mask[:, :end],
            "position_ids": positions[:, start:end],
        }
        given = {x.name: given[x.name] for x in inputs if x.name in given}
        results = dict(zip(outputs, run.run(None, {**given, **past}), strict=True))
        parts.append(results["logits"])
        past = past_of(results)
        start = end
    return np.concatenate(parts, 1)


@pytest.mark.parametrize("which", DECODERS)
def test_logits_and_attentions(which: str, tmp_path: Path) -> None:
    module = save(which, tmp_path)
    best = gg.optimize(from_folder(tmp_path).model)
    # The kernel for a softcap on the CPU is slower than its body, sinks have none, and some
    # experts are chosen by a softmax.
    written = which == "gemma2" or which.startswith(WRITTEN)
    assert written or not [n.op_type for n in best.model.graph if n.op_type == "Softmax"]
    run = session(best, tmp_path)
    written = session(gg.optimize(from_folder(tmp_path, attentions=True).model), tmp_path)
    for side, rows in (("left", 1), ("left", 3), ("right", 3)):
        ids, mask = padded(side, rows)
        positions = np.maximum(mask.cumsum(1) - 1, 0)
        given = {"input_ids": ids, "attention_mask": mask}
        if fields(which)["model_type"] not in SLOPED:
            given["position_ids"] = positions
        with torch.no_grad():
            tensors = {name: torch.tensor(x) for name, x in given.items()}
            told = which != "falcon, alibi"
            found = module(**tensors, output_attentions=told, use_cache=False)
        kept, wanted = mask.astype(bool), found.logits.numpy()
        everything = [LENGTH]
        if "dynamic" in which or "longrope" in which:  # their angles depend on the part's length
            ways = [everything]
        else:
            ways = [everything, [3, 8, *range(9, LENGTH + 1)]]
        for ends in ways:
            got = logits_in_parts(run, ids, mask, positions, ends)
            assert relative_rms(got[kept], wanted[kept]) < BOUND
        if not told:
            continue
        feeds = no_past({x.name: x.shape for x in written.get_inputs()}, rows)
        known = {x.name for x in written.get_inputs()}
        feeds |= {n: x for n, x in (given | {"position_ids": positions}).items() if n in known}
        names = [f"attentions.{n}" for n in range(len(found.attentions))]
        for got, weights in zip(written.run(names, feeds), found.attentions, strict=True):
            each = (x.transpose(0, 2, 1, 3)[kept] for x in (got, weights.numpy()))
            assert relative_rms(*each) < BOUND


@pytest.mark.parametrize("which", [which for which in DECODERS if "," not in which])
def test_tokens_of_the_cache_in_place(which: str, tmp_path: Path) -> None:
    """In shared buffers, rows of different lengths: the tokens that transformers chooses."""
    from graphgen.export.folders import write_folder

    module = save(which, tmp_path)
    best = gg.optimize(from_folder(tmp_path).model)
    write_folder(tmp_path, tmp_path / "out", {"onnx/model.onnx": best.model}, {})
    prompts = [[5, 9, 2, 7, 11], [3, 8]]
    own = gg.generate(tmp_path / "out", prompts, max_new_tokens=32, eos=[])
    list(own)
    # The mask of slopes is no mask of places.
    assert (type(own._decoder).__name__ == "InPlace") == (which not in SLOPED)
    for prompt, tokens in zip(prompts, own.tokens, strict=True):
        options = {"max_new_tokens": 32, "do_sample": False, "eos_token_id": None}
        wanted = module.generate(torch.tensor([prompt]), pad_token_id=0, **options)
        assert tokens == wanted[0, len(prompt) :].tolist()


def test_four_bits_are_the_numbers_of_transformers(tmp_path: Path) -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    from graphgen.models.published.mxfp4 import unpacked
    from graphgen.models.published.weights import read_weights

    random = np.random.default_rng(0)
    blocks = random.integers(0, 256, (3, 10, 2, 16)).astype(np.uint8)
    scales = random.integers(90, 160, (3, 10, 2)).astype(np.uint8)
    given = {"w_blocks": blocks, "w_scales": scales}
    write_weights(tmp_path / "model.safetensors", given)
    found = unpacked(read_weights(tmp_path))["w"]
    wanted = convert_moe_packed_tensors(*map(torch.from_numpy, given.values())).float().numpy()
    assert found.shape == wanted.shape
    np.testing.assert_array_equal(found.read(), wanted)


CLASSIFIERS = [
    which
    for which in DECODERS
    if "," not in which
    and type(transformers.AutoConfig.for_model(which))
    in transformers.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING
]


@pytest.mark.parametrize("which", CLASSIFIERS)
def test_text_is_classified(which: str, tmp_path: Path) -> None:
    module = save(which, tmp_path, "SequenceClassification", num_labels=3)
    run = session(gg.optimize(from_folder(tmp_path, "text-classification").model), tmp_path)
    for side, rows in (("left", 1), ("left", 3), ("right", 3)):
        ids, mask = padded(side, rows)
        ids[mask == 0] = 0
        with torch.no_grad():
            given = {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}
            wanted = module(**given).logits.numpy()
        [logits] = run.run(None, {"input_ids": ids, "attention_mask": mask})
        assert relative_rms(logits, wanted) < BOUND
