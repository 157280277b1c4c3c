"""How fast do language models generate on the CPU, next to what else makes and runs their graphs?

For a Llama of 12 layers, GPT-2 124M and T5-small with random weights, one row, greedy: the time to
read a prompt, and the tokens a second behind it, of

- graphgen: a folder of `graphgen build`, in float32 and with --quantize int4, calibrated with
  --text on random words that are not those of the prompts, by `gg.generate`; int8 prompts: that
  of --prompts int8; tuned: that of --tune, on this machine; in genai: that of --layout genai, by
  onnxruntime-genai, as it opens any other;
- genai: what onnxruntime-genai's own builder writes, fp32 and int4; mobius: what mobius-onnx
  writes, by onnxruntime-genai; optimum: its export, by its model; torch: transformers, SDPA;
- products: the model's products with its weights and nothing else, one row, in ONNX Runtime: as it
  comes, and with its memory in pages of 2 MB, where `gg.generate` has it.

Each is a process of its own; they take turns, the order reversed every round. `time` is the median
over the rounds of its time over graphgen's, int4's over graphgen's int4: above 1, it is slower.
`error` is the relative RMS error of the logits behind prompts next to torch's, `divergence` the
mean Kullback-Leibler divergence of torch's next tokens from its own. Peers may need versions of
packages that exclude each other, so each may have a Python of its own; missing ones are named.

    python bench/generate.py --only llama --threads 1 --optimum-python optimum/bin/python

Exit 3 if graphgen is slower than another by more than 3 %, if int4 is not 1.2 times as fast as
genai's (its prompts in int8 1.5 times), or errs more by 3 %, or if it does not reach 95 % of the
products' rate.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from exports import cache_folder, make_model, vary

HERE = Path(__file__).resolve()
MODELS = ("llama", "gpt2", "t5")
PROMPT, TOKENS = 128, 32
JUDGED, LENGTH = 16, 48
"""Prompts that the error is measured on, and their tokens."""

TIE, INT4, READ, ROOF, SAME = 1.03, 1.2, 1.5, 0.95, 1e-4
"""What counts as no difference, and the bounds of the last paragraph above; of fp32's errors."""

Run = tuple[Callable[[], tuple[float, float]], Callable[[list[list[int]]], np.ndarray] | None]
"""A prompt's and a token's seconds; and the logits behind prompts."""


def tokens(*shape: int) -> Any:
    return np.random.default_rng(0).integers(3, 30000, shape).tolist()


def by_graphgen(folder: Path, threads: int) -> Run:
    from graphgen.generation import Generator

    # Each prompt is read anew, as by all others.
    generator = Generator(folder, threads=threads, provider="cpu", prefix_cache=False)

    def run() -> tuple[float, float]:
        found = generator(tokens(PROMPT), max_new_tokens=TOKENS + 1, eos=[])
        for _ in found:
            pass
        return found.prefill[1], found.decode[1] / max(found.decode[0], 1)

    def judge(rows: list[list[int]]) -> np.ndarray:
        generator(rows[0], max_new_tokens=1)  # which tells a decoder of T5 how it begins
        return np.concatenate([generator.decoder.start([row], 1) for row in rows])

    return run, judge


def by_genai(folder: Path, threads: int) -> Run:
    import onnxruntime_genai as og

    config = og.Config(str(folder))
    options = {"session_options": {"intra_op_num_threads": threads}}
    config.overlay(json.dumps({"model": {"decoder": options}}))
    model = og.Model(config)

    def begin(ids: list[int], more: int) -> Any:
        parameters, length = og.GeneratorParams(model), len(ids) + more
        parameters.set_search_options(max_length=length, min_length=length, do_sample=False)
        generator = og.Generator(model, parameters)
        generator.append_tokens(np.array([ids], np.int32))
        return generator

    def run() -> tuple[float, float]:
        start = time.perf_counter()
        generator = begin(tokens(PROMPT), TOKENS + 2)
        generator.generate_next_token()
        read = time.perf_counter()
        for _ in range(TOKENS):
            generator.generate_next_token()
        return read - start, (time.perf_counter() - read) / TOKENS

    def judge(rows: list[list[int]]) -> np.ndarray:
        return np.concatenate([begin(row, 1).get_logits()[:, -1] for row in rows])

    return run, judge


