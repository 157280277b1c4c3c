"""docs/errors.md: typical mistakes, and what graphgen, PyTorch and JAX say of them.

python tests/test_errors_page.py --remake    # write the page anew

What graphgen says is found by running the programs of tests/mistakes.py; what the others say is
kept in tests/mistakes.json.
"""

import inspect
import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mistakes import HERE, KEPT, MISTAKES, Mistake, run

import graphgen as gg
from graphgen import nn, ops

PAGE = Path(__file__).resolve().parents[1] / "docs" / "errors.md"
NAMES = {"graphgen": "graphgen", "torch": "PyTorch", "jax": "JAX"}
WIDTH, LINES = 110, 3
INTRODUCTION = """\
# What errors say

{count} typical mistakes, and what graphgen says about each, next to PyTorch {torch}, run eagerly,
and JAX {jax}, under `jax.jit` with 64-bit types. Errors from graphgen are a `gg.GraphgenError`: one
sentence that says who asks, what arrived, what was wanted and what to do, and ends with the file
and the line at fault. PyTorch and JAX show that line in the traceback above
their message; here only messages are quoted, at most three lines of each.

Some of these programs are right in PyTorch or in JAX: a PyTorch tensor can be changed, has known
elements and sizes, and is promoted to another dtype. graphgen records a graph before sizes and
elements are known, and never casts silently. For such programs, the page shows what PyTorch and JAX
return. In their programs, `batch` is 2 and `seq` is 3.

`python tests/test_errors_page.py --remake` writes this page from the programs in
`tests/mistakes.py`, and a test fails if graphgen says anything else.

| mistake | line | PyTorch | JAX |
|---|---|---|---|
{rows}
graphgen rejects all of them; PyTorch rejects {refused_torch}, and JAX {refused_jax}.
"""


def in_graphgen(program: Any, inputs: dict[str, str]) -> Any:
    specs = {}
    for name, spec in inputs.items():
        dtype, _, sizes = spec.removesuffix("]").partition("[")
        dims = (int(size) if size.isdigit() else size for size in sizes.split(", "))
        specs[name] = getattr(gg, dtype)[tuple(dims)]
    return gg.build(program, **specs)


def wrong_line(mistake: Mistake, framework: str) -> str:
    """The line that is wrong, as one would write it."""
    line = mistake.source(framework).splitlines()[mistake.line(framework) - 1]
    return line.removesuffix(HERE).strip()


def short(message: str) -> str:
    """The first lines of a message, cut at words."""
    lines: list[str] = []
    for line in message.splitlines():
        while len(line) > WIDTH:
            end = line.rfind(" ", 0, WIDTH)
            end = WIDTH if end < 1 else end
            lines.append(line[:end])
            line = line[end:].lstrip()
        lines += [line] if line else []
    return "\n".join(lines[:LINES]) + (" ..." if len(lines) > LINES else "")


def outcome(told: str | None) -> str:
    """`RuntimeError`, or the type that came instead of an error."""
    if told is None:
        return ""
    kind, _, result = told.partition(": ")
    return f"`{kind}`" if kind != "no error" else result.removeprefix("the result is ")


def link(title: str) -> str:
    """A link to a heading, as GitHub names it."""
    return f"[{title}](#{re.sub('[^a-z -]', '', title.lower()).replace(' ', '-')})"


def section(mistake: Mistake, said: dict[str, str | None]) -> str:
    """What each says of one mistake."""
    given = [f"`{name}` is `{spec}`" for name, spec in mistake.inputs.items()]
    parts = [f"## {mistake.title}\n", *([f"{', '.join(given)}.\n"] if given else [])]
    for framework, told in said.items():
        if told is None:
            parts.append(f"{NAMES[framework]} has nothing like it.\n")
            continue
        line = wrong_line(mistake, framework)
        parts.append(f"{NAMES[framework]}: `{line}`\n\n```text\n{short(told)}\n```\n")
    return "\n".join(parts)


def page() -> str:
    """The whole page."""
    kept = json.loads(KEPT.read_text(encoding="utf-8"))
    versions = {name: kept[name]["version"].partition("+")[0] for name in kept}
    rows, sections, refused = "", [], dict.fromkeys(["refused_torch", "refused_jax"], 0)
    for mistake in MISTAKES:
        error = run(mistake, "graphgen", in_graphgen)
        others = {name: kept[name]["said"].get(mistake.title) for name in ("torch", "jax")}
        cells = [outcome(told) for told in others.values()]
        rows += f"| {link(mistake.title)} | `{wrong_line(mistake, 'graphgen')}` | "
        rows += f"{cells[0]} | {cells[1]} |\n"
        for name, cell in zip(refused, cells, strict=True):
            refused[name] += cell.startswith("`")
        sections.append(section(mistake, {"graphgen": f"GraphgenError: {error}", **others}))
    head = INTRODUCTION.format(count=len(MISTAKES), rows=rows, **versions, **refused)
    return "\n".join([head, *sections])


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda m: m.title)
def test_an_error_says_what_arrived_what_to_do_and_where(mistake: Mistake) -> None:
    error = run(mistake, "graphgen", in_graphgen)
    assert isinstance(error, gg.GraphgenError), error
    text = str(error)
    assert text.endswith(f" (program.py:{mistake.line('graphgen')})")
    for part in (*mistake.arrived, mistake.mend):
        assert part and part in text
    assert "\n" not in text
    assert len(text) < WIDTH * LINES - 30, "the page would cut it"


