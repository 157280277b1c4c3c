"""What a resumed run must have in common with the run that it continues."""

import contextlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias, get_args

import numpy as np

from graphgen.errors import GraphgenError, user_line, warn
from graphgen.export.checkpoint import Checkpoint
from graphgen.train.batches import Place, describe
from graphgen.train.data import Batches
from graphgen.train.engine import Engine
from graphgen.train.run import Run
from graphgen.train.schedule import Schedule, name_of

Change: TypeAlias = Literal[
    "data", "evaluation", "optimizer", "schedule", "accumulate", "ema", "seed", "loss", "model"
]
"""What may differ in a resumed run, if allowed."""

RUN, BATCHES = "graphgen.run", "graphgen.batches"
"""Properties of a checkpoint: what `describe_run` says, in JSON, and how many batches are used."""


def describe_run(
    engine: Engine, schedule: Schedule, place: Place, evaluate: Batches | None, best: str
) -> dict[str, Any]:
    """What a resumed run must have in common: every `Change`, some of them in parts."""
    loss = {
        n: v for n, v in engine.loss.items() if n not in ("accumulate", "peak_bytes", "outputs")
    }
    return {
        "seed": engine.seed,
        **{f"data, {name}": text for name, text in place.described().items()},
        **{f"evaluation, {name}": text for name, text in describe(evaluate).items()},
        "evaluation, best by": None if evaluate is None else best,
        "optimizer": repr(engine.optimizer),
        "schedule": name_of(schedule),
        "accumulate": engine.accumulate,
        "ema": engine.ema or 0.0,
        "loss": json.dumps(loss, sort_keys=True),
        "model": engine.digest,
    }


def check_same(
    engine: Engine,
    schedule: Schedule,
    run: Run,
    saved: Checkpoint,
    given: Mapping[str, Any],
    allowed: Sequence[str],
    *,
    warned: bool,
) -> dict[str, Any]:
    """What the run in a folder goes on with; raise if it differs, warn if it might."""
    was: dict[str, Any] = {"seed": saved.properties.get("graphgen.seed")}
    # Another program may have written it.
    with contextlib.suppress(ValueError, TypeError, RecursionError):
        was |= json.loads(str(saved.properties.get(RUN, "{}")))
    now = {n: was.get(n) if v is None and n != "schedule" else v for n, v in given.items()}
    result = dict(now)
    if saved.optimizer is not None:
        step = saved.optimizer.step
        rates = [np.float32(saved.optimizer.learning_rate), np.float32(schedule(max(step, 1)))]
        both = was.get("schedule", ""), now["schedule"]
        if None in both or (both[0] == both[1] and rates[0] != rates[1]):  # of older versions
            before, now["schedule"] = (f"{rate!s} at step {step}" for rate in rates)
            was["schedule"] = before if RUN in saved.properties else None
    if (name := engine.other_frozen(saved)) is not None:
        was["model"], now["model"] = f"a frozen {name}", "another one, or none"
    changed = {
        name: f"{name} {was[name]}, this trainer {value}"
        for name, value in now.items()
        if None not in (value, was.get(name)) and was[name] != value
    }
    refused = [t for name, t in changed.items() if name.partition(",")[0] not in allowed]
    if refused:
        names = sorted({name.partition(",")[0] for name in changed})
        raise GraphgenError(
            f"{engine.who}.fit: the run in {run.folder} has {'; '.join(refused)}; give the same "
            f"to resume, or allow_changes={names} (--allow-changes {' '.join(names)})"
            f"{user_line()}"
        )
    new = [] if saved.optimizer is not None else ["step", "moments"]
    new += [] if BATCHES in saved.properties else ["batches"]
    missing = f"; its {' and '.join(new)} begin at 0" if new else ""
    if RUN not in saved.properties:
        unknown = ", ".join(name for name in get_args(Change) if was.get(name) is None)
        missing = f"{unknown} are not compared{missing}"
    if missing and warned:
        warn(
            f"{engine.who}.fit: the checkpoint of {run.folder} lacks something: "
            f"{missing.strip('; ')}"
        )
    return result
