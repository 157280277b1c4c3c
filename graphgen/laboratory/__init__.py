"""The pass laboratory: what each pass did, what it was worth, what it cost, why it did not fire."""

from graphgen.laboratory.explain import explain
from graphgen.laboratory.golden import assert_graph
