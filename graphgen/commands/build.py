"""The command `build`: models of fresh weights, and folders of checkpoints that clients load."""

import argparse
from collections.abc import Callable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import graphgen as gg
from graphgen.commands.options import (
    FILE,
    FLAG,
    N,
    count,
    print_json,
    show,
    tokens_and_rows,
    written,
)
from graphgen.errors import GraphgenError, near

EXAMPLE = """decoder --layers 4 --features 256 -o decoder.onnx
  graphgen build decoder --help           # with the sizes of a decoder
  graphgen build Qwen/Qwen3-0.6B -o qwen3 # a checkpoint: of the hub, or in a folder here
  graphgen build bert-base -o bert --task fill-mask --target cuda --dtype fp16
  graphgen build bert-base -o moods --task text-classification --head classifier:sad,glad
  graphgen build export.onnx --like my-model -o folder  # with a cache, for any family
  graphgen build model-Q4_K_M.gguf -o folder"""

_OF_NAMES = ("primitives", "training")
_OF_FOLDERS = (
    "task",
    "head",
    "attentions",
    "target",
    "dtype",
    "layout",
    "quantize",
    "block_size",
    "accuracy_level",
    "full_range",
    "kv",
    "prompts",
    "tune",
    "tune_for",
    "json",
    "text",
    "no_run",
    "verify",
    "stop_after",
)
_SIZE = "size_"
_HELP = {"-h", "--help"}


def run(options: argparse.Namespace) -> None:
    """Write a known architecture, or a checkpoint, as ONNX."""
    if options.list:
        _list()
        return
    if options.name is None or options.output is None:
        raise GraphgenError("build needs NAME and -o OUT; `graphgen build --list` lists the names")
    from graphgen.models import ARCHITECTURES

    sizes = {
        key.removeprefix(_SIZE): value
        for key, value in vars(options).items()
        if key.startswith(_SIZE) and value is not None
    }
    gguf, like, folder = False, options.like is not None, False
    if options.name not in ARCHITECTURES:
        from graphgen.deployment.sources import is_gguf
        from graphgen.models.published import hub

        gguf = is_gguf(options.name)
        like = like and not gguf
        folder = gguf or (not like and (Path(options.name).is_dir() or hub.is_name(options.name)))
    others: tuple[str, ...] = _OF_NAMES if folder or like else _OF_FOLDERS
    defaults = {action.dest: action.default for action in options.actions}
    given = [name for name in others if getattr(options, name) != defaults[name]]
    if wrong := [*given, *(sizes if folder or like else ())]:
        source = "from a checkpoint" if folder else "a model of fresh weights"
        source = "from an export" if like else source
        option = wrong[0].replace("_", "-")
        raise GraphgenError(
            f"build {options.name}: --{option} has no effect when building {source}; leave it out"
        )
    if not (folder or like or options.name in ARCHITECTURES):
        problem = "is neither here nor an architecture of --list; a model of the hub is OWNER/MODEL"
        if Path(options.name).is_file():
            problem = "is a file: give a folder, or for a decoder of another exporter --like DIR"
        raise GraphgenError(f"build: {options.name} {problem}{near(options.name, ARCHITECTURES)}")
    if folder or like:
        _build_folder(options)
    else:
        _build_name(options, sizes)


def _build_name(options: argparse.Namespace, sizes: dict[str, Any]) -> None:
    """Write a model of fresh weights."""
    from graphgen.graph import count_nodes
    from graphgen.models import create, find
    from graphgen.nn import count_parameters

    module = create(options.name, **sizes)
    model = gg.build(
        module,
        seed=options.seed,
        primitives=options.primitives,
        training=options.training,
        **find(options.name).specs(**sizes),
    )
    gg.export(model, options.output)
    parameters = count_parameters(module)
    print(f"{options.output}: {parameters:,} parameters, {count_nodes(model)} nodes")


def _build_folder(options: argparse.Namespace) -> None:
    """Write a checkpoint, or an export, as a folder that clients load, and report on it."""
    given = {name: getattr(options, name) for name in _OF_FOLDERS if name not in ("json", "no_run")}
    built = gg.build_folder(
        options.name,
        options.output,
        like=options.like,
        seed=options.seed,
        run=not options.no_run,
        **given,
    )
    if options.json:
        print_json(built.to_json())
        return
    for told in built.told():
        if isinstance(told, str):
            print(told)
        else:
            show(told)


def _list() -> None:
    from graphgen.models import ARCHITECTURES
    from graphgen.models.published import FAMILIES
    from graphgen.models.published.language_model import TYPES

    width = 2 + max(map(len, ARCHITECTURES))
    for name, found in ARCHITECTURES.items():
        sizes = [
            f"--{n.replace('_', '-')} {'...' if d is None else d}" for n, d in found.sizes().items()
        ]
        print(f"{name:<{width}}{found.description}\n{'':<{width}}{' '.join(sizes)}")
    print("\nDIR, the folder of a checkpoint, by the model_type of its config.json; --task:")
    for tasks, kinds in groupby(FAMILIES, lambda kind: ", ".join(FAMILIES[kind].tasks)):
        print(f"{', '.join(kinds)}\n{'':<{width}}{tasks}")
    print(f"\nThe language models, for texts alone, of:\n{', '.join(TYPES)}")


