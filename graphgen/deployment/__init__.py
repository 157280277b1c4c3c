"""Folders that clients load, built of checkpoints and of exports."""

import os
from contextlib import nullcontext
from pathlib import Path

from graphgen.arguments import checked
from graphgen.bits import BlockSize
from graphgen.deployment.building import Building, Built
from graphgen.deployment.options import Cache, Options, Prompts
from graphgen.deployment.sources import here, is_gguf
from graphgen.export.folders import Layout
from graphgen.export.precision import Precision
from graphgen.models.published.gguf_tokenizer import folder_of
from graphgen.models.published.static_folder import holds_table, static_folder
from graphgen.quantize import Scheme
from graphgen.quantize.sites import AccuracyLevel
from graphgen.targets import TargetName


@checked
def build_folder(
    source: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    like: str | os.PathLike[str] | None = None,
    task: str | None = None,
    head: str | None = None,
    seed: int = 0,
    attentions: bool = False,
    target: TargetName = "cpu",
    dtype: Precision = "fp32",
    layout: Layout = "plain",
    quantize: Scheme | None = None,
    block_size: BlockSize | None = None,
    accuracy_level: AccuracyLevel | None = None,
    full_range: bool = False,
    kv: Cache | None = None,
    prompts: Prompts | None = None,
    tune: bool = False,
    tune_for: tuple[int, int] | None = None,
    text: str | os.PathLike[str] | None = None,
    run: bool = True,
    verify: bool = False,
    stop_after: int | None = None,
) -> Built:
    """Write a checkpoint as ONNX, fused for a target, into a folder that clients load.

    Args:
        source: OWNER/MODEL of the Hugging Face Hub, a folder, a GGUF file or, with `like`, an ONNX
            file of a decoder that another tool exported.
        output: The folder to write; it appears when it is complete.
        like: A folder with the configuration and the tokenizer of `source`.
        task: What the graph is for, such as fill-mask; by default what config.json names.
        head: A head that may be fresh, and its labels: `classifier:3`, `score:no,yes`; its weights
            are drawn from `seed`.
        attentions: Also output the attention weights.
        target: Whose kernels the graph is for.
        dtype: Of weights and results.
        layout: Of optimum and transformers.js (plain), or of onnxruntime-genai.
        quantize: Weights in small integers, with `block_size`, `accuracy_level`, `full_range`,
            `verify` and `stop_after` as `graphgen.quantize.quantize` has them.
        kv: int8 for a cache of a quarter of the memory.
        prompts: int8 for a second graph that reads prompts faster, beside weights of four bits.
        tune: Measure on this machine, and pick what is left open of blocks, `kv` and `prompts`.
        tune_for: With `tune`, the tokens of a prompt, and how many prompts (512, 1).
        text: A file on which integers are calibrated; on a third of it their cost is measured.
        run: False to tell only the errors of weights, with less memory.

    Returns what was built, and what there is to tell of it. Raises GraphgenError, with nothing
    written, for a checkpoint that is not whole, or whose configuration has a field that is not
    understood, and for options that contradict each other.
    """
    options = Options(
        task=task,
        head=head,
        seed=seed,
        attentions=attentions,
        target=target,
        dtype=dtype,
        layout=layout,
        quantize=quantize,
        block_size=block_size,
        accuracy_level=accuracy_level,
        full_range=full_range,
        kv=kv,
        prompts=prompts,
        tune=tune,
        tune_for=tune_for,
        text=None if text is None else Path(text),
        run=run,
        verify=verify,
        stop_after=stop_after,
    )
    path = here(os.fspath(source))
    beside = None if like is None else here(os.fspath(like), weights=False)
    alone = beside is None and is_gguf(str(path))
    static = not alone and beside is None and holds_table(path)
    of = folder_of if alone else static_folder if static else nullcontext
    with of(beside or path) as folder:
        return Building(options, path, Path(output), folder, like=like is not None).run()
