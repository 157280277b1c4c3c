"""Is a block of any family slower optimized than as torch exported it?

Two layers of each family, of width 512 with 8 heads and random weights, as both exporters of torch
write them, run in turn with what `optimize` makes of them, on one thread, in sessions without
options: the runtime's own optimizations are on. Masks hold padding, and windows are shorter than
the texts. A shape takes no more rounds than show that it is not slower by 3 %. `ratio` is the
median time of the optimized file over the export's, with the 95 % interval of a bootstrap over the
rounds; `error` their relative RMS difference.

Exit 3: a block is slower by more than 3 %, its whole interval beyond 1, or differs by more than
1e-4. Needs torch and transformers (`pip install "graphgen-onnx[bench]"`).
"""

import argparse
import json
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
from exports import EXPORTERS
from fusion import (
    LEVEL,
    TIE,
    Contender,
    first_line,
    in_turn,
    open_session,
    ratio_of,
    relative_rms,
    shape,
)
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

import graphgen as gg
from graphgen.processor import processor

WRONG = 1e-4
NOT_EXPORTED = "no export that runs"
SHAPES = ((1, 256), (1, 512), (1, 1024), (4, 256))
LAYERS, WIDTH, HEADS, VOCABULARY, POSITIONS = 2, 512, 8, 1000, 1100
WINDOW = 128

COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": 3 * WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "max_position_embeddings": POSITIONS,
    "pad_token_id": 0,
}
GROUPED = {**COMMON, "num_key_value_heads": 2}
GPT2 = {"n_embd": WIDTH, "n_layer": LAYERS, "n_head": HEADS, "n_positions": POSITIONS}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("bert", COMMON),
    "roberta": ("roberta", COMMON),
    "electra": ("electra", {**COMMON, "embedding_size": 128}),
    "deberta-v2": (
        "deberta-v2",
        {**COMMON, "relative_attention": True, "pos_att_type": ["p2c", "c2p"]},
    ),
    "modernbert": (
        "modernbert",
        {**COMMON, "local_attention": WINDOW, "global_attn_every_n_layers": 2},
    ),
    "gpt2": ("gpt2", {**GPT2, "vocab_size": VOCABULARY}),
    "gpt_neox": ("gpt_neox", COMMON),
    "opt": ("opt", {**COMMON, "ffn_dim": 3 * WIDTH, "word_embed_proj_dim": WIDTH}),
    "bloom": (
        "bloom",
        {"vocab_size": VOCABULARY, "hidden_size": WIDTH} | {"n_layer": LAYERS, "n_head": HEADS},
    ),
    "llama": ("llama", GROUPED),
    "mistral, window": ("mistral", {**GROUPED, "sliding_window": WINDOW}),
    "qwen2": ("qwen2", GROUPED),
    "qwen3": ("qwen3", {**GROUPED, "head_dim": 64}),
    "phi": ("phi", COMMON),
    "phi3": ("phi3", GROUPED),
    "olmo2": ("olmo2", GROUPED),
    "cohere": ("cohere", GROUPED),
    "gemma": ("gemma", {**GROUPED, "head_dim": 64}),
    "gemma2, softcap and window": (
        "gemma2",
        {**GROUPED, "head_dim": 64, "sliding_window": WINDOW, "query_pre_attn_scalar": 64},
    ),
    "gemma3, window": (
        "gemma3_text",
        {**GROUPED, "head_dim": 64, "sliding_window": WINDOW, "query_pre_attn_scalar": 64},
    ),
    "gpt_oss, sinks": (
        "gpt_oss",
        {**GROUPED, "head_dim": 64, "sliding_window": WINDOW, "num_local_experts": 2}
        | {"num_experts_per_tok": 1},
    ),
    "t5 encoder": (
        "t5",
        {"vocab_size": VOCABULARY, "d_model": WIDTH, "d_kv": 64, "num_heads": HEADS}
        | {"d_ff": 3 * WIDTH, "num_layers": LAYERS},
    ),
}

