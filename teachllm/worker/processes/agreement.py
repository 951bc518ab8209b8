"""Compare what must be equal at all ranks, before any of them reads a weight.

Ranks that compute different things do not fail: they wait for each other in the middle of a step, or answer nonsense.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch

import teachllm
from teachllm.config import EngineConfig

_VERSIONS = ("teachllm", "torch", "python")
_OWN = ("device",)  # settings that each rank has of its own


def versions() -> dict[str, str]:
    """Return the versions of what a rank computes with."""
    found = (teachllm.__version__, str(torch.__version__), platform.python_version())
    return dict(zip(_VERSIONS, found, strict=True))


def facts_of(config: EngineConfig) -> dict[str, Any]:
    """Return what a rank says of itself: plain JSON."""
    return versions() | {name: value for name, value in asdict(config).items() if name not in _OWN}


def check_agreement(facts: Mapping[int, Mapping[str, Any]]) -> None:
    """Compare what the ranks reported.

    Raises:
        ValueError: two differ; names the first thing in which they do, and each rank's value.
    """
    for name in facts[min(facts)]:
        said: dict[str, list[int]] = {}
        for rank in sorted(facts):
            said.setdefault(repr(facts[rank].get(name)), []).append(rank)
        if len(said) > 1:
            advice = "install the same everywhere" if name in _VERSIONS else "start all ranks with the same settings"
            who = "; ".join(f"{value} at {ranks_text(ranks)}" for value, ranks in said.items())
            raise ValueError(f"the ranks disagree about {name}: {who}: {advice}")


def ranks_text(ranks: Sequence[int]) -> str:
    """Name the ranks for people: "rank 1", "ranks 2, 3"; -1 is the engine's own process."""
    if ranks == [-1]:
        return "the engine"
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
