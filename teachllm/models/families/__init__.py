"""Families of models, a file each: what is in one of their configurations and what their layers compute."""
