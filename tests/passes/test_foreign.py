"""Small models as torch exports them: every site is found, and the results stay torch's.

Torch's outputs are NaN where a causal model leaves them undefined (a padded query that sees no
key); only the other positions are compared.
"""

from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
from small_models import ROUNDING, relative_rms, run_plain

import graphgen as gg
from graphgen.graph import count_operators

FIXTURES = Path(__file__).parents[1] / "fixtures"
# family -> attentions, norms, activations that are one node
SITES = {
    "bert": (2, 5, 2),
    "gpt2": (2, 5, 2),
    "gpt2_cached": (2, 5, 2),
    "llama": (2, 5, 2),
    "llama_cached": (2, 5, 2),
    "t5": (6, 12, 0),
    "vit": (2, 5, 2),
}
NORMS = {"LayerNormalization", "RMSNormalization"}
ACTIVATIONS = {"Gelu", "com.microsoft::QuickGelu"}
DECOMPOSED = {"Softmax", "Erf", "ReduceMean"}
EXPORTS = [
    pytest.param(family, path, id=path.stem)
    for family in SITES
    for exporter in ("torchscript", "dynamo")
    for path in sorted(FIXTURES.glob(f"{family}_{exporter}_*.onnx"))
]


def arrays_of(family: str, model: ir.Model) -> tuple[dict[Any, Any], dict[Any, Any]]:
    """A family's inputs and torch's outputs."""
    with np.load(FIXTURES / f"{family}.npz") as file:
        arrays = dict(file)
    return {value.name: arrays.pop(value.name) for value in model.graph.inputs}, arrays


def check_torch_agrees(family: str, model: ir.Model) -> None:
    given, arrays = arrays_of(family, model)
    results = run_plain(model, given)
    assert [value.name for value in model.graph.outputs] == list(arrays)
    for (name, wanted), result in zip(arrays.items(), results, strict=True):
        known = ~np.isnan(wanted)
        assert result.shape == wanted.shape
        assert relative_rms(wanted[known], result[known]) < ROUNDING, name


def check_file_agrees(
    family: str, model: ir.Model, best: ir.Model, rows: list[int], length: int
) -> None:
    """At other sizes than those of the example, with rows of tokens cut to a length."""
    given, _ = arrays_of(family, model)
    cut = 7 - length  # tokens at the end
    feeds = {
        name: x[rows, : x.shape[1] - cut] if x.dtype == np.int64 and len(x[0]) > cut else x[rows]
        for name, x in given.items()
    }
    mask = feeds.get("attention_mask")
    for old, new in zip(run_plain(model, feeds), run_plain(best, feeds), strict=True):
        # A row of padding that sees no key is undefined.
        tokens = old.shape[:2] == (len(rows), length)
        seen = mask[:, -length:] > 0 if tokens and mask is not None else ...
        assert old.shape == new.shape and relative_rms(old[seen], new[seen]) < ROUNDING


@pytest.mark.share(5)
@pytest.mark.parametrize(("family", "path"), EXPORTS)
def test_every_site_is_found_and_torch_agrees(family: str, path: Path) -> None:
    model = gg.load(path)
    best = gg.optimize(model, target="cpu", verify=True)
    counts = count_operators(best.model)
    norms, activations = (sum(counts.get(k, 0) for k in kinds) for kinds in (NORMS, ACTIVATIONS))
    assert (counts["Attention"], norms, activations) == SITES[family]
    assert not DECOMPOSED & set(counts)
    assert not [site for done in best.report.passes for site in done.sites if site.rolled_back]
    check_torch_agrees(family, model)
    check_torch_agrees(family, best.model)
    for rows, length in (([-1], 1), ([0, -1], 4), ([1], 7)):
        check_file_agrees(family, model, best.model, rows, length)


@pytest.mark.share(2)
@pytest.mark.parametrize("family", SITES)
def test_what_the_runtime_saved_is_found_as_in_its_source(family: str, tmp_path: Path) -> None:
    """At its extended level it fuses scales, layouts and sums into operators of its own."""
    source = max(FIXTURES.glob(f"{family}_torchscript_*.onnx"))
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    options.optimized_model_filepath = str(tmp_path / "saved.onnx")
    options.log_severity_level = 3  # such a file is for this machine, it warns
    ort.InferenceSession(source, options, providers=["CPUExecutionProvider"])
    saved = gg.load(tmp_path / "saved.onnx")
    assert any(name.startswith("com.microsoft::") for name in count_operators(saved))
    best = gg.optimize(saved, target="cpu", verify=True)
    fusions = [done for done in best.report.passes if done.name.startswith("fuse")]
    assert not [site for done in fusions for site in done.sites if site.rolled_back]
    fused = best.report.fused()
    counts = fused["attention"], fused["layer_norm"] + fused["rms_norm"]
    assert (*counts, fused["gelu"] + fused["quick_gelu"]) == SITES[family]
    check_torch_agrees(family, best.model)


def test_each_family_is_exported_in_at_least_two_ways() -> None:
    assert {family: len(list(FIXTURES.glob(f"{family}_[td]*.onnx"))) for family in SITES} == {
        **dict.fromkeys(SITES, 2),
        "bert": 4,
    }
