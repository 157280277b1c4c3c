"""Sizes, checked before anything is made of them."""

from graphgen.errors import GraphgenError


def positive(who: str, **sizes: int | None) -> None:
    """Raise GraphgenError unless every size is an int of at least 1, or None for its default."""
    for name, size in sizes.items():
        if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
            raise GraphgenError(f"{who}: {name} is {size!r}; it must be an integer of at least 1")
