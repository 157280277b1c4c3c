"""What pays: the table of figures, what a target reads out of it, and the script that makes it."""

import json
import runpy
import sys
from pathlib import Path
from typing import Any, cast, get_args

import jsonschema
import onnx_ir as ir
import pytest
from small_models import block

import graphgen as gg
from graphgen import ops
from graphgen.edit import infer_model, replace_composites, tidy
from graphgen.graph import bodies, count_operators
from graphgen.passes import optimize
from graphgen.processor import Instructions, instructions
from graphgen.targets import target
from graphgen.targets.kernels import form_of

ROOT = Path(__file__).resolve().parents[2]
TABLE = ROOT / "graphgen/targets/pays.json"
SCRIPT = ROOT / "bench/pays.py"

FIGURES = {
    "type": "object",
    "required": ["machine", "onnxruntime", "date", "threads", "ratios"],
    "additionalProperties": False,
    "properties": {
        "machine": {"type": "string", "minLength": 1},
        "onnxruntime": {"type": "string", "pattern": r"^\d+\.\d+\.\d+$"},
        "date": {"type": "string", "pattern": r"^\d{4}-\d{2}-\d{2}$"},
        "threads": {"type": "integer", "minimum": 1},
        "ratios": {
            "type": "object",
            "additionalProperties": {
                "type": "object",
                "required": ["instead_of"],
                "properties": {
                    "instead_of": {"type": "string"},
                    "machine": {"type": "string", "minLength": 1},  # if not that of the others
                    "date": {"type": "string", "pattern": r"^\d{4}-\d{2}-\d{2}$"},
                },
                "patternProperties": {r"^\d+$": {"type": "number", "exclusiveMinimum": 0}},
                "additionalProperties": False,
                "minProperties": 2,
            },
        },
    },
}
SCHEMA = {
    "type": "object",
    "propertyNames": {"enum": ["avx2", "avx512", "cuda"]},
    "additionalProperties": {
        "propertyNames": {"enum": ["float", "float16", "bfloat16"]},
        "additionalProperties": FIGURES,
    },
}


def figures(ratios: dict[str, Any]) -> dict[str, Any]:
    return {key: {"float": {"ratios": ratios}} for key in get_args(Instructions)}


@pytest.fixture
def measured(monkeypatch: Any) -> Any:
    """Sets the figures of LayerNormalization."""

    def set_figures(**rows: float) -> None:
        row = {"instead_of": "its body", **{n.removeprefix("at_"): r for n, r in rows.items()}}
        table = figures({"LayerNormalization": row})
        monkeypatch.setattr("graphgen.targets.kernels.measured", lambda: table)

    return set_figures


def node_of(operator: Any, *shapes: Any, dtype: ir.DataType = ir.DataType.FLOAT) -> ir.Node:
    """One node of an operator of another domain, on values of these shapes."""
    values = [ir.val(f"x{i}", dtype, shape) for i, shape in enumerate(shapes)]
    node = ir.node(operator, values, domain="com.microsoft")
    node.outputs[0].type, node.outputs[0].shape = ir.TensorType(dtype), ir.Shape(shapes[0])
    return node


def test_the_committed_figures_have_the_shape() -> None:
    content = json.loads(TABLE.read_text("utf-8"))
    jsonschema.validate(content, SCHEMA)
    assert TABLE.read_text("utf-8") == json.dumps(content, indent=1) + "\n"
    both = [set(content[name]["float"]["ratios"]) for name in ("avx2", "avx512")]
    assert both[0] == both[1]
    assert set(content["avx2"]["float"]["ratios"]) >= {
        "Attention",
        "Attention softcap masked",
        "GroupQueryAttention causal grouped masked",
        "Attention causal grouped 4D",
        "Attention causal grouped 4D softcap",
        "GroupQueryAttention causal",
        "MultiHeadAttention",
        "LayerNormalization",
        "SkipLayerNormalization",
        "SkipSimplifiedLayerNormalization",
        "BiasGelu",
        "EmbedLayerNormalization",
    }


@pytest.mark.parametrize("processor", get_args(Instructions))
def test_residual_and_norm_in_one_do_not_pay_on_the_cpu(processor: Instructions) -> None:
    for rows, tokens in ((1, 128), (4, 512)):
        shape = (rows, tokens, 768)
        told = target("cpu", processor=processor).pays(
            node_of("SkipLayerNormalization", shape, shape)
        )
        assert told is not None
        assert told.startswith(
            "SkipLayerNormalization takes longer than Add + LayerNormalization: "
        )
        assert told.endswith(
            f"x at {rows * tokens:,} rows, measured by bench/pays.py on {processor}"
        )
    # Slower at every number of rows that was measured: slower at one that is not known.
    unknown = ("batch", 128, 768)
    told = str(target("cpu").pays(node_of("SkipLayerNormalization", unknown, unknown)))
    assert "x at 1, " in told
    assert "x at 2,048 rows, measured" in told


