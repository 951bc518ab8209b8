"""Long work lets everything else go on, and short work does not wait."""

from __future__ import annotations

import asyncio

import pytest

from teachllm.server import turns
from teachllm.server.turns import Turns


@pytest.mark.parametrize(("longest", "seen"), [(-1.0, [0, 1, 2]), (1000.0, [0, 0, 0])])
def test_others_have_a_turn_after_every_piece_of_long_work(
    monkeypatch: pytest.MonkeyPatch, longest: float, seen: list[int]
) -> None:
    monkeypatch.setattr(turns, "_LONGEST", longest)
    num_turns = 0

    async def other() -> None:
        nonlocal num_turns
        while True:
            num_turns += 1
            await asyncio.sleep(0)

    async def work() -> list[int]:
        going_on = asyncio.create_task(other())
        found, mine = [], Turns()
        for _ in range(3):
            found.append(num_turns)
            await mine.pass_on()
        going_on.cancel()
        return found

    assert asyncio.run(work()) == seen
