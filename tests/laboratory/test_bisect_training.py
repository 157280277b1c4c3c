"""A planted fault in the lowering of a training graph is found to the exact site."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from small_models import run_plain

import graphgen as gg
from graphgen.commands import main
from graphgen.export.artifact_files import TRAINING, parse_artifact
from graphgen.export.artifacts import artifacts
from graphgen.export.prepared import Prepared
from graphgen.infer import new_context
from graphgen.laboratory.bisect import Step, bisect
from graphgen.match import Engine, Rewrite, run_passes
from graphgen.measure.accuracy import gradients_differ
from graphgen.measure.feeds import at_sizes, invent
from graphgen.models.decoder import DecoderLM
from graphgen.passes.training import MARK, accumulate, products, recompute
from graphgen.passes.training.accumulate import for_stock, results
from graphgen.passes.verify import compare, compare_models
from graphgen.places import where_is
from graphgen.value import adopt

DIMS = {"batch": 2, "seq": 8}  # as many tokens as features of a head
LAYER = "decoder.layers.1"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`once`, and `thrice`, which adds three batches up."""
    module = DecoderLM(50, 32, layers=2, num_heads=4, length=64)
    model = gg.build(module, input_ids=gg.int64["batch", "seq"])
    path = tmp_path_factory.mktemp("artifacts")
    artifacts(model, path / "once")
    artifacts(model, path / "thrice", accumulate=3)
    return path


def training_model(folder: Path) -> ir.Model:
    return parse_artifact(folder / TRAINING, (folder / TRAINING).read_bytes())


def lowered(folder: Path, engine: Engine, **options: Any) -> tuple[ir.Model, list[Any]]:
    """What the trainer runs, at these sizes, and what the passes did."""
    model = at_sizes(training_model(folder), DIMS)
    engine.context = new_context({"com.microsoft": 1, **model.graph.opset_imports})
    return model, run_passes(model, for_stock("thrice" in folder.name), engine, **options)


def plant(monkeypatch: pytest.MonkeyPatch, name: str, wrong: Callable[[Any], Any]) -> list[str]:
    """Let a rule's rewrites within one layer be what `wrong` makes of them; the places of these."""
    rule, places = getattr(accumulate, name), list[str]()

    def planted(graph: ir.Graph, node: ir.Node) -> Any:
        rewrite = rule(graph, node)
        changed = wrong(rewrite.results) if isinstance(rewrite, Rewrite) else None
        if changed is not None and where_is(node).startswith(LAYER):
            places.append(where_is(node))
            rewrite.results = changed
        return rewrite

    monkeypatch.setattr(accumulate, name, planted)
    return places


def without_its_flag(y: Any) -> Any:
    """Q K where Q Kᵀ is asked for."""
    node = y.producer()
    if node.attributes.get_int("transB", 0) != 1:
        return None
    return gg.ops.fused_matmul(*map(adopt, node.inputs), transB=0)


def only(folder: Path, output: Path, **options: Any) -> Step:
    [step] = bisect(folder, tolerance=1e-5, dims=DIMS, output=output, **options).guilty
    return step


@pytest.mark.exhaustive
def test_every_rewrite_has_a_number_and_stays_right(folders: Path) -> None:
    """And of the first n, the loss and the gradients are those of the file."""
    for folder, sums in ((folders / "once", 0), (folders / "thrice", 13)):
        accumulates = sums > 0
        _, reports = lowered(folder, Engine(verify=compare))
        sites = [site for one in reports for site in one.sites]
        assert not [site.reason for site in sites if site.rolled_back]
        numbers = sorted(site.number for site in sites if site.number is not None)
        assert numbers == [*range(1, len(numbers) + 1)]
        assert [(one.name, one.count("fired")) for one in reports] == [
            *(("gradients", 1), ("share_factors", 4), ("fuse_transposes", 4 * 2 + 1)),
            ("sums_in_place", 0),
            *([("from_buffers", 1), ("sums_in_place", sums)] if accumulates else []),
            *(("transpose_once", 0), ("in_blocks", 0), ("bind", 1)),
        ]
        runs = []
        for n in (0, 1, 5, 11, 12, 20, len(numbers)):
            some = results(lowered(folder, Engine(n))[0], accumulate=accumulates)
            runs.append(run_plain(some, invent(some)))
            assert gradients_differ(runs[0], runs[-1]) < 1e-5
        assert len(runs[0]) > 30


