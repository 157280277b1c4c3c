"""What the examples have in common: a command line, plots, greedy decoding."""

import argparse
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from graphgen import GateError, GraphgenError, Session


def command(
    run: Callable[[argparse.Namespace], tuple[float, str]],
    *,
    about: str,
    steps: int,
    wanted: float = -math.inf,
    further: Mapping[str, Mapping[str, Any]] | None = None,
) -> None:
    """Run an example with its options; exit with 2 for bad input and 3 for a missed figure.

    `run` returns the figure that it reached, and a sentence that tells it; one that wants no share
    but another figure raises GateError itself. `further` are options of its own.
    """
    name = Path(sys.argv[0]).stem
    parser = argparse.ArgumentParser(description=about)
    add = parser.add_argument
    add("--steps", type=int, default=steps, help=f"updates ({steps})")
    add("--quick", action="store_true", help="tiny sizes and 3 steps; the figure is not checked")
    add("--seed", type=int, default=0, help="of weights, batches and dropout (0)")
    add("--threads", type=int, help="of the runtime; by default one for each core")
    add("-o", "--output", type=Path, default=Path("runs") / name, help=f"folder (runs/{name})")
    for option, settings in (further or {}).items():
        add(option, **settings)
    options = parser.parse_args()
    if options.quick:
        options.steps = 3
    start = time.perf_counter()
    try:
        reached, told = run(options)
        if reached < wanted and not options.quick:
            raise GateError(f"{told}: {reached:.2%} is less than {wanted:.0%}, which is wanted")
    except GraphgenError as error:
        print(f"{name}: {error}", file=sys.stderr)
        sys.exit(3 if isinstance(error, GateError) else 2)
    threads = options.threads or len(os.sched_getaffinity(0))
    seconds = time.perf_counter() - start
    print(f"{name}: {told}; {options.steps} steps, {seconds:.0f} s, {threads} threads")


@contextmanager
def figure(path: Path, *, panels: int = 1, size: tuple[float, float] = (7, 4.5)) -> Iterator[Any]:
    """The axes of a plot, or a list of those of its panels, which is written without a screen."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    made, axes = pyplot.subplots(1, panels, figsize=size, layout="constrained")
    yield axes
    made.savefig(path, dpi=110 if panels == 1 else 90)
    pyplot.close(made)


def greedy(session: Session, given: Mapping[str, Any], *, start: int, length: int) -> Any:
    """What an encoder-decoder says of each source, each token the likeliest, (B, length)."""
    source = {name: given[name] for name in ("source_ids", "source_mask")}
    said = np.full((len(source["source_ids"]), 1), start)
    for _ in range(length):
        [logits] = session(**source, target_ids=said)
        said = np.concatenate([said, logits[:, -1:].argmax(-1)], axis=1)
    return said[:, 1:]
