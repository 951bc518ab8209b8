"""What cannot be recorded runs without a graph, is said once, and harms nothing that is recorded afterwards."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from teachllm.worker.gpu.cuda_graphs import AttentionCall, Graphs
from teachllm_kernels.first_launch import kept

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("in_pieces", [False, True])
def test_what_waits_for_the_device_is_not_recorded_and_not_tried_again(in_pieces: bool) -> None:
    x = torch.ones(4, device="cuda")
    graphs = Graphs(torch.device("cuda", 0))

    def run(outside: Callable[[AttentionCall], None] | None = None) -> torch.Tensor:
        y = x + 1
        if outside is not None:
            outside(lambda metadata: None)
        assert y.sum().item() == 8
        return y

    record = graphs.capture_pieces if in_pieces else graphs.capture
    assert not graphs.is_due("bad") and graphs.is_due("bad")
    with pytest.warns(UserWarning, match="running without a CUDA graph for bad"):
        assert not record("bad", run)
    assert not graphs.has("bad") and not graphs.is_due("bad")
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    assert run().tolist() == [2.0] * 4
    assert graphs.capture("good", lambda: x * 3)
    x.fill_(2.0)
    assert graphs.replay("good").tolist() == [6.0] * 4


def test_what_launches_for_the_first_time_runs_before_it_is_recorded() -> None:
    x, log = torch.ones(4, device="cuda"), list[str]()
    graphs = Graphs(torch.device("cuda", 0))
    counters = kept(lambda device: log.append("made") or torch.zeros(4, device=device))  # type: ignore[func-returns-value]

    def count() -> torch.Tensor:
        log.append("run")
        return counters(x.device).add_(x)

    assert graphs.capture("other", lambda: x + 1)
    assert graphs.capture("count", count) and log == ["run", "run", "made", "run"]
    counters(x.device).zero_()
    assert graphs.capture("again", count) and log[4:] == ["run"]
    for name, value in (("count", 1.0), ("again", 2.0), ("count", 3.0)):
        assert graphs.replay(name).tolist() == [value] * 4
