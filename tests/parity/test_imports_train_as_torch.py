"""Models of eight kinds, brought from torch, train as they train in torch: `make parity`."""

import contextlib
import copy
import io
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import graphgen as gg
from graphgen.errors import GraphgenError

torch = pytest.importorskip("torch", reason="needs torch: make parity")
transformers = pytest.importorskip("transformers", reason="needs transformers: make parity")
pytestmark = pytest.mark.parity
STEPS, RATE, CLASSES = 20, 1e-3, 7
# Where a gradient is 0 but for rounding, as that of a key's bias, Adam's default would divide noise
# by noise. Tokens are above 0, since torch does not train the row of `padding_idx`.
EPSILON = 1e-5
PART = {  # a pattern of names as one has it from torch
    "bert": "layer\\.1\\.|pooler|classifier",
    "gpt2": "h\\.1\\.|wte",
    "t5": "decoder.block",
    "vit": "layers?\\.1\\.|classifier",
    "tagger": "lstm|head",
    "resnet": r"layers.*(conv|norm\d\.(weight|bias))|head",
    "llama": "layers\\.1\\.|lm_head",
    "tied": "body",
}


class Tagger(torch.nn.Module):  # type: ignore[misc, name-defined]
    """Labels of tokens, by an LSTM in both directions."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(20, 8)
        self.lstm = torch.nn.LSTM(8, 6, batch_first=True, bidirectional=True)
        self.head = torch.nn.Linear(12, CLASSES)

    def forward(self, input_ids: Any) -> Any:
        return self.head(self.lstm(self.embed(input_ids))[0])


class Residual(torch.nn.Module):  # type: ignore[misc, name-defined]
    """Two convolutions with norms, in a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        nn = torch.nn
        self.conv1, self.norm1 = nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)
        self.conv2, self.norm2 = nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)

    def forward(self, x: Any) -> Any:
        y = torch.relu(self.norm1(self.conv1(x)))
        return torch.relu(x + self.norm2(self.conv2(y)))


class ResNet(torch.nn.Module):  # type: ignore[misc, name-defined]
    """Labels of images."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = torch.nn.Conv2d(3, 4, 3, stride=2), torch.nn.BatchNorm2d(4)
        self.layers = torch.nn.Sequential(Residual(), Residual())
        self.head = torch.nn.Linear(4, CLASSES)

    def forward(self, pixel_values: Any) -> Any:
        x = self.layers(torch.relu(self.norm(self.stem(pixel_values))))
        return self.head(x.mean((2, 3)))


class Tied(torch.nn.Module):  # type: ignore[misc, name-defined]
    """The next token, by an MLP whose last weight is the table of the first."""

    def __init__(self) -> None:
        super().__init__()
        nn = torch.nn
        self.scale = nn.Parameter(torch.tensor(1.0))  # which is no constant
        self.embed = nn.Embedding(CLASSES, 8)
        self.body = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 8))
        self.head = nn.Linear(8, CLASSES, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, input_ids: Any) -> Any:
        return self.head(self.body(self.embed(input_ids) * self.scale))


class Logits(torch.nn.Module):  # type: ignore[misc, name-defined]
    """The logits alone."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, **inputs: Any) -> Any:
        return self.model(**inputs).logits


def of_transformers(kind: str) -> Any:
    sizes: dict[str, Any] = {
        "bert": {"hidden_size": 16, "intermediate_size": 24, "num_labels": CLASSES},
        "gpt2": {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 16},
        "llama": {"hidden_size": 16, "intermediate_size": 24, "num_key_value_heads": 1},
        "t5": {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2},
        "vit": {"hidden_size": 16, "intermediate_size": 24, "image_size": 8, "patch_size": 4},
    }[kind]
    if kind in ("bert", "llama", "vit"):
        sizes |= {"num_hidden_layers": 2, "num_attention_heads": 2}
    if kind == "vit":
        sizes |= {"num_labels": CLASSES}
    else:
        sizes |= {"vocab_size": 30, "use_cache": False}
    config = transformers.AutoConfig.for_model(kind, attn_implementation="eager", **sizes)
    heads = {"bert": "SequenceClassification", "t5": "Seq2SeqLM", "vit": "ImageClassification"}
    auto = getattr(transformers, f"AutoModelFor{heads.get(kind, 'CausalLM')}")
    return auto.from_config(config)


