"""Engine: requests in, growing outputs out, one step at a time. The door beneath `LLM` and every server.

engine = Engine(EngineConfig(model="teachlm"))
engine.add_request("a", "What is a KV cache?", SamplingParams(max_tokens=50))
while engine.has_unfinished_requests:
    for output in engine.step():
        print(output.outputs[0].text)
"""

from __future__ import annotations

import operator
import struct
import time
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from hashlib import sha256
from typing import Any

import numpy as np

from teachllm.config import EngineConfig
from teachllm.core.in_flight import RequestUpdate
from teachllm.core.prefix_cache import hash_root
from teachllm.core.request import FinishReason, Request
from teachllm.core.trace import Recorder
from teachllm.engine.ceilings import device_name, known_ceilings
from teachllm.engine.engine_core import EngineCore, describe
from teachllm.engine.output_processor import OutputProcessor
from teachllm.engine.step_roofline import StepRoofline
from teachllm.engine.tokenizer import Tokenizer
from teachllm.engine.trace_file import TraceFile
from teachllm.models.model_config import load_model_config
from teachllm.outputs import RequestOutput
from teachllm.sampling.validation import check_ids, check_params, check_some_token_allowed
from teachllm.sampling_params import SamplingParams
from teachllm.worker.executor import Executor, InProcessExecutor, select_device
from teachllm.worker.gpu_model_runner import GPUModelRunner
from teachllm.worker.model_runner import ModelRunner

Prompt = str | Sequence[int] | Mapping[str, Any]


