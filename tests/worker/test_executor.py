"""What an executor says once it is closed."""

from __future__ import annotations

import pytest

from teachllm.worker.executor import InProcessExecutor
from tests.worker.engines import make_engine


def test_a_closed_executor_lets_go_of_the_model_and_says_so() -> None:
    engine = make_engine()
    executor = engine.core.executor
    assert isinstance(executor, InProcessExecutor) and executor.num_blocks == 120
    engine.add_request("a", [1, 2, 3])
    engine.close()
    with pytest.raises(RuntimeError, match=r"^the engine is closed$"):
        engine.step()
    assert executor._runner is None
