"""Reading traces: what `--trace` has written, checked, replayed, summed up, and turned into other formats.

Who writes them is `core/trace.py`; the format is in docs/trace.md. Nothing here needs more than the standard library.
"""