def by_transformers(model: Any) -> Run:
    """Anything that is called as the models of transformers are."""
    import torch

    def start(ids: list[int]) -> tuple[Any, dict[str, Any], int]:
        rows = torch.tensor([ids])
        if not model.config.is_encoder_decoder:
            mask = torch.ones_like(rows)
            return model(input_ids=rows, attention_mask=mask, use_cache=True), {}, len(ids)
        known: dict[str, Any] = {"attention_mask": torch.ones_like(rows)}
        known["encoder_outputs"] = model.get_encoder()(input_ids=rows, **known)
        begin = torch.tensor([[model.config.decoder_start_token_id]])
        return model(decoder_input_ids=begin, use_cache=True, **known), known, 1

    def run() -> tuple[float, float]:
        with torch.inference_mode():
            began = time.perf_counter()
            found, known, length = start(tokens(PROMPT))
            token = found.logits[:, -1:].argmax(-1)
            read = time.perf_counter()
            for step in range(TOKENS):
                if known:
                    given = {"decoder_input_ids": token, **known}
                else:
                    mask = torch.ones(1, length + step + 1, dtype=torch.int64)
                    given = {"input_ids": token, "attention_mask": mask}
                found = model(**given, past_key_values=found.past_key_values, use_cache=True)
                token = found.logits[:, -1:].argmax(-1)
            return read - began, (time.perf_counter() - read) / TOKENS

    def judge(rows: list[list[int]]) -> np.ndarray:
        with torch.inference_mode():
            return np.concatenate([np.asarray(start(row)[0].logits[:, -1]) for row in rows])

    return run, judge


def by_torch(folder: Path, threads: int) -> Run:
    import torch
    import transformers as hf

    torch.set_num_threads(threads)
    is_t5 = json.loads((folder / "config.json").read_text())["model_type"] == "t5"
    kind = hf.AutoModelForSeq2SeqLM if is_t5 else hf.AutoModelForCausalLM
    return by_transformers(kind.from_pretrained(folder, dtype=torch.float32).eval())


def by_optimum(folder: Path, threads: int) -> Run:
    import onnxruntime as ort
    import torch
    from optimum import onnxruntime as optimum

    torch.set_num_threads(threads)
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    is_t5 = json.loads((folder / "config.json").read_text())["model_type"] == "t5"
    kind = optimum.ORTModelForSeq2SeqLM if is_t5 else optimum.ORTModelForCausalLM
    return by_transformers(kind.from_pretrained(folder, session_options=options))


def by_products(folder: Path, threads: int, huge: bool = False) -> Run:
    """`folder` is graphgen's: its matrices, each with a row of its own size."""
    import onnx
    import onnxruntime as ort
    from onnx import helper

    from graphgen.generation.huge_pages import huge_pages

    graph = onnx.load(next(folder.rglob("model.onnx")), load_external_data=False).graph
    sizes = {tensor.name: [*tensor.dims] for tensor in graph.initializer}
    turned = {n.output[0]: n.input[0] for n in graph.node if n.op_type == "Transpose"}
    rng, given = np.random.default_rng(0), set[int]()
    products, outputs, weights = [], [], []
    for node in graph.node:
        if node.op_type not in ("MatMul", "Gemm", "FusedMatMul"):
            continue
        k, n = sizes.get(node.input[1]) or sizes[turned[node.input[1]]][::-1]
        if any(a.name == "transB" and a.i for a in node.attribute):
            k, n = n, k
        given.add(k)
        names = [f"x{k}", f"w{len(products)}"], [f"y{len(products)}"]
        products.append(helper.make_node("MatMul", *names))
        outputs.append(helper.make_tensor_value_info(names[1][0], onnx.TensorProto.FLOAT, [1, n]))
        matrix = rng.standard_normal((k, n), np.float32)
        weights.append(onnx.numpy_helper.from_array(matrix, names[0][1]))
    inputs = [helper.make_tensor_value_info(f"x{k}", onnx.TensorProto.FLOAT, [1, k]) for k in given]
    model = helper.make_model(
        helper.make_graph(products, "products", inputs, outputs, weights),
        ir_version=8, opset_imports=[helper.make_opsetid("", 17)],
    )  # fmt: skip
    del weights
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    session = ort.InferenceSession(model.SerializeToString(), options)
    if huge:
        huge_pages()
    del model
    feeds = {f"x{k}": np.ones((1, k), np.float32) for k in given}

    def run() -> tuple[float, float]:
        start = time.perf_counter()
        for _ in range(TOKENS):
            session.run(None, feeds)
        return 0.0, (time.perf_counter() - start) / TOKENS

    return run, None


