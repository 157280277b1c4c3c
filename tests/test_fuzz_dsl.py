"""Random programs: a call on arrays, the graph and the optimized graph agree, or all refuse.

GRAPHS=2000 (`make fuzz`) draws new ones instead of the same.
"""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from fuzzing import again, count, examples
from hypothesis import given, note
from random_programs import Program, programs
from test_fuzz import Trial, open_session

import graphgen as gg
from graphgen.export.write import to_bytes

PROGRAMS = count(80)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # integers may wrap around
def test_arrays_and_graphs_agree(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    told: Counter[str] = Counter()

    @examples(PROGRAMS, shrinks=True)
    @given(programs(told))
    def run(program: Program) -> None:
        note(f"again with: {again('tests/test_fuzz_dsl.py', pytestconfig)}")
        check(program, tmp_path / "program.onnx", told)

    run()
    print(", ".join(f"{n} {what}" for what, n in told.most_common()))
    assert told["lines"] > 3 * told["programs"] and told["in the runtime"] > told["programs"] / 2


def check(program: Program, path: Path, told: Counter[str]) -> None:
    told["programs"] += 1
    told["lines"] += len(program.lines)
    if not program.results:
        return
    model, arrays = program.built()
    path.write_bytes(to_bytes(model))
    trial = Trial.of(model, path, program.feeds, "program")
    if trial is None and 0 in program.sizes.values():
        told["empty"] += 1  # a reshape with -1, which no elements leave open
        return
    assert trial is not None, "the reference fails where arrays do not"
    told["no kernel"] += trial.old is None
    best = gg.optimize(model)
    trial.compare(best.model, open_session(to_bytes(best)), "cpu", told, wide=True)
    for i, (name, y) in enumerate(arrays.items()):
        array = np.asarray(y)
        wanted = trial.exact[i] if trial.old is None else trial.old[i]
        assert trial.old is None or array.dtype == wanted.dtype, (
            f"{name}: {array.dtype}, {wanted.dtype}"
        )
        trial._agree(f"{name} on arrays", array, wanted.astype(array.dtype), i)
