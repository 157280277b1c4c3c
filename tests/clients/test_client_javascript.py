"""transformers.js in Node and onnxruntime-web in Chromium as clients: make test-javascript.

GRAPHGEN_NODE_FOLDER names the folder of node_modules. Tokens and outputs are those of graphgen.
"""

import json
import os
import queue
import shutil
import subprocess
import threading
import warnings
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import onnxruntime as ort
import pytest
from client_programs import CAUSAL, ENCODERS, SEQ2SEQ, STATEFUL, check_example, told
from devices_here import WEBGPU
from random_checkpoints import random_checkpoint
from small_models import relative_rms

import graphgen as gg
from graphgen.commands import main

FOLDER = os.environ.get("GRAPHGEN_NODE_FOLDER", "")
pytestmark = pytest.mark.skipif(
    not FOLDER, reason="GRAPHGEN_NODE_FOLDER names no folder with @huggingface/transformers 4.3"
)

NODE = ["node", "--input-type=module", "-e"]
STEPS, LENGTHS = 64, (12, 7, 3)
DECODERS = {**CAUSAL, "lfm2": STATEFUL["lfm2"]}
GENERATIVE = {**DECODERS, **SEQ2SEQ}

CLIENT = """
import { readFileSync } from 'node:fs';
import * as transformers from '@huggingface/transformers';

async function results(folder, head, feeds) {
  const given = Object.fromEntries(Object.entries(feeds).map(([name, rows]) => [
    name,
    new transformers.Tensor(
      'int64', BigInt64Array.from(rows.flat(), BigInt), [rows.length, rows[0].length]),
  ]));
  const model = await transformers[`AutoModel${head}`].from_pretrained(folder, {
    dtype: 'fp32', local_files_only: true,
  });
  if (!/CausalLM|Seq2SeqLM/.test(head)) {
    return Array.from(Object.values(await model(given))[0].data);
  }
  const tokens = await model.generate({
    ...given, max_new_tokens: STEPS, min_new_tokens: STEPS, do_sample: false,
    no_repeat_ngram_size: 1,
  });
  return tokens.tolist().map((row) => row.map(Number));
}

const told = [];
for (const job of JSON.parse(readFileSync(0))) {
  told.push(await results(...job).catch((error) => String(error.stack)));
}
console.log(JSON.stringify(told));
""".replace("STEPS", str(STEPS))

PAGE = r"""<!doctype html><script type="module">
import * as ort from '/dist/ort.PROVIDER.bundle.min.mjs';

async function results() {
  ort.env.wasm.numThreads = 1;
  ort.env.wasm.wasmPaths = '/dist/';
  ort.env.logLevel = 'verbose';  // the runtime logs where its nodes run
  const placement = {};
  const keep = (line) => {
    const found = String(line).match(/placed on \[(\w+)\]. Number of nodes: (\d+)/);
    if (found) placement[found[1]] = Number(found[2]);
  };
  for (const level of ['log', 'debug', 'info', 'warn', 'error']) console[level] = keep;
  const calls = await (await fetch('/calls.json')).json();
  const session = await ort.InferenceSession.create('/model.onnx', {
    executionProviders: ['PROVIDER'],
    logSeverityLevel: 0,
    preferredOutputLocation: calls.kept,
    externalData: [{ path: 'model.onnx_data', data: '/model.onnx_data' }],
  });
  const told = [];
  let cache = {};
  for (const { ids, empty } of calls.steps) {
    const feeds = { ...cache };
    for (const [name, rows] of Object.entries(ids)) {
      feeds[name] = new ort.Tensor(
        'int64', BigInt64Array.from(rows.flat(), BigInt), [rows.length, rows[0].length]);
    }
    for (const [name, shape] of Object.entries(empty)) {
      feeds[name] = new ort.Tensor('float32', [], shape);
    }
    const outputs = await session.run(feeds);
    const last = told.length + 1 === calls.steps.length;
    const read = Object.entries(outputs).filter(([name]) => last || name === 'logits');
    told.push(Object.fromEntries(
      await Promise.all(read.map(async ([n, x]) => [n, Array.from(await x.getData())]))));
    cache = Object.fromEntries(
      Object.entries(outputs).filter(([name]) => name !== 'logits')
        .map(([name, x]) => [name.replace('present', 'past_key_values'), x]));
  }
  return [...told, placement];
}

const told = await results().catch((error) => String(error.stack));
await fetch('/told', { method: 'POST', body: JSON.stringify(told) });
</script>"""


