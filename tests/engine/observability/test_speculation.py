"""What an engine tells of its speculation: counts by hand, figures by hand, the same from another process."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing

import pytest

from teachllm import LLM, SamplingParams
from teachllm.core.scheduler_output import ModelRunnerOutput
from teachllm.engine.observability.speculation_stats import Speculation
from teachllm.engine.observability.stats import StepCounter, StepStats
from teachllm.spec_decode.draft_length import StepCost
from tests.core.helpers import add, make_scheduler, schedule
from tests.worker.engines import make_llm, random_ids, tiny

NOTHING = StepStats(0, 0, 0.0, 0, 0, 0, 0, 0, 0)


def stats(**counts: int | tuple[int, ...]) -> StepStats:
    return StepStats(0, 0, 0.0, 0, 0, 0, 0, 0, **{"num_generation_tokens": 0} | counts)  # type: ignore[arg-type]


def test_drafts_are_counted_by_request_by_token_and_by_position() -> None:
    scheduler, counter = make_scheduler(), StepCounter()
    a, b = add(scheduler, "a", 4), add(scheduler, "b", 4)

    def step(tokens: list[list[int]], num_drafted: list[int] | None = None) -> None:
        plan = schedule(scheduler)
        counter.step(plan, scheduler.update(plan, ModelRunnerOutput(tokens, num_drafted=num_drafted)))

    step([[7], [7]])  # the prompts
    a.draft_token_ids, b.draft_token_ids = [7, 8, 9], [7, 8]
    step([[7, 8, 5], [5]])  # two of three held, none of two
    a.draft_token_ids = [7, 8]
    step([[7, 8, 9], [5]])  # both held, and nothing was drafted for the other
    b.draft_token_ids = [-1, -1]
    step([[5], [5]], num_drafted=[0, 0])  # room for two, and the drafter had none to offer
    found = counter.take(scheduler)
    assert (found.num_drafts, found.num_draft_tokens, found.num_accepted_tokens) == (3, 3 + 2 + 2, 2 + 0 + 2)
    assert found.num_accepted_tokens_per_pos == (2, 2)
    assert (found.num_generation_tokens, found.num_samplings) == (2 + 4 + 4 + 2, 8)
    assert counter.take(scheduler).num_drafts == 0


def test_counts_add_up_position_by_position() -> None:
    first = stats(num_drafts=3, num_draft_tokens=7, num_accepted_tokens=4, num_accepted_tokens_per_pos=(2, 1, 1))
    later = stats(num_drafts=1, num_draft_tokens=2, num_accepted_tokens=1, num_accepted_tokens_per_pos=(1,))
    both = first.then(later)
    assert both.num_accepted_tokens_per_pos == later.then(first).num_accepted_tokens_per_pos == (3, 1, 1)
    assert (both.num_drafts, both.num_draft_tokens, both.num_accepted_tokens) == (4, 9, 5)
    assert NOTHING.then(NOTHING) == NOTHING


def test_figures_are_what_their_names_say() -> None:
    """40 tokens in 16 steps, of which 10 verified 4 drafts each, 24 of these held, and took 1.5 plain ones."""
    counts = stats(
        num_generation_tokens=40, num_samplings=16, num_drafts=10, num_draft_tokens=40, num_accepted_tokens=24
    )
    found = Speculation(counts, StepCost(1.5, num_plain=2, num_drafting=7))
    assert found.acceptance == pytest.approx(0.6)
    assert found.mean_length == pytest.approx(3.4)
    assert found.tokens_per_step == pytest.approx(2.5)
    assert found.speed_up == pytest.approx(40 / (6 + 10 * 1.5))
    assert Speculation(counts, None).speed_up is None
    idle = Speculation(stats(num_generation_tokens=5, num_samplings=5), None)
    assert (idle.acceptance, idle.mean_length, idle.tokens_per_step) == (0, 1, 1)


class Knows:
    """A drafter that has read the answer; from the tenth output token on it is wrong from its second draft on."""

    def __init__(self, prompt: list[int], answer: list[int], vocab_size: int) -> None:
        self.text, self.num_prompt, self.vocab_size = prompt + answer, len(prompt), vocab_size

    def propose(self, token_ids: Sequence[int], num_tokens: int) -> Sequence[int]:
        drafts = self.text[len(token_ids) : len(token_ids) + num_tokens]
        if len(token_ids) >= self.num_prompt + 10:
            drafts[1:] = [(token_id + 1) % self.vocab_size for token_id in drafts[1:]]
        return drafts


def test_an_llm_tells_what_speculation_did_since_it_was_last_asked() -> None:
    prompt, params = random_ids(9), SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    with closing(make_llm()) as plain:
        answer = plain.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)[0].outputs[0].token_ids
        assert plain.speculation() is None
        vocab_size = plain.engine.model_config.vocab_size
    given = {"method": "custom", "num_speculative_tokens": 3, "adaptive": False}
    llm = LLM(**tiny(speculative_config=given), drafter=Knows(prompt, answer, vocab_size))
    with closing(llm):
        same = llm.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)[0].outputs[0].token_ids
        found, again = llm.speculation(), llm.speculation()
    assert same == answer
    assert found is not None and again is not None
    # 1 from the prompt; 4, 4 and 4 from drafts that all hold; 2, 2 and 2 from those of which the first does; then one
    # token is wanted, for which nothing is drafted.
    assert found.stats.num_samplings == 1 + 3 + 3 + 1
    assert (found.stats.num_drafts, found.stats.num_accepted_tokens) == (6, 12)
    assert found.stats.num_accepted_tokens_per_pos == (6, 3, 3)
    assert found.stats.num_draft_tokens == 3 * 3 + 3 + 2 + 1  # asked for before it is known how far the end still is
    assert found.tokens_per_step == 20 / 8
    assert found.step_cost is None  # a fixed length times nothing
    assert again.stats.num_drafts == again.stats.num_generation_tokens == 0
