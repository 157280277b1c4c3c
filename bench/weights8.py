"""What do eight bits lose next to int8, in decoders of one model type after another?

Each is small, 4 layers of 256 features, with random weights of high variance: standard deviation
1.5/√K. The error of the logits on random tokens, of weights8 and of int8, neither calibrated; the
goal is a quarter. `--tables` leaves tables of tokens in float, to see what they lose. Exit 3 if the
median is above a quarter.
"""

import argparse
import sys
from typing import Any

import numpy as np
import onnxruntime as ort
from rich.console import Console
from rich.table import Table

import graphgen as gg
from graphgen.models.published import FAMILIES
from graphgen.models.published.config import Config
from graphgen.nn.module import Parameter, members
from graphgen.processor import processor
from graphgen.quantize import quantize
from graphgen.quantize.calibration import random_feeds
from graphgen.quantize.effect import effect

SIZES = {
    "vocab_size": 2048,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "head_dim": 64,
    "pad_token_id": 0,
}
GPT2 = {"vocab_size": 2048, "n_embd": 256, "n_layer": 4, "n_head": 4, "n_positions": 512}
OWN: dict[str, dict[str, Any]] = {
    "gpt2": GPT2,
    "granite": {
        "embedding_multiplier": 12.0,
        "residual_multiplier": 0.22,
        "attention_multiplier": 0.125,
        "logits_scaling": 8.0,
    },
    "opt": {"ffn_dim": 512, "word_embed_proj_dim": 256},
    "bloom": {"n_layer": 4, "n_head": 4},
    "glm4": {"partial_rotary_factor": 0.5},
}
TYPES = (
    "llama mistral qwen2 qwen3 smollm3 granite olmo2 phi3 glm4 stablelm starcoder2 gemma gemma2 "
    "gemma3_text cohere gpt_neox falcon gpt2"
).split()
GOAL = 0.25


def decoder(kind: str) -> Any:
    """One with random weights, optimized."""
    fields = {"model_type": kind, **(GPT2 if kind == "gpt2" else SIZES), **OWN.get(kind, {})}
    module = FAMILIES[kind].tasks["text-generation"](Config(fields))
    for _, item in members(module):
        if isinstance(item, Parameter) and len(item.shape) == 2:
            item.initialize = lambda rng, shape: (
                rng.standard_normal(shape, np.float32) * np.float32(1.5 / shape[0] ** 0.5)
            )
    return gg.optimize(gg.build(module, **module.inputs())).model


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=TYPES, default=TYPES, help="model types")
    parser.add_argument("--tables", action="store_true", help="leave tables in float")
    args = parser.parse_args()

    table = Table(title=f"{processor()}, onnxruntime {ort.__version__}")
    for heading in ("model type", "int8", "weights8", "share", "bytes of int8", "of weights8"):
        table.add_column(heading, justify="left" if heading == "model type" else "right")
    shares = []
    for kind in args.only:
        model = decoder(kind)
        feeds, how = random_feeds(model), {"calibration": (), "embeddings": not args.tables}
        done = [quantize(model, scheme, **how) for scheme in ("int8", "weights8")]
        one, two = (effect(model, quantized, feeds).error for quantized, _ in done)
        shares.append(two / one)
        sizes = [f"{report.bytes_after:,}" for _, report in done]
        table.add_row(kind, f"{one:.4f}", f"{two:.4f}", f"{two / one:.3f}", *sizes)
    console = Console()
    console.print(table)
    median, within = float(np.median(shares)), sum(share <= GOAL for share in shares)
    console.print(f"median {median:.3f}; {within} of {len(shares)} within {GOAL}")
    return 0 if median <= GOAL else 3


if __name__ == "__main__":
    sys.exit(main())
