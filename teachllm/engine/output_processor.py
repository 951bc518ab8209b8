"""From token ids to what a user sees: text, stop strings, logprobs, and the `n` completions of one request.

The scheduler knows completions, each a request of its own; a user knows requests. This joins them again.
"""

from __future__ import annotations

from dataclasses import dataclass

from teachllm.core.in_flight import RequestUpdate
from teachllm.core.request import FinishReason, Request
from teachllm.core.scheduler_output import TokenLogprobs
from teachllm.engine.text.detokenizer import IncrementalDetokenizer, StopMatch
from teachllm.engine.text.token_texts import TokenTexts
from teachllm.engine.text.tokenizer import MAX_TOKENS_PER_CHARACTER, REPLACEMENT, Tokenizer
from teachllm.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput

_CONTEXT = MAX_TOKENS_PER_CHARACTER - 1  # tokens before one that may be other parts of its character


@dataclass(slots=True)
class _Child:
    """One completion: where it stands in its request's output, and its text in the making."""

    output: RequestOutput
    completion: CompletionOutput
    detokenizer: IncrementalDetokenizer | None


class OutputProcessor:
    """Keeps the outputs of all live requests.

    An output is one object that grows as its request does; a caller who wants a snapshot copies it.
    """

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._token_texts = TokenTexts(tokenizer)
        self._children: dict[str, _Child] = {}  # by the scheduler's request id
        self._ids: dict[str, list[str]] = {}  # the user's request id -> the scheduler's
        self._taken: set[str] = set()  # both kinds, of requests that have not ended

    def check_free(self, request_id: str, children: list[Request]) -> None:
        """Refuses ids that a live request, or one of its `n` children, has.

        Raises:
            ValueError: which.
        """
        for wanted in (request_id, *(child.request_id for child in children)):
            if wanted in self._taken:
                raise ValueError(f"request id {wanted!r} is already in use")

    def add(
        self, request_id: str, prompt: str | None, prompt_token_ids: list[int], children: list[Request]
    ) -> RequestOutput:
        """Opens the output of a request and its `n` children."""
        metrics = RequestMetrics(children[0].arrival_time)
        output = RequestOutput(request_id, prompt, prompt_token_ids, outputs=[], metrics=metrics)
        if children[0].sampling_params.prompt_logprobs is not None:
            output.prompt_logprobs = [None]  # nothing predicts the first token
        self._ids[request_id] = [child.request_id for child in children]
        self._taken |= {request_id, *self._ids[request_id]}
        for child in children:
            params = child.sampling_params
            detokenizer = None
            if self._tokenizer is not None and params.detokenize:
                detokenizer = IncrementalDetokenizer(self._tokenizer, prompt_token_ids, params)
            completion = CompletionOutput(index=child.child_index)
            if params.logprobs is not None:
                completion.logprobs, completion.cumulative_logprob = [], 0.0
            output.outputs.append(completion)
            self._children[child.request_id] = _Child(output, completion, detokenizer)
        return output

    def update(self, update: RequestUpdate, now: float) -> tuple[RequestOutput, StopMatch | None]:
        """Adds a step's tokens to the output; returns it, and the stop string that ends it if one did."""
        request, tokens = update.request, update.new_token_ids
        child = self._children[request.request_id]
        output, completion = child.output, child.completion
        if (metrics := output.metrics) is not None and tokens:
            if metrics.first_token_time is None:
                metrics.first_scheduled_time, metrics.first_token_time = request.first_scheduled_time, now
            metrics.last_token_time = now
        if completion.index == 0:
            output.num_cached_tokens = request.num_cached_tokens or 0
            if update.prompt_logprobs is not None and output.prompt_logprobs is not None:
                decodes = request.sampling_params.detokenize
                self._add_prompt_logprobs(output, output.prompt_logprobs, update.prompt_logprobs, update.start, decodes)
        match = None
        if child.detokenizer is not None and tokens:
            match = child.detokenizer.append(tokens, request.finish_reason is FinishReason.STOP)
            if match is not None:
                tokens = tokens[: match.num_tokens_used]
            completion.text = child.detokenizer.text
        if update.logprobs is not None and completion.logprobs is not None:
            decodes = request.sampling_params.detokenize
            before = [*output.prompt_token_ids[-_CONTEXT:], *completion.token_ids[-_CONTEXT:]]
            for entry in update.logprobs[: len(tokens)]:
                completion.logprobs.append(self._logprobs(entry, before, decodes))
                completion.cumulative_logprob = (completion.cumulative_logprob or 0.0) + entry.logprob
                before.append(entry.token_id)
        completion.token_ids += tokens
        if metrics is not None and (match is not None or request.finish_reason is not None):
            metrics.num_preemptions += request.num_preemptions
        if match is not None:
            self._end(request.request_id, "stop", match.stop)
        elif request.finish_reason is not None:
            self._end(request.request_id, request.finish_reason.value, request.stop_reason)
        return output, match

    def abort(self, request_id: str) -> list[str]:
        """Ends a request, or a child of one, as aborted; returns the scheduler's ids of those that were running."""
        running = [child_id for child_id in self._ids.get(request_id, [request_id]) if child_id in self._children]
        for child_id in running:
            self._end(child_id, "abort", None)
        return running

    def owners(self, child_ids: list[str]) -> list[str]:
        """The user's ids of the requests that have these children, each once."""
        return list(dict.fromkeys(self._children[child_id].output.request_id for child_id in child_ids))

    def _end(self, child_id: str, reason: str, stop_reason: str | int | None) -> None:
        child = self._children.pop(child_id)
        if child.detokenizer is not None:
            child.detokenizer.finish()
            child.completion.text = child.detokenizer.text
        child.completion.finish_reason, child.completion.stop_reason = reason, stop_reason
        if child.output.finished:
            request_id = child.output.request_id
            self._taken -= {request_id, *self._ids.pop(request_id)}

    def _add_prompt_logprobs(
        self,
        output: RequestOutput,
        known: list[dict[int, Logprob] | None],
        entries: list[TokenLogprobs],
        start: int,
        decodes: bool,
    ) -> None:
        for index, entry in enumerate(entries, start=start + 1):
            if index == len(known):  # a preempted prompt is computed, and scored, a second time
                before = output.prompt_token_ids[max(index - _CONTEXT, 0) : index]
                known.append(self._logprobs(entry, before, decodes))

    def _logprobs(self, entry: TokenLogprobs, before: list[int], decodes: bool) -> dict[int, Logprob]:
        """By token id: the one at hand first, as vLLM has it, then the most likely ones, best first."""
        found = {entry.token_id: Logprob(entry.logprob, entry.rank)}
        for rank, (token_id, value) in enumerate(zip(entry.top_ids, entry.top_logprobs, strict=True), start=1):
            found.setdefault(token_id, Logprob(value, rank))
        if self._tokenizer is not None and decodes:
            for (token_id, logprob), text in zip(found.items(), self._token_texts(list(found)), strict=True):
                is_part = REPLACEMENT in text
                logprob.decoded_token = self._tokenizer.token_text_after(before, token_id) if is_part else text
        return found
