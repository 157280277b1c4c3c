"""BERT-base, a sentence encoder of MiniLM's size, GPT-2 124M, a 12-layer Llama and T5-small.

They are as torch exports them, with random weights. The other questions ask for these files; each
is made once and kept. Needs torch and transformers
(`pip install "graphgen-onnx[bench]"`). Projections are drawn with the variance 1 / width, so that
attention is peaky and wrong wiring shows.
"""

import argparse
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

MODELS = ("bert", "minilm", "gpt2", "llama", "t5")
EXPORTERS = {"dynamo": ("sdpa", 18), "torchscript": ("eager", 17)}
"""Each exporter with transformers' attention implementation and the opset."""

WIDTH, LAYERS, HEADS = 768, 12, 12


def cache_folder() -> Path:
    """Where exports are kept unless another folder is given."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "graphgen-bench"


def exported(name: str, exporter: str, folder: Path) -> Path:
    """The export's path; made in a process of its own if it is not there, torch being large."""
    path = folder / f"{name}_{exporter}.onnx"
    if not path.exists():
        command = [sys.executable, __file__, name, "--exporter", exporter, "--folder", str(folder)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            told = (done.stderr.strip() or "no reason given").splitlines()[-1]
            raise RuntimeError(f"{name} was not exported by {exporter}: {told}")
    return path


def make_model(name: str, attention: str) -> Any:
    """The model in eval mode, its results plain tensors."""
    import transformers as hf

    common = {"use_cache": False, "attn_implementation": attention}
    if name == "bert":  # the defaults are BERT-base
        return hf.BertModel(hf.BertConfig(attn_implementation=attention), add_pooling_layer=False)
    if name == "minilm":  # of all-MiniLM-L6-v2
        config = hf.BertConfig(
            num_hidden_layers=6,
            hidden_size=384,
            intermediate_size=1536,
            attn_implementation=attention,
        )
        return hf.BertModel(config, add_pooling_layer=False)
    if name == "gpt2":  # the defaults are GPT-2 124M, but for more positions
        return hf.GPT2LMHeadModel(hf.GPT2Config(n_positions=2048, **common))
    if name == "llama":
        config = hf.LlamaConfig(
            num_hidden_layers=LAYERS,
            hidden_size=WIDTH,
            num_attention_heads=HEADS,
            num_key_value_heads=4,
            intermediate_size=2048,
            max_position_embeddings=2048,
            **common,
        )
        return hf.LlamaForCausalLM(config)
    return hf.T5ForConditionalGeneration(hf.T5Config(**common))  # the defaults are T5-small


def vary(model: Any, name: str) -> None:
    """Draw the weights of a model anew; within torch.no_grad()."""
    import torch

    generator = torch.Generator().manual_seed(2)
    tables = {id(m.weight) for m in model.modules() if isinstance(m, torch.nn.Embedding)}
    for key, parameter in model.named_parameters():
        if parameter.ndim == 2:
            spread = 0.5 if id(parameter) in tables else parameter.shape[1] ** -0.5
            if name == "t5" and key.endswith(".q.weight"):  # holds the 1/sqrt(d) of attention
                spread *= model.config.d_kv**-0.5
            parameter.normal_(0.0, spread, generator=generator)
        else:
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)


def export(name: str, exporter: str, path: Path) -> None:
    """Write one export, beside and then renamed; weights inside, batch and lengths dynamic."""
    import torch

    attention, opset = EXPORTERS[exporter]
    attention = "eager" if name == "t5" else attention  # torch 2.13 cannot export the other
    model = make_model(name, attention).eval()
    with torch.no_grad():
        vary(model, name)

    arguments: dict[str, torch.Tensor] = {
        "input_ids": torch.ones(2, 7, dtype=torch.long),
        "attention_mask": torch.ones(2, 7, dtype=torch.long),
    }
    if name in ("bert", "minilm"):
        arguments["token_type_ids"] = torch.zeros(2, 7, dtype=torch.long)
    if name == "t5":
        arguments["decoder_input_ids"] = torch.ones(2, 5, dtype=torch.long)

    class Positional(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, *given: torch.Tensor) -> torch.Tensor:
            y = self.model(**dict(zip(arguments, given, strict=True)))[0]
            if name != "minilm":
                return y
            mask = given[1].unsqueeze(-1).to(y.dtype)  # the mean of the tokens, of length 1
            mean = (y * mask).sum(1) / mask.sum(1).clamp(min=1e-9)
            return torch.nn.functional.normalize(mean)

    axes = {
        key: {0: "batch", 1: "target" if key.startswith("decoder_") else "sequence"}
        for key in arguments
    }
    beside = path.with_suffix(".part")
    options: dict[str, Any] = {"input_names": [*arguments], "opset_version": opset}
    if exporter == "torchscript":
        options |= {"dynamo": False, "dynamic_axes": axes}
    else:
        dims = tuple({i: torch.export.Dim(d) for i, d in a.items()} for a in axes.values())
        options |= {"dynamo": True, "external_data": False, "verbose": False}
        options["dynamic_shapes"] = (dims,)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            Positional().eval(), (*arguments.values(),), beside, output_names=["y"], **options
        )
    beside.rename(path)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="example: python bench/exports.py bert --exporter torchscript --folder exports",
    )
    parser.add_argument("names", nargs="+", choices=MODELS, metavar="MODEL", help=", ".join(MODELS))
    parser.add_argument("--exporter", nargs="+", choices=EXPORTERS, default=[*EXPORTERS])
    parser.add_argument("--folder", type=Path, default=cache_folder())
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    for name in args.names:
        for exporter in args.exporter:
            path = args.folder / f"{name}_{exporter}.onnx"
            export(name, exporter, path)
            print(f"{path}: {path.stat().st_size / 1e6:.0f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