def test_what_is_sound_is_left_alone(folders: Path, tmp_path: Path) -> None:
    for folder in (folders / "once", folders / "thrice"):
        found = bisect(folder, tolerance=1e-5, dims=DIMS, output=tmp_path / "none")
        assert found.guilty == [] and found.reference == "float64"
        assert found.rewrites == (15 if folder.name == "once" else 29)


ARGUMENTS = ["--tolerance", "1e-5", "--dim", "batch=2", "--dim", "seq=8"]


@pytest.mark.exhaustive
def test_a_wrong_flag_is_found(
    folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    places = plant(monkeypatch, "_transposed_product", without_its_flag)
    step = only(folders / "once", tmp_path)
    assert step.name == "fuse_transposes" and step.where in places
    _, reports = lowered(folders / "once", Engine())
    told = {s.number: (s.where, s.reason) for one in reports for s in one.sites}
    assert told[step.number] == (step.where, step.reason)
    assert step.folder is not None
    command = [sys.executable, str(Path(step.folder, "run.py"))]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "relative RMS difference" in shown
    capsys.readouterr()
    assert main(["bisect", str(folders / "once"), *ARGUMENTS, "-o", str(tmp_path / "out")]) == 3
    last = capsys.readouterr().err.splitlines()[-1]
    assert last == f"graphgen: rewrite {step.number}, fuse_transposes at {step.where}: transB"


@pytest.mark.exhaustive
def test_a_sum_that_adds_to_the_wrong_buffer_is_found(
    folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The product adds to the sum of another parameter of the same shape."""

    def wrong(y: Any) -> Any:
        made = y.producer()
        name = made.inputs[2].name
        others = {x.name: x for x in made.inputs[2].graph.inputs}
        if ".query.weight" not in name:
            return None
        other = adopt(others[name.replace("query", "key")])
        return gg.ops.gemm(*map(adopt, made.inputs[:2]), other, **flags(made))

    plant(monkeypatch, "_sum_in_place", wrong)
    step = only(folders / "thrice", tmp_path)
    assert step.name == "sums_in_place" and "layers.1.attention.query" in step.reason
    _, reports = lowered(folders / "thrice", Engine())
    assert step.number in [s.number for s in reports[5].sites]


def flags(product: ir.Node) -> dict[str, int]:
    return {name: product.attributes.get_int(name, 0) for name in ("transA", "transB")}


@pytest.mark.exhaustive
def test_a_wrong_interface_is_found(
    folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pass of the whole graph: the last one gives one gradient for another."""
    bind = accumulate._bind

    def swapped(model: ir.Model) -> Any:
        done = bind(model)
        query, key = (f"{LAYER}.attention.{name}.weight_grad" for name in ("query", "key"))
        outputs = {y.name: y for y in model.graph.outputs}
        outputs[query].name = "other"
        outputs[key].name, outputs[query].name = query, key
        return done

    monkeypatch.setattr(accumulate, "_bind", swapped)
    step = only(folders / "once", tmp_path)
    assert (step.name, step.where, step.number) == ("bind", "the whole model", 15)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--target", "cuda"], "no target or pass can be chosen for training artifacts"),
        (["--passes", "clean"], "no target or pass can be chosen for training artifacts"),
        (["--dim", "length=3"], "'length' is in no input"),
    ],
)
def test_bad_input_is_one_line(options: list[str], told: str, folders: Path, capsys: Any) -> None:
    assert main(["bisect", str(folders / "once"), *ARGUMENTS, *options]) == 2
    err = capsys.readouterr().err
    assert told in err and len(err.strip().splitlines()) == 1


def test_errors_of_gradients_without_digits_do_not_count() -> None:
    loss, large = np.float32(3), np.full(4, 2.0, np.float32)
    tiny = np.full(4, 1e-9, np.float32)
    wanted = [loss, large, tiny]
    assert gradients_differ(wanted, [loss, large, -tiny]) == pytest.approx(1e-6)
    assert gradients_differ(wanted, [loss, large, tiny + 1]) == pytest.approx(500)
    assert gradients_differ(wanted, [loss, large * 1.1, tiny]) == pytest.approx(0.1)
    assert gradients_differ(wanted, [loss * 1.1, large, tiny]) == pytest.approx(0.1)
    assert gradients_differ(wanted, [loss, large, tiny[:3]]) == np.inf
    assert gradients_differ(wanted, [loss, large, tiny * np.nan]) == np.inf
    with pytest.raises(ValueError):
        gradients_differ(wanted, wanted[:2])


