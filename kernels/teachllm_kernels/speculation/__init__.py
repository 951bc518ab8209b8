"""Drafts on the device: prompt lookup, rejection sampling, and rolling back what was rejected."""
