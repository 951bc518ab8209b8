"""The ring: every reader gets every message, whole and in order, and nobody writes over what is not read."""

from __future__ import annotations

import os
import threading

import pytest

from teachllm.distributed.ring import RingReader, RingWriter
from tests.processes import open_files
from tests.waiting import HANG_SECONDS, wait_for

MESSAGES = [bytes([index % 251]) * (index * 37 % 500) for index in range(200)]


def ring(
    num_readers: int = 2, slot_bytes: int = 64, num_slots: int = 4, spin_seconds: float = 0.0
) -> tuple[RingWriter, list[RingReader]]:
    """Both ends in this process: the readers have copies, as those in other processes do."""
    writer = RingWriter(num_readers, slot_bytes, num_slots)
    readers = [RingReader(end._replace(**_copies(end)), spin_seconds) for end in writer.ends]
    writer.hand_over()
    return writer, readers


def _copies(end: object) -> dict[str, int]:
    return {name: os.dup(getattr(end, name)) for name in ("memory", "filled", "emptied")}


@pytest.mark.parametrize("spin_seconds", [0.0, 0.001])
def test_all_readers_get_all_messages_also_those_larger_than_the_ring(spin_seconds: float) -> None:
    before = open_files()
    writer, readers = ring(spin_seconds=spin_seconds)
    found: list[list[bytes]] = [[] for _ in readers]

    def read(index: int) -> None:
        while (message := readers[index].read()) is not None:
            found[index].append(message)

    threads = [threading.Thread(target=read, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for message in MESSAGES:
        writer.write(message)
    writer.close()
    for thread in threads:
        thread.join(HANG_SECONDS)
    assert found == [MESSAGES, MESSAGES]
    for reader in readers:
        reader.close()
    assert not open_files() - before


def test_a_writer_waits_for_the_slowest_reader() -> None:
    writer, (fast, slow) = ring(num_slots=2)
    for message in (b"a", b"b"):
        writer.write(message)
        assert fast.read() == message
    writing = threading.Thread(target=writer.write, args=(b"c",))
    writing.start()
    wait_for(lambda: writer._num_free[0] > 0)  # of the fast one it knows, and of the slow one it has heard nothing
    assert writing.is_alive() and writer._num_free[1] == 0
    assert slow.read() == b"a"
    writing.join(HANG_SECONDS)
    assert not writing.is_alive()
    assert [slow.read(), slow.read(), fast.read()] == [b"b", b"c", b"c"]
    writer.close()
    assert fast.read() is None and slow.read() is None


def test_a_message_that_was_written_before_the_end_is_read() -> None:
    writer, (reader,) = ring(num_readers=1)
    writer.write(b"last")
    writer.close()
    assert reader.read() == b"last" and reader.read() is None


def test_a_reader_that_has_gone_is_noticed() -> None:
    writer, (stays, goes) = ring(num_slots=2)
    goes.close()
    with pytest.raises(BrokenPipeError):
        for _ in range(3):
            writer.write(b"x")
            stays.read()
    writer.close()
