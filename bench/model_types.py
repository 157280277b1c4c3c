"""Of which model types of transformers does `optimize` find every attention and every norm?

Each model type that transformers' `AutoModel` knows is made small, with random weights of high
variance, exported by both of torch's exporters with free rows and lengths, optimized for the CPU,
and compared with the export at other sizes, both without the runtime's own optimizations. What is
left is counted in the optimized graph, not by what the recognizers looked at: a softmax whose
result a product reads, and the root of a mean of squares. A reason is what `explain` says.

A type runs in a process of its own, with a limit of time and of memory. With `--results` a run
that was cut off goes on where it was. Exit 3: a result differs by more than 1e-5. Needs torch and
transformers (`pip install "graphgen-onnx[bench]"`).
"""

import argparse
import inspect
import json
import multiprocessing
import os
import random
import resource
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from exports import EXPORTERS
from fusion import first_line, relative_rms
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

import graphgen as gg
from graphgen.export.write import to_bytes
from graphgen.processor import processor
from graphgen.runtime import Session

WRONG = 1e-5  # relative RMS in float32, at each of the sizes
SIZES = ((2, 12), (3, 16), (1, 21))  # rows and tokens; exported with the first
PARAMETERS = 40e6  # types that cannot be made smaller than this are left out

SMALL = {  # the fields of configurations that get a size
    2: "num_hidden_layers n_layer n_layers num_layers depth encoder_layers decoder_layers "
    "num_encoder_layers num_decoder_layers num_key_value_heads num_experts_per_tok",
    4: "num_attention_heads n_head n_heads num_heads encoder_attention_heads "
    "decoder_attention_heads num_local_experts num_experts n_routed_experts",
    8: "head_dim d_kv attention_head_dim patch_size",
    32: "hidden_size d_model n_embd emb_dim embed_dim embedding_size image_size "
    "word_embed_proj_dim projection_dim input_embedding_size",
    48: "intermediate_size encoder_ffn_dim decoder_ffn_dim ffn_dim d_ff d_inner "
    "moe_intermediate_size",
    99: "vocab_size",
}
SIZE_OF = {name: size for size, names in SMALL.items() for name in names.split()}


@dataclass
class Row:
    """One model type by one exporter: what was found, what is left and why."""

    kind: str
    exporter: str
    problem: str = ""  # why there is nothing to count, or what is wrong
    attentions: int = 0
    refused: int = 0  # attentions that were recognized, and are faster as they are
    norms: int = 0
    softmaxes_left: int = 0
    norms_left: int = 0
    reasons: list[str] = field(default_factory=list)
    error: float = 0.0
    sizes: int = 0  # at which results were compared

    def wrong(self) -> bool:
        return self.problem.startswith("graphgen: ") or not self.error <= WRONG


def shrink(config: Any) -> None:
    """Make a configuration small, its parts too, where its class lets it be changed."""
    for name, value in list(vars(config).items()):
        if hasattr(value, "to_dict"):
            shrink(value)
        elif isinstance(value, int) and not isinstance(value, bool):
            small = SIZE_OF.get(name)
            if small is None and name.endswith("token_id") and value >= SIZE_OF["vocab_size"]:
                small = 1
            if small is not None and small < value:
                setattr(config, name, small)
        elif name in ("depth", "depths") and isinstance(value, (list, tuple)):
            setattr(config, name, [min(layers, 2) for layers in value])
        elif name == "layer_types" and isinstance(value, list):
            kinds = list(dict.fromkeys(value))
            config.layer_types = (kinds * 2)[: max(2, len(kinds))]
            config.num_hidden_layers = len(config.layer_types)
    config.use_cache = False


