"""The version, which the build reads here so that a plain checkout knows it; those of others."""

VERSION = "0.1.0"


def minor(version: str) -> tuple[int, ...]:
    """(1, 20) for "1.20.1" and "1.20"; () for anything that is not a version."""
    parts = version.split(".")[:2]
    return tuple(map(int, parts)) if len(parts) == 2 and all(p.isdecimal() for p in parts) else ()
