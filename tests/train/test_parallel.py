"""Data-parallel training: by MPI, and what needs none of it by threads."""

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from test_train import Root, batches, decoder, fit, trainer

import graphgen as gg
from graphgen import commands, nn
from graphgen.errors import GraphgenError
from graphgen.export.artifacts import artifacts
from graphgen.export.checkpoint import Checkpoint
from graphgen.export.optimizers import SGD
from graphgen.train import parallel
from graphgen.train.callbacks import Callback


class Threads(parallel.Processes):
    """Threads in place of processes."""

    def __init__(self, rank, size, shared):
        self.rank, self.size, self._shared = rank, size, shared

    def reduce(self, gradients):
        barrier, arrays = self._shared
        arrays[self.rank] = gradients
        barrier.wait(30)
        total = sum(arrays[rank] for rank in range(self.size))
        barrier.wait(30)
        gradients[...] = total


def together(size, work):
    """What `work` returns or raises in each of `size` threads."""
    shared, results = (threading.Barrier(size), {}), {}

    def run(rank):
        try:
            results[rank] = work(Threads(rank, size, shared))
        except GraphgenError as error:
            shared[0].abort()
            results[rank] = error
        except threading.BrokenBarrierError as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    return [results[rank] for rank in range(size)]


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    path = tmp_path_factory.mktemp("plain") / "art"
    artifacts(decoder(), path, optimizer=SGD(clip_norm=0.5))
    return path


@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_losses_are_those_of_one_process(plain, tmp_path, accumulate):
    data = batches(5, shape=(7, 6)) + batches(1, shape=(2, 6))  # of which one process gets nothing
    data[1]["labels"][:5] = -100

    def run(processes, name):
        one = trainer(plain, processes=processes, accumulate=accumulate)
        options = {"evaluate": data[:2], "evaluate_every": 1, "checkpoint": tmp_path / name}
        return fit(one, data, steps=6, **options), one.parameters

    wanted, parameters = run(None, "one")
    results = together(3, lambda processes: run(processes, "three"))
    for history, found in results:
        assert history == results[0][0]
        for a, b in zip(history, wanted, strict=True):
            assert a == pytest.approx(b, rel=1e-5)
        for name, array in found.items():
            assert array.tobytes() == results[0][1][name].tobytes()
            np.testing.assert_allclose(array, parameters[name], rtol=1e-4, atol=1e-6)
    kept = [Checkpoint.load(tmp_path / name / "checkpoint") for name in ("one", "three")]
    assert kept[0].properties == kept[1].properties


def test_a_callback_of_the_first_process_ends_the_run_in_all(plain):
    class Enough(Callback):
        def step(self, trainer, metrics):
            return trainer.step == 2

    def run(processes):
        return fit(trainer(plain, processes=processes), batches(4), steps=6, callbacks=[Enough()])

    assert [len(found) for found in together(3, run)] == [2, 2, 2]


def test_all_processes_lose_patience_together_where_the_best_state_is_gone(plain, tmp_path):
    def run(processes, steps, resume=False):
        still = trainer(plain, processes=processes, schedule=lambda step: 0.0)
        options = {"evaluate": batches(1, shape=(3, 6)), "evaluate_every": 1, "patience": 2}
        options |= {"checkpoint": tmp_path / "run", "resume": resume}
        return fit(still, batches(4, shape=(3, 6)), steps=steps, **options)

    together(3, lambda processes: run(processes, 2))
    (tmp_path / "run" / "best" / "checkpoint").unlink()
    found = together(3, lambda processes: run(processes, 9, resume=True))
    assert [len(history) for history in found] == [5, 5, 5]  # the third is the best again


def test_samples_are_divided_evenly():
    for count in range(9):
        shares = [Threads(rank, 3, None).share(np.arange(count)) for rank in range(3)]
        assert np.concatenate(shares).tolist() == list(range(count))
        assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_each_process_has_dropout_of_its_own(tmp_path):
    artifacts(decoder(dropout=0.5), tmp_path / "art")
    [batch] = batches(1, shape=(1, 6))
    twice = {name: np.concatenate([a, a]) for name, a in batch.items()}
    still = {"schedule": lambda t: 0.0}
    one = fit(trainer(tmp_path / "art", **still), [batch] * 2)
    [two, _] = together(
        2, lambda processes: fit(trainer(tmp_path / "art", processes=processes, **still), [twice])
    )
    mean = (one[0]["loss"] + one[1]["loss"]) / 2
    assert two[0]["loss"] == pytest.approx(mean, rel=1e-6)
    assert one[0]["loss"] != one[1]["loss"]


def test_the_process_with_the_cause_names_it(plain, tmp_path):
    data = batches(1, shape=(4, 6))
    data[0]["labels"][3] = 99  # of the second process
    first, second = together(2, lambda p: fit(trainer(plain, processes=p), data))
    assert isinstance(first, threading.BrokenBarrierError)
    assert "labels go from 0 to 99" in str(second)
    artifacts(gg.build(Root(), x=gg.float32["n", 3]), tmp_path / "art", loss="mse")
    weight = trainer(tmp_path / "art").parameters["linear.weight"]
    x = np.zeros((4, 3), np.float32)  # where the slope of the root is infinite, not the loss
    x[:2] = np.linalg.lstsq(weight.T, np.ones(2), rcond=None)[0]
    data = [{"x": x, "labels": np.ones((4, 2), np.float32)}]
    first, second = together(2, lambda p: fit(trainer(tmp_path / "art", processes=p), data))
    assert isinstance(first, threading.BrokenBarrierError), first
    assert "made by Div" in str(second)


