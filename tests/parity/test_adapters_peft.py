"""Low-rank adapters next to PEFT's, on the same weights and batches: `make parity`."""

import contextlib
import copy
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from random_checkpoints import CAUSAL, ENCODERS, random_checkpoint
from small_models import relative_rms

import graphgen as gg
from graphgen.commands import main
from graphgen.export.adapters import Adapter
from graphgen.export.checkpoint import Checkpoint
from graphgen.export.trained import BASE, export_trained, parameters_of

pytestmark = pytest.mark.parity
STEPS, RATE = 50, 2e-3
SIZES = {
    "bert": {"hidden_size": 32, "intermediate_size": 64, "num_labels": 3},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32},
    "llama": {"hidden_size": 64, "intermediate_size": 48, "num_key_value_heads": 2},
    "t5": {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4},
}
COMMON = {"num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 32}
TARGETS = {
    "bert": ["query", "value"],
    "gpt2": ["c_attn", "c_fc"],
    "llama": ["q_proj", "v_proj", "down_proj"],
    "t5": ["q", "v", "wo"],
}


def model_of(kind: str) -> Any:
    import torch
    import transformers

    torch.manual_seed(0)
    head = "SequenceClassification" if kind == "bert" else "CausalLM"
    head = "Seq2SeqLM" if kind == "t5" else head
    common = COMMON if kind in ("bert", "llama") else {}
    dropout = {"dropout_rate": 0.0} if kind == "t5" else {}
    config = transformers.AutoConfig.for_model(
        kind, vocab_size=60, use_cache=False, attn_implementation="eager", **SIZES[kind], **common,
        **dropout,
    )  # fmt: skip
    auto = getattr(transformers, f"AutoModelFor{head}")
    model = auto.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2.0 if parameter.ndim > 1 else 1.0)
    return model


def batches_of(kind: str) -> list[dict[str, Any]]:
    random, found = np.random.default_rng(0), []
    for _ in range(STEPS):
        batch = {"input_ids": random.integers(0, 60, (4, 9))}
        labels = random.integers(0, 60, (4, 9))
        if kind == "bert":
            batch["attention_mask"] = (np.arange(9) < random.integers(3, 10, (4, 1))).astype(int)
            labels = random.integers(0, 3, 4)
        if kind == "t5":
            batch["decoder_input_ids"] = random.integers(0, 60, (4, 9))
        found.append({**batch, "labels": labels})
    return found


def logits_of(model: Any, batch: dict[str, Any]) -> Any:
    import torch

    given = {name: torch.tensor(x) for name, x in batch.items() if name != "labels"}
    return model(**given).logits


