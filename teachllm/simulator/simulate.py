"""A simulation: the real engine core, stepped on a clock of its own until a workload is done.

config = EngineConfig(max_num_seqs=64, num_gpu_blocks_override=2000)
result = simulate(config, Workload(num_requests=300, rate=50, prompt_len=(50, 500)), model_shape("qwen3-8b"))
print(result.figures.ttft.p99)

Requests that arrive during a step are queued when it is over, as by a server whose loop is busy; they have waited since
they arrived.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from teachllm.config import EngineConfig
from teachllm.core.memory import KVCacheSpec
from teachllm.core.request import Request
from teachllm.engine.engine_core import EngineCore, describe
from teachllm.engine.observability.ceilings import known_ceilings
from teachllm.engine.observability.step_roofline import StepRoofline
from teachllm.engine.overrides import NO_OVERRIDES, EngineOverrides
from teachllm.models.model_config import ModelConfig
from teachllm.roofline import Ceilings
from teachllm.sampling_params import SamplingParams
from teachllm.simulator.cost_model import CostModel, RooflineCost
from teachllm.simulator.executor import HostScheduler, SimulatedExecutor, VirtualClock
from teachllm.simulator.shapes import model_shape
from teachllm.simulator.workload import Arrival, Workload, arrivals_of
from teachllm.trace.figures import Figures, figures
from teachllm.trace.recorder import Recorder

DEFAULT_DEVICE = "NVIDIA H200"


@dataclass(frozen=True)
class Simulation:
    """Describe what came of it.

    Attributes:
        config: as resolved.
        lines: the trace, without text or token ids, see docs/trace.md.
        figures: of the whole run.
    """

    config: EngineConfig
    lines: list[str]
    figures: Figures


def simulate(
    config: EngineConfig,
    workload: Workload | Sequence[Workload | Arrival],
    model: ModelConfig | None = None,
    ceilings: Ceilings | None = None,
    num_blocks: int | None = None,
    *,
    cost: CostModel | None = None,
    overrides: EngineOverrides = NO_OVERRIDES,
) -> Simulation:
    """Runs a workload through the engine on a pretended device.

    Args:
        config: scheduling and KV cache settings are the engine's own; those of kernels, files and sampling mean nothing
            here. device="auto" is a GPU, on which other defaults hold than on a CPU.
        model: its shape, see `model_shape`; None is "teachlm".
        ceilings: of the device, for the model's dtype; None is an H200's.
        num_blocks: KV blocks; None is what the config asks for (`num_gpu_blocks_override`, `kv_cache_memory_bytes`), or
            without that room for all requests that may run at once.
        cost: how long steps take; None is `RooflineCost` with its defaults.
        overrides: of the scheduler and its loop, see `engine/overrides.py`.

    Raises:
        ValueError: settings contradict each other, the ceilings are not known or for another dtype, or a request can
            never run; one line says what to change.
        RuntimeError: requests wait and none of them is ever admitted, by a policy of your own.
    """
    if config.speculative_config is not None:
        raise ValueError("speculative_config: a simulation has no text that drafts could match: leave it out")
    if config.data_parallel_size != 1:
        raise ValueError(f"data_parallel_size={config.data_parallel_size}: a simulation is of one replica: set it to 1")
    if num_blocks is not None and num_blocks < 1:
        raise ValueError(f"num_blocks={num_blocks}: must be at least 1, or None for as many as can be of use")
    model = replace(model or model_shape(), kv_cache_dtype=config.kv_cache_dtype)
    ceilings = ceilings or known_ceilings(DEFAULT_DEVICE, model.dtype)
    if ceilings is None:
        raise ValueError(f"no ceilings are known of an {DEFAULT_DEVICE} in {model.dtype}: give ceilings=, or bfloat16")
    device = "cuda" if config.device == "auto" else config.device
    config = replace(config, model=model.path, device=device, trace_path=None).resolve(model.max_model_len)
    arrivals = arrivals_of(workload, model.vocab_size)
    cost = cost or RooflineCost(model, ceilings)
    clock, lines = VirtualClock(), list[str]()
    executor = SimulatedExecutor(
        num_blocks or _num_blocks(config, model, arrivals), cost, clock, model.vocab_size, model.eos_token_ids
    )
    recorder = Recorder(lines.append, clock)
    recorder.key = None  # no user's tokens are in it, and the same run gives the same lines
    scheduler = HostScheduler(config, executor.num_blocks, clock, cost, overrides)
    roofline = StepRoofline(model, ceilings)
    core = EngineCore(
        config, executor, recorder=recorder, clock=clock, roofline=roofline, scheduler=scheduler, overrides=overrides
    )
    shape = {"path": model.path, "architecture": model.architecture, "dtype": model.dtype}
    machine = {"device": f"{ceilings.device}, simulated", "ceilings": asdict(ceilings)}
    recorder.header(describe(config), shape, executor.num_blocks, machine=machine)
    _run(core, clock, arrivals, model)
    return Simulation(config, lines, figures(lines))


def _run(core: EngineCore, clock: VirtualClock, arrivals: Sequence[Arrival], model: ModelConfig) -> None:
    """Adds requests as they come and steps until all is done."""
    coming = deque(enumerate(arrivals))
    while coming or core.has_unfinished:
        if not core.has_unfinished:
            clock.wait_until(coming[0][1].time)
        while coming and coming[0][1].time <= clock.now:
            for request in _requests(*coming.popleft(), model):
                core.add(request)
        before = core.scheduler.num_steps, len(core.scheduler.in_flight)
        core.step()
        if before == (core.scheduler.num_steps, 0):
            raise RuntimeError("requests wait, nothing runs, and the policy admits no request: see its opens_batch")


def _requests(index: int, arrival: Arrival, model: ModelConfig) -> list[Request]:
    """An arrival's completions, as the engine makes them."""
    params = SamplingParams(n=arrival.n, temperature=0.0, max_tokens=arrival.max_tokens, ignore_eos=True)
    return [
        Request(
            request_id=str(index) if arrival.n == 1 else f"{index}#{child}",
            prompt_token_ids=arrival.prompt_token_ids,
            sampling_params=params,
            eos_token_ids=model.eos_token_ids,
            arrival_time=arrival.time,
            priority=arrival.priority,
            group=str(index) if arrival.n > 1 else None,
            child_index=child,
        )
        for child in range(arrival.n)
    ]


def _num_blocks(config: EngineConfig, model: ModelConfig, arrivals: Sequence[Arrival]) -> int:
    """As many as the settings ask for; without any, so many that no running request can want for one."""
    if config.num_gpu_blocks_override is not None:
        return config.num_gpu_blocks_override
    if config.kv_cache_memory_bytes is not None:
        layer = KVCacheSpec(model.num_kv_heads, model.head_size, model.kv_bytes)
        return config.kv_cache_memory_bytes // (model.num_layers * layer.bytes_per_token * config.block_size)
    assert config.max_num_seqs and config.max_model_len
    lengths = (min(len(a.prompt_token_ids) + a.max_tokens, config.max_model_len) for a in arrivals for _ in range(a.n))
    return sum(sorted((-(-length // config.block_size) for length in lengths), reverse=True)[: config.max_num_seqs])
