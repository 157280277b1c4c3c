"""`build EXPORT.onnx --like DIR` for decoders as torch exports them: the tokens of transformers."""

import warnings
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import graphgen as gg
from graphgen.commands import main

torch = pytest.importorskip("torch", reason="needs torch (make parity)")
transformers = pytest.importorskip("transformers", reason="needs transformers (make parity)")

pytestmark = pytest.mark.parity

ENDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "vocab_size": 64}
SMALL = {
    **ENDS,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
OLD = {**ENDS, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}
MPT = {**ENDS, "d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 128}


class Export(NamedTuple):
    """A model of transformers and how it is exported; `grows` if its cache cannot be in place."""

    kind: str
    fields: dict[str, Any]
    dynamo: bool = False
    cached: bool = False
    grows: bool = False


EXPORTS = {
    "bloom": Export("Bloom", {**OLD, "hidden_size": 32}, grows=True),
    "bloom, with a cache": Export("Bloom", {**OLD, "hidden_size": 32}, cached=True, grows=True),
    "bloom, by dynamo": Export("Bloom", {**OLD, "hidden_size": 32}, True, True, True),
    "mpt": Export("Mpt", MPT, grows=True),
    "falcon": Export("Falcon", {**SMALL, "alibi": False, "new_decoder_architecture": True}),
    "gpt_bigcode": Export("GPTBigCode", OLD),
    "codegen": Export("CodeGen", {**OLD, "rotary_dim": 4}, dynamo=True),
    "gemma2": Export("Gemma2", {**SMALL, "head_dim": 16, "sliding_window": 6}, dynamo=True),
    "mistral": Export("Mistral", {**SMALL, "sliding_window": 5}, True, True),
    "qwen3": Export("Qwen3", {**SMALL, "head_dim": 16}, cached=True),
    "opt": Export("OPT", {**SMALL, "ffn_dim": 48, "word_embed_proj_dim": 32}, cached=True),
    "olmo2": Export("Olmo2", SMALL, True, True),
}


class Called(torch.nn.Module):  # type: ignore[misc,name-defined]
    """A decoder that is called with tensors alone, its cache among them."""

    def __init__(self, model: Any, names: list[str]) -> None:
        super().__init__()
        self.model, self.names = model, names

    def forward(self, *tensors: Any) -> Any:
        given = dict(zip(self.names, tensors, strict=True))
        held = [given.pop(name) for name in self.names if name.startswith("past")]
        if not held:
            return self.model(**given, use_cache=False).logits
        cache = transformers.DynamicCache()
        for i, (key, value) in enumerate(zip(held[::2], held[1::2], strict=True)):
            cache.update(key, value, i)
        found = self.model(**given, past_key_values=cache, use_cache=True)
        layers = found.past_key_values.layers
        return found.logits, *(x for layer in layers for x in (layer.keys, layer.values))


def exported(export: Export, path: Path) -> Any:
    """Write the export; the model, of weights of high variance."""
    torch.manual_seed(2)
    config = getattr(transformers, f"{export.kind}Config")(**export.fields)
    config._attn_implementation = "eager"
    model = getattr(transformers, f"{export.kind}ForCausalLM")(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim < 2:
                weight += 0.2 * torch.randn(weight.shape)
            else:
                weight.normal_(std=1.5 / weight.shape[-1] ** 0.5)
    past, new = 4 * export.cached, 7
    given = {"input_ids": torch.randint(3, 60, (3, new))}
    given["attention_mask"] = torch.ones(3, past + new, dtype=torch.long)
    axes = {"input_ids": {0: "rows", 1: "new"}}
    axes["attention_mask"] = {0: "rows", 1: "total" if export.cached else "new"}
    results = {"logits": {0: "rows", 1: "new"}}
    if export.cached:
        with torch.no_grad():
            held = model(input_ids=torch.randint(3, 60, (3, past)), use_cache=True).past_key_values
        for i, layer in enumerate(held.layers):
            for kind, tensor in (("key", layer.keys), ("value", layer.values)):
                given[f"past.{i}.{kind}"] = tensor.clone()
                axes[f"past.{i}.{kind}"] = {0: "rows", 2: "past"}
                results[f"new.{i}.{kind}"] = {0: "rows", 2: "total"}
    how: dict[str, Any] = {"dynamo": False, "dynamic_axes": {**axes, **results}}
    if export.dynamo:
        dims = [dict.fromkeys(a, torch.export.Dim.DYNAMIC) for a in axes.values()]
        how = {"dynamo": True, "external_data": False, "verbose": False}
        how["dynamic_shapes"] = (tuple(dims),)
    how |= {"input_names": [*given], "output_names": [*results], "opset_version": 18}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(Called(model, [*given]).eval(), (*given.values(),), path, **how)
    return model


@pytest.mark.parametrize("which", EXPORTS)
def test_tokens_are_those_of_transformers(which: str, tmp_path: Path, capsys: Any) -> None:
    export, path = EXPORTS[which], tmp_path / "export.onnx"
    model = exported(export, path)
    model.config.save_pretrained(tmp_path / "like")
    out = tmp_path / "out"
    code = main(["build", str(path), "--like", str(tmp_path / "like"), "-o", str(out)])
    assert code == 0, capsys.readouterr().err
    prompts = [[5, 9, 2, 7, 11, 13, 4], [3, 8]]
    own = gg.generate(out, prompts, max_new_tokens=24, eos=[])
    list(own)
    assert (type(own._decoder).__name__ == "Growing") == export.grows
    for prompt, tokens in zip(prompts, own.tokens, strict=True):
        options = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None}
        wanted = model.generate(torch.tensor([prompt]), pad_token_id=0, **options)
        assert tokens == wanted[0, len(prompt) :].tolist()
