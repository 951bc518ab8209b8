"""Decide what to compute: requests, blocks, policies and the scheduler. Only the standard library is imported here."""