class Engine:
    """Model, tokenizer and core.

    Args:
        config: what to run and how.
        recorder: writes a trace, in place of the engine's own.
        trace_sink: takes the lines of the engine's own trace, beside the file in `config.trace_path` if there is one.
        progress: called with (bytes loaded, bytes in all) while weights load.
        make_executor: replaces the in-process executor; given the resolved configuration and the executor it
            would have used.

    Raises:
        ValueError: the checkpoint or the settings are refused; one line says why and what to change.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        recorder: Recorder | None = None,
        trace_sink: Callable[[str], None] | None = None,
        progress: Callable[[int, int], None] | None = None,
        make_executor: Callable[[EngineConfig, Executor], Executor] | None = None,
    ) -> None:
        device = select_device(config.device)
        self.model_config = load_model_config(config, device.type)
        self.config = replace(config, device=str(device)).resolve(self.model_config.max_model_len)
        self.tokenizer: Tokenizer | None = None
        if not config.skip_tokenizer_init:
            self.tokenizer = Tokenizer.load(
                config.tokenizer or self.model_config.path,
                revision=config.revision if config.tokenizer else None,
                trust_remote_code=config.trust_remote_code,
            )
        self._token_texts: dict[int, str] = {}
        self._trace_file: TraceFile | None = None
        if recorder is None and (config.trace_path is not None or trace_sink is not None):
            self._trace_file = None if config.trace_path is None else TraceFile(config.trace_path)
            sinks = [sink for sink in (self._trace_file, trace_sink) if sink is not None]
            recorder = Recorder(_to_all(sinks), time.perf_counter, self.token_texts if config.trace_text else None)
        make_runner = GPUModelRunner if device.type == "cuda" else ModelRunner
        try:
            runner = make_runner(self.config, self.model_config, device, progress)
        except BaseException:
            self._close_trace()
            raise
        executor: Executor = InProcessExecutor(runner)
        if make_executor is not None:
            executor = make_executor(self.config, executor)
        model = self.model_config
        root = hash_root(model.path, config.revision, model.dtype, model.dtype, self.config.block_size)
        roofline: StepRoofline | None = None
        if recorder is not None:
            roofline = StepRoofline(model, known_ceilings(device_name(str(device)), model.dtype))
            if isinstance(runner, GPUModelRunner):
                runner.times_steps = True
        self.core = EngineCore(self.config, executor, root, recorder, roofline=roofline)
        self.memory = runner.memory
        self._outputs = OutputProcessor(self.tokenizer)
        self.num_requests = 0
        if recorder is not None and roofline is not None:
            shape = {"path": model.path, "architecture": model.architecture, "dtype": model.dtype}
            ceilings = None if roofline.ceilings is None else asdict(roofline.ceilings)
            machine = {"device": device_name(str(device)), "ceilings": ceilings}
            recorder.header(describe(self.config), shape, executor.num_blocks, machine=machine)

    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        arrival_time: float | None = None,
    ) -> RequestOutput:
        """Queues a request.

        Args:
            prompt: text, token ids, or {"prompt": text} or {"prompt_token_ids": ids}.
            priority: lower goes first, with scheduling_policy="priority".
            cache_salt: requests share KV only with others of the same salt.
            arrival_time: seconds on the recorder's clock, without one on `time.perf_counter`; None is now.

        Returns:
            Its output, still empty: the object that `step` returns whenever it has grown.

        Raises:
            ValueError: the id is taken, the prompt can never fit, or a parameter does not suit the model.
        """
        params = sampling_params or SamplingParams()
        text, token_ids, packed_ids = self._token_ids(prompt)
        bad_words = self._check(params)
        children = self._children(request_id, packed_ids, params, bad_words, priority, cache_salt, arrival_time)
        check_some_token_allowed(params, self.model_config.vocab_size, children[0].stop_token_ids, bad_words)
        self._outputs.check_free(request_id, children)
        self.core.add(children[0])  # if one fits, all do
        output = self._outputs.add(request_id, text, token_ids, children)
        for child in children[1:]:
            self.core.add(child)
        return output

    def adopt_request(self, request: Request) -> RequestOutput:
        """Queues a request that has been under way in another engine; its output begins with what it has.

        Raises:
            ValueError: its id is taken, or it can never fit.
        """
        self._outputs.check_free(request.request_id, [request])
        self.core.add(request)
        output = self._outputs.add(request.request_id, None, list(request.prompt_token_ids), [request])
        if request.num_output_tokens:
            _, match = self._outputs.update(RequestUpdate(request, request.output_token_ids, 0, None, None, 0))
            if match is not None:
                self.core.finish(request.request_id, FinishReason.STOP, match.stop)
        return output

    def step(self) -> list[RequestOutput]:
        """Computes one step.

        Returns:
            The outputs that changed. An output is the same object at every step and grows; with asynchronous
            scheduling it is one step behind.
        """
        changed: dict[str, RequestOutput] = {}
        for update in self.core.step():
            if not update.new_token_ids and update.prompt_logprobs is None:
                continue
            output, match = self._outputs.update(update)
            if match is not None:
                self.core.finish(update.request.request_id, FinishReason.STOP, match.stop)
            changed[output.request_id] = output
        return list(changed.values())

    def abort_request(self, request_id: str) -> None:
        """Ends a request, or with "request#2" one of its completions, and gives the blocks back.

        Nothing happens if it has ended already.
        """
        for child_id in self._outputs.abort(request_id):
            self.core.finish(child_id, FinishReason.ABORT)

    @property
    def unfinished_ids(self) -> list[str]:
        """Of all requests under way; of those with more than one completion, "request#0" and so on."""
        return list(self.core.scheduler.requests)

    @property
    def has_unfinished_requests(self) -> bool:
        return self.core.has_unfinished

    def close(self) -> None:
        """Gives the model's memory back; the engine cannot be used after this."""
        self.core.close()
        self._close_trace()

    def _close_trace(self) -> None:
        if self._trace_file is not None:
            self._trace_file.close()

    def bad_word_ids(self, params: SamplingParams) -> tuple[tuple[int, ...], ...]:
        """The id sequences of a request's bad words; none without a tokenizer."""
        if self.tokenizer is None or not params.bad_words:
            return ()
        return tuple(map(tuple, self.tokenizer.encode_bad_words(params.bad_words)))

    def token_texts(self, token_ids: Sequence[int]) -> list[str]:
        """The text of each id alone, for a trace; what it would be without a tokenizer is its number."""
        known = self._token_texts
        for token_id in token_ids:
            if token_id not in known:
                known[token_id] = f"<{token_id}>" if self.tokenizer is None else self.tokenizer.token_text(token_id)
        return [known[token_id] for token_id in token_ids]

    def _token_ids(self, prompt: Prompt) -> tuple[str | None, list[int], array[int]]:
        """Text, ids and packed ids of a prompt. A long one's are looked at by C code alone: its first token waits."""
        content: Any = prompt
        if isinstance(prompt, Mapping):
            if ("prompt" in prompt) == ("prompt_token_ids" in prompt):
                raise ValueError('a prompt dictionary has either "prompt" or "prompt_token_ids"')
            content = prompt["prompt"] if "prompt" in prompt else prompt["prompt_token_ids"]
        text, given = None, content
        if isinstance(content, str):
            if self.tokenizer is None:
                raise ValueError('skip_tokenizer_init=True: give prompts as {"prompt_token_ids": [...]}')
            text, given = content, self.tokenizer.encode(content)
        if not isinstance(given, Iterable):
            kind = type(given).__name__
            raise ValueError(f"a prompt is a text, token ids, or a dictionary with either, not {kind}")
        ids, vocab_size = list(given), self.model_config.vocab_size
        try:
            packed = array("q", struct.pack(f"{len(ids)}q", *ids))  # faster than from the list
        except (struct.error, TypeError):
            packed = array("q")
        values = np.asarray(packed)
        if len(values) < len(ids) or (ids and (values.min() < 0 or values.max() >= vocab_size)):
            wrong = next(token_id for token_id in ids if not _is_below(token_id, vocab_size))
            raise ValueError(f"prompt token id {wrong!r} is not in the vocabulary of {vocab_size}")
        if ids and type(ids[0]) is not int:  # from NumPy or a tensor: one stands for all
            ids = packed.tolist()
        return text, ids, packed

    def _check(self, params: SamplingParams) -> tuple[tuple[int, ...], ...]:
        """Refuses what this model or engine cannot do; returns the bad words as ids."""
        vocab_size = self.model_config.vocab_size
        check_params(params, vocab_size, self.config.max_logprobs)
        for name, words in (("stop strings", params.stop_strings), ("bad_words", params.bad_words)):
            if words and self.tokenizer is None:
                raise ValueError(f"{name} are text: drop them, or set skip_tokenizer_init=False")
        bad_words = self.bad_word_ids(params)
        check_ids("bad_words", (token_id for word in bad_words for token_id in word), vocab_size)
        return bad_words

    def _children(
        self,
        request_id: str,
        token_ids: array[int],
        params: SamplingParams,
        bad_words: tuple[tuple[int, ...], ...],
        priority: int,
        cache_salt: str | None,
        arrival_time: float | None,
    ) -> list[Request]:
        """The request's `n` completions; they share the prompt's blocks through the prefix cache."""
        self.num_requests += 1
        seed = params.seed
        if seed is None:  # the same engine seed and order of requests give the same noise
            digest = sha256(f"{self.config.seed} {self.num_requests}".encode()).digest()
            seed = int.from_bytes(digest[:8], "little")
        # The first child scores the prompt for all.
        others = replace(params, prompt_logprobs=None) if params.n > 1 else params
        return [
            Request(
                request_id=request_id if params.n == 1 else f"{request_id}#{index}",
                prompt_token_ids=token_ids,
                sampling_params=params if index == 0 else others,
                eos_token_ids=self.model_config.eos_token_ids,
                arrival_time=self.core.clock() if arrival_time is None else arrival_time,
                priority=priority,
                cache_keys=() if cache_salt is None else (f"salt {cache_salt}",),
                group=request_id if params.n > 1 else None,
                child_index=index,
                seed=seed,
                bad_word_token_ids=bad_words,
            )
            for index in range(params.n)
        ]


def _to_all(sinks: Sequence[Callable[[str], None]]) -> Callable[[str], None]:
    """One sink in place of several."""
    if len(sinks) == 1:
        return sinks[0]

    def sink(line: str) -> None:
        for each in sinks:
            each(line)

    return sink


def _is_below(token_id: Any, vocab_size: int) -> bool:
    """Whether this is an id of the model; a tokenizer may know more."""
    try:
        return 0 <= operator.index(token_id) < vocab_size
    except TypeError:
        return False