def by_large(folder: Path, threads: int) -> Run:
    return by_products(folder, threads, huge=True)


def write_checkpoint(name: str, folder: Path) -> None:
    """A folder as published, with random weights and a tokenizer of words."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers

    model = make_model(name, "eager" if name == "t5" else "sdpa")
    with torch.no_grad():
        vary(model, name)
    model.config.use_cache = True
    for key, token in {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}.items():
        setattr(model.config, key, token)
        setattr(model.generation_config, key, token)
    if name == "t5":
        model.config.decoder_start_token_id = model.generation_config.decoder_start_token_id = 0
    model.save_pretrained(folder)
    words = {f"w{i}": i for i in range(model.config.vocab_size)}
    tokenizer = Tokenizer(models.WordLevel(words, "w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    told = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "w1", "eos_token": "w2"}
    (folder / "tokenizer_config.json").write_text(json.dumps(told | {"unk_token": "w0"}))


WORKERS = {
    "graphgen": by_graphgen, "genai": by_genai, "torch": by_torch, "optimum": by_optimum,
    "products": by_products, "large": by_large,
}  # fmt: skip


def work(kind: str, folder: Path, threads: int, prompt: int) -> None:
    """A turn for each line that comes in, or the logits in the file that it names."""
    globals()["PROMPT"] = prompt
    run, judge = WORKERS[kind](folder, threads)
    print("{}", flush=True)
    for line in sys.stdin:
        if not line.strip():
            print(json.dumps(run()), flush=True)
            continue
        if judge is not None:
            np.save(line.strip(), np.asarray(judge(tokens(JUDGED, LENGTH)), np.float32))
        print("{}", flush=True)


class MissingError(Exception):
    """What a contender wants is not there."""


class Worker:
    """One contender's process."""

    def __init__(
        self,
        name: str,
        kind: str,
        python: str,
        folder: Path,
        threads: int,
        prompt: int = PROMPT,
        clock: str = "wall",
    ):
        self.name, self.times = name, list[tuple[float, float]]()
        self.scheme = "int4" if "int4" in name else "fp32"
        set_to = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(threads))
        root = os.pathsep.join(
            [*filter(None, [os.environ.get("PYTHONPATH")]), str(HERE.parents[1])]
        )
        self._process = subprocess.Popen(
            [python, str(HERE), "--worker", kind, str(folder), str(threads), str(prompt), clock],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env=os.environ | set_to | {"PYTHONPATH": root, "HF_HUB_OFFLINE": "1"},
        )  # fmt: skip
        self._answer()

    def _answer(self) -> Any:
        assert self._process.stdout is not None and self._process.stderr is not None
        for line in self._process.stdout:
            if line[0] in "[{":
                return json.loads(line)
        raise MissingError(
            (self._process.stderr.read().strip() or "no reason given").splitlines()[-1]
        )

    def ask(self, line: str = "") -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


def make(folder: Path, command: Sequence[object]) -> Path:
    """The folder, filled by a command with its path at the end unless it is there."""
    if not folder.exists():
        beside = folder.with_name(folder.name + ".part")
        shutil.rmtree(beside, ignore_errors=True)
        environment = os.environ | {"PYTHONPATH": str(HERE.parents[1]), "HF_HUB_OFFLINE": "1"}
        try:
            done = subprocess.run(
                [*map(str, command), str(beside)], capture_output=True, text=True, env=environment
            )
        except OSError as error:
            raise MissingError(str(error)) from error
        if done.returncode or not beside.exists():
            raise MissingError((done.stderr.strip() or done.stdout.strip()).splitlines()[-1])
        beside.rename(folder)
    return folder


