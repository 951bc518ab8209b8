"""HTTP clients of the servers of tests, and the certificates that each client would read again: 40 ms."""

from __future__ import annotations

import ssl
from functools import cache

import httpx

from tests.waiting import HANG_SECONDS

certificates = cache(ssl.create_default_context)


def http_client(url: str) -> httpx.Client:
    """Return a client of a server of this machine, which waits for no answer for ever."""
    return httpx.Client(base_url=url, timeout=HANG_SECONDS, verify=certificates())
