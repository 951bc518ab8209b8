"""Drafting on the rows of a GPU's batch."""
