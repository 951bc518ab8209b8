"""The one place where commands meet the engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from teachllm.config import EngineConfig
from teachllm.sampling_params import SamplingParams
from teachllm_cli.terminal import loading_bar

if TYPE_CHECKING:
    from teachllm import LLM


def make_llm(config: EngineConfig) -> LLM:
    """Load the model, with a bar on a terminal."""
    with loading_bar(config.model) as progress:
        from teachllm import LLM

        return LLM(progress=progress, **{field.name: getattr(config, field.name) for field in fields(config)})


def sampling_params(llm: LLM, usual: Mapping[str, Any], given: Mapping[str, Any]) -> SamplingParams:
    """Return what the options say; where they say nothing, what the checkpoint advises; else `usual`, greedy."""
    return SamplingParams(**{"temperature": 0.0, **usual, **llm.generation_defaults, **given})
