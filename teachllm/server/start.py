"""The one place where the server meets the engine: how it is started, and what the server uses of it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from teachllm.config import EngineConfig
from teachllm.engine.observability.stats import StepStats
from teachllm.outputs import RequestOutput
from teachllm.sampling_params import SamplingParams
from teachllm.startup_progress import StartupProgress

if TYPE_CHECKING:
    from teachllm.engine.processes.text_workers import TextWorkers
    from teachllm.engine.text.tokenizer import Tokenizer


class EngineClient(Protocol):
    """Define what the server uses of `AsyncLLM`."""

    @property
    def config(self) -> EngineConfig: ...
    @property
    def tokenizer(self) -> Tokenizer | None: ...
    @property
    def generation_defaults(self) -> dict[str, Any]: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def num_blocks(self) -> int: ...
    async def submit(
        self, prompt: Any, sampling_params: SamplingParams, request_id: str, **options: Any
    ) -> AsyncIterator[RequestOutput]: ...
    async def abort(self, request_id: str) -> None: ...
    async def reset_prefix_cache(self) -> None: ...
    def close(self) -> None: ...


def start_engine(
    config: EngineConfig,
    *,
    on_stats: Callable[[StepStats], None],
    on_end: Callable[[Exception | None], None],
    trace_sinks: Sequence[Callable[[str], None]] = (),
    progress: StartupProgress | None = None,
) -> EngineClient:
    """Loads the model; takes as long as that takes.

    Args:
        on_stats: called in a thread of the engine's after every step.
        on_end: called in a thread of the engine's when it ends, with the error if it was not closed.
        trace_sinks: one for each replica takes the lines of its trace; none: nothing is traced.
        progress: called in a thread of the engine's.

    Raises:
        ValueError: the checkpoint or the settings are refused.
    """
    from teachllm.engine.async_llm import AsyncLLM

    return AsyncLLM.start(
        config, own_process=True, on_stats=on_stats, on_end=on_end, trace_sink=trace_sinks, progress=progress
    )


def start_text_workers(config: EngineConfig) -> TextWorkers:
    """Starts the processes that work on strangers' texts; returns while they load.

    Raises:
        ValueError: there is no such model.
    """
    from teachllm.engine.processes.text_workers import TextWorkers as Workers

    return Workers.start(config)


def has_died(error: Exception) -> bool:
    """Return whether this is the engine's end, and not only a request's."""
    from teachllm.engine.llm_engine import EngineDeadError

    return isinstance(error, EngineDeadError)