def made(kind: str) -> Any:
    """A module in evaluation mode, whose weights are all random, as trained ones are."""
    torch.manual_seed(0)
    own = {"tagger": Tagger, "resnet": ResNet, "tied": Tied}
    module = own[kind]() if kind in own else of_transformers(kind)
    with torch.no_grad():
        for name, value in module.state_dict().items():
            if value.dtype == torch.float32:
                drawn = torch.randn_like(value) * 0.2
                norm = value.ndim == 1 and name.endswith(("weight", "running_var"))
                value.copy_(drawn.abs() + 1 if norm else drawn)
    return module.eval()


def batches_of(kind: str) -> list[dict[str, Any]]:
    random, found = np.random.default_rng(0), []
    for _ in range(STEPS):
        batch: dict[str, Any] = {"input_ids": random.integers(1, CLASSES, (3, 6))}
        if kind in ("vit", "resnet"):
            batch = {"pixel_values": random.standard_normal((3, 3, 8, 8)).astype(np.float32)}
        if kind == "t5":
            batch["decoder_input_ids"] = random.integers(1, CLASSES, (3, 5))
        shape = {"t5": (3, 5), "gpt2": (3, 6), "llama": (3, 6), "tagger": (3, 6), "tied": (3, 6)}
        found.append({**batch, "labels": random.integers(0, CLASSES, shape.get(kind, (3,)))})
    return found


