"""The pass laboratory: what each pass did, what it was worth, what it cost, why it did not fire."""

from graphgen.export.text import assert_graph
from graphgen.laboratory.explain import explain
