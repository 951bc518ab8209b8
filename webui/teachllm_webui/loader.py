"""One thing is loaded at a time, and of orders that come meanwhile the newest counts."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Loader(Generic[T]):
    """A thread that makes what it was asked for last.

    Args:
        loaded: gets what was made, in the loader's thread; `is_outdated` says whether it is still wanted.
        failed: gets the error instead.
    """

    def __init__(self, loaded: Callable[[T], None], failed: Callable[[Exception], None]) -> None:
        self._loaded, self._failed = loaded, failed
        self._wanted: Callable[[], T] | None = None
        self._is_closed = False
        self._wake = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="loader", daemon=True)
        self._thread.start()

    def load(self, make: Callable[[], T]) -> None:
        """Makes this next. What is being made is finished and dropped, what waits is forgotten.

        Raises:
            RuntimeError: it is closed.
        """
        with self._wake:
            if self._is_closed:
                raise RuntimeError("the page is closed")
            self._wanted = make
            self._wake.notify()

    @property
    def is_outdated(self) -> bool:
        """Something newer than what was made is wanted, or nothing any more."""
        with self._wake:
            return self._wanted is not None or self._is_closed

    def close(self) -> None:
        """Cancel what is being made, and wait for it unless it takes long."""
        with self._wake:
            self._is_closed = True
            self._wake.notify()
        self._thread.join(5.0)

    def _run(self) -> None:
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._wanted or self._is_closed)
                if self._is_closed:
                    return
                make, self._wanted = self._wanted, None
            assert make is not None
            try:
                made = make()
            except Exception as error:  # whatever it is, the page is told
                self._failed(error)
            else:
                self._loaded(made)
