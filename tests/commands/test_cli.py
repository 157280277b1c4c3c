"""The command line: the main job, the documents it writes, its exit codes."""

import ast
import io
import json
import re
import shlex
import shutil
import signal
import string
import subprocess
import sys
import warnings
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stderr, redirect_stdout
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import get_args

import jsonschema
import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import helper

import graphgen as gg
from graphgen import commands
from graphgen.batch import ENGINES
from graphgen.batch.results import COLUMNS
from graphgen.bits import BlockSize
from graphgen.errors import GateError, GraphgenError
from graphgen.export.folders import Layout
from graphgen.export.optimizers import read_optimizer
from graphgen.export.precision import DTYPES
from graphgen.export.prepared import Profile
from graphgen.graph import parameters
from graphgen.laboratory.rows import KINDS
from graphgen.passes.training.packed import Base
from graphgen.passes.training.recompute import Recompute
from graphgen.quantize import THRESHOLDS
from graphgen.quantize.sites import AccuracyLevel
from graphgen.targets import Device
from graphgen.train import Change
from graphgen.train.callbacks import Log

DOCS = Path(__file__).parents[2] / "docs"
COMMANDS = [*map(commands.name_of, commands.COMMANDS)]
SMALL = shlex.split("--layers 2 --features 32 --num-heads 4 --vocabulary 60 --length 16")


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A decoder in composites and in primitives, and sequences that count upwards."""
    folder = tmp_path_factory.mktemp("models")
    for name, more in (("m.onnx", []), ("primitives.onnx", ["--primitives"])):
        assert commands.main(["build", "decoder", *SMALL, *more, "-o", str(folder / name)]) == 0
    tokens = (np.arange(64)[:, None] + np.arange(9)) % 60
    np.save(folder / "ids.npy", tokens[:2, :-1])
    np.savez(folder / "data.npz", input_ids=tokens[:, :-1], labels=tokens[:, 1:])
    np.savez(folder / "short.npz", input_ids=tokens[:, :0], labels=tokens[:, :0])
    np.savez(folder / "far.npz", input_ids=tokens[:, :-1], labels=tokens[:, 1:] % 60 + 1)
    gg.artifacts(folder / "m.onnx", folder / "art")
    return folder


@pytest.fixture
def folder(models, tmp_path, monkeypatch):
    """A fresh copy of the models, in which commands run."""
    shutil.copytree(models, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def run(folder, capsys):
    """Runs a command that must succeed, and returns what it printed."""

    def run(command):
        capsys.readouterr()
        assert commands.main(shlex.split(command)) == 0
        captured = capsys.readouterr()
        assert captured.err == ""
        assert not re.search(r"\b[A-Z]\w+\(\w+=|<\w+ at 0x|%%", captured.out)  # no Python objects
        return captured.out

    return run


def valid(document, name):
    schema = json.loads((DOCS / f"{name}.schema.json").read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(document, schema)
    return document


def test_the_main_job(folder, run):
    assert "input_ids" in run("inspect m.onnx")
    told = run("optimize primitives.onnx -o fast.onnx --verify")
    assert told.splitlines()[-1] == "fast.onnx: 148 -> 55 nodes; 2 attentions of 2, 5 norms of 5"
    assert not set(told) & set("┃━│─")  # plain in a pipe
    assert (
        run("optimize fast.onnx -o faster.onnx")
        .splitlines()[-1]
        .endswith("; 2 attentions of 2, 5 norms of 5")
    )
    assert "fuse_attention" in told
    run("run m.onnx --input input_ids=ids.npy -o plain.npz")
    assert "logits  float32[2, 8, 60]" in run("run fast.onnx --input input_ids=ids.npy -o out.npz")
    np.testing.assert_allclose(
        np.load("out.npz")["logits"], np.load("plain.npz")["logits"], atol=1e-5
    )
    command = "artifacts m.onnx -o art --clip-norm 1 --weight-decay 0.1 --web web"
    assert "training_model.onnx" in run(command)
    found = valid(json.loads(run(f"{command} --json")), "artifacts")
    assert "training_model.onnx" in found["files"]["art"] and [*found["files"]] == ["art", "web"]
    assert sum(weight["trained"] for weight in found["weights"]) == 36
    run("train art --data data.npz --steps 30 --lr 0.01 --checkpoint runs/a")
    again = "train art --data data.npz --steps 60 --lr 0.01 --checkpoint runs/a --resume"
    again += " --allow-changes schedule"
    assert "step 60: loss " in run(f"{again} --model m.onnx -o trained.onnx")
    run("export m.onnx --checkpoint runs/a -o again.onnx")
    assert Path("again.onnx").read_bytes() == Path("trained.onnx").read_bytes()
    assert Path("runs/a/loss.png").read_bytes().startswith(b"\x89PNG")
    run("run trained.onnx --input input_ids=ids.npy -o out.npz")
    ids = np.load("ids.npy")
    assert (np.load("out.npz")["logits"].argmax(-1) == ids + 1).mean() > 0.9


def test_build_lists_every_architecture_with_its_sizes(run):
    lines = run("build --list").splitlines()
    for name, found in gg.models.ARCHITECTURES.items():
        at = next(i for i, line in enumerate(lines) if line.startswith(f"{name} "))
        assert lines[at].endswith(found.description)
        assert all(f"--{size.replace('_', '-')} " in lines[at + 1] for size in found.sizes())


def test_build_takes_the_sizes_of_the_architecture(folder, run):
    told = run("build encoder --layers 1 --features 16 --num-heads 2 --logits --seed 3 -o e.onnx")
    model = gg.load("e.onnx")
    assert [v.name for v in model.graph.outputs] == ["last_hidden_state", "logits"]
    count = sum(v.const_value.size for v in parameters(model.graph).values())
    assert told.startswith(f"e.onnx: {count:,} parameters")


def test_the_same_seed_gives_the_same_file(folder, run):
    for seed, name in ((1, "a"), (1, "b"), (2, "c")):
        run(f"build block --seed {seed} -o {name}.onnx")
    a, b, c = ((folder / f"{name}.onnx").read_bytes() for name in "abc")
    assert a == b != c


@pytest.mark.parametrize("dims", ["", "--dim batch=2 --dim seq=5"])
@pytest.mark.parametrize("model", ["m.onnx", "primitives.onnx", "foreign"])
def test_inspect_json(run, dims, model):
    if model == "foreign":  # without module paths
        model = Path(__file__).parents[1] / "fixtures" / "bert_dynamo_sdpa_18.onnx"
        dims = dims.replace("seq", "sequence")
    found = valid(json.loads(run(f"inspect {model} {dims} --json")), "inspect")
    assert (found["flops"] is None) == (dims == "")
    assert len(found["missing_dims"]) == (2 if dims == "" else 0)


def test_inspect_names_the_dimensions_it_needs(run):
    assert "FLOPs          unknown; give --dim batch=... --dim seq=...\n" in run("inspect m.onnx")
    assert "critical path" in run("inspect m.onnx --dim batch=1 --dim seq=4")


def test_inspect_lists_blocks_to_the_depth_asked_for(run):
    assert "decoder.layers.1.attention" not in run("inspect m.onnx --depth 3")
    assert "decoder.layers.1.attention" in run("inspect m.onnx --depth 4")


def test_optimize_report(folder, run):
    run("optimize primitives.onnx -o out.onnx --report report.json")
    report = valid(json.loads((folder / "report.json").read_text()), "report")
    assert report["ops_after"]["com.microsoft::GroupQueryAttention"] == 2
    assert report["declared"]["Attention"] == 2
    assert "Attention" not in report["ops_before"]
    printed = valid(json.loads(run("optimize primitives.onnx -o out.onnx --json")), "report")
    assert printed["ops_after"] == report["ops_after"]


def test_report_schema_refuses_another_status(folder, run):
    report = json.loads(run("optimize primitives.onnx -o out.onnx --json"))
    next(p for p in report["passes"] if p["sites"])["sites"][0]["status"] = "maybe"
    with pytest.raises(jsonschema.ValidationError):
        valid(report, "report")


def test_optimize_tells_what_was_missed(folder, run):
    told = run("optimize primitives.onnx -o out.onnx --stop-after 0")
    assert "Attention: 0 of 2\n" in told
    model = Path(__file__).parents[1] / "fixtures" / "gpt2_dynamo_eager_23.onnx"
    told = run(f"optimize {model} -o out.onnx --strict-masked-rows")
    assert "refused fuse_attention at " in told
    sizes = "--layers 1 --features 8 --vocabulary 9 --num-heads 2 --kv-heads 1 --head-dim 4"
    run(f"build gemma {sizes} -o gemma.onnx")
    told = run("optimize gemma.onnx -o out.onnx")
    slower = "Attention takes longer than products, a sum and Softmax: "
    assert f"Attention: 0 of 1 (layers.0.attention: {slower}" in told
    run(f"build gemma {sizes} --primitives -o gemma.onnx")
    told = run("optimize gemma.onnx -o out.onnx")
    assert f"refused fuse_attention at layers.0.attention: {slower}" in told
    assert "Attention: 0 of 1\n" in told  # the reason is written once


def test_optimize_in_place_with_fixed_sizes(folder, run):
    run("optimize m.onnx -o m.onnx --dim seq=8")
    assert str(gg.load("m.onnx").graph.inputs[0].shape) == "[batch,8]"
    assert "[2, 8, 60]" in run("run m.onnx --input input_ids=ids.npy")
    assert commands.main(["optimize", "m.onnx", "-o", "m.onnx", "--dim", "seq=9"]) == 2


def test_optimize_in_place_with_external_data(folder, run):
    gg.export(gg.load("m.onnx"), "large.onnx", external_data=True)
    (before,) = gg.Session("large.onnx")(input_ids=np.load("ids.npy"))
    run("optimize large.onnx -o large.onnx")
    (after,) = gg.Session("large.onnx")(input_ids=np.load("ids.npy"))
    np.testing.assert_allclose(before, after, atol=1e-5)


def test_run_json(folder, run):
    ids = np.load("ids.npy")
    np.savez("in.npz", input_ids=ids)
    found = valid(json.loads(run("run m.onnx --input in.npz --json")), "run")
    (wanted,) = gg.Session("m.onnx")(input_ids=ids)
    (output,) = found["outputs"]
    assert (output["name"], output["shape"]) == ("logits", [2, 8, 60])
    assert output["max"] == wanted.max()
    assert output["mean"] == pytest.approx(wanted.mean(dtype=np.float64))


def test_run_json_of_infinite_and_empty_results(folder, run):
    model = gg.build(lambda x: (x / 0.0, x > 0.0), x=gg.float32["n"])
    gg.export(model, "inf.onnx")
    np.save("x.npy", np.ones(3, np.float32))
    np.save("none.npy", np.ones(0, np.float32))
    outputs = valid(json.loads(run("run inf.onnx --input x=x.npy --json")), "run")["outputs"]
    assert [o["not_finite"] for o in outputs] == [3, 0]
    assert [o["mean"] for o in outputs] == [None, 1.0]
    valid(json.loads(run("run inf.onnx --input x=none.npy --json")), "run")


def test_outputs_of_any_name_and_texts_are_written_and_an_input_is_given_once(folder, run, capsys):
    body = "(float[2] x, string[2] s) => (float[2] file, float[2] allow_pickle, string[2] t)"
    nodes = "{ file = Neg(x) allow_pickle = Abs(x) t = Identity(s) }"
    text = f'<ir_version: 8, opset_import: ["": 18]> named {body} {nodes}'
    onnx.save(onnx.parser.parse_model(text), "named.onnx")
    np.save("x.npy", np.float32([-1, 2]))
    np.save("s.npy", np.array(["a", "bé"]))
    run("run named.onnx --input x=x.npy s=s.npy -o out.npz")
    found = {name: array.tolist() for name, array in np.load("out.npz").items()}
    assert found == {"file": [1, -2], "allow_pickle": [1, 2], "t": ["a", "bé"]}
    assert commands.main("run named.onnx --input x=x.npy x=x.npy s=s.npy".split()) == 2
    assert "--input has x twice; give each array once" in capsys.readouterr().err


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn])
def test_files_of_dtypes_that_numpy_lacks_are_run(folder, run, dtype):
    """They hold bytes without a dtype, which the model gives them; it casts nothing."""
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    nodes = [helper.make_node("Cast", ["x"], ["y"], to=onnx.TensorProto.FLOAT)]
    nodes += [helper.make_node("Cast", ["y"], ["z"], to=kind)]
    x, y, z = (
        helper.make_tensor_value_info(name, t, ["n"])
        for name, t in (("x", kind), ("y", onnx.TensorProto.FLOAT), ("z", kind))
    )
    graph = helper.make_graph(nodes, "g", [x], [y, z])
    opsets = [helper.make_opsetid("", 19)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=9), "narrow.onnx")
    np.save("x.npy", np.array([1, 2.5, -3], dtype))
    run("run narrow.onnx --input x=x.npy -o out.npz")
    np.save("z.npy", np.load("out.npz")["z"])
    run("run narrow.onnx --input x=z.npy -o again.npz")
    assert np.load("again.npz")["y"].tolist() == [1, 2.5, -3]
    np.save("x.npy", np.zeros(3, "V4"))
    assert commands.main(shlex.split("run narrow.onnx --input x=x.npy")) == 2


def test_adam_is_adamw_without_decay(folder, run):
    run("artifacts m.onnx -o art --optimizer adam --betas 0.9 0.98 --epsilon 1e-9")
    found = read_optimizer(onnx.load("art/optimizer_model.onnx"), "it")
    np.testing.assert_array_equal(np.float32(found.betas), np.float32([0.9, 0.98]))
    assert (found.weight_decay, np.float32(found.epsilon)) == (0.0, np.float32(1e-9))


def test_a_budget_of_memory(folder, run):
    peaks = []
    for given in ("", "--recompute full", "--memory 18MB --dim batch=64 --dim seq=32"):
        run(f"artifacts m.onnx -o art {given}")
        [told] = [p for p in onnx.load("art/training_model.onnx").metadata_props if "loss" in p.key]
        peaks.append(json.loads(told.value)["peak_bytes"])
    assert peaks[1] < peaks[0] and peaks[2] <= 18_000_000


def test_train_json(folder, run):
    run("artifacts m.onnx -o art --optimizer sgd --trainable embedding")
    line = "train art --data data.npz --batch 24 --lr 0.1 --warmup 1 --json"
    found = valid(json.loads(run(line)), "train")
    assert [step["step"] for step in found["steps"]] == [1, 2, 3]  # once through 64 samples
    assert found == json.loads(run(line))
    assert found != json.loads(run(f"{line} --seed 1"))
    line += " --accumulate 2 --schedule linear --checkpoint runs/b --save-every 1"
    found = valid(json.loads(run(f"{line} --eval data.npz --eval-every 1 --patience 1")), "train")
    assert all("evaluation_loss" in step for step in found["steps"])
    assert len(found["steps"]) == 2 and Path("runs/b/best/checkpoint").exists()


@pytest.mark.share(2)
@pytest.mark.parametrize(
    ("command", "told"),
    [
        ("", "required: COMMAND"),
        ("fuse", "invalid choice: 'fuse'"),
        ("optimise m.onnx", "did you mean 'optimize'? See `graphgen --help`"),
        ("--debgu inspect m.onnx", "no option --debgu; did you mean '--debug'? See `graphgen --"),
        ("optimize m.onnx --outptu x", "no option --outptu; did you mean '--output'? See"),
        ("build decoder --layrs=2", "'--layers'? See `graphgen build --help`"),
        ("artifacts m.onnx --optimizer adan", "'sgd'); did you mean 'adam'? See"),
        ("run m.onnx -- --json", "unrecognized arguments: --json; see `graphgen run --help`"),
        ("inspect", "required: FILE"),
        ("inspect m.onnx --dim batch", "'batch' is not NAME=INT; see `graphgen inspect --help`"),
        ("build decoder", "build needs NAME and -o OUT"),
        ("build . -o out.onnx", "has no config.json"),
        ("build decoder --layers 0 -o out.onnx", "layers is 0"),
        ("build block --layers 1 -o out.onnx", "block has no size 'layers'"),
        ("build block --dtype fp16 -o out.onnx", "--dtype has no effect when building a model of"),
        ("build block --no-run -o out.onnx", "--no-run has no effect when building a model of"),
        ("build . --seed 1 -o out", "--seed has no effect when building from a checkpoint"),
        (
            "artifacts m.onnx -o art --optimizer sgd --epsilon 1",
            "--epsilon has no effect",
        ),
        (
            "artifacts m.onnx -o art --optimizer adam --weight-decay 1",
            "no effect with adam; leave it",
        ),
        (
            "artifacts m.onnx -o art --optimizer sgd --betas 0.9 0.98",
            "--betas has no effect with sgd",
        ),
        ("artifacts m.onnx -o art --no-decay bias", "has one group of parameters, which all decay"),
        ("artifacts m.onnx -o art --betas 0.9 1", "betas must be two numbers"),
        ("artifacts m.onnx -o art --loss mes", "did you mean 'mse'?"),
        ("optimize m.onnx -o x.onnx --target cdua", "did you mean 'cuda'?"),
        ("optimize m.onnx -o x.onnx --expect atention=1", "did you mean 'attention'?"),
        ("explain m.onnx --pass fuse_atention", "did you mean 'fuse_attention'?"),
        ("compare m.onnx --kinds onyl", "did you mean 'only'?"),
        ("build decodr -o out.onnx", "did you mean 'decoder'?"),
        ("artifacts m.onnx -o art --memory 1xB", "'1xB' is not a size such as 1GiB, 800MB or"),
        ("artifacts m.onnx -o art --memory 1kB", "memory=1000: with recompute='auto', "),
        ("artifacts m.onnx -o art --memory 1KiB", "memory=1024: with recompute='auto', "),
        ("artifacts m.onnx -o art --memory 1GB --dim b=2", "dimension 'b' is in no input"),
        ("artifacts m.onnx -o art --epsilon 0", "epsilon positive"),
        (
            "train art --data data.npz --find-rate x.png --checkpoint run",
            "--checkpoint has no effect with --find-rate",
        ),
        ("train art --data data.npz --save-every 9", "--save-every needs --checkpoint"),
        ("train art --data data.npz --checkpoint run --resume-at 0", "--resume-at is 0; give"),
        ("bisect m.onnx --quantize int8 --runtime 1.20", "leave out --runtime"),
        ("bisect m.onnx --tolerance 1e-5 --seconds 2", "--seconds needs --slower-than"),
        ("compare m.onnx --against m.onnx --passes clean", "passes has no effect with against"),
        ("compare m.onnx --against m.onnx --kinds only", "kinds='only' has no effect with"),
        (
            "train art --data data.npz --model m.onnx",
            "--model and -o write the trained model together",
        ),
        ("train art --data ids.npy", "give FILE.npz, FILE.jsonl, FILE.csv"),
        ("train art --data data.npz --steps 0", "--steps is 0: nothing would be trained"),
        ("train art --data data.npz --lr nan", "a learning rate is finite and at least 0"),
        ("train art --data data.npz --lr -1", "a learning rate is finite and at least 0"),
        ("train art --data data.npz --batch 65", "--batch is 65; a batch needs at least 1 sample"),
        ("train art --data data.npz --schedule noam --warmup 9", "schedule noam needs features"),
        ("train art --data data.npz --features 32", "schedule cosine takes no features"),
        ("train art --data none --schedule plateau", "schedule 'plateau': choose cosine, linear"),
        ("train art --data data.npz --patience 2", "patience=2 needs evaluate= and"),
        ("train art --data data.npz --accumulate 0", "accumulate is 0; it must be at least 1"),
        ("train art --data data.npz --eval ids.npy", "--eval ids.npy: give FILE.npz"),
        (
            "train art --data short.npz",
            "batch 0: there is nothing to learn from: it has no samples",
        ),
        ("train art --data far.npz", "labels go from 1 to 60; they must be 0 to 59"),
        ("export m.onnx --checkpoint art", "required: -o/--output"),
        ("export m.onnx --checkpoint none -o x.onnx", "checkpoint none: cannot be read"),
        (
            "train art --data data.npz --pad",
            "--pad is for rows of lists, not for arrays; leave it out",
        ),
        ("train art --data none.npz", "none.npz cannot be read: No such file"),
        ("train art --data none.jsonl", "none.jsonl cannot be read: "),
        ("train art --data none:make", "--data none:make: ModuleNotFoundError: No module"),
        ("train art --data json:none", "--data json:none: AttributeError: module 'json' has no"),
        ("train art --data json:loads", "--data json:loads: TypeError: loads() missing"),
        (
            "train art --data time:time",
            "--data time:time returned a float; it must return an iterable of",
        ),
        ("train art --data os:scandir", "linear and cosine take a rate and the number of steps"),
        ("train art --data os:scandir --batch 2", "--batch is for files: a function makes the"),
        ("train art --data os:scandir --by-length", "--by-length is for files: a function makes"),
        ("inspect m.onnx --dim seq=5 --dim seq=6", "--dim seq is given 2 times"),
        ("train art --data data.npz --batch 0", "--batch is 0"),
        ("run m.onnx --input ids.npy", "give NAME=FILE.npy"),
    ],
)
def test_a_command_that_makes_no_sense(folder, capsys, command, told):
    before = sorted(folder.iterdir())
    assert commands.main(shlex.split(command)) == 2
    captured = capsys.readouterr()
    assert told in captured.err
    assert (captured.out, captured.err.count("\n")) == ("", 1)
    assert sorted(folder.iterdir()) == before


@pytest.mark.parametrize(
    ("command", "told"),
    [
        ("diff m.onnx primitives.onnx --html m.onnx", "--html and A.onnx are both m.onnx"),
        ("diff m.onnx primitives.onnx --html ../{}/primitives.onnx", "--html and B.onnx are both "),
        ("diff m.onnx primitives.onnx --html link.onnx", "--html and A.onnx are both link.onnx"),
        ("compare m.onnx --json m.onnx", "--json and FILE are both m.onnx"),
        ("compare m.onnx --json r --html ./r", "--json and --html are both r"),
        ("compare m.onnx --against link.onnx --html link.onnx", "--html and FILE are both link.on"),
        ("compare primitives.onnx --against m.onnx --html m.onnx", "--html and --against are both"),
        ("compare m.onnx --input data.npz --html data.npz", "--html and --input are both data.npz"),
        ("bisect m.onnx --tolerance 1 -o m.onnx", "-o and FILE are both m.onnx"),
        ("optimize m.onnx -o x.onnx --report m.onnx", "--report and FILE are both m.onnx"),
        ("optimize m.onnx -o x.onnx --report ./x.onnx", "-o and --report are both x.onnx"),
        ("optimize m.onnx -o x --verify --repros x", "-o and --repros are both x"),
        ("run m.onnx --input input_ids=ids.npy -o ids.npy", "-o and --input are both ids.npy"),
        ("run m.onnx --input ids.npy -o m.onnx", "-o and FILE are both m.onnx"),
        ("artifacts m.onnx -o m.onnx", "-o and FILE are both m.onnx"),
        ("train art --data data.npz --model m.onnx -o data.npz", "-o and --data are both data.npz"),
        ("export m.onnx --checkpoint art/checkpoint -o art/checkpoint", "-o and --checkpoint are"),
        ("map art --data m.onnx -o m.onnx", "-o and --data are both m.onnx"),
        ("build art --text data.npz -o data.npz", "-o and --text are both data.npz"),
    ],
)
def test_what_is_read_is_not_written(folder, capsys, command, told):
    """In one line, before any work; the file stays as it was."""
    Path("link.onnx").symlink_to("m.onnx")
    before = {file: file.is_file() and file.read_bytes() for file in folder.iterdir()}
    assert commands.main(shlex.split(command.format(folder.name))) == 2
    captured = capsys.readouterr()
    assert f"graphgen: {told}" in captured.err and "; give two files\n" in captured.err
    assert (captured.out, captured.err.count("\n")) == ("", 1)
    assert {file: file.is_file() and file.read_bytes() for file in folder.iterdir()} == before


def test_a_model_may_be_written_anew(folder, run):
    run("train art --data data.npz --steps 2 --checkpoint runs/a --model m.onnx -o m.onnx")
    run("export m.onnx --checkpoint runs/a -o m.onnx")
    run("optimize m.onnx -o m.onnx --report report.json")
    assert json.loads(Path("report.json").read_text())["target"] == "cpu"


@pytest.mark.parametrize("debug", [False, True])
@pytest.mark.parametrize(
    ("error", "code"),
    [
        (RuntimeError("a fault\nof ours"), 1),
        (GraphgenError("bad input"), 2),
        (PermissionError(13, "Permission denied", "m.onnx"), 2),
        (MemoryError("900 GiB"), 2),
        (GateError("2.4 bits per byte, wanted 2.3"), 3),
        (KeyboardInterrupt(), 130),
    ],
    ids=lambda value: type(value).__name__,
)
def test_exit_codes(folder, monkeypatch, capsys, error, code, debug):
    def fail(path):
        raise error

    monkeypatch.setattr(gg, "load", fail)
    assert commands.main(["inspect", "m.onnx", *(["--debug"] if debug else [])]) == code
    captured = capsys.readouterr()
    assert ("Traceback" in captured.err) == debug
    last = captured.err.splitlines()[-1]
    assert last.startswith("graphgen: ")
    assert ("please report it" in last) == (code == 1)
    assert debug or captured.err.count("\n") == 1


def test_signals_are_handled_while_a_command_runs(monkeypatch, capsys):
    """And only then, by the main thread, and where the caller has no handler."""
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    seen = []

    def read(path):
        seen.append(signal.getsignal(signal.SIGTERM))
        raise GraphgenError("bad input")

    monkeypatch.setattr(gg, "load", read)
    main = partial(commands.main, ["inspect", "m.onnx"])
    assert main() == 2 and callable(seen.pop())
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    with ThreadPoolExecutor() as pool:
        assert pool.submit(main).result() == 2
    assert seen.pop() is signal.SIG_DFL
    monkeypatch.setattr(signal, "getsignal", lambda _: print)
    assert main() == 2
    monkeypatch.undo()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_help_shows_the_sizes_of_a_model(capsys):
    assert commands.main(["build", "decoder", "--help"]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"--layers INT +\(4\)\n", shown) and "--hops" not in shown
    assert commands.main(["build", "--help"]) == 0
    assert "--layers INT" not in capsys.readouterr().out


def helps():
    """The text of --help, of all and of each command."""
    texts = {}
    for name in ("", *COMMANDS):
        with redirect_stdout(io.StringIO()) as text:
            assert commands.main([*filter(None, [name]), "--help"]) == 0
        texts[name] = text.getvalue()
    return texts


def test_help_is_for_people(monkeypatch):
    """Every option says what it is for; the list of commands fits 80 columns; codes stand once."""
    monkeypatch.setenv("COLUMNS", "80")
    texts = helps()
    assert max(map(len, texts[""].splitlines())) <= 80
    for name, text in texts.items():
        assert "%%" not in text and text.count("exit codes:") == 1, name
    for name, parser in commands._parser([])._subparsers._group_actions[0].choices.items():
        bare = [
            action.option_strings or action.dest for action in parser._actions if not action.help
        ]
        assert not bare, name


def test_help_lists_every_command_once_in_groups():
    lines = helps()[""].splitlines()
    assert [title for title in commands.GROUPS if f"{title}:" not in lines] == []
    listed = [line.split()[0] for line in lines if line.startswith("  ") and line[2].isalpha()]
    assert listed == COMMANDS


@pytest.mark.parametrize("command", COMMANDS)
def test_help_shows_an_example_that_parses(capsys, command):
    assert commands.main([command, "--help"]) == 0
    examples = capsys.readouterr().out.partition("example:\n")[2].partition("\n\n")[0]
    assert examples
    for example in examples.splitlines():
        words = shlex.split(example.partition(" > ")[0], comments=True)
        assert words[:2] == ["graphgen", command]
        if "--help" not in words:
            options = commands._parser(words[1:]).parse_args(words[1:])
            assert options.run.__module__.rstrip("_").endswith(f".{command}")


TRY = """
source ./script
for line in "opt" "compare --fail-if-s" "compare m.onnx --kinds on" "inspect ./scr"; do
  COMP_WORDS=(graphgen $line); COMP_CWORD=$((${#COMP_WORDS[@]} - 1)); COMPREPLY=()
  _shtab_graphgen
  echo "${COMPREPLY[@]}"
done
"""


@pytest.mark.skipif(
    not (shutil.which("bash") and find_spec("shtab")), reason="no bash, or no shtab"
)
def test_a_shell_completes_commands_options_and_choices(tmp_path, capsys):
    of_model = {
        "zsh": '":an ONNX file:_files"',
        "fish": "__fish_complete_path",
        "bash": "inspect_pos_0_COMPGEN=_shtab_compgen_files",
    }
    for shell, file in of_model.items():
        assert commands.main(["completion", shell]) == 0
        script = capsys.readouterr().out
        assert all(name in script for name in COMMANDS) and "fail-if-slower" in script
        assert file in script
    (tmp_path / "script").write_text(script)
    done = subprocess.run(["bash", "-c", TRY], cwd=tmp_path, capture_output=True, text=True)
    wanted = ["optimize", "--fail-if-slower", "only", "./script"]
    assert done.stdout.split("\n")[:4] == wanted


TRIES = {
    "opt": "optimize",
    "compare --fail-if-s": "--fail-if-slower",
    "optimize --target w": "webgpu",
    "run --provider tensorrt-": "tensorrt-rtx",
    "inspect scr": "script",
}


@pytest.mark.skipif(
    not (shutil.which("fish") and find_spec("shtab")), reason="no fish, or no shtab"
)
def test_fish_completes_commands_options_and_files(tmp_path, capsys):
    assert commands.main(["completion", "fish"]) == 0
    (tmp_path / "script").write_text(capsys.readouterr().out)
    for line, wanted in TRIES.items():
        program = f"source ./script; complete -C 'graphgen {line}'"
        done = subprocess.run(["fish", "-c", program], cwd=tmp_path, capture_output=True, text=True)
        assert [row.partition("\t")[0] for row in done.stdout.splitlines()] == [wanted]


TYPED = r"""
zmodload zsh/zpty
zpty shell "PS1= TERM=dumb zsh -f -i"
zpty -w shell 'fpath=($PWD $fpath); autoload -Uz compinit; compinit -u -D'
zpty -w shell 'graphgen() { print -r -- "ran <$@>" }'
for line in $@; do
  zpty -w -n shell "graphgen $line"$'\t\n'
  zpty -r -m shell seen $'*\nran <*>*'
  print -r -- $seen
done
"""


@pytest.mark.skipif(not (shutil.which("zsh") and find_spec("shtab")), reason="no zsh, or no shtab")
def test_zsh_completes_commands_options_and_files(tmp_path, capsys):
    """At a terminal of its own, where a tab is typed."""
    assert commands.main(["completion", "zsh"]) == 0
    (tmp_path / "_graphgen").write_text(capsys.readouterr().out)
    (tmp_path / "script").touch()
    command = ["zsh", "-f", "-c", TYPED, "zsh", *TRIES]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    found = re.findall(r"^ran <(?:.* )?(\S+)>", done.stdout, re.MULTILINE)
    assert found == [*TRIES.values()], done.stdout


def test_completion_names_what_is_not_installed(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert commands.main(["completion", "bash"]) == 2
    assert 'run `pip install "graphgen-onnx[shell]"`' in capsys.readouterr().err


CHOICES: dict[str, dict[str, Iterable[str | int]]] = {
    "artifacts": {
        "base": get_args(Base),
        "dtype": DTYPES,
        "optimizer": ("adamw", "adam", "sgd"),  # each with options of its own
        "profile": get_args(Profile),
        "recompute": get_args(Recompute),
    },
    "bisect": {"quantize": THRESHOLDS},
    "build": {
        "dtype": DTYPES,
        "layout": get_args(Layout),
        "quantize": THRESHOLDS,
        "kv": ("int8", "float32"),  # one way, and none
        "prompts": ("int8", "int4"),
        "block_size": get_args(BlockSize),
        "accuracy_level": get_args(AccuracyLevel),
    },
    "completion": {"shell": ("bash", "zsh", "fish")},
    "compare": {"kinds": KINDS[1:], "target": get_args(Device)},
    "map": {"engine": ENGINES, "task": COLUMNS},
    "train": {
        "allow_changes": get_args(Change),
        "log": get_args(Log),
    },
}


@pytest.mark.parametrize("command", CHOICES)
def test_choices_are_those_of_the_tables(command):
    """A parser names them itself: their tables stand in rooms that --help does not import."""
    actions = []
    getattr(commands, command).add_options(
        lambda *names, **given: actions.append((names[-1].strip("-").replace("-", "_"), given))
    )
    given = {name: given for name, given in actions if "choices" in given}
    choices = {name: one["choices"] for name, one in given.items()}
    assert choices == {name: (*table,) for name, table in CHOICES[command].items()}
    hidden = {n for n, one in given.items() if "metavar" in one for c in one["choices"]
              if str(c) not in one["help"]}  # fmt: skip
    assert not hidden, "a metavar stands for the choices: name them in the help"


@pytest.mark.parametrize("folder", ["examples", "graphgen/examples"])
def test_demo_runs_the_example(monkeypatch, tmp_path, capsys, folder):
    """Of the clone, or of the wheel, beside whose package there may be `examples` of others."""
    for name in {"examples", folder}:
        (tmp_path / name).mkdir(parents=True)
        told = f"{name!r}, str(output), options" if name == folder else "others"
        source = f"def run(output, **options):\n    return 2.0, ({told})\n"
        (tmp_path / name / "demo.py").write_text(source)
    place = tmp_path / "graphgen" / "commands" / "demo.py"
    monkeypatch.setattr(commands.demo, "__file__", str(place))
    assert commands.main(["demo", "-o", "out", "--steps", "3", "--prompt", "A list"]) == 0
    assert commands.main(["demo", "-o", "out"]) == 0
    given = {"seed": 0, "steps": 3, "verify": False}
    first, second = map(ast.literal_eval, capsys.readouterr().out.splitlines())
    assert first == (folder, "out", given | {"prompt": "A list"})
    assert second == (folder, "out", given | {"steps": None})


@pytest.mark.parametrize(
    ("redirection", "code", "told"),
    [("| true", 0, ""), ("> /dev/full", 2, "graphgen: stdout: No space left on device\n")],
)
def test_stdout_that_takes_nothing(redirection, code, told):
    if redirection.endswith("/dev/full") and not Path("/dev/full").exists():
        pytest.skip("this system has no /dev/full")
    command = f"{shlex.quote(sys.executable)} -m graphgen build --list {redirection}"
    shell = ["bash", "-c", f"{command}; exit ${{PIPESTATUS[0]}}"]
    done = subprocess.run(shell, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (code, told)


HOSTILE = "\x1b]0;title\x07\u202e\u2028\x9b2J\r" + "long" * 5000


def test_names_of_others_do_not_reach_the_terminal(tmp_path):
    node = helper.make_node("Relu", ["x"], ["y"], name=HOSTILE + "/relu")
    odd = helper.make_node("Odd" + HOSTILE, ["y"], [HOSTILE], domain="mine")
    x = helper.make_tensor_value_info("x", 1, ["n" + HOSTILE, 4])
    y = helper.make_tensor_value_info(HOSTILE, 1, ["n", 4])
    imports = [helper.make_opsetid("", 18), helper.make_opsetid("mine", 1)]
    made = helper.make_model(
        helper.make_graph([node, odd], "g", [x], [y]), opset_imports=imports, ir_version=9
    )
    path = tmp_path / "m.onnx"
    onnx.save(made, path)
    calls = [["inspect", path], ["explain", path], ["diff", path, path], ["run", path]]
    calls += [["optimize", path, "-o", tmp_path / "out.onnx"], ["inspect", tmp_path / HOSTILE]]
    for encoding in ("ascii", "utf-8"):
        for command in calls:
            streams = [io.TextIOWrapper(io.BytesIO(), encoding) for _ in range(2)]
            with redirect_stdout(streams[0]), redirect_stderr(streams[1]):
                assert commands.main([str(word) for word in command]) in (0, 2)
            for stream in streams:
                stream.flush()
            told = [stream.buffer.getvalue().decode(encoding) for stream in streams]
            assert not set("".join(told)) & set(HOSTILE[:20]) - set(string.printable[:-5] + " ")
            assert len(told[1]) < 2100 and told[1].count("\n") <= 1


@pytest.mark.skipif(sys.platform == "win32", reason="bash closes the streams")
def test_streams_that_a_caller_has_closed(tmp_path):
    """No file gets their numbers, and what stderr would get is not on stdout."""
    own = "import os, sys; from graphgen.commands import main; code = main(['inspect', 'no.onnx']);"
    own += " file = open('new', 'w'); sys.exit(code if file.fileno() > 2 else 9)"
    line = f"{shlex.quote(sys.executable)} -c {shlex.quote(own)} 2>&- <&-"
    done = subprocess.run(["bash", "-c", line], cwd=tmp_path, stdout=subprocess.PIPE)
    assert (done.returncode, done.stdout) == (2, b"")


def test_numbers_that_are_too_large_get_no_line_of_numpys(recwarn):
    with commands._warnings_in_one_line():
        np.full(2, 3e38, np.float32) @ np.full(2, 3e38, np.float32)
        np.float64(1e308) * 1e308
    assert not recwarn


def test_what_libraries_warn_of_is_one_line(capsys, recwarn):
    def warn(text, file):
        warnings.warn_explicit(text, UserWarning, file, 1)

    library = f"{Path(onnx.__file__).parent}/checker.py"
    with commands._warnings_in_one_line():
        warn("two\nlines", library)
        warn("two\nlines", library)
        warn("from within", commands.__file__)
        warn("my own", __file__)
    assert capsys.readouterr().err == "graphgen: onnx: two lines\ngraphgen: from within\n"
    assert [str(one.message) for one in recwarn] == ["my own"]
