"""The pass laboratory: what each pass did, what it was worth, what it cost, and why it did not."""

from graphgen.laboratory.golden import assert_graph
