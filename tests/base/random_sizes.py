"""Random graphs that calculate with sizes, as exporters write them, and worse.

Each node is run when it is drawn, at all bindings of the symbols; what the runtime refuses is left
out. So every graph runs. A binding of 0 is given up instead, if the runtime refuses a node there.
"""

import re
from collections.abc import Callable
from random import Random
from typing import Any

import numpy as np
import onnx
import onnx.parser

BINDINGS = ({"n": 3, "m": 5}, {"n": 1, "m": 2}, {"n": 6, "m": 4})
EMPTY = ({"n": 0, "m": 3}, {"n": 2, "m": 0})
INPUTS = {"x": ("n", 4, "m"), "z": ("m", "n"), "u": ("n",)}
_MOST = 3000  # elements of a tensor
_FAR = (2**63 - 1, 2**31 - 1, 10**9, -(10**9), -(2**63) + 1)

Run = Callable[[bytes, dict[str, Any]], Any]


def feeds_of(sizes: dict[str, int]) -> dict[str, Any]:
    """Small whole numbers, so that no order of a sum matters."""
    rng = np.random.default_rng(0)
    shapes = {name: [sizes.get(str(d), d) for d in dims] for name, dims in INPUTS.items()}
    return {name: rng.integers(-2, 3, shape).astype("f4") for name, shape in shapes.items()}


