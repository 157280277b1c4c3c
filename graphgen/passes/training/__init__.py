"""Passes of training graphs: what is computed again, and how products are written."""

MARK = "graphgen.recomputed"
"""Metadata of the nodes that calculate a forward value again: "start" of a chain, or "copy"."""
