"""What do guessed tokens bring, and what do they cost where guesses are wrong?

A GPT-2 of 12 layers and 768 features, one row, greedy, in float32: tokens a second behind the
prompt with guesses over those without, the median over rounds in which both take turns in one
process. Its weights are random, but for its positions: each holds 20 times the embedding of the
token that is to come next, and the products that end a block are small, so that the likeliest
tokens are those of a given text while every layer computes as always. The texts:

- edit: code, and the same code with two names changed;
- summary: a page of these docs, and the first sentence of each of its paragraphs;
- other: that page, and another one, which only shares the language;
- random: random tokens, all different.

With `--encoder`, an mBART of 6 and 6 layers whose encoder reads the prompt writes the same texts.
`draft` guesses by a GPT-2 of 2 layers and 256 features that is right in `--right` of the positions.
A byte-pair encoding of 8,192 tokens is trained on the docs and the source. The tokens have to be
those without guesses. Exit 3 if they are not, if prompt lookup brings edit or summary less than 1.5
times the tokens a second, or other or random less than 0.95 of them.

    python bench/speculation.py --threads 1
"""

import argparse
import json
import os
import re
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import tokenizers
from rich.console import Console
from rich.table import Table

import graphgen as gg
from graphgen.generation import Generator
from graphgen.models.published import FAMILIES
from graphgen.models.published.config import Config
from graphgen.models.published.decoder import CausalLM
from graphgen.models.published.gpt2 import gpt2
from graphgen.nn.module import Parameter, members
from graphgen.processor import processor
from graphgen.quantize import quantize

ROOT = Path(__file__).resolve().parents[1]
CODE, PAGE, OTHER = "graphgen/generation/sampling.py", "docs/generation.md", "docs/fine-tuning.md"
VOCABULARY = 8192
GOALS = {"edit": 1.5, "summary": 1.5, "other": 0.95, "random": 0.95}


