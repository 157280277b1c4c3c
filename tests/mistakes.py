"""Typical mistakes, as small programs in graphgen, in PyTorch and in JAX, and what each says.

python tests/mistakes.py torch    # run the programs in PyTorch, and keep what it says
python tests/mistakes.py jax      # the same in JAX

Both write tests/mistakes.json; neither needs graphgen. docs/errors.md shows it, beside what
graphgen says: tests/test_errors_page.py.
"""

import json
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

KEPT = Path(__file__).with_suffix(".json")
SIZES = {"batch": 2, "seq": 3}  # in PyTorch and JAX, where sizes have no names
HERE = "  # wrong"
PREAMBLES = {
    "graphgen": "import math\nimport numpy as np\nfrom graphgen import nn, ops",
    "torch": "import math\nimport numpy as np\nimport torch\nfrom torch import nn",
    "jax": "import math\nimport numpy as np\nimport jax\nimport jax.numpy as jnp",
}


@dataclass(frozen=True)
class Mistake:
    """One mistake: in each framework a function's body, or a whole program with `program`.

    The wrong line of several is marked. A program may fail when it is read, as without `program`.
    """

    title: str
    inputs: dict[str, str]
    graphgen: str
    torch: str | None
    jax: str | None
    arrived: tuple[str, ...]
    """What the message of graphgen has to say: what arrived, ..."""
    mend: str
    """... and what to do about it."""

    def source(self, framework: str) -> str:
        """The program, with the imports on top."""
        code = getattr(self, framework)
        if "def program" not in code and not re.search("^(class|layer)", code, re.MULTILINE):
            body = code.replace("\n", "\n    ")
            code = f"def program({', '.join(self.inputs)}):\n    {body}"
        return f"{PREAMBLES[framework]}\n\n{code}\n"

    def line(self, framework: str) -> int:
        """The number of the wrong line: the marked one, or the last."""
        lines = self.source(framework).splitlines()
        return next((i for i, line in enumerate(lines, 1) if line.endswith(HERE)), len(lines))


def model(layer: str, line: str) -> str:
    """A module with one layer."""
    return f"""class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = {layer}

    def __call__(self, x):
        {line}{HERE}

program = Model()"""


