"""LLM: offline batches. Give it prompts, get completions, in order.

llm = LLM(model="teachlm")
for output in llm.generate(["What is a KV cache?"], SamplingParams(temperature=0, max_tokens=60)):
    print(output.outputs[0].text)
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from numbers import Integral
from typing import Any

from teachllm.config import EngineConfig
from teachllm.engine.input_processor import Prompt
from teachllm.engine.llm_engine import Engine
from teachllm.engine.observability.speculation_stats import Speculation
from teachllm.engine.text.tokenizer import Tokenizer
from teachllm.outputs import RequestOutput
from teachllm.sampling_params import SamplingParams
from teachllm.spec_decode.drafter import Drafter
from teachllm.startup_progress import StartupProgress
from teachllm.worker.processes.child import uninterrupted

Messages = Sequence[Mapping[str, Any]]


class LLM:
    """A model ready to generate. Several threads may use one: their calls queue, and a stream waits during a call.

    Args:
        model: a local folder, a hub id, or "teachlm".
        settings: any field of `EngineConfig`.
        progress: called with (stage, how much is done, of what), see `startup_progress.py`.
        drafter: one of your own, see `spec_decode/drafter.py`.

    Raises:
        ValueError: the checkpoint or the settings are refused; one line says why and what to change.
    """

    def __init__(
        self,
        model: str = "teachlm",
        *,
        progress: StartupProgress | None = None,
        drafter: Drafter | None = None,
        **settings: Any,
    ) -> None:
        unknown = sorted(settings.keys() - EngineConfig.__dataclass_fields__.keys())
        if unknown:
            known = ", ".join(EngineConfig.__dataclass_fields__)
            raise ValueError(f"LLM has no setting {unknown[0]!r}; it has {known}")
        self.engine = Engine(EngineConfig(model=model, **settings), progress=progress, drafter=drafter)
        self._request_ids = map(str, itertools.count(1))
        self._transformers_tokenizer: Any = None
        self._lock = threading.Lock()  # the engine takes one step at a time
        self._abandoned = deque[str]()  # ids of closed streams, to be aborted before the next step
        if self.config.speculative_config is not None:
            self.engine.count()

    @property
    def config(self) -> EngineConfig:
        """Return the settings as resolved for the model."""
        return self.engine.config

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self.engine.tokenizer

    def get_tokenizer(self) -> Any:
        """Return the tokenizer as transformers loads it, for scripts that count tokens or render templates themselves.

        It is loaded once. The engine itself uses `tokenizer`, so that changes to this one have no effect on it;
        `engine/text/added_tokens.py` lists where the two differ.
        """
        if self._transformers_tokenizer is None:
            from transformers import AutoTokenizer

            config = self.config
            self._transformers_tokenizer = AutoTokenizer.from_pretrained(
                config.tokenizer or self.engine.model_config.path,
                revision=config.revision if config.tokenizer else None,
                trust_remote_code=config.trust_remote_code,
            )
        return self._transformers_tokenizer

    def reset_prefix_cache(self) -> bool:
        """Forget the content of every block that no request holds. Return True, since it cannot fail."""
        with self._lock, uninterrupted():
            self.engine.reset_prefix_cache()
        return True

    @property
    def generation_defaults(self) -> dict[str, Any]:
        """Return the sampling settings that the checkpoint recommends, under SamplingParams' names."""
        return self.engine.generation_defaults

    def get_default_sampling_params(self) -> SamplingParams:
        """Return SamplingParams with what the checkpoint recommends."""
        return SamplingParams(**self.generation_defaults)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        priority: int | Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Complete prompts.

        Args:
            prompts: a string, {"prompt": text} or {"prompt_token_ids": [...]}, or a list of these (or of lists of token
                ids). In a dictionary, "cache_salt" keeps a prompt's KV from prompts of other salts.
            sampling_params: one for all, or one each; None takes the checkpoint's recommendation.
            use_tqdm: a progress bar on standard error.
            priority: one for all, or one each; lower goes first, with scheduling_policy="priority". None is 0.

        Returns:
            One output per prompt, in order.

        Raises:
            ValueError: a prompt or its parameters are refused; none of the batch is left running.
        """
        batch = _as_batch(prompts)
        if sampling_params is None:
            sampling_params = self.get_default_sampling_params()
        if isinstance(sampling_params, SamplingParams):
            sampling_params = [sampling_params] * len(batch)
        params = list(sampling_params)
        for each in params:
            if not isinstance(each, SamplingParams):
                raise ValueError(f"sampling_params={each!r}: must be SamplingParams, one for all or one each")
        if len(params) != len(batch):
            raise ValueError(f"{len(batch)} prompts and {len(params)} sampling_params: give one for all, or one each")
        priorities = _each_or_all(0 if priority is None else priority, len(batch))
        if len(priorities) != len(batch):
            raise ValueError(f"{len(batch)} prompts and {len(priorities)} priorities: give one for all, or one each")
        return self._run(batch, params, priorities, use_tqdm)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        tools: list[dict[str, Any]] | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer conversations: lists of {"role": ..., "content": ...}.

        Args:
            messages: one conversation or a list of them.
            tools: JSON descriptions of functions the model may call.
            chat_template: replaces the checkpoint's.

        Raises:
            ValueError: as `generate`; or there is no chat template, or it refuses the messages.
        """
        given: Any = [messages] if isinstance(messages, Mapping) else messages  # one message is a conversation
        if not isinstance(given, Sequence):
            raise ValueError(f"messages={messages!r}: must be a conversation or a list of them")
        conversations: Any = [given] if given and isinstance(given[0], Mapping) else given
        options = {"tools": tools, "chat_template": chat_template, "add_generation_prompt": add_generation_prompt}
        options |= _template_variables(chat_template_kwargs)
        prompts = [self._chat_prompt(each, options) for each in conversations]
        return self.generate(prompts, sampling_params, use_tqdm)

    def stream_chat(
        self, messages: Messages, sampling_params: SamplingParams | None = None, **template_options: Any
    ) -> Generator[RequestOutput, None, None]:
        """Answer one conversation, yielding its output whenever it has grown. Closing the generator aborts it."""
        prompt = self._chat_prompt(messages, template_options)
        request_id, num_shown, is_finished = next(self._request_ids), 0, False
        try:
            with self._lock, uninterrupted():
                params = sampling_params or self.get_default_sampling_params()
                output = self.engine.add_request(request_id, prompt, params)
            while not is_finished:
                with self._lock, uninterrupted():
                    self._abort_abandoned()
                    # The steps of another thread make this output grow as well.
                    if not output.finished and _num_tokens(output) == num_shown:
                        self.engine.step()
                    num_tokens, is_finished = _num_tokens(output), output.finished
                if num_tokens > num_shown:
                    num_shown = num_tokens
                    yield output
        finally:
            self._abandon(request_id)

    def speculation(self) -> Speculation | None:
        """Return what speculation did since the last call; None: the engine does not speculate."""
        config = self.config.speculative_config
        if config is None:
            return None
        with self._lock, uninterrupted():
            stats = self.engine.stats()
        if stats is None:
            return None
        cost = None if self.engine.is_elsewhere else self.engine.core.draft_step_cost
        return Speculation(stats, cost, config.synthetic_rate is not None)

    def close(self) -> None:
        """Give the model's memory back, after the call that another thread is in."""
        with self._lock:
            self.engine.close()

    def _run(
        self, prompts: list[Prompt], params: list[SamplingParams], priorities: list[int], use_tqdm: bool
    ) -> list[RequestOutput]:
        outputs: dict[str, RequestOutput] = {}
        with self._lock:
            try:
                for prompt, each, priority in zip(prompts, params, priorities, strict=True):
                    with uninterrupted():
                        request_id = next(self._request_ids)
                        outputs[request_id] = self.engine.add_request(request_id, prompt, each, priority=priority)
                with _progress_bar(len(prompts), use_tqdm) as bar:
                    unfinished = deque(outputs.values())
                    while self._has_work_for(unfinished):
                        with uninterrupted():
                            self._abort_abandoned()
                            changed = self.engine.step()
                        bar.update(sum(output.finished and output.request_id in outputs for output in changed))
            finally:
                with uninterrupted():
                    for request_id in outputs:
                        self.engine.abort_request(request_id)
        return list(outputs.values())

    def _abandon(self, request_id: str) -> None:
        """Abort a request now, or, while the lock is held, before the next step.

        The garbage collector may close a generator at any point, even while this thread is inside of a step.
        """
        self._abandoned.append(request_id)
        with uninterrupted():
            if self._lock.acquire(blocking=False):
                try:
                    self._abort_abandoned()
                finally:
                    self._lock.release()

    def _abort_abandoned(self) -> None:
        while self._abandoned:
            self.engine.abort_request(self._abandoned.popleft())

    def _chat_prompt(self, messages: Messages, options: Mapping[str, Any]) -> Prompt:
        if self.tokenizer is None:
            raise ValueError("chat needs a tokenizer: set skip_tokenizer_init=False")
        is_list = isinstance(messages, Sequence) and not isinstance(messages, str)
        if not is_list or not all(isinstance(message, Mapping) for message in messages):
            raise ValueError('a conversation is a list of messages like {"role": "user", "content": "Hello"}')
        for message in messages:
            _check_is_text(message.get("content"))
        template, tools = options.get("chat_template"), options.get("tools")
        if not isinstance(template, str | None):
            raise ValueError(f"chat_template={template!r}: must be a text")
        if tools is not None and not (
            isinstance(tools, Sequence) and all(isinstance(tool, Mapping | Callable) for tool in tools)
        ):
            raise ValueError(f"tools={tools!r}: must be a list of objects that describe functions")
        token_ids = self.tokenizer.apply_chat_template([dict(message) for message in messages], **options)
        return {"prompt_token_ids": token_ids}

    def _has_work_for(self, unfinished: deque[RequestOutput]) -> bool:
        """Return whether to step on: an output is unfinished, or no request is left and the last step is in flight.

        Finished outputs leave the queue at its front, so that a step does not have to check all of them.
        """
        while unfinished and unfinished[0].finished:
            unfinished.popleft()
        return self.engine.has_unfinished_requests and bool(unfinished or not self.engine.unfinished_ids)


