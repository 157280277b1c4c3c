"""Folders of published checkpoints, as folders that clients of ONNX load: `build DIR -o OUT`."""

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from graphgen.errors import GraphgenError
from graphgen.export.effect import Effect, Report, effect
from graphgen.export.layouts import MODEL, write_folder, write_genai
from graphgen.export.quantize import quantise
from graphgen.models import count_parameters
from graphgen.models.folder import context, tokenizer
from graphgen.models.generation import read_fields
from graphgen.models.pretrained import from_folder
from graphgen.op import Array
from graphgen.passes import optimize

REPORT = "quantisation.json"
"""What quantised folders tell of each layer."""

_LENGTH, _WINDOWS = 128, 64
"""The tokens of a window of text, and how many windows are measured."""

_WIDTH = 200  # of tables that go into a file or a pipe


def build_folder(folder: Path, options: argparse.Namespace) -> None:
    """Write the folder of a checkpoint as one that clients of ONNX load, and tell of it."""
    if options.text is not None and options.quantize is None:
        raise GraphgenError("build: --text is for --quantize int8 or int4; give that, too")
    found = from_folder(folder, options.task, attentions=options.attentions)
    if options.layout == "genai" and len(found.models) > 1:
        told = f"{folder}: --layout genai is for decoders alone, {found.config.model_type} has"
        raise GraphgenError(f"{told} {' and '.join(found.models)}; choose --layout plain")
    tokens = _tokens(folder, options.text)
    best: dict[str, Any] = {
        str(Path(MODEL).with_name(name)): optimize(model, target=options.target).model
        for name, model in found.models.items()
    }
    reports: dict[str, Report] = {}
    effects: dict[str, Effect] = {}
    for name, model in best.items() if options.quantize is not None else ():
        best[name], reports[name] = quantise(
            model,
            options.quantize,
            target=options.target,
            block_size=options.block_size,
            progress=Console(stderr=True).is_terminal,
        )
        feeds = _feeds(model, tokens)
        if feeds:
            decoder = any(value.name.startswith("past_") for value in model.graph.inputs)
            measure = "perplexity" if decoder else "cosine"
            effects[name] = effect(model, best[name], feeds, measure=measure)
    if len(tokens) and not effects:
        raise GraphgenError(f"build: {found.config.model_type} reads more than text; omit --text")
    document = {
        Path(name).name: {
            **report.to_json(),
            "effect": asdict(effects[name]) if name in effects else None,
        }
        for name, report in reports.items()
    }
    texts = {REPORT: json.dumps(document, indent=2) + "\n"} if document else {}
    if options.layout == "genai":
        [only] = best.values()
        write_genai(folder, options.output, only, read_fields(folder), texts)
    else:
        write_folder(folder, options.output, best, texts)
    for name, report in reports.items():
        _print(name, report, effects.get(name))
    count = count_parameters(found.module)
    nodes = sum(model.graph.num_nodes() for model in best.values())
    print(f"{options.output}: {found.config.model_type}, {count:,} parameters, {nodes} nodes")


def _print(name: str, report: Report, measured: Effect | None) -> None:
    console = Console()
    console = console if console.is_terminal else Console(width=_WIDTH)
    with console.capture() as captured:  # rich ends the process on a broken pipe
        console.print(report.table())
    print(captured.get(), end="")
    print("\n".join([*report.kept(), *([] if measured is None else [f"{name}: {measured}"])]))


def _tokens(folder: Path, text: Path | None) -> Array:
    """The tokens of a file, in windows (N, T), as many as are measured."""
    if text is None:
        return np.zeros((0, _LENGTH), np.int64)
    try:
        told = text.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise GraphgenError(f"build: {text} is not UTF-8: {error}; give a text file") from error
    except OSError as error:
        raise GraphgenError(f"build: {text} cannot be read: {error.strerror}") from error
    reader = tokenizer(folder)
    if reader is None:
        raise GraphgenError(f"build: {folder} has no tokenizer.json, which --text needs")
    ids = np.array(reader.encode(told, add_special_tokens=False).ids, np.int64)
    length = min(_LENGTH, context(folder) or _LENGTH)
    if len(ids) < length:
        raise GraphgenError(f"build: {text} has {len(ids)} tokens; give {length} or more")
    windows = min(len(ids) // length, _WINDOWS)
    return ids[: windows * length].reshape(windows, length)


def _feeds(model: Any, tokens: Array) -> Sequence[Mapping[str, Any]]:
    """What a model of tokens alone reads of windows (N, T): nothing is before them."""
    rows = tokens[:, None]
    known = {
        "input_ids": rows,
        "attention_mask": np.ones_like(rows),
        "token_type_ids": np.zeros_like(rows),
        "position_ids": np.broadcast_to(np.arange(tokens.shape[1]), rows.shape),
    }
    past: dict[str, Array] = {}
    for value in model.graph.inputs:
        if value.name.startswith("past_") and value.shape is not None:
            _, heads, _, size = value.shape
            past[value.name] = np.zeros((1, heads, 0, size), value.dtype.numpy())
        elif value.name not in known:
            return []
    given = [value.name for value in model.graph.inputs if value.name in known]
    return [{**{n: known[n][i] for n in given}, **past} for i in range(len(tokens))]
