"""Let the ranks of an engine meet: rank 0 listens, the others connect.

Whoever starts the ranks opens the socket and hands it to rank 0: a port that was looked for, closed and opened again
could be another program's by then. Where ranks are on several machines, the engine's own process listens.
"""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import Any, NamedTuple


class Rendezvous(NamedTuple):
    """Host and port, and the descriptor of the socket that listens there, at the rank that keeps the store."""

    host: str
    port: int
    listener: int | None = None


def listen_here() -> socket.socket:
    """Open a socket for the ranks of this machine, on a port that is free, out of reach for any other machine."""
    return socket.create_server(("127.0.0.1", 0))


def rendezvous_at(listener: socket.socket) -> Rendezvous:
    """Return the rendezvous at `listen_here`, for the rank that listens; other ranks do without the descriptor."""
    host, port = listener.getsockname()
    return Rendezvous(host, port, listener.fileno())


def keep_store(host: str, timeout_s: float) -> tuple[Rendezvous, Any]:
    """Keep a meeting point in this process, for ranks in others.

    Args:
        host: this machine's name or address, as the ranks know it.

    Returns:
        Where they meet, and the store that they meet in: it is there as long as this object.
    """
    import torch.distributed as dist

    with socket.create_server((host, 0)) as listener:
        port = listener.getsockname()[1]
        limit = timedelta(seconds=timeout_s)
        descriptor = listener.detach()  # the store closes it
    store = dist.TCPStore(host, port, None, True, limit, wait_for_workers=False, master_listen_fd=descriptor)
    return Rendezvous(host, port), store
