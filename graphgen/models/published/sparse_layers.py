"""Which layers of a decoder have experts."""

from collections.abc import Callable

from graphgen.models.published.config import Config


def sparse_layers(config: Config) -> Callable[[int], bool]:
    """Which layers have experts, by decoder_sparse_step and mlp_only_layers."""
    every, dense = config.take("decoder_sparse_step", int, 1), config.raw("mlp_only_layers", [])
    if not isinstance(dense, list) or not all(type(i) is int for i in dense):
        config.refuse("mlp_only_layers", dense, "a list of the numbers of layers")
    return lambda number: number not in dense and (number + 1) % every == 0