class Drawn:
    """A graph as it grows: its nodes, and what each result is at each binding."""

    def __init__(self, random: Random, run: Run):
        self.random, self.run = random, run
        self.nodes: list[str] = []
        self.bindings = [*BINDINGS, *EMPTY]
        self.values = [dict(feeds_of(sizes)) for sizes in self.bindings]

    def of(self, dtype: str, *ranks: int) -> list[str]:
        """The results of a dtype and rank, of one length if they are lists."""
        return [
            name
            for name, x in self.values[0].items()
            if x.dtype == dtype
            and x.ndim in (ranks or range(9))
            and (dtype == "f4" or x.ndim != 1 or len({y[name].size for y in self.values}) == 1)
        ]

    def any(self, dtype: str, *ranks: int) -> str:
        return self.random.choice(self.of(dtype, *ranks) or ["none"])

    def add(self, text: str) -> str | None:
        """Add a node, `y = Op (...)`, if it runs; several results are y0, y1 ..."""
        index = len(self.nodes)
        text = text.replace("y", f"r{index}_")
        names = text.partition(" = ")[0].split(", ")
        try:
            proto = self.parsed([text])
            read = [x.name for x in proto.graph.input]
            data = proto.SerializeToString()
            found = [self._tried(data, text, read, given) for given in self.values]
        except Exception:  # the parser's: "none" is no value
            return None
        if None in found[: len(BINDINGS)]:
            return None
        ran = [given for given in found if given is not None]
        for name in names:
            if max(given[name].size for given in ran) > _MOST:
                return None
            if len({given[name].ndim for given in ran}) > 1:
                return None
        self.bindings = [s for s, given in zip(self.bindings, found, strict=True) if given]
        self.values = [v for v, given in zip(self.values, found, strict=True) if given]
        for values, given in zip(self.values, ran, strict=True):
            values.update({name: given[name] for name in names})
        self.nodes.append(text)
        return names[0]

    def _tried(self, data: bytes, text: str, read: list[str], given: Any) -> Any:
        """What a node gives at a binding, or None if the runtime refuses it.

        Or if the node joins what is empty: to anything, and the result is stale memory.
        """
        operands = [given[name] for name in read]
        try:
            if "Concat" in text and not all(x.size for x in operands):
                np.concatenate(operands, axis=int(re.findall(r"axis = (-?\d+)", text)[0]))
            return self.run(data, dict(zip(read, operands, strict=True)))
        except Exception:
            return None

    def parsed(self, nodes: list[str], *, alone: bool = True) -> onnx.ModelProto:
        """Nodes as a graph: of what they read if `alone`, else of the inputs; all are outputs."""
        constants: dict[str, str] = {}

        def named(found: Any) -> str:
            numbers = found[1].strip("[]").split(",")
            size = f"[{len(numbers)}]" if found[1].startswith("[") else ""
            value = f"Constant <value = int64{size} {{{', '.join(numbers)}}}> ()"
            return constants.setdefault(value, f"c{len(constants)}")

        body = " ".join(re.sub(r"#(\[.*?\]|-?\d+)", named, node) for node in nodes)
        made = " ".join(f"{name} = {value}" for value, name in constants.items())
        inputs = ", ".join(f"float[{', '.join(map(str, d))}] {n}" for n, d in INPUTS.items())
        if alone:
            kinds = {"f4": "float", "i8": "int64", "b1": "bool"}
            inputs = ", ".join(
                f"{kinds[x.dtype.str[1:]]}[{', '.join('abcdefgh'[: x.ndim])}] {name}"
                if x.ndim
                else f"{kinds[x.dtype.str[1:]]} {name}"
                for name, x in self.values[0].items()
                if re.search(rf"\b{name}\b", body)
            )
        head = f'<ir_version: 10, opset_import: ["": 23]> g ({inputs}) => ()'
        proto = onnx.parser.parse_model(f"{head} {{ {made} {body} }}")
        for node in proto.graph.node[len(constants) :]:
            proto.graph.output.extend(onnx.ValueInfoProto(name=name) for name in node.output)
        return proto

    def pair(self) -> str:
        """A list of two sizes."""
        return self.random.choice(
            [name for name in self.of("i8", 1) if self.values[0][name].size == 2] or ["none"]
        )

    # What is drawn

    def sizes(self) -> None:
        """A list of sizes, from a shape or others."""
        r, v = self.random, self.any("i8", 1)
        length = max(self.values[0][v].size, 1) if v != "none" else 1
        start, end = r.randint(-2, 1), r.choice([1, 2, 3, 9, -1])
        index = [r.randint(-length, length - 1) for _ in range(r.randint(1, 3))]
        numbers = [r.choice([-1, 0, 1, 1, 2, 3, 4]) for _ in range(r.randint(1, 2))]
        self.add(
            r.choice(
                [
                    f"y = Shape ({self.any('f4')})",
                    f"y = Shape <start = {start}> ({self.any('f4')})",
                    f"y = Shape <end = {end}> ({self.any('f4')})",
                    f"y = Gather ({v}, #{index})",
                    f"y = Slice ({v}, #[{start}], #[{r.choice([end, *_FAR])}])",
                    f"y = Slice ({v}, #[-1], #[{r.choice([-9, *_FAR[-2:]])}], #[0], #[-1])",
                    f"y = Concat <axis = 0> ({v}, {self.any('i8', 1)})",
                    f"y = Concat <axis = 0> (#{numbers}, {v})",
                    f"y = Concat <axis = 0> ({v}, #{numbers})",
                    f"y = Unsqueeze ({self.any('i8', 0)}, #[0])",
                    f"y = Where ({self.any('b1')}, {v}, {self.any('i8', 1)})",
                    f"y = Reshape ({self.any('i8')}, #[-1])",
                    f"y = Mul ({v}, {self.any('i8', 0, 1)})",
                    f"y = {r.choice(['Max', 'Min', 'Add', 'Sub'])} ({v}, #[{r.randint(-2, 4)}])",
                    f"y = Abs ({v})",
                    f"y = ConstantOfShape <value = int64[1] {{{r.choice([-1, 0, 1])}}}> (#[2])",
                ]
            )
        )

    def number(self) -> None:
        """A scalar."""
        r, a, b = self.random, self.any("i8", 0), self.any("i8", 0)
        v = self.any("i8", 1)
        two = f"({a}, {r.choice([b, f'#{r.randint(-3, 5)}'])})"
        self.add(
            r.choice(
                [
                    f"y = Gather ({v}, #{r.choice([0, 1, -1])})",
                    f"y = Squeeze ({v}, #[0])",
                    f"y = {r.choice(['Add', 'Sub', 'Mul', 'Max', 'Min'])} {two}",
                    f"y = {r.choice(['Div', 'Mod'])} ({a}, #{r.choice([2, 3, 4, -2])})",
                    f"y = Pow ({a}, #{r.randint(0, 4)})",
                    f"y = Reduce{r.choice(['Sum', 'Prod', 'Max'])} <keepdims = 0> ({v})",
                    f"y = {r.choice(['Neg', 'Abs'])} ({a})",
                    f"y = Size ({self.any('f4')})",
                    f"y = Where ({self.any('b1', 0)}, {a}, {b})",
                ]
            )
        )

    def truth(self) -> None:
        """A comparison."""
        r, rank = self.random, self.random.choice([0, 1])
        other = r.choice([self.any("i8", rank), f"#{r.choice([-1, 0, 1, 4])}"])
        self.add(
            f"y = {r.choice(['Equal', 'Less', 'GreaterOrEqual'])} ({self.any('i8', rank)}, {other})"
        )

    def tensor(self) -> None:
        """A tensor whose sizes depend on what was calculated."""
        r, x, w = self.random, self.any("f4"), self.any("f4")
        v, one = self.any("i8", 1), self.random.choice([*self.of("i8", 1), "none"])
        axis = r.randint(-1, max(self.values[0][x].ndim - 1, 0))
        end = r.choice([f"#[{r.choice([2, 4, -1, *_FAR])}]", one])
        start = r.choice(["#[0]", f"#[{r.randint(-2, 2)}]", one])
        shape = r.choice(["#[-1]", "#[0, -1]", "#[-1, 2]", "#[2, -1]", "#[1, 1, -1]", v, v, v])
        pool, kernel = r.choice(["MaxPool", "AveragePool", "LpPool"]), r.randint(1, 3)
        pads = [r.randint(0, kernel - 1) for _ in range(2)]
        numbers = [r.choice([0, 1, -1]) for _ in range(2 * self.values[0][x].ndim)]
        self.add(
            r.choice(
                [
                    f"y = Reshape ({x}, {shape})",
                    f"y = Reshape ({x}, {v})",
                    f"y = Expand ({x}, {v})",
                    f"y = Slice ({x}, {start}, {end}, #[{axis}])",
                    f"y = Slice ({x}, {start}, {end}, #[{axis}], #[{r.choice([1, 2, -1])}])",
                    f"y = ConstantOfShape ({v})",
                    f"y = {r.choice(['Add', 'Mul'])} ({x}, {w})",
                    f"y = Concat <axis = {axis}> ({x}, {w})",
                    f"y = Transpose ({x})",
                    f"y = Unsqueeze ({x}, #[{axis}])",
                    f"y = Squeeze ({x}, #[{axis}])",
                    f"y = Flatten <axis = {axis}> ({x})",
                    f"y = Pad ({x}, #{numbers})",
                    f"y = Pad ({x}, {v}, , #[{axis}])",
                    f"y = Tile ({x}, {v})",
                    f"y = MatMul ({x}, {w})",
                    f"ya, yb = Split <num_outputs = 2, axis = {axis}> ({x})",
                    f"ya, yb = Split <axis = {axis}> ({x}, {self.pair()})",
                    f"y = ReduceSum <keepdims = {r.randint(0, 1)}> ({x}, #[{axis}])",
                    f"y = Gather <axis = {axis}> ({x}, #[0, -1, 0])",
                    f"y = NonZero ({x})",
                    f"y = {pool} <kernel_shape = [{kernel}], strides = [{r.randint(1, 3)}], "
                    f"pads = {pads}> ({self.any('f4', 3)})",
                    f"y = Range (#0, {self.any('i8', 0)}, #{r.choice([1, 2])})",
                ]
            )
        )


def drawn(random: Random, run: Run) -> Drawn:
    """A graph of up to 24 nodes."""
    graph = Drawn(random, run)
    graph.add("y = Shape (x)")
    kinds = [graph.sizes, graph.sizes, graph.number, graph.truth, graph.tensor, graph.tensor]
    for _ in range(random.randint(8, 40)):
        random.choice(kinds)()
        if len(graph.nodes) == 24:
            break
    return graph
