"""Which weights of a model are trained, and why the others are not: a table, not a guess.

Exporters rename weights that they transpose, store equal ones once, and write constants among them.
Module paths of nodes show some of that: a pattern is refused if it names a part of what is one
weight here, or a weight that has another name here. The table shows what cannot be known.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import NamedTuple, TypeAlias

import numpy as np
import onnx_ir as ir

from graphgen.errors import GraphgenError, spelled, warn
from graphgen.export.chosen import Chosen, Parts, patterns_of
from graphgen.export.found import Found
from graphgen.export.tensorflow_files import WHO as TENSORFLOW
from graphgen.export.torch_files import (
    NO_PARAMETERS,
    beside_bases,
    in_doubt,
)
from graphgen.export.uses import (
    EXPORT,
    Uses,
    copies_in,
    is_fresh,
    is_mask,
    is_weight_too,
    listed,
)
from graphgen.export.weights import Weight, Weights
from graphgen.graph import (
    constant,
    is_constant_name,
    is_float,
)
from graphgen.infer import describe
from graphgen.passes.training.adapters import ADAPTERS

Doubts: TypeAlias = Callable[[], list[str]]
"""All that has to be left out of training; asked for a refusal alone, since it compares weights."""


def choose_trainable(
    model: ir.Model, trainable: Parts | None, frozen: Parts | None, *, adapters: bool = False
) -> Weights:
    """Every initializer, and whether it is trained; trained ones reach the loss in float32.

    Without `trainable`, every float parameter that the loss depends on is trained; with `adapters`
    those are, beside what `trainable` names. What `frozen` names is not trained.

    Raises GraphgenError for what names nothing, for a pattern that matches something that must not
    be trained, or a part of what is one weight here; and for equal weights that are stored once. A
    weight that is named in full is meant.
    """
    found = Found(model)
    found.expect_kept()
    values, uses = found.values, found.uses
    beside = [n for n in values if re.search(ADAPTERS, n)] if adapters else []
    reached = found.reached()
    lost = [] if adapters else found.calculated()
    missing = [] if adapters and trainable is None else found.missing(lost)
    wanted, kept = (
        None if given is None else Chosen(name, given, model.graph, found.tied, constants, missing)
        for name, given, constants in (
            ("trainable", trainable, found.constants() | {*lost}),
            ("frozen", frozen, ()),
        )
    )
    if wanted is None and not (adapters or found.known):
        _expect_no_bases(found, kept)
    open_ = [n for n in lost if not (kept and kept.matches(n))]
    doubts = cache(partial(_doubts, found, missing, open_, wanted, kept))
    _expect_all(missing, wanted, kept, doubts)
    _tell_calculated(open_, found, wanted, doubts)
    if wanted is not None:
        names = wanted.of(values)
    elif adapters:
        names = []
    else:
        names = [n for n in reached if not uses[n].is_folded_constant and n not in lost]
        if not names:
            raise GraphgenError(
                f"artifacts: the loss {found.loss.name} depends on none of the {len(found.every)} "
                "float parameters"
            )
    for chosen in filter(None, (wanted, kept)):
        for name, used in uses.items():
            value = values[name]
            if value in found.needed and value not in found.fixed and name not in chosen.meant:
                _check_whole(used, chosen)
        chosen.check(found.every, [n for n, used in uses.items() if used.renamed_product])
    if wanted is not None or not adapters:
        _check_statistics(found, wanted, kept, doubts)
    names = [n for n in values if n in {*names, *beside} and not (kept and kept.matches(n))]
    if not names:
        raise GraphgenError(
            f"artifacts: {kept.given if kept else 'what is named'} leaves nothing to train; "
            "name fewer"
        )
    meant = wanted.meant if wanted is not None else set()
    for name in names:
        _check_trained(name, found, names, meant, wanted, doubts)
    if found.scripted and wanted is None and (unsure := in_doubt(names)):
        warn(
            f"artifacts: a file by TorchScript does not tell {unsure}, which are all trained; "
            f"{EXPORT}, or leave out what is no parameter with {spelled('frozen')}"
        )
    if found.untold and wanted is None and not adapters:
        warn(
            f"artifacts: {found.untold}: compare what is trained with the model's own list, and "
            f"choose with {spelled('trainable')} or {spelled('frozen')}"
        )
    if ours := [n for n in values if is_constant_name(n) and found.is_weight_of_product(n)]:
        warn(
            f"artifacts: {listed(ours)} multiplies what the model reads, but has the name of a "
            "constant, constant_N, so it is not trained; rename it if it is a weight"
        )
    copies = {} if found.known else copies_in(names, values)
    _check_copies(copies, found, names, meant, doubts)

    choice = _Choice(found, wanted, kept, {*names}, {*lost}, copies)
    return Weights(
        Weight(n, str(v.dtype).lower(), tuple(_shape(v)), n in names, choice.reason(n, v))
        for n, v in values.items()
        if not is_constant_name(n)
    )


class _Choice(NamedTuple):
    """What is trained of what was found, and by which options."""

    found: Found
    wanted: Chosen | None
    kept: Chosen | None
    names: set[str]
    lost: set[str]
    copies: Mapping[str, str]

    def reason(self, name: str, value: ir.Value) -> str:
        """Why a weight is not trained, or as what it is, or ""."""
        found, used = self.found, self.found.uses.get(name)
        if value in found.fixed:
            return found.fixed[value] + ", trained since it is named" * (name in self.names)
        if not is_float(value):
            return "only float32 is trained"
        assert used is not None
        if name in self.copies and name in self.names:
            return f"{self.copies[name]} transposed, trained apart from it"
        if name in self.names:
            return used.known()
        if self.wanted is None and name in self.lost:
            return "calculated by an exporter"
        if name not in found.every or used.is_folded_constant:
            return "a constant"
        if value not in found.needed:
            return "not reached by the loss"
        if (of := found.origin.get(name)) and (self.wanted is None or of in NO_PARAMETERS):
            return of
        by_frozen = self.kept is not None and self.kept.matches(name)
        how = (
            f"named by {spelled('frozen')}" if by_frozen else f"not named by {spelled('trainable')}"
        )
        return "; ".join(filter(None, [how, used.known()]))


def _doubts(
    found: Found,
    missing: Sequence[str],
    lost: Sequence[str],
    wanted: Chosen | None,
    kept: Chosen | None,
) -> list[str]:
    """All that would not be trained as in torch: with these in `frozen`, nothing is refused.

    They are names, or patterns for many.
    """
    values, uses = found.values, found.uses
    named = [n for n in found.every if wanted is not None and wanted.matches(n)]
    names = found.reached() if wanted is None else named
    names = [n for n in names if n not in lost and not uses[n].is_folded_constant]
    doubts = [*missing, *_surely_calculated(lost, found)]
    doubts += [n for n in names if uses[n].folded or (found.several(n) and is_fresh(values[n]))]
    doubts += [n for n, used in uses.items() if {*missing} & {*used.names().values()}]
    doubts += [] if found.known else copies_in(names, values)
    doubts += [n for n, v in values.items() if v in found.fixed and is_weight_too(v)]
    meant = set() if wanted is None else wanted.meant
    open_ = (n for n in dict.fromkeys(doubts) if not (kept and kept.matches(n)))
    out = [n for n in open_ if (wanted is None or wanted.matches(n)) and n not in meant]
    # A pattern must not name a part of what several modules have.
    several = [n for n in out if n in uses and len(uses[n].blocks) > 1]
    others = {*values, *missing, *(x for used in uses.values() for x in used.names().values())}
    return several + patterns_of([n for n in out if n not in several], others - {*out})


def _expect_no_bases(found: Found, kept: Chosen | None) -> None:
    """Raise for layers that PEFT has wrapped, which it freezes, if nothing says what is trained."""
    wrapped, beside = beside_bases(found.uses)
    wrapped = [n for n in wrapped if n in found.reached() and not (kept and kept.matches(n))]
    if wrapped:
        parts = spelled("trainable", [] if found.scripted else beside)
        raise GraphgenError(
            f"artifacts: {wrapped[0]} is a weight of a layer that PEFT has wrapped, which it "
            "freezes, and the file does not say so: bring the module with gg.from_torch or "
            f"`graphgen import`, which keep what is frozen, or say what is trained with {parts}"
        )


def _expect_all(
    missing: Sequence[str], wanted: Chosen | None, kept: Chosen | None, doubts: Doubts
) -> None:
    """Raise for parameters in torch that would be trained, and are missing in the file."""
    names = [n for n in missing if wanted is None or wanted.matches(n)]
    if names := [n for n in names if not (kept and kept.matches(n))]:
        raise GraphgenError(
            f"artifacts: the file lacks {listed(names)}, which torch's exporter folded, joined "
            f"with others or dropped, so they would not be trained as in torch: {EXPORT}, or leave "
            f"all that is in doubt out with {spelled('frozen', doubts())}"
        )


def _check_statistics(
    found: Found, wanted: Chosen | None, kept: Chosen | None, doubts: Doubts
) -> None:
    """Raise for what would be trained, but is stored once with an equal statistic or state."""
    for name, value in found.values.items():
        given = wanted is None or wanted.matches(name)
        if not given or (kept and kept.matches(name)) or value not in found.needed:
            continue
        if value in found.fixed and is_weight_too(value):
            raise GraphgenError(
                f"artifacts: {name} is {found.fixed[value]}, and a weight of "
                f"{listed(found.uses[name].blocks) or 'another module'}: they were equal, and were "
                f"stored once; {found.export}, or leave it out with {spelled('frozen', doubts())}"
            )


def _check_trained(
    name: str,
    found: Found,
    names: Sequence[str],
    meant: set[str],
    wanted: Chosen | None,
    doubts: Doubts,
) -> None:
    """Raise if a weight cannot be trained, or would not be as in torch and is not meant."""
    value, used = found.values[name], found.uses.get(name)
    if value in found.fixed and name not in meant:
        others = ", ".join(n for n in names if n in found.every) or "others"
        raise GraphgenError(
            f"artifacts: {wanted.given if wanted else ''} matches {name}, which is "
            f"{found.fixed[value]}: no gradient may change it; name only {others}, or, if it is "
            "meant, its whole name"
        )
    if value.dtype is not ir.DataType.FLOAT:
        raise GraphgenError(
            f"artifacts: parameter {name} is {describe(value)}; only float32 is trained: "
            f"convert it, or choose others with {spelled('trainable')}"
        )
    if value not in found.needed:
        raise GraphgenError(
            f"artifacts: the loss {found.loss.name} does not depend on parameter {name}; leave it "
            f"out of {spelled('trainable')}"
        )
    if used is None or name in meant:
        return
    problem = ""
    if used.folded:
        problem = f"{used.folded}: trained, it would not change as it does where it was made"
    elif found.several(name) and is_fresh(value):
        problem = (
            f"one weight of {used.places()}, whose weights were equal and were stored once; "
            "trained, they would stay equal"
        )
    if problem:
        raise GraphgenError(
            f"artifacts: {name} is {problem}: {found.export}, or leave it out with "
            f"{spelled('frozen', doubts())}, or, if it is meant, give its whole name in "
            f"{spelled('trainable')}"
        )


def _check_copies(
    copies: Mapping[str, str],
    found: Found,
    names: Sequence[str],
    meant: set[str],
    doubts: Doubts,
) -> None:
    """Refuse, or warn of, weights that are stored twice, or once for several modules."""
    for name, other in copies.items():
        if not {name, other} <= meant:
            raise GraphgenError(
                f"artifacts: {name} is {other} transposed: one weight before the "
                "export, and two in this file, which training would make different: "
                f"{found.export}, or train one of them, with {spelled('frozen', doubts())}, or "
                f"give both whole names in {spelled('trainable')}"
            )
    shared = [n for n in names if found.several(n)]
    pairs = [tuple(found.uses[n].blocks) for n in shared if n not in meant]
    if twice := [pair for pair in pairs if len(pair) > 1 and pairs.count(pair) > 1]:
        raise GraphgenError(
            f"artifacts: all weights of {listed(twice[0])} are stored once, since one module was "
            f"a copy of the other; trained, they would stay equal: {found.export}, or, if they "
            f"are tied, give their whole names in {spelled('trainable')}"
        )
    if shared or copies:
        one = [f"{n} is one weight of {found.uses[n].places()}" for n in shared]
        one += [f"{n} is {copies[n]} transposed, trained apart from it" for n in copies]
        rest = f", and {len(one) - 3} more" if len(one) > 3 else ""
        warn(
            f"artifacts: {'; '.join(one[:3])}{rest}: tied in the model, or only equal when it was "
            "exported; its file does not say which"
        )


def _surely_calculated(names: Sequence[str], found: Found) -> list[str]:
    """Those that are refused: two numbers, as masks are, may be constants, if nothing is said.

    A weight may begin with one number, but in a file of dynamo's, which lists all.
    """
    values, scripted, made = found.values, found.scripted, found.program.of_parameters()
    arrays = {n: constant(values[n]) for n in names}
    return [
        n
        for n, array in arrays.items()
        if array is None
        or n in made
        or found.by_tensorflow
        or (size := np.unique(array).size) > 2
        or (size == 1 < array.size and scripted and not is_mask(values[n]))
    ]


def _tell_calculated(
    names: Sequence[str], found: Found, wanted: Chosen | None, doubts: Doubts
) -> None:
    """Refuse, or warn of, parameters that are lost in what an exporter has calculated of them.

    Where it is said what is trained, and of what is perhaps a constant, it warns.
    """
    names = [n for n in names if wanted is None or not wanted.matches(n)]
    lost = _surely_calculated(names, found)
    advice, where = found.export, TENSORFLOW if found.by_tensorflow else "torch"
    who = where if found.by_tensorflow else "torch's exporter"
    some = ", ".join((lost or names)[:6])
    more = f", and {len(lost or names) - 6} more" if len(lost or names) > 6 else ""
    if lost and wanted is None:
        raise GraphgenError(
            f"artifacts: {who} calculated {some}{more}, of constants or of parameters, "
            f"which would not be trained as in {where}: {advice}, or leave them out with "
            f"{spelled('frozen', doubts())}"
        )
    if names:
        warn(
            f"artifacts: {who} calculated {some}{more}, of constants or of parameters, "
            f"so they are not trained; {advice}; or name them in {spelled('trainable')}"
        )


def _shape(value: ir.Value) -> list[int]:
    """The sizes of an initializer's tensor; its value may have symbols, as a folded one."""
    return [] if value.const_value is None else [*value.const_value.shape.numpy()]


def _check_whole(used: Uses, chosen: Chosen) -> None:
    """Raise if patterns name only some of the weights that are stored as this one."""
    if (
        used.tied
        or not used.blocks
        or used.is_folded_constant
        or (used.renamed and not used.in_product)
    ):
        return
    named = chosen.matches(used.name)
    found = {block: chosen.matches(name) for block, name in used.names().items()}
    found |= dict.fromkeys(used.own, named)
    if not any(found.values()) or (named and (used.renamed or all(found.values()))):
        return
    some = listed([block for block, given in found.items() if given])
    whole = f", one weight of {listed(used.blocks)}" if len(used.blocks) > 1 else ""
    raise GraphgenError(
        f"artifacts: {chosen.given} names {some}, whose weight "
        f"is {used.name} in this file{whole}; name all of it or none of it, or "
        f"{EXPORT}"
    )