def test_what_was_not_measured_pays() -> None:
    shape = (1, 128, 768)
    half = node_of("SkipLayerNormalization", shape, shape, dtype=ir.DataType.FLOAT16)
    assert target("cpu").pays(half) is None
    assert target("cuda").pays(node_of("SkipLayerNormalization", shape, shape)) is None
    assert target("cpu").pays(node_of("FusedMatMul", shape, shape)) is None


def test_what_is_optional_has_to_win_beyond_a_tie(monkeypatch: Any) -> None:
    shape = (1, 128, 768)
    node = node_of("SkipLayerNormalization", shape, shape)
    unmeasured = node_of("SkipLayerNormalization", shape, shape, dtype=ir.DataType.BFLOAT16)
    assert target("cuda").pays(unmeasured, optional=True) == (
        "no figure for SkipLayerNormalization of BFLOAT16 on cuda: run bench/pays.py"
    )
    for ratio, refused in ((0.96, False), (0.97, True), (1.0, True), (1.04, True)):
        row = {"instead_of": "its body", "1": 0.5, "128": ratio}
        table = figures({"SkipLayerNormalization": row})
        monkeypatch.setattr("graphgen.targets.kernels.measured", lambda table=table: table)
        told = target("cpu").pays(node, optional=True)
        assert (told is not None) == refused
        verdict = "takes longer than" if ratio == 1.04 else "is not faster than"
        assert told is None or told.startswith(
            f"SkipLayerNormalization {verdict} its body: {ratio}"
        )


@pytest.mark.parametrize(
    ("rows", "figures", "loses"),
    [
        (1, {"at_1": 1.5, "at_512": 0.5}, True),
        (20, {"at_1": 1.5, "at_512": 0.5}, True),  # nearer to 1 than to 512 in factors
        (30, {"at_1": 1.5, "at_512": 0.5}, False),
        (9000, {"at_1": 0.5, "at_512": 1.04}, True),
        (512, {"at_1": 1.5, "at_512": 1.03}, False),  # a tie: the graph with fewer nodes wins
        ("s", {"at_1": 1.5, "at_512": 0.5}, False),
        ("s", {"at_1": 1.5, "at_512": 1.2}, True),
        ("s", {"at_1": 0.5, "at_512": 1.2}, True),  # the time is spent where there are many
    ],
)
def test_a_fusion_that_loses_is_refused_with_the_figures(
    rows: int | str, figures: dict[str, float], loses: bool, measured: Any
) -> None:
    measured(**figures)
    model = gg.build(ops.layer_norm, primitives=True, x=gg.float32[1, rows, 16])
    best = optimize(model)
    assert ("LayerNormalization" in count_operators(best.model)) == (not loses)
    [site] = next(p for p in best.report.passes if p.name == "fuse_norm").sites
    assert site.status == ("refused" if loses else "fired")
    assert ("x at 512 rows" in site.reason) == (loses and rows in ("s", 9000))


@pytest.mark.parametrize("processor", get_args(Instructions))
def test_the_figures_are_those_of_the_processor(processor: Instructions, monkeypatch: Any) -> None:
    """By default of this one, as which conftest.py sets one."""
    row = {"instead_of": "its body", "128": 1.5}
    table = {processor: {"float": {"ratios": {"LayerNormalization": row}}}}
    monkeypatch.setattr("graphgen.targets.kernels.measured", lambda: table)
    model = gg.build(ops.layer_norm, primitives=True, x=gg.float32[1, 128, 16])
    for named in (*get_args(Instructions), None):
        best = optimize(model, processor=named)
        refused = (named or "avx512") == processor
        assert ("LayerNormalization" in count_operators(best.model)) != refused
    with pytest.raises(gg.GraphgenError, match="processor is 'sse'; choose 'avx2', 'avx512'"):
        optimize(model, processor=cast(Any, "sse"))


def test_a_mask_has_figures_of_its_own(monkeypatch: Any) -> None:
    """Where it was measured; elsewhere those without it count."""
    x = gg.float32[1, 4, 128, 8]
    model = gg.build(ops.attention, q=x, k=x, v=x, mask=gg.bool_[128, 128])
    node = infer_model(model) and model.graph.outputs[0].producer()
    assert node is not None and form_of(node) == "Attention 4D masked"
    slow, quick = ({"instead_of": "its body", "128": ratio} for ratio in (1.5, 0.5))
    for ratios, pays in (
        ({"Attention 4D": slow}, False),
        ({"Attention 4D": slow, "Attention 4D masked": quick}, True),
        ({"Attention 4D": quick, "Attention 4D masked": slow}, False),
    ):
        table = figures(ratios)
        monkeypatch.setattr("graphgen.targets.kernels.measured", lambda table=table: table)
        assert (target("cpu").pays(node) is None) == pays


