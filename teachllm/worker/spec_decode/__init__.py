"""Drafting on the rows of a batch, on a CPU and on a GPU."""
