"""How long does `graphgen diff` take on two files of more than 10,000 nodes?

A pre-norm stack of 190 layers (4 features, 2 heads) is written as primitives, once as it is and
once without one operator; the files are read and compared. `diff` has to find that one difference
in less than 20 s of processor time. Exit 3 if it does not.
"""

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

import onnx_ir as ir

import graphgen as gg
from graphgen import nn
from graphgen.laboratory.diff import diff

LIMIT = 20


def write(folder: Path, layers: int) -> tuple[Path, Path]:
    """The stack, and the stack without the Erf of the layer in its middle."""
    module = nn.Encoder(4, layers=layers, num_heads=2)
    model = gg.build(module, primitives=True, x=gg.float32["n", 3, 4])
    one, other = folder / "a.onnx", folder / "b.onnx"
    gg.export(model, one)
    node = [node for node in model.graph if node.op_type == "Erf"][layers // 2]
    ir.convenience.replace_all_uses_with(node.outputs[0], node.inputs[0])
    model.graph.remove(node, safe=True)
    gg.export(model, other)
    return one, other


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=190)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    seconds = []
    with tempfile.TemporaryDirectory() as folder:
        files = write(Path(folder), args.layers)
        for _ in range(args.rounds):
            start = time.process_time()  # one thread; other work on the machine does not count
            found = diff(*files)
            seconds.append(time.process_time() - start)
    median = statistics.median(seconds)
    print(f"{found.a['nodes']} nodes, {[change.text for change in found.changes]}: {median:.1f} s")
    return 3 if [change.text for change in found.changes] != ["Erf"] or median > LIMIT else 0


if __name__ == "__main__":
    sys.exit(main())
