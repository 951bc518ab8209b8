"""An engine's clock stands still while the engine rests."""

from __future__ import annotations

import pytest

from teachllm.engine.observability import engine_clock
from teachllm.engine.observability.engine_clock import EngineClock


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    seconds = [100.0]
    monkeypatch.setattr(engine_clock.time, "perf_counter", lambda: seconds[0])
    return seconds


def test_it_counts_all_but_the_rests(now: list[float]) -> None:
    clock = EngineClock()
    assert clock() == 100.0
    now[0] = 101.0
    clock.hold()
    now[0] = 106.0
    assert clock() == 101.0
    clock.hold()  # it is held already
    clock.go_on()
    clock.go_on()
    assert clock() == 101.0
    now[0] = 107.5
    assert clock() == 102.5


def test_it_may_begin_at_any_time(now: list[float]) -> None:
    clock = EngineClock(3.0)
    clock.hold()
    now[0] = 150.0
    assert clock() == 3.0
    clock.go_on()
    now[0] = 151.0
    assert (clock(), clock.at(150.5)) == (4.0, 3.5)


def test_moments_of_other_processes_have_their_place_on_it(now: list[float]) -> None:
    clock = EngineClock()
    for begin, end in ((110.0, 120.0), (125.0, 126.0), (130.0, 140.0)):
        now[0] = begin
        clock.hold()
        now[0] = end
        clock.go_on()
    moments = {99.0: 99.0, 105.0: 105.0, 110.0: 110.0, 115.0: 110.0, 120.0: 110.0, 124.0: 114.0, 125.5: 115.0}
    moments |= {129.0: 118.0, 135.0: 119.0, 141.0: 120.0}
    assert {moment: clock.at(moment) for moment in moments} == moments
    now[0] = 145.0
    clock.hold()
    now[0] = 155.0
    assert clock.at(150.0) == clock() == 124.0