EAGER = ("gemma2", "gpt_oss", "t5", "deberta-v2")
"""These have no other attention, or none that torch exports."""


@dataclass
class Row:
    """One family by one exporter at one shape; times in milliseconds."""

    family: str
    exporter: str
    batch: int = 0
    length: int = 0
    problem: str = ""
    fused: str = ""
    export_ms: float | None = None
    ratio: float | None = None
    interval: tuple[float, float] | None = None
    error: float | None = None

    def failure(self) -> str:
        """Why the row does not reach the goal, if it does not."""
        where = f"{self.family} ({self.exporter}) at {self.batch} x {self.length}"
        if self.problem:
            fails = not self.problem.startswith(NOT_EXPORTED)
            return f"{self.family} ({self.exporter}): {self.problem}" if fails else ""
        if self.error is None or not self.error <= WRONG:
            return f"{where}: differs by {self.error}"
        if self.ratio and self.interval and self.ratio > 1 + TIE and self.interval[0] > 1:
            return f"{where}: takes {self.ratio:.3f} of the export's time"
        return ""


def export(family: str, exporter: str, path: Path) -> None:
    """One family's base model as ONNX: tokens and mask in, its last hidden states out."""
    import torch
    import transformers as hf

    attention, opset = EXPORTERS[exporter]
    kind, sizes = FAMILIES[family]
    config = hf.AutoConfig.for_model(kind, **sizes)
    config._attn_implementation = "eager" if kind in EAGER else attention
    torch.manual_seed(0)
    model = (
        hf.T5EncoderModel(config) if family == "t5 encoder" else hf.AutoModel.from_config(config)
    )
    decodes = "use_cache" in config.to_dict() and family != "t5 encoder"

    class Positional(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, tokens: Any, mask: Any) -> Any:
            options = {"use_cache": False} if decodes else {}
            return self.model(input_ids=tokens, attention_mask=mask, **options)[0]

    given = (torch.ones(2, 140, dtype=torch.long), torch.ones(2, 140, dtype=torch.long))
    axes = {0: "batch", 1: "sequence"}
    options: dict[str, Any] = {"input_names": ["input_ids", "attention_mask"], "verbose": False}
    options |= {"output_names": ["y"], "opset_version": opset}
    if exporter == "torchscript":
        options |= {"dynamo": False, "dynamic_axes": dict.fromkeys(options["input_names"], axes)}
    else:
        dims = {i: torch.export.Dim(name) for i, name in axes.items()}
        options |= {"dynamo": True, "external_data": False, "dynamic_shapes": (dims, dims)}
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        torch.onnx.export(Positional().eval(), given, path, **options)


