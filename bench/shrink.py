"""Any model type of transformers, made small and with inputs that it runs on.

Nothing here knows a model type. Widths are divided by one factor, which keeps what they have to do
with each other; layers, vocabularies, experts and large images get a limit. Inputs are tried, from
what the model names as its own to all that it can read, until a forward pass runs. If none does, it
is the largest part of the model that runs by itself.
"""

import inspect
import itertools
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoConfig, AutoModel, PreTrainedModel

SIZES = ((16, 256), (8, 256), (9, 256), (4, 256), (2, 256), (1, 256), (8, 9999), (2, 9999))
"""What widths are divided by, and the largest image: the first that give a model are taken."""

PARAMETERS = 40e6  # no larger model is exported
LAYERS, EXPERTS, VOCABULARY = 2, 8, 99

DEPTH = re.compile(r"(^|_)(layers?|blocks|depths?|first_k_dense_replace)$")
WIDTH = re.compile(
    r"(^|_)(hidden|dim|dims|size|sizes|channels|width|d|embd|rank|ffn|inner|filters)s?(_|$)"
)
NO_WIDTH = re.compile(
    "image|patch|vocab|kernel|window|position|crop|chunk|context|max_|fft|hop|group|codebook|mel"
    "|state_size|frames|stride|input_size|num_|n_heads|batch|length|layer|threshold|block|sampl|conv_d"
)
EXPERT = re.compile(r"(?<!shared_)experts$")


@dataclass
class Small:
    """A model, or a part of one, with what makes inputs for it of given rows and tokens."""

    model: Any
    part: str  # the class that runs, if it is not the type's own
    inputs: Callable[[int, int], dict[str, Any]]


def depth_of(fields: dict[str, Any]) -> tuple[int, list[int]]:
    """How many layers there are, and which of them stay: the first of each kind, at least two."""
    names = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "depth")
    layers = next((fields[name] for name in names if isinstance(fields.get(name), int)), 0)
    kept = {0, 1}
    for value in fields.values():
        if isinstance(value, (list, tuple)) and len(value) == layers > LAYERS:
            kept |= {list(value).index(kind) for kind in value}
    return layers, sorted(kept)[:6]


