"""A server in a process of its own, under mixed traffic and when one of its processes dies.

`make soak-server` does the same with thousands of requests, and kills each kind of process twenty times.
"""

from __future__ import annotations

import os
import signal
from random import Random

import pytest

from tests.server.fake_engine import chunks, error_of
from tests.server.kill import Victims, kill_once, kill_the_server, rank_of_server, replica_of_server
from tests.server.process import engine_processes, started
from tests.server.soak import check_memory, load, settle
from tests.server.traffic import SETTINGS
from tests.thorough import THOROUGH, times
from tests.waiting import HANG_SECONDS

SEED = 113  # of requests of which many are broken, or hang up, among the first few
only_thorough = pytest.mark.skipif(not THOROUGH, reason="starts many processes: make test-thorough")


@pytest.mark.slow
def test_mixed_traffic_leaves_nothing_behind_and_a_server_that_is_told_to_end_finishes_what_is_open() -> None:
    num_requests = times(14, 400)
    with started("teachlm", *SETTINGS, "--shutdown-timeout", str(HANG_SECONDS)) as process:
        process.event("ready")
        assert process.http.get("/health").json() == {"status": "healthy"}
        found = load(process, seed=SEED, num_requests=num_requests, num_clients=times(7, 64))
        with process.stream({"prompt": "a", "max_tokens": 60, "ignore_eos": True, "stream": True}) as stream:
            pieces = stream.iter_text()
            text = next(pieces)
            for pid in (process.child.pid, *engine_processes(process.child.pid)):  # as systemd does
                os.kill(pid, signal.SIGTERM)
            process.event("ending")
            error_of(process.http.post("/v1/completions", json={"prompt": "a"}), 503)
            text += "".join(pieces)
        assert chunks(text)[-1]["choices"][0]["finish_reason"] == "length"
        assert process.end() == 0
        ended = settle(process, found)
    assert len(found.all_seen) == num_requests
    assert sum(seen.has_left for seen in found.all_seen) >= num_requests / 5
    assert sum(seen.ask.refused_with is not None for seen in found.all_seen) >= num_requests / 40
    assert min(ended["ended_abort"], ended["ended_length"], ended["ended_stop"]) > 0
    if THOROUGH:
        check_memory(found.memory)


@only_thorough
@pytest.mark.parametrize("seed", range(3))
def test_a_killed_engine_process_ends_every_request_with_an_error_and_the_server_with_a_code(seed: int) -> None:
    """In `make test` it is one of two replicas: test_data_parallel.py."""
    assert kill_once(Random(seed)).exit_code == 1


@only_thorough
@pytest.mark.parametrize(
    ("settings", "victims"),
    [
        ("--tensor-parallel-size", rank_of_server(1)),
        ("--pipeline-parallel-size", rank_of_server(0)),
        ("--data-parallel-size", replica_of_server(1)),
    ],
)
def test_a_killed_rank_or_replica_ends_every_request(settings: str, victims: Victims) -> None:
    """deaths.py does it twenty times in a row."""
    assert kill_once(Random(2), settings=(settings, "2", "--device", "cpu"), victims=victims).exit_code == 1


@only_thorough
def test_a_killed_server_leaves_no_rank_behind() -> None:
    kill_the_server(("--tensor-parallel-size", "2", "--device", "cpu"))
