"""The command `build`: models of fresh weights, and folders of checkpoints that clients load."""

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
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

_OF_NAMES = ("primitives", "training", "seed")
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
_NOT_LIKE = (*_OF_NAMES, "task", "head", "attentions", "dtype")
_TUNED = (512, 1)
_OF_INT8 = ("plain", "cpu", "fp32")
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
    gguf = options.name not in ARCHITECTURES and _is_gguf(options.name)
    like = options.like is not None and not gguf
    folder = options.name not in ARCHITECTURES and (
        gguf or (not like and (Path(options.name).is_dir() or _is_of_hub(options.name)))
    )
    others: tuple[str, ...] = _NOT_LIKE if like else _OF_NAMES if folder else _OF_FOLDERS
    defaults = {action.dest: action.default for action in options.actions}
    if folder and options.head is not None:
        others = tuple(name for name in others if name != "seed")
    given = [name for name in others if getattr(options, name) != defaults[name]]
    if wrong := [*given, *(sizes if folder or like else ())]:
        source = "from a checkpoint" if folder else "a model of fresh weights"
        source = "from an export" if like else source
        option = wrong[0].replace("_", "-")
        raise GraphgenError(
            f"build {options.name}: --{option} has no effect when building {source}; leave it out"
        )
    if folder:
        options.name = str(_here(options.name))
    if options.like is not None:
        options.like = _here(str(options.like), weights=False)
    if not (folder or like or options.name in ARCHITECTURES):
        problem = "is neither here nor an architecture of --list; a model of the hub is OWNER/MODEL"
        if Path(options.name).is_file():
            problem = "is a file: give a folder, or for a decoder of another exporter --like DIR"
        raise GraphgenError(f"build: {options.name} {problem}{near(options.name, ARCHITECTURES)}")
    (_build_folder if folder or like else _build_name)(options, sizes)


def _is_of_hub(name: str) -> bool:
    from graphgen.models.published import hub  # imports all families, which architectures need not

    return hub.is_name(name)


def _here(name: str, *, weights: bool = True) -> Path:
    """A path, or that of what the hub has by this name."""
    from graphgen.models.published import hub

    return hub.download(name, weights=weights) if hub.is_name(name) else Path(name)


def _is_gguf(name: str) -> bool:
    return name.lower().endswith(".gguf") and not Path(name).is_dir()


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


def _build_folder(options: argparse.Namespace, _: dict[str, Any]) -> None:
    """Write a checkpoint, or an export, as a folder that clients load, and report on it."""
    if options.like is not None or not _is_gguf(options.name):
        _build_from(options, Path(options.like or options.name))
        return
    from graphgen.models.published.gguf_tokenizer import folder_of

    with folder_of(Path(options.name)) as folder:
        _build_from(options, folder)


