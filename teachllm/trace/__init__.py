"""Traces: writing them (`recorder.py`), and what was written checked, replayed, summed up, turned into other formats.

The format is in docs/trace.md. Nothing here needs more than the standard library.
"""
