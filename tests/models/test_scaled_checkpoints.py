"""Checkpoints of compressed-tensors, FP8 and bitsandbytes: what their tensors stand for.

The tensors are written from the formats' descriptions, and know nothing of the reader; the
reference is a checkpoint of the floats.
"""

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from packed_checkpoints import FIELDS, checkpoints, packed, same_weights
from random_checkpoints import random_checkpoint, write_weights

from graphgen.bits import KEPT
from graphgen.commands import main
from graphgen.errors import GraphgenError
from graphgen.models.published import from_folder
from graphgen.safetensors import read_header

E4M3, E8M0 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e8m0fnu
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def integers(
    bits: int, group: int, *, packs: bool = True, even: bool = True, order: bool = False
) -> Any:
    """A layer of compressed-tensors: signed integers, groups along K, -1 for all of K."""

    def make(rng: Any, rows: int, columns: int) -> Any:
        size = columns if group == -1 else group
        of, half = np.arange(columns) // size, 2 ** (bits - 1)
        of = rng.permutation(of) if order else of
        q = rng.integers(-half, half, (rows, columns))
        zeros = rng.integers(-half, half, (rows, of.max() + 1)) * (not even)
        scales = (rng.random(zeros.shape) / half).astype(np.float16)
        parts: dict[str, Any] = {"weight_scale": scales}
        if packs:
            parts["weight_packed"] = packed(q + half, bits)
            parts["weight_shape"] = np.array(q.shape)
        else:
            parts["weight"] = q.astype(np.int8)
        if not even:
            own = packed(zeros.T + half, bits).T if packs else zeros.astype(np.int8)
            parts["weight_zero_point"] = own
        parts |= {"weight_g_idx": of.astype(np.int32)} if order else {}
        return parts, (q - zeros[:, of]) * scales.astype(np.float64)[:, of]

    return make