def _build_from(options: argparse.Namespace, folder: Path) -> None:
    """Write what `options` name, of which `folder` has the configuration and the tokenizer."""
    from rich.console import Console

    from graphgen.commands.tuning import TUNING, Decoding, Tuning
    from graphgen.export.folders import MODEL, PROMPTS, PROMPTS_KEY, write_folder, write_genai
    from graphgen.files import read_json
    from graphgen.generation.caches import PRESENT
    from graphgen.generation.config import read_fields
    from graphgen.generation.options import UnmetError, read_options
    from graphgen.graph import count_nodes
    from graphgen.models.published.folder import context
    from graphgen.models.published.fresh import Head
    from graphgen.models.published.tokenizer_classes import class_remarks
    from graphgen.models.published.tokenizer_files import check_tokenizer, unread
    from graphgen.models.published.windows import windows
    from graphgen.quantize.folder import Quantized, quantized, reports
    from graphgen.quantize.kept import keep_bits
    from graphgen.quantize.prompts import LEAST

    if options.text is not None and not (options.quantize or options.kv == "int8" or options.tune):
        raise GraphgenError("build: --text needs --quantize or --kv int8; add that option")
    for name in ("--kv", "--prompts", "--tune"):
        value, given = (
            getattr(options, name[2:]),
            (options.layout, options.target, options.dtype),
        )
        if value and given != _OF_INT8:
            layout, target, dtype = _OF_INT8
            only = f"--layout {layout}, --target {target} and --dtype {dtype}"
            name = name if value is True else f"{name} {value}"
            raise GraphgenError(f"build: {name} is for {only} only; leave out other options")
    if options.tune_for is not None and not options.tune:
        raise GraphgenError("build: --tune-for needs --tune; add that option")
    if options.accuracy_level is not None and options.quantize != "int4":
        raise GraphgenError("build: --accuracy-level needs --quantize int4; add that option")
    if options.prompts == "int8" and options.quantize not in (None, "int4"):
        problem = f"is for weights of four bits, and --quantize is {options.quantize}"
        raise GraphgenError(f"build: --prompts {options.prompts} {problem}; choose int4")
    if options.full_range and options.quantize != "int8":
        raise GraphgenError("build: --full-range needs --quantize int8; add that option")
    if options.no_run and options.quantize not in ("int8", "weights8"):
        raise GraphgenError("build: --no-run needs --quantize int8 or weights8; add that option")
    if (options.verify or options.stop_after is not None) and options.quantize is None:
        name = "--verify" if options.verify else "--stop-after"
        raise GraphgenError(f"build: {name} needs --quantize; add that option")
    if options.no_run and options.text is not None:
        raise GraphgenError("build: --text runs the model; leave out --no-run")
    if options.dtype == "bf16" and options.target != "cuda":
        problem = (
            "onnxruntime on the CPU has no bf16 kernels: choose fp16 or fp32, or --target cuda"
        )
        raise GraphgenError(f"build {folder} --dtype bf16 --target {options.target}: {problem}")
    if options.dtype != "fp32" and options.quantize is not None:
        problem = f"--quantize {options.quantize} reads float32 weights: leave out --dtype"
        raise GraphgenError(f"build {folder} --dtype {options.dtype}: {problem}")
    head = None if options.head is None else Head.read(options.head)
    export = options.like is not None and not _is_gguf(options.name)
    found = _of_export(options) if export else _of_checkpoint(options, head, folder)
    if options.layout == "genai" and len(found.models) > 1:
        problem = f"--layout genai is for decoders only, and {found.kind} has"
        parts = " and ".join(found.models)
        raise GraphgenError(f"{folder}: {problem} {parts}; choose --layout plain")
    check_tokenizer(folder)
    found.remarks.extend([*unread(folder), *class_remarks(folder)])
    if any(y.name.startswith(PRESENT) for m in found.models.values() for y in m.graph.outputs):
        try:
            asked = read_options(folder)
            asked.fit(asked.vocabulary)
        except UnmetError as error:
            found.remarks.append(f"graphgen generate refuses the folder as it stands: {error}")
        except GraphgenError as error:
            raise GraphgenError(f"{folder}: {error}") from error
    tokens = windows(folder, options.text)
    # A cache goes in place in an operator that WebGPU lacks: what follows it is made for WebGPU.
    later = options.layout == "genai" and options.target == "webgpu"
    best: dict[str, Any] = {
        str(Path(MODEL).with_name(name)): gg.optimize(
            model, target="cpu" if later else options.target
        ).model
        for name, model in found.models.items()
    }
    done: dict[str, Quantized] = {}
    tuning, length = None, context(folder)
    if options.tune:
        tuning = Tuning(options.tune_for or _TUNED, length)
        Decoding("build --tune", found.kind, best, tokens, length)  # or an error, before all work
        if options.quantize in ("int4", "weights8"):
            tuning.blocks(options, best[MODEL])
    if options.quantize is not None:
        how: dict[str, Any] = {"target": options.target, "block_size": options.block_size}
        if options.accuracy_level is not None:
            how["accuracy_level"] = options.accuracy_level
        how |= {"full_range": options.full_range, "run": not options.no_run}
        how |= {"verify": options.verify, "stop_after": options.stop_after}
        how["progress"] = Console(stderr=True).is_terminal
        done = {n: quantized(m, options.quantize, tokens, **how) for n, m in best.items()}
        best = {name: one.model for name, one in done.items()}
    if found.packed:
        kept: dict[str, Any] = {"target": options.target, "method": found.packed}
        done = {name: Quantized(*keep_bits(model, **kept)) for name, model in best.items()}
        best = {name: one.model for name, one in done.items()}
    costs, who = dict[str, Any](), "build --tune" if tuning else f"build --kv {options.kv}"
    if options.kv == "int8" or (tuning and options.kv is None):
        decoding = Decoding(who, found.kind, best, tokens, length)
        made = decoding.int8_cache() if tuning is None or options.kv else tuning.cache(decoding)
        if made is not None:
            best, costs[f"{MODEL}: int8 cache"] = {MODEL: made}, decoding.cost(made)
    read = any(one.effect and not one.effect.random for one in done.values()) or costs
    if options.prompts == "int8" or (tuning and options.prompts is None):
        who = "build --tune" if options.prompts is None else f"build --prompts {options.prompts}"
        decoding = Decoding(who, found.kind, best, tokens, length)
        second, report, least = (
            tuning.prompts(decoding) if tuning else (*decoding.int8_prompts(), LEAST)
        )
        if options.prompts == "int8" and least is None:  # asked for, although it does not pay here
            least = LEAST
            second, report = (second, report) if second else decoding.int8_prompts()
        if least is not None:
            second.metadata_props[PROMPTS_KEY] = str(least)
            best[PROMPTS], done[PROMPTS] = second, Quantized(second, report)
            costs[f"{PROMPTS}: int8 prompts"] = decoding.cost(decoding.model, second)
    if len(tokens) and not read:
        raise GraphgenError(f"build: {found.kind} reads more than text; omit --text")
    texts = reports(done)
    if tuning is not None:
        texts[TUNING] = json.dumps(tuning.to_json(), indent=2) + "\n"
    fields = found.fields or read_json(folder / "config.json")
    # By quantization_config, clients would look for tensors that the folder does not have.
    if fields.pop("quantization_config", None) is not None or head or found.fields:
        if head is not None:
            fields |= head.fields()
            for name in ("architectures", *(["num_labels"] if head.labels else [])):
                fields.pop(name, None)
        texts["config.json"] = json.dumps(fields, indent=2, ensure_ascii=False) + "\n"
    if options.layout == "genai":
        [only] = best.values()
        write_genai(folder, options.output, only, read_fields(folder), texts, target=options.target)
    else:
        write_folder(folder, options.output, best, texts)
    nodes = sum(count_nodes(model) for name, model in best.items() if name != PROMPTS)
    if options.json:
        built = {"output": str(options.output), "kind": found.kind, "nodes": nodes}
        built |= {"graphgen": gg.__version__, "parameters": found.parameters}
        built |= {"remarks": found.remarks, "costs": {n: asdict(c) for n, c in costs.items()}}
        print_json({**built, "tuning": tuning.to_json() if tuning else None})
        return
    for name, one in done.items():
        if name != PROMPTS:  # a line says enough of the same layers in more bits
            show(one.report.table())
            print(*one.remarks(name), sep="\n")
    for name, cost in costs.items():
        print(f"{name}: {cost}")
    if tuning is not None:
        tuning.print()
    for line in found.remarks:
        print(line)
    print(f"{options.output}: {found.kind}, {found.parameters:,} parameters, {nodes} nodes")