def shrink(config: Any, factor: int, image: int) -> None:
    """Make a configuration small, its parts too."""
    fields = config if isinstance(config, dict) else vars(config)
    layers, kept = depth_of(fields)

    def smaller(name: str, value: Any) -> Any:
        if isinstance(value, bool) or value is None:
            return value
        if isinstance(value, (list, tuple)):
            if len(value) == layers > LAYERS:
                return type(value)(smaller(name, value[i]) for i in kept)
            return type(value)(smaller(name, x) for x in value)
        if not isinstance(value, int):
            return value
        if DEPTH.search(name):
            return min(value, len(kept) if value == layers > LAYERS else LAYERS)
        if EXPERT.search(name):
            return min(value, EXPERTS)
        if re.search("experts_per_tok|top_?k$", name) and "group" not in name:
            return min(value, 2)
        if name in ("n_group", "topk_group", "num_expert_group"):
            return 1
        if "vocab_size" in name:
            return min(value, VOCABULARY)
        if re.search("_(token|index|id|ids|idx)$", name) and value >= VOCABULARY:
            return 1
        if name in ("max_source_positions", "max_length") and value > 999:
            return value // 4
        if re.search("image_size|input_size|img_size|resolution", name) and value > image:
            return value // 4
        if value >= 32 and WIDTH.search(name) and not NO_WIDTH.search(name):
            return max(1, value // factor)
        return value

    for name, value in list(fields.items()):
        if not isinstance(name, str) or name in ("id2label", "label2id"):
            continue
        if getattr(value, "model_type", "").startswith("timm"):  # not transformers' own
            fields[name] = value = AutoConfig.for_model("resnet", out_indices=value.out_indices)
        if hasattr(value, "to_dict") or isinstance(value, dict):
            shrink(value, factor, image)
            continue
        new = smaller(name.lstrip("_"), value)
        if new != value:
            fields[name] = new
    if isinstance(config, dict):
        return
    config.use_cache = False
    heads = getattr(config, "num_attention_heads", None)
    if isinstance(heads, int) and isinstance(getattr(config, "rope_parameters", None), dict):
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        head_dim = int(head_dim * config.rope_parameters.get("partial_rotary_factor", 1))
        third = head_dim // 6  # of the rotated halves: time, height and width
        config.rope_parameters["mrope_section"] = [head_dim // 2 - 2 * third, third, third]


def build(kind: str, attention: str, factor: int, image: int) -> Any:
    """The type's base model in eval mode with varied weights."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind)
    shrink(config, factor, image)
    config._attn_implementation = attention
    config._experts_implementation = "batched_mm"  # the one that both exporters know
    with torch.device("meta"):
        try:
            count = sum(p.numel() for p in AutoModel.from_config(config).parameters())
        except (ValueError, ImportError):  # it has no other attention than the eager one
            config._attn_implementation = "eager"
            config._experts_implementation = None
            count = sum(p.numel() for p in AutoModel.from_config(config).parameters())
    if count > PARAMETERS:
        raise ValueError(f"still has {count / 1e6:.0f} million parameters when made small")
    model = AutoModel.from_config(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim < 2:
                weight += 0.2 * torch.randn(weight.shape)
            elif weight.is_floating_point():
                weight.normal_(std=1.3 / weight[0].numel() ** 0.5)
    return model


def makers(config: Any, rows: int, tokens: int, variant: int) -> dict[str, Callable[[], Any]]:
    """What makes each input, by its name; a variant is another layout that models read."""

    def field(name: str, default: Any) -> Any:
        parts = (config, *(x for x in vars(config).values() if hasattr(x, "to_dict")))
        return next((y for x in parts if (y := getattr(x, name, None)) is not None), default)

    text = config.get_text_config()
    words = min(getattr(text, "vocab_size", None) or VOCABULARY, VOCABULARY) - 1
    size = field("image_size", field("img_size", (64, 224, 64)[variant]))
    height, width = size if isinstance(size, (list, tuple)) else (size, size)
    channels, frames = field("num_channels", field("in_channels", 3)), field("num_frames", 0)
    patch = field("patch_size", 14)
    patch = patch if isinstance(patch, int) else patch[-1]
    flat = channels * field("temporal_patch_size", 1) * patch * patch
    mels = field("num_mel_bins", field("feature_size", field("input_feat_per_channel", 80)))
    positions = 2 * field("max_source_positions", 0) or 8 * tokens
    features = [(rows, 8 * tokens, mels), (rows, mels, positions), (rows, mels, 8 * tokens)]
    samples = [(rows, 800 + 80 * tokens), (rows, 1, 800 + 80 * tokens)]
    samples += [(rows, field("max_length", 128), mels)]
    pixels = [(rows, channels, height, width), (rows, frames or 4, channels, height, width)]
    pixels += [(32 * rows, flat)]
    if frames:
        pixels[:2] = pixels[1::-1]
    grid = torch.tensor([[1, 4, 8]] * rows)

    def mask() -> Any:
        keep = torch.ones(rows, tokens, dtype=torch.long)
        keep[0, tokens - tokens // 4 :] = 0
        return keep

    def texts(length: int) -> Callable[[], Any]:
        return lambda: torch.randint(min(5, words - 1), words, (rows, length))

    def real(shape: tuple[int, ...]) -> Callable[[], Any]:
        return lambda: torch.randn(shape)

    return {
        "input_ids": texts(tokens),
        "attention_mask": mask,
        "decoder_input_ids": texts(tokens // 2 + 1),
        "bbox": lambda: torch.randint(0, 500, (rows, tokens, 4)).sort(-1).values,
        "pixel_values": real(pixels[variant]),
        "pixel_values_videos": real((rows, frames or 4, channels, height, width)),
        "hidden_states": real((32 * rows, flat)),
        "grid_thw": lambda: grid,
        "image_grid_thw": lambda: grid,
        "merge_sizes": lambda: torch.ones(rows, dtype=torch.long),
        "pixel_attention_mask": lambda: torch.ones(rows, 32, dtype=torch.long),
        "spatial_shapes": lambda: grid[:, 1:],
        "input_values": real(samples[variant]),
        "input_features": real(features[variant]),
        "past_values": real((rows, field("context_length", 32), field("num_input_channels", 1))),
        "inputs_embeds": real((rows, tokens, field("hidden_size", 64))),
        "noise_embeds": real((rows, tokens, field("hidden_size", 64))),
    }


def attempts(model: Any) -> Iterator[tuple[tuple[str, ...], int]]:
    """Names of inputs and a variant of their layout, the likeliest first."""
    parameters = inspect.signature(model.forward).parameters
    needed = [
        n for n, p in parameters.items() if p.default is p.empty and p.kind < p.VAR_POSITIONAL
    ]
    main = getattr(model, "main_input_name", "input_ids")
    readable: list[tuple[str, ...]] = [
        (main,),
        ("input_ids",),
        ("pixel_values",),
        ("input_values",),
        ("input_features",),
    ]
    readable += [
        ("pixel_values_videos",),
        ("input_ids", "bbox"),
        ("hidden_states",),
        ("past_values",),
        ("inputs_embeds",),
    ]
    readable += [("input_ids", "pixel_values"), ("input_ids", "input_features")]
    readable += [("input_ids", "input_values"), ("input_ids", "pixel_values", "bbox")]
    seen = set()
    for names, more in itertools.product(readable, ((), ("decoder_input_ids",))):
        wanted = dict.fromkeys((*names, *more, *needed))
        if "input_ids" in wanted:
            wanted["attention_mask"] = None
        given = tuple(name for name in wanted if name in parameters)
        for variant in range(3):
            if given and set(names) <= set(given) and (given, variant) not in seen:
                seen.add((given, variant))
                yield given, variant


def runs_on(model: Any) -> Callable[[int, int], dict[str, Any]]:
    """What makes inputs that the model runs on. Raises ValueError if nothing here does."""
    why = ""
    for names, variant in attempts(model):

        def inputs(rows: int, tokens: int, names: Any = names, variant: int = variant) -> Any:
            known = makers(model.config, rows, tokens, variant)
            return {name: known[name]() for name in names}

        try:
            with torch.no_grad():
                results = floats(model(**inputs(2, 12)))
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            continue
        if results and all(math.prod(x.shape) for x in results):
            return inputs
    raise ValueError(f"no inputs made here run: {why}")


def floats(results: Any) -> list[Any]:
    """The floating-point tensors among a model's results, without repeats."""
    leaves = torch.utils._pytree.tree_leaves(
        results.to_tuple() if hasattr(results, "to_tuple") else results
    )
    tensors = [x for x in leaves if torch.is_tensor(x) and x.is_floating_point()]
    return list({id(x): x for x in tensors}.values())


def small_model(kind: str, attention: str) -> Small:
    """The type's model as small as it can be; the largest part of it if the whole does not run."""
    models, problems = [], []
    for factor, image in SIZES:
        try:
            models.append(build(kind, attention, factor, image))
            return Small(models[-1], "", runs_on(models[-1]))
        except Exception as error:
            problems.append(error)
    for model in models:
        parts = [x for x in model.modules() if isinstance(x, PreTrainedModel) and x is not model]
        for part in sorted(parts, key=lambda x: -x.num_parameters()):
            try:
                return Small(part, type(part).__name__, runs_on(part))
            except ValueError:
                continue
    no_inputs = [x for x in problems if str(x).startswith("no inputs")]
    raise (no_inputs or problems)[0]
