"""The two files of an adapter in PEFT: adapter_config.json and adapter_model.safetensors."""

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from graphgen import safetensors
from graphgen.errors import GraphgenError
from graphgen.export.base_weights import SPOTS, Spots, read_spots, to_text
from graphgen.export.partial import in_place_of
from graphgen.files import present, read_json
from graphgen.operands import Array
from graphgen.passes.training.adapters import BASE, MAGNITUDE, A, B, LoRA
from graphgen.passes.training.updates import Update

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"

_PREFIX = "base_model.model."  # of every name in PEFT's files
_WITHOUT_EFFECT = re.compile(
    r"auto_mapping|base_model_name_or_path|bias|fan_in_fan_out|inference_mode|init_lora_weights|"
    r"lora_alpha|lora_dropout|modules_to_save|peft_type|peft_version|qalora_group_size|r|revision|"
    r"target_modules|exclude_modules|task_type|use_dora|use_rslora|corda_config|"
    r"eva_config|loftq_config|runtime_config|ensure_weight_tying|megatron_core|layers_pattern|"
    r"layers_to_transform|rank_pattern|alpha_pattern"
)
"""Fields that are used here, or that change nothing once the matrices are trained."""

_STARTS = (True, False, None, "gaussian", "eva", "orthogonal")
"""The `init_lora_weights` that leave the model's own weight as it is."""

_UNMERGED = ("LILY", "POLY", "SHADOW", "XLORA")  # kinds that PEFT 0.21 does not merge


class Contents(NamedTuple):
    """What a folder holds, as `graphgen.export.adapters.Adapter` has it."""

    matrices: dict[str, Array]
    rank: int
    alpha: float
    rank_stabilized: bool
    dropout: float
    saved: dict[str, Array]
    spots: dict[str, Array]
    scaled: bool
    own: dict[str, tuple[int, float]]


def read_folder(folder: Path) -> Contents:
    """The adapter in a folder. Raises GraphgenError for one that is more than Adapter holds."""
    config = read_json(folder / CONFIG)
    rank, alpha, stabilized, dropout = _settings(folder / CONFIG, config)
    matrices, saved = dict[str, Array](), dict[str, Array]()
    listed = config.get("modules_to_save") or []
    if not isinstance(listed, list):
        problem = f"modules_to_save is {listed!r}; it must be a list of names"
        raise GraphgenError(f"{folder / CONFIG}: {problem}")
    ends = [f"{name}." for name in listed]  # PEFT takes every module whose name ends so
    if not present(folder / WEIGHTS):
        raise GraphgenError(f"{folder} has no {WEIGHTS}: save it with safe_serialization=True")
    weights, metadata = safetensors.read_headers(folder / WEIGHTS)
    for weight in weights:
        name = weight.name.removeprefix(_PREFIX)
        beside = BASE in name and not name.endswith((A, B, MAGNITUDE))
        kept = beside or any(part in name for part in ends)
        size = 1 if name.endswith(".bias" if kept else MAGNITUDE) else 2
        known = kept or BASE not in name  # of torch's attention, where PEFT adds the update twice
        known &= name.endswith((".weight", ".bias") if kept else (A, B, MAGNITUDE))
        if not known or len(weight.shape) != size or not weight.dtype.is_floating_point():
            raise GraphgenError(
                f"{folder / WEIGHTS}: {weight.name} is no matrix of a low-rank update, and no "
                "weight of a product in modules_to_save: merge the adapter with PEFT's "
                "merge_and_unload"
            )
        (saved if kept else matrices)[name] = weight.read().astype(np.float32)
    try:
        own = _own(matrices, config, rank, alpha)
    except (re.error, AttributeError, TypeError, ValueError, GraphgenError) as error:
        raise GraphgenError(
            f"{folder / CONFIG}: rank_pattern or alpha_pattern is damaged ({error}): they are "
            "objects of patterns of modules, and numbers above 0"
        ) from None
    check_matrices(matrices, rank, own, folder / WEIGHTS)
    dora = any(name.endswith(MAGNITUDE) for name in matrices)
    if dora != bool(config.get("use_dora")):
        problem = f"use_dora is {config.get('use_dora')!r}, and the file of matrices says otherwise"
        raise GraphgenError(f"{folder / CONFIG}: {problem}: save the adapter again")
    try:
        spots = read_spots(json.loads(metadata.get(SPOTS, "{}")))
    except (TypeError, ValueError, RecursionError) as error:
        problem = f"its metadata {SPOTS} is damaged ({error}): save the adapter again"
        raise GraphgenError(f"{folder / WEIGHTS}: {problem}") from None
    scaled = any(BASE in n for n in saved)
    try:
        for name in [n for n in saved if BASE in n]:
            module = name.partition(BASE)[0]
            lora = LoRA("", *own.get(module, (rank, alpha)), rank_stabilized=stabilized)
            whole = _whole(name, saved.pop(name), matrices, np.float32(lora.scale))
            saved[name.replace(BASE, ".")] = whole
    except (KeyError, ValueError) as error:
        raise GraphgenError(
            f"{folder / WEIGHTS}: a weight {BASE[1:-1]} has no update of its size ({error}): save "
            "the adapter again"
        ) from None
    own = {name: x for name, x in own.items() if name + A in matrices}
    return Contents(matrices, rank, alpha, stabilized, dropout, saved, spots, scaled, own)


def _whole(name: str, array: Array, matrices: dict[str, Array], scale: np.float32) -> Array:
    """The weight with its update, which leaves `matrices`, where PEFT saved both, as of heads."""
    module, _, part = name.partition(BASE)
    if part != "weight":
        return array
    a, b = matrices.pop(module + A), matrices.pop(module + B)
    return Update(a, scale * b, matrices.pop(module + MAGNITUDE, None)).of(array)


