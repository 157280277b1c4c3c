"""Typical mistakes: type checkers report each line that says `wrong`, and no other."""

import numpy as np

import graphgen as gg
from graphgen import nn, ops


class Block(nn.Module):
    """Some wrong options, and some wrong calls."""

    def __init__(self, features: int) -> None:
        self.linear = nn.Linear(features, features)
        self.wide = nn.Linear(features)  # wrong: what it makes of them is missing
        self.feed_forward = nn.FeedForward(features, 32, activation="swish")  # wrong: a word
        self.layer = nn.EncoderLayer(features, num_heads=2, placement="prenorm")  # wrong: a word
        self.stack = nn.Encoder(features, layers=2, num_heads=2, droput=0.1)  # wrong: a typo
        self.decoder = nn.Decoder(features, layers=2, hidden=64)  # wrong: num_heads is missing
        self.scale = nn.Parameter((features,), initialize="zeros")  # wrong: not an initializer
        self.norm = nn.BatchNorm(features)  # wrong: there is none

    def __call__(self, x: gg.Tensor) -> gg.Tensor:
        y = ops.softmax(x, dim=-1)  # wrong: torch's name of the axis
        y = ops.sofmax(x)  # wrong: a typo
        y = ops.transpose(x, 0, 2, 1)  # wrong: perm is an attribute
        y = self.linear(x, 3)  # wrong: too many arguments
        y = ops.gelu(x, approximate="erf")  # wrong: a word
        y = ops.softmax(x, axis="last")  # wrong: not a number
        y = ops.concat([x, y], dim=-1)  # wrong: torch's name of the axis
        y = ops.softmax_cross_entropy_loss(x, y, reduction="avg")  # wrong: a word
        z: gg.Tensor = ops.top_k(x, 2)  # wrong: two tensors
        y = ops.layer_norm("x")  # wrong: not a tensor
        y = x.softmax(-1)  # wrong: operators are functions
        y = x.view(-1)  # wrong: torch's method
        y = (2 * x).relu()  # wrong: the same of a result
        y = self.scale.log()  # wrong: the same of a parameter
        y = ops.cast(x, to=32)  # wrong: not a dtype
        y = (-x).exp()  # wrong: the same of a negative
        w: gg.Tensor = ops.cond(x, lambda: [x], lambda: [x])  # wrong: a tuple
        y = ops.cond(x, lambda: [x], [x])[0]  # wrong: not a function
        h, c = ops.lstm(x, x, x)  # wrong: three tensors
        h, c = ops.gru(x, x, x, direction="backward")  # wrong: a word
        y = ops.rnn(x, x)[0] + h + c  # wrong: r is missing
        return {"y": y + z + w}  # wrong: not what it says


def outputs(x: gg.Tensor) -> list[gg.Tensor]:
    """Right, but not what can be built."""
    return [x]


model = gg.build(Block(8), x=gg.float32["batch", 8], sed=3)  # wrong: a typo of seed
model = gg.build(Block(8), x=np.ones(8))  # wrong: not a dtype with sizes
model = gg.build(Block(8), x=gg.float16)  # wrong: without sizes
model = gg.build(Block(8), x=gg.float32[1.5])  # wrong: not a size
model = gg.build(outputs, x=gg.float32[8])  # wrong: a list of outputs
model = gg.build(ops.softmax, x=gg.float33[8])  # wrong: a typo
best = gg.optimize(model, taget="cpu")  # wrong: a typo
best = gg.optimize(model, target="tpu")  # wrong: a word
print(best.reprot)  # wrong: a typo
session = gg.Session(best, provder="cpu")  # wrong: a typo
session = gg.Session(best, provider="gpu")  # wrong: a word
session = gg.Session(gg.Trainer)  # wrong: not a model
logits = session(x=object())[0]  # wrong: not an array
print(logits.shap)  # wrong: a typo
words: dict[str, float] = session(x=[1.0])  # wrong: a list, in the order of the graph
gg.export("model.onnx", best)  # wrong: the other way round
gg.load(best)  # wrong: not a path
gg.artifacts(best, "artifacts", profile="onnxruntime")  # wrong: a word
gg.artifacts(best, "artifacts", optimizer="adamw")  # wrong: not an optimizer
gg.artifacts(best, "artifacts", optimiser=gg.SGD())  # wrong: a typo
gg.artifacts(best, "artifacts", weights=np.ones(3))  # wrong: not a dtype with sizes
trainer = gg.Trainer("artifacts", learning_rate=1e-3)  # wrong: the schedule says it
trainer.fit([{"x": np.ones(3)}], epochs=3)  # wrong: keras' name
trainer.fit([{"x": np.ones(3)}], resume=True, allow_changes=["rate"])  # wrong: a word
gg.compare(best, target="official")  # wrong: a word
gg.compare(best, kinds=["cumulated"])  # wrong: a word
gg.compare(best).row("pipeline")  # wrong: a row is an item
gg.diff(best)  # wrong: one model
gg.diff(best, "old.onnx", canonic=True)  # wrong: a typo
gg.explain(best, "fuse_attention", 3)  # wrong: not a place
gg.explain(best, "fuse_attention", tagret="cpu")  # wrong: a typo
gg.bisect(best, 1e-5)  # wrong: the tolerance is named
gg.bisect(best, tolerance="1e-5")  # wrong: not a number
gg.assert_graph(best, attention="2")  # wrong: not a number
gg.assert_graph(gg.Trainer, attention=2)  # wrong: not a model
gg.generate(best, "Hi", max_tokens=3)  # wrong: not an option
gg.generate(best, "Hi", temperature="hot")  # wrong: not a number
gg.AdamW(lr=1e-3)  # wrong: the schedule says it
gg.schedule.cosine(1e-3, steps=3)  # wrong: warmup is missing
