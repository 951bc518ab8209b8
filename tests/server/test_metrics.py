"""What the server tells Prometheus about speculation, from what steps tell it."""

from __future__ import annotations

from teachllm.engine.observability.stats import StepStats
from teachllm.server.metrics import Metrics


def told(metrics: Metrics) -> dict[str, float]:
    lines = [line for line in metrics.text().decode().splitlines() if line.startswith("teachllm:spec_decode")]
    return {name.removeprefix("teachllm:spec_decode_"): float(value) for name, _, value in map(_split, lines)}


def _split(line: str) -> tuple[str, str, str]:
    return line.rpartition(" ")


def step(num_drafts: int, num_draft_tokens: int, per_pos: tuple[int, ...]) -> StepStats:
    counts = {"num_drafts": num_drafts, "num_draft_tokens": num_draft_tokens, "num_accepted_tokens": sum(per_pos)}
    return StepStats(1, 0, 0.1, 0, 0, 0, 10, 0, 5, **counts, num_accepted_tokens_per_pos=per_pos)


def test_drafts_add_up_over_steps_under_their_known_names() -> None:
    metrics = Metrics("m")
    label = '{model_name="m"}'
    names = [f"num_{what}_total{label}" for what in ("drafts", "draft_tokens", "accepted_tokens")]
    assert [told(metrics)[name] for name in names] == [0, 0, 0]
    metrics.on_step(step(2, 8, (2, 1)))
    metrics.on_step(step(1, 4, (1, 1, 1)))
    metrics.on_step(step(0, 0, ()))
    found = told(metrics)
    assert [found[name] for name in names] == [3, 12, 6]
    at = 'num_accepted_tokens_per_pos_total{{model_name="m",position="{}"}}'
    assert [found[at.format(position)] for position in range(3)] == [3, 2, 1]
    assert at.format(3) not in found