def _template_variables(given: Any) -> dict[str, Any]:
    """Return further variables of a template.

    Raises:
        ValueError: they are none, or would take the place of the conversation.
    """
    if given is None:
        return {}
    if not isinstance(given, Mapping) or "messages" in given:
        raise ValueError(f"chat_template_kwargs={given!r}: must be variables of the template by name, without messages")
    return dict(given)


def _num_tokens(output: RequestOutput) -> int:
    return sum(len(completion.token_ids) for completion in output.outputs)


def _as_batch(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    prompts = _plain(prompts)
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if not isinstance(prompts, Iterable) or isinstance(prompts, bytes | bytearray):
        raise ValueError(
            f"prompts={prompts!r}: must be a text, token ids, a dictionary with either, or a list of these"
        )
    items: list[Any] = list(prompts)
    return [items] if items and all(isinstance(item, Integral) for item in items) else items


def _each_or_all(priority: Any, num_prompts: int) -> list[Any]:
    """Return a priority per prompt, as Python's numbers."""
    given = _plain(priority)
    if isinstance(given, str) or not isinstance(given, Iterable):
        return [given] * num_prompts
    return [_plain(each) for each in given]


def _plain(value: Any) -> Any:
    """Return what NumPy or PyTorch made as Python's numbers, and anything else as it is."""
    return value.tolist() if hasattr(value, "tolist") else value


def _check_is_text(content: Any) -> None:
    """Refuse a message with a picture, a sound or a film, which a template for text would leave out.

    Raises:
        ValueError: a part of the content is none that a language model reads.
    """
    for part in content if isinstance(content, list) else ():
        kind = str(part.get("type")) if isinstance(part, Mapping) else ""
        if kind.removeprefix("input_").startswith(("image", "audio", "video")):
            raise ValueError(f"a message has a part of type {kind!r}: this model reads text alone")


def _progress_bar(total: int, enabled: bool) -> Any:
    from tqdm.auto import tqdm

    return tqdm(total=total, disable=not enabled, desc="generate", unit="request", dynamic_ncols=True)
