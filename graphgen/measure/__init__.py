"""What a graph computes, costs and is fed with."""
