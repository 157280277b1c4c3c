"""Passes of training graphs: what is computed again, and how products are written."""
