"""Whatever a reader has written, the notebook goes on."""

from __future__ import annotations

import contextlib
import sys
import time
from typing import Any

import pytest

from teachllm.core.block_pool import Block, BlockPool
from teachllm.core.policy import FirstComeFirstServed
from teachllm.engine.overrides import EngineOverrides
from teachllm_lessons.exercise import VERDICT_TYPE, Exercise, Wrong, check, run_with
from teachllm_lessons.guard import Seconds, TooLong, _Alarm, run_guarded
from teachllm_lessons.watch import NoProgress, Watch
from tests.waiting import HANG_SECONDS

LONG = Seconds(HANG_SECONDS, HANG_SECONDS)


def double(contract: Any = lambda piece: int(piece(2) == 4), live: Any = lambda piece: "It ran.") -> Exercise:
    return Exercise("99", "double", contract, live, lambda x: 2 * x, ("one", "two", "three"))


def for_ever(x: int) -> int:
    while True:
        x += 1


def for_ever_and_catches_all(x: int) -> int:
    while True:
        with contextlib.suppress(Exception):
            x += 1


def unwritten(x: int) -> int:
    raise NotImplementedError


@pytest.mark.parametrize(
    ("piece", "words"),
    [
        (for_ever, "was still running after"),
        (for_ever_and_catches_all, "does a loop of it never end"),
        (lambda x: 1 // 0, "raised ZeroDivisionError"),
        (lambda x: sys.exit(3), "ended the program"),
        (None, "raised TypeError: 'NoneType' object is not callable"),
    ],
)
def test_it_is_told_what_its_code_did_and_gets_the_engines_own(piece: Any, words: str) -> None:
    never_ends = piece in (for_ever, for_ever_and_catches_all)
    checked = check(double(), piece, Seconds(0.2, HANG_SECONDS) if never_ends else LONG)
    assert not checked.is_right and words in checked.message
    assert checked.piece(3) == 6
    assert "`DOUBLE.hint(1)` may help" in checked.message


def computes(piece: Any) -> int:
    for _ in range(2_000_000):
        pass
    return int(piece(2) == 4)


def waits(piece: Any) -> int:
    for _ in range(10):
        time.sleep(0.01)
    return int(piece(2) == 4)


@pytest.mark.parametrize("slow", [computes, waits])
@pytest.mark.parametrize("limit", [Seconds(0.02, HANG_SECONDS), Seconds(HANG_SECONDS, 0.02), Seconds(0.02, 0.02)])
def test_a_right_piece_is_right_where_the_engines_own_is_as_slow(slow: Any, limit: Seconds) -> None:
    assert check(double(contract=slow), lambda x: x + x, limit).is_right
    assert check(double(live=lambda piece: f"{slow(piece)}"), lambda x: x + x, limit).is_right


@pytest.mark.parametrize(("piece", "verdict"), [(lambda x: x + x, "unjudged"), (unwritten, "unwritten")])
def test_nothing_is_said_of_a_piece_where_the_engines_own_is_not_done_in_time(piece: Any, verdict: str) -> None:
    def contract(piece: Any) -> int:
        piece(2)
        return for_ever(1)

    checked = check(double(contract=contract), piece, Seconds(0.02, HANG_SECONDS), longest=Seconds(0.1, HANG_SECONDS))
    assert checked.verdict == verdict and checked.piece(3) == 6
    assert "cannot be judged now: the reference was not done after" in checked.message
    assert "loop" not in checked.message and "holds in" not in checked.message


def test_what_is_not_written_yet_is_done_by_the_engines_own() -> None:
    checked = check(double(), unwritten)
    assert checked.message == "is not written yet, so the engine's own takes its place: it holds in 1 cases. It ran."
    assert checked.piece(3) == 6
    assert checked._repr_mimebundle_()[VERDICT_TYPE]["verdict"] == "unwritten"


def test_a_contract_says_what_is_wrong_and_so_does_the_engine() -> None:
    def never(piece: Any) -> str:
        raise Wrong("says other words")

    assert check(double(live=never), lambda x: 2 * x).message.startswith("keeps its contract, and fails in the engine")
    right = check(double(), lambda x: x + x)
    assert right.is_right and right.message == "keeps its contract in 1 cases. It ran."


def test_an_alarm_that_comes_too_late_rings_nowhere() -> None:
    alarm = _Alarm(LONG)
    with alarm:
        pass
    alarm._ring()  # the timer had fired just before it was to be cancelled
    assert not alarm._has_rung


def test_an_alarm_that_comes_at_the_last_moment_is_not_left_for_what_follows() -> None:
    alarm = _Alarm(LONG)
    with pytest.raises(TooLong), alarm:
        alarm._ring()


def test_ctrl_c_is_the_readers_own() -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_guarded(interrupted, LONG)


class Leaky(BlockPool):
    def release(self, blocks: Any) -> None:
        super().release(list(blocks)[1:])


class Greedy(BlockPool):
    def take(self, count: int) -> list[Block]:
        return super().take(count + 1)[:count]


class Closed(FirstComeFirstServed):
    def opens_batch(self, num_running: int) -> bool:
        return False


def test_a_pool_that_loses_blocks_is_found_out() -> None:
    for pool in (Leaky, Greedy):
        ran = run_guarded(lambda pool=pool: run_with(EngineOverrides(make_pool=pool)), LONG)
        assert ran.error is not None and "block" in str(ran.error).lower()


def test_a_policy_that_admits_nobody_does_not_hang() -> None:
    ran = run_guarded(lambda: run_with(EngineOverrides(policy=Closed())), LONG)
    assert isinstance(ran.error, NoProgress) and "nothing is computed any more" in str(ran.error)


def test_the_next_engine_is_whole() -> None:
    with Watch(num_gpu_blocks_override=16, max_model_len=128) as watch:
        watch.add("A", "What is a KV cache?", 4)
        assert len(watch.run().tokens("A")) == 4
