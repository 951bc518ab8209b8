"""Ranks: which part of the model each one holds, and what they exchange."""
