"""Small files of every kind that a command reads."""

import json
from pathlib import Path

import numpy as np
import onnx
from onnx import parser
from random_checkpoints import random_checkpoint
from small_models import Block

import graphgen as gg

HEAD = '<ir_version: 9, opset_import: ["" : 18, "mine" : 1]>'
TEXTS = {
    "control": """
main (float[n,4] x, bool flag) => (float[n,4] y, float[n,4] z)
   <int64 trips = {3}, bool go = {1}> {
   h = If (flag) <then_branch = one () => (float[n,4] a) { a = Exp (x) },
      else_branch = two () => (float[n,4] b) {
         c = Constant <value = float[4] {1, 2, 3, 4}> ()
         b = Add (x, c) }>
   y = Loop (trips, go, h) <body = step (int64 i, bool on, float[n,4] s)
   => (bool out, float[n,4] t) {
      out = Identity (on)
      t = Tanh (s) }>
   z = Scan <num_scan_inputs = 1, body = row (float[4] p) => (float[4] q) { q = Neg (p) }> (x)
}""",
    "functions": """
main (float[n,4] x) => (float[n,4] y) { h = mine.F <k = 1> (x)
   y = mine.G (h) }
<domain: "mine", opset_import: ["" : 18]> F <k> (a) => (b) { b = Softmax <axis: int = @k> (a) }
<domain: "mine", opset_import: ["" : 18, "mine" : 1]>
G (a) => (b) { c = mine.F <k = -1> (a)
   b = Mul (c, a) }""",
    "integers": """
main (float[n,4] x, int64[n] ids)
   => (float[n,2] y, float[n,4] e, int64 size)
   <int8[4,2] w = {1, -2, 3, 4, 5, -6, 7, 8}, float s = {0.05}, int8 z = {0}, int64 one = {1},
    float[3,4] table = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12}, int64[2] sizes = {-1, 2}> {
   q, qs, qz = DynamicQuantizeLinear (x)
   m = MatMulInteger (q, w, qz)
   f = Cast <to = 1> (m)
   g = Mul (f, qs)
   d = DequantizeLinear (w, s, z)
   k = MatMul (x, d)
   t = Add (g, k)
   y = Reshape (t, sizes)
   e = Gather (table, ids)
   shape = Shape (x)
   size = Gather (shape, one)
}""",
    "images": """
main (float[n,2,8,8] x) => (float[n,4] y) <float[4,2,3,3] w = {WEIGHT},
    float[4] b = {0, 1, 2, 3}> {
   c = Conv <pads = [1, 1, 1, 1], strides = [2, 2]> (x, w, b)
   r = Relu (c)
   p = MaxPool <kernel_shape = [2, 2], strides = [2, 2]> (r)
   g = GlobalAveragePool (p)
   s = Flatten (g)
   y = LogSoftmax <axis = -1> (s)
}""".replace("WEIGHT", ", ".join(str((i * 7 % 11 - 5) / 8) for i in range(72))),
}
SIZES = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
}
LLAMA = {"num_key_value_heads": 1, "bos_token_id": 1, "eos_token_id": 9}
BERT = {"id2label": {"0": "bad", "1": "good"}}


def write_originals(folder: Path) -> None:
    """A folder of models and data, and two checkpoints."""
    models, random = folder / "models", np.random.default_rng(0)
    models.mkdir()
    block = gg.build(
        Block(8, num_heads=2, causal=True), primitives=True, x=gg.float32["batch", "seq", 8]
    )
    gg.export(block, models / "block.onnx")
    fused = gg.build(Block(8, num_heads=2, norm="rms"), x=gg.float32["batch", "seq", 8])
    gg.export(fused, models / "fused.onnx")
    for name, text in TEXTS.items():
        onnx.save(parser.parse_model(HEAD + text), models / f"{name}.onnx")
    outside = {"save_as_external_data": True, "size_threshold": 0, "location": "weights"}
    onnx.save(onnx.load(models / "fused.onnx"), models / "outside.onnx", **outside)
    x = random.standard_normal((4, 3, 8), np.float32)
    for name in ("block", "fused", "outside"):
        np.savez(models / f"{name}.npz", x=x)
    rows = {"x": x[0, :, :4]}
    np.savez(models / "functions.npz", **rows)
    np.savez(models / "control.npz", **rows, flag=np.array(True))
    np.savez(models / "integers.npz", **rows, ids=np.arange(3))
    np.savez(models / "images.npz", x=random.standard_normal((2, 2, 8, 8), np.float32))
    np.savez(folder / "data.npz", x=x, labels=-x)
    lines = [json.dumps({"x": a.tolist(), "labels": (-a).tolist()}) for a in x.round(2)]
    (folder / "data.jsonl").write_text("\n".join(lines) + "\n")
    rows = [{"id": i, "text": f"w{i} w{i + 1} w3"} for i in range(5)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, fields in (("llama", LLAMA), ("bert", BERT)):
        task = "text-classification" if name == "bert" else None
        checkpoint = random_checkpoint(folder / name, {"model_type": name, **SIZES, **fields}, task)
        _write_tokenizer(checkpoint)
        (folder / name / "text.txt").write_text(" ".join(f"w{i * 7 % 40}" for i in range(300)))


MADE = [
    ["build", "llama", "-o", "llama-built"],
    ["build", "bert", "-o", "bert-built", "--task", "text-classification"],
    ["artifacts", "models/block.onnx", "-o", "art", "--loss", "mse", "--profile", "stock"],
    ["train", "art", "--data", "data.npz", "--steps", "2", "--batch", "2", "--schedule", "constant",
     "--checkpoint", "run"],
]  # fmt: skip
"""The commands that make the other originals."""


def _write_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(40)}, "w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"model_max_length": 64}')
