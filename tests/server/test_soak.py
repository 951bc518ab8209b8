"""The soak in short; `make soak-server` is the long one."""

from __future__ import annotations

from random import Random

import pytest

from tests.server.kill import Victims, kill_once, kill_the_server, rank_of_server, replica_of_server
from tests.server.soak import check_memory, soak
from tests.thorough import THOROUGH, times


@pytest.mark.slow
def test_mixed_traffic_leaves_nothing_behind_and_is_all_in_the_metrics() -> None:
    num_requests = times(240, 400)
    soaked = soak(seed=0, num_requests=num_requests, num_clients=64)
    num_left = sum(seen.has_left for seen in soaked.all_seen)
    num_bad = sum(seen.ask.refused_with is not None for seen in soaked.all_seen)
    assert len(soaked.all_seen) == num_requests
    assert num_left >= num_requests / 5 and num_bad >= num_requests / 40
    assert soaked.ended["ended_abort"] >= num_left / 2  # few of those who hang up come too late for that
    check_memory(soaked.memory)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_a_killed_engine_process_ends_every_request_with_an_error_and_the_server_with_a_code(seed: int) -> None:
    death = kill_once(Random(seed), num_streams=16)
    assert death.exit_code == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "victims"),
    [
        ("--tensor-parallel-size", rank_of_server(1)),
        *([("--pipeline-parallel-size", rank_of_server(0))] if THOROUGH else []),
        ("--data-parallel-size", replica_of_server(1)),
    ],
)
def test_a_killed_rank_or_replica_ends_every_request_within_five_seconds(settings: str, victims: Victims) -> None:
    """deaths.py does it twenty times in a row."""
    death = kill_once(Random(2), settings=(settings, "2", "--device", "cpu"), victims=victims)
    assert death.exit_code == 1 and death.seconds_of_streams < 5


@pytest.mark.slow
def test_a_killed_server_leaves_no_rank_behind() -> None:
    kill_the_server(("--tensor-parallel-size", "2", "--device", "cpu"))