@dataclass
class _Source:
    """Graphs by their names in a folder, and what to say about them."""

    kind: str
    models: Mapping[str, Any]
    parameters: int
    remarks: list[str]
    packed: str = ""  # the method of a checkpoint of few bits, such as gptq
    fields: dict[str, Any] = field(default_factory=dict)  # of config.json, if they are others


def _of_checkpoint(options: argparse.Namespace, head: Any, folder: Path) -> _Source:
    import onnx_ir as ir

    from graphgen.export.precision import DTYPES
    from graphgen.models.published import from_folder
    from graphgen.models.published.gguf import open_gguf
    from graphgen.models.published.gguf_like import differences
    from graphgen.models.published.language_model import PART_OF
    from graphgen.nn import count_parameters

    dtype = DTYPES[options.dtype] or ir.DataType.FLOAT
    more: dict[str, Any] = {"attentions": options.attentions, "head": head, "seed": options.seed}
    more["gguf"] = Path(options.name) if _is_gguf(options.name) else None
    found = from_folder(folder, options.task, dtype=dtype, **more)
    if found.few_bits and (options.quantize is not None or options.dtype != "fp32"):
        name = "--dtype" if options.quantize is None else "--quantize"
        problem = f"weights of the checkpoint are in few bits ({found.few_bits}): leave out {name}"
        raise GraphgenError(f"build {options.name}: {problem}")
    remarks = [*found.remarks]
    if ignored := found.config.ignored:
        fields = ", ".join(ignored)
        remarks.append(f"{found.config.where}: {fields} without effect on the results: ignored")
    if more["gguf"] is not None and options.like is not None:
        remarks += differences(open_gguf(more["gguf"]), folder)
    if found.fresh is not None:
        remarks.append(found.fresh.line())
    kind = found.config.model_type
    own, count = found.config.fields, count_parameters(found.module)
    own = own if own.pop(PART_OF, None) else {}
    return _Source(kind, found.models, count, remarks, found.few_bits, own)


def _of_export(options: argparse.Namespace) -> _Source:
    from math import prod

    from graphgen.export.like import decoder_like
    from graphgen.graph import parameters

    found, name = decoder_like(Path(options.name), options.like), Path(options.name).name
    weights = parameters(found.model.graph).values()
    count = sum(prod(value.shape.numpy()) for value in weights if value.shape is not None)
    return _Source(name, {"model.onnx": found.model}, count, [f"{name}: {found.line()}"])


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
