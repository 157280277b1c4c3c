"""How fast are whole models on a GPU, next to torch and to the runtime's own optimizations?

BERT-base, GPT-2 and a Llama of 12 layers, with random weights. `graphgen` is torch's export after
`gg.optimize(..., target="cuda")`; `the export` is the same file as the runtime optimizes it by
itself, at its full level; `torch` and `torch.compile` are the module, with its fused attention.
All run in turn in one process on inputs in the device's memory, products of float32 exact
everywhere. `error` is the relative RMS from the export on the CPU, its optimizations off.

With --tokens, decoders that `graphgen build` made from a checkpoint continue a prompt of 128
tokens, against transformers' `generate`; the milliseconds are those of a token.

    python bench/models_on_cuda.py --only bert gpt2 --dtype fp32
    python bench/models_on_cuda.py --tokens 64 --only llama --dtype fp16
"""

import argparse
import json
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
from exports import cache_folder, exported, make_model, vary
from fusion import LEVEL, feeds, in_turn, ratio_of, relative_rms, shape
from on_cuda import bound_run, device_name
from rich.console import Console
from rich.table import Table

import graphgen as gg
from graphgen.commands import main as command
from graphgen.generation import Generator

MODELS = ("bert", "gpt2", "llama")
SHAPES = ((1, 128), (8, 128), (8, 512))
PROMPT = 128
CUDA = ("CUDAExecutionProvider", {"use_tf32": "0"})


def module_of(name: str, dtype: str) -> Any:
    """The module on the device, with the export's weights."""
    import torch

    model = make_model(name, "sdpa").eval()
    with torch.no_grad():
        vary(model, name)
    return model.to("cuda", {"fp32": torch.float32, "fp16": torch.float16}[dtype])


def torch_run(call: Any, given: dict[str, np.ndarray]) -> Callable[[], Any]:
    import torch

    inputs = {name: torch.from_numpy(x).to("cuda") for name, x in given.items()}

    def run() -> Any:
        with torch.inference_mode():
            found = call(**inputs)[0]
        torch.cuda.synchronize()
        return found

    return run


def forward(name: str, shapes: Any, folder: Path, seconds: float) -> Iterator[dict[str, Any]]:
    """One row for each contender and shape, in fp32."""
    import torch

    path = exported(name, "torchscript", folder)
    cpu = ort.SessionOptions()
    cpu.graph_optimization_level = LEVEL.ORT_DISABLE_ALL
    plain = ort.InferenceSession(path, cpu, providers=["CPUExecutionProvider"])
    quiet = ort.SessionOptions()
    quiet.log_severity_level = 4
    best = gg.optimize(gg.load(path), target="cuda")
    sessions = {
        "graphgen": gg.Session(best, provider="cuda")._session,
        "the export": ort.InferenceSession(path, quiet, providers=[CUDA, "CPUExecutionProvider"]),
    }
    module = module_of(name, "fp32")
    compiled = torch.compile(module)
    for batch, length in shapes:
        given = feeds(gg.load(path), batch, length, 1000)
        [wanted] = plain.run(None, given)
        calls: dict[str, Any] = {n: bound_run(s, given, "cuda") for n, s in sessions.items()}
        errors = {n: relative_rms(s.run(None, given)[0], wanted) for n, s in sessions.items()}
        for other, call in {"torch": module, "torch.compile": compiled}.items():
            calls[other] = torch_run(call, given)
            errors[other] = relative_rms(calls[other]().float().cpu().numpy(), wanted)
        times = in_turn([*calls.values()], seconds, 7, cpu_time=False)
        for i, contender in enumerate(calls):
            yield {
                "model": name, "at": f"{batch} x {length}", "contender": contender,
                "ms": float(np.median(times[:, i])) / 1e6, "ratio": ratio_of(times, i, 0)[0],
                "error": errors[contender],
            }  # fmt: skip


def tokens(name: str, dtype: str, count: int, seconds: float) -> Iterator[dict[str, Any]]:
    """Milliseconds a token of both, and whether the tokens are the same."""
    import torch

    module = module_of(name, dtype)
    module.config.use_cache = True
    module.generation_config.pad_token_id = 0
    ids = np.random.default_rng(0).integers(5, 1000, (1, PROMPT))
    with tempfile.TemporaryDirectory() as scratch:
        module.to("cpu").save_pretrained(source := Path(scratch, "in"))
        module.to("cuda")
        given = ["build", str(source), "-o", f"{scratch}/out", "--target", "cuda"]
        assert command([*given, "--dtype", dtype]) == 0
        ours = Generator(f"{scratch}/out", provider="cuda", prefix_cache=False)
        rows: dict[str, list[list[int]]] = {}

        def by_graphgen() -> None:
            list(found := ours([ids[0].tolist()], max_new_tokens=count, stop=[]))
            rows["graphgen"] = found.tokens

        def by_transformers() -> None:
            prompt = torch.from_numpy(ids).to("cuda")
            how = {"max_new_tokens": count, "min_new_tokens": count, "do_sample": False}
            made = module.generate(prompt, attention_mask=torch.ones_like(prompt), **how)
            rows["transformers"] = made[:, PROMPT:].tolist()

        calls = {"graphgen": by_graphgen, "transformers": by_transformers}
        times = in_turn([*calls.values()], seconds, 3, cpu_time=False)
        same = sum(
            a == b for a, b in zip(rows["graphgen"][0], rows["transformers"][0], strict=False)
        )
        for i, contender in enumerate(calls):
            yield {
                "model": name, "at": f"{dtype}, {count} tokens", "contender": contender,
                "ms": float(np.median(times[:, i])) / 1e6 / count,
                "ratio": ratio_of(times, i, 0)[0], "error": 1 - same / count,
            }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--shape", nargs="+", type=shape, metavar="BxT", default=SHAPES)
    parser.add_argument("--tokens", type=int, default=0, help="generate so many instead")
    parser.add_argument("--dtype", choices=("fp32", "fp16"), default="fp32", help="of the tokens")
    parser.add_argument("--seconds", type=float, default=10.0, help="for each row (10)")
    parser.add_argument("--cache", type=Path, default=cache_folder(), help="folder of the exports")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    found = list[dict[str, Any]]()
    for name in args.only:
        if args.tokens and name == "bert":
            continue
        with warnings.catch_warnings(action="ignore", category=gg.GraphgenWarning):
            if args.tokens:
                found += tokens(name, args.dtype, args.tokens, args.seconds)
            else:
                found += forward(name, args.shape, args.cache, args.seconds)
    if args.json:
        print(json.dumps({"device": device_name("cuda"), "rows": found}, indent=1))
        return 0
    table = Table(title=f"{device_name('cuda')}, onnxruntime {ort.__version__}")
    for column in ("model", "B x T", "contender", "ms", "ratio", "error"):
        table.add_column(column)
    for row in found:
        figures = f"{row['ms']:.2f}", f"{row['ratio']:.2f}", f"{row['error']:.1e}"
        table.add_row(row["model"], row["at"], row["contender"], *figures)
    Console(width=100).print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
