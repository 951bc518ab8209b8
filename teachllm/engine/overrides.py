"""EngineOverrides: parts of a running engine that may be your own.

    class ShortestFirst(FirstComeFirstServed):
        def key(self, request):
            return (request.num_prompt_tokens, request.arrival_index)

    engine = Engine(EngineConfig(), overrides=EngineOverrides(policy=ShortestFirst()))

Each takes the place of one that the engine would have made itself, with the same methods and the same duties; the
engine does not look at it, so run with `check_invariants=True` until you trust it. A drafter of your own is an argument
of `Engine` as well, since it needs a setting beside it (`spec_decode/drafter.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from teachllm.core.block_pool import BlockPool
    from teachllm.core.in_flight import RequestUpdate
    from teachllm.core.policy import Policy
    from teachllm.core.prefix_cache import HashBlock
    from teachllm.engine.engine_core import EngineCore
    from teachllm.layers.attention_backends.base import AttentionBackend
    from teachllm.sampling.sampler import Sampler


@dataclass(frozen=True, kw_only=True)
class EngineOverrides:
    """Override parts of the engine; None keeps the engine's own.

    Attributes:
        policy: who goes first, who gives way, how much at once; see `core/policy.py`.
        make_pool: given a number of blocks, what hands them out; see `core/block_pool.py`.
        hash_block: names a full block's content; see `core/prefix_cache.py`.
        turn: one turn of the loop, in place of `EngineCore.turn`.
        attention: computes every layer's attention; on a CPU, in one process.
        make_sampler: makes what samples, given `Sampler`'s arguments; on a CPU, in one process.
        choose_replica: given how many requests wait and how many run on each replica, which gets the next one; see
            `engine/replicas/data_parallel.py`.
    """

    policy: Policy | None = None
    make_pool: Callable[[int], BlockPool] | None = None
    hash_block: HashBlock | None = None
    turn: Callable[[EngineCore], list[RequestUpdate]] | None = None
    attention: AttentionBackend | None = None
    make_sampler: Callable[..., Sampler] | None = None
    choose_replica: Callable[[Sequence[int], Sequence[int]], int] | None = None

    def given(self, *names: str) -> dict[str, Any]:
        """Return the overrides of these names that are given; without names, all that are given."""
        wanted = names or tuple(field.name for field in fields(self))
        return {name: value for name in wanted if (value := getattr(self, name)) is not None}


NO_OVERRIDES = EngineOverrides()
