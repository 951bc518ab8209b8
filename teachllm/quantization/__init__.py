"""Quantized weights: what they are, which layers have them, and how they are multiplied."""