def test_the_page_shows_what_is_said() -> None:
    again = "python tests/test_errors_page.py --remake"
    assert PAGE.read_text(encoding="utf-8") == page(), again


def test_what_others_say_is_of_these_programs() -> None:
    for framework, kept in json.loads(KEPT.read_text(encoding="utf-8")).items():
        asked = {m.title for m in MISTAKES if getattr(m, framework)}
        assert asked == set(kept["said"]), f"python tests/mistakes.py {framework}"


class Block(nn.Module):
    def __init__(self, features: int, *, hidden: int = 4) -> None:
        self.features, self.hidden = features, hidden

    def __call__(self, x: Any, *, mask: Any = None) -> Any:
        return x + len(5) if mask == "wrong" else x  # type: ignore[arg-type]


X = np.ones(3, np.float32)
ANY: Any = {"gg": gg, "nn": nn, "ops": ops, "Block": Block}  # for calls that checkers refuse
CALLS = {
    "Block: missing a required argument: 'features'": "Block()",
    "too many positional arguments; its arguments are features, hidden": "Block(1, 2)",
    "did you mean 'hidden'": "Block(3, hiden=4)",
    "Block.__call__: got an unexpected keyword .* did you mean 'mask'": "Block(3)(X, maks=X)",
    "its attributes axis; did you mean 'axis'": "ops.softmax(X, axes=0)",
    "graphgen.ops has no cat; use ops.concat": "ops.cat([X, X], 0)",
    "graphgen.ops has no mean; use ops.reduce_mean": "ops.mean(X)",
    "graphgen.nn has no Lineer; did you mean 'Linear'": "nn.Lineer(3, 4)",
    "graphgen.nn has no ModuleList; a list .* as it is": "nn.ModuleList([])",
    "graphgen has no flaot32; did you mean 'float32'": "gg.flaot32[3]",
    "build: .* called with y: missing": "gg.build(lambda x: x, y=gg.float32[3])",
    "build: x is 3; give a dtype": "gg.build(lambda x: x, x=3)",
    "returned list, not values": "gg.build(lambda x: [x], x=gg.float32[3])",
    "returned 'y': 3; an output is a value": "gg.build(lambda x: {'y': 3}, x=gg.float32[3])",
    "the heads must divide": "nn.Attention(7, num_heads=2)",
    "kv_heads must divide": "nn.Attention(8, num_heads=4, kv_heads=3)",
    "softcap=-1.0.: it must be above 0": "nn.Attention(8, num_heads=4, softcap=-1.0)",
    "the ratio must be at least 0": "nn.Dropout(1.5)",
    "features must be even": "nn.SinusoidalPositions(3)",
    "k must be at most 2": "nn.MixtureOfExperts(4, 8, experts=2, k=3)",
    "the groups must divide": "nn.Convolution(4, 4, kernel=3, groups=3)",
    "x is float32.3.: x has 3 features; it needs an even": "nn.GatedLinearUnit()(X)",
    "weights do not fit": "nn.initialize(nn.Linear(2, 3), weights={})",
}


@pytest.mark.parametrize(("told", "call"), CALLS.items())
def test_other_errors_end_with_the_line(told: str, call: str) -> None:
    with pytest.raises(gg.GraphgenError, match=f"{told}.* \\(typed.py:1\\)$"):
        eval(compile(call, "typed.py", "eval"), {**ANY, "X": X})


MISFITS = (
    lambda a, b: ops.matmul(a, b),
    lambda a, b: ops.add(a, b),
    lambda a, b: ops.concat([a, b], axis=-1),
    lambda a, b: ops.reshape(a, [5, 5]),
    lambda a, b: ops.transpose(a, perm=[0, 1, 2]),
    lambda a, b: ops.reduce_sum(a, [4]),
    lambda a, b: ops.expand(a, [3, 8]),
)


@pytest.mark.parametrize("function", MISFITS, ids=lambda f: f.__code__.co_names[1])
def test_arrays_get_the_error_of_the_graph(function: Any) -> None:
    told = []
    for call in (
        lambda: function(np.ones((2, 8), np.float32), np.ones((16, 4), np.float32)),
        lambda: gg.build(function, a=gg.float32[2, 8], b=gg.float32[16, 4]),
    ):
        with pytest.raises(gg.GraphgenError) as error:
            call()
        told.append(str(error.value))
    assert told[0] == told[1] and told[0].startswith(tuple("MACRTE"))


def test_arrays_get_numpys_error_where_the_graph_has_none() -> None:
    """The elements of an index are not looked at before the run."""
    with pytest.raises(
        gg.GraphgenError, match=r"^Gather\(float.2, 8., int64.1.\): index 9 .*y:\d+"
    ):
        ops.gather(np.ones((2, 8), np.float32), np.array([9]), axis=1)


def test_an_error_of_the_program_itself_stays_as_it_is() -> None:
    with pytest.raises(TypeError, match="no len"):
        Block(3)(1, mask="wrong")
    assert not hasattr(ops, "cat") and not hasattr(nn, "Lineer") and not hasattr(gg, "flaot32")
    assert [*inspect.signature(nn.Linear).parameters] == ["features_in", "features_out", "bias"]


if __name__ == "__main__":
    if sys.argv[1:] == ["--remake"]:
        PAGE.write_text(page(), encoding="utf-8")