MISTAKES = (
    Mistake(
        "A layer for another number of features",
        {"x": "float32[batch, seq, 256]"},
        model("nn.Linear(512, 64)", "return self.layer(x)"),
        "layer = nn.Linear(512, 64)\ndef program(x):\n    return layer(x)",
        "layer = jnp.zeros((512, 64))\ndef program(x):\n    return x @ layer",
        ("Linear(features_in=512, features_out=64)", "float[batch, seq, 256]"),
        "its last dimension must be 512",
    ),
    Mistake(
        "Two sizes that differ",
        {"x": "float32[batch, seq, 8]", "y": "float32[batch, 8]"},
        "return x * y",
        "return x * y",
        "return x * y",
        ("float[batch, seq, 8]", "float[batch, 8]"),
        "give equal sizes one name",
    ),
    Mistake(
        "A product of matrices that do not fit",
        {"x": "float32[batch, 8]", "y": "float32[16, 4]"},
        "return x @ y",
        "return x @ y",
        "return x @ y",
        ("float[batch, 8]", "float[16, 4]", "is 8", "is 16"),
        "must be equal: ops.swap_last",
    ),
    Mistake(
        "Tensors of other ranks, joined",
        {"x": "float32[batch, 8]", "y": "float32[batch, seq, 8]"},
        "return ops.concat([x, y], axis=-1)",
        "return torch.cat([x, y], dim=-1)",
        "return jnp.concatenate([x, y], axis=-1)",
        ("float[batch, 8]", "float[batch, seq, 8]", "the same rank"),
        "add axes of size 1 with ops.unsqueeze",
    ),
    Mistake(
        "A reshape that does not fit",
        {"x": "float32[4, 6]"},
        "return ops.reshape(x, [5, 5])",
        "return x.reshape(5, 5)",
        "return x.reshape(5, 5)",
        ("float[4, 6]", "24 elements cannot become 25"),
        "sizes with the same product, one of which may be -1",
    ),
    Mistake(
        "An axis that does not exist",
        {"x": "float32[batch, 8]"},
        "return ops.softmax(x, axis=2)",
        "return torch.softmax(x, dim=2)",
        "return jax.nn.softmax(x, axis=2)",
        ("float[batch, 8]", "axis 2 does not exist"),
        "use -2 to 1",
    ),
    Mistake(
        "An index out of range",
        {"x": "float32[batch, 8]"},
        "return x[:, 8]",
        "return x[:, 8]",
        "return x[:, 8]",
        ("float[batch, 8][:, 8]", "axis 1 has 8 places"),
        "use -8 to 7",
    ),
    Mistake(
        "A float as an index",
        {"x": "float32[batch, 8]"},
        "return x[:, 8 / 2]",
        "return x[:, 8 / 2]",
        "return x[:, 8 / 2]",
        ("4.0 is not an index", "float[batch, 8]"),
        "a // b is one",
    ),
    Mistake(
        "Integers times a fraction",
        {"x": "int64[batch, 8]"},
        "return x * 0.5",
        "return x * 0.5",
        "return x * 0.5",
        ("0.5 with a tensor of int64", "holds no fractions"),
        "cast that first",
    ),
    Mistake(
        "Mixed dtypes",
        {"x": "float32[batch, 8]", "y": "float16[8, 4]"},
        "return x @ y",
        "return x @ y",
        "return x @ y",
        ("float[batch, 8]", "float16[8, 4]"),
        "cast one of them",
    ),
    Mistake(
        "`if` on a tensor",
        {"x": "float32[batch, 8]"},
        "if x > 0:" + HERE + "\n    return x\nreturn -x",
        "if x > 0:" + HERE + "\n    return x\nreturn -x",
        "if x > 0:" + HERE + "\n    return x\nreturn -x",
        ("bool[batch, 8]", "truth value"),
        "ops.where",
    ),
    Mistake(
        "`and` between tensors",
        {"x": "float32[batch, 8]"},
        "return (x > 0) and (x < 1)",
        "return (x > 0) and (x < 1)",
        "return (x > 0) and (x < 1)",
        ("bool[batch, 8]", "truth value"),
        "& | ~ instead of and",
    ),
    Mistake(
        "A loop over a tensor",
        {"x": "float32[batch, 8]"},
        "return sum(row for row in x)",
        "return sum(row for row in x)",
        "return sum(row for row in x)",
        ("float[batch, 8]", "iterated"),
        "ops.scan",
    ),
    Mistake(
        "`len` of a size that is known only at run time",
        {"x": "float32[batch, 8]"},
        "return ops.reduce_sum(x, [0]) / len(x)",
        "return x.sum(0) / len(x)",
        "return x.sum(0) / len(x)",
        ("float[batch, 8]", "len()"),
        "ops.dim(x, 0)",
    ),
    Mistake(
        "A tensor as a number",
        {"x": "float32[batch, 8]"},
        "return x * int(ops.reduce_max(x))",
        "return x * int(x.max())",
        "return x * int(x.max())",
        ("float[", "not a number"),
        "calculate with the value itself",
    ),
    Mistake(
        "A size as a number",
        {"x": "float32[batch, 8]"},
        "return x / math.sqrt(x.shape[0])",
        "return x / math.sqrt(x.shape[0])",
        "return x / math.sqrt(x.shape[0])",
        ("batch", "known only at run time"),
        "calculate with + - * // % or as an operand of ops",
    ),
    Mistake(
        "A tensor for a function of NumPy",
        {"x": "float32[batch, 8]"},
        "return np.mean(x)",
        "return np.mean(x)",
        "return np.mean(x)",
        ("float[batch, 8]", "no elements before the run"),
        "use the operators of graphgen.ops",
    ),
    Mistake(
        "A method that arrays have",
        {"x": "float32[batch, 8]"},
        "return x.sum()",
        "return x.sum()",
        "return x.sum()",
        ("float[batch, 8]", "has no sum"),
        "use ops.reduce_sum",
    ),
    Mistake(
        "Elements set in place",
        {"x": "float32[batch, 8]"},
        "x[0] = 1" + HERE + "\nreturn x",
        "x[0] = 1" + HERE + "\nreturn x",
        "x[0] = 1" + HERE + "\nreturn x",
        ("float[batch, 8]", "changed"),
        "ops.where",
    ),
    Mistake(
        "A tensor changed in place",
        {"x": "float32[batch, 8]"},
        "x += 1" + HERE + "\nreturn x",
        "x += 1" + HERE + "\nreturn x",
        "x += 1" + HERE + "\nreturn x",
        ("add", "float[batch, 8]", "in place"),
        "write x = x + y",
    ),
    Mistake(
        "A misspelled operator",
        {"x": "float32[batch, 8]"},
        "return ops.sofmax(x, axis=-1)",
        "return torch.sofmax(x, dim=-1)",
        "return jax.nn.sofmax(x, axis=-1)",
        ("graphgen.ops has no sofmax",),
        "did you mean 'softmax'",
    ),
    Mistake(
        "A keyword of another library",
        {"x": "float32[batch, 8]"},
        "return ops.softmax(x, dim=-1)",
        "return nn.Softmax(axis=-1)(x)",
        "return jax.nn.softmax(x, dim=-1)",
        ("Softmax", "unexpected keyword argument 'dim'"),
        "its attributes axis",
    ),
    Mistake(
        "An option that does not exist",
        {"x": "float32[batch, 8]"},
        'return ops.pad(x, [0, 1, 0, 1], mode="edges")',
        'return nn.functional.pad(x, [0, 1, 0, 1], mode="edges")',
        'return jnp.pad(x, 1, mode="edges")',
        ("Pad", "'edges'"),
        "did you mean 'edge'",
    ),
    Mistake(
        "An activation that does not exist",
        {},
        'layer = nn.FeedForward(8, 32, activation="swish")',
        'layer = nn.TransformerEncoderLayer(8, 2, activation="swish")',
        None,
        ("FeedForward", "activation is 'swish'"),
        "choose 'relu', 'gelu', 'gelu_tanh', 'quick_gelu', 'silu' or 'relu2'",
    ),
    Mistake(
        "A misspelled argument of a module",
        {},
        "layer = nn.Linear(8, 4, biass=False)",
        "layer = nn.Linear(8, 4, biass=False)",
        None,
        ("Linear", "unexpected keyword argument 'biass'"),
        "did you mean 'bias'",
    ),
    Mistake(
        "A module called before it has weights",
        {},
        "layer = nn.Linear(8, 4)\nlayer(np.ones((2, 8), np.float32))",
        None,
        None,
        ("(8, 4)", "has no value yet"),
        "call nn.initialize(module, seed=0)",
    ),
    Mistake(
        "A layer that is not part of the model",
        {"x": "float32[batch, 8]"},
        "layer = nn.Linear(8, 4)\ndef program(x):\n    return layer(x)",
        None,
        None,
        ("(8, 4)", "not in the module that is built"),
        "make it an attribute",
    ),
)


