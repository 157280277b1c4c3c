"""Quantizing as a pass: layers are numbered, leave remarks, are verified, and can be bisected."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx.parser
import onnx_ir as ir
import pytest
from schemes import SCHEMES
from small_models import relative_rms, run_plain

import graphgen as gg
import graphgen.quantize
from graphgen import nn, ops
from graphgen.commands import main
from graphgen.edit import infer_model
from graphgen.errors import GraphgenError
from graphgen.export.write import to_bytes
from graphgen.graph import constant, count_operators
from graphgen.places import where_is
from graphgen.quantize import quantize, sites

RNG = np.random.default_rng(0)
FEATURES, LAYERS, GUILTY = 64, 4, 2
ROUNDED = {"int8": "to_rows", "int4": "to_blocks", "weights8": "to_blocks"}


class Layers(nn.Module):
    def __init__(self) -> None:
        self.layers = [nn.Linear(FEATURES, FEATURES) for _ in range(LAYERS)]

    def __call__(self, x: Any) -> Any:
        for layer in self.layers:
            x = x + ops.gelu(layer(x))
        return x


@pytest.fixture(scope="module")
def model() -> ir.Model:
    x = gg.float32["batch", "seq", FEATURES]
    return gg.optimize(gg.build(Layers(), x=x)).model


@pytest.fixture(scope="module")
def file(model: ir.Model, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return gg.export(model, tmp_path_factory.mktemp("model") / "layers.onnx")


def weight_of(model: ir.Model, layer: int) -> Any:
    array = constant(model.graph.initializers[f"layers.{layer}.weight"])
    assert array is not None
    return array.T


def plant(monkeypatch: pytest.MonkeyPatch, scheme: str, weight: Any) -> None:
    """Let one weight be rounded to the integers of another."""
    name = ROUNDED[scheme]
    found = getattr(graphgen.quantize, name)

    def rounded(w: Any, *args: Any, **how: Any) -> Any:
        wrong = w.shape == weight.shape and np.array_equal(w, weight)
        return found(w[::-1] if wrong else w, *args, **how)

    monkeypatch.setattr(graphgen.quantize, name, rounded)


@pytest.mark.share(3)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_layer_that_was_rounded_wrongly_is_found(
    scheme: str,
    model: ir.Model,
    file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    command = ["bisect", str(file), "--quantize", scheme, "--tolerance", "0.3"]
    command += ["--dim", "batch=2", "--dim", "seq=5", "-o", str(tmp_path / "found")]
    assert main(command) == 0
    assert "no step is found guilty" in capsys.readouterr().out
    plant(monkeypatch, scheme, weight_of(model, GUILTY))
    assert main(command) == 3
    told = capsys.readouterr().out
    assert f"\nrewrite {GUILTY + 1}, quantize at layers.{GUILTY}: {scheme}, relative error" in told
    assert f"of {LAYERS - 1} like it 0 more" in told
    assert (tmp_path / "found" / "1-quantize" / "run.py").exists()
    # With a threshold the layer would not have been taken in the first place.
    _, report = quantize(model, scheme)
    [site] = [s for s in report.sites.sites if s.status == "refused"]
    assert site.where == f"layers.{GUILTY}" and "its relative error is 1." in site.reason
    assert main([*command, "--passes", "clean"]) == 2


@pytest.mark.share(3)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_layers_are_numbered_and_the_first_of_them_kept(scheme: str, model: ir.Model) -> None:
    whole, report = quantize(model, scheme)
    assert [s.number for s in report.sites.sites] == [*range(1, LAYERS + 1)]
    assert [s.where for s in report.sites.sites] == [f"layers.{i}" for i in range(LAYERS)]
    assert report.sites.count("fired") == len(report.layers) == LAYERS
    product = "MatMulIntegerToFloat" if scheme == "int8" else "MatMulNBits"
    x = RNG.standard_normal((2, 5, FEATURES)).astype(np.float32)
    wanted, errors = run_plain(model, {"x": x})[0], []
    for count in range(LAYERS + 1):
        some, told = quantize(model, scheme, stop_after=count)
        counts = count_operators(some)
        assert counts.get(f"com.microsoft::{product}", 0) == len(told.layers) == count
        assert counts.get("MatMul", 0) + counts.get("Gemm", 0) == LAYERS - count
        assert {v.name for v in some.graph.initializers.values() if "weight" in str(v.name)} == {
            v.name
            for name in [f"layers.{i}" for i in range(LAYERS)]
            for v in (whole if int(name[-1]) < count else model).graph.initializers.values()
            if str(v.name).startswith(f"{name}.weight")
        }
        errors.append(relative_rms(wanted, run_plain(some, {"x": x})[0]))
    assert errors[0] == 0.0 < errors[1] < errors[-1]
    assert to_bytes(quantize(model, scheme, stop_after=LAYERS)[0]) == to_bytes(whole)


@pytest.mark.share(3)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_layer_that_is_wrong_in_its_place_alone_is_rolled_back(
    scheme: str, model: ir.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is measured before is right: only the recording for the graph is not."""
    found = sites.product

    def product(site: Any, *given: Any, **how: Any) -> Any:
        y = found(site, *given, **how)
        return y * 1.5 if where_is(site.end) == f"layers.{GUILTY}" else y

    verified, report = quantize(model, scheme, verify=True)
    assert report.sites.count("fired") == LAYERS
    assert to_bytes(verified) == to_bytes(quantize(model, scheme)[0])
    monkeypatch.setattr(sites, "product", product)
    quantized, report = quantize(model, scheme, verify=True)
    [site] = [s for s in report.sites.sites if s.status != "fired"]
    assert (site.where, site.rolled_back) == (f"layers.{GUILTY}", True)
    assert site.reason.startswith("its relative error in its place is 0.5")
    [layer] = [layer for layer in report.layers if layer.scheme == "float"]
    assert layer.reason == site.reason and layer.bytes_after == layer.bytes_before
    assert report.bytes_after < report.bytes_before
    assert f"layers.{GUILTY}.weight" in quantized.graph.initializers
    assert report.kept() == [f"layers.{GUILTY}: {layer.name} stays in float: {site.reason}"]


