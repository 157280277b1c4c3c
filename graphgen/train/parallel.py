"""Data-parallel training: the same program in several processes; MPI sums their gradients."""

import os
from typing import Any

import numpy as np

from graphgen.errors import GraphgenError
from graphgen.runtime import Array

_SIZES = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE")  # set by the mpiexec of MPICH, of Open MPI
_MESSAGE = 1 << 20
"""Elements of one message, 4 MB: large enough for a network's full speed, and small enough that the
copy that MPI works on stays small."""


class Processes:
    """This process, number `rank` of the `size` processes that train together: here, alone."""

    rank, size = 0, 1

    def __repr__(self) -> str:
        return f"Processes(rank={self.rank}, size={self.size})"

    def reduce(self, gradients: Array) -> None:
        """Sum a flat array over all processes, in place; every process has to call it."""

    def sum(self, *numbers: float) -> list[float]:
        """Numbers summed over all processes; every process has to call it."""
        array = np.array(numbers, np.float64)
        self.reduce(array)
        return [*map(float, array)]

    def share(self, samples: Array) -> Array:
        """This process's samples of a batch."""
        count = len(samples)
        return samples[count * self.rank // self.size : count * (self.rank + 1) // self.size]

    def abort(self, code: int) -> None:
        """End all processes with an exit code; they would wait for this one."""


class _Joined(Processes):
    def __init__(self, mpi: Any) -> None:
        self._mpi, self._world = mpi, mpi.COMM_WORLD
        self.rank, self.size = self._world.rank, self._world.size

    def reduce(self, gradients: Array) -> None:
        try:
            for at in range(0, gradients.size, _MESSAGE):
                self._world.Allreduce(self._mpi.IN_PLACE, gradients[at : at + _MESSAGE])
        except self._mpi.Exception as error:
            raise GraphgenError(
                f"process {self.rank} of {self.size} lost another one: {error}; continue from "
                "the last checkpoint"
            ) from error

    def abort(self, code: int) -> None:
        self._world.Abort(code)


_present = Processes()


def processes() -> Processes:
    """The processes that mpiexec started, joined by mpi4py; without mpiexec, this one alone.

    Raises GraphgenError if mpi4py is missing, or uses another MPI than mpiexec's.
    """
    global _present
    started = next((int(os.environ[name]) for name in _SIZES if name in os.environ), 1)
    if started == 1 or _present.size > 1:
        return _present
    who = f"mpiexec started {started} processes"
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:  # RuntimeError if it finds no MPI library
        raise GraphgenError(
            f'{who}, but mpi4py does not import ({error}); pip install "graphgen-onnx[mpi]"'
        ) from error
    if MPI.COMM_WORLD.size != started:
        version = MPI.Get_library_version().splitlines()[0].strip("\0 ")
        raise GraphgenError(
            f"{who}, but mpi4py sees {MPI.COMM_WORLD.size}: it uses another MPI, {version}; start "
            "with that MPI's mpiexec"
        )
    _present = _Joined(MPI)
    return _present


def abort(code: int) -> None:
    """End all processes of this run, if there are others, after an error in this one."""
    _present.abort(code)
