"""docs/checkpoints.md: what it says of families, tasks and fields is what the code does.

python tests/models/test_checkpoint_page.py --remake    # write its tables anew
"""

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from published_decoders import DECODERS, fields as decoder_fields
from published_encoders import ENCODERS, fields as encoder_fields
from published_others import OTHERS
from published_seq2seq import SEQ2SEQ, fields as seq2seq_fields
from published_speech import FIELDS as WHISPER
from published_vision import ONE, VISION, fields as vision_fields
from test_checkpoints import ALL_CONFIGS
from test_seq2seq import BART, MARIAN, PUBLISHED

from graphgen.models.published import FAMILIES, rope
from graphgen.models.published.config import ACTIVATIONS, Config
from graphgen.models.published.language_model import TYPES

PAGE = Path(__file__).resolve().parents[2] / "docs" / "checkpoints.md"
CONFIGS: dict[str, dict[str, Any]] = {
    **{kind: {"model_type": kind, **fields} for kind, fields in ALL_CONFIGS.items()},
    "xlm-roberta": {"model_type": "xlm-roberta", **ALL_CONFIGS["roberta"]},
    **{kind: PUBLISHED[kind] for kind in ("gpt2", "t5")},
    "bart": BART,
    "marian": MARIAN,
    **{kind: decoder_fields(kind) for kind in DECODERS if "," not in kind},
    **{kind: seq2seq_fields(kind) for kind in SEQ2SEQ},
    **{kind: vision_fields(kind) for kind in (*VISION, *ONE)},
    **{kind: encoder_fields(kind) for kind in ENCODERS if "," not in kind},
    "new": {**encoder_fields("gte"), "model_type": "new"},
    "kimi_k2": {**decoder_fields("deepseek_v3"), "model_type": "kimi_k2"},
    "whisper": WHISPER,
    **{kind: {"model_type": kind} for kind in ("wav2vec2", "hubert", "dinov3_vit")},
    **{given["model_type"]: given for name, (*_, given) in OTHERS.items() if "," not in name},
    "model2vec": {"model_type": "model2vec", "vocab_size": 9, "hidden_size": 4},
}


class Asked(Config):
    """A configuration that notes which fields may have some values only."""

    def __init__(self, fields: dict[str, Any], where: str = "config.json") -> None:
        self.fixed: dict[str, tuple[Any, ...]] = {}
        super().__init__(fields, where)

    def expect(self, name: str, *values: Any) -> None:
        self.fixed[name] = values
        super().expect(name, *values)


def fields(kind: str) -> tuple[str, str]:
    """The fields of a model type that are honored, and those that have to have a value."""
    taken: set[str] = set()
    fixed: dict[str, tuple[Any, ...]] = {}
    for task in FAMILIES[kind].tasks.values():
        config = Asked(CONFIGS[kind])
        task(config)
        for prefix, part in {"": config, **{f"{n}.": p for n, p in config.parts.items()}}.items():
            taken |= {prefix + name for name in part._taken}
            fixed |= {prefix + name: values for name, values in part.fixed.items()}
    own = ("n_ctx", "num_hidden_layers", "is_gated_act", "dense_act_fn", "ff_factor", "n_inner")
    own += ("layer_switch", "emb_size")  # these say again what others do
    told = [
        f"{name} {' or '.join(str(v).lower() for v in values) or 'absent'}"
        for name, values in sorted(fixed.items())
        if name not in own
    ]
    honored = (name for name in taken - {*fixed} if not name.endswith("model_type"))
    return ", ".join(sorted(honored)), ", ".join(told)


def tables() -> dict[str, str]:
    """The tables of the page by their names."""
    tasks = [
        f"| {kind} | {', '.join(family.tasks)} |\n" for kind, family in sorted(FAMILIES.items())
    ]
    rows: dict[tuple[str, str], list[str]] = {}
    for kind in sorted(FAMILIES):
        rows.setdefault(fields(kind), []).append(kind)
    kinds = [f"| {', '.join(own)} | {taken} | {fixed} |\n" for (taken, fixed), own in rows.items()]
    ropes = [
        f"| {kind} | {', '.join(sorted(names)) or 'none'} |\n"
        for kind, names in rope.FIELDS.items()
    ]
    return {
        "tasks": "| model_type | `--task` |\n|---|---|\n" + "".join(tasks),
        "fields": "| model_type | honored | must have this value, if present |\n|---|---|---|\n"
        + "".join(kinds),
        "rope": "| rope_type | its fields |\n|---|---|\n" + "".join(ropes),
        "language models": ", ".join(TYPES) + "\n",
        "activations": ", ".join(f"`{name}`" for name in ACTIVATIONS) + "\n",
    }


def remade(page: str) -> str:
    """The page with its tables written anew."""
    for name, table in tables().items():
        begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->\n"
        before, (_, after) = page.split(begin)[0], page.split(end)
        page = before + begin + table + end + after
    return page


def test_the_page_is_what_the_code_does() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert remade(page) == page, "run `make goldens`"


if __name__ == "__main__" and sys.argv[1:] == ["--remake"]:
    PAGE.write_text(remade(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
