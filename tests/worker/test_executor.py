"""Which device a setting means, and what an executor says when it is closed."""

from __future__ import annotations

import pytest
import torch

from teachllm.worker.executor import InProcessExecutor, select_device
from tests.worker.doors import make_engine


def test_a_device_is_found_by_its_name_and_the_processor_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert select_device("cpu") == torch.device("cpu")
    assert select_device("auto") == torch.device("cpu")
    assert select_device("cuda") == torch.device("cuda")
    assert select_device("cuda:1") == torch.device("cuda:1")


@pytest.mark.parametrize("name", ["gpu", "cuda:x", "", "mps", "meta", "cuda:-1"])
def test_an_unknown_device_lists_those_there_are(name: str) -> None:
    with pytest.raises(ValueError, match=f"^device='{name}': use auto, cpu, cuda or cuda:N$"):
        select_device(name)


@pytest.mark.parametrize(("name", "count"), [("cuda", 0), ("cuda:0", 0), ("cuda:2", 2)])
def test_a_gpu_that_is_not_there_says_how_many_are(monkeypatch: pytest.MonkeyPatch, name: str, count: int) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    with pytest.raises(ValueError, match=f"^device='{name}': this machine has {count} CUDA devices; use device=cpu$"):
        select_device(name)


def test_a_closed_executor_lets_go_of_the_model_and_says_so() -> None:
    engine = make_engine()
    executor = engine.core.executor
    assert isinstance(executor, InProcessExecutor) and executor.num_blocks == 120
    engine.add_request("a", [1, 2, 3])
    engine.close()
    with pytest.raises(RuntimeError, match=r"^the engine is closed$"):
        engine.step()
    assert executor._runner is None