class Pages(SimpleHTTPRequestHandler):
    """The page, the runtime and the model; what the page tells is kept."""

    extensions_map = SimpleHTTPRequestHandler.extensions_map | {".mjs": "text/javascript"}
    told: ClassVar[queue.Queue[Any]] = queue.Queue()

    def do_POST(self) -> None:  # the name that http.server calls
        self.told.put(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(204)
        self.end_headers()

    def log_message(self, *args: Any) -> None:
        """Nothing."""


def batch(kind: str) -> tuple[list[list[int]], dict[str, np.ndarray]]:
    """Tokens of each row, and as they are fed: padded on the left where they are continued."""
    random, longest = np.random.default_rng(0), max(LENGTHS)
    prompts = [random.integers(10, 200, n).tolist() for n in LENGTHS]
    left = kind in DECODERS
    pads = [(longest - n, 0) if left else (0, longest - n) for n in LENGTHS]
    mask = np.array([np.pad([1] * n, pad) for n, pad in zip(LENGTHS, pads, strict=True)])
    # Tokens of padding count as repeated ones, so they are some that the row has.
    ids = np.array([np.pad(p, pad, "edge") for p, pad in zip(prompts, pads, strict=True)])
    feeds = {"input_ids": ids, "attention_mask": mask}
    return prompts, feeds | ({"token_type_ids": ids % 2} if kind == "bert" else {})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: Any) -> Path:
    """Each kind's checkpoint, and what is built of it for its first task in KIND-built."""
    folder: Path = tmp_path_factory.mktemp("javascript")
    for kind, fields in {**GENERATIVE, **ENCODERS}.items():
        source = random_checkpoint(folder / kind, fields)
        assert main(["build", str(source), "-o", str(folder / f"{kind}-built")]) == 0
    return folder


@pytest.fixture(scope="module")
def results(folder: Path) -> dict[str, Any]:
    """What transformers.js makes of each."""
    heads = dict.fromkeys(DECODERS, "ForCausalLM") | dict.fromkeys(SEQ2SEQ, "ForSeq2SeqLM")
    heads |= dict.fromkeys(ENCODERS, "")
    jobs = [
        (str(folder / f"{kind}-built"), head, {n: x.tolist() for n, x in batch(kind)[1].items()})
        for kind, head in heads.items()
    ]
    rows = json.loads(told([*NODE, CLIENT], jobs, Path(FOLDER)))
    return dict(zip(heads, rows, strict=True))


@pytest.mark.parametrize("kind", GENERATIVE)
def test_tokens_in_node(kind: str, folder: Path, results: dict[str, Any]) -> None:
    assert isinstance(results[kind], list), results[kind]
    prompts, feeds = batch(kind)
    how = {"max_new_tokens": STEPS, "min_new_tokens": STEPS, "no_repeat_ngram_size": 1}
    found = gg.generate(folder / f"{kind}-built", prompts, **how)
    list(found)
    begin = feeds["input_ids"].shape[1] if kind in DECODERS else 1
    assert found.tokens == [row[begin:] for row in results[kind]]


@pytest.mark.parametrize("kind", ENCODERS)
def test_states_in_node(kind: str, folder: Path, results: dict[str, Any]) -> None:
    assert isinstance(results[kind], list), results[kind]
    feeds = batch(kind)[1]
    [wanted] = gg.Session(folder / f"{kind}-built" / "onnx" / "model.onnx")(**feeds)
    kept = feeds["attention_mask"].astype(bool)
    assert relative_rms(wanted[kept], np.reshape(results[kind], wanted.shape)[kept]) < 1e-5