def _settings(file: Path, config: Mapping[str, Any]) -> tuple[int, float, bool, float]:
    """The rank, alpha, whether it is rank-stabilized, and the dropout."""
    if (kind := config.get("peft_type")) != "LORA":
        mend = "merge the adapter with PEFT's merge_and_unload"
        if re.search("PROMPT|PREFIX|P_TUNING|CPT|CARTRIDGE", str(kind)):
            mend = "it adds tokens, which no weight holds, so only PEFT runs it"
        elif kind in _UNMERGED:
            mend = "PEFT does not merge it, so only PEFT runs it"
        raise GraphgenError(f"{file}: peft_type is {kind!r}; only LORA is read: {mend}")
    odd = {n: v for n, v in config.items() if not _WITHOUT_EFFECT.fullmatch(n)}
    odd |= {"bias": config["bias"]} if config.get("bias", "none") != "none" else {}
    if (start := config.get("init_lora_weights", True)) not in _STARTS:
        odd["init_lora_weights"] = start  # PEFT takes a part out of W when it loads this
    for name, value in odd.items():
        if value:
            mend = "merge the adapter with PEFT's merge_and_unload"
            if name.startswith("alora"):
                mend = "it begins in the middle of a text, so PEFT does not merge it"
            raise GraphgenError(
                f"{file}: {name} is {value!r}, which is more than low-rank updates: {mend}"
            )
    try:
        rank, alpha = int(config["r"]), float(config["lora_alpha"])
        stabilized, dropout = bool(config.get("use_rslora")), float(config["lora_dropout"])
        LoRA("", rank, alpha, dropout, stabilized)
    except (KeyError, TypeError, ValueError, GraphgenError) as error:
        raise GraphgenError(
            f"{file}: r, lora_alpha or lora_dropout is missing or damaged ({error}); save the "
            "adapter again"
        ) from None
    return rank, alpha, stabilized, dropout


def _own(
    matrices: Mapping[str, Array], config: Mapping[str, Any], rank: int, alpha: float
) -> dict[str, tuple[int, float]]:
    """The rank and alpha of modules that have others, by patterns.

    The first one that the end of a module's name matches counts, as PEFT has it.
    """

    def setting(which: str, module: str, default: float) -> float:
        given = (config.get(which) or {}).items()
        return float(
            next((x for key, x in given if re.match(rf"(.*\.)?({key})$", module)), default)
        )

    own = dict[str, tuple[int, float]]()
    for module in (name.removesuffix(A) for name in matrices if name.endswith(A)):
        rank_of = setting("rank_pattern", module, rank)
        found = int(rank_of), setting("alpha_pattern", module, alpha)
        LoRA("", *found)
        if found != (rank, alpha):
            own[module] = found
    return own


def write_folder(
    folder: str | os.PathLike[str],
    config: Mapping[str, Any],
    arrays: Mapping[str, Array],
    spots: Spots,
) -> Path:
    """Write a folder of LoRA. Raises GraphgenError for one that holds something else."""
    folder = Path(os.path.realpath(folder))
    if folder.exists() and not folder.is_dir():
        raise GraphgenError(f"adapter: {folder} is a file; choose a folder of its own")
    if folder.exists() and (other := {p.name for p in folder.iterdir()} - {CONFIG, WEIGHTS}):
        raise GraphgenError(
            f"adapter: {folder} holds {min(other)!r}, which would be replaced; choose a "
            "folder of its own"
        )
    config = {"peft_type": "LORA", "bias": "none", "inference_mode": True, **config}
    named = {_PREFIX + name: arrays[name] for name in sorted(arrays)}
    try:
        with in_place_of(folder) as new:
            text = json.dumps(config, indent=2) + "\n"
            (new / CONFIG).write_text(text, encoding="utf-8")
            words = {"format": "pt"} | ({SPOTS: to_text(spots)} if spots else {})
            (new / WEIGHTS).write_bytes(safetensors.to_bytes(named, words))
    except OSError as error:
        raise GraphgenError(
            f"adapter: {folder} cannot be written: {error.strerror}; choose another place"
        ) from None
    return folder


def check_matrices(
    matrices: Mapping[str, Array],
    rank: int,
    own: Mapping[str, tuple[int, float]],
    file: str | Path,
) -> None:
    """Raise for what is no matrix of a low-rank update, of another rank or without partner.

    The rank is the first of what `own` has for a module, or `rank`.
    Magnitudes, of every module or none, have the outputs of their B.
    """
    found = {n.removesuffix(MAGNITUDE): x for n, x in matrices.items() if n.endswith(MAGNITUDE)}
    wanted = {n.removesuffix(B): x.shape[:1] for n, x in matrices.items() if n.endswith(B)}
    if found and {name: x.shape for name, x in found.items()} != wanted:
        raise GraphgenError(
            f"{file}: its magnitudes are not one of each output of each module: save the adapter "
            "again"
        )
    for name, array in matrices.items():
        a, b = name.endswith(A), name.removesuffix(A).removesuffix(B)
        if name.endswith(MAGNITUDE):
            continue
        if b == name or array.ndim != 2 or array.dtype != np.float32:
            raise GraphgenError(
                f"{file}: {name}, {array.dtype}{[*array.shape]}, is no matrix of a low-rank "
                f"update: they are called MODULE{A} and MODULE{B}"
            )
        its, _ = own.get(b, (rank, 0.0))
        if array.shape[not a] != its or b + (B if a else A) not in matrices:
            raise GraphgenError(
                f"{file}: {name} is {[*array.shape]}, not of rank {its}, or has no partner: "
                "save the adapter again"
            )
    if not matrices:
        raise GraphgenError(f"{file} holds no matrices: save the adapter again")