def test_a_layer_that_does_not_run_or_that_nothing_verified_stays_in_float(
    model: ir.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, one = sites.product, np.ones(1, np.float32)

    def product(site: Any, *given: Any, **how: Any) -> Any:
        y = found(site, *given, **how)
        guilty = where_is(site.end) == f"layers.{GUILTY}"
        return y * ops.gather(one, ops.dim(y, 0) + 5) if guilty else y

    with monkeypatch.context() as patch:
        patch.setattr(sites, "product", product)
        _, report = quantize(model, "int4", verify=True)
    [site] = [s for s in report.sites.sites if s.status != "fired"]
    assert (site.where, site.rolled_back) == (f"layers.{GUILTY}", True)
    assert site.reason.startswith("in its place it does not run: ")

    monkeypatch.setattr(graphgen.quantize, "sizes_of", lambda *_: [])
    _, report = quantize(model, "int4", verify=True)
    assert {site.reason for site in report.sites.sites} == {
        "could not be verified: no sizes were found at which it runs"
    }
    assert {layer.scheme for layer in report.layers} == {"float"}
    assert report.bytes_after == report.bytes_before


def test_candidates_that_are_none_say_why() -> None:
    text = """<ir_version: 10, opset_import: ["": 21]>
    g (float[64,64] x, int64[n] i, float[64,64] a) => (float[1,64,64] y, float[n,4] r) {
      p = MatMul(x, w) q = MatMul(p, b) s = Gemm <transA = 1> (x, w) t = Gemm(s, w, a)
      u = MatMul(t, a) y = Add(q, u) r = Gather(small, i) }"""
    proto = onnx.parser.parse_model(text)
    for name, shape in {"w": (64, 64), "b": (1, 64, 64), "small": (9, 4)}.items():
        array = RNG.standard_normal(shape).astype(np.float32)
        proto.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    foreign = ir.from_proto(proto)
    infer_model(foreign)
    _, report = quantize(foreign, "int4")
    told = {(s.status, s.reason) for s in report.sites.sites if s.status != "fired"}
    assert told == {
        ("missed", "the operand is float[1, 64, 64], not a float matrix"),
        ("missed", "transA is 1, and no quantized product has that"),
        ("missed", "C is float[64, 64], not 64 constants"),
        ("refused", "the table has 36 weights; below 2048 there is nothing to gain"),
    }
    assert report.sites.count("fired") == 1 and len(report.kept()) == 4
    assert "sites" not in report.to_json()


def test_what_nothing_can_be_made_of_is_an_error(file: Path) -> None:
    with pytest.raises(GraphgenError, match="has no MatMul or Gemm"):
        quantize(gg.build(lambda x: x + 1.0, x=gg.float32["n"]), "int8", stop_after=1)
    assert main(["bisect", str(file), "--quantize", "int8", "--with", "x:y"]) == 2