def prepared(**options: Any) -> Prepared:
    module = DecoderLM(50, 32, layers=2, num_heads=4, length=64)
    return Prepared.of(gg.build(module, input_ids=gg.int64["batch", "seq"]), **options)


def found_in(made: Prepared, output: Path) -> Step | None:
    steps = bisect(made, tolerance=1e-5, dims=DIMS, output=output).guilty
    return steps[0] if steps else None


@pytest.mark.exhaustive
def test_what_writes_artifacts_stays_right_at_each_site(tmp_path: Path) -> None:
    """Each site is compared by itself, recomputation and the official form as a whole."""

    def compare_results(name: str, old: ir.Model, new: ir.Model) -> str | None:
        return compare_models(name, results(old), results(new))

    made = prepared(recompute="full", profile="stock")
    engine = Engine(verify=compare, verify_whole=compare_results)
    reports = run_passes(made.training, made.passes, engine)
    sites = [site for one in reports for site in one.sites]
    assert not [site.reason for site in sites if site.rolled_back]
    fired = {one.name: one.count("fired") for one in reports}
    wanted = ("clean", "canonicalize", "split_transposes", "products", "recompute", "into_buffers")
    assert all(fired[name] for name in wanted), fired
    assert fired["recompute"] > 20
    told = [s.reason for one in reports if one.name == "recompute" for s in one.sites]
    assert any("MatMul" in reason for reason in told)
    assert found_in(prepared(recompute="full"), tmp_path) is None


@pytest.mark.exhaustive
def test_a_fault_in_recomputation_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A Gelu that is calculated again is another one, in one layer."""
    copy = recompute._copy

    def wrong(node: ir.Node, inputs: Any, tape: Any) -> Any:
        results = copy(node, inputs, tape)
        if node.op_type == "Gelu" and where_is(node).startswith(LAYER):
            tape.nodes[-1].attributes["approximate"] = ir.AttrString("approximate", "tanh")
        return results

    monkeypatch.setattr(recompute, "_copy", wrong)
    step = found_in(prepared(recompute="full"), tmp_path)
    assert step is not None and step.name == "recompute" and "Gelu" in step.reason
    assert step.where.startswith(LAYER) and step.folder is not None
    made = prepared(recompute="full")
    model = at_sizes(made.training, DIMS)
    reports = run_passes(model, made.passes, Engine(step.number))
    last = [one for one in reports if one.sites][-1].sites[-1]
    assert (last.number, last.where, last.reason) == (step.number, step.where, step.reason)
    assert "Gelu" in {n.op_type for n in model.graph if MARK in n.metadata_props}


@pytest.mark.exhaustive
def test_a_fault_in_products_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradient of the table, which is the head's too, comes out larger."""
    rule = products.transposed_operands

    def planted(node: ir.Node) -> Any:
        rewrite = rule(node)
        if rewrite is not None:
            rewrite.results = rewrite.results * 1.5
        return rewrite

    monkeypatch.setattr(products, "transposed_operands", planted)
    step = found_in(prepared(), tmp_path)
    assert step is not None and (step.name, step.reason) == ("products", "transposes as flags")


def test_a_whole_that_differs_goes_back() -> None:
    """With all its numbers; what comes behind counts on from there."""
    made = prepared(recompute="full")
    model, passes = made.training, made.passes
    upto = [one.name for one in passes].index("recompute") + 1
    engine = Engine(verify_whole=lambda name, *_: "other" if name == "recompute" else None)
    before: list[ir.Model] = []
    reports = run_passes(model, passes[:upto], engine, lambda name, now: before.append(now.clone()))
    last = reports[-1]
    assert [(s.status, s.where, s.rolled_back) for s in last.sites] == [
        ("missed", "the whole model", True)
    ]
    assert engine.applied == sum(one.count("fired") for one in reports)
    assert [n.op_type for n in model.graph] == [n.op_type for n in before[-2].graph]
