"""The cost model lies above the floor, meets what was measured, and says what it cannot use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from teachllm import EngineConfig
from teachllm.bench.batch import Batch
from teachllm.bench.workloads import WORKLOADS
from teachllm.engine.observability.ceilings import known_ceilings
from teachllm.roofline import Ceilings
from teachllm.simulator.cost_model import RooflineCost, StepCosts
from teachllm.simulator.shapes import SHAPES, model_shape
from teachllm.simulator.simulate import simulate
from teachllm.simulator.workload import Arrival, Workload
from tests.simulator.engines import events, run, shape
from tests.thorough import THOROUGH

# The first table of docs/performance.md.
MEASURED = {
    "qwen3-0.6b": {
        "single": {"tpot_ms": 0.667, "ttft_ms": 2.04},
        "batch64": {"step_ms": 2.55, "prefill_tok_s": 537738},
        "long": {"step_ms": 4.00},
        "prefill16k": {"ttft_ms": 75.6},
    },
    "qwen3-8b": {
        "single": {"tpot_ms": 3.91, "ttft_ms": 5.85},
        "batch64": {"step_ms": 6.49, "prefill_tok_s": 46935},
        "long": {"step_ms": 8.22},
        "prefill16k": {"ttft_ms": 464},
    },
}


def clock(model: str) -> Callable[[Batch], float]:
    config = EngineConfig(max_model_len=20480)

    def seconds(batch: Batch) -> float:
        arrivals = [Arrival(0.0, ids, n) for ids, n in zip(batch.prompts, batch.output_lens, strict=True)]
        return simulate(config, arrivals, shape(model)).figures.duration

    return seconds


CASES = [(model, workload) for model, workloads in MEASURED.items() for workload in workloads]


@pytest.mark.parametrize(
    ("model", "workload"), CASES if THOROUGH else [("qwen3-0.6b", "prefill16k"), ("qwen3-8b", "single")]
)
def test_what_was_measured_on_an_h200_is_met(model: str, workload: str) -> None:
    found = WORKLOADS[workload](clock(model), shape(model).vocab_size, 0)
    for name, measured in MEASURED[model][workload].items():
        assert found[name] == pytest.approx(measured, rel=0.21 if name == "prefill_tok_s" else 0.08), name


def test_every_step_takes_longer_than_its_floor() -> None:
    workload = Workload(num_requests=30, shared_len=64, prompt_len=(20, 300), output_len=(5, 30), n=2)
    for name in ("teachlm", "qwen3-8b"):
        for step in events(run(workload, shape(name)).lines, "step"):
            assert 0 < step["roofline"]["floor"] < step["roofline"]["seconds"]


def test_a_slower_device_takes_longer_and_its_costs_can_be_given() -> None:
    card = known_ceilings("NVIDIA H200", "bfloat16")
    assert card is not None
    slow = Ceilings("slow", "bfloat16", card.read_bandwidth / 10, 1.0, card.gemm_flops / 10, card.attention_flops / 10)
    workload, model = Workload(num_requests=10), shape("qwen3-8b")
    fast = run(workload, model).figures.duration
    assert run(workload, model, more={"ceilings": slow}).figures.duration > 5 * fast
    free = RooflineCost(
        model,
        card,
        StepCosts(of_bandwidth=1.0, of_compute=1.0, decode_layer=0, prompt_layer=0, host_step=0, host_request=0),
    )
    result = run(workload, model, more={"cost": free})
    floor = sum(step["roofline"]["floor"] for step in events(result.lines, "step"))
    assert result.figures.duration == pytest.approx(floor)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"of_bandwidth": 1.5}, r"of_bandwidth=1.5: must be in \(0, 1\]"),
        ({"of_compute": 0.0}, r"of_compute=0.0: must be in \(0, 1\]"),
        ({"host_step": -1.0}, "host_step=-1.0: must be 0 seconds or more"),
    ],
)
def test_costs_out_of_their_range_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        StepCosts(**fields)


def test_ceilings_for_another_dtype_are_refused() -> None:
    wrong = Ceilings("card", "float32", 1e12, 1e12, 1e14, 1e14)
    with pytest.raises(ValueError, match="the ceilings of card are for float32 and the model is in bfloat16: give"):
        run(Workload(), more={"ceilings": wrong})
    with pytest.raises(ValueError, match="no ceilings are known of an NVIDIA H200 in float32: give ceilings="):
        run(Workload(), model_shape(dtype="float32"))


def test_shapes_are_found_by_name() -> None:
    assert all(model_shape(name).path == name for name in SHAPES)
    assert shape("qwen3-8b").path == "qwen3-8b"
    assert shape().eos_token_ids and shape("qwen3-0.6b").eos_token_ids
    with pytest.raises(ValueError, match="there is no such folder"):
        model_shape("./nowhere")
