"""Checkpoints of GGUF: the integers of the file are those of the graph.

The files below are written from the format's description, and what their blocks mean is summed in
float64, element by element; neither knows the reader.
"""

import itertools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
from gguf_files import KINDS, converted, gguf, given, in_pairs, metadata
from random_checkpoints import GROUPED, random_checkpoint, write_weights
from schemes import EIGHT
from small_models import relative_rms, run_plain
from tokenizers import Tokenizer, pre_tokenizers

import graphgen as gg
from graphgen.commands import main
from graphgen.errors import GraphgenError
from graphgen.match import Miss
from graphgen.measure.reference import evaluate
from graphgen.models.published import from_folder
from graphgen.models.published.config import Config
from graphgen.models.published.gguf import gguf_in, open_gguf
from graphgen.models.published.gguf_like import differences
from graphgen.models.published.gguf_names import config_fields, read_gguf
from graphgen.models.published.gguf_splits import SPLITS
from graphgen.models.published.gguf_tokenizer import tokenizer_files
from graphgen.passes.decoding import KEPT, in_place, keep_last
from graphgen.passes.training.adapters import linears
from graphgen.passes.training.by_row import quantized_linears, weight_of
from graphgen.quantize.effect import feeds_of
from graphgen.quantize.kept import keep_bits
from graphgen.safetensors import read_header
from graphgen.version import minor

SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 1}
SIZES |= {"tie_word_embeddings": False, "vocab_size": 288}
FIELDS = {
    "model_type": "llama",
    **GROUPED,
    **SIZES,
    "tie_word_embeddings": False,
    "vocab_size": 288,
}
TOKENS = np.random.default_rng(5).integers(0, 200, (2, 7))
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
RNG = np.random.default_rng(3)
OWN = "tokenizer.ggml."
_WORDS = ["▁ab", "ab", "bc", "▁a", "abc", "▁", "a", "b", "c"]  # by score
PIECES: dict[str, Any] = {
    f"{OWN}model": "llama",
    f"{OWN}tokens": ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *_WORDS],
    f"{OWN}scores": [0.0] * 259 + [-float(i) for i in range(len(_WORDS))],
    f"{OWN}token_type": [2, 3, 3] + [6] * 256 + [1] * len(_WORDS),
    f"{OWN}bos_token_id": 1,
    f"{OWN}eos_token_id": 2,
    f"{OWN}unknown_token_id": 0,
}


def half(shape: Any, size: float) -> Any:
    return (size * (0.5 + RNG.random(shape))).astype("<f2")


def bits_of(number: Any, low: int, count: int) -> Any:
    return (number >> low) & (2**count - 1)


def in_nibbles(q: Any, size: int) -> Any:
    """Of each 2 · size integers, the i-th and the (i + size)-th in a byte, the latter above."""
    each = q.reshape(len(q), -1, 2, size)
    return (bits_of(each[:, :, 0], 0, 4) + 16 * bits_of(each[:, :, 1], 0, 4)).reshape(len(q), -1)


