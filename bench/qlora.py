"""What does a base of 4 bits save when adapters are trained, and what does a step take for it?

A decoder of the shape of Qwen2-0.5B (24 layers, 896 wide, a vocabulary of 151,936, 494 million
parameters, tied) with random weights is built, and adapters of rank 8 on its queries and values are
trained on rows of tokens, over float32, int8 and int4 weights, with one thread. Each row of the
table is a process of its own. `frozen` are the bytes of the weights that are not trained; `write`
and `train` the peaks of the processes that write the artifacts and that train; a step's `ratio` is
the median, over steps taken in turn, of its processor time over that of float32.

    python bench/qlora.py --tokens 256 --steps 5
"""

import argparse
import json
import math
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).resolve()
BASES = ("float32", "int8", "int4")
CONFIG = {
    "model_type": "qwen2",
    "vocab_size": 151936,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": True,
    "bos_token_id": 151643,
    "eos_token_id": 151643,
}


def write_checkpoint(folder: Path, layers: int) -> None:
    """A checkpoint of this shape, one weight in memory at a time."""
    from graphgen.models.published import FAMILIES
    from graphgen.models.published.config import Config
    from graphgen.nn.linear import Linear
    from graphgen.nn.module import Parameter, members

    fields = {**CONFIG, "num_hidden_layers": layers}
    family = FAMILIES["qwen2"]
    module = next(iter(family.tasks.values()))(Config(fields))
    items = dict(members(module))
    linear = {f"{path}.weight" for path, item in items.items() if isinstance(item, Linear)}
    sources = family.sources(module)
    found = {
        sources[path].name: item.shape[:: -1 if path in linear else 1]
        for path, item in items.items()
        if isinstance(item, Parameter)
    }
    header, end = dict[str, Any](), 0
    for name, shape in found.items():
        start, end = end, end + 4 * math.prod(shape)
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [start, end]}
    random, text = np.random.default_rng(0), json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, shape in found.items():
            array = random.standard_normal(shape, np.float32) / np.float32(shape[-1] ** 0.5)
            array = array if len(shape) > 1 else np.ones_like(array) * name.endswith("norm.weight")
            file.write(array.data)
    (folder / "config.json").write_text(json.dumps(fields))


def batch_of(tokens: int) -> dict[str, np.ndarray]:
    """One row of so many random tokens."""
    ids = np.random.default_rng(1).integers(0, CONFIG["vocab_size"], (1, tokens))  # type: ignore[call-overload]
    places = np.arange(tokens)[None]
    mask = np.ones_like(ids)
    return {"input_ids": ids, "attention_mask": mask, "position_ids": places, "labels": ids}


def write(folder: Path, base: str) -> dict[str, Any]:
    """Write the artifacts of one base."""
    import graphgen as gg

    start, model = time.perf_counter(), folder / "out" / "onnx" / "model.onnx"
    gg.artifacts(
        model,
        folder / base,
        lora="query|value:8",
        base=None if base == "float32" else base,  # type: ignore[arg-type]
        output="logits",
        profile="stock",
    )
    return {"seconds": time.perf_counter() - start}


def train(folder: Path, bases: list[str], tokens: int, steps: int) -> dict[str, Any]:
    """Take steps on each base in turn."""
    import graphgen as gg

    batch = [batch_of(tokens)]
    trainers = {base: gg.Trainer(folder / base, threads=1) for base in bases}
    frozen = {
        base: sum(a.nbytes for n, a in trainer.parameters.items() if "lora" not in n)
        for base, trainer in trainers.items()
    }
    times: dict[str, list[float]] = {base: [] for base in bases}
    losses: dict[str, list[float]] = {base: [] for base in bases}
    for number in range(1, steps + 2):
        for base, trainer in trainers.items():
            start = time.process_time()
            losses[base].append(trainer.fit(batch, steps=number, progress=False)[-1]["loss"])
            if number > 1:  # the first one also takes memory from the system
                times[base].append(time.process_time() - start)
    return {"frozen": frozen, "times": times, "losses": losses}


def peak(arguments: list[str]) -> dict[str, Any]:
    """What a process of this file prints, and the most memory it took."""
    command = [sys.executable, str(HERE), *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--folder", type=Path, help="keep the models here")
    parser.add_argument("--stage", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.stage:
        what, folder, *bases = options.stage
        place = Path(folder)
        if what == "write":
            found = write(place, bases[0])
        else:
            found = train(place, bases, options.tokens, options.steps)
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(json.dumps({**found, "peak": most}))
        return
    with tempfile.TemporaryDirectory() as made:
        folder = options.folder or Path(made)
        if not (folder / "out").exists():
            (folder / "source").mkdir(parents=True)
            write_checkpoint(folder / "source", options.layers)
            build = [sys.executable, "-m", "graphgen", "build", str(folder / "source"), "-o"]
            subprocess.run([*build, str(folder / "out")], stdout=subprocess.DEVNULL, check=True)
        sizes = ["--tokens", str(options.tokens), "--steps", str(options.steps)]
        rows = dict[str, dict[str, Any]]()
        for base in BASES:
            rows[base] = {"write": peak(["--stage", "write", str(folder), base])}
            rows[base]["train"] = peak([*sizes, "--stage", "train", str(folder), base])
        turns = peak([*sizes, "--stage", "train", str(folder), *BASES])
        print(f"{options.tokens} tokens a step, one thread")
        print("base       frozen MB  write s  write MB  train MB  step s  ratio  loss after")
        for base in BASES:
            one, other = (np.array(turns["times"][name]) for name in (base, BASES[0]))
            print(
                f"{base:<9}{turns['frozen'][base] / 1e6:>11,.0f}"
                f"{rows[base]['write']['seconds']:>9.0f}{rows[base]['write']['peak']:>10,.0f}"
                f"{rows[base]['train']['peak']:>10,.0f}{np.median(one):>8.2f}"
                f"{np.median(one / other):>7.2f}{turns['losses'][base][-1]:>12.4f}"
            )


if __name__ == "__main__":
    main()