def test_a_fixed_number_of_samples_cannot_be_divided(tmp_path):
    artifacts(gg.build(nn.Linear(3, 2), x=gg.float32[4, 3]), tmp_path / "art", loss="mse")
    data = [{"x": np.ones((4, 3), np.float32), "labels": np.ones((4, 2), np.float32)}]
    results = together(2, lambda p: fit(trainer(tmp_path / "art", processes=p), data))
    assert any("takes 4 samples, which 2 processes cannot divide" in str(r) for r in results)


def test_mpiexec_without_mpi4py_is_one_error(monkeypatch):
    monkeypatch.setenv("PMI_SIZE", "2")
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(GraphgenError, match=r"mpiexec started 2 processes, but mpi4py does not"):
        parallel.processes()
    monkeypatch.setenv("PMI_SIZE", "1")
    assert parallel.processes().size == 1


MPIEXEC = next(
    filter(None, (shutil.which("mpiexec", path=p) for p in (Path(sys.executable).parent, None))),
    None,
)
needs_mpi = pytest.mark.skipif(
    MPIEXEC is None or importlib.util.find_spec("mpi4py") is None,
    reason='mpiexec or mpi4py is not installed: pip install "graphgen-onnx[mpi]"',
)


def command(run, *more, data="data.npz"):
    """`graphgen train` over 50 batches of 4, saved at every step."""
    options = "--batch 4 --steps 50 --lr 0.01 --save-every 1 --threads 1 --checkpoint"
    return ["train", "art", "--data", data, *options.split(), run, *more]


def mpi(command):
    line = [MPIEXEC, "-n", "2", sys.executable, "-m", "graphgen", *command]
    return subprocess.Popen(line, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


@pytest.fixture(scope="module")
def made(tmp_path_factory, plain):
    """A folder with artifacts, data, and `two`, a run of two processes."""
    folder = tmp_path_factory.mktemp("mpi")
    shutil.copytree(plain, folder / "art")
    data = batches(1, shape=(30, 6))[0]
    np.savez(folder / "data.npz", **data)
    bad = {**data, "labels": np.where(data["ids"] == 3, 99, data["labels"])}
    np.savez(folder / "bad.npz", **bad)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        process = mpi(command("two"))
        out, err = process.communicate(timeout=120)
    assert (process.returncode, err, out.count("\n")) == (0, "", 1)
    return folder


def metrics(run):
    return [json.loads(line) for line in Path(run, "metrics.jsonl").read_text().splitlines()]


@pytest.mark.exhaustive
@needs_mpi
def test_two_processes_by_mpi(made, monkeypatch):
    monkeypatch.chdir(made)
    assert commands.main(command("one")) == 0
    for a, b in zip(metrics("two"), metrics("one"), strict=True):
        assert a == pytest.approx(b, rel=1e-4), a["step"]
    failed = mpi(command("bad", data="bad.npz"))
    _, err = failed.communicate(timeout=120)
    assert failed.returncode == 2
    assert "graphgen: --data bad.npz: labels go from" in err


def children(process):
    """The training processes below an mpiexec, by their command lines."""
    found, below = [], {process.pid}
    for path in sorted(Path("/proc").glob("[0-9]*"), key=lambda path: int(path.name)):
        try:
            status = (path / "stat").read_text().rpartition(")")[2].split()
            words = (path / "cmdline").read_bytes().split(b"\0")
        except OSError:  # it has ended
            continue
        if int(status[1]) in below:
            below.add(int(path.name))
            found += [int(path.name)] if b"graphgen" in words and words[1] == b"-m" else []
    return found


@needs_mpi
@pytest.mark.skipif(not Path("/proc").is_dir(), reason="there is no /proc to find processes in")
def test_a_dead_process_ends_the_job_and_the_run_goes_on(made, monkeypatch):
    monkeypatch.chdir(made)
    process = mpi(command("run"))
    while process.poll() is None and not (
        Path("run/metrics.jsonl").exists() and len(Path("run/metrics.jsonl").read_bytes()) > 1000
    ):
        time.sleep(1e-3)
    victims = children(process)
    assert len(victims) == 2
    os.kill(victims[np.random.default_rng().integers(2)], signal.SIGKILL)
    out, err = process.communicate(timeout=60)
    assert process.returncode != 0
    assert "Killed" in out + err
    assert 1 <= Checkpoint.load("run/checkpoint").optimizer.step < 50
    process = mpi(command("run", "--resume"))
    assert process.communicate(timeout=120)[1] == ""
    assert process.returncode == 0
    for file in ("checkpoint", "metrics.jsonl"):
        assert Path("run", file).read_bytes() == Path("two", file).read_bytes(), file
