"""From logits to a token: filters and random draws that depend on the request alone."""
