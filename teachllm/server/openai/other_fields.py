"""Fields of requests that this server does not act on. What would change the answer is refused, what is not built yet
answered with 501, what changes nothing here accepted, and a name that is nearly one of ours taken for a slip.

A client that is told nothing takes the answer for what it asked for.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from teachllm.server.http.errors import ApiError

# They say who asks, how to keep or charge for it, or how another server should go about it: the answer is the same.
HARMLESS = frozenset(
    (
        *("user", "store", "metadata", "service_tier", "safety_identifier", "request_id", "kv_transfer_params"),
        *("prompt_cache_key", "prompt_cache_retention", "prediction", "early_stopping", "extra_headers", "moderation"),
        *("mm_processor_kwargs", "media_io_kwargs", "guided_decoding_backend", "chat_template_content_format"),
    )
)
# {field: what would have to be built}
COMING = {
    **dict.fromkeys(("guided_json", "guided_regex", "guided_choice", "guided_grammar"), "structured output"),
    **dict.fromkeys(("guided_whitespace_pattern", "structural_tag", "json_schema", "grammar"), "structured output"),
    **dict.fromkeys(("regex", "ebnf"), "structured output"),
    **dict.fromkeys(("lora_request", "lora", "adapter"), "LoRA"),
}
_ASK_CHAT = "send messages to /v1/chat/completions"
# {field: (values that ask for what is done anyway, what to do instead)}
REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "functions": (([],), "describe them in tools"),
    "function_call": (("none", "auto"), "use tool_choice"),
    "logits_processors": (([],), "this server runs no code of a request's"),
    "logits_processor_args": (({},), "this server runs no code of a request's"),
    "logprob_token_ids": (([],), "ask for top_logprobs, or for logprobs"),
    "prompt_embeds": ((), "send the prompt as text or token ids"),
    "modalities": ((["text"],), "this server answers with text alone"),
    "audio": ((), "this server answers with text alone"),
    "web_search_options": ((), "this server searches nothing"),
    "verbosity": (("medium",), "say in a message how long the answer should be"),
    "include_reasoning": ((True,), "this server does not tell reasoning from the answer"),
    "thinking_token_budget": ((), "limit max_tokens"),
    "enable_thinking": ((), "put it into chat_template_kwargs"),
    "thinking": ((), "put what the template knows of it into chat_template_kwargs"),
    "spaces_between_special_tokens": ((True,), "set skip_special_tokens to false, and no spaces are added"),
    "repetition_detection": ((), "use repetition_penalty"),
    "vllm_xargs": (({},), "the parameters of this server are fields of their own"),
    # Names that other servers have for what this one has.
    **dict.fromkeys(("max_new_tokens", "max_output_tokens", "max_completion_tokens"), ((), "use max_tokens")),
    **dict.fromkeys(("stop_sequences", "stop_regex"), (([],), "use stop")),
    "no_repeat_ngram_size": ((0,), "use repetition_penalty or frequency_penalty"),
    "typical_p": ((1,), "use top_p or min_p"),
    "reasoning": (({},), "use reasoning_effort"),
    "truncation_side": (("left",), "truncate_prompt_tokens keeps a prompt's last tokens"),
    # Those of the other endpoint: what is one's own is not looked up here.
    "top_logprobs": ((0,), "use logprobs"),
    "tools": (([],), _ASK_CHAT),
    "tool_choice": (("none", "auto"), _ASK_CHAT),
    "messages": ((), _ASK_CHAT),
    "documents": (([],), _ASK_CHAT),
    "chat_template": ((), _ASK_CHAT),
    "chat_template_kwargs": (({},), _ASK_CHAT),
    "reasoning_effort": ((), _ASK_CHAT),
    "add_generation_prompt": ((), _ASK_CHAT),
    "continue_final_message": ((False,), _ASK_CHAT),
    "prompt": ((), "send it to /v1/completions"),
    "suffix": (("",), "send a prompt to /v1/completions"),
}
_MAX_FIELDS = 256
_MAX_LOGGED = 1000  # names: a client may make up as many as it likes
_SHORTEST = 5  # letters of a name that others are compared with
_logged: set[str] = set()
logger = logging.getLogger("teachllm.server")


def check_other_fields(content: Any, known: frozenset[str]) -> None:
    """Look at the fields of a body that are none of its request's. Each that nobody knows is logged once.

    Args:
        known: the request's fields.

    Raises:
        ApiError: 400, a field would change the answer, or is nearly a known one; 501, it is not built yet.
    """
    if not isinstance(content, Mapping):
        return
    if len(content) > _MAX_FIELDS:
        raise ApiError(400, f"{len(content)} fields are more than the {_MAX_FIELDS} that a request may have")
    for name in content.keys() - known:
        value = content[name]
        if value is None or name in HARMLESS:
            continue
        if name in COMING:
            raise ApiError(501, f"{COMING[name]} is not built yet: leave {name} out", name)
        if name == "best_of" and value == (content.get("n") or 1):
            continue
        if name == "best_of":
            raise ApiError(400, f"best_of={value!r}: this server returns all completions that it makes: use n", name)
        if name in REFUSED:
            harmless, advice = REFUSED[name]
            if value not in harmless:
                raise ApiError(400, f"{name} is not supported: {advice}", name)
            continue
        for meant in sorted(known):
            if len(meant) >= _SHORTEST and is_one_edit(name, meant):
                raise ApiError(400, f"there is no field {name}: {meant} is meant", name)
        _log_once(name)


def is_one_edit(one: str, other: str) -> bool:
    """Return whether a letter added, left out, or taken for another, or two that have changed places, make the
    difference."""
    if abs(len(one) - len(other)) > 1 or one == other:
        return False
    at = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    a, b = one[at:], other[at:]
    return a[1:] == b[1:] or a[1:] == b or a == b[1:] or (a[:2] == b[1::-1] and a[2:] == b[2:])


def _log_once(name: str) -> None:
    shown = name[:64]
    if shown not in _logged and len(_logged) < _MAX_LOGGED:
        _logged.add(shown)
        logger.warning("a field of a request is not known", extra={"fields": {"field": shown}})