def test_attention_that_is_called_differently_has_different_figures() -> None:
    def forms(causal: bool, kv_heads: int, split: bool) -> str:
        def attend(q: Any, k: Any, v: Any) -> Any:
            heads = {} if split else {"q_num_heads": 4, "kv_num_heads": kv_heads}
            return ops.scaled_dot_product_attention(q, k, v, is_causal=causal, **heads)

        shapes = [(1, h, 5, 8) if split else (1, 5, 8 * h) for h in (4, kv_heads, kv_heads)]
        specs = {n: gg.float32[s] for n, s in zip("qkv", shapes, strict=True)}
        return form_of(gg.build(attend, **specs).graph[0])

    assert forms(False, 4, False) == "Attention"
    assert forms(True, 4, False) == "Attention causal"
    assert forms(True, 2, False) == "Attention causal grouped"
    assert forms(False, 2, True) == "Attention grouped 4D"


def capped(rows: int | str, *, heads: int = 4, **attributes: Any) -> ir.Model:
    """Attention with a softcap on heads of 64 features."""
    x = gg.float32[1, rows, 64 * heads]

    def attend(q: Any, k: Any, v: Any) -> Any:
        given = {"q_num_heads": heads, "kv_num_heads": heads, "softcap": 30.0, **attributes}
        return ops.scaled_dot_product_attention(q, k, v, **given)

    return gg.build(attend, q=x, k=x, v=x)


@pytest.mark.parametrize("causal", [0, 1])
@pytest.mark.parametrize(("rows", "pays"), [(1, True), (128, False), (512, False), ("s", False)])
def test_attention_with_a_softcap_pays_for_one_query_only(
    rows: int | str, pays: bool, causal: int
) -> None:
    if rows == 1 and causal:
        return  # one query has no figure of its own: it is called without
    model = capped(rows, is_causal=causal)
    assert form_of(model.graph[0]) == f"Attention{' causal' * causal} softcap"
    best = optimize(model)
    assert ("Attention" in count_operators(best.model)) == pays
    assert ("Softmax" in count_operators(best.model)) != pays
    plain = model.clone()
    replace_composites(plain.graph, infer_model(plain), lambda op, node: bodies(op, node))
    tidy(plain)
    sites = next(p for p in optimize(plain).report.passes if p.name == "fuse_attention").sites
    assert [s.status for s in sites] == ["fired" if pays else "refused"]
    if not pays:
        near = rows if isinstance(rows, int) else 1024
        assert f"x at {near:,} rows, " in sites[0].reason
        masked = causal and rows != "s"  # of known sizes, the causal mask is a constant
        instead = "products, a sum and Softmax" if masked else "its body"
        assert sites[0].reason.startswith(f"Attention takes longer than {instead}: ")
        [told] = best.report.unmet({"attention": 1})
        assert "Attention takes longer than its body: " in told


@pytest.mark.parametrize("processor", get_args(Instructions))
def test_attention_in_groups_with_a_softcap_does_not_pay(processor: Instructions) -> None:
    table = json.loads(TABLE.read_text("utf-8"))[processor]["float"]["ratios"]
    for form in (
        "GroupQueryAttention causal softcap",
        "GroupQueryAttention causal grouped softcap",
    ):
        assert min(table[form][rows] for rows in ("128", "512", "1024")) > 1.03


def test_everything_in_a_block_pays_where_the_sizes_are_not_known() -> None:
    best = optimize(block(primitives=True))
    assert best.report.shortfalls() == []
    assert [p.name for p in best.report.passes if p.count("refused")] == ["fuse_sums"]


def test_the_script_measures_and_adds_to_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "pays.json"
    for only, rows in (("Gelu", ["1", "2"]), ("SkipSimplified", ["2"])):
        options = ["--only", only, "--rows", *rows, "--seconds", "0", "--output", str(output)]
        monkeypatch.setattr(sys, "argv", [str(SCRIPT), *options])
        monkeypatch.syspath_prepend(SCRIPT.parent)  # as python does for a script
        with pytest.raises(SystemExit, match=r"^0$"):
            runpy.run_path(str(SCRIPT), run_name="__main__")
    content = json.loads(output.read_text("utf-8"))
    jsonschema.validate(content, SCHEMA)
    ratios = content[instructions()]["float"]["ratios"]
    assert set(ratios["Gelu tanh"]) == {"instead_of", "1", "2"}
    skip = ratios["SkipSimplifiedLayerNormalization"]
    assert skip.pop("instead_of") == "Add + RMSNormalization"
    assert list(skip) == ["2"]
