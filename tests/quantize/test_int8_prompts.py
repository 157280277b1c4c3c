"""A second graph that reads prompts in int8: what it computes, shares, and what it leaves alone."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from random_checkpoints import GROUPED, SIZES, random_checkpoint

import graphgen as gg
from graphgen.commands import main
from graphgen.errors import GraphgenError
from graphgen.export.folders import PROMPTS, PROMPTS_KEY
from graphgen.export.write import to_bytes
from graphgen.generation import Generator
from graphgen.generation.caches import InPlace
from graphgen.generation.decoder import open_decoder
from graphgen.generation.quality import quality
from graphgen.graph import constant
from graphgen.measure.reference import evaluate
from graphgen.models.published import from_folder
from graphgen.quantize import quantize
from graphgen.quantize.effect import feeds_of
from graphgen.quantize.prompts import LEAST, int8_prompts
from graphgen.runtime import QUIET, Session
from graphgen.targets import newest_opset

pytestmark = pytest.mark.skipif(
    newest_opset() < 23, reason="no decoder for this runtime keeps its cache in place"
)
TOKENS = np.random.default_rng(3).integers(0, 200, (3, 40))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: Any) -> Path:
    path: Path = tmp_path_factory.mktemp("qwen2")
    random_checkpoint(path, {"model_type": "qwen2", **GROUPED})
    return path


@pytest.fixture(scope="module")
def decoder(folder: Path) -> ir.Model:
    model, _ = quantize(gg.optimize(from_folder(folder).model), "int4", block_size=32)
    return model


@pytest.fixture(scope="module")
def built(folder: Path, tmp_path_factory: Any) -> Path:
    out: Path = tmp_path_factory.mktemp("built") / "out"
    command = ["build", str(folder), "-o", str(out), "--quantize", "int4", "--block-size", "32"]
    assert main([*command, "--prompts", "int8"]) == 0
    return out


def test_the_runtime_computes_what_the_graph_means(decoder: ir.Model) -> None:
    made, report = int8_prompts(decoder)
    [feed] = feeds_of(decoder, TOKENS, rows=3)
    wanted, four = (evaluate(model, feed)[0] for model in (made, decoder))
    got = Session(to_bytes(made), options=QUIET)(feed)[0]
    # The product of the logits keeps its four bits, for which the kernel rounds what it reads.
    assert np.linalg.norm(got - wanted) < 0.02 * np.linalg.norm(wanted)
    assert 1e-3 < np.linalg.norm(wanted - four) / np.linalg.norm(four) < 0.1
    assert {layer.scheme for layer in report.layers} == {"int8"}
    assert all(0 < layer.error < 0.02 for layer in report.layers)
    refused = [site.reason for site in report.sites.sites if site.status == "refused"]
    assert refused == ["it gives the logits, of which a prompt needs one row"]


def test_every_processor_sums_its_integers_exactly(decoder: ir.Model) -> None:
    made, report = int8_prompts(decoder)
    arrays = [constant(v) for n, v in made.graph.initializers.items() if n.endswith("int4_int8")]
    products = [q.astype(int) for q in arrays if q is not None]
    assert len(products) == len(report.layers)
    assert all(np.abs(q[:-1:2] + q[1::2]).max() <= 128 for q in products)
    assert max(np.abs(q).max() for q in products) > 100


def test_rows_depend_neither_on_mates_nor_on_chunks(decoder: ir.Model) -> None:
    made, _ = int8_prompts(decoder)
    rows = [TOKENS[0].tolist(), TOKENS[1, :20].tolist()]
    whole, parts = (open_decoder(decoder, prompts=made, chunk=n) for n in (64, 20))
    both, one = whole.start(rows, 4), open_decoder(decoder, prompts=made).start(rows[1:], 4)
    assert np.abs(both[1] - one[0]).max() < 1e-4 * np.abs(one).max()
    cut = parts.start(rows[:1], 4)
    assert np.abs(both[0] - cut[0]).max() < 1e-4 * np.abs(cut).max()


def test_outliers_of_one_row_cost_the_others_nothing() -> None:
    w = np.random.default_rng(0).standard_normal((64, 48), np.float32)

    def table(ids: Any) -> Any:
        x = gg.ops.gather(np.random.default_rng(1).standard_normal((8, 64), np.float32), ids)
        scale = np.array([1, 1, 1e4, 1, 0, 1, 1e-20, 1], np.float32)[:, None]
        return (x * gg.ops.gather(scale, ids)) @ w

    model, _ = quantize(gg.build(table, ids=gg.int64["T"]), "int4", embeddings=False)
    made, _ = int8_prompts(model)
    ids = np.arange(8)
    four, wanted = (evaluate(one, {"ids": ids})[0] for one in (model, made))
    got = Session(to_bytes(made))(ids=ids)[0]
    sizes = np.linalg.norm(wanted, axis=1)
    assert (np.linalg.norm(got - wanted, axis=1) <= 1e-5 * sizes).all() and not got[4].any()
    assert (np.linalg.norm(got - four, axis=1) <= 0.03 * sizes).all()


def test_a_folder_reads_long_prompts_with_it(built: Path, decoder: ir.Model) -> None:
    generator = Generator(built, provider="cpu")
    assert isinstance(generator.decoder, InPlace) and generator.decoder.reader is not None
    reader = generator.decoder.reader
    assert reader.least == LEAST and "session" not in vars(reader)  # opens when it is needed
    long, short = TOKENS[0].tolist(), TOKENS[0, : LEAST - 1].tolist()
    plain = open_decoder(decoder)
    assert np.array_equal(generator.decoder.start([short], 2), plain.start([short], 2))
    assert "session" not in vars(reader)
    got, wanted = generator.decoder.start([long], 2), plain.start([long], 2)
    assert "session" in vars(reader)
    assert 0 < np.linalg.norm(got - wanted) < 0.2 * np.linalg.norm(wanted)
    found = quality(decoder, decoder, TOKENS, prompts=int8_prompts(decoder)[0])
    assert 0 < found.divergence < 0.02
    repeated = TOKENS[0, :12].tolist() * 3
    one_by_one = generator([repeated], max_new_tokens=12, eos=[])
    guessed = generator([repeated], max_new_tokens=12, eos=[], speculate="prompt-lookup")
    assert [t[0] for t in one_by_one] == [t[0] for t in guessed]


def test_what_both_graphs_have_is_stored_once(built: Path) -> None:
    first, second = (
        {
            t.name: {e.key: e.value for e in t.external_data}
            for t in onnx.load(built / name, load_external_data=False).graph.initializer
        }
        for name in ("onnx/model.onnx", PROMPTS)
    )
    assert {there["location"] for there in first.values() if there} == {"model.onnx_data"}
    places = {name: there["location"] for name, there in second.items() if there}
    assert {*places.values()} == {"model.onnx_data", "prompt_model.onnx_data"}
    assert all(name.endswith(("_int8", "_scale")) for name, at in places.items() if "prompt" in at)
    assert all(second[n] == first[n] for n, at in places.items() if "prompt" not in at)


def test_a_file_alone_has_no_second_graph(built: Path) -> None:
    file = built / "onnx" / "model.onnx"
    decoder = open_decoder(file)
    assert isinstance(decoder, InPlace) and decoder.reader is None


@pytest.mark.parametrize(
    ("key", "value", "problem"),
    [
        (PROMPTS_KEY, "many", "'many', not a number of tokens; build the folder again"),
        ("", "", "inputs and outputs are not those of the model beside it"),
    ],
)
def test_a_graph_that_does_not_fit_is_refused(
    decoder: ir.Model, folder: Path, tmp_path: Path, key: str, value: str, problem: str
) -> None:
    made, _ = int8_prompts(decoder)
    if key:
        made.metadata_props[key] = value
    else:
        random_checkpoint(tmp_path, {"model_type": "llama", **GROUPED, "num_hidden_layers": 1})
        other, _ = quantize(gg.optimize(from_folder(tmp_path).model), "int4")
        made, _ = int8_prompts(other)
    with pytest.raises(GraphgenError, match=problem):
        open_decoder(decoder, prompts=made).start(TOKENS[:1].tolist(), 1)


def test_what_has_no_four_bits_is_refused(folder: Path, tmp_path: Path, capsys: Any) -> None:
    out = ["-o", str(tmp_path / "no"), "--prompts", "int8"]
    bert = tmp_path / "bert"
    random_checkpoint(bert, {"model_type": "bert", **SIZES})
    for more, problem in (
        ([str(folder)], "no products with weights of four bits; quantize it to int4"),
        (
            [str(folder), "--quantize", "int8"],
            "is for weights of four bits, and --quantize is int8",
        ),
        ([str(folder), "--quantize", "int4", "--layout", "genai"], "is for --layout plain"),
        ([str(bert), "--quantize", "int4"], "bert has no cache; give a decoder"),
    ):
        assert main(["build", *more, *out]) == 2
        assert problem in capsys.readouterr().err
    assert not (tmp_path / "no").exists()
