"""Checkpoints in half precision: the numbers of float32 where the CPU runs them, and kernels."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
from small_models import relative_rms, run_plain, vary
from test_checkpoints import ALL_CONFIGS, CONFIGS, PUBLISHED, random_checkpoint
from test_seq2seq import BART, GPT2, MARIAN, T5_FOLDER

import graphgen as gg
from graphgen import nn, ops
from graphgen.commands import main
from graphgen.generation import Generator, decoder as decoders
from graphgen.generation.decoder import Growing, InPlace
from graphgen.match import Miss
from graphgen.models.published import FAMILIES, from_folder
from graphgen.models.published.cache import in_dtype
from graphgen.models.published.config import Config
from graphgen.models.published.decoder import CausalLM
from graphgen.models.published.named import specification
from graphgen.nn.module import build, initialize
from graphgen.targets import target

KINDS = [*ALL_CONFIGS, "xlm-roberta", "gpt2", "t5", "bart", "marian"]
"""The model types; of the decoders that share a specification, those with most of its parts."""
HALVES = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
FLOATS = (*HALVES, ir.DataType.FLOAT)
FIXTURES = {"bert": PUBLISHED, "gpt2": GPT2, "t5": T5_FOLDER}
SIZES = {
    "batch_size": 2,
    "sequence_length": 5,
    "encoder_sequence_length": 6,
    "decoder_sequence_length": 4,
    "past_sequence_length": 3,
    "past_sequence_length + sequence_length": 8,
    "past_decoder_sequence_length": 3,
    "past_encoder_sequence_length": 6,
}
FAR = 3001  # float16 counts in twos from 2048 on


def models(kind: str, dtype: ir.DataType, folder: Path) -> dict[str, ir.Model]:
    """The graphs of a family."""
    if kind in ("bart", "marian"):
        module = vary(
            FAMILIES[kind].tasks["text2text-generation"](
                Config({"bart": BART, "marian": MARIAN}[kind])
            )
        )
        weights = {n: p.array.astype(dtype.numpy()) for n, p in initialize(module).items()}
        return {
            name: build(part, weights=weights, **in_dtype(inputs, dtype))
            for name, (part, inputs) in module.graphs().items()
        }
    source = FIXTURES.get(kind, folder)
    if source is folder and not (folder / "config.json").exists():
        random_checkpoint(folder, kind, next(iter(FAMILIES[kind].tasks)))
    return from_folder(source, dtype=dtype).models


def feeds(kind: str, model: ir.Model) -> dict[str, Any]:
    """Inputs of few tokens behind a past."""
    random, found = np.random.default_rng(0), {}
    start = FAR if kind in ("llama", "mistral", "qwen2", "qwen3") else 3
    for value in model.graph.inputs:
        shape = [SIZES.get(str(getattr(d, "value", d)), d) for d in value.shape or ()]
        array: Any = random.integers(0, 2 if "type" in str(value.name) else 28, shape)
        if "mask" in str(value.name):
            array = np.ones(shape, np.int64)
        elif value.name == "position_ids":
            array = np.broadcast_to(np.arange(start, start + 5), shape)
        elif value.dtype is ir.DataType.BOOL:
            array = np.zeros(shape, bool)
        elif value.dtype is not ir.DataType.INT64:
            assert value.dtype is not None
            array = random.normal(size=shape).astype(np.float16).astype(value.dtype.numpy())
        found[str(value.name)] = array
    return found


@pytest.fixture(autouse=True)
def all_configs(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, fields in {**ALL_CONFIGS, "xlm-roberta": CONFIGS["roberta"]}.items():
        monkeypatch.setitem(CONFIGS, name, fields)


@pytest.mark.share(3)
@pytest.mark.parametrize("kind", KINDS)
def test_float16_gives_the_numbers_of_float32(kind: str, tmp_path: Path) -> None:
    whole, half = (
        {name: gg.optimize(model).model for name, model in models(kind, dtype, tmp_path).items()}
        for dtype in (ir.DataType.FLOAT, ir.DataType.FLOAT16)
    )
    for name, model in half.items():
        wanted = run_plain(whole[name], feeds(kind, whole[name]))
        given = run_plain(model, feeds(kind, model))
        for x, y in zip(wanted, given, strict=True):
            assert y.dtype == np.float16
            assert relative_rms(x, y) < 8e-3  # eight steps of float16


@pytest.mark.share(3)
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("kind", KINDS)
def test_cuda_has_kernels_for_all_that_is_half(
    kind: str, dtype: ir.DataType, tmp_path: Path
) -> None:
    """By its table; attention is one operator, and only angles and masks are not half."""
    cuda, whole = target("cuda"), []
    for model in models(kind, dtype, tmp_path).values():
        best = gg.optimize(model, target="cuda").model
        assert {value.dtype for value in best.graph.outputs} == {dtype}
        for node in best.graph.all_nodes():
            kinds = {v.dtype for v in (*node.inputs, *node.outputs) if v is not None}
            assert not kinds & {*FLOATS} or cuda.missing(node) is None
            assert node.op_type != "Softmax"
            # The CPU's runtime takes a cast to half and back away, so that a run does not show it.
            assert node.op_type not in ("Cos", "Sin") or kinds == {ir.DataType.FLOAT}
            whole += [node] if node.op_type == "Attention" else []
            if ir.DataType.FLOAT in kinds and kind not in ("vit", "marian"):  # images, tables
                assert node.op_type in ("Cast", "Mul", "Cos", "Sin", "Unsqueeze")
    assert whole


def test_the_cache_in_place_gives_the_tokens_of_the_growing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = vary(
        CausalLM(specification(Config({**CONFIGS["llama"], "model_type": "llama", "head_dim": 8})))
    )
    weights = {n: p.array.astype(np.float16) for n, p in initialize(module).items()}
    model = gg.optimize(build(module, weights=weights, **in_dtype(module.inputs(), HALVES[0])))
    found = []
    for kind in (InPlace, Growing):
        generator = Generator(model, threads=1)
        assert type(generator.decoder) is kind
        own = generator([[5, 9, 2], [3]], max_new_tokens=8)
        found.append([list(own), own.tokens][1])
        monkeypatch.setattr(decoders, "in_place", lambda model: Miss("asked not to be"))
    assert found[0] == found[1] and len(found[0][0]) == 8


class Outside(nn.Module):
    """A part of a model, bfloat16 outside and float32 within: what a CPU has kernels for."""

    def __init__(self, module: Any, part: str) -> None:
        self.module, self.part = module, part

    def __call__(self, **given: Any) -> dict[str, Any]:
        halves = [dtype.numpy() for dtype in HALVES]
        within = {n: x.astype("float32") if x.dtype in halves else x for n, x in given.items()}
        outputs = getattr(self.module, self.part)(**within)
        return {n: ops.cast(y, to=HALVES[1]) for n, y in outputs.items()}


@pytest.mark.parametrize("kind", ["llama", "marian"])
def test_bfloat16_comes_and_goes_as_the_cache(kind: str, tmp_path: Path) -> None:
    fields = {"llama": {"model_type": "llama", **CONFIGS["llama"]}, "marian": MARIAN}[kind]
    task = next(iter(FAMILIES[kind].tasks))
    module = vary(FAMILIES[kind].tasks[task](Config(fields)))
    parts = {"model.onnx": (module, module.inputs())} if kind == "llama" else module.graphs()
    for name, (part, inputs) in parts.items():
        outside = Outside(module, getattr(part, "__name__", "__call__"))
        typed = in_dtype(inputs, HALVES[1])
        gg.export(build(outside, **typed), tmp_path / name)
    (tmp_path / "config.json").write_text(json.dumps({**fields, "decoder_start_token_id": 0}))
    for beams in (1, 2):
        found = gg.generate(tmp_path, [[5, 9, 2], [3]], max_new_tokens=5, beams=beams, eos=[])
        list(found)
        assert [len(row) for row in found.tokens] == [5, 5]
        assert {array.dtype for array in found._decoder.past.values()} == {HALVES[1].numpy()}


def test_the_command_writes_what_the_target_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    command = ["build", str(GPT2), "-o", "out", "--dtype"]
    assert main([*command, "bf16"]) == 2
    assert "has no bf16 kernels: choose fp16 or fp32, or --target cuda" in capsys.readouterr().err
    assert main([*command, "fp16", "--quantize", "int4"]) == 2
    assert "--quantize int4 reads float32 weights: leave out --d" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
    assert main([*command, "fp16"]) == 0
    types = {x.name: x.type for x in ort.InferenceSession("out/onnx/model.onnx").get_inputs()}
    assert types["past_key_values.1.key"] == "tensor(float16)"
    assert types["attention_mask"] == types["position_ids"] == "tensor(int64)"
    assert main(["generate", "out", "--ids", "1,2,3", "--max-new-tokens", "4"]) == 0
    assert main([*command, "bf16", "--target", "cuda", "--layout", "genai"]) == 0
    told = json.loads(Path("out/genai_config.json").read_text())["model"]["decoder"]
    assert told["session_options"]["provider_options"] == [{"cuda": {}}]


def test_a_dtype_without_kernels_is_one_error(tmp_path: Path, capsys: Any) -> None:
    out = str(tmp_path / "out")
    for layout in ("plain", "genai"):
        build = ["build", str(GPT2), "-o", out, "--dtype", "bf16", "--target", "cuda"]
        assert main([*build, "--layout", layout]) == 0
        capsys.readouterr()
        run = ["generate", out, "--ids", "1,2,3", "--provider", "cpu"]
        assert main(run) == 2
        told = capsys.readouterr().err
        assert "has no kernel on this machine: run it where it was built for" in told
        assert told.count("\n") == 1
