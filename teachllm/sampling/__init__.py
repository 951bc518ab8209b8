"""From logits to token ids, for each request by its own parameters."""
