"""Replicas that share experts begin the same steps, in any order of what they say and hear, and all rest in the end."""

from __future__ import annotations

import os
import random

import pytest

from teachllm.distributed.lockstep import Lockstep, close_ends, lockstep_ends
from tests.thorough import times


@pytest.mark.parametrize("seed", range(times(5, 50)))
def test_all_take_as_many_steps_as_the_busiest_wants_and_then_rest(seed: int) -> None:
    draw, count = random.Random(seed), 3
    ends = lockstep_ends(count)
    try:
        replicas = [Lockstep(end) for end in ends]
        work = [draw.randrange(8) for _ in range(count)]
        num_begun, num_empty = [0] * count, [0] * count

        def turn(i: int) -> bool:
            """What its loop does: hears, and takes a step, of its own or an empty one; False: it rests."""
            replicas[i].hear()
            if not work[i] and not replicas[i].is_behind:
                return False
            if work[i]:
                work[i] -= 1
            else:
                num_empty[i] += 1
            replicas[i].begin()
            num_begun[i] += 1
            return True

        most = max(work)
        wanted = list(work)
        for _ in range(200):
            turn(draw.randrange(count))
        assert not any(turn(i) for i in range(count))
        assert num_begun == [most] * count
        assert num_empty == [most - each for each in wanted]
    finally:
        close_ends(ends)


def test_one_that_leaves_is_waited_for_and_one_that_is_gone_is_noticed() -> None:
    ends = lockstep_ends(3)
    replicas = [Lockstep(end) for end in ends]
    replicas[1].leave()
    replicas[0].begin()
    assert replicas[2].hear() and replicas[2].is_behind and not replicas[2].all_leave
    replicas[0].leave()
    assert replicas[2].hear() and replicas[2].all_leave and replicas[2].is_behind
    replicas[2].begin()
    for reader in (ends[0].hears, ends[1].hears):
        os.close(reader)
    replicas[2].begin()  # nobody hears of it
    assert replicas[2].hear()
    for writer in {each for end in ends for each in end.tells}:
        os.close(writer)
    assert not replicas[2].hear()
    os.close(ends[2].hears)
