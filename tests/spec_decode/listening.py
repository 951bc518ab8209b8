"""Listening to a drafter at work in an engine: what it was to continue, what it drew, and from which logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from teachllm.core.in_flight import RequestUpdate
from teachllm.core.scheduler_output import ModelRunnerOutput, SchedulerOutput
from teachllm.engine.llm_engine import Engine
from teachllm.spec_decode.tree import DraftTree
from tests.spec_decode.naive import Naive, States


@dataclass
class Heard:
    """Drafts that were made at once.

    Attributes:
        known: prompt and outputs that the worker knew then.
        tree: of whose first nodes the drafts are.
        drafts: what was drawn.
        logits: what from; 0 is the newest token, i + 1 is node i, and what comes after it is drawn from its logits.
    """

    known: list[int]
    tree: DraftTree
    drafts: list[int] = field(default_factory=list)
    logits: dict[int, torch.Tensor] = field(default_factory=dict, repr=False)

    def path_to(self, node: int) -> list[int]:
        """The drafts that lead to a node, its own the last; -1 is the newest token."""
        return [] if node < 0 else [*self.path_to(self.tree.parents[node]), self.drafts[node]]


@dataclass
class Listening:
    """All that was heard of an engine.

    Attributes:
        heard: in order.
        verified: of every verification how many drafts there were, and how many held.
    """

    heard: list[Heard] = field(default_factory=list, repr=False)
    verified: list[tuple[int, int]] = field(default_factory=list)

    @property
    def some_fell_and_some_held(self) -> bool:
        """In one step, so that something had to be taken back in the middle."""
        return any(0 < num_accepted < num_drafted for num_drafted, num_accepted in self.verified)


def listen(engine: Engine) -> Listening:
    """From now on."""
    listening = Listening()
    executor: Any = engine.core.executor
    drafter = executor._runner._drafting.drafter
    propose, update = drafter.propose, engine.core.scheduler.update

    def heard_propose(batch: Any) -> None:
        asking = [each for each in batch._followed if each.num_drafts]
        rows = batch._batch.token_ids
        heard = [Heard(rows[each.row, : each.end + 1].tolist(), batch._tree) for each in asking]
        push = batch.push

        def heard_push(level: int, logits: torch.Tensor) -> None:
            for row, (index, node) in enumerate(batch._rows[: logits.shape[0]]):
                heard[index].logits[node + 1] = logits[row].clone()
            push(level, logits)

        batch.push = heard_push
        propose(batch)
        for entry, each, drafted in zip(heard, asking, batch.drafted, strict=False):
            entry.drafts = list(drafted.token_ids)
            assert len(entry.drafts) == each.num_drafts
        listening.heard += heard

    def heard_update(plan: SchedulerOutput, result: ModelRunnerOutput) -> list[RequestUpdate]:
        updates = update(plan, result)
        listening.verified += [(each.num_drafted, each.num_accepted) for each in updates if each.num_drafted]
        return updates

    drafter.propose = heard_propose
    engine.core.scheduler.update = heard_update  # type: ignore[method-assign]
    return listening


def assert_naive(heard: Sequence[Heard], naive: Naive, states: States | None = None) -> None:
    """Every draft was drawn from the logits that a naive drafter has there, and greedily."""
    assert heard
    if states is not None:
        states.remember([each.known[:-1] for each in heard])
    for number, each in enumerate(heard):
        for place in reversed(range(len(each.drafts) + 1)):
            drawn = [each.drafts[node] for node in each.tree.children[place] if node < len(each.drafts)]
            if not drawn:
                continue
            where = f"drafts after node {place - 1} after {len(each.known)} tokens, proposal {number}"
            logits, wanted = each.logits[place].double(), naive(each.known, each.path_to(place - 1))
            is_possible = wanted.isfinite()
            assert torch.equal(logits.isfinite(), is_possible), where
            best = wanted.topk(len(drawn)).values
            logits, finite = (some.masked_fill(~is_possible, 0.0) for some in (logits, wanted))
            scale = max(finite.abs().max().item(), 1.0)
            error = (logits - finite).abs().max().item()
            assert error < 2e-4 * scale, f"{where}: logits of up to {scale:.1f} are {error:.1e} off"
            assert len(set(drawn)) == len(drawn), where
            for token_id, most in zip(drawn, best.tolist(), strict=True):
                assert most - wanted[token_id] < 4e-4 * scale, f"{where}: id {token_id} is not the one"
