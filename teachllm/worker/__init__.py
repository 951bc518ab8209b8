"""Compute plans: executors, model runners, and the memory that they use."""