def add_options(add: Callable[..., Any]) -> None:
    """Add the options of `build`."""
    names = (
        "an architecture: see --list; OWNER/MODEL of the Hugging Face Hub; a folder; a GGUF file"
    )
    add("name", nargs="?", metavar="NAME | DIR | FILE", help=f"{names}; with --like an ONNX file")
    add("-o", "--output", type=written, metavar="FILE | DIR", help="where to write it")
    add("--list", help="list the names with their sizes, model types with their tasks", **FLAG)
    add("--seed", type=count, default=0, help="of the weights")
    add("--primitives", help="write the bodies of composite operators", **FLAG)
    add("--training", help="keep dropout, with the inputs seed and step", **FLAG)
    like = "build a decoder that another tool exported, or a GGUF file; DIR has its configuration"
    add("--like", type=Path, metavar="DIR", help=like)
    labels = (
        "for a checkpoint: a head that may be fresh, and its labels: classifier:3, score:no,yes"
    )
    add("--head", metavar="NAME[:LABELS]", help=labels)
    task = "for a checkpoint: text-generation, fill-mask, ...: see --list (that of its class)"
    add("--task", help=task)
    add("--attentions", help="for a checkpoint: also output its attention weights", **FLAG)
    add("--target", default="cpu", help="for a checkpoint: cpu, cuda or webgpu (cpu)")
    dtype = "for a checkpoint: of its weights and results (fp32); bf16 needs --target cuda"
    add("--dtype", default="fp32", choices=("fp32", "fp16", "bf16"), help=dtype)
    clients = "for a checkpoint: the clients that will load it"
    add("--layout", default="plain", choices=("plain", "genai"), help=clients)
    integers = "for a checkpoint of floats: small integers; weights8 loses least"
    add("--quantize", choices=("int8", "int4", "weights8"), help=integers)
    cache = "keys and values of a decoder, for graphgen on the CPU: int8 for long texts (float32)"
    add("--kv", choices=("int8", "float32"), help=cache)
    prompts = "with int4, or a checkpoint of four bits: a second graph that reads prompts faster"
    add("--prompts", choices=("int8", "int4"), help=prompts)
    tune = "measure on this machine and pick what is left open: blocks, --kv and --prompts"
    add("--tune", help=tune, **FLAG)
    tuned = "with --tune: the length of prompts, and how many (512x1)"
    add("--tune-for", type=tokens_and_rows, metavar="TOKENSxROWS", help=tuned)
    sizes = "for int4 (64; with --text 128) and weights8 (16)"
    add("--block-size", type=int, choices=(16, 32, 64, 128, 256), help=sizes)
    level = "for int4: 4 rounds what products read to int8, 0 does not and is slower (4)"
    add("--accuracy-level", type=int, choices=(0, 4), help=level)
    full = "for int8: weights up to ±127, for processors with VNNI, AMX or dot products of Arm"
    add("--full-range", help=full, **FLAG)
    unmeasured = "for int8, weights8: do not run the model: less memory, only errors of weights"
    add("--no-run", help=unmeasured, **FLAG)
    verified = "with --quantize: run each layer before and after; keep in float what differs"
    add("--verify", help=verified, **FLAG)
    add("--stop-after", help="with --quantize: quantize only the first N layers of a graph", **N)
    text = "calibrate --quantize and --kv on this text, and measure the cost on a third of it"
    add("--text", help=text, **FILE)
    add("--json", help="print what was built as JSON: docs/build.schema.json", **FLAG)


def add_more(add: Callable[..., Any], arguments: Sequence[str]) -> None:
    """Add the sizes of the architectures: where help is asked for, of those that are named."""
    if not {*arguments} - {"build", *_HELP, "--debug"}:
        return
    from graphgen.models import ARCHITECTURES

    named = [name for name in ARCHITECTURES if name in arguments]
    of = named if named and not _HELP.isdisjoint(arguments) else ARCHITECTURES
    sizes = {n: d for name in of for n, d in ARCHITECTURES[name].sizes().items()}
    for name, default in sizes.items():
        kind = int if default is None else type(default)
        how: dict[str, Any] = {"type": kind, "metavar": kind.__name__.upper()}
        if isinstance(default, bool):
            how = {"action": argparse.BooleanOptionalAction}
        how["help"] = None if default is None else f"({str(default).lower()})"
        add(f"--{name.replace('_', '-')}", dest=_SIZE + name, default=None, **how)
