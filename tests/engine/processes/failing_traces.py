"""Steps that fail in an engine's core, which runs in a thread of this process: what writes its trace raises."""

from __future__ import annotations

import pytest

from teachllm.engine.observability.trace_file import TraceFile


def make_steps_fail(monkeypatch: pytest.MonkeyPatch, end: str = "") -> None:
    """Let every step fail of an engine that writes a trace.

    Args:
        end: of the names of the traces.
    """
    take = TraceFile.__call__

    def fail(self: TraceFile, line: str) -> None:
        if '"step"' in line and self._path.endswith(end):
            raise OSError(28, "No space left on device")
        take(self, line)

    monkeypatch.setattr(TraceFile, "__call__", fail)
