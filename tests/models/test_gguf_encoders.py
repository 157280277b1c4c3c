"""GGUF files of encoders of text, and of WordPiece's vocabulary."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf_files import gguf
from published_encoders import fields as encoder
from random_checkpoints import random_checkpoint
from small_models import relative_rms, run_plain
from tokenizers import BertWordPieceTokenizer, Tokenizer

import graphgen as gg
from graphgen.errors import GraphgenError
from graphgen.models.published import from_folder
from graphgen.models.published.gguf import open_gguf
from graphgen.models.published.gguf_names import config_fields
from graphgen.models.published.gguf_tokenizer import tokenizer_files
from graphgen.safetensors import read_header

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "[unused0]", "un", "##aff", "##able", "aff"]
WORDS += [*"abcdefghi", "##a", "##b", "é", "##e", "日", ".", ",", "1", "##1", "##é", "-", "!"]
WORDS += ["'", "the", "##s", "##n"]
OWN = "tokenizer.ggml."
OUTSIDE = {
    "embeddings.word_embeddings": "token_embd",
    "embeddings.position_embeddings": "position_embd",
    "embeddings.token_type_embeddings": "token_types",
    "embeddings.LayerNorm": "token_embd_norm",
    "emb_ln": "token_embd_norm",
}
INSIDE = {
    **{f"attention.self.{name}": f"attn_{name[0]}" for name in ("query", "key", "value")},
    "attention.output.dense": "attn_output",
    "attention.output.LayerNorm": "attn_output_norm",
    "intermediate.dense": "ffn_up",
    "output.dense": "ffn_down",
    "output.LayerNorm": "layer_output_norm",
    "attn.Wqkv": "attn_qkv",
    "attn.out_proj": "attn_output",
    "norm1": "attn_output_norm",
    "norm2": "layer_output_norm",
    "mlp.fc11": "ffn_up",
    "mlp.fc12": "ffn_gate",
    "mlp.fc2": "ffn_down",
}


def vocabulary(words: list[str]) -> dict[str, Any]:
    """The fields of a vocabulary: words begin with a mark, and their further pieces do not."""
    tokens, types = [], []
    for word in words:
        control = word.startswith("[") and "unused" not in word
        types.append(3 if control else 1)
        more = word.startswith("##")
        tokens.append(word if control else word[2:] if more else f"\u2581{word}")
    own = {"model": "bert", "pre": "default", "tokens": tokens, "token_type": types}
    own |= {"cls_token_id": 2, "seperator_token_id": 3, "unknown_token_id": 1}
    return {f"{OWN}{name}": x for name, x in own.items()}


def write(path: Path, kind: str, given: dict[str, Any], weights: dict[str, Any]) -> None:
    """A file of an encoder; RoBERTa's have no rows for padding and what is before it."""
    arch, before = {"nomic_bert": "nomic-bert"}.get(kind, "bert"), 2 * (kind == "xlm-roberta")
    own = {
        "block_count": given["num_hidden_layers"],
        "context_length": given["max_position_embeddings"] - before,
        "embedding_length": given["hidden_size"],
        "feed_forward_length": given["intermediate_size"],
        "attention.head_count": given["num_attention_heads"],
        "attention.layer_norm_epsilon": 1e-12,
        "attention.causal": False,
        "pooling_type": 1,
    }
    own |= {"rope.freq_base": 1000.0} if kind == "nomic_bert" else {}
    tensors = {}
    for name, w in weights.items():
        base, _, last = name.removeprefix(f"{kind.removeprefix('xlm-')}.").rpartition(".")
        parts = base.split(".")
        number = next((part for part in parts if part.isdigit()), None)
        if number is None:
            named = OUTSIDE[base]
        else:
            named = f"blk.{number}.{INSIDE[base.partition(f'.{number}.')[2]]}"
        w = w[before:] if named == "position_embd" else w
        tensors[f"{named}.{last}"] = ("F32", w.shape, w.astype("<f4").tobytes())
    fields = {f"{arch}.{name}": x for name, x in own.items()} | vocabulary(WORDS)
    gguf(path, {"general.architecture": arch, **fields}, tensors)