def padded_integers(rng: Any, rows: int, columns: int) -> Any:
    """Three bits, as compressed-tensors wrote them before 0.20: ten in a word."""
    parts, w = integers(3, 32)(rng, rows, columns)
    q = np.rint(w / np.repeat(parts["weight_scale"].astype(np.float64), 32, 1)).astype(int) + 4
    words = np.zeros((rows, -(-columns // 10)), np.uint32)
    for at in range(columns):
        words[:, at // 10] |= (q[:, at] << (3 * (at % 10))).astype(np.uint32)
    return parts | {"weight_packed": words.view(np.int32)}, w


def eights(name: str, rows_of: int, columns_of: int, kind: Any = np.float32) -> Any:
    """FP8 with a scale for each block of so many rows and columns; 0 is for all."""

    def make(rng: Any, rows: int, columns: int) -> Any:
        q = rng.standard_normal((rows, columns)).astype(E4M3)
        of = [np.arange(n) // (size or n) for n, size in ((rows, rows_of), (columns, columns_of))]
        scales = (2.0 ** rng.integers(-4, 1, (of[0][-1] + 1, of[1][-1] + 1))).astype(kind)
        w = q.astype(np.float64) * scales.astype(np.float64)[of[0]][:, of[1]]
        scales = scales.reshape(()) if scales.size == 1 else scales
        return {"weight": q, name: scales, "input_scale": np.ones((), np.float32)}, w

    return make


def fours(own: Any, over: str) -> Any:
    """FP4: of two numbers the first is in the low bits; a scale for 16, or a power for 32."""

    def make(rng: Any, rows: int, columns: int) -> Any:
        codes = rng.integers(0, 16, (rows, columns)).astype(np.uint8)
        scales = (rng.random((rows, columns // (16 if over else 32))) + 0.1).astype(own)
        parts = {
            "weight" if "scale_2" in over else "weight_packed": codes[:, ::2] | codes[:, 1::2] << 4,
            "weight_scale": scales if over else scales.view(np.uint8),
        }
        factor = 1.0
        if over:
            parts[over] = np.float32([0.25])
            factor = 0.25 if "scale_2" in over else 4.0
        factors = np.repeat(scales.astype(np.float64), columns // scales.shape[1], 1)
        return parts, E2M1[codes] * factors * factor

    return make


def affine(bits: int, group: int, least: str = "biases") -> Any:
    """MLX: w = scale q + bias, integers one after another in words."""

    def make(rng: Any, rows: int, columns: int) -> Any:
        q = rng.integers(0, 2**bits, (rows, columns))
        scales, own = rng.standard_normal((2, rows, columns // group)).astype(np.float16)
        wide = [np.repeat(x.astype(np.float64), group, 1) for x in (scales, own)]
        words = packed(q, bits).view(np.uint32)
        return {"weight": words, "scales": scales, least: own}, q * wide[0] + wide[1]

    return make


def mlx_floats(own: Any, *, four: bool = False) -> Any:
    """FP4 and FP8 of MLX: the same bytes, as words, and bytes for the scales."""

    def make(rng: Any, rows: int, columns: int) -> Any:
        count = columns // (16 if own is E4M3 else 32)
        scales = (rng.random((rows, count)) + 0.1).astype(own)
        codes = rng.integers(0, 16, (rows, columns)).astype(np.uint8)
        data, numbers = codes[:, ::2] | codes[:, 1::2] << 4, E2M1[codes]
        if not four:
            q = rng.standard_normal((rows, columns)).astype(E4M3)
            data, numbers = q.view(np.uint8), q.astype(np.float64)
        wide = np.repeat(scales.astype(np.float64), columns // count, 1)
        data = np.ascontiguousarray(data).view(np.uint32)
        return {"weight": data, "scales": scales.view(np.uint8)}, numbers * wide

    return make


def torchao_bytes(rng: Any, rows: int, columns: int) -> Any:
    q, zero = rng.integers(-8, 8, (rows, columns)), rng.integers(-8, 8, (rows, columns // 32))
    scales = rng.random(zero.shape).astype(np.float32)
    wide = [np.repeat(x.astype(np.float64), 32, 1) for x in (scales, zero)]
    parts = {"_weight_qdata": q.astype(np.int8), "_weight_zero_point": zero.astype(np.int8)}
    return parts | {"_weight_scale": scales}, (q - wide[1]) * wide[0]


def ternary(rng: Any, rows: int, columns: int) -> Any:
    q = rng.integers(0, 3, (4, rows // 4, columns)).astype(np.uint8)
    data = q[0] | q[1] << 2 | q[2] << 4 | q[3] << 6
    w = (q.reshape(rows, columns).astype(np.float64) - 1) / 4
    return {"weight": data, "weight_scale": np.float32([4])}, w


def vectors(rng: Any, rows: int, columns: int) -> Any:
    """AQLM: two codebooks of 256 vectors of two rows and four columns."""
    codes = rng.integers(-128, 128, (rows // 2, columns // 4, 2)).astype(np.int8)
    books = rng.standard_normal((2, 256, 2, 4)).astype(np.float16)
    scales = rng.random((rows // 2, 1, 1, 1)).astype(np.float16)
    w = np.zeros((rows, columns))
    for i in range(rows // 2):
        for j in range(columns // 4):
            found = sum(books[k, int(codes[i, j, k]) % 256].astype(np.float64) for k in (0, 1))
            w[2 * i : 2 * i + 2, 4 * j : 4 * j + 4] = found * float(scales[i, 0, 0, 0])
    return {"codes": codes, "codebooks": books, "scales": scales}, w


def nf4(rng: Any, rows: int, columns: int) -> Any:
    """bitsandbytes: the first of two is in the high bits; factors are rounded, too."""
    codes = rng.integers(0, 16, rows * columns)
    table, nested = np.sort(rng.standard_normal(16)), np.sort(rng.random(256))
    table, nested = table.astype(np.float32), nested.astype(np.float32)
    factors = rng.integers(0, 256, rows * columns // 64).astype(np.uint8)
    own = rng.random(-(-len(factors) // 16)).astype(np.float32)
    state = {"quant_type": "nf4", "blocksize": 64, "shape": [rows, columns], "dtype": "float16"}
    state |= {"nested_blocksize": 16, "nested_offset": 0.5, "nested_dtype": "float32"}
    absmax = nested[factors] * own[np.arange(len(factors)) // 16].astype(np.float64) + 0.5
    parts = {
        "weight": (codes[::2] << 4 | codes[1::2]).astype(np.uint8)[:, None],
        "weight.absmax": factors,
        "weight.quant_map": table,
        "weight.nested_absmax": own,
        "weight.nested_quant_map": nested,
        "weight.quant_state.bitsandbytes__nf4": np.frombuffer(json.dumps(state).encode(), "u1"),
    }
    return parts, (table[codes] * np.repeat(absmax, 64)).reshape(rows, columns)


def rows_of_bytes(rng: Any, rows: int, columns: int) -> Any:
    q = rng.integers(-127, 128, (rows, columns)).astype(np.int8)
    largest = rng.random(rows).astype(np.float32)
    parts = {"weight": q, "SCB": largest, "weight_format": np.zeros((), np.uint8)}
    return parts, q * largest[:, None].astype(np.float64) / 127


def scheme(name: str, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    fields = {"quant_method": "compressed-tensors", "format": name, "ignore": ["lm_head"]}
    return fields | {"config_groups": {"group_0": group}, "quantization_status": "compressed"}


GROUPS = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3"}
_INT4 = {"_data": "int4", "_type": "torch.dtype"}
INTX = {"_type": "IntxWeightOnlyConfig", "_version": 2, "_data": {"weight_dtype": _INT4}}
INTX = {"quant_method": "torchao", "quant_type": {"default": INTX}}
TYPED = {"_type": "IntxWeightOnlyConfig"}
CASES: dict[str, tuple[dict[str, Any], Any, bool]] = {
    "4 bits": (scheme("pack-quantized", **GROUPS), integers(4, 32), True),
    "4 bits, zero points": (scheme("pack-quantized", **GROUPS), integers(4, 32, even=False), True),
    "4 bits, order": (scheme("pack-quantized", **GROUPS), integers(4, 32, order=True), True),
    "3 bits": (scheme("pack-quantized", **GROUPS | {"num_bits": 3}), integers(3, 32), True),
    "3 bits, ten in a word": (
        scheme("pack-quantized", **GROUPS | {"num_bits": 3}),
        padded_integers,
        True,
    ),
    "8 bits of channels": (
        scheme("int-quantized", num_bits=8, strategy="channel"),
        integers(8, -1, packs=False, even=False),
        True,
    ),
    "4 bits as bytes": (
        scheme("int-quantized", **GROUPS),
        integers(4, 32, packs=False, even=False),
        True,
    ),
    "FP8 of channels": (
        scheme("float-quantized", num_bits=8, type="float"),
        eights("weight_scale", 1, 0),
        False,
    ),
    "NVFP4": (
        scheme("nvfp4-pack-quantized", num_bits=4, type="float", group_size=16),
        fours(E4M3, "weight_global_scale"),
        True,
    ),
    "MXFP4": (
        scheme("mxfp4-pack-quantized", num_bits=4, type="float", group_size=32),
        fours(E8M0, ""),
        True,
    ),
    "fp8": (FP8 | {"weight_block_size": [48, 32]}, eights("weight_scale_inv", 48, 32), False),
    "fp8, one scale": (FP8, eights("weight_scale_inv", 0, 0), False),
    "modelopt": (
        {"quant_method": "modelopt", "quant_algo": "NVFP4"},
        fours(E4M3, "weight_scale_2"),
        True,
    ),
    "nf4": ({"quant_method": "bitsandbytes", "load_in_4bit": True}, nf4, False),
    "int8": ({"quant_method": "bitsandbytes", "load_in_8bit": True}, rows_of_bytes, True),
    **{
        f"mlx, {bits} bits": ({"bits": bits, "group_size": group}, affine(bits, group), True)
        for bits, group in ((2, 16), (3, 32), (4, 32), (6, 32), (8, 16))
    },
    "mlx, mxfp4": (
        {"bits": 4, "group_size": 32, "mode": "mxfp4"},
        mlx_floats(E8M0, four=True),
        True,
    ),
    "mlx, nvfp4": (
        {"bits": 4, "group_size": 16, "mode": "nvfp4"},
        mlx_floats(E4M3, four=True),
        True,
    ),
    "mlx, mxfp8": ({"bits": 8, "group_size": 32, "mode": "mxfp8"}, mlx_floats(E8M0), False),
    "metal": (
        {"quant_method": "metal", "bits": 4, "group_size": 32},
        affine(4, 32, "qbiases"),
        True,
    ),
    "torchao": (INTX, torchao_bytes, True),
    "bitnet": ({"quant_method": "bitnet", "modules_to_not_convert": ["lm_head"]}, ternary, True),
    "aqlm": (
        {"quant_method": "aqlm", "num_codebooks": 2, "nbits_per_codebook": 8}
        | {"in_group_size": 4, "out_group_size": 2},
        vectors,
        False,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_the_weights_are_what_the_tensors_stand_for(case: str, tmp_path: Path) -> None:
    config, layer, kept = CASES[case]
    few, floats, _ = checkpoints(tmp_path, config, layer)
    found = from_folder(few)
    minima = case == "metal" or (case.startswith("mlx") and case.endswith("bits"))
    sums = 3e-7 * minima  # of a scale and a minimum
    same_weights(from_folder(floats).model, found.model, sums)
    values = [v.const_value for v in found.model.graph.initializers.values()]
    assert sum(v is not None and KEPT in v.meta for v in values) == 7 * kept
    assert bool(found.few_bits) == kept
    told = "7 weights of few bits (" + config.get("quant_method", "mlx")
    assert any(told in line for line in found.remarks) != kept


@pytest.mark.parametrize("case", ["fp8", "modelopt"])
def test_a_folder_of_small_floats_may_be_quantized(case: str, tmp_path: Path) -> None:
    few, *_ = checkpoints(tmp_path, *CASES[case][:2])
    out = tmp_path / "out"
    assert main(["build", str(few), "-o", str(out), "--quantize", "int4"]) == 0
    assert "quantization_config" not in (out / "config.json").read_text()


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"format": "marlin-24"}, "format is 'marlin-24'; it must be one of float-quantized"),
        ({"config_groups": {}}, "config_groups is {}; it must be an object of schemes"),
        ({"transform_config": {"R1": {}}}, "transform_config is {'R1': {}}; it must be empty"),
        ({"sparsity_config": {"format": "sparse-24-bitmask"}}, "it must be of format dense"),
        (scheme("pack-quantized", **GROUPS | {"num_bits": 9}), "num_bits is 9; it must be 2 to 8"),
        (scheme("pack-quantized", **GROUPS | {"num_bits": 8}), "which is none of [8] bits"),
        (scheme("pack-quantized", **GROUPS | {"group_size": 64}), "and groups of [64]"),
        ({"quant_method": "hqq"}, "aqlm; its HQQLinear.dequantize() makes floats of it, which"),
        ({"quant_method": "vptq"}, "order is that of a kernel: otherwise give the checkpoint of"),
        ({"quant_method": "metal"}, "bits and group_size is {'bits': None,"),
        ({"quant_method": "metal", "mode": [1]}, "'mode': [1]}; it must be 2 to 6 or 8 bits"),
        ({"quant_method": "torchao"}, "quant_type is []; it must be one of torchao's with"),
        (INTX | {"quant_type": TYPED | {"_data": {"intx_packing_format": "x"}}}, "format is 'x'"),
        (
            INTX | {"quant_type": TYPED | {"_data": {"weight_dtype": "uint4"}}},
            "is 'uint4'; it must",
        ),
        ({"quant_method": "bitnet", "use_rms_norm": True}, "use_rms_norm is True; it must be"),
        ({"more": 1}, "does not have these fields: more = 1"),
    ],
)
def test_what_does_not_fit_is_refused(change: Any, told: str, tmp_path: Path) -> None:
    few, *_ = checkpoints(tmp_path, *CASES["4 bits"][:2])
    config = CASES["4 bits"][0] | change
    (few / "config.json").write_text(json.dumps({**FIELDS, "quantization_config": config}))
    with pytest.raises(GraphgenError) as caught:
        from_folder(few)
    assert told in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("case", "part"),
    [
        ("fp8", "weight_scale_inv"),
        ("nf4", "weight.absmax"),
        ("4 bits, zero points", "weight_zero_point"),
        ("8 bits of channels", "weight_zero_point"),
        ("4 bits, order", "weight_g_idx"),
        ("metal", "weight"),
        ("metal", "scales"),
        ("torchao", "_weight_qdata"),
        ("torchao", "_weight_scale"),
        ("aqlm", "codes"),
    ],
)
def test_parts_of_another_size_are_refused(case: str, part: str, tmp_path: Path) -> None:
    few, *_ = checkpoints(tmp_path, *CASES[case][:2])
    arrays = {w.name: w.read() for w in read_header(few / "model.safetensors")}
    name = f"model.layers.0.mlp.up_proj.{part}"
    for other in (arrays[name][:-1], arrays[name].reshape(-1)[:1].reshape(())):
        write_weights(few / "model.safetensors", arrays | {name: other})
        with pytest.raises(GraphgenError, match=r"do not fit: model\.layers\.0\.mlp\.up_proj"):
            from_folder(few)


@pytest.mark.parametrize(
    ("case", "part", "broken", "told"),
    [
        ("4 bits as bytes", "weight_zero_point", lambda x: x + 16, "integers of more than 4 bits"),
        ("4 bits, order", "weight_g_idx", lambda x: np.where(x == 1, -1, x), "groups of other si"),
        (
            "nf4",
            "weight.quant_state.bitsandbytes__nf4",
            lambda x: np.frombuffer(x.tobytes().replace(b"0.5", b"1e999"), np.uint8),
            "beyond the largest number",
        ),
    ],
)
def test_parts_of_no_meaning_are_refused(
    case: str, part: str, broken: Any, told: str, tmp_path: Path, capsys: Any
) -> None:
    few, *_ = checkpoints(tmp_path, *CASES[case][:2])
    arrays = {w.name: w.read() for w in read_header(few / "model.safetensors")}
    name = f"model.layers.0.mlp.up_proj.{part}"
    write_weights(few / "model.safetensors", arrays | {name: broken(arrays[name])})
    assert main(["build", str(few), "-o", str(tmp_path / "out")]) == 2
    assert told in capsys.readouterr().err


def test_a_tied_head_of_few_bits_is_compared_by_its_numbers(tmp_path: Path) -> None:
    """Not by the bytes of its tensors."""
    table = "model.embed_tokens"
    random_checkpoint(tmp_path, FIELDS | {"tie_word_embeddings": True})
    arrays = {w.name: w.read() for w in read_header(tmp_path / "model.safetensors")}
    parts, w = rows_of_bytes(np.random.default_rng(0), *arrays.pop(f"{table}.weight").shape)
    arrays |= {f"{table}.{name}": part for name, part in parts.items()}
    write_weights(tmp_path / "model.safetensors", arrays | {"lm_head.weight": np.float32(w)})
    fields = FIELDS | {"tie_word_embeddings": True, "quantization_config": CASES["int8"][0]}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    with pytest.raises(GraphgenError, match="has other numbers for it"):  # than SCB / 127 gives
        from_folder(tmp_path)
    stored = np.float32(parts["SCB"][:, None] / np.float32(127)) * parts["weight"]
    write_weights(tmp_path / "model.safetensors", arrays | {"lm_head.weight": stored})
    from_folder(tmp_path)


@pytest.mark.parametrize("kind", [np.int8, E4M3])
def test_weights_of_quanto(kind: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing in config.json says so, and what products read may be rounded, too."""

    def layer(rng: Any, rows: int, columns: int) -> Any:
        q = rng.integers(-127, 128, (rows, columns)).astype(kind)
        scales = (rng.random((rows, 1)) / 127).astype(np.float32)
        one = np.ones((), np.float32)
        own = {"weight._data": q, "weight._scale": scales, "input_scale": one, "output_scale": one}
        return own, q.astype(np.float64) * scales

    few, floats, known = checkpoints(tmp_path, {}, layer)
    (few / "config.json").write_text(json.dumps(FIELDS))
    wanted, found = from_folder(floats), from_folder(few)
    same_weights(wanted.model, found.model)
    kept = [v for v in found.model.graph.initializers.values() if KEPT in v.const_value.meta]
    assert len(kept) == (len(known) if kind is np.int8 else 0)
    (few / "quanto_qmap.json").write_text(json.dumps({"a": {"activations": "qint8"}}))
    assert main(["build", str(few), "-o", str(tmp_path / "out")]) == 0
    assert "quanto also rounds what products read" in "".join(capsys.readouterr())
    stored = {w.name: w.read() for w in read_header(few / "model.safetensors")}
    name = next(name for name in stored if name.endswith("._data"))
    write_weights(few / "model.safetensors", stored | {f"{name}._data": stored.pop(name)})
    with pytest.raises(GraphgenError, match="optimum-quanto in two or four bits, which are not"):
        from_folder(few)
