"""Checkpoints of few bits beside those of the floats that these stand for."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from random_checkpoints import GROUPED, random_checkpoint, write_weights

from graphgen.safetensors import read_header

FIELDS = {"model_type": "llama", **GROUPED, "num_hidden_layers": 1, "tie_word_embeddings": False}


def packed(numbers: Any, bits: int, order: Any = None) -> Any:
    """Rows of numbers as words of 32 bits, one after another, the first in the lowest bits.

    Of the numbers in a word, the one of place order[i] is in the i-th bits.
    """
    each, rows = 32 // bits, []
    for own in numbers.tolist():
        if order:
            own = [own[at - at % each + order[at % each]] for at in range(len(own))]
        whole = sum(number << (bits * at) for at, number in enumerate(own))
        rows.append(whole.to_bytes(-(-len(own) * bits // 32) * 4, "little"))
    return np.frombuffer(b"".join(rows), "<i4").reshape(len(rows), -1)


def checkpoints(
    path: Path, config: dict[str, Any], layer: Any, own_fields: Any = FIELDS
) -> tuple[Path, Path, Any]:
    """A folder of few bits, one of the floats these stand for, and the floats by name."""
    floats, few = path / "floats", path / "few"
    random_checkpoint(floats, own_fields)
    arrays = {w.name: w.read() for w in read_header(floats / "model.safetensors")}
    own, known, rng = dict(arrays), {}, np.random.default_rng(3)
    for name, array in arrays.items():
        if "proj" in name or ".experts." in name:
            tensors, known[name] = layer(rng, *array.shape)
            del own[name]
            base = name.removesuffix("weight")
            own |= {base + part: np.ascontiguousarray(x) for part, x in tensors.items()}
    arrays |= {n: w.astype("f4") for n, w in known.items()}
    write_weights(floats / "model.safetensors", arrays)
    few.mkdir()
    write_weights(few / "model.safetensors", own)
    fields = {"quantization_config": config}
    if "quant_method" not in config:  # MLX writes it twice
        fields["quantization"] = config
    (few / "config.json").write_text(json.dumps(own_fields | fields))
    return few, floats, known


def same_weights(wanted: Any, found: Any, sums: float = 0.0) -> None:
    """Fails unless two models have the same weights, to a last place of float32.

    `sums` is that of the largest number, for weights that are sums.
    """
    assert wanted.graph.initializers.keys() == found.graph.initializers.keys()
    for name, value in wanted.graph.initializers.items():
        own = found.graph.initializers[name].const_value.numpy()
        given = value.const_value.numpy()
        np.testing.assert_allclose(own, given, rtol=3e-7, atol=sums * np.abs(given).max())
