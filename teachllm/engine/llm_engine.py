"""Engine: requests in, growing outputs out, one step at a time. The door beneath `LLM` and every server.

engine = Engine(EngineConfig(model="teachlm"))
engine.add_request("a", "What is a KV cache?", SamplingParams(max_tokens=50))
while engine.has_unfinished_requests:
    for output in engine.step():
        print(output.outputs[0].text)

Text stays on this side. What schedules and computes is the core: in this process, or in one of its own
(`core_process.py`), which then steps by itself, and `step` takes what it has done.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol, cast

from teachllm.config import EngineConfig
from teachllm.core.in_flight import RequestUpdate
from teachllm.core.request import FinishReason, Request
from teachllm.engine.input_processor import InputProcessor, PreparedPrompt, Prompt
from teachllm.engine.observability.stats import StepStats
from teachllm.engine.output_processor import OutputProcessor
from teachllm.engine.overrides import NO_OVERRIDES, EngineOverrides
from teachllm.engine.text.tokenizer import Tokenizer
from teachllm.engine.text.trace_texts import TraceTexts
from teachllm.models.model_config import ModelConfig
from teachllm.outputs import RequestOutput
from teachllm.sampling_params import SamplingParams
from teachllm.startup_progress import StartupProgress
from teachllm.trace.recorder import Recorder
from teachllm.worker.errors import EngineDeadError as EngineDeadError
from teachllm.worker.errors import FailedStepError
from teachllm.worker.processes.torchrun import works_for_process_0

if TYPE_CHECKING:
    from teachllm.engine.engine_core import EngineCore
    from teachllm.spec_decode.drafter import Drafter
    from teachllm.worker.executor import Executor


TraceSink = Callable[[str], None]
_HERE = "own_process=False and data_parallel_size=1"


class Core(Protocol):
    """Define what an engine needs of its core, wherever that is. The words are those of `EngineCore`."""

    config: EngineConfig

    def add(self, request: Request) -> None: ...

    def finish(self, request_id: str, reason: FinishReason, stop_reason: str | int | None = None) -> bool: ...

    def step(self) -> list[RequestUpdate]: ...

    def reset_prefix_cache(self) -> None: ...

    def count(self) -> None: ...

    def stats(self) -> StepStats | None: ...

    @property
    def clock(self) -> Callable[[], float]: ...

    @property
    def num_blocks(self) -> int: ...

    @property
    def unfinished_ids(self) -> list[str]: ...

    @property
    def has_unfinished(self) -> bool: ...

    def close(self) -> None: ...


class Engine:
    """Model, tokenizer and core.

    Args:
        config: what to run and how.
        own_process: the core gets one; needs the extra "serve". With `data_parallel_size` above 1 each replica does.
        recorder: writes a trace, in place of the engine's own.
        trace_sink: takes the lines of the engine's own trace, beside the file in `config.trace_path` if there is one;
            with replicas, one for each.
        progress: called with (stage, how much is done, of what), see `startup_progress.py`.
        make_executor: replaces the in-process executor; given the resolved configuration and the executor it
            would have used.
        drafter: proposes tokens, with the speculative method "custom"; see `spec_decode/drafter.py`.
        overrides: parts of your own in place of the engine's; see `engine/overrides.py`.

    Attributes:
        config: as resolved for the model.
        is_elsewhere: the core has a process of its own: it steps by itself, `step` waits until it tells something,
            and `interrupt` ends that wait.

    Raises:
        ValueError: the checkpoint or the settings are refused; one line says why and what to change.
        SystemExit: torchrun has started this process to have a rank of another one's engine, and that has ended.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        own_process: bool = False,
        recorder: Recorder | None = None,
        trace_sink: TraceSink | Sequence[TraceSink] | None = None,
        progress: StartupProgress | None = None,
        make_executor: Callable[[EngineConfig, Executor[Any]], Executor[Any]] | None = None,
        drafter: Drafter | None = None,
        overrides: EngineOverrides = NO_OVERRIDES,
    ) -> None:
        sinks = [trace_sink] if callable(trace_sink) else list(trace_sink or ())
        if len(sinks) not in (0, config.data_parallel_size):
            raise ValueError(
                f"each of data_parallel_size={config.data_parallel_size} replicas has a trace of its own, and there is "
                f"a trace_sink for {len(sinks)}: give a list with one for each, or set data_parallel_size={len(sinks)}"
            )
        if works_for_process_0(config):
            raise SystemExit(0)
        self.is_elsewhere = own_process or config.data_parallel_size > 1
        self._core: Core
        self.model_config: ModelConfig
        self.tokenizer: Tokenizer | None
        if self.is_elsewhere:
            there = {"recorder": recorder, "make_executor": make_executor, "drafter": drafter} | overrides.given()
            there.pop("choose_replica", None)  # that is done here
            if given := ", ".join(name for name, each in there.items() if each is not None):
                raise ValueError(f"{given}: objects of this process, and the core would be elsewhere: set {_HERE}")
            try:
                from teachllm.engine.processes.core_client import CoreClient
            except ModuleNotFoundError as error:
                raise ImportError(
                    f"a core in a process of its own talks over zmq: pip install 'teachllm[serve]', or set {_HERE}"
                ) from error

            client = CoreClient(config, trace_sinks=sinks, progress=progress, **overrides.given("choose_replica"))
            self._core, self.model_config, self.tokenizer = client, client.model_config, client.tokenizer
        else:
            from teachllm.engine.make_core import make_core

            self._core, self.model_config, self.tokenizer = make_core(
                config,
                recorder=recorder,
                trace_sink=sinks[0] if sinks else None,
                progress=progress,
                make_executor=make_executor,
                drafter=drafter,
                overrides=overrides,
            )
        self.config = self._core.config
        eos_token_id = None if self.tokenizer is None else self.tokenizer.eos_token_id
        if eos_token_id is not None:  # a fine-tuned model's config may be its base's, its tokenizer is its own
            ids = self.model_config.eos_token_ids | {eos_token_id}
            self.model_config = replace(self.model_config, eos_token_ids=ids)
        self.inputs = InputProcessor(self.config, self.model_config, self.tokenizer)
        self._outputs = OutputProcessor(self.tokenizer)
        self.trace_texts = TraceTexts(self.tokenizer)

    @property
    def core(self) -> EngineCore:
        """Return scheduler and executor, to look at; they are there only if they are in this process."""
        if self.is_elsewhere:
            raise RuntimeError(
                f"the engine's core is in a process of its own and cannot be looked at from here: set {_HERE}"
            )
        return cast("EngineCore", self._core)

    def add_request(
        self,
        request_id: str,
        prompt: Prompt | PreparedPrompt,
        sampling_params: SamplingParams | None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        arrival_time: float | None = None,
    ) -> RequestOutput:
        """Add a request to the queue.

        Args:
            prompt: text, token ids, {"prompt": text} or {"prompt_token_ids": ids}; or what `inputs.prepare` has made of
                one, of its parameters and of its cache salt.
            priority: lower goes first, with scheduling_policy="priority".
            cache_salt: requests share KV only with others of the same salt.
            arrival_time: seconds on the recorder's clock, without one on `time.perf_counter`; None is now.

        Returns:
            Its output, still empty: the object that `step` returns whenever it has grown.

        Raises:
            ValueError: the id is taken, the prompt can never fit, or a parameter does not suit the model.
        """
        arrived = self._core.clock() if arrival_time is None else arrival_time
        if not isinstance(prompt, PreparedPrompt):
            prompt = self.inputs.prepare(prompt, sampling_params or SamplingParams(), cache_salt)
        children = self.inputs.requests(request_id, prompt, priority=priority, arrival_time=arrived)
        self._outputs.check_free(request_id, children)
        self._core.add(children[0])  # if one fits, all do
        output = self._outputs.add(request_id, prompt.text, prompt.token_ids, children)
        for child in children[1:]:
            self._core.add(child)
        self.inputs.num_requests += 1
        return output

    def adopt_request(self, request: Request) -> RequestOutput:
        """Add a request that has been under way in another engine to the queue; its output begins with what it has.

        Raises:
            ValueError: its id is taken, or it can never fit.
        """
        self._outputs.check_free(request.request_id, [request])
        self.core.add(request)
        output = self._outputs.add(request.request_id, None, list(request.prompt_token_ids), [request])
        if request.num_output_tokens:
            had = RequestUpdate(request, request.output_token_ids, 0, 0, None, None, 0)
            _, match = self._outputs.update(had, time.perf_counter())
            if match is not None:
                self.core.finish(request.request_id, FinishReason.STOP, match.stop)
        return output

    def step(self) -> list[RequestOutput]:
        """Compute one step; with a core elsewhere, wait for a step, for any other message, or for `interrupt`.

        Returns:
            The outputs that changed. An output is the same object at every step and grows; with asynchronous
            scheduling it is one step behind.

        Raises:
            EngineDeadError: the core's process has ended, or one that computes for it.
            FailedStepError: a core's elsewhere; the requests that it names are to be aborted, others go on.
            Exception: the step failed and was taken back; its requests may be aborted, or tried again.
        """
        changed: dict[str, RequestOutput] = {}
        try:
            updates = self._core.step()
        except FailedStepError as error:
            error.request_ids = self._outputs.owners(error.request_ids)
            raise
        now = time.perf_counter()
        for update in updates:
            if not update.new_token_ids and update.prompt_logprobs is None:
                continue
            output, match = self._outputs.update(update, now)
            if match is not None:
                self._core.finish(update.request.request_id, FinishReason.STOP, match.stop)
            changed[output.request_id] = output
        return list(changed.values())

    def abort_request(self, request_id: str) -> None:
        """End a request, or with "request#2" one of its completions, and release the blocks.

        Nothing happens if it has ended already.
        """
        for child_id in self._outputs.abort(request_id):
            self._core.finish(child_id, FinishReason.ABORT)

    def reset_prefix_cache(self) -> None:
        """Forget the content of every block that no request holds."""
        self._core.reset_prefix_cache()

    def count(self) -> None:
        """Start counting, for `stats`."""
        self._core.count()

    def stats(self) -> StepStats | None:
        """Return the state, and what was counted since the last call; None if nothing has been reported since."""
        return self._core.stats()

    def interrupt(self) -> None:
        """End the wait of a `step` in another thread, or of the next one."""
        if self.is_elsewhere:
            cast(Any, self._core).interrupt()

    @property
    def num_blocks(self) -> int:
        """Return how many blocks the KV cache has; of replicas, each."""
        return self._core.num_blocks

    @property
    def unfinished_ids(self) -> list[str]:
        """Return the ids of all requests under way; with more than one completion, "request#0" and so on."""
        return self._core.unfinished_ids

    @property
    def has_unfinished_requests(self) -> bool:
        return self._core.has_unfinished

    @property
    def generation_defaults(self) -> dict[str, Any]:
        """Return the sampling settings that the checkpoint recommends, under SamplingParams' names."""
        return dict(self.model_config.generation_defaults)

    def close(self) -> None:
        """Release the model's memory; the engine cannot be used after this."""
        self._core.close()
