"""Decoders that run through transformers' own model code, with this engine's paged attention in it."""
