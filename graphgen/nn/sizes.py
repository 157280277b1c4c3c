"""Sizes, checked before anything is made of them."""

from graphgen.errors import positive

__all__ = ["positive"]
