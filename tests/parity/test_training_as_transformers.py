"""Rates, updates and averages next to torch's optimizers and transformers' schedules, 50 steps."""

import copy
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import graphgen as gg
from graphgen.commands import main

torch = pytest.importorskip("torch", reason="needs torch: make parity")
transformers = pytest.importorskip("transformers", reason="needs transformers: make parity")
pytestmark = pytest.mark.parity
STEPS, RATE = 50, 1e-2
SCHEDULES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "linear": ({}, {}),
    "cosine": ({}, {}),
    "cosine_with_restarts": ({"cycles": 3}, {"num_cycles": 3}),
    "polynomial": ({"final": 1e-4, "power": 2.0}, {"lr_end": 1e-4, "power": 2.0}),
    "warmup_stable_decay": (
        {"decay": 20, "final": 1e-3},
        {"num_decay_steps": 20, "min_lr_ratio": 0.1},
    ),
    "constant_with_warmup": ({}, {}),
    "inverse_sqrt": ({}, {}),
}


@pytest.mark.parametrize("warmup", [0, 5, 60])
@pytest.mark.parametrize("name", SCHEDULES)
def test_rates_are_those_of_transformers(name: str, warmup: int) -> None:
    ours, theirs = SCHEDULES[name]
    own = name.removesuffix("_with_warmup").removesuffix("_with_restarts")
    sized = own not in ("constant", "inverse_sqrt")
    if (sized and warmup > STEPS) or (own == "inverse_sqrt" and not warmup):
        with pytest.raises(gg.GraphgenError, match="warmup must be at least"):
            given = ours | ({"steps": STEPS} if sized else {})
            getattr(gg.schedule, own)(RATE, warmup=warmup, **given)
        return
    schedule = getattr(gg.schedule, own)(
        RATE, warmup=warmup, **ours, **({"steps": STEPS} if sized else {})
    )
    sgd = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=RATE)
    scheduler = transformers.get_scheduler(
        name, sgd, warmup, STEPS if sized else None, scheduler_specific_kwargs=theirs
    )
    for step in range(1, STEPS + 1):
        assert schedule(step) == pytest.approx(sgd.param_groups[0]["lr"], abs=1e-12)
        sgd.step()
        scheduler.step()


