"""Define the messages between an engine and the other machines that have some of its ranks.

    Hello ──▶            a machine is there
          ◀── Begin      its ranks, and what they are to do; or Refused
          ◀── Order ...  a message to all ranks, as it goes through the ring of a machine
    Said  ──▶            a frame of one rank; Died, if one has ended
          ◀── End

Each is a msgspec struct, packed as MessagePack: typed when it is read, and never code (no pickle).
"""

from __future__ import annotations

import msgspec

from teachllm.worker.processes.rank_lines import RankWork


class HostMessage(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """One of the below; its name goes with it."""


class Hello(HostMessage, frozen=True):
    """Greet from a machine called `name`, with these versions, which takes the place that it names, or else any."""

    name: str
    versions: dict[str, str]
    place: int | None = None


class Said(HostMessage, frozen=True):
    """A frame, see `answers.py`."""

    rank: int
    kind: int
    number: int
    content: bytes


class HostDied(HostMessage, frozen=True, tag="Died"):
    """All ranks of this machine have ended, and why."""

    why: str


class Begin(HostMessage, frozen=True):
    """Start these ranks."""

    ranks: list[int]
    work: RankWork


class HostRefused(HostMessage, frozen=True, tag="Refused"):
    """There is nothing to do here for whoever said hello."""

    why: str


class Order(HostMessage, frozen=True):
    """To be passed on to all ranks."""

    content: bytes


class End(HostMessage, frozen=True):
    """End the ranks, after their step or at once; with a reason, if this is not the end that a user wanted."""

    at_once: bool
    death: str | None = None


ToHost = Begin | HostRefused | Order | End
FromHost = Hello | Said | HostDied

encode = msgspec.msgpack.Encoder().encode
decode_to_host = msgspec.msgpack.Decoder(ToHost).decode
decode_from_host = msgspec.msgpack.Decoder(FromHost).decode