def run(mistake: Mistake, framework: str, call: Callable[[Any, dict[str, Any]], Any]) -> Any:
    """What a program raises, or returns if it raises nothing."""
    space: dict[str, Any] = {}
    try:
        exec(compile(mistake.source(framework), "program.py", "exec"), space)
        return call(space["program"], mistake.inputs) if "program" in space else space["layer"]
    except Exception as error:
        return error


def sizes(spec: str) -> tuple[str, list[int]]:
    """The dtype and the sizes of `float32[batch, 8]`, in numbers."""
    dtype, _, names = spec.removesuffix("]").partition("[")
    return dtype, [SIZES.get(name) or int(name) for name in names.split(", ")]


def in_torch(program: Any, inputs: dict[str, str]) -> Any:
    """Eagerly."""
    import torch

    given = (sizes(spec) for spec in inputs.values())
    return program(*(torch.ones(shape, dtype=getattr(torch, dtype)) for dtype, shape in given))


def in_jax(program: Any, inputs: dict[str, str]) -> Any:
    """Under jit."""
    import jax

    given = (sizes(spec) for spec in inputs.values())
    return jax.jit(program)(*(jax.numpy.ones(shape, dtype) for dtype, shape in given))


def said(result: Any) -> str:
    """The message of an error, or what came instead of one."""
    if isinstance(result, Exception):
        return f"{type(result).__name__}: {result}"
    dtype = str(result.dtype).removeprefix("torch.")
    return f"no error: the result is {dtype}{list(result.shape)}"


def keep(framework: str) -> None:
    """Run all programs in one framework, and keep what it says."""
    if framework == "jax":
        import jax

        jax.config.update("jax_enable_x64", True)  # else int64 is int32
    call = in_torch if framework == "torch" else in_jax
    told = {m.title: said(run(m, framework, call)) for m in MISTAKES if getattr(m, framework)}
    kept = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    kept[framework] = {"version": sys.modules[framework].__version__, "said": told}
    KEPT.write_text(json.dumps(kept, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    keep(sys.argv[1])
