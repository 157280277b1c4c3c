"""What a graph and its file say of the weights of a model, before something is chosen."""

import re
from collections.abc import Sequence

import onnx_ir as ir

from graphgen.errors import GraphgenError, warn
from graphgen.export.tensorflow_files import (
    ADVICE,
    calculated_by_tensorflow,
    is_by_tensorflow,
    untold,
)
from graphgen.export.torch_files import (
    NO_PARAMETERS,
    OF_CONSTANTS,
    Program,
    buffers_by_name,
    calculated_by_torch,
    calculated_numbers,
    is_scripted,
    made_in_steps,
    origin_of,
    straight_through,
)
from graphgen.export.uses import EXPORT, SCRIPTS, Uses, is_fresh, listed
from graphgen.graph import CONSTANT, ORIGIN, fixed_values, is_float, parameters
from graphgen.ops.recurrent import STATE
from graphgen.passes.training.adapters import ADAPTERS
from graphgen.subgraphs import ancestors, reads


class Found:
    """The weights of a model, and what its graph and its file say of them."""

    def __init__(self, model: ir.Model) -> None:
        self.graph = graph = model.graph
        [self.loss] = graph.outputs
        read = reads(graph)
        self.needed = {self.loss}.union(*(read[node] for node in ancestors(self.loss, read)))
        self.values, self.fixed = graph.initializers, fixed_values(graph)
        self.origin, self.tied = origin_of(model)
        foreign = model.producer_name != "graphgen"  # ours keep their declared names
        self.known = ORIGIN in model.metadata_props  # of gg.from_torch
        self.scripted, self.by_tensorflow = is_scripted(model), is_by_tensorflow(model)
        self.untold = untold(model)
        self.export = ADVICE if self.untold else EXPORT
        self.uses = {
            n: Uses(v, foreign, self.tied.get(n, ()), known=self.known, scripted=self.scripted)
            for n, v in self.values.items()
            if is_float(v)
        }
        self.program = Program(graph, self.uses)
        states = [v for v, what in self.fixed.items() if what.startswith(STATE)]
        if self.scripted:
            self.origin |= buffers_by_name(self.values)
            self.program.calculated |= made_in_steps(graph) & {*self.uses}
            for value in [v for v in states if not re.match(SCRIPTS, str(v.name))]:
                del self.fixed[value]  # by its name in a module
        self.states = [str(v.name) for v in states if v in self.fixed]
        made = () if self.known else self.program.of_constants()
        self.origin |= {n: OF_CONSTANTS for n in made if not is_fresh(self.values[n])}
        every = {*parameters(graph), *(str(v.name) for v in states if v not in self.fixed)}
        if self.scripted:  # it writes constants as nodes, and keeps the names of parameters alone
            scalars = (n for n, v in self.values.items() if v.shape == () and n in self.uses)
            every |= {
                n
                for n in scalars
                if not self.values[n].meta.get(CONSTANT) and not re.match(SCRIPTS, n)
            }
        self.every = [name for name in self.values if name in every]
        """The float parameters."""

    def reached(self) -> list[str]:
        """Those that the loss depends on, and that their maker would train."""
        return [n for n in self.every if self.values[n] in self.needed and n not in self.origin]

    def constants(self) -> set[str]:
        """What no pattern means: no parameters, but for statistics, and weights in other dtypes."""
        kinds = (ir.DataType.INT64, ir.DataType.INT32, ir.DataType.BOOL)
        return {
            n
            for n, v in self.values.items()
            if v.dtype in kinds
            or (
                n in self.uses
                and (
                    n not in self.every
                    or self.uses[n].is_folded_constant
                    or self.origin.get(n) in NO_PARAMETERS
                )
                and v not in self.fixed
                and not re.search(ADAPTERS, n)
            )
        }

    def expect_kept(self) -> None:
        """Raise GraphgenError for buffers that each call changes, and the loss depends on."""
        changed = [] if self.known else self.program.mutated
        for name, value in self.values.items():
            read = value in self.needed and value not in self.fixed
            if read and (name in changed or self.program.made_of(name, changed)):
                raise GraphgenError(
                    f"artifacts: each call of the module changes {', '.join(sorted(changed))}, and "
                    "the next one reads it; a graph keeps nothing from one call to the next: "
                    "export the module in evaluation mode, or make it an input and an output"
                )
        if self.scripted and (node := straight_through(self.graph)) is not None:
            raise GraphgenError(
                f"artifacts: {node.name} adds what was subtracted before, as a straight-through "
                "estimator does: a part of it was detached, and files by TorchScript do not say "
                f"so, so the gradient would be another one; {EXPORT}"
            )
        norms = r"num_batches_tracked|running_(mean|var)"
        gone = [n for n in changed if n not in self.values and not re.search(norms, n)]
        if gone:
            warn(
                f"artifacts: each call of the module changes {listed(sorted(gone))}, which the "
                "file no longer has: if the loss depends on it, it is trained otherwise than in "
                f"torch; {EXPORT}"
            )

    def learned_states(self) -> list[str]:
        """Initial states that torch's exporters have calculated, and not of constants alone."""
        found, values, made = self.program, self.values, self.program.of_parameters()
        torchs = self.scripted or found.parameters
        unknown = [n for n in self.states if n not in self.origin and values[n] in self.needed]
        return [n for n in unknown if n in made or (torchs and not is_fresh(values[n]))]

    def calculated(self) -> list[str]:
        """What an exporter says that it has calculated, or may have."""
        values, uses, reached = self.values, self.uses, self.reached()
        if self.by_tensorflow:
            return [n for n in calculated_by_tensorflow(values) if n in reached]
        told = () if self.known else (self.program.calculated, self.program.parameters)
        lost = calculated_by_torch(reached, values, uses, self.scripted, *told)
        if not self.known:
            lost += [
                n
                for n in calculated_numbers(values, uses, self.scripted)
                if values[n] in self.needed and n not in {*lost, *reached, *self.origin}
            ]
            lost += self.learned_states()
        return lost

    def missing(self, calculated: Sequence[str]) -> list[str]:
        """Parameters in torch that the file lacks, among them what went into `calculated` ones."""
        return [] if self.known else self.program.missing(calculated)

    def is_weight_of_product(self, name: str) -> bool:
        """Whether a matrix from another tool is in a product that the loss depends on."""
        used, value = self.uses.get(name), self.values[name]
        matrix = value.shape is not None and len(value.shape) > 1
        return used is not None and matrix and used.in_product and value in self.needed

    def several(self, name: str) -> bool:
        """Whether a weight is that of several modules, and the file does not say that it is."""
        used = self.uses.get(name)
        return used is not None and not used.tied and (len(used.blocks) > 1 or bool(used.others))