@pytest.mark.parametrize(
    ("kind", "dora", "base"),
    [(kind, False, None) for kind in SIZES]
    + [
        ("bert", True, None),
        ("gpt2", True, "int8"),
        ("llama", True, "int4"),
        ("llama", True, None),
        ("t5", True, None),
    ],
)
def test_fifty_steps_and_files_both_ways(kind: str, dora: bool, base: Any, tmp_path: Path) -> None:
    """With a base in few bits, PEFT's has the restored weights."""
    import peft
    import torch

    model, batches = model_of(kind), batches_of(kind)
    example = {n: torch.tensor(x) for n, x in batches[0].items() if n != "labels"}
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        path = str(tmp_path / "m.onnx")
        torch.onnx.export(
            model, (), path, kwargs=example, dynamo=True, optimize=False, output_names=["logits"]
        )
    lora = gg.LoRA(rf"\.({'|'.join(TARGETS[kind])})$", 4, alpha=8, dora=dora)
    art, optimizer = tmp_path / "art", gg.AdamW(weight_decay=0.0)
    gg.artifacts(path, art, lora=lora, optimizer=optimizer, output="logits", base=base)
    found = Checkpoint.load(art / "checkpoint")
    start, restored = found.trainable, parameters_of(found, "")
    if base is not None:
        path = export_trained(path, restored, tmp_path / "wide.onnx", Adapter.of(found, ""))
        path = str(path)
        known = dict(model.named_parameters())
        with torch.no_grad():
            packed = json.loads(str(found.properties[BASE]))
            assert any(f"{module}.weight" in packed for module in Adapter.of(found, "").modules)
            for name in packed:
                known[name].copy_(torch.tensor(restored[name]))
    original = copy.deepcopy(model)
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=TARGETS[kind], use_dora=dora)
    theirs = peft.get_peft_model(model, config).eval()
    trained = {n: p for n, p in theirs.named_parameters() if p.requires_grad}
    assert len(trained) == len(start)
    with torch.no_grad():
        for name, parameter in trained.items():
            own = name.removeprefix("base_model.model.").replace(".default", "")
            if "magnitude" in own:
                own = own.removesuffix(".weight")
                np.testing.assert_allclose(start[own], parameter, rtol=1e-5)
            parameter.copy_(torch.tensor(start[own]))
    trainer = gg.Trainer(art, schedule=gg.schedule.constant(RATE), threads=1)
    history = trainer.fit(batches, steps=STEPS, progress=False)
    adam = torch.optim.AdamW(trained.values(), lr=RATE, weight_decay=0.0)
    losses = []
    for batch in batches:
        if len(losses) == STEPS - 5 and base is None:  # another run goes on from PEFT's files
            theirs.save_pretrained(tmp_path / "begun")
            lora = str(tmp_path / "begun")
            gg.artifacts(path, tmp_path / "next", lora=lora, optimizer=optimizer, output="logits")
            adam = torch.optim.AdamW(trained.values(), lr=RATE, weight_decay=0.0)
        logits, labels = logits_of(theirs, batch), torch.tensor(batch["labels"])
        loss = torch.nn.functional.cross_entropy(
            logits.reshape(-1, logits.shape[-1]), labels.reshape(-1)
        )
        loss.backward()
        adam.step()
        adam.zero_grad()
        losses.append(loss.item())
    kept = len(losses) - (5 if base is None else 0)
    np.testing.assert_allclose([line["loss"] for line in history][:kept], losses[:kept], rtol=1e-4)
    if base is None:
        trainer = gg.Trainer(tmp_path / "next", schedule=gg.schedule.constant(RATE), threads=1)
        history = trainer.fit(batches[kept:], progress=False)
        np.testing.assert_allclose([line["loss"] for line in history], losses[kept:], rtol=1e-4)

    theirs.save_pretrained(tmp_path / "theirs")
    assert trainer.adapter is not None
    trainer.adapter.save(tmp_path / "ours")
    for folder in ("theirs", "ours"):
        merged = gg.export(Adapter.load(tmp_path / folder).merged(path), tmp_path / "merged.onnx")
        given = {n: x for n, x in batches[0].items() if n != "labels"}
        [mine] = gg.Session(merged, threads=1, outputs=["logits"])(given)
        loaded = peft.PeftModel.from_pretrained(copy.deepcopy(original), tmp_path / folder).eval()
        with torch.no_grad():
            wanted = logits_of(loaded, batches[0]).numpy()
        assert relative_rms(wanted, mine) < 1e-5


