"""Adapters: from what was trained and from files, into files and into the weights of a model."""

import itertools
import json
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from graphgen.display import fields, on_screen
from graphgen.errors import GraphgenError
from graphgen.export.as_published import as_published
from graphgen.export.base_weights import check_base, of_version, read_spots, to_version
from graphgen.export.checkpoint import Checkpoint
from graphgen.export.peft import CONFIG, check_matrices, read_folder, write_folder
from graphgen.export.runtime_adapters import read_file, write_file
from graphgen.export.session import model_of
from graphgen.files import path_of, present
from graphgen.graph import ModelLike, constant
from graphgen.infer import describe
from graphgen.match import Engine, run_passes
from graphgen.operands import Array
from graphgen.parts import Part, parts_in
from graphgen.passes.training.adapters import (
    MAGNITUDE,
    A,
    B,
    LoRA,
    adapt,
    former_names,
    linears,
    only,
    published_names,
)
from graphgen.passes.training.by_row import products, quantized_linears, weight_of
from graphgen.passes.training.merged import merging, sites_of
from graphgen.passes.training.updates import Update, Whole

ENDING = ".onnx_adapter"
"""Of files that the runtime's LoraAdapter reads."""

LORA = "graphgen.lora"
"""Property of a checkpoint with adapters: what `adapt` notes of them, as JSON."""


