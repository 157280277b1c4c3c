"""Every field of every published configuration gives transformers' result, or is refused.

Each is changed in turn: in config.json alone, as somebody does by hand, or, where the weights then
no longer fit, with weights made for it. Each is left out, too, for what stands for it.
"""

import copy
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import published_decoders as decoders
import published_encoders as encoders
import published_seq2seq as seq2seq
import published_vision as vision
import pytest

import graphgen as gg
from graphgen.errors import GraphgenError
from graphgen.export.write import to_bytes
from graphgen.models.published import from_folder

torch = pytest.importorskip("torch", reason="needs torch (make parity)")
transformers = pytest.importorskip("transformers", reason="needs transformers (make parity)")

from test_families import relative_rms  # noqa: E402

pytestmark = pytest.mark.parity

BOUND = 2e-5  # relative RMS in float32: large changes of an epsilon cost some digits
ROWS, LENGTH = 2, 20
_LLAMA, _BERT = decoders.DECODERS["olmo2"], encoders.ENCODERS["camembert"]
_WINDOWS = {"sliding_window": 5, "num_hidden_layers": 3}
_BART, _T5 = seq2seq.SEQ2SEQ["mbart"], seq2seq.SEQ2SEQ["mt5"]
_NAMES = {"hidden_size": "dim", "intermediate_size": "hidden_dim"} | {
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
}
SMALL: dict[str, tuple[dict[str, Any], Any]] = {  # families that other tests have no small ones of
    "llama": (_LLAMA, decoders),
    "llama, own head size": (_LLAMA | {"head_dim": 16, "attention_bias": True}, decoders),
    "mistral": (_LLAMA | _WINDOWS, decoders),
    "qwen2": (_LLAMA | _WINDOWS, decoders),
    "qwen2, windows": (
        _LLAMA | _WINDOWS | {"use_sliding_window": True, "max_window_layers": 1},
        decoders,
    ),
    "qwen3": (_LLAMA | {"head_dim": 16}, decoders),
    "gpt2": (
        {"vocab_size": 40, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
        decoders,
    ),
    "bert": (_BERT | {"pad_token_id": 0}, encoders),
    "roberta": (_BERT, encoders),
    "xlm-roberta": (_BERT, encoders),
    "distilbert": ({_NAMES.get(name, name): x for name, x in _BERT.items()}, encoders),
    "bart": (_BART, seq2seq),
    "marian": (_BART | {"pad_token_id": 39, "decoder_start_token_id": 39}, seq2seq),
    "t5": (_T5, seq2seq),
    "vit": (vision.VISION["deit"] | {"image_size": 9}, vision),
}
_HEADS: dict[Any, tuple[str, str]] = {
    decoders: ("CausalLM", "text-generation"),
    encoders: ("MaskedLM", "fill-mask"),
    seq2seq: ("Seq2SeqLM", "text2text-generation"),
    vision: ("ImageClassification", "image-classification"),
}
KINDS: dict[str, tuple[str, str, Any]] = {  # the class of transformers, the task, the small ones
    **{name: (*_HEADS[small], small) for name, (_, small) in SMALL.items()},
    **dict.fromkeys(decoders.DECODERS, (*_HEADS[decoders], decoders)),
    **dict.fromkeys(encoders.ENCODERS, (*_HEADS[encoders], encoders)),
    **dict.fromkeys(seq2seq.SEQ2SEQ, (*_HEADS[seq2seq], seq2seq)),
    "dinov2": (*_HEADS[vision], vision),
    "clip": ("", "zero-shot-image-classification", vision),
    "siglip": ("", "zero-shot-image-classification", vision),
}
WITHOUT_EFFECT = re.compile(
    r"transformers_version|architectures|model_type|dtype|id2label|label2id|vocab_size|problem_type|"
    r"return_dict|output_hidden_states|output_attentions|use_cache|chunk_size_feed_forward"
)
ROPES: list[dict[str, Any]] = [
    {"rope_theta": 333.0},
    {"rope_type": "linear", "factor": 2.0},
    {"rope_type": "dynamic", "factor": 2.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    | {"original_max_position_embeddings": 16},
    {"partial_rotary_factor": 0.5},
]
FOREIGN: dict[str, Any] = {  # fields of other families
    "attention_bias": True,
    "attention_multiplier": 0.3,
    "attn_logit_softcapping": 3.0,
    "final_logit_softcapping": 3.0,
    "head_dim": 16,
    "hidden_act": "relu",
    "is_decoder": True,
    "layer_norm_eps": 0.3,
    "layer_types": ["sliding_attention", "full_attention"],
    "logit_scale": 0.5,
    "mlp_bias": True,
    "partial_rotary_factor": 0.5,
    "position_embedding_type": "relative_key",
    "qkv_bias": True,
    "query_pre_attn_scalar": 9,
    "rms_norm_eps": 0.3,
    "rope_scaling": {"type": "linear", "factor": 2.0},
    "rope_theta": 500.0,
    "scale_embedding": True,
    "sliding_window": 3,
    "use_sliding_window": True,
}


def fields_of(which: str) -> dict[str, Any]:
    """The fields of the small configuration of a kind."""
    if which not in SMALL:
        found: dict[str, Any] = KINDS[which][2].fields(which)
        return found
    more = {"is_encoder_decoder": True} if KINDS[which][2] is seq2seq else {}
    return SMALL[which][0] | more | {"model_type": which.split(",")[0]}


def changes(of: dict[str, Any], small: dict[str, Any]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """The path of a field, and another value for it."""
    for name, value in of.items():
        if WITHOUT_EFFECT.fullmatch(name):
            continue
        if isinstance(value, dict) and name.endswith("_config"):
            for path, other in changes(value, small.get(name, {})):
                yield (name, *path), other
        else:
            yield from (((name,), other) for other in others(name, value))


def others(name: str, value: Any) -> list[Any]:
    """Other values of the kind that a field has."""
    match value:
        case bool():
            return [not value]
        case int():
            return [value + 1, value * 2 or 3]
        case float():
            return [value * 1.7 + 0.1]
        case str() if "act" in name:
            return ["relu", "gelu_new", "silu", "tanh", "quick_gelu", "gelu_pytorch_tanh", "relu2"]
        case str():
            return ["relative_key_query", "c2p", "p2c", "layer_norm", "mean", "none"]
        case None:
            return [True, 2, 0.5, [1]]
        case {"rope_type": _}:
            return [value | rope for rope in ROPES]
        case [str(), *_]:
            return [value[::-1], value[:1] * len(value)]
        case [int(), *_]:
            return [value[::-1], [1 - x if x in (0, 1) else x + 1 for x in value]]
    return []


def without(stored: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The configuration without one of its fields, or of those of an object in it."""
    for name, value in stored.items():
        if WITHOUT_EFFECT.fullmatch(name):
            continue
        yield name, {key: x for key, x in stored.items() if key != name}
        if isinstance(value, dict):
            for own in value:
                rest = {key: x for key, x in value.items() if key != own}
                yield f"{name}.{own}", {**stored, name: rest}


def changed(fields: dict[str, Any], path: tuple[str, ...], value: Any) -> dict[str, Any]:
    result = copy.deepcopy(fields)
    part = result
    for name in path[:-1]:
        part = part.setdefault(name, {})
    part[path[-1]] = value
    return result


def eager(which: str) -> dict[str, str]:
    """Falcon's eager attention adds its slopes twice."""
    decoder = KINDS[which][2] is decoders and "falcon" not in which
    return {"attn_implementation": "eager"} if decoder else {}


def save(which: str, fields: dict[str, Any], folder: Path) -> None:
    """A checkpoint of this configuration. Whatever transformers raises says that there is none."""
    head, _, small = KINDS[which]
    auto = getattr(transformers, f"AutoModelFor{head}" if head else "AutoModel")
    module = auto.from_config(transformers.AutoConfig.for_model(**fields), **eager(which))
    with torch.no_grad():
        for name, weight in module.named_parameters():
            weight.copy_(
                torch.from_numpy(small.weight(name, (*weight.shape,))).reshape(weight.shape)
            )
    module.save_pretrained(folder)


def given(which: str) -> dict[str, Any]:
    """What both models get."""
    small = KINDS[which][2]
    if small is vision:
        return vision.inputs(which)
    if small is seq2seq:
        return seq2seq.inputs()
    ids = np.random.default_rng(0).integers(6, 40, (ROWS, LENGTH))
    mask = np.ones_like(ids)
    mask[1, slice(0, 7) if small is decoders else slice(13, LENGTH)] = 0
    feeds = {"input_ids": ids, "attention_mask": mask}
    if small is decoders and which.split(",")[0] not in decoders.SLOPED and "opt" not in which:
        feeds["position_ids"] = np.maximum(mask.cumsum(1) - 1, 0)
    return feeds


def run(model: Any, feeds: dict[str, Any]) -> dict[str, Any]:
    """The outputs of a graph as it was declared."""
    session, known = gg.Session(to_bytes(model), optimize=False, threads=1), dict(feeds)
    rows = len(next(iter(feeds.values())))
    for name, kind in session.inputs.items():
        if name.startswith("past"):
            sizes = [d if isinstance(d, int) else 0 for d in kind.dims[1:]]
            known[name] = np.zeros((rows, *sizes), np.float32)
    outputs = session({name: known[name] for name in session.inputs})
    return dict(zip(session.outputs, outputs, strict=True))


def ours(which: str, folder: Path) -> dict[str, Any]:
    feeds, task = given(which), KINDS[which][1]
    mask = feeds.get("attention_mask")
    if mask is not None and "position_ids" not in feeds:
        feeds["position_ids"] = np.maximum(mask.cumsum(1) - 1, 0)
    if "input_ids" in feeds:
        feeds["token_type_ids"] = np.zeros_like(feeds["input_ids"])
    models = from_folder(folder, task).models
    found = dict[str, Any]()
    for name, model in models.items():
        if KINDS[which][2] is seq2seq and not name.startswith("encoder"):
            ids = feeds["decoder_input_ids"]
            feeds |= {"encoder_attention_mask": mask, "input_ids": ids} | {
                "encoder_hidden_states": found.pop("last_hidden_state"),
                "attention_mask": np.ones_like(ids),
                "position_ids": np.tile(np.arange(ids.shape[1]), (len(ids), 1)),
                "use_cache_branch": np.array([False]),
            }
        found |= run(model, feeds)
    return found


def difference(which: str, folder: Path) -> float | None:
    """How far apart the results are; None if one of the two refuses the checkpoint."""
    head, _, small = KINDS[which]
    auto = getattr(transformers, f"AutoModelFor{head}" if head else "AutoModel")
    try:
        module, told = auto.from_pretrained(
            folder, output_loading_info=True, dtype=torch.float32, **eager(which)
        )
        if told["missing_keys"] or told["mismatched_keys"]:
            return None
        feeds = {name: torch.tensor(x) for name, x in given(which).items()}
        with torch.no_grad():
            wanted = module.eval()(**feeds)
    except Exception:  # transformers has many kinds
        return None
    try:
        found = ours(which, folder)
    except GraphgenError:
        return None
    by_token = small in (decoders, encoders) and KINDS[which][1] != "text-classification"
    kept = given(which)["attention_mask"].astype(bool) if by_token else ...
    compared = {"logits", "logits_per_image", "logits_per_text"} & found.keys()
    assert compared
    return max(relative_rms(found[name][kept], wanted[name].numpy()[kept]) for name in compared)


@pytest.mark.parametrize("which", KINDS)
def test_a_changed_field_counts_or_is_refused(which: str, tmp_path: Path) -> None:
    transformers.logging.set_verbosity_error()
    fields, base = fields_of(which), tmp_path / "base"
    save(which, fields, base)
    first = difference(which, base)
    assert first is not None and first < BOUND
    stored = json.loads((base / "config.json").read_text())
    wrong = list[Any]()
    for name, rest in without(stored):
        (base / "config.json").write_text(json.dumps(rest))
        error = difference(which, base)
        if error is not None and error >= BOUND:
            wrong.append((name, "left out", error))
    whole = transformers.AutoConfig.for_model(**fields).to_dict()
    foreign = (((name,), x) for name, x in FOREIGN.items() if whole.get(name, "none") != x)
    compared = 0
    for path, value in [*changes(whole, fields), *foreign]:
        shutil.rmtree(tmp_path / "hand", ignore_errors=True)
        shutil.copytree(base, tmp_path / "hand")
        (tmp_path / "hand" / "config.json").write_text(json.dumps(changed(stored, path, value)))
        error = difference(which, tmp_path / "hand")
        if error is None:
            shutil.rmtree(tmp_path / "made", ignore_errors=True)
            try:
                save(which, changed(fields, path, value), tmp_path / "made")
            except Exception:  # transformers has no such model
                continue
            error = difference(which, tmp_path / "made")
        compared += error is not None
        if error is not None and error >= BOUND:
            wrong.append((".".join(path), value, error))
    assert not wrong
    assert compared > 15
