"""The pass laboratory: what each pass did, gained and cost, and why it did not fire."""

from graphgen.laboratory.remarks import explain as explain
from graphgen.laboratory.text import assert_graph as assert_graph