@dataclass(eq=False)
class Adapter:
    """Low-rank updates of products: for each module s · B A, float[out, in], is added to its Wᵀ.

    `matrices` holds A, float[rank, in], and B, float[out, rank], by the name of the module with
    `.lora_A.weight` and `.lora_B.weight`. s is alpha / rank, or alpha / √rank if `rank_stabilized`.
    With `.lora_magnitude_vector`, float[out], of every module (DoRA), each row of Wᵀ + s · B A then
    gets that as its norm.
    `published` says what the checkpoint calls these modules, if the model was built from one.
    `saved` holds what was trained as a whole beside them, such as a head: by the name of a module
    of a product with `.weight`, float[out, in], and `.bias`, float[out]; PEFT's `modules_to_save`.
    `spots` are some numbers of each module's weight that it was trained beside: a model with other
    weights is told by them. Files of other programs have none. If it is `scaled`, B holds a part of
    the scale, or an update became a whole weight: it computes, but trains otherwise.
    `own` has the rank and the alpha of modules with others; PEFT's `rank_pattern`, `alpha_pattern`.
    """

    matrices: dict[str, Array]
    rank: int
    alpha: float
    rank_stabilized: bool = False
    dropout: float = 0.0
    published: dict[str, Part] | None = None
    saved: dict[str, Array] = field(default_factory=dict)
    spots: dict[str, Array] = field(default_factory=dict)
    scaled: bool = False
    own: dict[str, tuple[int, float]] = field(default_factory=dict)

    @on_screen
    def __repr__(self) -> Iterator[str]:
        yield f"Adapter of rank {self.rank}, alpha {self.alpha:g}"
        own = [f"{n}: {rank}, {alpha:g}" for n, (rank, alpha) in self.own.items()]
        yield from fields(modules=self.modules, own=own, saved=[*self.saved])

    @property
    def modules(self) -> list[str]:
        """The names of the modules."""
        return sorted(name.removesuffix(A) for name in self.matrices if name.endswith(A))

    @property
    def whole(self) -> list[str]:
        """The names of the modules of `saved`."""
        return sorted({name.rpartition(".")[0] for name in self.saved})

    @property
    def dora(self) -> bool:
        """Whether magnitudes were trained, too."""
        return any(name.endswith(MAGNITUDE) for name in self.matrices)

    @property
    def scale(self) -> float:
        """s, of all modules that have no rank and alpha of their own."""
        return self.settings("").scale

    def settings(self, module: str) -> LoRA:
        """How a module is adapted."""
        rank, alpha = self.own.get(module, (self.rank, self.alpha))
        return LoRA("", rank, alpha, self.dropout, self.rank_stabilized, dora=self.dora)

    def _shapes(self) -> dict[str, tuple[int, int]]:
        """Of the weight of each module."""
        return {name: update.shape for name, update in self.updates().items()}

    def updates(self) -> dict[str, Update]:
        """A, s · B and, with DoRA, the magnitude of each module."""
        found, scales = (
            self.matrices,
            {n: np.float32(self.settings(n).scale) for n in self.modules},
        )
        return {
            name: Update(found[name + A], scale * found[name + B], found.get(name + MAGNITUDE))
            for name, scale in scales.items()
        }

    @classmethod
    def of(cls, saved: Checkpoint, where: str) -> "Adapter | None":
        """The adapter in a checkpoint; None where nothing says that there is one.

        Raises GraphgenError if what it says is damaged.
        """
        if LORA not in saved.properties:
            return None
        try:
            noted = json.loads(str(saved.properties[LORA]))
            given = int(noted["rank"]), float(noted["alpha"]), bool(noted["rank_stabilized"])
            parts = (A, B, MAGNITUDE) if noted.get("dora") else (A, B)
            needed = {name + part: name + part for name in noted["modules"] for part in parts}
            needed |= {name + A: first + A for name, first in noted.get("shared", {}).items()}
            matrices = {name: saved.trainable[stored] for name, stored in needed.items()}
            own = {name: (int(r), float(a)) for name, (r, a) in noted.get("own", {}).items()}
            for rank, alpha in (given[:2], *own.values()):
                LoRA("", rank, alpha, rank_stabilized=given[2])
            check_matrices(matrices, given[0], own, where)
            names = parts_in(noted["names"]) if "names" in noted else None
            whole = dict[str, Array]()
            for name, (stored, turned) in dict(noted.get("saved", {})).items():
                whole[name] = saved.trainable[stored].T if turned else saved.trainable[stored]
            spots = read_spots(noted.get("base", {}))
            return cls(matrices, *given, float(noted["dropout"]), names, whole, spots, own=own)
        except (KeyError, TypeError, ValueError, RecursionError, GraphgenError) as error:
            raise GraphgenError(
                f"{where}: its property {LORA}, or a matrix that it names, is missing or damaged "
                f"({error}); write the artifacts again"
            ) from None

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Adapter":
        """The adapter in a folder of PEFT, a checkpoint, a training run or a file .onnx_adapter.

        Raises GraphgenError where there is none, or one that is more than low-rank updates.
        """
        path = path_of(path, "Adapter.load")
        if path.suffix == ENDING:
            return cls._from_runtime(path)
        if present(path / CONFIG):
            return cls(**read_folder(path)._asdict())
        file = path / "checkpoint" if path.is_dir() else path
        saved = Checkpoint.load(file)
        if (found := cls.of(saved, str(file))) is None:
            raise GraphgenError(
                f"{file} holds no adapter; train one with graphgen artifacts --lora 'PATTERN:RANK'"
            )
        noted = json.loads(str(saved.properties[LORA])).get("saved", {})
        whole = {own for own, _ in noted.values()}
        if others := sorted({*saved.trainable} - {*found.matrices} - whole):
            raise GraphgenError(
                f"{file}: {others[0]} was trained, too, and is no weight of a product of its own, "
                "which no adapter holds: write the whole model with graphgen export"
            )
        return found

    @classmethod
    def _from_runtime(cls, file: Path) -> "Adapter":
        """Of a file that `export` wrote, whose B are scaled: alpha is the rank."""
        matrices, version = read_file(file)
        ranks = {n.removesuffix(A): len(x) for n, x in matrices.items() if n.endswith(A) and x.ndim}
        rank = next(iter(ranks.values()), 0) or 1
        own = {name: (own, float(own)) for name, own in ranks.items() if own != rank}
        check_matrices(matrices, rank, own, file)
        found = cls(matrices, rank, float(rank), scaled=True, own=own)
        found.spots = of_version(version, found._shapes())
        return found

    def save(self, folder: str | os.PathLike[str], *, base: str = "") -> Path:
        """Write the two files that PEFT reads; `base` names the model it belongs to.

        The names of the modules are those of the checkpoint that the model was built from, or of
        the torch model that was exported: PEFT finds them there. Raises GraphgenError where it
        cannot be written.
        """
        if self.published is not None:
            return as_published(self).save(folder, base=base)
        config: dict[str, Any] = {
            "base_model_name_or_path": base or None,
            "r": self.rank,
            "lora_alpha": int(self.alpha) if self.alpha == int(self.alpha) else self.alpha,
            "lora_dropout": self.dropout,
            "use_rslora": self.rank_stabilized,
            "use_dora": self.dora,
            "target_modules": self.modules,
            "modules_to_save": self.whole or None,
        }
        if self.own:  # the first pattern that the end of a name matches counts: long names first
            every = {n: self.settings(n) for n in sorted(self.modules, key=len, reverse=True)}
            config["rank_pattern"] = {re.escape(n): lora.rank for n, lora in every.items()}
            config["alpha_pattern"] = {re.escape(n): lora.alpha for n, lora in every.items()}
        return write_folder(folder, config, self.matrices | self.saved, self.spots)

    def export(self, path: str | os.PathLike[str]) -> Path:
        """Write a file that the runtime's LoraAdapter reads, for the model that `base` returns."""
        self._expect_updates_only()
        self._expect_no_magnitudes()
        scaled = {n + B: self.settings(n).scale for n in self.modules}
        values = {n: x * np.float32(scaled.get(n, 1)) for n, x in self.matrices.items()}
        return write_file(path, values, to_version(self.spots, self._shapes()))

    def base(self, model: str | os.PathLike[str] | ModelLike) -> ir.Model:
        """A copy of `model` that runs beside adapters of the same modules and rank.

        Their matrices are inputs, of zeros by default: the outputs are then those of `model`. The
        scale is part of B.
        """
        self._expect_updates_only()
        self._expect_no_magnitudes()
        result = model_of(model, "adapter").clone()
        names = self._sites(result)
        alone = {place: LoRA("", self.settings(own).rank) for own, place in names.items()}
        adapt(result, LoRA(only(names.values()), self.rank), own=alone)
        for own, part in itertools.product(names, (A, B)):
            value = result.graph.initializers.pop(names[own] + part)
            assert value.const_value is not None
            zeros = np.zeros(value.const_value.shape.numpy(), np.float32)
            value.name, value.const_value = own + part, ir.tensor(zeros, name=own + part)
            result.graph.register_initializer(value)
            result.graph.inputs.append(value)
        return result

    def _sites(self, model: ir.Model) -> dict[str, str]:
        """The model's name of each module.

        Raises GraphgenError where they are no products of the model of the same sizes.
        """
        places = self.places(model, self.modules)
        if parts := next((p for p in places.values() if len(p) > 1), None):
            raise GraphgenError(
                f"adapter: the model has one module of the adapter as {' and '.join(parts)}: "
                "merge it instead"
            )
        self.of_model(model).check_sizes("adapter", model)
        return {own: place for own, [place] in places.items()}

    def merged(self, model: str | os.PathLike[str] | ModelLike) -> ir.Model:
        """A copy of `model`, not optimized yet or optimized, with the updates in its weights.

        Raises GraphgenError for a module that is no product of the model, or of another size.
        """
        result = model_of(model, "adapter").clone()
        updates = self.of_model(result).updates()
        few = {site.module for site in quantized_linears(result).values()}
        if packed := sorted(
            few & {*updates, *(p for m in self.places(result, self.whole).values() for p in m)}
        ):
            raise GraphgenError(
                f"adapter: the weight of {packed[0]} is in few bits, and no update can be merged "
                "into it: run the adapter beside it, with --adapter NAME=RUN, or give a folder in "
                "float32"
            )
        self.put_whole(result)
        run_passes(result, [merging("adapter", updates)], Engine())
        return result

    def put_whole(self, model: ir.Model) -> None:
        """Let a model have the weights that were trained as a whole."""
        sites = {site.module: site for site in linears(model).values()}
        places, tied = self.places(model, self.whole), dict[str, Whole]()
        for name, array in self.saved.items():
            module, _, part = name.rpartition(".")
            site = sites.get(places[module][0]) if len(places[module]) == 1 else None
            value = None
            if site is not None and part == "weight" and len(site.weight.uses()) > 1:
                tied[site.module] = Whole(array)  # the table that it is tied to stays
                continue
            if site is not None and part == "weight":
                value, array = site.weight, array if site.by_rows else array.T
            elif site is not None:
                value = model.graph.initializers.get(f"{site.module}.{part}")
            if value is None or value.shape != array.shape or len(value.uses()) > 1:
                raise self._not_there(name, "none" if value is None else describe(value))
            value.const_value = ir.tensor(np.ascontiguousarray(array), name=value.name)
        run_passes(model, [merging("adapter", tied)] if tied else [], Engine())

    def _not_there(self, name: str, found: str) -> GraphgenError:
        shape = f", {[*self.saved[name].shape]}" if name in self.saved else ""
        return GraphgenError(
            f"adapter: {name} was trained as a whole{shape}, and the model has {found} of its own: "
            "give the model that it was trained on, not optimized yet, or merge the adapter with "
            "PEFT's merge_and_unload"
        )

    def _expect_updates_only(self) -> None:
        if self.saved:
            raise GraphgenError(
                f"adapter: {self.whole[0]} was trained as a whole beside the low-rank updates, so "
                "it is no input beside the base: merge the adapter, or run it with --adapter "
                "NAME=RUN"
            )

    def _expect_no_magnitudes(self) -> None:
        if self.dora:
            raise GraphgenError(
                "adapter: it has magnitudes (DoRA), whose norms need the weights, and no file of "
                "the runtime has a place for them: merge it, run it with --adapter NAME=RUN, or "
                "save it for PEFT"
            )

    def placed(self, model: ir.Model) -> dict[str, Update]:
        """The update of each module, by the model's name of it, for rows beside the base.

        Of a module that the model has as several parts, each part has its rows of B. What was
        trained as a whole is the difference to the model's. Raises GraphgenError for a module as a
        whole that is not in the model.
        """
        found = {site.module: node for node, site in products(model).items()}
        updates, places = self.of_model(model).updates(), self.places(model, self.whole)
        for name, [place, *others] in places.items():
            own = None if others or place not in found else weight_of(found[place])
            weight, bias = (self.saved.get(f"{name}.{part}") for part in ("weight", "bias"))
            known = model.graph.initializers.get(f"{place}.bias")
            before = None if known is None else constant(known)
            if own is None or (weight is not None and weight.shape != own.shape):
                raise self._not_there(f"{name}.weight", "another or none")
            if bias is not None and (before is None or before.shape != bias.shape):
                raise self._not_there(f"{name}.bias", "another or none")
            change = np.zeros_like(own) if weight is None else weight - own
            pair = np.eye(min(own.shape), dtype=np.float32)
            a, b = (change, pair) if len(pair) == len(own) else (pair, change)
            shift = None if bias is None or before is None else bias - before
            updates[place] = Update(a, b, shift=shift)
        return updates

    def within(self, model: ir.Model) -> "Adapter":
        """The part of it whose modules are in a model, one graph of several."""
        known = {site.module for site in products(model).values()}
        places = self.places(model, [*self.modules, *self.whole])
        own = {name for name, given in places.items() if {*given} <= known}
        matrices = {
            n: x
            for n, x in self.matrices.items()
            if any(n == module + part for module in own for part in (A, B, MAGNITUDE))
        }
        saved = {n: x for n, x in self.saved.items() if n.rpartition(".")[0] in own}
        spots = {n: x for n, x in self.spots.items() if n in own}
        settings = {n: x for n, x in self.own.items() if n in own}
        return replace(self, matrices=matrices, saved=saved, spots=spots, own=settings)

    def of_model(self, model: ir.Model) -> "Adapter":
        """The updates by the model's names of the modules.

        Each of several parts that the model has of a module has the same A, and its rows of B.
        """
        matrices, own = dict[str, Array](), dict[str, tuple[int, float]]()
        published, known = published_names(model), self.places(model, self.modules)
        check_base(self.spots, model, known)
        for name, places in known.items():
            out = len(self.matrices[name + B])
            parts = [published[module] for module in places] if len(places) > 1 else []
            if any(out % (part.of * part.groups) for part in parts):
                raise GraphgenError(
                    f"adapter: the model has {name} as {len(places)} weights, and its update is "
                    f"{[*self.updates()[name].shape]}: give the model that it was trained on"
                )
            rows = [part.outputs(out) for part in parts] or [np.arange(out)]
            for module, its in zip(places, rows, strict=True):
                matrices[module + A] = self.matrices[name + A]
                for part in (B, MAGNITUDE) if self.dora else (B,):
                    matrices[module + part] = self.matrices[name + part][its]
                own |= {module: self.own[name]} if name in self.own else {}
        return replace(self, matrices=matrices, own=own, published=None, saved={}, spots={})

    def check_sizes(self, who: str, model: ir.Model) -> None:
        """Raise where the modules, by the model's names, are no products of it of these sizes."""
        sites_of(who, linears(model), self._shapes())

    def places(self, model: ir.Model, wanted: Sequence[str]) -> dict[str, list[str]]:
        """The model's name of each wanted module, or of its parts in the model, in their order.

        In the model it may have a prefix of the exporter's own, or the checkpoint's name.
        """
        known, names = {s.module for s in products(model).values()}, published_names(model)
        parts = dict[str, dict[int, str]]()
        for module, part in names.items():
            if module in known:
                parts.setdefault(part.name, {})[part.number] = module
        wholes = {name: [x[i] for i in sorted(x)] for name, x in parts.items()}
        short = {n for n, x in wholes.items() if sum(names[m].width for m in x) != names[x[0]].of}
        places = {name: [name] for name in known} | {
            name: modules for name, modules in wholes.items() if name not in known | short
        }
        former = former_names(model).items()
        places = {old: places[now] for now, old in former if now in places} | places
        found = dict[str, list[str]]()
        for name in wanted:
            own = (self.published or {}).get(name, Part(name))
            for other in (name, own.name if own.of == 1 else name):
                longer = [p for n, p in places.items() if n.endswith(f".{other}")]
                found[name] = places.get(other) or (longer[0] if len(longer) == 1 else [name])
                if found[name] != [name]:
                    break
        for name, given in found.items():
            if twice := [n for n in found if n != name and {*given} & {*found[n]}]:
                raise GraphgenError(
                    f"adapter: {name} and {twice[0]} would both be {given[0]} in the model: give "
                    "the model that the adapter was trained on"
                )
        return found
