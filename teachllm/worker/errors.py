"""What an engine does not survive."""

from __future__ import annotations


class EngineDeadError(RuntimeError):
    """A process of the engine has ended and nobody told it to."""
