"""Weights of linear layers, unquantized and quantized: what is stored, and which kernel multiplies it."""
