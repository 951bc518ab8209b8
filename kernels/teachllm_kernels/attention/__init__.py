"""Attention over the paged KV cache: decode, prefill, and how K and V are written, moved and quantized."""