def feeds(batch: int, length: int) -> dict[str, np.ndarray]:
    """Random tokens; every row but the first is padded at the right by a quarter."""
    tokens = np.random.default_rng(1).integers(1, VOCABULARY, (batch, length))
    mask = np.ones_like(tokens)
    mask[1:, length - length // 4 :] = 0
    return {"input_ids": tokens, "attention_mask": mask}


def measure(
    family: str,
    exporter: str,
    folder: Path,
    shapes: Sequence[tuple[int, int]],
    rounds: Callable[[Sequence[Any]], np.ndarray],
) -> Iterator[Row]:
    """A row for each shape; one with a problem if there is no file to measure."""
    source, path = folder / "export.onnx", folder / "optimized.onnx"
    try:
        export(family, exporter, source)
        plain = Contender("the export", source)
        open_session(plain, threads=1, level=LEVEL.ORT_DISABLE_ALL)
        plain.session.run(None, feeds(*shapes[0]))
    except Exception as error:
        yield Row(family, exporter, problem=f"{NOT_EXPORTED}: {first_line(error)}")
        return
    try:
        best = gg.optimize(gg.load(source), target="cpu")
        gg.export(best, path)
    except gg.GraphgenError as error:
        yield Row(family, exporter, problem=first_line(error))
        return
    sites = [s for done in best.report.passes if done.name == "fuse_attention" for s in done.sites]
    kinds = [site.status for site in sites]
    fused = ", ".join(f"{kinds.count(k)} {k}" for k in dict.fromkeys(kinds)) or "none found"
    contenders = [Contender("the export", source), Contender("graphgen", path)]
    for contender in contenders:
        open_session(contender, threads=1)
        if contender.problem:
            yield Row(family, exporter, problem=f"{contender.name}: {contender.problem}")
            return
    for batch, length in shapes:
        given = feeds(batch, length)
        calls = [partial(each.session.run, None, given) for each in contenders]
        kept = given["attention_mask"] == 1
        old, new = (call()[0][kept] for call in calls)
        times = rounds(calls)
        ratio, interval = ratio_of(times, 1, 0)
        yield Row(
            family,
            exporter,
            batch,
            length,
            fused=fused,
            export_ms=float(np.median(times[:, 0])) / 1e6,
            ratio=ratio,
            interval=interval,
            error=relative_rms(new, old),
        )


def not_slower(times: np.ndarray) -> bool:
    """Whether the interval shows that the optimized file is not slower by more than a tie."""
    _, (_, high) = ratio_of(times, 1, 0)
    return high <= 1 + TIE


def table(rows: Sequence[Row], title: str) -> Table:
    result = Table(title=title)
    for heading in ("family", "exporter", "attentions"):
        result.add_column(heading, no_wrap=True)
    for heading in ("B x T", "export, ms", "ratio", "95 %", "error"):
        result.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        if row.export_ms is None or row.interval is None:
            result.add_row(row.family, row.exporter, row.problem.partition(":")[0])
            continue
        result.add_row(
            row.family,
            row.exporter,
            row.fused,
            f"{row.batch} x {row.length}",
            f"{row.export_ms:.1f}",
            f"{row.ratio:.3f}",
            "{:.3f}-{:.3f}".format(*row.interval),
            f"{row.error:.1e}",
        )
    return result


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="example: python bench/blocks.py --only bert llama --shape 1x512 --seconds 5",
    )
    parser.add_argument(
        "--only", nargs="+", choices=FAMILIES, default=[*FAMILIES], metavar="FAMILY"
    )
    parser.add_argument("--exporter", nargs="+", choices=EXPORTERS, default=[*EXPORTERS])
    parser.add_argument("--shape", nargs="+", type=shape, metavar="BxT", default=SHAPES)
    parser.add_argument("--seconds", type=float, default=4, help="of each shape at most (4)")
    parser.add_argument("--cpu-time", action="store_true", help="not the wall's: for busy machines")
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    args = parser.parse_args()
    if hasattr(os, "sched_setaffinity"):  # or the scheduler moves the thread between cores
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[-1:])
    rounds = partial(
        in_turn, seconds=args.seconds, least=7, cpu_time=args.cpu_time, enough=not_slower
    )
    rows: list[Row] = []
    with Progress(console=Console(stderr=True)) as progress, tempfile.TemporaryDirectory() as each:
        task = progress.add_task("", total=len(args.only) * len(args.exporter))
        for family in args.only:
            for exporter in args.exporter:
                progress.update(task, description=f"{family} ({exporter})")
                rows += measure(family, exporter, Path(each), args.shape, rounds)
                progress.advance(task)
    machine = f"{processor()}, onnxruntime {ort.__version__}, one thread"
    told = [row.failure() for row in rows if row.failure()]
    if args.json:
        found = [asdict(row) for row in rows]
        print(json.dumps({"machine": machine, "rows": found, "failures": told}, indent=2))
    else:
        Console(width=None if sys.stdout.isatty() else 140).print(table(rows, machine))
        for line in told:
            print(line)
    return 3 if told else 0


if __name__ == "__main__":
    sys.exit(main())