def contenders(name: str, args: argparse.Namespace) -> list[tuple[str, str, str, Any]]:
    """Name, kind, interpreter, and what makes the folder."""
    folder: Path = args.folder / "generate"
    folder.mkdir(parents=True, exist_ok=True)
    here, genai, optimum = sys.executable, args.genai_python, args.optimum_python
    checkpoint = make(folder / name, [here, HERE, "--checkpoint", name])

    words = np.random.default_rng(1).integers(3, 30000, 128 * LENGTH * JUDGED)
    text = folder / "words.txt"
    text.write_text(" ".join(f"w{word}" for word in words))
    integers = ("--quantize", "int4", "--text", text)

    def built(*more: object) -> list[object]:
        return [here, "-m", "graphgen", "build", checkpoint, *more, "-o"]

    def beside(python: str, command: str) -> Path:
        return Path(python).with_name(command)

    builder = (genai, "-m", "onnxruntime_genai.models.builder", "-i", checkpoint, "-e", "cpu", "-c")
    exporting = (beside(optimum, "optimum-cli"), "export", "onnx", "--model", checkpoint, "--task")
    task = "text2text-generation-with-past" if name == "t5" else "text-generation-with-past"
    plain = ("graphgen", built())
    found: list[tuple[str, str, str, tuple[str, list[object]] | None]] = [
        ("graphgen", "graphgen", here, plain),
        ("graphgen int4", "graphgen", here, ("graphgen-int4", built(*integers))),
        ("torch", "torch", here, None),
        ("optimum", "optimum", optimum, ("optimum", [*exporting, task])),
    ]
    if name != "t5":  # whose graphs onnxruntime-genai does not run
        mobius = [beside(genai, "mobius"), "build", "--config", checkpoint, "--ep", "cpu"]
        in_genai, layout = ("--layout", "genai"), [*mobius, "--runtime", "ort-genai"]
        both = (*in_genai, *integers)
        reading = ("graphgen-prompts", built(*integers, "--prompts", "int8"))
        found += [
            (READING, "graphgen", here, reading),
            (TUNED, "graphgen", here, ("graphgen-tuned", built(*integers, "--tune"))),
            ("graphgen in genai", "genai", genai, ("graphgen-genai", built(*in_genai))),
            ("graphgen int4 in genai", "genai", genai, ("graphgen-genai-int4", built(*both))),
            ("genai", "genai", genai, ("genai", [*builder, folder / "hf", "-p", "fp32", "-o"])),
            ("genai int4", "genai", genai, ("genai-int4", [*builder, folder, "-p", "int4", "-o"])),
            ("mobius", "genai", genai, ("mobius", layout)),
            ("products", "products", here, plain),
            ("products in huge pages", "large", here, plain),
        ]
    return [
        (
            told,
            kind,
            python,
            (checkpoint, None) if way is None else (folder / f"{name}-{way[0]}", way[1]),
        )
        for told, kind, python, way in found
        if args.contenders is None or told in args.contenders
    ]


def measure(name: str, threads: int, args: argparse.Namespace) -> list[dict[str, Any]]:
    """All contenders on one model."""
    workers, rows, logits = list[Worker](), list[dict[str, Any]](), {}
    saved = args.folder / f"logits.{os.getpid()}.npy"
    try:
        for told, kind, python, (folder, command) in contenders(name, args):
            try:
                path = folder if command is None else make(folder, command)
                worker = Worker(told, kind, python, path, threads, args.prompt, args.clock)
                workers.append(worker)
                worker.ask()
                worker.ask(str(saved))
                if saved.exists():
                    logits[told] = np.load(saved).astype(np.float64)
                    saved.unlink()
            except MissingError as error:
                if told in OWN:
                    raise SystemExit(f"{told}: {error}") from error
                workers = [w for w in workers if w.name != told]
                rows.append({"model": name, "contender": told, "missing": str(error)})
        rounds, stop = 0, time.perf_counter() + args.seconds
        while rounds < 5 or time.perf_counter() < stop:
            for worker in workers if rounds % 2 else reversed(workers):
                worker.times.append(worker.ask())
            rounds += 1
    finally:
        for worker in workers:
            worker.close()
    own = {worker.scheme: np.array(worker.times) for worker in workers if worker.name in OWN}
    for worker in workers:
        times = np.array(worker.times)
        prefill, decode = np.median(times, axis=0)
        slower = np.median(times / own[worker.scheme], axis=0)
        rows.append({
            "model": name, "threads": threads, "contender": worker.name, "rounds": rounds,
            "prefill_ms": 1e3 * prefill, "prefill_time": slower[0],
            "tokens_per_second": 1 / decode, "best": 1 / times[:, 1].min(), "time": slower[1],
            **errors(logits.get(worker.name), logits.get("torch")),
        })  # fmt: skip
    return rows


OWN, READING = ("graphgen", "graphgen int4"), "graphgen int4, int8 prompts"
TUNED = "graphgen int4, tuned"