def of_torch(module: Any, batches: list[dict[str, Any]], names: list[str]) -> list[float]:
    """The losses of AdamW on the parameters of these names, and these parameters at the end."""
    parameters = dict(module.named_parameters())
    for name, parameter in parameters.items():
        parameter.requires_grad = name in names
    adam = torch.optim.AdamW([parameters[name] for name in names], lr=RATE, eps=EPSILON)
    losses = []
    for batch in batches:
        given = {name: torch.tensor(x) for name, x in batch.items()}
        labels = given.pop("labels")
        logits = module(**given)
        logits = getattr(logits, "logits", logits)
        loss = torch.nn.functional.cross_entropy(
            logits.reshape(-1, logits.shape[-1]), labels.reshape(-1)
        )
        adam.zero_grad()
        loss.backward()
        adam.step()
        losses.append(loss.item())
    return losses


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    with (
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        yield


def steps(folder: Path, batches: list[dict[str, Any]]) -> tuple[list[float], gg.Trainer]:
    trainer = gg.Trainer(folder, schedule=gg.schedule.constant(RATE), threads=1)
    return [line["loss"] for line in trainer.fit(batches, steps=STEPS, progress=False)], trainer


@pytest.mark.parametrize("kind", PART)
def test_what_trains_is_what_torch_trains(kind: str, tmp_path: Path) -> None:
    """By default and by a pattern of torch's names; a file that folding changed is refused."""
    import re

    batches = batches_of(kind)
    example = {name: torch.tensor(x) for name, x in batches[0].items() if name != "labels"}
    module = made(kind)
    model = gg.from_torch(module, example, output_names=["logits"])
    if kind == "tied":
        model = gg.load(gg.export(model, tmp_path / "imported.onnx"))  # which keeps what is known
    every = [name for name, _ in module.named_parameters()]
    for pattern in (None, PART[kind]):
        wanted = [name for name in every if pattern is None or re.search(pattern, name)]
        assert wanted and (pattern is None or len(wanted) < len(every))
        how: dict[str, Any] = {"output": "logits", "optimizer": gg.AdamW(epsilon=EPSILON)}
        table = gg.artifacts(model, tmp_path / "art", trainable=pattern, **how)
        assert sorted(w.name for w in table if w.trained) == sorted(wanted)
        losses, trainer = steps(tmp_path / "art", batches)
        twin = made(kind)
        np.testing.assert_allclose(losses, of_torch(twin, batches, wanted), rtol=1e-4)
        trained, ours = dict(twin.named_parameters()), trainer.parameters
        for name in wanted:
            np.testing.assert_allclose(trained[name].detach(), ours[name], rtol=1e-4, atol=1e-4)

    path = tmp_path / "natural.onnx"
    names, sizes = [*example], {name: x.numel() for name, x in made(kind).named_parameters()}
    for dynamo in (True, False):
        with contextlib.suppress(torch.onnx.errors.UnsupportedOperatorError), quiet():
            given: Any = (
                (module, ()) if dynamo else (Positional(module, names), (*example.values(),))
            )
            by_name = {"kwargs": example, "verbose": False} if dynamo else {"input_names": names}
            torch.onnx.export(
                *given, path, dynamo=dynamo, output_names=["logits"], opset_version=18, **by_name
            )
        for pattern in (None, PART[kind]) if path.exists() else ():
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    table = gg.artifacts(path, tmp_path / "art", trainable=pattern, **how)
            except GraphgenError as error:
                assert re.search(r"gg\.from_torch, `graphgen import`", str(error))
                continue
            losses, _ = steps(tmp_path / "art", batches)
            wanted = [name for name in every if pattern is None or re.search(pattern, name)]
            trained_sizes = [int(np.prod(w.shape)) for w in table if w.trained]
            assert sum(trained_sizes) == sum(sizes[name] for name in wanted)
            np.testing.assert_allclose(losses, of_torch(made(kind), batches, wanted), rtol=1e-4)
        path.unlink(missing_ok=True)


class Positional(torch.nn.Module):  # type: ignore[misc, name-defined]
    """A call without keywords, as TorchScript's exporter needs."""

    def __init__(self, module: Any, names: list[str]) -> None:
        super().__init__()
        self.m, self.names = module, names

    def forward(self, *inputs: Any) -> Any:
        found = self.m(**dict(zip(self.names, inputs, strict=True)))
        return getattr(found, "logits", found)


def test_batch_norms_train_as_torch_does(tmp_path: Path) -> None:
    """A module in training mode: parameters, running statistics, and what is deployed of them."""
    batches = batches_of("resnet")
    example = {"pixel_values": torch.tensor(batches[0]["pixel_values"])}
    module = made("resnet").train()
    module.layers[0].norm1.momentum = 0.3
    module.layers[1].norm2.eval()  # this one stays as it is
    model = gg.from_torch(
        module,
        example,
        output_names=["logits"],
        dynamic_shapes={"pixel_values": {0: "batch"}},
    )
    table = gg.artifacts(
        model,
        tmp_path / "art",
        output="logits",
        optimizer=gg.AdamW(epsilon=EPSILON),
    )
    why = {weight.name: weight.why for weight in table}
    assert why["norm.running_var"] == "a running statistic, moved by each batch"
    assert why["layers.1.norm2.running_var"] == "a running statistic of layers.1.norm2"
    losses, trainer = steps(tmp_path / "art", batches)
    every = [name for name, _ in module.named_parameters()]
    theirs = of_torch(module, batches, every)
    np.testing.assert_allclose(losses, theirs, rtol=1e-4)
    trained = {n: x.detach().numpy() for n, x in module.state_dict().items()}
    ours = trainer.parameters
    for name in [*every, *(n for n in trained if "running" in n and "layers.1.norm2" not in n)]:
        np.testing.assert_allclose(ours[name], trained[name], rtol=1e-4, atol=1e-4, err_msg=name)
    session = gg.Session(trainer.export(model, tmp_path / "out.onnx"), threads=1)
    x = batches[3]["pixel_values"][:2]
    with torch.no_grad():
        wanted = module.eval()(torch.tensor(x)).numpy()
    [given] = session({"pixel_values": x})
    np.testing.assert_allclose(given, wanted, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("optimize", [True, False])
def test_norms_of_natural_exports_in_training_mode_do(optimize: bool, tmp_path: Path) -> None:
    """The file has them as in evaluation, and says in which mode they were called."""
    batches, module = batches_of("resnet"), made("resnet").train()
    module.layers[1].norm2.eval()
    example = (torch.tensor(batches[0]["pixel_values"]),)
    names = {"input_names": ["pixel_values"], "output_names": ["logits"]}
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        torch.onnx.export(
            module, example, tmp_path / "m.onnx", dynamo=True, optimize=optimize, **names
        )
    how = {"output": "logits", "optimizer": gg.AdamW(epsilon=EPSILON)}
    if optimize:
        with pytest.raises(GraphgenError, match="folded a norm in training mode into it"):
            gg.artifacts(tmp_path / "m.onnx", tmp_path / "art", **how)
        return
    gg.artifacts(tmp_path / "m.onnx", tmp_path / "art", **how)
    losses, _ = steps(tmp_path / "art", batches)
    every = [name for name, _ in module.named_parameters()]
    np.testing.assert_allclose(losses, of_torch(module, batches, every), rtol=1e-4)


@pytest.mark.parametrize("made_by", [torch.jit.script, torch.jit.trace])
def test_torchscript_is_refused(made_by: Any) -> None:
    module, x = torch.nn.Linear(4, 4).eval(), torch.ones(2, 4)
    with quiet():
        script = made_by(module) if made_by is torch.jit.script else made_by(module, x)
    with pytest.raises(GraphgenError, match=r"TorchScript, .*; give the torch\.nn\.Module that it"):
        gg.from_torch(script, x)


def test_norms_that_no_exporter_writes_are_refused() -> None:
    for module, match in (
        (torch.nn.BatchNorm1d(3, momentum=None), "it has momentum=None, and torch cannot export"),
        (torch.nn.InstanceNorm1d(3, track_running_stats=True), "it has track_running_stats=True"),
        (Moving(), "each call changes mean, and reads it"),
    ):
        with pytest.raises(GraphgenError, match=match):
            gg.from_torch(module, torch.randn(4, 3, 5))
        gg.from_torch(module.eval(), torch.randn(4, 3, 5))


class Moving(torch.nn.Module):  # type: ignore[misc, name-defined]
    """A buffer that each call in training changes and reads."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(5))

    def forward(self, x: Any) -> Any:
        if self.training:
            self.mean.mul_(0.9).add_(x.mean((0, 1)).detach() * 0.1)
        return x - self.mean


class Norms(torch.nn.Module):  # type: ignore[misc, name-defined]
    """Labels by norms that are called as functions, or keep no statistics, and learned states."""

    def __init__(self) -> None:
        super().__init__()
        nn = torch.nn
        self.body, self.head = nn.Linear(6, 8), nn.Linear(8, CLASSES)
        self.norm = nn.BatchNorm1d(8, track_running_stats=False)
        self.state = nn.Parameter(torch.randn(1, 1, 8))
        self.rnn = nn.GRU(8, 8, batch_first=True)
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("var", torch.ones(8))

    def forward(self, x: Any) -> Any:
        how = {"training": self.training, "momentum": 0.2}
        y = torch.nn.functional.batch_norm(self.body(x), self.mean, self.var, **how)
        y = self.norm(torch.tanh(y))
        return self.head(
            self.rnn(y[:, None], self.state.expand(1, len(x), 8).contiguous())[0][:, 0]
        )


@pytest.mark.parametrize("mode", [True, False])
def test_norms_by_the_batch_and_learned_states_train_as_torchs(mode: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = Norms().train(mode)
    random = np.random.default_rng(0)
    batches: list[dict[str, Any]] = [
        {"x": random.normal(size=(5, 6)).astype(np.float32), "labels": np.arange(5)}
        for _ in range(STEPS)
    ]
    model = gg.from_torch(module, {"x": torch.tensor(batches[0]["x"])}, output_names=["logits"])
    every = [name for name, _ in module.named_parameters()]
    how = {"output": "logits", "optimizer": gg.AdamW(epsilon=EPSILON), "profile": "stock"}
    table = gg.artifacts(model, tmp_path / "art", **how)
    assert sorted(w.name for w in table if w.trained) == sorted(every)
    losses, trainer = steps(tmp_path / "art", batches)
    np.testing.assert_allclose(losses, of_torch(module, batches, every), rtol=1e-4)
    ours = trainer.parameters
    moved = module.state_dict() if mode else dict(module.named_parameters())
    for name, value in moved.items():
        np.testing.assert_allclose(ours[name], value.detach(), rtol=1e-4, atol=1e-4, err_msg=name)


class Odd(torch.nn.Module):  # type: ignore[misc, name-defined]
    """What an exporter writes with sizes that it calculates, plain tensors, and a mask."""

    def __init__(self) -> None:
        super().__init__()
        nn = torch.nn
        self.embed, self.cell, self.norm = (
            nn.Embedding(20, 8),
            nn.LSTMCell(8, 8),
            nn.GroupNorm(2, 8),
        )
        self.token = nn.Parameter(torch.randn(1, 1, 8))
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.frequencies, self.head = torch.rand(8), nn.Linear(8, CLASSES)

    def forward(self, input_ids: Any) -> Any:
        x = self.embed(input_ids) * self.frequencies
        h = c = torch.zeros(x.shape[0], 8)
        rows = [self.token.expand(x.shape[0], -1, -1)]
        for t in range(5):
            h, c = self.cell(x[:, t], (h, c))
            rows.append(h[:, None])
        x = self.norm(torch.cat(rows, 1).transpose(1, 2)).transpose(1, 2)
        mask = torch.triu(torch.ones(6, 6, dtype=torch.bool), 1)
        return self.head(self.attention(x, x, x, attn_mask=mask, need_weights=False)[0])


def test_only_parameters_are_trained(tmp_path: Path) -> None:
    """Of a natural export, what it has calculated is told, not trained."""
    torch.manual_seed(0)
    module, batches = Odd().eval(), batches_of("tagger")
    example = {"input_ids": torch.tensor(batches[0]["input_ids"])}
    every = [name for name, _ in module.named_parameters()]
    model = gg.from_torch(module, example, output_names=["logits"])
    how: dict[str, Any] = {"output": "logits", "optimizer": gg.AdamW(epsilon=EPSILON)}
    table = gg.artifacts(model, tmp_path / "art", **how)
    assert sorted(w.name for w in table if w.trained) == sorted(every)
    losses, _ = steps(tmp_path / "art", batches)
    np.testing.assert_allclose(losses, of_torch(module, batches, every), rtol=1e-4)
    path = tmp_path / "natural.onnx"
    with quiet():
        torch.onnx.export(
            module, (), path, kwargs=example, dynamo=True, verbose=False, output_names=["logits"]
        )
    with pytest.raises(GraphgenError, match=r"lacks token and norm.weight and norm.bias, which"):
        gg.artifacts(path, tmp_path / "natural", **how)


class Rounded(torch.autograd.Function):  # type: ignore[misc, name-defined]
    """A backward pass of its own."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return torch.round(x)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return gradient


class Held(torch.nn.Module):  # type: ignore[misc, name-defined]
    """Labels of tokens, some of whose parts have no gradient in torch."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        how = {"padding": {"padding_idx": 2}, "norm": {"max_norm": 1.0}}.get(kind, {})
        if kind == "frequency":
            how = {"scale_grad_by_freq": True}
        self.kind, self.embed = kind, torch.nn.Embedding(CLASSES, 8, **how)
        self.body, self.head = torch.nn.Linear(8, 8), torch.nn.Linear(8, CLASSES)
        self.scale = torch.nn.Parameter(torch.tensor(0.5))
        self.apart = [self.body.weight]  # which torch's exporter takes for a constant
        if kind == "listed":
            self.gain = torch.nn.Parameter(torch.ones(8))
            self.apart += [self.gain]
        if kind == "data":
            self.apart = [self.body.weight.data]
        if kind == "hook":
            self.head.weight.register_hook(lambda gradient: gradient / 2)

    def forward(self, input_ids: Any) -> Any:
        x = self.body(self.embed(input_ids))
        if self.kind == "detached":
            x = x + (torch.round(x) - x).detach()
        if self.kind in ("listed", "data"):
            x = x @ self.apart[0] * self.apart[-1][:1]
        if self.kind == "functional":
            x = x + torch.nn.functional.embedding(input_ids, self.embed.weight, 3)
        if self.kind == "no_grad":
            with torch.no_grad():
                x = x * self.body(x)
        if self.kind == "function":
            x = Rounded.apply(4 * x)
        if self.kind == "resized":  # by numbers that are stored beside the weights
            x = torch.nn.functional.interpolate(x[None], scale_factor=(1.0, 2.0), mode="bilinear")[
                0
            ]
            x = x[..., ::2]
        return self.head(x) * self.scale.exp()


@pytest.mark.parametrize("kind", ["padding", "functional", "detached", "resized", "listed"])
def test_what_has_no_gradient_in_torch_has_none_here(kind: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    module, batches = Held(kind).eval(), batches_of("tagger")
    example = {"input_ids": torch.tensor(batches[0]["input_ids"])}
    model = gg.from_torch(module, example, output_names=["logits"])
    gg.export(model, tmp_path / "m.onnx")
    how: dict[str, Any] = {"output": "logits", "optimizer": gg.AdamW(epsilon=EPSILON)}
    table = gg.artifacts(tmp_path / "m.onnx", tmp_path / "art", **how)
    every = [name for name, _ in module.named_parameters()]
    assert sorted(w.name for w in table if w.trained) == sorted(every)
    losses, trainer = steps(tmp_path / "art", batches)
    np.testing.assert_allclose(losses, of_torch(module, batches, every), rtol=1e-5)
    for name, parameter in module.named_parameters():
        np.testing.assert_allclose(trainer.parameters[name], parameter.detach(), atol=1e-5)


REFUSED = {
    "no_grad": "other gradients than the module, of embed.weight and body.weight and body.bias",
    "data": "other gradients than the module, of body.weight",
    "function": "other gradients than the module, of embed.weight",
    "hook": "a hook changes the gradient of head.weight",
    "norm": "embed has max_norm=1.0",
    "frequency": "embed has scale_grad_by_freq=True",
}


@pytest.mark.parametrize("kind", REFUSED)
def test_other_gradients_than_those_of_the_graph_are_refused(kind: str) -> None:
    example = {"input_ids": torch.tensor(batches_of("tagger")[0]["input_ids"])}
    with pytest.raises(GraphgenError, match=REFUSED[kind]):
        gg.from_torch(Held(kind).eval(), example)


class Signed(torch.nn.Module):  # type: ignore[misc, name-defined]
    """Bags of rows, whose parts count by the signs of a weight, which training changes."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = torch.nn.EmbeddingBag(9, 4, mode="sum")
        self.seed = torch.nn.Parameter(torch.tensor([0.02, -0.02, 0.3, -0.4]))

    def forward(self, ids: Any) -> Any:
        x = self.bags(ids)
        return torch.where(self.seed > 0, x * self.seed, 2 * x) + torch.atan2(x, self.seed)


def test_nothing_is_calculated_of_weights(tmp_path: Path) -> None:
    torch.manual_seed(0)
    module, random = Signed(), np.random.default_rng(0)
    batches = [
        {"ids": random.integers(0, 9, (3, 5)), "labels": random.normal(size=(3, 4)).astype("f")}
        for _ in range(10)
    ]
    with quiet():
        model = gg.from_torch(copy.deepcopy(module), {"ids": torch.tensor(batches[0]["ids"])})
    gg.artifacts(model, tmp_path / "art", loss="mse", optimizer=gg.SGD())
    trainer = gg.Trainer(tmp_path / "art", schedule=gg.schedule.constant(0.1), threads=1)
    found = [line["loss"] for line in trainer.fit(batches, progress=False)]
    descent, losses = torch.optim.SGD(module.parameters(), lr=0.1), []
    before = torch.sign(module.seed)
    for batch in batches:
        output, wanted = module(torch.tensor(batch["ids"])), torch.tensor(batch["labels"])
        loss = torch.nn.functional.mse_loss(output, wanted)
        descent.zero_grad()
        loss.backward()
        descent.step()
        losses.append(loss.item())
    assert (torch.sign(module.seed) != before).any()
    np.testing.assert_allclose(found, losses, rtol=1e-5)
    np.testing.assert_allclose(trainer.parameters["seed"], module.seed.detach(), atol=1e-5)
