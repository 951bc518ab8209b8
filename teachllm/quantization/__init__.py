"""Quantized weights: the formats that checkpoints have them in, and the algorithms that make them."""
