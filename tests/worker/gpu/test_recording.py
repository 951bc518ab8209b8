"""When what is recorded runs before: where something is launched for the first time, and at all ranks or at none."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from teachllm.worker.gpu import cuda_graphs
from teachllm.worker.gpu.cuda_graphs import Graphs
from teachllm_kernels.first_launch import FirstLaunchError


class _Stands:
    """For a stream, or a graph that holds nothing."""

    pools: list[int]

    def __init__(self, *args: Any) -> None: ...

    def wait_stream(self, other: Any) -> None: ...

    def capture_begin(self, pool: int, capture_error_mode: str) -> None:
        self.pools.append(pool)

    def capture_end(self) -> None: ...


@pytest.fixture
def pools(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The pool of each recording that was begun; a machine without a GPU records nothing."""
    numbers = itertools.count()
    _Stands.pools = []
    for name in ("CUDAGraph", "Stream", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, _Stands)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: next(numbers))
    monkeypatch.setattr(cuda_graphs, "weak_tensor", lambda tensor: tensor)
    return _Stands.pools


def runs(*errors: Exception | None) -> tuple[list[bool], Callable[[], None]]:
    """Return what is to be recorded, which raises these errors, one per run, and a list with an entry for each run."""
    done, left = list[bool](), list(errors)

    def run() -> None:
        done.append(True)
        if left and (error := left.pop(0)) is not None:
            raise error

    return done, run


def test_only_the_first_recording_and_first_launches_run_before(pools: list[int]) -> None:
    graphs = Graphs(torch.device("cpu"))
    counts = []
    for errors in ((), (), (FirstLaunchError("_pick"),), ()):
        done, run = runs(*errors)
        assert graphs.capture(str(len(counts)), run)
        counts.append(len(done))
    assert counts == [2, 1, 3, 1] and set(pools) == {0}


def test_with_other_ranks_everything_runs_before_since_they_would_wait(pools: list[int]) -> None:
    graphs = Graphs(torch.device("cpu"), is_shared=True)
    for key in "abc":
        done, run = runs()
        assert graphs.capture(key, run) and len(done) == 2


def test_after_a_failure_everything_runs_before_and_the_pool_is_another(pools: list[int]) -> None:
    graphs = Graphs(torch.device("cpu"))
    assert graphs.capture("a", runs()[1])
    done, run = runs(RuntimeError("not permitted"))
    assert graphs.capture("b", run) and len(done) == 3  # without, before and with
    done, run = runs()
    assert graphs.capture("c", run) and len(done) == 2
    assert pools == [0, 0, 1, 1]


def test_what_could_not_be_recorded_is_not_tried_again_and_a_first_launch_gets_a_pool_of_its_own(
    pools: list[int],
) -> None:
    graphs = Graphs(torch.device("cpu"))
    failing = runs(None, RuntimeError("not permitted"))[1]
    with pytest.warns(UserWarning, match="running without a CUDA graph for a, .*: not permitted"):
        assert not graphs.capture("a", failing)
    done, run = runs()
    assert not graphs.capture("a", run) and not done and not graphs.has("a")
    assert graphs.capture("b", run) and graphs.has("b")
