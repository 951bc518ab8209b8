"""Short ways to a simulation, and a cost model whose sums can be done in one's head."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from teachllm import EngineConfig
from teachllm.core.scheduler_output import SchedulerOutput
from teachllm.models.model_config import ModelConfig
from teachllm.simulator.shapes import model_shape
from teachllm.simulator.simulate import Simulation, simulate
from teachllm.simulator.workload import Arrival, Workload

shape = cache(model_shape)


@dataclass(frozen=True)
class Constant:
    """Seconds of every step."""

    device: float = 0.010
    host: float = 0.003

    def device_seconds(self, plan: SchedulerOutput) -> float:
        return self.device

    def host_seconds(self, plan: SchedulerOutput) -> float:
        return self.host


def run(
    workload: Workload | Sequence[Workload | Arrival],
    model: ModelConfig | None = None,
    num_blocks: int | None = None,
    more: dict[str, Any] | None = None,
    **settings: Any,
) -> Simulation:
    """Of teachlm's shape, unless told otherwise; `more` is for `simulate`."""
    return simulate(EngineConfig(**settings), workload, model or shape(), num_blocks=num_blocks, **(more or {}))


def events(lines: Sequence[str], kind: str) -> list[dict[str, Any]]:
    return [event for event in map(json.loads, lines) if event["event"] == kind]
