"""Heads that guess tokens ahead from a model's hidden states; what drafts with them is in `spec_decode/`."""
