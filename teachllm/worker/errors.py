"""Define the errors that end an engine, and those that end some of its requests."""

from __future__ import annotations


class EngineDeadError(RuntimeError):
    """A process of the engine has ended without being told to."""


class FailedStepError(RuntimeError):
    """A replica's step failed; the requests of others go on.

    Attributes:
        request_ids: of those that have ended with it.
    """

    def __init__(self, error: str, request_ids: list[str]) -> None:
        super().__init__(error)
        self.request_ids = request_ids
