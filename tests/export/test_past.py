"""What is trained of a decoder has no cache: nothing stands for the tokens before a row."""

from pathlib import Path

import numpy as np
from published_decoders import checkpoint, ids, no_past
from small_models import relative_rms

import graphgen as gg
from graphgen.models.published import from_folder


def test_states_begin_with_zeros(tmp_path: Path) -> None:
    """A decoder with states is trained by its rows and labels alone."""
    model = from_folder(checkpoint(tmp_path, "lfm2")).model
    gg.artifacts(model, tmp_path / "art")
    session = gg.TrainingSession(tmp_path / "art")
    assert [*session.inputs] == ["input_ids", "attention_mask", "position_ids", "labels"]
    tokens = ids()
    rows, length = tokens.shape
    feeds = {
        "input_ids": tokens,
        "attention_mask": np.ones_like(tokens),
        "position_ids": np.broadcast_to(np.arange(length), tokens.shape).copy(),
    }
    labels = np.concatenate([tokens[:, 1:], np.full((rows, 1), -100)], 1)
    plain = gg.Session(gg.optimize(model).model, optimize=False)
    empty = no_past({name: kind.dims or () for name, kind in plain.inputs.items()}, rows)
    logits = plain(feeds | empty)[0][:, :-1].astype(np.float64)
    chances = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    wanted = -np.take_along_axis(chances, labels[:, :-1, None], 2).mean()
    loss = session.eval_step({**feeds, "labels": labels})
    assert relative_rms(np.array([wanted]), np.array([loss])) < 1e-6