def make_model(kind: str, attention: str) -> Any:
    """The type's base model in eval mode with varied weights."""
    import torch
    from transformers import AutoConfig, AutoModel

    torch.manual_seed(0)
    config = AutoConfig.for_model(kind)
    shrink(config)
    config._attn_implementation = attention
    with torch.device("meta"):
        try:
            count = sum(p.numel() for p in AutoModel.from_config(config).parameters())
        except ValueError:  # it has no other attention than the eager one
            config._attn_implementation = "eager"
            count = sum(p.numel() for p in AutoModel.from_config(config).parameters())
    if count > PARAMETERS:
        raise ValueError(f"still has {count / 1e6:.0f} million parameters when made small")
    model = AutoModel.from_config(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim < 2:
                weight += 0.2 * torch.randn(weight.shape)
            elif weight.is_floating_point():
                weight.normal_(std=1.3 / weight[0].numel() ** 0.5)
    return model


def inputs_of(model: Any, rows: int, tokens: int) -> dict[str, Any]:
    """Random inputs of one size for what the model reads first."""
    import torch

    names = inspect.signature(model.forward).parameters
    config, main = model.config, model.main_input_name
    if main not in names or (main == "pixel_values" and "input_ids" in names):
        main = "input_ids"
    texts = torch.randint(5, 90, (rows, tokens))
    if main == "input_ids" and main in names:
        mask = torch.ones(rows, tokens, dtype=torch.long)
        mask[0, tokens - tokens // 4 :] = 0
        given = {"input_ids": texts}
        given |= {"attention_mask": mask} if "attention_mask" in names else {}
        given |= {"decoder_input_ids": texts[:, :7]} if "decoder_input_ids" in names else {}
        return given
    if main == "pixel_values":
        size = getattr(config, "image_size", 32)
        height, width = size if isinstance(size, (list, tuple)) else (size, size)
        channels = getattr(config, "num_channels", 3)
        frames = [config.num_frames] if hasattr(config, "num_frames") else []
        return {main: torch.randn(rows, *frames, channels, height, width)}
    if main == "input_values":
        return {main: torch.randn(rows, 800 + 80 * tokens)}
    if main == "input_features":
        return {main: torch.randn(rows, 8 * tokens, getattr(config, "num_mel_bins", 80))}
    raise ValueError(f"reads {main}, which this script does not make")


def export(whole: Any, given: dict[str, Any], exporter: str, path: Path) -> None:
    """Write the file with free rows and lengths; with fewer free sizes if that fails."""
    import torch

    images = "pixel_values" in given
    sizes = [{0: "rows"} if images else {0: "rows", 1: "tokens"}, {0: "rows"}, {}]
    names = {"input_names": [*given], "output_names": ["y"], "verbose": False}
    for axes in sizes[images:]:
        how: dict[str, Any] = {"opset_version": EXPORTERS[exporter][1]}
        if exporter == "torchscript":
            own = {"decoder_input_ids": {i: a.replace("tokens", "target") for i, a in axes.items()}}
            how |= {"dynamo": False, "dynamic_axes": {name: own.get(name, axes) for name in given}}
        else:
            dims = (dict.fromkeys(axes, torch.export.Dim.DYNAMIC),) * len(given)
            how |= {"dynamo": True, "external_data": False, "dynamic_shapes": (dims,)}
        try:
            torch.onnx.export(whole, (*given.values(),), path, **names, **how)
            return
        except Exception as error:
            last = error
    raise last


def softmaxes_left(graph: ir.Graph) -> int:
    """Softmaxes whose result a product reads, at once or through what moves and scales it."""
    moves = {"Cast", "Transpose", "Reshape", "Mul", "Where", "Dropout", "Identity", "Squeeze"}
    moves |= {"Unsqueeze", "Expand", "Slice", "Concat", "Add"}

    def read_by_product(value: ir.Value, steps: int) -> bool:
        for node in value.consumers():
            if node.op_type in ("MatMul", "Gemm", "Einsum", "FusedMatMul"):
                return True
            if steps and node.op_type in moves and read_by_product(node.outputs[0], steps - 1):
                return True
        return False

    nodes = [node for node in graph.all_nodes() if node.op_type == "Softmax"]
    return sum(read_by_product(node.outputs[0], 4) for node in nodes)


def norms_left(graph: ir.Graph) -> int:
    """Roots of a mean or of a sum of squares that divide: what is left of norms."""

    def of_mean(value: ir.Value | None, steps: int) -> bool:
        node = value.producer() if value is not None else None
        if node is None or not steps:
            return False
        if node.op_type in ("ReduceMean", "ReduceSumSquare"):
            return True
        return node.op_type in ("Add", "Max", "Clip") and any(
            of_mean(x, steps - 1) for x in node.inputs
        )

    roots = [node for node in graph.all_nodes() if node.op_type in ("Sqrt", "Pow")]
    return sum(of_mean(node.inputs[0], 3) for node in roots)


def measure(kind: str, exporter: str, folder: Path) -> Row:
    """What one type by one exporter gives."""
    import torch

    row, path = Row(kind, exporter), folder / "export.onnx"
    warnings.simplefilter("ignore")
    try:
        model = make_model(kind, "eager" if exporter == "torchscript" else "sdpa")
        given = inputs_of(model, *SIZES[0])

        class Positional(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.model = model

            def forward(self, *tensors: Any) -> Any:
                return self.model(**dict(zip(given, tensors, strict=True)))[0]

        whole = Positional().eval()
        with torch.no_grad():
            whole(*given.values())
            export(whole, given, exporter, path)
        before = Session(path, optimize=False)
        before({name: given[name].numpy() for name in before.inputs})
    except Exception as error:
        row.problem = f"no export that runs: {type(error).__name__}: {first_line(error)}"
        return row
    try:
        best = gg.optimize(gg.load(path), target="cpu")
        after = Session(to_bytes(best.model), optimize=False)
    except Exception as error:
        row.problem = f"graphgen: {type(error).__name__}: {first_line(error)}"
        return row
    graph, fused = best.model.graph, best.report.fused()
    sites = [s for done in best.report.passes if done.name == "fuse_attention" for s in done.sites]
    row.attentions = fused["attention"]
    row.refused = sum(site.status == "refused" for site in sites)
    row.softmaxes_left = max(0, softmaxes_left(graph) - row.refused)
    row.norms = sum(n for name, n in fused.items() if name.endswith("norm"))
    row.norms_left = norms_left(graph)
    words = ["attention"] * (row.softmaxes_left > 0) + ["layer_norm"] * (row.norms_left > 0)
    row.reasons = best.report.reasons(words) if words else []
    for rows, tokens in SIZES:
        other = inputs_of(model, rows, tokens)
        feeds = {name: other[name].numpy() for name in before.inputs}
        try:
            wanted = before(feeds)[0]
        except gg.GraphgenError:  # the export itself does not run at this size
            continue
        try:
            got = after(feeds)[0]
        except gg.GraphgenError as error:
            row.problem = f"graphgen: at {rows} x {tokens}: {first_line(error)}"
            return row
        if np.isfinite(wanted).all() and np.array_equal(wanted, before(feeds)[0]):  # not random
            row.error = max(row.error, relative_rms(got, wanted))
            row.sizes += 1
    return row


def limited(kind: str, memory: float, queue: Any) -> None:
    """Measure one type by both exporters, within a limit of memory."""
    resource.setrlimit(resource.RLIMIT_AS, (int(memory * 1e9),) * 2)
    sink = os.open(os.devnull, os.O_WRONLY)
    os.dup2(sink, 1)
    os.dup2(sink, 2)
    for exporter in EXPORTERS:
        with tempfile.TemporaryDirectory() as folder:
            queue.put(asdict(measure(kind, exporter, Path(folder))))


def in_process(kind: str, seconds: float, memory: float) -> Iterator[Row]:
    """A type's rows; one that takes longer or dies has a row that says so."""
    context = multiprocessing.get_context("fork")  # with torch imported once
    queue = context.Queue()
    process = context.Process(target=limited, args=(kind, memory, queue), daemon=True)
    process.start()
    for exporter in EXPORTERS:
        try:
            yield Row(**queue.get(timeout=seconds))
        except Exception:
            yield Row(kind, exporter, problem=f"no export that runs: not done in {seconds:g} s")
            break
    process.kill()
    process.join()


def table(rows: Sequence[Row], title: str) -> Table:
    result = Table(title=title)
    result.add_column("type", no_wrap=True)
    result.add_column("exporter", no_wrap=True)
    for heading in ("attentions", "left", "norms", "left", "error"):
        result.add_column(heading, justify="right", no_wrap=True)
    result.add_column("why")
    for row in rows:
        if row.softmaxes_left or row.norms_left or row.wrong():
            found = row.attentions + row.refused
            figures = (found, row.softmaxes_left, row.norms, row.norms_left)
            why = row.problem or "; ".join(row.reasons)
            result.add_row(row.kind, row.exporter, *map(str, figures), f"{row.error:.1e}", why)
    return result


def conclusion(rows: Sequence[Row]) -> str:
    """How many files there are, and in how many of them everything was found."""
    files = [row for row in rows if not row.problem.startswith("no export")]
    whole = [row for row in files if not (row.softmaxes_left or row.norms_left or row.problem)]
    found = sum(row.attentions + row.refused for row in files), sum(row.norms for row in files)
    left = sum(row.softmaxes_left for row in files), sum(row.norms_left for row in files)
    return (
        f"{len(files)} files of {len({row.kind for row in files})} types, "
        f"{len(rows) - len(files)} not exported; everything found in {len(whole)}; "
        f"attentions {found[0]} found, {left[0]} left; norms {found[1]} found, {left[1]} left; "
        f"{sum(row.wrong() for row in files)} wrong, "
        f"{sum(row.sizes == 0 for row in files)} not comparable"
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="example: python bench/model_types.py --only bert llama --results model_types.jsonl",
    )
    parser.add_argument("--only", nargs="+", metavar="TYPE", help="these model types alone")
    parser.add_argument("--part", default="0/1", metavar="I/N", help="part I of N of all types")
    parser.add_argument("--results", type=Path, help="a JSON lines file to go on with")
    parser.add_argument("--seconds", type=float, default=90, help="for each file (90)")
    parser.add_argument("--memory", type=float, default=12, help="address space in GB (12)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    args = parser.parse_args()
    import torch
    from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

    torch.set_num_threads(1)
    kinds = sorted(args.only or MODEL_MAPPING_NAMES)
    random.Random(0).shuffle(kinds)  # so that a part is a fair sample
    part, parts = map(int, args.part.split("/"))
    rows = []
    if args.results and args.results.exists():
        rows = [Row(**json.loads(line)) for line in args.results.read_text().splitlines()]
    done = {row.kind for row in rows}
    kinds = [kind for kind in kinds[part::parts] if kind not in done]
    with Progress(console=Console(stderr=True)) as progress:
        task = progress.add_task("", total=len(kinds))
        for kind in kinds:
            progress.update(task, description=kind)
            for row in in_process(kind, args.seconds, args.memory):
                rows.append(row)
                if args.results:
                    with args.results.open("a") as file:
                        file.write(json.dumps(asdict(row)) + "\n")
            progress.advance(task)
    if args.json:
        print(
            json.dumps(
                {"machine": str(processor()), "rows": [asdict(row) for row in rows]}, indent=2
            )
        )
    else:
        console = Console(width=None if sys.stdout.isatty() else 140)
        console.print(table(rows, str(processor())))
        console.print(conclusion(rows))
        problems = Counter(row.problem.partition(": ")[0] for row in rows if row.problem)
        console.print(*(f"{count} {what}" for what, count in problems.items()), sep=", ")
    return 3 if any(row.wrong() for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