def test_dora_drops_out_where_peft_does(tmp_path: Path) -> None:
    """PEFT with the masks of ours: x W keeps all of x, and what is added to it does not."""
    import peft
    import torch

    from graphgen.passes.training.adapters import _SITES

    kind, rate, seed = "llama", 0.3, 5
    model, batches = model_of(kind), batches_of(kind)[:10]
    example = {n: torch.tensor(x) for n, x in batches[0].items() if n != "labels"}
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        path = str(tmp_path / "m.onnx")
        torch.onnx.export(
            model, (), path, kwargs=example, dynamo=True, optimize=False, output_names=["logits"]
        )
    lora = gg.LoRA(rf"\.({'|'.join(TARGETS[kind])})$", 4, alpha=8, dora=True, dropout=rate)
    optimizer = gg.AdamW(weight_decay=0.0)
    gg.artifacts(path, tmp_path / "art", lora=lora, optimizer=optimizer, output="logits")
    found = Checkpoint.load(tmp_path / "art/checkpoint")
    start, adapter = found.trainable, Adapter.of(found, "")
    assert adapter is not None
    products = {"q_proj": 0, "v_proj": 2, "down_proj": 6}  # of the seven of a layer
    config = peft.LoraConfig(
        r=4, lora_alpha=8, target_modules=TARGETS[kind], use_dora=True, lora_dropout=rate
    )
    theirs, now = peft.get_peft_model(model, config).train(), [0]

    class Masked(torch.nn.Module):
        def __init__(self, site: int) -> None:
            super().__init__()
            self.site = np.asarray(_SITES + site, np.int64)

        def forward(self, x: Any) -> Any:
            ones, step = np.ones(x.shape, np.float32), np.asarray(now[0], np.int64)
            given = np.asarray(rate, np.float32), np.asarray(seed, np.int64), step, self.site
            return x * torch.tensor(np.asarray(gg.ops.dropout(ones, *given)))

    layers = dict(theirs.named_modules())
    for name in adapter.modules:
        layer, (*_, number, _, product) = layers[f"base_model.model.{name}"], name.split(".")
        assert isinstance(layer.lora_dropout["default"], torch.nn.Dropout)
        layer.lora_dropout["default"] = Masked(7 * int(number) + products[product])
    trained = {n: p for n, p in theirs.named_parameters() if p.requires_grad}
    with torch.no_grad():
        for name, parameter in trained.items():
            own = name.removeprefix("base_model.model.").replace(".default", "")
            own = own.removesuffix(".weight") if "magnitude" in own else own
            parameter.copy_(torch.tensor(start[own]))
    schedule = gg.schedule.constant(RATE)
    trainer = gg.Trainer(tmp_path / "art", schedule=schedule, threads=1, seed=seed)
    history = trainer.fit(batches, steps=len(batches), progress=False)
    adam = torch.optim.AdamW(trained.values(), lr=RATE, weight_decay=0.0)
    losses = []
    for now[0], batch in enumerate(batches):
        logits, labels = logits_of(theirs, batch), torch.tensor(batch["labels"])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, -2), labels.flatten())
        loss.backward()
        adam.step()
        adam.zero_grad()
        losses.append(loss.item())
    np.testing.assert_allclose([line["loss"] for line in history], losses, rtol=1e-4)


FOLDERS = {
    "llama": ("query|value|down", CAUSAL["llama"], None),
    "gpt2": ("query|value|up", CAUSAL["gpt2"], None),  # two of the three parts of c_attn
    "bert": ("query|down", ENCODERS["bert"], "text-classification"),
}


