"""Artifacts for JavaScript: two stock sessions, arrays in and out, train as the trainer does."""

import importlib.util
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from small_models import relative_rms

import graphgen as gg
from graphgen import nn, safetensors
from graphgen.commands import main
from graphgen.errors import GraphgenError
from graphgen.train.web import read_web, write_web

PAGE = Path(__file__).parents[2] / "docs" / "web" / "make.py"


def loop(folder: Path, batches: list[dict[str, Any]], rate: float) -> tuple[list[float], Any]:
    """The losses and the last state: docs/web/train.mjs in Python."""
    state = {w.name: w.read() for w in safetensors.read_header(folder / "state.safetensors")}
    step, update, evaluate = (
        ort.InferenceSession(folder / f"{name}.onnx") for name in ("step", "update", "eval")
    )

    def run(session: Any, given: dict[str, Any]) -> dict[str, Any]:
        names = [value.name for value in session.get_outputs()]
        feeds = {value.name: given[value.name] for value in session.get_inputs()}
        return dict(zip(names, session.run(None, feeds), strict=True))

    losses = []
    for number, batch in enumerate(batches, 1):
        own = {"seed": np.int64(0), "step": np.int64(number - 1)}
        made = run(step, state | batch | {n: np.asarray(x) for n, x in own.items()})
        losses.append(float(made["loss"]))
        numbers = {"learning_rate": np.float32(rate), "update_number": np.int64(number)}
        after = run(update, state | made | {n: np.asarray(x) for n, x in numbers.items()})
        state = {name: after[f"{name}_next"] for name in state}
    return [*losses, float(run(evaluate, state | batches[-1])["loss"])], state


@pytest.mark.share(2)
@pytest.mark.parametrize("task", ["digits", "adapters"])
def test_the_losses_are_those_of_the_trainer(task: str, tmp_path: Path) -> None:
    """Also what comes back: the trainer goes on from it as from its own."""
    spec = importlib.util.spec_from_file_location("make_page", PAGE)
    assert spec is not None and spec.loader is not None
    page = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(page)
    batches = [*getattr(page, task)(tmp_path / "art")]
    write_web(tmp_path / "art", tmp_path / "web")
    losses, state = loop(tmp_path / "web", batches, page.RATE)
    schedule = gg.schedule.constant(page.RATE)
    trainer = gg.Trainer(tmp_path / "art", schedule=schedule, threads=1)
    wanted = [line["loss"] for line in trainer.fit(batches, progress=False)]
    wanted.append(trainer.evaluate(batches[-1:]))
    np.testing.assert_allclose(losses, wanted, rtol=0, atol=1e-5)
    assert losses[0] - losses[-1] > 0.3
    file = tmp_path / "state.safetensors"
    file.write_bytes(safetensors.to_bytes(state))
    read_web(file, tmp_path / "art", len(batches))
    again = gg.Trainer(tmp_path / "art", schedule=schedule, threads=1)
    assert again.step == len(batches)
    for name, array in again.parameters.items():
        assert relative_rms(trainer.parameters[name], array) < 1e-4, name
    if task == "adapters":
        assert gg.Adapter.load(tmp_path / "art").rank == 4
    write_web(tmp_path / "art", tmp_path / "web")  # goes on from there
    first = loop(tmp_path / "web", batches[:1], page.RATE)[0][1]
    assert first == pytest.approx(losses[-1], abs=0.5)
    state["odd"] = np.zeros(1, np.float32)
    for other, told in ((state, "odd is not of the artifacts"), ({}, "is missing, and the art")):
        file.write_bytes(safetensors.to_bytes(other))
        with pytest.raises(GraphgenError, match=told):
            read_web(file, tmp_path / "art", 1)


def test_sgd_and_what_is_refused(tmp_path: Path, capsys: Any) -> None:
    model = gg.build(nn.Linear(4, 3), x=gg.float32["batch", 4])
    path = gg.export(model, tmp_path / "m.onnx")
    words = ["artifacts", path, "-o", tmp_path / "art", "--loss", "mse", "--optimizer", "sgd"]
    web = tmp_path / "web"
    assert main([str(word) for word in [*words, "--web", web]]) == 0
    assert "web: eval.onnx, state.safetensors, step.onnx, update.onnx" in capsys.readouterr().out
    random = np.random.default_rng(0)
    x, y = (random.standard_normal((5, size)).astype(np.float32) for size in (4, 3))
    losses, state = loop(web, [{"x": x, "labels": y}] * 3, 0.1)
    assert {*state} == {"weight", "bias"} and losses[-1] < losses[0]
    read_web(web / "state.safetensors", tmp_path / "art", 0)
    group = gg.Group("bias", rate=0.5, weight_decay=0.1)
    settings: dict[str, Any] = {"momentum": 0.9, "nesterov": True, "groups": (group,)}
    sgd = gg.SGD(clip_norm=0.5, weight_decay=0.01, **settings)
    gg.artifacts(model, tmp_path / "sgd", loss="mse", optimizer=sgd, profile="stock")
    write_web(tmp_path / "sgd", tmp_path / "other")
    batches = [{"x": x, "labels": y}] * 4
    losses, state = loop(tmp_path / "other", batches, 0.1)
    assert {*state} == {"weight", "bias", "weight_m.moment", "bias_m.moment"}
    trainer = gg.Trainer(tmp_path / "sgd", schedule=gg.schedule.constant(0.1))
    wanted = [line["loss"] for line in trainer.fit(batches, progress=False)]
    np.testing.assert_allclose(losses[:4], wanted, rtol=1e-6)
    read_web(tmp_path / "other" / "state.safetensors", tmp_path / "sgd", 0)
    shutil.rmtree(tmp_path / "other")
    (web / "notes.txt").touch()
    with pytest.raises(GraphgenError, match="exists and holds something else"):
        write_web(tmp_path / "art", web)
    gg.artifacts(model, tmp_path / "art", loss="mse", accumulate=2)
    with pytest.raises(GraphgenError, match="sum the gradients of several batches"):
        write_web(tmp_path / "art", tmp_path / "other")
    assert not (tmp_path / "other").exists()
