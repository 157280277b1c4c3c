"""GGUF files of transformers' modules, with the names of the gguf package, against the modules."""

import re
import tempfile
from pathlib import Path
from typing import Any

import gguf_routed
import numpy as np
import pytest
from gguf_files import (
    ARCHITECTURES,
    FAMILIES,
    converted,
    gguf_name,
    given,
    metadata,
    of_activations,
    old,
    with_factors,
)
from published_decoders import weight

from graphgen.models.published import from_folder
from graphgen.models.published.gguf_tokenizer import folder_of
from graphgen.safetensors import read_header

torch = pytest.importorskip("torch", reason="needs torch (make parity)")
transformers = pytest.importorskip("transformers", reason="needs transformers (make parity)")
package = pytest.importorskip("gguf", reason="needs the gguf package")

from test_families import relative_rms, session  # noqa: E402

pytestmark = pytest.mark.parity

BOUND = 1e-5  # relative RMS in float32
# What transformers itself reads: another opinion on how files differ from checkpoints.
ALSO = ("gemma2", "gemma3_text", "gpt2", "phi3", "stablelm", "starcoder2, no biases", "falcon")
ALSO += ("qwen2_moe", "qwen3_moe")


def modules(which: str) -> tuple[Any, dict[str, Any]]:
    """A module with random weights, and those by their names."""
    config = transformers.AutoConfig.for_model(**given(which))
    module = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.copy_(torch.from_numpy(weight(name, tuple(parameter.shape))))
    with tempfile.TemporaryDirectory() as folder:  # experts are stored one by one
        module.save_pretrained(folder)
        own = {w.name: w.read() for w in read_header(Path(folder, "model.safetensors"))}
    return module.eval(), own


def write(path: Path, which: str, weights: dict[str, Any]) -> None:
    """A file, written by the gguf package."""
    fields = given(which)
    arch = ARCHITECTURES.get(fields["model_type"], fields["model_type"])
    writer = package.GGUFWriter(path, arch)
    for name, value in (metadata(fields) | of_activations(weights)).items():
        if name == "general.architecture":
            continue
        kind = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32}
        kind[list] = writer.add_array
        kind.get(type(value), writer.add_string)(name, value)
    arrays = with_factors(fields, converted(fields, weights))
    for name, array in arrays.items():
        writer.add_tensor(name, np.ascontiguousarray(array, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("which", FAMILIES)
def test_a_file_computes_what_the_module_does(which: str, tmp_path: Path) -> None:
    kind = given(which)["model_type"]
    module, weights = modules(which)
    arch = ARCHITECTURES.get(kind, kind)
    number = next(n for n, name in package.MODEL_ARCH_NAMES.items() if name == arch)
    known = package.get_tensor_name_map(number, 8)
    named = dict(weights)
    if kind in gguf_routed.KINDS:
        named = gguf_routed.taken_apart(given(which), weights, old=old(given(which)))
    for name in named:
        if ".act_fn." in name or re.search("(gate|up)_linear", name):  # not in the tables
            continue
        base = re.sub(r"\.norms\.\d+$|(?<=\.experts)\.\d+", "", name.rpartition(".")[0])
        wanted = known.get_name(base) or known.get_name(base.removeprefix("transformer."))
        assert gguf_name(kind, f"{base}.weight") == f"{wanted}.weight", name
    path = tmp_path / "model.gguf"
    write(path, which, weights)
    ids = np.random.default_rng(0).integers(1, 40, (2, 17))
    with torch.no_grad():
        wanted = module(torch.from_numpy(ids)).logits.numpy()
    with folder_of(path) as folder:
        model = from_folder(folder, gguf=path).model
        run = session(model, tmp_path)
        feeds: dict[str, Any] = {"input_ids": ids, "attention_mask": np.ones_like(ids)}
        feeds["position_ids"] = np.tile(np.arange(17), (2, 1))
        for x in run.get_inputs():
            if x.name.startswith("past"):
                feeds[x.name] = np.zeros((2, x.shape[1], 0, x.shape[3]), np.float32)
        own = {x.name: feeds[x.name] for x in run.get_inputs()}
        logits = run.run(["logits"], own)[0]
    assert relative_rms(logits, wanted) < BOUND


@pytest.mark.parametrize("which", ALSO)
def test_transformers_reads_the_same_file(which: str, tmp_path: Path) -> None:
    module, weights = modules(which)
    write(tmp_path / "model.gguf", which, weights)
    auto = transformers.AutoModelForCausalLM
    own = auto.from_pretrained(tmp_path, gguf_file="model.gguf", config=module.config)
    wanted = dict(module.named_parameters())
    for name, parameter in own.named_parameters():
        difference = (parameter - wanted[name]).abs().max()
        assert difference <= 1e-6, name  # 1 + w rounds
