"""How the models of training are opened, on the buffers of one state."""

import functools
from collections.abc import Collection, Mapping
from typing import Any

import onnx

from graphgen.errors import GraphgenError
from graphgen.export.optimizers import Optimizer
from graphgen.header import read_header
from graphgen.operands import Array
from graphgen.passes.training.accumulate import BUFFER, GRADIENT
from graphgen.runtime import Buffer, Resident, Session
from graphgen.train.lower import SESSION_OPTIONS
from graphgen.train.nonfinite import find_not_finite
from graphgen.train.on_device import OnDevice
from graphgen.train.state import Feeder, State

_ANY_MODEL = onnx.parser.parse_model(
    '<ir_version: 8, opset_import: ["": 17]> any (float x) => (float y) { y = Neg (x) }'
).SerializeToString()
"""A session of it tells the device, also where no kernel serves the others."""


class Opening:
    """Opens models on the weights and gradients of a state.

    `there` holds what of the state stays in a device's memory, None on the CPU.
    """

    def __init__(
        self,
        who: str,
        state: State,
        optimizer: Optimizer,
        gradients: Mapping[str, str],
        *,
        alone: bool,  # else gradients are summed on the CPU
        **options: Any,
    ) -> None:
        self._who, self._options = who, options
        self._weights, self._buffers = state.weights, state.views["g"]
        self._sums = {n for n in gradients if not n.endswith((GRADIENT, BUFFER))}
        probe = self._session(_ANY_MODEL)
        self.device = probe.plan.device
        self.there = OnDevice.of(state, optimizer, probe, self._session) if alone else None
        buffers = self.there.buffers if self.there else {}
        self._placed: dict[str, Buffer] = {**buffers.get("p", {})}  # in the device's memory
        self._kept: Mapping[str, Buffer] = buffers.get("g", {})

    def __call__(
        self, model: bytes, bound: Mapping[str, str] | None = None, *, summed: bool = False
    ) -> Feeder:
        """A session on a model, of which the outputs `bound` are gradients of parameters.

        If they are `summed`, they are added to those before, in the memory of the CPU.
        """
        bound = {} if bound is None else bound
        gradients = {n: self._buffers[p] for n, p in bound.items()}
        # On the CPU in place; elsewhere each is copied, so only the last one.
        session = self._session(model, set() if self.device == "cpu" else self._sums)
        kept: Mapping[str, Buffer] = {} if summed else self._kept
        outputs: dict[str, Buffer] = {
            n: kept.get(bound[n], g) for n, g in gradients.items() if n in session.outputs
        }
        used = {n: a for n, a in (self._weights | gradients).items() if n in session.inputs}
        for name in used.keys() & self._weights.keys() - self._placed.keys():
            self._placed[name] = session.place(self._weights[name])
        placed = {n: self._placed.get(n, array) for n, array in used.items()}
        find = functools.partial(find_not_finite, model, open_session=self._session)
        return Feeder(session, used, placed, outputs, find)

    def send(self, parameters: Mapping[str, Array]) -> None:
        """Copy parameters that have changed to the device; frozen ones are there already."""
        for name, array in parameters.items():
            if isinstance(buffer := self._placed.get(name), Resident):
                buffer.write(array)

    def _session(self, model: bytes, without: Collection[str] = ()) -> Session:
        outputs = [y.name for y in read_header(model)[1].graph.output if y.name not in without]
        try:
            return Session(
                model,
                options=SESSION_OPTIONS,
                outputs=outputs if without else None,
                **self._options,
            )
        except GraphgenError as error:  # which knows the model as bytes
            raise GraphgenError(f"{self._who}: {str(error).partition(': ')[2]}") from error
