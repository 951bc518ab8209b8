"""Provide what models are made of: attention, linear layers, norms, rotary embedding, experts."""
