"""Check what the page's forms hold: whatever arrives here, a wrong field is one line that names it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from teachllm.config import CHOICES
from teachllm.sampling_params import SamplingParams
from teachllm_webui.plan import FORKABLE, PlannedRequest
from teachllm_webui.what_if import MAX_REQUESTS, WhatIf

Form = Mapping[str, Any]

MAX_PROMPT = 200_000  # characters
MAX_BLOCKS = 20_000  # of a fork or a simulation
POLICIES = CHOICES["scheduling_policy"]
# Smallest and largest value of each field that is a number; those in REAL need not be whole.
LIMITS: dict[str, tuple[float, float]] = {
    **{"max_tokens": (1, 100_000), "temperature": (0, 100), "top_p": (0, 1), "seed": (0, 2**53), "n": (1, 8)},
    **{"priority": (-1_000_000, 1_000_000), "max_num_batched_tokens": (1, 1_000_000), "max_num_seqs": (1, 10_000)},
    **{"block_size": (1, 4096), "num_gpu_blocks_override": (1, MAX_BLOCKS), "blocks": (1, MAX_BLOCKS)},
    **{"requests": (1, MAX_REQUESTS), "rate": (0.001, 1e6), "budget": (1, 1_000_000), "seqs": (1, 10_000)},
    **{"shared": (0, 32_768)},
    **dict.fromkeys(("prompt_min", "prompt_max", "output_min", "output_max"), (1, 32_768)),
}
REAL = ("temperature", "top_p", "rate")
UNLIMITED = ("rate", "blocks", "budget", "seqs")  # of a simulation, if left empty


def request_of(form: Form) -> PlannedRequest:
    """A prompt and its parameters.

    Raises:
        ValueError: a field is wrong.
    """
    prompt = form.get("prompt")
    if not isinstance(prompt, str) or not prompt.strip():
        raise ValueError("the prompt is empty: write something")
    if len(prompt) > MAX_PROMPT:
        raise ValueError(f"the prompt has {len(prompt):,} characters: this page stops at {MAX_PROMPT:,}")
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        raise ValueError("the prompt is no text that could be written down: it has half a character") from error
    seed = number(form, "seed")
    params = SamplingParams(
        max_tokens=int(number(form, "max_tokens", 64)),
        temperature=number(form, "temperature", 0.0),
        top_p=number(form, "top_p", 1.0),
        seed=None if seed is None else int(seed),
        n=int(number(form, "n", 1)),
    )
    priority = int(number(form, "priority", 0))
    return PlannedRequest(prompt=prompt.strip(), params=params, priority=priority, is_chat=form.get("chat") is True)


def changes_of(form: Form) -> dict[str, Any]:
    """Settings of a fork; what was left empty stays as it is.

    Raises:
        ValueError: a field is wrong.
    """
    if unknown := set(form) - set(FORKABLE):
        raise ValueError(f"a fork cannot change {', '.join(sorted(unknown))}")
    given = {name: value for name, value in form.items() if value not in (None, "")}
    return {name: _setting(given, name) for name in given}


def what_if_of(form: Form) -> WhatIf:
    """A simulation's workload and settings; what was left empty is unlimited or has its default.

    Raises:
        ValueError: a field is wrong.
    """
    known = [field.name for field in fields(WhatIf) if field.name in form]
    empty = {name for name in known if form[name] in (None, "")}
    given: dict[str, Any] = {name: None if name in empty else _setting(form, name) for name in known}
    return WhatIf(**{name: value for name, value in given.items() if name not in empty or name in UNLIMITED})


def number(form: Form, name: str, default: Any = None) -> Any:
    """A field's value within its limits; left empty, the default.

    Raises:
        ValueError: it is no such number.
    """
    value = form.get(name)
    if value is None or value == "":
        return default
    low, high = LIMITS[name]
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not is_number or not low <= value <= high or (name not in REAL and value != int(value)):
        kind = "number" if name in REAL else "whole number"
        raise ValueError(f"{name.replace('_', ' ')}: choose a {kind} from {low:,g} to {high:,g}, not {value!r}")
    return value if name in REAL else int(value)


def _setting(form: Form, name: str) -> Any:
    value = form[name]
    if name in LIMITS:
        return number(form, name)
    if name in ("enable_chunked_prefill", "chunked"):
        if not isinstance(value, bool):
            raise ValueError(f"chunked prefill is on or off, not {value!r}")
    elif name in ("scheduling_policy", "policy"):
        if value not in POLICIES:
            raise ValueError(f"policy {value!r}: choose one of {', '.join(map(str, POLICIES))}")
    elif not isinstance(value, str):
        raise ValueError(f"{name} is a name, not {value!r}")
    return value
