"""Layers and their training against torch's own, from the same weights and batches."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_models import ROUNDING, relative_rms, run_plain

import graphgen as gg
from graphgen import nn

torch = pytest.importorskip("torch", reason="needs torch: make parity")
pytestmark = pytest.mark.parity

D, HEADS, HIDDEN = 16, 4, 32
RNG = np.random.default_rng(11)


def weights_of(layer: Any, *, decoder: bool) -> dict[str, Any]:
    """A torch layer's parameters under our names; ours are (in, out), torch's (out, in)."""
    state = {name: p.detach().numpy() for name, p in layer.named_parameters()}
    found: dict[str, Any] = {}
    attentions = {"self_attn": "attention"} | (
        {"multihead_attn": "cross_attention"} if decoder else {}
    )
    for theirs, ours in attentions.items():
        for i, part in enumerate(("query", "key", "value")):
            rows = slice(i * D, (i + 1) * D)
            found[f"{ours}.{part}.weight"] = state[f"{theirs}.in_proj_weight"][rows].T.copy()
            found[f"{ours}.{part}.bias"] = state[f"{theirs}.in_proj_bias"][rows].copy()
        found[f"{ours}.output.weight"] = state[f"{theirs}.out_proj.weight"].T.copy()
        found[f"{ours}.output.bias"] = state[f"{theirs}.out_proj.bias"].copy()
    for theirs, ours in (("linear1", "up"), ("linear2", "down")):
        found[f"feed_forward.{ours}.weight"] = state[f"{theirs}.weight"].T.copy()
        found[f"feed_forward.{ours}.bias"] = state[f"{theirs}.bias"].copy()
    for i in range(1, 4 if decoder else 3):
        found[f"residual{i}.norm.weight"] = state[f"norm{i}.weight"].copy()
        found[f"residual{i}.norm.bias"] = state[f"norm{i}.bias"].copy()
    return found


def vary(layer: Any) -> Any:
    """Weights of high variance, norms included."""
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.5)
    return layer.eval()


def torch_layer(kind: Any, placement: str, activation: str) -> Any:
    return vary(
        kind(
            D, HEADS, HIDDEN, dropout=0.0, activation=activation, batch_first=True,
            norm_first=placement == "pre",
        )
    )  # fmt: skip


@pytest.mark.parametrize("placement", ["post", "pre"])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_encoder_layer_with_padding(placement: str, activation: str) -> None:
    theirs = torch_layer(torch.nn.TransformerEncoderLayer, placement, activation)
    ours = nn.EncoderLayer(
        D, num_heads=HEADS, hidden=HIDDEN, activation=activation, placement=placement
    )
    model = gg.build(
        ours, weights=weights_of(theirs, decoder=False), primitives=True,
        x=gg.float32["b", "s", D], mask=gg.bool_["b", "s"],
    )  # fmt: skip
    x, mask = RNG.standard_normal((3, 7, D)).astype(np.float32), np.ones((3, 7), bool)
    mask[0, 4:] = mask[1, :2] = False
    with torch.no_grad():
        wanted = theirs(torch.tensor(x), src_key_padding_mask=torch.tensor(~mask)).numpy()
    best = gg.optimize(model, verify=True)
    assert best.report.shortfalls() == []
    for graph in (model, best.model):
        got = run_plain(graph, {"x": x, "mask": mask})[0]
        assert relative_rms(wanted[mask], got[mask]) < ROUNDING


@pytest.mark.parametrize("placement", ["post", "pre"])
def test_decoder_layer(placement: str) -> None:
    theirs = torch_layer(torch.nn.TransformerDecoderLayer, placement, "relu")
    ours = nn.DecoderLayer(
        D, num_heads=HEADS, hidden=HIDDEN, activation="relu", placement=placement
    )
    model = gg.build(
        ours, weights=weights_of(theirs, decoder=True), primitives=True,
        x=gg.float32["b", "t", D], memory=gg.float32["b", "s", D], memory_mask=gg.bool_["b", "s"],
    )  # fmt: skip
    x, memory = (RNG.standard_normal((2, n, D)).astype(np.float32) for n in (5, 7))
    mask = np.ones((2, 7), bool)
    mask[1, 3:] = False
    causal = torch.nn.Transformer.generate_square_subsequent_mask(5)
    with torch.no_grad():
        wanted = theirs(
            torch.tensor(x), torch.tensor(memory), tgt_mask=causal, tgt_is_causal=True,
            memory_key_padding_mask=torch.tensor(~mask),
        ).numpy()  # fmt: skip
    best = gg.optimize(model, verify=True)
    assert best.report.shortfalls() == []
    for graph in (model, best.model):
        got = run_plain(graph, {"x": x, "memory": memory, "memory_mask": mask})[0]
        assert relative_rms(wanted, got) < ROUNDING


@pytest.mark.parametrize(
    ("placement", "decay", "named"), [("post", 0.0, "Adam"), ("pre", 0.1, "AdamW")]
)
def test_twenty_steps_of_adam(placement: str, decay: float, named: str, tmp_path: Path) -> None:
    theirs = torch_layer(torch.nn.TransformerEncoderLayer, placement, "gelu").train()
    ours = nn.EncoderLayer(D, num_heads=HEADS, hidden=HIDDEN, placement=placement)
    model = gg.build(ours, weights=weights_of(theirs, decoder=False), x=gg.float32["b", "s", D])
    gg.artifacts(model, tmp_path / "art", loss="mse", optimizer=gg.AdamW(weight_decay=decay))
    batches = [
        {
            "x": RNG.standard_normal((4, 6, D), np.float32),
            "labels": RNG.standard_normal((4, 6, D), np.float32),
        }
        for _ in range(20)
    ]
    trainer = gg.Trainer(tmp_path / "art", schedule=gg.schedule.constant(1e-2))
    losses = [entry["loss"] for entry in trainer.fit(batches, progress=False)]
    make = getattr(torch.optim, named)
    optimizer = make(theirs.parameters(), lr=1e-2, weight_decay=decay)
    wanted = []
    for batch in batches:
        loss = torch.nn.functional.mse_loss(
            theirs(torch.tensor(batch["x"])), torch.tensor(batch["labels"])
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        wanted.append(loss.item())
    assert np.allclose(losses, wanted, rtol=1e-4)
    assert wanted[-1] < wanted[0]
