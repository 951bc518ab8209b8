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
from teachllm.sampling_params import SamplingParams

_CONTEXT = MAX_TOKENS_PER_CHARACTER - 1  # tokens before one that may be other parts of its character


@dataclass(slots=True)
class _Child:
    """One completion: where it stands in its request's output, and its text in the making.

    Attributes:
        prompt_detokenizer: tells what each token of a scored prompt adds to its text; the first completion has it.
        last_logprob: of the last token that is part of the text.
    """

    output: RequestOutput
    completion: CompletionOutput
    detokenizer: IncrementalDetokenizer | None
    prompt_detokenizer: IncrementalDetokenizer | None = None
    last_logprob: Logprob | None = None


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
        """Refuse ids that a live request, or one of its `n` children, has.

        Raises:
            ValueError: names the id.
        """
        for wanted in (request_id, *(child.request_id for child in children)):
            if wanted in self._taken:
                raise ValueError(f"request id {wanted!r} is already in use")

    def add(
        self, request_id: str, prompt: str | None, prompt_token_ids: list[int], children: list[Request]
    ) -> RequestOutput:
        """Open the output of a request and its `n` children."""
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
        if self._tokenizer is not None and output.prompt_logprobs and params.detokenize:
            of_prompt = IncrementalDetokenizer(self._tokenizer, (), SamplingParams(skip_special_tokens=False))
            of_prompt.append(prompt_token_ids[:1])
            self._children[children[0].request_id].prompt_detokenizer = of_prompt
        return output

    def update(self, update: RequestUpdate, now: float) -> tuple[RequestOutput, StopMatch | None]:
        """Add a step's tokens to the output; return it, and the stop string that ends it if one did."""
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
                self._add_prompt_logprobs(child, output.prompt_logprobs, update.prompt_logprobs, update.start)
        match = None
        if child.detokenizer is not None and tokens:
            match = child.detokenizer.append(tokens, request.finish_reason is FinishReason.STOP)
            if match is not None:
                tokens = tokens[: match.num_tokens_used]
            completion.text = child.detokenizer.text
        if update.logprobs is not None and completion.logprobs is not None:
            before = [*output.prompt_token_ids[-_CONTEXT:], *completion.token_ids[-_CONTEXT:]]
            decodes = child.detokenizer is not None
            added = child.detokenizer.added if child.detokenizer is not None else [None] * len(tokens)
            for entry, text in zip(update.logprobs[: len(tokens)], added, strict=False):
                found = self._logprobs(entry, before, text, decodes)
                completion.logprobs.append(found)
                completion.cumulative_logprob = (completion.cumulative_logprob or 0.0) + entry.logprob
                before.append(entry.token_id)
                if text is not None:
                    child.last_logprob = found[entry.token_id]
        completion.token_ids += tokens
        if metrics is not None and (match is not None or request.finish_reason is not None):
            metrics.num_preemptions += request.num_preemptions
        if match is not None:
            self._end(request.request_id, "stop", match.stop)
        elif request.finish_reason is not None:
            self._end(request.request_id, request.finish_reason.value, request.stop_reason)
        return output, match

    def abort(self, request_id: str) -> list[str]:
        """End a request, or a child of one, as aborted; return the scheduler's ids of the running children."""
        running = [child_id for child_id in self._ids.get(request_id, [request_id]) if child_id in self._children]
        for child_id in running:
            self._end(child_id, "abort", None)
        return running

    def owners(self, child_ids: list[str]) -> list[str]:
        """Return the user's ids of the requests that have these children, each once."""
        return list(dict.fromkeys(self._children[child_id].output.request_id for child_id in child_ids))

    def _end(self, child_id: str, reason: str, stop_reason: str | int | None) -> None:
        child = self._children.pop(child_id)
        if child.detokenizer is not None:
            _add_text(child.last_logprob, child.detokenizer.finish())
            child.completion.text = child.detokenizer.text
        child.completion.finish_reason, child.completion.stop_reason = reason, stop_reason
        if child.output.finished:
            request_id = child.output.request_id
            self._taken -= {request_id, *self._ids.pop(request_id)}

    def _add_prompt_logprobs(
        self, child: _Child, known: list[dict[int, Logprob] | None], entries: list[TokenLogprobs], start: int
    ) -> None:
        prompt, detokenizer = child.output.prompt_token_ids, child.prompt_detokenizer
        for index, entry in enumerate(entries, start=start + 1):
            if index < len(known):  # a preempted prompt is computed, and scored, a second time
                continue
            before, text = prompt[max(index - _CONTEXT, 0) : index], None
            if detokenizer is not None:
                detokenizer.append([entry.token_id])
                [text] = detokenizer.added
            found = self._logprobs(entry, before, text, detokenizer is not None)
            known.append(found)
            if detokenizer is not None and len(known) == len(prompt):
                _add_text(found[entry.token_id], detokenizer.finish())

    def _logprobs(
        self, entry: TokenLogprobs, before: list[int], added: str | None, decodes: bool
    ) -> dict[int, Logprob]:
        """Return logprobs by token id: the sampled one first, as vLLM has it, then the most likely ones, best first.

        Args:
            before: the ids in front of it.
            added: what the sampled token adds to the text; None if it is no part of it.
            decodes: also give tokens as text.
        """
        found = {entry.token_id: Logprob(entry.logprob, entry.rank)}
        for rank, (token_id, value) in enumerate(zip(entry.top_ids, entry.top_logprobs, strict=True), start=1):
            found.setdefault(token_id, Logprob(value, rank))
        if self._tokenizer is not None and decodes:
            for (token_id, logprob), text in zip(found.items(), self._token_texts(list(found)), strict=True):
                if added is not None and token_id == entry.token_id:
                    logprob.decoded_token = added
                elif REPLACEMENT in text:  # part of a character
                    logprob.decoded_token = self._tokenizer.token_text_after(before, token_id)
                else:
                    logprob.decoded_token = text
        return found


def _add_text(logprob: Logprob | None, text: str) -> None:
    """Add what ends a text, and is no character, to the token that it ends with."""
    if logprob is not None and text:
        logprob.decoded_token = (logprob.decoded_token or "") + text
