"""The version, which the build reads here so that a plain checkout knows it; those of others."""

import re

VERSION = "0.1.0"


def minor(version: str) -> tuple[int, ...]:
    """(1, 20) for "1.20.1" and "1.20"; () for anything that is not a version."""
    return tuple(map(int, version.split(".")[:2])) if re.match(r"\d+\.\d+", version) else ()
