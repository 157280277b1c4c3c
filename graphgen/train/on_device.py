"""The state of training in the memory of a device, where graphs update it."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from graphgen import ops
from graphgen.export.optimizers import Optimizer, Setting
from graphgen.export.write import to_bytes
from graphgen.nn.module import build, float32
from graphgen.operands import Array
from graphgen.passes.training.accumulate import GRADIENT
from graphgen.runtime import Bound, Resident, Session
from graphgen.train.state import State
from graphgen.value import Tensor

NEXT, MOMENT = "_next", "_{}.moment"
"""The ends of names: of what an update returns, and of a parameter's moment."""
_AVERAGE, _SCALE, _GAINED, _ONE, _SQUARES = "_average", "scale", "gained", "one", "squares"


def next_state(
    optimizer: Optimizer,
    given: Mapping[str, Tensor],
    gradients: Mapping[str, Tensor],
    scalars: Mapping[Setting, Mapping[str, Any]],
    scale: Tensor | None,
) -> dict[str, Tensor]:
    """The parameters and moments after an update, each as `<name>_next`, from those before it."""
    made = dict[str, Tensor]()
    for name, g in gradients.items():
        places = {"p": name, **{m: name + MOMENT.format(m) for m in optimizer.moments}}
        old = {kind: given[place] for kind, place in places.items()}
        options: Any = scalars[optimizer.setting(name)]
        for kind, new in optimizer.update(g=g, scale=scale, **old, **options).items():
            made[places[kind] + NEXT] = new
    return made


class OnDevice:
    """Parameters, moments, averages and gradients in a device's memory, beside those of `State`.

    `fetch` and `send` copy what is newer on one side to the other; an update copies nothing but
    its few numbers to the device, and the norm of the gradients back.
    """

    def __init__(
        self,
        state: State,
        optimizer: Optimizer,
        buffers: dict[str, dict[str, Resident]],
        open_session: Callable[[bytes], Session],
    ) -> None:
        self._state, self._optimizer, self.buffers = state, optimizer, buffers
        self._settings = [*state.settings]
        self._open, self._newer = open_session, set[str]()
        self._numbers: dict[str, Array] = {}
        self._update: Bound | None = None
        self._norm: Bound | None = None

    @classmethod
    def of(
        cls,
        state: State,
        optimizer: Optimizer,
        session: Session,
        open_session: Callable[[bytes], Session],
    ) -> "OnDevice | None":
        """The state on the device of a session; None for the CPU, and where no buffer can stay."""
        if session.plan.device == "cpu":
            return None
        buffers = dict[str, dict[str, Resident]]()
        for kind, views in state.views.items():
            for name, array in views.items():
                if not isinstance(placed := session.place(array), Resident):
                    return None
                buffers.setdefault(kind, {})[name] = placed
        found = cls(state, optimizer, buffers, open_session)
        state.pull = found.fetch
        return found

    def made_there(self, *kinds: str) -> None:
        """Say that these kinds of arrays are newer on the device."""
        self._newer.update(kinds)

    def is_newer(self, kind: str) -> bool:
        """Whether these arrays are newer on the device."""
        return kind in self._newer

    def fetch(self) -> None:
        """Copy what is newer on the device to the arrays of the state."""
        kinds, self._newer = sorted(self._newer), set()
        for kind in kinds:
            for name, buffer in self.buffers[kind].items():
                np.copyto(self._state.views[kind][name], buffer.read())

    def send(self, kinds: Iterable[str]) -> None:
        """Copy arrays of the state to the device."""
        for kind in kinds:
            for name, buffer in self.buffers[kind].items():
                buffer.write(self._state.views[kind][name])

    def norm(self) -> float:
        """The Euclidean norm of all gradients together, calculated on the device in float32."""
        if self._norm is None:
            specs: Any = self._specs("g")

            def squares(**given: Tensor) -> dict[str, Tensor]:
                parts = [ops.reduce_sum(g * g, keepdims=0) for g in given.values()]
                return {_SQUARES: sum(parts[1:], parts[0])}

            session = self._open(to_bytes(build(squares, **specs)))
            self._norm = session.bind(self._bound("g"))
        [total] = self._norm()
        return float(np.sqrt(np.float64(total)))

    def update(self, numbers: Mapping[Setting, Mapping[str, Any]], gained: float) -> None:
        """Update all parameters there by the gradients there, with the numbers of each setting.

        `gained` is the share of the parameters in their averages.
        """
        if self._update is None:
            self._update = self._made_update(numbers)
        for i, setting in enumerate(self._settings):
            for name, number in numbers[setting].items():
                self._numbers[f"{name}:{i}"][...] = number
        self._numbers[_GAINED][...] = gained
        self._update()
        self.made_there(*(kind for kind in self.buffers if kind != "g"))

    def _made_update(self, numbers: Mapping[Setting, Mapping[str, Any]]) -> Bound:
        """A run of the graph of an update; each result is written over what it replaces."""
        names = {f"{n}:{i}" for i, s in enumerate(self._settings) for n in numbers[s]}
        self._numbers = {n: np.ones((), np.float32) for n in sorted(names | {_GAINED, _ONE})}

        def apart(new: Any, old: Any, one: Any) -> Tensor:
            """WebGPU may refuse a kernel that reads the buffer it writes, so another one writes."""
            node = new.value.producer()
            written: Tensor = new * one if node and old.value in node.inputs else new
            return written

        def update(**given: Tensor) -> dict[str, Tensor]:
            gradients = {name: given[name + GRADIENT] for name in self.buffers["p"]}
            scalars = {
                setting: {n: given[f"{n}:{i}"] for n in numbers[setting] if n != _SCALE}
                for i, setting in enumerate(self._settings)
            }
            made = next_state(self._optimizer, given, gradients, scalars, given[f"{_SCALE}:0"])
            for name in self.buffers.get("e", ()):
                old = given[name + _AVERAGE]
                new = old + (made[name + NEXT] - old) * given[_GAINED]
                made[name + _AVERAGE + NEXT] = new
            one = given[_ONE]
            return {n: apart(new, given[n.removesuffix(NEXT)], one) for n, new in made.items()}

        specs: Any = self._specs(*self.buffers) | dict.fromkeys(self._numbers, float32[()])
        session = self._open(to_bytes(build(update, **specs)))
        given = self._bound(*self.buffers)
        results = {n + NEXT: x for n, x in given.items() if n + NEXT in session.outputs}
        inputs: dict[str, Any] = {**given, **self._numbers}
        return session.bind({n: x for n, x in inputs.items() if n in session.inputs}, results)

    def _named(self, kind: str, name: str) -> str:
        ends = {"p": "", "g": GRADIENT, "e": _AVERAGE}
        return name + ends.get(kind, MOMENT.format(kind))

    def _bound(self, *kinds: str) -> dict[str, Resident]:
        return {
            self._named(kind, name): buffer
            for kind in kinds
            for name, buffer in self.buffers[kind].items()
        }

    def _specs(self, *kinds: str) -> dict[str, Any]:
        return {name: float32[buffer.shape] for name, buffer in self._bound(*kinds).items()}