@pytest.mark.parametrize("kind", ["bert", "nomic_bert", "xlm-roberta"])
def test_a_file_gives_the_vectors_of_its_checkpoint(kind: str, tmp_path: Path) -> None:
    given = encoder("nomic_bert") | {"model_type": kind, "vocab_size": len(WORDS)}
    given |= {"type_vocab_size": 1, "layer_norm_eps": 1e-12} if "roberta" in kind else {}
    task = "feature-extraction"
    floats = random_checkpoint(tmp_path / "floats", given, task)
    weights = {w.name: w.read() for w in read_header(floats / "model.safetensors")}
    write(tmp_path / "model.gguf", kind, given, weights)
    built = gg.build_folder(tmp_path / "model.gguf", tmp_path / "out")
    ids = np.random.default_rng(0).integers(2, len(WORDS), (2, 7))
    ids[0, 5:] = 1
    feeds = {"input_ids": ids, "attention_mask": np.ones_like(ids)}
    if "roberta" not in kind:
        feeds["token_type_ids"] = np.zeros_like(ids)
    feeds["attention_mask"][0, 5:] = 0
    whole = run_plain(from_folder(floats, task=task).model, feeds)[0]
    states, found = run_plain(gg.load(built.output / "onnx" / "model.onnx"), feeds)
    assert relative_rms(whole[1], states[1]) <= 1e-6
    mean = np.stack([states[0, :5].mean(0), states[1].mean(0)])
    assert relative_rms(mean / np.linalg.norm(mean, axis=1, keepdims=True), found) <= 1e-6
    file = open_gguf(tmp_path / "model.gguf")
    arch = file.fields["general.architecture"]
    causal = file._replace(fields={**file.fields, f"{arch}.attention.causal": True})
    with pytest.raises(GraphgenError, match=r"attention.causal \(True\) is not supported"):
        config_fields(causal)


def test_words_are_cut_as_by_the_tokenizer_of_the_vocabulary(tmp_path: Path) -> None:
    wanted = BertWordPieceTokenizer(vocab={word: i for i, word in enumerate(WORDS)}, lowercase=True)
    gguf(tmp_path / "a.gguf", vocabulary(WORDS), {})
    files = tokenizer_files(open_gguf(tmp_path / "a.gguf"))
    made = Tokenizer.from_str(json.dumps(files["tokenizer.json"]))
    random = np.random.default_rng(0)
    pieces = [
        "Unaffable",
        "the",
        "ÉÉ",
        "e\u0301",
        "日日",
        " ",
        "\t",
        "\u200b",
        ".",
        "[SEP]",
        "[MASK]",
    ]
    pieces += [
        "a1",
        "-",
        "ab" * 60,
        "\ufffd",
        "'s",
        "\u3000",
        "ﬁ",
        "İ",
        "[unused0]",
        "\n",
        "!?",
        "",
    ]
    for _ in range(200):
        text = "".join(random.choice(pieces, random.integers(0, 9)))
        assert made.encode(text).ids == wanted.encode(text).ids, text
        both = made.encode(text, "the a"), wanted.encode(text, "the a")
        assert both[0].ids == both[1].ids and both[0].type_ids == both[1].type_ids
    gguf(tmp_path / "b.gguf", vocabulary([*WORDS, "The"]), {})
    with pytest.raises(GraphgenError, match=r"has the word 'The': whether texts keep"):
        tokenizer_files(open_gguf(tmp_path / "b.gguf"))
    gguf(tmp_path / "c.gguf", vocabulary(WORDS) | {f"{OWN}cls_token_id": 999}, {})
    with pytest.raises(GraphgenError, match=r"has no token for \[CLS\]"):
        tokenizer_files(open_gguf(tmp_path / "c.gguf"))


def test_pieces_with_scores_are_cut_as_likely_as_can_be(tmp_path: Path) -> None:
    pieces = [
        "<s>",
        "<pad>",
        "</s>",
        "<unk>",
        "\u2581",
        "\u2581a",
        "b",
        "ab",
        "\u2581ab",
        "c",
        "bc",
    ]
    scores = [0.0, 0.0, 0.0, 0.0, -2.0, -2.5, -3.0, -3.25, -5.0, -3.0, -3.5]
    own = {"model": "t5", "pre": "default", "tokens": pieces, "scores": scores}
    own |= {"token_type": [3, 3, 3, 2] + [1] * 7, "unknown_token_id": 3, "bos_token_id": 0}
    own |= {"eos_token_id": 2, "add_bos_token": True, "add_eos_token": True}
    own |= {"add_space_prefix": True, "remove_extra_whitespaces": True}

    def read(arch: str, **more: Any) -> dict[str, Any]:
        fields = {f"{OWN}{n}": x for n, x in (own | more).items() if x is not None}
        gguf(tmp_path / "a.gguf", {"general.architecture": arch, **fields}, {})
        return tokenizer_files(open_gguf(tmp_path / "a.gguf"))

    made = Tokenizer.from_str(json.dumps(read("bert")["tokenizer.json"]))
    # "abc" is -2.5 - 3.5 as a + bc, -5 - 3 as ab + c, and -2 - 3.25 - 3 as mark + ab + c.
    assert made.encode(" abc  b ").tokens == ["<s>", "\u2581a", "bc", "\u2581", "b", "</s>"]
    assert made.encode("x").ids == [0, 4, 3, 2]
    plain = read("t5", add_bos_token=None, add_eos_token=None)["tokenizer.json"]
    assert Tokenizer.from_str(json.dumps(plain)).encode("b").tokens == ["\u2581", "b", "</s>"]
    for arch, more, told in (
        ("bert", {"add_bos_token": None}, "does not say which tokens are put around texts"),
        ("t5", {"add_space_prefix": False}, r"add_space_prefix is not true"),
        ("t5", {"unknown_token_id": None}, "has no unknown token"),
    ):
        with pytest.raises(GraphgenError, match=told):
            read(arch, **more)
