"""Describe what an engine on the page is told beforehand: its settings, and which requests come before which step.

A preset is such a plan, and so is a fork: a trace's later arrivals, each before the step before which it came then.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from teachllm.config import EngineConfig
from teachllm.sampling_params import SamplingParams
from teachllm.trace.reader import Trace, parse_trace

if TYPE_CHECKING:  # the page is up before torch is loaded
    from teachllm.engine.llm_engine import Engine

# Settings that a fork may change, and what the page calls them.
FORKABLE = {
    "max_num_batched_tokens": "budget",
    "block_size": "block size",
    "num_gpu_blocks_override": "blocks",
    "max_num_seqs": "requests at once",
    "scheduling_policy": "policy",
    "enable_chunked_prefill": "chunked prefill",
}
UNTRUSTED = {"trust_remote_code": False, "load_format": "auto"}  # a fork of a file, whoever wrote it

MakeEngine = Callable[[Callable[[str], None]], "Engine"]


@dataclass(frozen=True, kw_only=True)
class PlannedRequest:
    """A request and when it comes.

    Attributes:
        prompt: text, or token ids.
        is_chat: the text is a user's message, to be put into the model's chat template.
        system: the system message of such a chat; "" is none.
        at_step: added before this step; with all other requests done, at once.
        cache_salt: as in `Engine.add_request`.
        name: its id; None makes one.
    """

    prompt: str | Sequence[int]
    params: SamplingParams = field(default_factory=SamplingParams)
    at_step: int = 0
    priority: int = 0
    is_chat: bool = False
    system: str = ""
    cache_salt: str | None = None
    name: str | None = None


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Describe what a run begins with.

    Attributes:
        make_engine: given the sink of its trace; loading happens here.
        requests: that come by themselves.
        under_way: ids of those that the engine has already.
        first_step: the number of its first step.
        work_before: of a fork, the original's seconds of work up to its first step.
    """

    make_engine: MakeEngine
    requests: Sequence[PlannedRequest] = ()
    under_way: Sequence[str] = ()
    first_step: int = 0
    work_before: float = 0.0


def engine_plan(config: EngineConfig, requests: Sequence[PlannedRequest] = ()) -> Plan:
    """An engine from its beginning; its trace also goes to its `trace_path`, if it has one."""

    def make(sink: Callable[[str], None]) -> Engine:
        from teachllm.engine.llm_engine import Engine

        if config.data_parallel_size > 1:
            raise ValueError(
                f"data_parallel_size={config.data_parallel_size}: the page steps one engine: set it to 1, or watch the "
                "replicas of a server (teachllm serve --trace-endpoint, teachllm viz --attach)"
            )
        return Engine(config, trace_sink=sink)

    return Plan(make_engine=make, requests=requests)


def fork_plan(lines: Sequence[str], step: int, changes: dict[str, Any], coming: Sequence[PlannedRequest] = ()) -> Plan:
    """An engine that goes on from a trace after a step of it, with other settings.

    Args:
        coming: those that come after the trace's end.

    Raises:
        ValueError: the settings are refused, or there is no such step.
    """
    from teachllm.engine.fork import fork, fork_config

    trace = parse_trace(line + "\n" for line in lines)
    index = next((i for i, line in enumerate(trace.lines) if line["event"] == "step" and line["step"] == step), None)
    if index is None:
        raise ValueError(f"there is no step {step} to fork at")
    state, at = trace.state_after(index + 1), trace.lines[index]["end"]
    config = fork_config(trace.header, **changes)
    return Plan(
        make_engine=lambda sink: fork(state, config, sink, at),
        requests=[*_later(trace, index + 1), *coming],
        under_way=[name for name, request in state.requests.items() if request.is_live],
        first_step=step + 1,
        work_before=_work(trace.lines[: index + 1]),
    )


def _work(lines: Sequence[Mapping[str, Any]]) -> float:
    """Return the seconds in which some step was under way, as the page's timeline counts them."""
    seconds, busy_until = 0.0, float("-inf")
    for line in lines:
        if line["event"] == "step":
            seconds += max(line["end"] - max(line["time"], busy_until), 0.0)
            busy_until = max(busy_until, line["end"])
    return seconds


def _later(trace: Trace, first: int) -> list[PlannedRequest]:
    """Requests that came after the first lines."""
    from teachllm.engine.fork import arrived_params

    found = []
    step = next(line["step"] + 1 for line in reversed(trace.lines[:first]) if line["event"] == "step")
    for line in trace.lines[first:]:
        if line["event"] == "step":
            step = line["step"] + 1
        elif line["event"] == "arrival" and line.get("child_index", 0) == 0:
            params = replace(arrived_params(line), seed=line.get("seed"))
            name = line.get("group") or line["request_id"]
            salts = [key.removeprefix("salt ") for key in line.get("cache_keys", ()) if key.startswith("salt ")]
            request = PlannedRequest(
                prompt=line["prompt_token_ids"],
                params=params,
                at_step=step,
                priority=line.get("priority", 0),
                cache_salt=salts[0] if salts else None,
                name=name,
            )
            found.append(request)
    return found