def errors(found: Any, wanted: Any) -> dict[str, float]:
    """Relative RMS error of logits (N, V), and their mean divergence."""
    if found is None or wanted is None:
        return {}
    width = min(found.shape[1], wanted.shape[1])
    p, q = (x[:, :width] - x[:, :width].max(1, keepdims=True) for x in (wanted, found))
    p, q = (x - np.log(np.exp(x).sum(1, keepdims=True)) for x in (p, q))
    error = np.linalg.norm(found[:, :width] - wanted[:, :width]) / np.linalg.norm(wanted)
    return {"error": float(error), "divergence": float((np.exp(p) * (p - q)).sum(1).mean())}


def failures(rows: Sequence[dict[str, Any]]) -> list[str]:
    """What misses its bound."""
    by_name = {row["contender"]: row for row in rows if "time" in row}
    told = []
    for name, row in by_name.items():
        if name in (*OWN, READING, TUNED) or "products" in name:
            continue
        if "int4" not in name and row.get("error", 0) > SAME:
            told.append(f"{name}: its logits differ from torch's by {row['error']:.1e}")
        elif name == "genai int4":
            if row["time"] < INT4:
                told.append(f"int4: {row['time']:.2f} times as fast as genai's, wanted {INT4}")
            faster = row["prefill_time"] / by_name.get(READING, row)["prefill_time"]
            if READING in by_name and faster < READ:
                told.append(f"int8 prompts: {faster:.2f} times as fast as genai's, wanted {READ}")
            if row.get("error", np.inf) * TIE < by_name["graphgen int4"].get("error", 0):
                told.append(f"int4: genai's error is smaller, {row['error']:.3f}")
        else:
            slower = {"decode": row["time"], "prefill": row["prefill_time"]}
            told += [f"{name}: {what} {x:.3f}" for what, x in slower.items() if x < 1 / TIE]
    if "products" in by_name and by_name["products"]["time"] < ROOF:
        told.append(f"products: {by_name['products']['time']:.3f} of our time, wanted {ROOF}")
    return told


def main() -> int:
    from graphgen.processor import processor

    if sys.argv[1:2] == ["--worker"]:
        if sys.argv[6] == "processor":
            time.perf_counter = time.process_time
        work(sys.argv[2], Path(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5]))
        return 0
    if sys.argv[1:2] == ["--checkpoint"]:
        write_checkpoint(sys.argv[2], Path(sys.argv[3]))
        return 0
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=MODELS, default=[*MODELS])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--prompt", type=int, default=PROMPT, help="of so many tokens (128)")
    parser.add_argument("--contenders", nargs="+", help="only these, graphgen's among them")
    clock = "wall, or the processor's time of one thread, where others use the machine (wall)"
    parser.add_argument("--clock", choices=("wall", "processor"), default="wall", help=clock)
    parser.add_argument("--seconds", type=float, default=90.0, help="for each model (90)")
    parser.add_argument("--genai-python", metavar="PYTHON", default=sys.executable)
    parser.add_argument("--optimum-python", metavar="PYTHON", default=sys.executable)
    parser.add_argument("--folder", type=Path, default=cache_folder(), help="of all graphs")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    from rich.console import Console
    from rich.table import Table

    rows, missed = [], []
    console = Console(width=110, stderr=args.json)
    for name in args.only:
        for threads in args.threads:
            found = measure(name, threads, args)
            rows += found
            missed += [f"{name}, {threads} threads: {told}" for told in failures(found)]
            table = Table(title=f"{name}, threads: {threads}, {processor()}")
            for column in (
                "contender",
                "prefill ms",
                "time",
                "tokens/s",
                "time ",
                "error",
                "diverg.",
            ):
                table.add_column(column, justify="left" if column == "contender" else "right")
            for row in found:
                if "missing" in row:
                    console.print(f"{row['contender']} is not there: {row['missing'][:200]}")
                    continue
                table.add_row(
                    row["contender"],
                    *(f"{row[n]:.4g}" if row[n] else "" for n in ("prefill_ms", "prefill_time")),
                    f"{row['tokens_per_second']:.1f}", f"{row['time']:.3f}",
                    *(f"{row[n]:.2g}" if n in row else "" for n in ("error", "divergence")),
                )  # fmt: skip
            console.print(table)
    for line in missed:
        console.print(line)
    if args.json:
        print(json.dumps({"rows": rows, "missed": missed}, indent=1))
    return 3 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
