"""The words by which users count operators: `attention`, `layer_norm`, `gelu`, ..."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence

from graphgen.errors import GraphgenError, near
from graphgen.infer import DOMAIN
from graphgen.op import TABLE

_SYNONYMS = {"norm": ("layer_norm", "rms_norm"), "silu": ("quick_gelu",)}


def word_of(operator: str) -> str:
    """`layer_norm` for LayerNormalization; variants that do more than an operator count as it.

    >>> [word_of(x) for x in ("com.microsoft::GroupQueryAttention", "SimplifiedLayerNormalization")]
    ['attention', 'rms_norm']
    """
    name = operator.rpartition(":")[2].replace("SimplifiedLayer", "RMS")
    name = re.sub("^(Skip|Embed|Bias(?=Gelu|Softmax)|Fast|MultiHead|GroupQuery)", "", name)
    snake = re.sub("(?<=[a-z])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name)
    return snake.lower().replace("normalization", "norm")


def count_words(operators: Mapping[str, int]) -> Counter[str]:
    """How many of each operator there are, variants included, by its word.

    >>> count_words({"LayerNormalization": 2, "com.microsoft::SkipLayerNormalization": 3})
    Counter({'layer_norm': 5})
    """
    counts: Counter[str] = Counter()
    for operator, count in operators.items():
        counts[word_of(operator)] += count
    return counts


def words_of(word: str, who: str = "expect") -> Sequence[str]:
    """The operators that a user's word means. Raises GraphgenError if it means none."""
    known = {word_of(op.name) for op in TABLE.values() if op.composite and op.domain != DOMAIN}
    if word not in known | set(_SYNONYMS):
        choices = sorted(known | set(_SYNONYMS))
        problem = f"{word!r} is not a fused operator; choose from {', '.join(choices)}"
        raise GraphgenError(f"{who}: {problem}{near(word, choices)}")
    return _SYNONYMS.get(word, (word,))
