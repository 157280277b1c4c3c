"""What other optimizers make of a file, if they are installed: none is a dependency.

Each works in its own process, which runs this file: what it prints stays there, its memory is
freed, and a crash is just a result.
"""

import importlib.util
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import Queue
from threading import Event, Thread
from typing import Any, TypeVar

_T = TypeVar("_T")

KINDS = ("bert", "gpt2", "bart", "t5", "qwen3")
"""Model types of onnxruntime.transformers, tried in this order if none is given."""

_PLAIN = (
    ("onnxscript.optimizer", "onnxscript", "onnxscript"),
    ("onnxscript optimize_for_ort", "onnxscript", "onnxscript"),
    ("onnxslim", "simplified", "onnxslim"),
    ("onnxsim", "simplified", "onnxsim"),
)
"""Those that need only the file: the name, the function below, the module."""

_STEP = 0.2  # seconds between two checks whether to stop

_CHOSEN = "graphgen: the model type is "


def optimized_by_others(
    path: Path,
    folder: Path,
    target: str,
    *,
    kind: str | None = None,
    seconds: float = 90,
    stop: Event | None = None,
) -> Iterator[tuple[str, Path | str]]:
    """The name of each installed optimizer with the file that it wrote, or why there is none.

    onnxruntime.transformers needs to know what files do not say. Its model type is `kind`, or the
    one of KINDS that leaves the most attention operators, then the fewest nodes, at level 0; the
    first that leaves no Softmax ends the search. Heads and hidden size are those of the first
    attention. At levels 1 and 2 the runtime's own optimizations run first. Files go into an empty
    `folder`; what an optimizer has written after `seconds`, or when `stop` is set, counts. `target`
    is cpu or cuda.
    """
    stop = stop or Event()
    levels = (0, 1, 2) if _installed("onnxruntime.transformers") else ()
    sizes = _heads(path) if levels else ()
    for level in levels:
        arguments = (level, *sizes, target == "cuda", *(KINDS if kind is None else (kind,)))
        file = folder / f"o{level}.onnx"
        printed, result = _apart("transformers", path, file, arguments, seconds, stop)
        chosen = [line for line in printed.splitlines() if line.startswith(_CHOSEN)]
        kind = chosen[-1].removeprefix(_CHOSEN) if chosen else kind
        yield f"onnxruntime.transformers, level {level}", result
    for name, by, module in _PLAIN:
        if _installed(module):
            file = folder / f"{name.replace(' ', '_')}.onnx"
            yield name, _apart(by, path, file, (name,), seconds, stop)[1]


@contextmanager
def in_background(make: Callable[[Event], Iterator[_T]]) -> Iterator[Iterator[_T]]:
    """The items of an iterator; a thread makes them from now on, and is stopped at the end."""
    queue, stop = Queue[tuple[_T, ...]](), Event()

    def work() -> None:
        try:
            for one in make(stop):
                queue.put((one,))
                if stop.is_set():
                    return
        finally:
            queue.put(())

    thread = Thread(target=work, daemon=True)
    thread.start()
    try:
        yield (one for (one,) in iter(queue.get, ()))
    finally:
        stop.set()
        thread.join()


def _installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def _heads(path: Path) -> tuple[int, int]:
    """The heads and the hidden size of the first attention in a file; zeros if there is none."""
    from graphgen import ops  # not in the other process
    from graphgen.export.read import load
    from graphgen.op import is_a

    attention = ops.scaled_dot_product_attention

    for node in load(path).graph:
        pending = [node] if is_a(node, ops.softmax, attention) else []
        for after in pending:  # from the softmax to the product with the values
            shape = after.outputs[0].shape
            if is_a(after, ops.matmul, attention) and shape is not None:
                _, heads, _, width = [*shape, 0, 0, 0, 0][:4]
                if isinstance(heads, int) and isinstance(width, int):
                    return heads, heads * width
                break
            pending += [use.node for use in after.outputs[0].uses()][: 20 - len(pending)]
    return 0, 0


def _apart(
    by: str, source: Path, target: Path, arguments: tuple[Any, ...], seconds: float, stop: Event
) -> tuple[str, Path | str]:
    """What another process prints, and the file it wrote, or why there is none."""
    # -P: modules of this folder must not hide those of the library.
    command = [sys.executable, "-P", __file__, by, *map(str, (source, target, *arguments))]
    end, pipe = time.monotonic() + seconds, subprocess.PIPE
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe) as process:
        try:
            while True:
                try:
                    printed, errors = process.communicate(timeout=_STEP)
                    break
                except subprocess.TimeoutExpired:
                    if stop.is_set() or time.monotonic() > end:
                        process.kill()
        finally:
            process.kill()
    late = time.monotonic() > end
    reason = f"it wrote nothing in {seconds:g} s" if late else f"it ended with {process.returncode}"
    if target.exists():
        return printed.decode(errors="replace"), target
    lines = [] if late else errors.decode(errors="replace").split("\n")
    return "", next((line[:160] for line in reversed(lines) if line.strip()), reason)


def _transformers(
    source: str, part: str, level: str, heads: str, width: str, cuda: str, *kinds: str
) -> Iterator[str]:
    from onnxruntime.transformers import optimizer

    best: tuple[int, int] | None = None
    for kind in kinds:
        found = optimizer.optimize_model(
            source,
            kind,
            num_heads=int(heads),
            hidden_size=int(width),
            opt_level=int(level),
            use_gpu=cuda == "True",
        )
        nodes = Counter(node.op_type for node in found.model.graph.node)
        rank = -sum(n for name, n in nodes.items() if "Attention" in name), nodes.total()
        if best is None or rank < best:
            best = rank
            found.save_model_to_file(part, use_external_data_format=True)
            yield _CHOSEN + kind
        if not nodes["Softmax"]:
            return


def _onnxscript(source: str, part: str, name: str) -> Iterator[str]:
    import onnx_ir as ir
    import onnxscript.optimizer
    from onnxscript.rewriter.ort_fusions import optimize_for_ort

    model = ir.load(source)
    fuse = name.endswith("optimize_for_ort")
    model = optimize_for_ort(model)[0] if fuse else onnxscript.optimizer.optimize(model)
    ir.save(model, part, external_data=Path(part).name + ".data")
    yield ""


def _simplified(source: str, part: str, module: str) -> Iterator[str]:
    import onnx

    library = importlib.import_module(module)
    slim = module == "onnxslim"
    model = library.slim(source) if slim else library.simplify(source)[0]
    where = Path(part).name + ".data"
    onnx.save(model, part, save_as_external_data=True, location=where)
    yield ""


if __name__ == "__main__":
    _, by, source, target, *arguments = sys.argv
    for line in globals()[f"_{by}"](source, f"{target}.part", *arguments):
        Path(f"{target}.part").replace(target)
        print(line, flush=True)
