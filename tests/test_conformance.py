"""Some of ONNX's own tests, those that have found something; `make conformance` runs all."""

from dataclasses import replace

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from conformance import failures, page
from onnx_cases import Case, Verdict, cases, check, misfit, same

import graphgen as gg
from graphgen import ops
from graphgen.export.write import to_bytes
from graphgen.version import minor

MODULES = (
    "attention averagepool castlike dequantizelinear einsum groupnormalization if_ loop lstm "
    "maxpool meanvariancenormalization mod optionalgetelement quantizelinear resize scan split "
    "splittosequence unique"
).split()
NAMES = """
    attention_3d_gqa_softcap attention_4d_causal attention_3d_local_window
    averagepool_2d_ceil_last_window_starts_on_pad castlike_no_saturate_FLOAT_to_FLOAT8E5M2
    dequantizelinear_axis dequantizelinear_int4 einsum_batch_matmul_bfloat16 einsum_batch_diagonal
    group_normalization_epsilon group_normalization_epsilon_expanded if if_opt if_seq loop11
    loop13_seq lstm_batchwise lstm_with_peepholes maxpool_2d_ceil_output_size_reduce_by_one
    maxpool_with_argmax_2d_precomputed_strides mvn mvn_expanded mod_mixed_sign_float32
    mod_float32_mixed_sign_fmod_0 optional_get_element_optional_sequence quantizelinear_axis
    quantizelinear_uint4 resize_downsample_scales_linear scan9_sum scan_sum
    split_variable_parts_2d_opset18 split_zero_size_splits_opset18 split_to_sequence_1
    unique_sorted_with_negative_axis
""".split()
NEW = minor(onnx.__version__) >= (1, 23) and minor(ort.__version__) >= (1, 32)


@pytest.fixture(scope="module")
def chosen() -> dict[str, Case]:
    """Those of NAMES that the installed onnx has."""
    found = cases(f"^test_({'|'.join(NAMES)})$", MODULES)
    return {case.name.removeprefix("test_"): case for case in found}


@pytest.mark.parametrize("name", NAMES)
def test_onnx_agrees(name: str, chosen: dict[str, Case]) -> None:
    if name not in chosen and not NEW:
        pytest.skip("an older onnx has fewer tests")
    found = check(chosen[name])
    allowed = ("runs",) if NEW else ("runs", "no kernel")
    assert found.verdict in allowed, found.why
    assert not found.gradient.startswith(("wrong", "crash", "invalid"))


def test_what_is_wrong_is_seen() -> None:
    y = np.ones((3, 5))
    model = gg.build(ops.exp, x=gg.float64[3, "n"])
    case = Case("exp", "Exp", to_bytes(model), [], 0, 0)
    assert misfit(case, model, [y], [y]) == ""
    assert "inferred" in misfit(case, model, [y], [y[:, 1:]])
    assert not same([y], [y + 1], 1e-3, 1e-7) and not same(y, y.astype("f"), 1e-3, 1e-7)
    assert same([y, "a"], [y.copy(), "a"], 0, 0)


def test_the_script_says_so() -> None:
    """Of a verdict that is bad it makes a line, and the exit code 3."""
    bad = Verdict("test_x", "X", "wrong", "1 instead of 2")
    refused = Verdict("test_y", "Y", "refused", "load: it is not known")
    other = Verdict("test_z", "Z", "runs", gradient="wrong: 1 where differences give 2")
    assert failures([replace(bad, verdict="no kernel")]) == []
    assert len(failures([bad, refused, other])) == 3
    assert "| `X` | 0 of 1 |  |  | wrong: 1 instead of 2 |" in page([bad])