@pytest.mark.parametrize("kind", FOLDERS)
def test_adapters_of_a_built_folder_have_the_names_of_its_checkpoint(
    kind: str, tmp_path: Path
) -> None:
    import peft
    import torch
    import transformers

    targets, fields, task = FOLDERS[kind]
    source = random_checkpoint(tmp_path / "source", fields, task)
    command = ["build", str(source), "-o", str(tmp_path / "out")]
    assert main([*command, *(["--task", task] if task else [])]) == 0
    path = tmp_path / "out" / "onnx" / "model.onnx"
    lora = gg.LoRA(targets, 2, alpha=3)
    head = "head" if task else None  # trained beside, as PEFT's modules_to_save
    gg.artifacts(path, tmp_path / "art", lora=lora, output="logits", trainable=head)
    found = Checkpoint.load(tmp_path / "art" / "checkpoint")
    random = np.random.default_rng(1)
    for array in found.trainable.values():
        array[...] = random.standard_normal(array.shape) / 3
    found.save(tmp_path / "run")
    ours = Adapter.load(tmp_path / "run")
    auto = getattr(transformers, f"AutoModelFor{'SequenceClassification' if task else 'CausalLM'}")
    ids = random.integers(5, 90, (2, 7))
    feeds = {"input_ids": ids, "attention_mask": np.ones_like(ids)}

    def own(adapter: Adapter) -> Any:
        merged = gg.export(adapter.merged(path), tmp_path / "merged.onnx")
        session = gg.Session(merged, threads=1, outputs=["logits"])
        more = {"position_ids": np.arange(7)[None].repeat(2, 0)} if task is None else {}
        more |= {} if task is None else {"token_type_ids": np.zeros_like(ids)}
        caches = {n: k.dims or () for n, k in session.inputs.items() if n.startswith("past")}
        empty = {n: np.zeros((2, d[1], 0, d[3]), np.float32) for n, d in caches.items()}  # type: ignore[arg-type]
        return session({**feeds, **more, **empty})[0]

    def theirs(folder: Path) -> Any:
        model = auto.from_pretrained(source, attn_implementation="eager").eval()
        with torch.no_grad():
            model = peft.PeftModel.from_pretrained(model, folder).eval()
            return model(**{n: torch.tensor(x) for n, x in feeds.items()}).logits.numpy()

    folder = ours.save(tmp_path / "ours")
    wanted = theirs(folder)
    assert relative_rms(wanted, own(ours)) < 1e-5
    assert relative_rms(wanted, own(Adapter.load(folder))) < 1e-5  # by the checkpoint's names
    model = auto.from_pretrained(source)
    names = [n.rpartition(".")[2] for n in Adapter.load(folder).modules]
    kept = ["classifier"] if task else None
    config = peft.LoraConfig(
        r=2,
        lora_alpha=3,
        target_modules=[*{*names}],
        modules_to_save=kept,
        rank_pattern={names[0]: 3},
        alpha_pattern={names[-1]: 1.5},
    )
    torch.manual_seed(0)  # some draws saturate attention, and float32 tells less of it
    trained = peft.get_peft_model(model, config)
    with torch.no_grad():
        for name, parameter in trained.named_parameters():
            if "lora" in name or "modules_to_save" in name:
                parameter.normal_(std=0.3)
    trained.save_pretrained(tmp_path / "theirs")
    adapter = Adapter.load(tmp_path / "theirs")
    assert relative_rms(theirs(tmp_path / "theirs"), own(adapter)) < 1e-5

    lora, optimizer = str(tmp_path / "theirs"), gg.AdamW(weight_decay=0.0)
    gg.artifacts(path, tmp_path / "next", lora=lora, output="logits", optimizer=optimizer)
    parameters = [p for p in trained.eval().parameters() if p.requires_grad]
    table = Checkpoint.load(tmp_path / "next" / "checkpoint").trainable
    assert sum(x.size for x in table.values()) == sum(p.numel() for p in parameters)
    labels = random.integers(0, 3 if task else 90, 2 if task else (2, 7))
    more = {
        "token_type_ids" if task else "position_ids": np.arange(7)[None].repeat(2, 0) * (not task)
    }
    trainer = gg.Trainer(tmp_path / "next", schedule=gg.schedule.constant(RATE), threads=1)
    history = trainer.fit([{**feeds, **more, "labels": labels}], steps=20, progress=False)
    adam, losses = torch.optim.AdamW(parameters, lr=RATE, weight_decay=0.0), []
    for _ in history:
        logits = trained(**{n: torch.tensor(x) for n, x in feeds.items()}).logits
        loss = torch.nn.functional.cross_entropy(
            logits.flatten(0, -2), torch.tensor(labels.flatten())
        )
        loss.backward()
        adam.step()
        adam.zero_grad()
        losses.append(loss.item())
    np.testing.assert_allclose([line["loss"] for line in history], losses, 1e-4, 1e-6)
    ended = trainer.adapter
    assert ended is not None
    assert relative_rms(theirs(ended.save(tmp_path / "ended")), own(ended)) < 1e-5
    trained.save_pretrained(tmp_path / "theirs")
    assert {n: x.shape for n, x in Adapter.load(tmp_path / "ended").matrices.items()} == {
        n: x.shape for n, x in Adapter.load(tmp_path / "theirs").matrices.items()
    }