class Net(torch.nn.Module):  # type: ignore[misc, name-defined]
    """Labels of tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.fc1 = torch.nn.Embedding(20, 8), torch.nn.Linear(8, 16)
        self.norm, self.fc2 = torch.nn.LayerNorm(16), torch.nn.Linear(16, 5)

    def forward(self, ids: Any) -> Any:
        return self.fc2(self.norm(torch.nn.functional.gelu(self.fc1(self.embed(ids)))))


def batches() -> list[dict[str, Any]]:
    """Eight, with labels that do not count, the last one smaller."""
    random = np.random.default_rng(0)
    found = []
    for rows in (4,) * 7 + (2,):
        labels = random.integers(0, 5, (rows, 6))
        labels[random.random((rows, 6)) < 0.3] = -100
        found.append({"ids": random.integers(0, 20, (rows, 6)), "labels": labels})
    return found


def grouped(module: Any) -> list[dict[str, Any]]:
    """As transformers does: biases and norms do not decay. `fc2` has a tenth of the rate."""
    found = []
    for name, parameter in module.named_parameters():
        decay = {"weight_decay": 0.0} if "bias" in name or "norm" in name else {}
        found.append({"params": [parameter], "factor": 0.1 if "fc2" in name else 1.0, **decay})
    return found


GROUPS = (gg.Group("fc2", rate=0.1),)
CASES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "adamw": (
        gg.AdamW(weight_decay=0.1, no_decay="bias|norm", groups=GROUPS),
        lambda m: torch.optim.AdamW(grouped(m), weight_decay=0.1),
        {},
    ),
    "epsilon, betas": (
        gg.AdamW(epsilon=1e-3, betas=(0.8, 0.95)),
        lambda m: torch.optim.AdamW(m.parameters(), eps=1e-3, betas=(0.8, 0.95)),
        {"ema": 0.95},
    ),
    "adam": (
        gg.AdamW(weight_decay=0.0),
        lambda m: torch.optim.Adam(m.parameters()),
        {},
    ),
    "clipped sums": (
        gg.AdamW(clip_norm=0.5),
        lambda m: torch.optim.AdamW(m.parameters()),
        {"clip": 0.5, "accumulate": 3, "ema": 0.9},
    ),
    "sgd": (
        gg.SGD(clip_norm=0.3),
        lambda m: torch.optim.SGD(m.parameters()),
        {"clip": 0.3},
    ),
    "nesterov": (
        gg.SGD(momentum=0.9, nesterov=True, weight_decay=0.05),
        lambda m: torch.optim.SGD(m.parameters(), momentum=0.9, nesterov=True, weight_decay=0.05),
        {"accumulate": 4},
    ),
    "momentum": (
        gg.SGD(momentum=0.9, clip_norm=0.3, weight_decay=0.05),
        lambda m: torch.optim.SGD(m.parameters(), momentum=0.9, weight_decay=0.05),
        {"clip": 0.3},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_updates_are_torchs(case: str, tmp_path: Path) -> None:
    ours, make, how = CASES[case]
    torch.manual_seed(0)
    module, data, accumulate = Net(), batches(), how.get("accumulate", 1)
    example, sizes = {"ids": torch.zeros(2, 6, dtype=torch.long)}, {"ids": {0: "rows"}}
    model = gg.from_torch(module, example, output_names=["logits"], dynamic_shapes=sizes)
    gg.artifacts(model, tmp_path / "art", optimizer=ours, profile="stock")
    schedule = gg.schedule.linear(RATE, warmup=5, steps=STEPS)
    options = {"accumulate": accumulate, "ema": how.get("ema"), "threads": 1}
    trainer = gg.Trainer(tmp_path / "art", schedule=schedule, **options)
    history = trainer.fit(data, steps=STEPS, progress=False)
    twin, stream = copy.deepcopy(module), itertools.cycle(data)
    optimizer, average = make(twin), copy.deepcopy(module)
    for step, line in enumerate(history, 1):
        group = list(itertools.islice(stream, accumulate))
        count = sum(int((batch["labels"] != -100).sum()) for batch in group)
        optimizer.zero_grad()
        loss = 0.0
        for batch in group:
            logits, labels = twin(torch.tensor(batch["ids"])), torch.tensor(batch["labels"])
            one = torch.nn.functional.cross_entropy(
                logits.flatten(0, 1), labels.flatten(), reduction="sum"
            )
            (one / count).backward()
            loss += one.item() / count
        if "clip" in how:
            torch.nn.utils.clip_grad_norm_(twin.parameters(), how["clip"])
        for own in optimizer.param_groups:
            own["lr"] = schedule(step) * own.get("factor", 1.0)
        optimizer.step()
        kept = min(how.get("ema") or 0.0, (1 + step) / (10 + step))
        with torch.no_grad():
            for mean, new in zip(average.parameters(), twin.parameters(), strict=True):
                mean.lerp_(new, 1 - kept)
        assert line["loss"] == pytest.approx(loss, rel=1e-6)
        assert line["learning_rate"] == schedule(step)
    for name, parameter in twin.named_parameters():
        found = trainer.parameters[name]
        np.testing.assert_allclose(found, parameter.detach(), atol=1e-6, rtol=0, err_msg=name)
    if how.get("ema"):
        session = gg.Session(trainer.export(model, tmp_path / "mean.onnx"), threads=1)
        with torch.no_grad():
            wanted = average(torch.tensor(data[0]["ids"])).numpy()
        np.testing.assert_allclose(session(ids=data[0]["ids"])[0], wanted, atol=1e-5)


@pytest.mark.parametrize(
    ("kind", "task"),
    [
        ("bert", "fill-mask"),
        ("gpt2", "text-generation"),
        ("t5", "text2text-generation"),
    ],
)
def test_what_decays_is_what_decays_in_trainer(kind: str, task: str, tmp_path: Path) -> None:
    """Of a folder, by the pattern that docs/training.md gives for it."""
    folder = Path(__file__).parents[1] / f"fixtures/{kind}_checkpoint"
    auto = {"bert": "MaskedLM", "gpt2": "CausalLM", "t5": "Seq2SeqLM"}[kind]
    model = getattr(transformers, f"AutoModelFor{auto}").from_pretrained(folder)
    theirs = transformers.Trainer.get_decay_parameter_names(None, model)
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    gg.build_folder(folder, tmp_path / "built", task=task)
    optimizer = gg.AdamW(0.1, no_decay="bias|norm|after|relative")
    graph = "" if kind == "t5" else "onnx/model.onnx"
    options: dict[str, Any] = {"optimizer": optimizer, "profile": "stock"}
    table = gg.artifacts(tmp_path / "built" / graph, tmp_path / "art", **options)
    decay = [w for w in table if w.trained and optimizer.setting(w.name).weight_decay]
    assert sum(np.prod(w.shape) for w in decay) == sum(sizes.get(n, 0) for n in theirs)


SMALL = {"vocab_size": 40, "max_position_embeddings": 32}
BLOCK = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
BLOCK |= {"intermediate_size": 24, **SMALL}
STILL = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)
TOKENS = {"pad_token_id": 2, "eos_token_id": 3}
SIDES = {
    f"{side}_{name}": value
    for side in ("encoder", "decoder")
    for name, value in (("layers", 1), ("attention_heads", 2), ("ffn_dim", 24))
}
SIDES |= {"d_model": 16, "dropout": 0.0, "decoder_start_token_id": 2, "decoder_vocab_size": 40}
PADDED: dict[str, tuple[str, str, dict[str, Any]]] = {
    "roberta": ("question-answering", "QuestionAnswering", BLOCK | STILL),
    "llama": ("text-generation", "CausalLM", {**BLOCK, **TOKENS, "tie_word_embeddings": True}),
    "marian": ("text2text-generation", "Seq2SeqLM", SMALL | SIDES | TOKENS),
}


@pytest.mark.parametrize("kind", PADDED)
def test_no_gradient_reaches_the_row_that_pads(kind: str, tmp_path: Path) -> None:
    """Where padding counts in the loss: all places of an answer, the token between texts."""
    task, auto, fields = PADDED[kind]
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, attn_implementation="eager", **fields)
    model = getattr(transformers, f"AutoModelFor{auto}").from_config(config)
    with torch.no_grad():
        for parameter in filter(lambda p: p.requires_grad, model.parameters()):
            parameter.normal_(std=0.3)  # the row that pads, too
    model.save_pretrained(tmp_path / "source")
    assert main(["build", str(tmp_path / "source"), "-o", str(tmp_path / "m"), "--task", task]) == 0
    random, pad = np.random.default_rng(0), config.pad_token_id
    ids = random.integers(4, 40, (4, 7))
    ids[:, 4] = pad
    batch = {"input_ids": ids, "attention_mask": np.ones_like(ids)}
    how: dict[str, Any] = {"optimizer": gg.AdamW(weight_decay=0.0)}
    if task == "question-answering":
        ids[1:, 4:] = pad
        batch["attention_mask"] = (ids != pad).astype(np.int64)
        places = {f"{part}_positions": random.integers(0, 4, 4) for part in ("start", "end")}
        how["loss"] = [
            gg.Loss("cross_entropy", output=f"{p}_logits", labels=f"{p}_positions", factor=0.5)
            for p in ("start", "end")
        ]
        batch |= places | {"token_type_ids": np.zeros_like(ids)}
        theirs = batch
    elif task == "text-generation":
        labels = np.concatenate([ids[:, 1:], np.full((4, 1), -100)], 1)
        theirs = {**batch, "labels": ids}
        batch |= {"position_ids": np.arange(7)[None].repeat(4, 0), "labels": labels}
    else:
        labels = random.integers(4, 40, (4, 5))
        theirs = {**batch, "labels": labels}
        start = np.full((4, 1), pad)
        batch |= {"decoder_input_ids": np.concatenate([start, labels[:, :-1]], 1)}
        batch |= {"labels": labels}
    source: Any = tmp_path / "m" / "onnx" / "model.onnx"
    gg.artifacts(source if source.exists() else tmp_path / "m", tmp_path / "art", **how)
    trainer = gg.Trainer(tmp_path / "art", schedule=gg.schedule.constant(1e-2), threads=1)
    batch = {name: x for name, x in batch.items() if name in trainer.inputs}
    history = trainer.fit([batch] * 20, progress=False)
    adam, losses = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0), []
    for _ in history:
        loss = model(**{name: torch.tensor(x) for name, x in theirs.items()}).loss
        loss.backward()
        adam.step()
        adam.zero_grad()
        losses.append(loss.item())
    np.testing.assert_allclose([line["loss"] for line in history], losses, 1e-4, 1e-6)