def test_the_example_of_the_page(tmp_path: Path) -> None:
    (tmp_path / "node_modules").symlink_to(Path(FOLDER).resolve() / "node_modules")
    check_example("transformers.js", NODE, tmp_path)


@pytest.mark.skipif(not shutil.which("chromium"), reason="there is no chromium on the PATH")
@pytest.mark.parametrize("provider", ["wasm", "webgpu"])
def test_a_decoder_in_a_browser(provider: str, folder: Path, tmp_path: Path) -> None:
    """A prompt padded on the left, then two calls of one token with the cache of the last.

    Compared with the CPU and, where the plugin finds a device, with the same provider natively.
    """
    root, built = tmp_path / "root", folder / "llama-built" / "onnx"
    shutil.copytree(built, root)
    (root / "dist").symlink_to(Path(FOLDER).resolve() / "node_modules/onnxruntime-web/dist")
    session, feeds = ort.InferenceSession(built / "model.onnx"), batch("llama")[1]
    ids, mask = (np.pad(x, ((0, 0), (0, 2)), constant_values=1) for x in feeds.values())
    positions = np.maximum(mask.cumsum(1) - 1, 0)
    cache = {
        x.name: np.zeros((len(ids), x.shape[1], 0, x.shape[3]), np.float32)
        for x in session.get_inputs()
        if x.name.startswith("past")
    }
    native = None
    if provider == "webgpu" and not WEBGPU.lacks:
        with warnings.catch_warnings(action="ignore", category=gg.GraphgenWarning):
            native = gg.Session(built / "model.onnx", provider="webgpu")
    calls, wanted, natively, start = [], [], [], 0
    for end in range(max(LENGTHS), ids.shape[1] + 1):
        given = {
            "input_ids": ids[:, start:end],
            "attention_mask": mask[:, :end],
            "position_ids": positions[:, start:end],
        }
        shapes = {} if start else {name: x.shape for name, x in cache.items()}
        calls.append({"ids": {n: x.tolist() for n, x in given.items()}, "empty": shapes})
        names = [x.name for x in session.get_outputs()]
        outputs = session.run(names, {**given, **cache})
        wanted.append(dict(zip(names, outputs, strict=True)))
        if native is not None:
            results = native(given | cache)
            natively.append(dict(zip(native.outputs, results, strict=True)))
        cache = {
            n.replace("present", "past_key_values"): x
            for n, x in wanted[-1].items()
            if n != "logits"
        }
        start = end
    kept = {n: "gpu-buffer" if provider == "webgpu" and n != "logits" else "cpu" for n in names}
    (root / "calls.json").write_text(json.dumps({"steps": calls, "kept": kept}))
    (root / "index.html").write_text(PAGE.replace("PROVIDER", provider))
    *found, placement = in_browser(root, tmp_path / "user")
    sizes = placement.get("CPUExecutionProvider", 0)
    assert provider == "wasm" or placement["WebGpuExecutionProvider"] > 5 * sizes, placement
    assert [*found[-1]] == names
    for reference in (wanted, natively) if native is not None else (wanted,):
        for theirs, ours in zip(found, reference, strict=True):
            for name, values in theirs.items():
                assert relative_rms(ours[name], np.reshape(values, ours[name].shape)) < 1e-5, name


def in_browser(root: Path, user: Path, part: str = "") -> Any:
    """What the page of a folder tells; `part` is what follows its address."""
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Pages, directory=str(root))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        options = "headless no-sandbox no-first-run disable-background-networking"
        options += " disable-component-update disable-sync disable-quic"
        options += " enable-unsafe-webgpu use-webgpu-adapter=swiftshader"  # a device in software
        flags = [f"--{option}" for option in options.split()]
        address = f"http://127.0.0.1:{server.server_port}/{part}"
        browser = subprocess.Popen(
            ["chromium", *flags, f"--user-data-dir={user}", address], stderr=subprocess.DEVNULL
        )
        try:
            told = Pages.told.get(timeout=120)
        finally:
            browser.terminate()
            browser.wait()
            server.shutdown()
    assert not isinstance(told, str), told
    return told