def blocks(kind: str, rows: int, columns: int) -> tuple[bytes, Any]:
    """A matrix of random blocks, and what it means (N, K), float64."""
    each = 256 if kind.endswith("K") else 32
    n = rows * columns // each
    bits = int(kind[1])
    q, largest = RNG.integers(0, 2**bits, (n, each)), 2.0 ** (bits - 1)
    d = half(n, 0.16 / largest / (32 if kind.endswith("K") else 1) / (4 if bits == 6 else 1))
    wide, out = d.astype(np.float64)[:, None], [d.view(np.uint8).reshape(n, 2)]
    if kind.endswith("_1"):
        m = half(n, -0.16)
        w = wide * q + m.astype(np.float64)[:, None]
        out.append(m.view(np.uint8).reshape(n, 2))
    elif kind in ("Q4_K", "Q5_K"):
        e, s, m = half(n, 3e-3), *RNG.integers(0, 64, (2, n, 8))
        w = wide * np.repeat(s, 32, 1) * q - e.astype(np.float64)[:, None] * np.repeat(m, 32, 1)
        scales = np.zeros((n, 12), int)
        for i in range(4):
            scales[:, i] = s[:, i] + 64 * bits_of(s[:, i + 4], 4, 2)
            scales[:, i + 4] = m[:, i] + 64 * bits_of(m[:, i + 4], 4, 2)
            scales[:, i + 8] = bits_of(s[:, i + 4], 0, 4) + 16 * bits_of(m[:, i + 4], 0, 4)
        out += [e.view(np.uint8).reshape(n, 2), scales]
    elif kind == "Q6_K":
        s = RNG.integers(-128, 128, (n, 16))
        w = wide * np.repeat(s, 16, 1) * (q - 32)
        high = np.zeros((n, 64), int)
        for i in range(256):
            side, at = divmod(i, 128)
            high[:, 32 * side + at % 32] += bits_of(q[:, i], 4, 2) << (2 * (at // 32))
        out = [in_nibbles(q, 64), high, s.astype(np.int8).view(np.uint8), *out]
    else:
        w = wide * (q - largest)
    if kind == "Q8_0":
        out.append((q - 128).astype(np.int8).view(np.uint8))
    elif kind == "Q5_K":  # bit i of byte j: of the j-th weight of the i-th 32
        out.append(sum(bits_of(q[:, 32 * i : 32 * i + 32], 4, 1) << i for i in range(8)))
    elif bits == 5:  # bit i % 8 of byte i / 8
        fifth = bits_of(q, 4, 1).reshape(n, 4, 8)
        out.append(sum(fifth[:, :, i] << i for i in range(8)))
    if bits < 6:
        out.append(in_nibbles(q, 32 if kind.endswith("K") else 16))
    data = np.concatenate([x.astype(np.uint8) for x in out], axis=1)
    return data.tobytes(), w.reshape(rows, columns)


@pytest.mark.parametrize(
    ("kind", "bits", "lost"),
    [("Q4_0", 4, 0.0), ("Q8_0", 8, 0.0), ("Q4_1", 8, 0.02), ("Q6_K", 8, 0.0), ("Q4_K", 8, 0.02)],
)
def test_experts_keep_their_bits(kind: str, bits: int, lost: float, tmp_path: Path) -> None:
    """All matrices of a kind are one tensor; with minima, they are rounded to eight bits."""
    sizes = (256, 256) if kind.endswith("K") else (64, 96)
    fields = given("mixtral") | dict(zip(("hidden_size", "intermediate_size"), sizes, strict=True))
    fields |= {"num_hidden_layers": 1}
    random_checkpoint(tmp_path / "floats", fields)
    weights = {w.name: w.read() for w in read_header(tmp_path / "floats" / "model.safetensors")}
    few, floats = {}, {}
    for name, w in converted(fields, weights).items():
        floats[name] = ("F32", w.shape, w.astype("<f4").tobytes())
        if name.endswith("_exps.weight"):
            data, meant = zip(*(blocks(kind, *w.shape[1:]) for _ in w), strict=True)
            few[name] = (kind, w.shape, b"".join(data))
            floats[name] = ("F32", w.shape, np.stack(meant).astype("<f4").tobytes())
    models = []
    for own, tensors in (("a", floats), ("b", floats | few)):
        (tmp_path / own).mkdir()
        gguf(tmp_path / own / "model.gguf", metadata(fields), tensors)
        (tmp_path / own / "config.json").write_text(
            json.dumps(config_fields(open_gguf(tmp_path / own / "model.gguf")))
        )
        models.append(gg.optimize(from_folder(tmp_path / own).model).model)
    model, report = keep_bits(models[1], method="gguf")
    [feed] = feeds_of(model, RNG.integers(0, 40, (2, 5)), rows=2)
    a, b = (run_plain(m, dict(feed))[0] for m in (models[0], model))
    if minor(ort.__version__) < (1, 32):
        assert all("has no kernel of QMoE" in line for line in report.kept())
        assert len(report.kept()) == 2 and relative_rms(a, b) < 1e-5
        return
    [node] = [node for node in model.graph if node.op_type == "QMoE"]
    assert node.attributes.get_int("expert_weight_bits") == bits
    assert [("has 8 bits: no kernel" in line) for line in report.kept()] == [True] * bool(lost) * 2
    assert relative_rms(a, b) < 0.03  # the kernel rounds what it reads
    assert relative_rms(a, evaluate(model, dict(feed))[0]) < (lost or 1e-5)


@pytest.mark.parametrize("kind", [k for k in KINDS if k[0] == "Q"])
def test_a_tensor_means_what_the_format_says(kind: str, tmp_path: Path) -> None:
    data, meant = blocks(kind, 6, 512)
    gguf(tmp_path / "a.gguf", {}, {"other": ("F32", (3,), bytes(12)), "w": (kind, (6, 512), data)})
    read = open_gguf(tmp_path / "a.gguf").tensors["w"].read()
    assert np.abs(read - meant).max() <= 2e-7 * np.abs(meant).max()


def checkpoints(
    path: Path, kind: str, *, table: str = "F32", said: Mapping[str, int] = {}, **more: Any
) -> tuple[Path, Path]:
    """A folder with a GGUF file, and one of the floats that it means."""
    floats, few, fields = path / "floats", path / "few", FIELDS | more
    random_checkpoint(floats, fields)
    arrays = {w.name: w.read() for w in read_header(floats / "model.safetensors")}
    arch = str(fields["model_type"])
    tensors, meant = {}, {}
    for name, array in arrays.items():
        base, _, last = name.rpartition(".")
        prefix, own = "", base
        if base.startswith("model.layers."):
            _, _, layer, own = base.split(".", 3)
            prefix = f"blk.{layer}."
        kinds = kind if "proj" in name and last == "weight" else "F32"
        kinds = table if "embed" in name else kinds
        if kinds in ("F32", "F16"):
            data, w = array.astype("<f4" if kinds == "F32" else "<f2").tobytes(), array
            w = w if kinds == "F32" else w.astype("<f2")
        else:
            data, w = blocks(kinds, *array.shape)
        heads = {"q_proj": 4, "k_proj": 2}.get(own.rpartition(".")[2])
        if heads and arch == "llama":  # so far w is as the file has it
            back = np.argsort(in_pairs(np.arange(len(w)), heads))
            w = w[back]
        tensors[f"{prefix}{NAMES[own]}.{last}"] = (kinds, array.shape, data)
        meant[name] = w.astype(np.float32)
    write_weights(floats / "model.safetensors", meant)
    few.mkdir()
    sizes = {"attention.head_count": 4, "attention.head_count_kv": 2, "block_count": 1}
    sizes |= {"embedding_length": 256, "feed_forward_length": 512, "rope.freq_base": 10000.0}
    own = {f"{arch}.{n}": x for n, x in sizes.items()}
    own |= {f"{arch}.attention.layer_norm_rms_epsilon": fields.get("rms_norm_eps", 1e-6)}
    own |= {"general.architecture": arch, "x.scale": 0.5, "x.numbers": [1, 2], **PIECES, **said}
    gguf(few / "model.gguf", own, tensors)
    (few / "config.json").write_text(json.dumps(fields))
    return few, floats


@pytest.mark.parametrize(
    ("family", "kind", "table", "kept"),
    [
        ("llama", "F16", "F16", 0),
        ("llama", "Q4_0", "Q4_0", 8),
        pytest.param("llama", "Q8_0", "F32", 7, marks=EIGHT),
        # These differ in names and in the order of rows; the last is tied.
        ("qwen2", "Q4_K", "Q4_K", 8),
        pytest.param("qwen3", "Q5_K", "Q6_K", 9, marks=EIGHT),
    ],
)
def test_a_file_means_what_its_floats_do(
    kind: str, family: str, table: str, kept: int, tmp_path: Path
) -> None:
    more = {"model_type": family, "tie_word_embeddings": kept == 9}
    few, floats = checkpoints(tmp_path, kind, table=table, **more)
    wanted, read = from_folder(floats).model, from_folder(few).model
    for name, value in wanted.graph.initializers.items():
        a, b = value.const_value, read.graph.initializers[name].const_value
        assert a is not None and b is not None
        assert np.abs(a.numpy() - b.numpy()).max() <= 2e-7 * np.abs(a.numpy()).max(), name
    wanted = gg.optimize(wanted).model
    model, report = keep_bits(gg.optimize(read).model, method="gguf")
    assert len(report.layers) == kept and not report.kept()
    sites = {site.module: node for node, site in quantized_linears(model).items()}
    whole = {site.module: weight_of(node) for node, site in linears(wanted).items()}
    assert {*sites} | {"head"} == {"head", *(whole if kept else ())}
    for module, node in sites.items():
        if (kind if "layers" in module else table) in ("Q4_K", "Q5_K"):  # with minima of blocks
            with pytest.raises(GraphgenError, match="in few bits that magnitudes"):
                weight_of(node)
        else:
            np.testing.assert_allclose(weight_of(node), whole[module], rtol=1e-6, atol=1e-7)
    for node in model.graph:
        if node.op_type == "MatMulNBits" and kind in ("Q4_0", "Q4_K"):
            node.attributes["accuracy_level"] = ir.AttrInt64("accuracy_level", 1)
    [feed] = feeds_of(model, TOKENS, rows=2)
    a, b = (run_plain(m, dict(feed))[0] for m in (wanted, model))
    assert relative_rms(a, b) < (1e-3 if kind in ("Q8_0", "Q5_K") else 1e-5)


@pytest.mark.parametrize("table", ["Q4_K", pytest.param("Q5_K", marks=EIGHT)])
def test_a_tied_head_with_minima_of_blocks_is_read_for_the_last_tokens(
    table: str, tmp_path: Path
) -> None:
    more = {"model_type": "qwen2", "tie_word_embeddings": True}
    few, _ = checkpoints(tmp_path, "Q4_K", table=table, **more)
    model, _ = keep_bits(gg.optimize(from_folder(few).model).model, method="gguf")
    for node in model.graph:  # else a row of int8 depends on what is read with it
        if node.op_type == "MatMulNBits":
            node.attributes["accuracy_level"] = ir.AttrInt64("accuracy_level", 1)
    placed = in_place(model)
    assert not isinstance(placed, Miss) and keep_last(placed, several=True)
    [feed] = feeds_of(model, TOKENS, rows=2)
    whole = run_plain(model, dict(feed))[0]
    assert keep_last(model, several=True)
    kept = run_plain(model, {**feed, KEPT: np.array(2, np.int64)})[0]
    assert kept.shape == (2, 2, whole.shape[2])
    assert relative_rms(whole[:, -2:], kept) < 1e-6


def test_a_table_stays_in_float_where_its_rows_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few, _ = checkpoints(tmp_path, "Q4_0", table="Q4_0")
    monkeypatch.setattr("graphgen.quantize.kept.reads_rows", lambda *_: False)
    model, report = keep_bits(gg.optimize(from_folder(few).model).model, method="gguf")
    assert len(report.kept()) == 1 and "reads no rows of such blocks" in report.kept()[0]
    assert {node.op_type for node in model.graph} >= {"Gather", "MatMulNBits"}
    [feed] = feeds_of(model, TOKENS, rows=2)
    assert np.isfinite(run_plain(model, dict(feed))[0]).all()


def test_a_file_is_built_and_generates_as_its_folder_does(tmp_path: Path, capsys: Any) -> None:
    few, _ = checkpoints(tmp_path, "Q4_K")
    for name, source in (("a", few), ("b", few / "model.gguf")):
        assert main(["build", str(source), "-o", str(tmp_path / name)]) == 0
    out = tmp_path / "b"
    assert "gguf" in (out / "quantization.json").read_text()
    assert not [*out.rglob("*.gguf")]
    a, b = (tmp_path / name / "onnx" / "model.onnx_data" for name in "ab")
    assert a.read_bytes() == b.read_bytes()
    assert len(list(gg.generate(out, ["ab abc"], max_new_tokens=3))) == 3
    assert gg.generate(out, ["ab"], max_new_tokens=1) is not None
    assert main(["build", str(few), "-o", str(tmp_path / "no"), "--quantize", "int8"]) == 2
    assert "in few bits (gguf): leave out --quantize" in capsys.readouterr().err


def joined(text: str) -> list[str]:
    """SentencePiece's BPE: the neighbors of the best score are joined, until there are none."""
    scores = dict(zip(PIECES[f"{OWN}tokens"], PIECES[f"{OWN}scores"], strict=True))
    parts = [*("▁" + text.replace(" ", "▁"))]
    while pairs := [
        (-scores[a + b], i) for i, (a, b) in enumerate(itertools.pairwise(parts)) if a + b in scores
    ]:
        at = min(pairs)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return [
        y for x in parts for y in ([x] if x in scores else [f"<0x{b:02X}>" for b in x.encode()])
    ]


def test_a_vocabulary_of_scores_becomes_merges(tmp_path: Path) -> None:
    gguf(tmp_path / "a.gguf", {"general.architecture": "llama", **PIECES}, {})
    files = tokenizer_files(open_gguf(tmp_path / "a.gguf"))
    made = Tokenizer.from_str(json.dumps(files["tokenizer.json"]))
    for _ in range(200):
        text = "".join(RNG.choice([*"abcabcabc é"], RNG.integers(1, 12)))
        read = made.encode(text)
        assert read.tokens == ["<s>", *joined(text)], text
        assert made.decode(read.ids) == text
    assert made.encode("ab</s>ab").tokens[2:4] == ["</s>", "▁ab"]
    assert files["tokenizer_config.json"]["bos_token"] == "<s>"


@pytest.mark.parametrize("pre", ["gpt-2", "llama-bpe", "qwen2", "smollm"])
def test_a_vocabulary_of_merges_stays_one(pre: str, tmp_path: Path) -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = ["ab", "abc", "12", "Ġa", "Ġab", "bc"]
    merges = ["Ġ a", "Ġa b", "a b", "ab c", "1 2", "b c"]
    tokens = [*alphabet, *words, "<|end|>", "<own>"]
    types = [1] * (len(tokens) - 2) + [3, 4]
    fields = {"model": "gpt2", "pre": pre, "tokens": tokens, "token_type": types, "merges": merges}
    fields |= {"bos_token_id": len(tokens) - 2, "eos_token_id": len(tokens) - 2}
    gguf(tmp_path / "a.gguf", {f"{OWN}{n}": x for n, x in fields.items()}, {})
    files = tokenizer_files(open_gguf(tmp_path / "a.gguf"))
    made = Tokenizer.from_str(json.dumps(files["tokenizer.json"]))
    begin = ["<|end|>"] * (pre == "llama-bpe")
    assert made.encode("abc ab").tokens == [*begin, "abc", "Ġab"]
    assert made.encode("ab<|end|><own>").tokens == [*begin, "ab", "<|end|>", "<own>"]
    # Digits are single, or in threes from the left.
    assert ("12" in made.encode("312").tokens) == (pre == "gpt-2" or pre == "llama-bpe")
    composed = made.encode("e\u0301").tokens == made.encode("é").tokens
    assert composed == (pre == "qwen2")
    assert made.decode(made.encode("abc é 12\n ab").ids) == "abc é 12\n ab"


@pytest.mark.parametrize(
    ("pre", "parts"),
    [
        ("gpt-4o", "Hello World's ĠIT's Ġ 123 4 Ġa /b"),
        ("tekken", "Hello World 's ĠIT 's Ġ 1 2 3 4 Ġa /b"),
        ("llama3", "HelloWorld 's ĠIT 's Ġ 123 4 Ġa /b"),
        ("minimax-m2", "Hello World's ĠIT's Ġ 123 4 Ġa /b"),
        ("seed-coder", "HelloWorld 's ĠIT 's Ġ 1 2 3 4 Ġa /b"),
        ("deepseek-v3", "HelloWorld 's ĠIT 's Ġ 123 4 Ġa /b"),
        ("deepseek-coder", "HelloWorld ' s ĠIT ' s Ġ 1 2 3 4 Ġa / b"),
        ("kimi-k2", "Hello World's ĠIT's Ġ 123 4 Ġa /b"),
        ("bloom", "HelloWorld's ĠIT's Ġ1234 Ġa/b"),
        ("exaone4", "HelloWorld 's ĠIT 's Ġ1234 Ġa / b"),
    ],
)
def test_texts_are_cut_as_where_their_vocabulary_was_learned(pre: str, parts: str) -> None:
    model = {"type": "BPE", "vocab": {}, "merges": []}
    how = {"pre_tokenizer": {"type": "Sequence", "pretokenizers": SPLITS[pre]}, "model": model}
    cut: Any = Tokenizer.from_str(json.dumps(how)).pre_tokenizer
    assert " ".join(part for part, _ in cut.pre_tokenize_str("HelloWorld's IT's 1234 a/b")) == parts


@pytest.mark.parametrize(
    ("pre", "parts"),
    [("kimi-k2", ["日本", "a", "語", "テスト́"]), ("deepseek-v3", ["日本", "a", "語テスト", "́"])],
)
def test_characters_of_some_scripts_are_apart(pre: str, parts: list[str]) -> None:
    model = {"type": "BPE", "vocab": {}, "merges": []}
    how = {"pre_tokenizer": {"type": "Sequence", "pretokenizers": SPLITS[pre][:-1]}, "model": model}
    cut: Any = Tokenizer.from_str(json.dumps(how)).pre_tokenizer
    assert [part for part, _ in cut.pre_tokenize_str("日本a語テスト́")] == parts


def test_a_file_that_does_not_say_how_texts_are_cut(tmp_path: Path) -> None:
    fields: dict[str, Any] = {
        "model": "gpt2",
        "tokens": ["a"],
        "token_type": [1],
        "merges": ["a b"],
    }
    for arch in ("gpt2", "llama"):
        named = {"general.architecture": arch, **{f"{OWN}{n}": x for n, x in fields.items()}}
        gguf(tmp_path / f"{arch}.gguf", named, {})
        told = "is not a pair of tokens" if arch == "gpt2" else "tokenizer.ggml.pre is None"
        with pytest.raises(GraphgenError, match=told):
            tokenizer_files(open_gguf(tmp_path / f"{arch}.gguf"))


def test_rotary_factors_become_a_configuration_and_are_compared_with_one(tmp_path: Path) -> None:
    few, _ = checkpoints(tmp_path, "F16", rope_theta=10000.0)
    data = open_gguf(few / "model.gguf")
    plain = 10000.0 ** (-np.arange(32) / 32)  # heads of 64 features
    turns = 8192 * plain / (2 * np.pi)
    keep = np.clip((turns - 1) / 3, 0, 1)
    factors = (1 / (keep + (1 - keep) / 8)).astype("<f4")
    gguf(tmp_path / "f.gguf", {}, {"rope_freqs.weight": ("F32", (32,), factors.tobytes())})
    more = open_gguf(tmp_path / "f.gguf").tensors
    file = data._replace(tensors={**data.tensors, **more})
    made = config_fields(file)
    assert made["rope_scaling"]["factor"] == 8.0 and made["vocab_size"] == 288
    assert not made["tie_word_embeddings"] and made["model_type"] == "llama"
    read_gguf(file, Config(made))
    for scaling in (None, {**made["rope_scaling"], "factor": 32.0}):
        with pytest.raises(GraphgenError, match=r"rope_freqs.weight has other factors"):
            read_gguf(file, Config({**made, "rope_scaling": scaling}))
    for name, value, told in (
        ("llama.rope.scaling.type", "longrope", "is not supported; give --like DIR"),
        ("llama.rope.scaling.type", "linear", "has both rope_freqs.weight and rope.scaling.type"),
        ("llama.logit_scale", 2.0, "llama.logit_scale (2.0) is not supported"),
        ("general.architecture", "mamba", "is for 'mamba'; supported are llama"),
        ("llama.rope.dimension_count", 32, None),
    ):
        changed = file._replace(fields={**file.fields, name: value})
        if told is None:  # as a size of heads, which the weights then contradict
            assert config_fields(changed)["head_dim"] == 32
            continue
        with pytest.raises(GraphgenError) as caught:
            config_fields(changed)
        assert told in str(caught.value)


def test_scaling_of_positions_is_compared_with_a_configuration(tmp_path: Path) -> None:
    few, _ = checkpoints(tmp_path, "F16")
    plain = open_gguf(few / "model.gguf")
    own = "llama.rope.scaling."
    linear = plain._replace(
        fields={**plain.fields, f"{own}type": "linear", f"{own}factor": np.float32(4).item()}
    )
    yarn = {f"{own}type": "yarn", f"{own}factor": 4.0, f"{own}original_context_length": 64}
    yarn_file = plain._replace(fields={**plain.fields, **yarn})
    usual = {f"{own}yarn_{n}": x for n, x in (("beta_fast", 32.0), ("ext_factor", 1.0))}
    usual_file = plain._replace(fields={**yarn_file.fields, **usual})
    fast = {f"{own}yarn_beta_fast": 8.0, f"{own}yarn_beta_slow": 2.0, f"{own}attn_factor": 1.0}
    fast_file = plain._replace(fields={**yarn_file.fields, **fast})
    turns = {"beta_fast": 8.0, "beta_slow": 2.0}
    original = {"original_max_position_embeddings": 64}
    for file, scaling, fits in (
        (plain, None, True),
        (plain, {"rope_type": "linear", "factor": 4.0}, False),
        (plain, {"rope_type": "default"}, True),
        (linear, {"rope_type": "linear", "factor": 4.0}, True),
        (linear, {"type": "linear", "factor": 4}, True),
        (linear, {"rope_type": "linear", "factor": 2.0}, False),
        (linear, None, False),
        (yarn_file, {"rope_type": "yarn", "factor": 4.0, **original}, True),
        (yarn_file, {"rope_type": "yarn", "factor": 4.0}, True),
        (yarn_file, {"rope_type": "yarn", "factor": 4.0, next(iter(original)): 128}, False),
        (yarn_file, {"rope_type": "linear", "factor": 4.0}, False),
        (yarn_file, {"rope_type": "yarn", "factor": 4.0, **turns}, False),
        (usual_file, {"rope_type": "yarn", "factor": 4.0}, True),
        (fast_file, {"rope_type": "yarn", "factor": 4.0, **turns}, True),
        (fast_file, {"rope_type": "yarn", "factor": 4.0}, False),
    ):
        config = Config({**FIELDS, "rope_scaling": scaling})
        if fits:
            read_gguf(file, config)
            continue
        with pytest.raises(GraphgenError, match="the two belong to different models"):
            read_gguf(file, config)
    made = config_fields(yarn_file)
    assert made["rope_scaling"] == {"rope_type": "yarn", "factor": 4.0, **original}
    assert config_fields(fast_file)["rope_scaling"] == made["rope_scaling"] | turns
    for base, name, value in ((linear, "yarn_beta_fast", 8.0), (yarn_file, "attn_factor", 1.2)):
        file = plain._replace(fields={**base.fields, f"{own}{name}": value})
        with pytest.raises(GraphgenError, match=f"rope.scaling.{name} is not supported"):
            config_fields(file)


def test_a_file_of_an_embedding_model_gives_vectors_of_texts(tmp_path: Path) -> None:
    tied = {"model_type": "qwen3", "tie_word_embeddings": True}
    few, floats = checkpoints(tmp_path, "F32", said={"qwen3.pooling_type": 3}, **tied)
    built = gg.build_folder(few / "model.gguf", tmp_path / "out")
    feeds = {"input_ids": TOKENS, "attention_mask": np.ones_like(TOKENS)}
    feeds["attention_mask"][0, 5:] = 0
    whole = from_folder(floats, task="feature-extraction").model
    states, found = run_plain(gg.load(built.output / "onnx" / "model.onnx"), feeds)
    assert relative_rms(run_plain(whole, feeds)[0], states) <= 1e-6
    last = states[[0, 1], [4, 6]]
    assert relative_rms(last / np.linalg.norm(last, axis=1, keepdims=True), found) <= 1e-6
    file = open_gguf(few / "model.gguf")
    reranker = file._replace(fields={**file.fields, "qwen3.pooling_type": 4})
    with pytest.raises(GraphgenError, match=r"qwen3.pooling_type \(4\) is not supported"):
        config_fields(reranker)


def test_the_tokenizer_of_a_folder_is_compared_with_that_of_the_file(tmp_path: Path) -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*alphabet, "ab", "abc", "12", "Ġa"]
    fields = {"model": "gpt2", "tokens": tokens, "merges": ["a b", "ab c", "1 2", "Ġ a"]}
    found = {}
    for pre in ("gpt-2", "smollm", "unknown"):
        path = tmp_path / f"{pre}.gguf"
        named = {f"{OWN}{n}": x for n, x in {**fields, "pre": pre}.items()}
        gguf(path, {"general.architecture": "qwen2", **named}, {})
        found[pre] = open_gguf(path)
    made = tokenizer_files(found["gpt-2"])["tokenizer.json"]
    (tmp_path / "tokenizer.json").write_text(json.dumps(made))
    assert differences(found["gpt-2"], tmp_path) == []
    [cut] = differences(found["smollm"], tmp_path)
    assert "cuts a text into '1' where" in cut and "has '12'; the latter is used" in cut
    [unknown] = differences(found["unknown"], tmp_path)
    assert "tokenizer.ggml.pre 'unknown' was not compared" in unknown
    for turned, problem in ((1, None), (40, "the two belong to different models")):
        words = [*tokens[turned:][::-1], *tokens[:turned]] if problem else [*tokens]
        words[0] = words[0] if problem else "other"
        file = found["unknown"]._replace(fields={**found["unknown"].fields, f"{OWN}tokens": words})
        if problem is None:
            first, _ = differences(file, tmp_path)
            assert "1 of 260 tokens are others" in first and "token 0 is 'other'" in first
            continue
        with pytest.raises(GraphgenError, match=problem):
            differences(file, tmp_path)
    assert differences(found["gpt-2"], tmp_path / "absent") == []


def test_a_model_in_several_files(tmp_path: Path) -> None:
    fields = {"general.architecture": "llama", "split.count": 3}
    names = [tmp_path / f"m-{i + 1:05}-of-00003.gguf" for i in range(3)]
    for i, path in enumerate(names):
        data = np.full(3, i, "<f4").tobytes()
        gguf(
            path, fields | {"split.no": i, "split.tensors.count": 3}, {f"w{i}": ("F32", (3,), data)}
        )
    for path in names:
        found = open_gguf(path)
        assert found.path == path and found.fields["split.no"] == 0
        assert [found.tensors[f"w{i}"].read()[0] for i in range(3)] == [0.0, 1.0, 2.0]
    assert gguf_in(tmp_path) == names[0]
    whole = names[1].read_bytes()

    def refused(told: str) -> None:
        with pytest.raises(GraphgenError) as caught:
            open_gguf(names[0])
        assert told in str(caught.value) and "\n" not in str(caught.value)

    names[1].unlink()
    refused("m-00002-of-00003.gguf is missing; m-00001-of-00003.gguf is one of 3 files")
    names[1].write_bytes(names[2].read_bytes())
    refused("m-00002-of-00003.gguf is not part 2 of 3, as its name says")
    names[1].write_bytes(whole.replace(b"w1", b"w0"))
    refused("m-00002-of-00003.gguf: w0 is in another part")
    gguf(names[1], fields | {"split.no": 1}, {})
    refused("its parts have 2 tensors, not as many as it says")
    names[0].rename(tmp_path / "a.gguf")
    with pytest.raises(GraphgenError, match=r"one of 3 files, and its name does not end in"):
        open_gguf(tmp_path / "a.gguf")
    with pytest.raises(GraphgenError, match=r"has 3 \.gguf files"):
        gguf_in(tmp_path)


def test_a_string_that_is_not_utf_8_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    gguf(path, {"general.name": "Caf\u00e9 noir"}, {})
    assert open_gguf(path).fields["general.name"] == "Café noir"
    path.write_bytes(path.read_bytes().replace("é".encode(), b"\xe9 "))
    with pytest.raises(GraphgenError, match="not UTF-8, as the format wants it"):
        open_gguf(path)


@pytest.mark.parametrize(("kind", "at"), [("Q4_0", 0), ("Q4_K", 0), ("Q4_K", 2)])
def test_scales_that_are_no_numbers_are_refused(kind: str, at: int, tmp_path: Path) -> None:
    """Also those of the minima: a product that rounds what it reads makes numbers of NaN."""
    few, _ = checkpoints(tmp_path, kind, table=kind)
    tensor = open_gguf(few / "model.gguf").tensors["blk.0.ffn_up.weight"]
    data = bytearray((few / "model.gguf").read_bytes())
    for number in (b"\x00\x7c", b"\x01\x7e"):  # infinity, NaN
        data[tensor.offset + at : tensor.offset + at + 2] = number
        (few / "model.gguf").write_bytes(data)
        with pytest.raises(GraphgenError, match=r"up_proj\.weight has scales that are no finite"):
            keep_bits(from_folder(few).model, method="gguf")


def test_files_that_do_not_fit_are_refused_in_one_line(tmp_path: Path) -> None:
    few, _ = checkpoints(tmp_path, "Q8_0")
    path = few / "model.gguf"
    data = path.read_bytes()

    def refused(told: str, content: bytes, **fields: Any) -> None:
        path.write_bytes(content)
        (few / "config.json").write_text(json.dumps(FIELDS | fields))
        with pytest.raises(GraphgenError) as caught:
            from_folder(few)
        assert told in str(caught.value) and "\n" not in str(caught.value)

    for size in (0, 3, 10, 30, 100, 400, len(data) // 2, len(data) - 1):
        refused("its header is damaged", data[:size])
    at = data.index(b"tokenizer.ggml.tokens") + 21 + 8
    refused("its header is damaged", data[:at] + b"\xff" * 8 + data[at + 8 :])
    places = {}
    for name in (b"blk.0.ffn_up.weight", b"blk.0.ffn_down.weight"):
        at = data.index(name) + len(name) + 4 + 16 + 4
        places[name] = at, data[at : at + 8]
    (at, _), (_, other) = places.values()
    refused("share bytes", data[:at] + other + data[at + 8 :])
    odd = (int.from_bytes(other, "little") + 1).to_bytes(8, "little")
    refused("does not start at a multiple of 32", data[:at] + odd + data[at + 8 :])
    refused("not for gptj", data, model_type="gptj")
    refused("config.json for 'qwen2': they are", data, model_type="qwen2")
    refused("config.json has num_hidden_layers 2", data, num_hidden_layers=2)
    refused(
        "'blk.0.attn_x.weight' is not a tensor", data.replace(b"blk.0.attn_q.", b"blk.0.attn_x.")
    )
    number = data.index(b"blk.0.ffn_up.weight") + 19 + 4 + 16
    refused(
        "ffn_up.weight' [512, 256] is of type IQ2_XXS", data[:number] + b"\x10" + data[number + 1 :]
    )
    (few / "other.gguf").write_bytes(b"")
    refused("has 2 .gguf files", data)