def encoding() -> Any:
    """A byte-pair encoding of the docs and the source."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    texts = [*ROOT.glob("docs/*.md"), *ROOT.glob("graphgen/**/*.py")]
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=VOCABULARY, show_progress=False)
    tokenizer.train(sorted(map(str, texts)), trainer)
    return tokenizer


def texts(prompt: int, new: int) -> dict[str, tuple[list[int], list[int]]]:
    """The tokens of each prompt and of what is to follow it."""
    tokenizer = encoding()

    def tokens(text: str) -> list[int]:
        return list(tokenizer.encode(text).ids)

    code, page, other = (ROOT.joinpath(name).read_text() for name in (CODE, PAGE, OTHER))
    paragraphs = [" ".join(p.split()) for p in page.split("\n\n") if re.match("[A-Z]", p)]
    firsts = [re.split(r"(?<=[.:;]) ", paragraph)[0] for paragraph in paragraphs]
    edited = re.sub(r"\brow\b", "line", re.sub(r"\bscores\b", "logits", code))
    shuffled = np.random.default_rng(0).permutation(VOCABULARY).tolist()
    read = tokens("\n\n".join(paragraphs))
    found = {
        "edit": (tokens(code)[:prompt], tokens(edited)),
        "summary": (read[:prompt], tokens(" ".join(firsts))),
        "other": (read[:prompt], tokens(other)),
        "random": (shuffled[:prompt], shuffled[prompt:]),
    }
    return {name: (before, after[:new]) for name, (before, after) in found.items()}


def make(text: list[int], layers: int, features: int, right: float = 1.0) -> Any:
    """A GPT-2 that continues a beginning of these tokens by the others, where it is right."""
    fields = {"vocab_size": VOCABULARY, "n_embd": features, "n_layer": layers, "n_positions": 2048}
    config = Config({"model_type": "gpt2", "n_head": features // 64, **fields})
    module = fill(CausalLM(gpt2(config)), text[1:], features, right)
    inputs: dict[str, Any] = module.inputs()
    return gg.optimize(gg.build(module, **inputs)).model


def behind_an_encoder(text: list[int], layers: int, features: int, folder: Path) -> Path:
    """A folder of an mBART that writes these tokens."""
    fields = {"model_type": "mbart", "vocab_size": VOCABULARY, "d_model": features}
    fields |= {"max_position_embeddings": 2046, "decoder_start_token_id": 0}
    for side in ("encoder", "decoder"):
        fields |= {f"{side}_layers": layers, f"{side}_ffn_dim": 4 * features}
        fields |= {f"{side}_attention_heads": features // 64}
    module = FAMILIES["mbart"].tasks["text2text-generation"](Config(fields))
    fill(module, [0, 0, *text], features)  # the first two positions are for padding
    (folder / "config.json").write_text(json.dumps(fields))
    for name, (part, inputs) in module.graphs().items():
        gg.export(gg.optimize(gg.build(part, **inputs)), folder / name)
    return folder


def fill(module: Any, next_: list[int], features: int, right: float = 1.0) -> Any:
    """Give a module its weights; `next_` is what follows each position, where it is right."""
    random = np.random.default_rng(0)
    table = random.standard_normal((VOCABULARY, features), np.float32) * np.float32(0.02)
    wrong = random.random(len(next_)) >= right
    written = np.where(wrong, random.integers(0, VOCABULARY, len(next_)), next_)

    def weight(name: str, shape: tuple[int, ...]) -> Any:
        if name.endswith(("embedding.weight", "shared.weight")):
            return table
        if shape == (2048, features):
            places = np.zeros(shape, np.float32)
            places[: len(written)] = 20 * table[written]
            return places
        ends = any(part in name for part in ("output", "down"))  # of a block: they change little
        scale = np.float32(2e-4 if ends else 0.02)
        if len(shape) > 1:
            return random.standard_normal(shape, np.float32) * scale
        return np.full(shape, "norm" in name and "weight" in name, np.float32)

    for name, item in members(module):
        if isinstance(item, Parameter):
            item.initialize = lambda _, shape, name=name: weight(name, shape)
    return module


def measure(
    generator: Generator, prompt: list[int], new: list[int], options: Any, clock: Any
) -> Any:
    """What was generated, and the tokens a second behind the first."""
    found = generator(prompt, max_new_tokens=len(new), eos=[], **options)
    next(found)
    start = clock()
    return found, len(list(found)) / (clock() - start)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", choices=[*GOALS], default=[*GOALS])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--prompt", type=int, default=600, help="tokens of a prompt, at most")
    parser.add_argument("--new", type=int, default=200, help="tokens behind it, at most")
    parser.add_argument("--right", type=float, default=0.8, help="of the draft's guesses")
    parser.add_argument("--encoder", action="store_true", help="behind an encoder, without a draft")
    parser.add_argument("--scheme", choices=["int4"], help="of the weights, instead of float32")
    parser.add_argument(
        "--cpu-time", action="store_true", help="of this process, on a busy machine"
    )
    parser.add_argument("--quick", action="store_true", help="small and once; nothing can fail")
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    args = parser.parse_args()
    if args.encoder and args.scheme:
        parser.error("--encoder: its weights stay in float32; leave out --scheme")
    sizes, rounds = ((2, 128), 1) if args.quick else ((12, 768), args.rounds)
    clock = time.process_time if args.cpu_time else time.perf_counter
    rows, failed = list[dict[str, Any]](), list[str]()
    written = tempfile.TemporaryDirectory()
    for name, (prompt, new) in texts(args.prompt, 64 if args.quick else args.new).items():
        if name not in args.only:
            continue
        graph: Any
        if args.encoder:
            folder = Path(written.name, name)
            folder.mkdir()
            graph = behind_an_encoder(new, sizes[0] // 2, sizes[1], folder)
        else:
            graph = make([*prompt, *new], *sizes)
        graph = quantize(graph, args.scheme, threshold=9.0)[0] if args.scheme else graph
        plain = Generator(graph, threads=args.threads)
        ways: dict[str, tuple[Generator, Any]] = {
            "plain": (plain, {}),
            "prompt lookup": (plain, {"speculate": "prompt-lookup"}),
        }
        if not args.encoder:
            draft = Generator(make([*prompt, *new], 2, 256, args.right), threads=args.threads)
            ways["draft"] = (Generator(graph, threads=args.threads, draft=draft), {})
        rates: dict[str, list[float]] = {way: [] for way in ways}
        last = {}
        for turn in range(rounds + 1):
            for way in list(ways)[:: 1 if turn % 2 else -1]:
                generator, options = ways[way]
                last[way], rate = measure(generator, prompt, new, options, clock)
                rates[way] += [rate] if turn else []  # the first opens and fills everything
                if last[way].tokens != [new]:
                    failed.append(f"{name}: {way} gives other tokens")
        for way in [*ways][1:]:
            over = [a / b for a, b in zip(rates[way], rates["plain"], strict=True)]
            ratio, guesses = statistics.median(over), last[way].speculation
            row = {"text": name, "guesses": way, "prompt": len(prompt), "new": len(new)}
            row |= {"ratio": ratio, "lowest": min(over), "highest": max(over)}
            row |= {"checked": guesses.checked, "right": guesses.right}
            row |= {"plain": statistics.median(rates["plain"])}
            rows.append(row)
            if way == "prompt lookup" and ratio < GOALS[name]:
                failed.append(f"{name}: {way} gives {ratio:.2f} of the tokens a second")
    machine = f"{processor()}, {args.threads} threads, onnxruntime {ort.__version__}"
    if args.json:
        print(json.dumps({"machine": machine, "rows": rows, "failed": failed}, indent=2))
    else:
        table = Table("text", "guesses", "new", "plain/s", "ratio", "from, to", "checked", "right")
        for row in rows:
            table.add_row(
                row["text"], row["guesses"], f"{row['new']}", f"{row['plain']:.1f}",
                f"{row['ratio']:.2f}", f"{row['lowest']:.2f}, {row['highest']:.2f}",
                f"{row['checked']}", f"{row['right']}",
            )  # fmt: skip
        Console().print(table, machine, *failed, sep="\n")
    return 3 if failed and not args.quick else 0


if __name__ == "__main__":
    sys.exit(main())
