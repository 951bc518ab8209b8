"""EngineCore, when what computes fails: the error reaches the caller, and the same tokens come out in the end."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from teachllm import EngineConfig, RequestOutput, SamplingParams
from teachllm.core import invariants
from teachllm.engine.engine_core import EngineCore
from teachllm.engine.llm_engine import Engine
from teachllm.worker.cpu.model_runner import ModelRunner
from teachllm.worker.executor import Executor, InProcessExecutor
from teachllm_lessons.helpers.lesson_09 import contract_turn
from tests.engine.reference import reference
from tests.engine.withheld import withheld
from tests.pairwise import pairwise
from tests.thorough import times
from tests.worker.engines import DraftingExecutor, FaultyExecutor, MakeExecutor, make_engine, random_ids, tokens

Fault = Callable[[str], BaseException | None]


class Broken(Exception):
    """What a test's executor raises."""


def requests() -> list[tuple[list[int], SamplingParams]]:
    """Greedy and random requests of several lengths; the prompts of some begin alike."""
    common = random_ids(33)
    made = []
    for i in range(5):
        prompt = common[: (0, 16, 33)[i % 3]] + random_ids(3 + 5 * i, seed=i)
        params = SamplingParams(temperature=i % 2 * 1.0, seed=i, n=1 + (i == 3), max_tokens=5 + i, logprobs=0)
        made.append((prompt, params))
    return made


REQUESTS = requests()


def add_all(engine: Engine) -> list[RequestOutput]:
    return [engine.add_request(str(i), prompt, params) for i, (prompt, params) in enumerate(REQUESTS)]


@pytest.fixture(scope="module")
def expected() -> list[list[list[int]]]:
    engine = make_engine()
    outputs = add_all(engine)
    while engine.has_unfinished_requests:
        engine.step()
    reference("qwen3").judge_outputs([output for i, output in enumerate(outputs) if i % 2 == 0])
    return [tokens(output) for output in outputs]


def faulty(fault: Fault, depth: int = 1, inside: MakeExecutor | None = None) -> MakeExecutor:
    """An executor with `depth` plans in flight that fails as told."""

    def wrap(config: EngineConfig, inner: Executor) -> Executor:
        inner = inside(config, inner) if inside else inner
        return FaultyExecutor(withheld(depth)(config, inner), fault)

    return wrap


def runner_of(executor: Any) -> ModelRunner:
    """The worker inside all wrappers."""
    while not isinstance(executor, InProcessExecutor):
        executor = executor._inner
    assert executor._runner is not None
    return executor._runner


def check_books(engine: Engine) -> None:
    """The scheduler's invariants, and the worker's rows: none is lost, none is held for nobody."""
    scheduler = engine.core.scheduler
    invariants.check(scheduler)
    batch = runner_of(engine.core.executor)._batch
    held = list(batch._row_of.values())
    assert sorted(held + batch._free_rows) == list(range(scheduler.max_num_seqs))
    known = {request.request_id for request in scheduler.running} | set(scheduler._dropped)
    assert set(batch._row_of) <= known, "a row that nobody will ever close"
    assert len(scheduler.in_flight) == len(engine.core._pending)


def at(point: str, count: int) -> Fault:
    """Fails when `point` is passed for the `count`th time, once."""
    left = [count]

    def fault(where: str) -> BaseException | None:
        left[0] -= where == point
        return Broken(point) if where == point and left[0] == 0 else None

    return fault


def fail_and_go_on(expected: list[list[list[int]]], fault: Fault, depth: int = 1, **settings: Any) -> None:
    """An engine that fails once and is then stepped to the end gives the tokens of one that does not."""
    engine = make_engine(make_executor=faulty(fault, depth), **settings)
    outputs = add_all(engine)
    with pytest.raises(Broken):
        while engine.has_unfinished_requests:
            engine.step()
    check_books(engine)
    assert not engine.core._pending  # all that was in flight is taken back
    while engine.has_unfinished_requests:
        engine.step()
        check_books(engine)
    assert [tokens(output) for output in outputs] == expected
    assert all(len(c.logprobs or ()) == len(c.token_ids) for output in outputs for c in output.outputs)


@pytest.mark.parametrize(
    "case", pairwise(point=FaultyExecutor.POINTS, depth=[1, 3], count=[1, 9], ahead=[False, True]), ids=repr
)
def test_a_failure_reaches_the_caller_and_trying_again_gives_the_right_tokens(
    expected: list[list[list[int]]], case: dict[str, Any]
) -> None:
    fail_and_go_on(expected, at(case["point"], case["count"]), case["depth"], async_scheduling=case["ahead"])


@pytest.mark.gpu
@pytest.mark.parametrize("point", FaultyExecutor.POINTS)
@pytest.mark.parametrize("ahead", [False, True])
def test_on_a_gpu_too(expected: list[list[list[int]]], point: str, ahead: bool) -> None:
    fail_and_go_on(expected, at(point, 5), async_scheduling=ahead, device="cuda")


@pytest.mark.parametrize("case", pairwise(point=FaultyExecutor.POINTS, ahead=[False, True], depth=[1, 3]), ids=repr)
def test_after_a_failure_requests_can_be_aborted_and_others_added(
    expected: list[list[list[int]]], case: dict[str, Any]
) -> None:
    engine = make_engine(make_executor=faulty(at(case["point"], 4), case["depth"]), async_scheduling=case["ahead"])
    outputs = add_all(engine)
    with pytest.raises(Broken):
        while engine.has_unfinished_requests:
            engine.step()
    for i in range(0, 5, 2):
        engine.abort_request(str(i))
    check_books(engine)
    again = engine.add_request("0", *REQUESTS[0])
    while engine.has_unfinished_requests:
        engine.step()
        check_books(engine)
    assert tokens(again) == expected[0]
    for i in range(1, 5, 2):
        assert tokens(outputs[i]) == expected[i]
    assert engine.core.scheduler.kv.num_used_blocks == 0
    assert {c.finish_reason for i in range(0, 5, 2) for c in outputs[i].outputs} <= {"abort", "length"}


@settings(max_examples=times(2, 50))
@given(
    seed=st.integers(0, 2**20),
    rate=st.sampled_from([0.03, 0.1, 0.3]),
    depth=st.integers(1, 3),
    ahead=st.booleans(),
    caching=st.booleans(),
    spare_blocks=st.sampled_from([0, 2, 60]),
    drafts=st.booleans(),
    budget=st.sampled_from([8, 20, 64]),
)
def test_many_failures_at_random_lose_no_row_no_block_and_no_token(
    expected: list[list[list[int]]],
    seed: int,
    rate: float,
    depth: int,
    ahead: bool,
    caching: bool,
    spare_blocks: int,
    drafts: bool,
    budget: int,
) -> None:
    rng, num_failures = random.Random(seed), 0

    def fault(where: str) -> BaseException | None:
        return Broken(where) if rng.random() < rate / 2 and num_failures < 60 else None

    def guess(request_id: str, num_outputs: int) -> list[int]:
        name, _, child = request_id.partition("#")
        right = expected[int(name)][int(child or 0)][num_outputs : num_outputs + rng.randint(0, 3)]
        return [token_id if rng.random() < 0.7 else 3 for token_id in right]

    engine = make_engine(
        make_executor=faulty(fault, depth, (lambda _, inner: DraftingExecutor(inner, guess)) if drafts else None),
        async_scheduling=ahead,
        enable_prefix_caching=caching,
        num_gpu_blocks_override=6 + spare_blocks,
        max_num_batched_tokens=budget,
        max_num_seqs=4,
    )
    outputs = add_all(engine)
    for _ in range(3000):
        if not engine.has_unfinished_requests:
            break
        try:
            engine.step()
        except Broken:
            num_failures += 1
        check_books(engine)
    assert [tokens(output) for output in outputs] == expected
    assert engine.core.scheduler.kv.num_used_blocks == 0
    # What failed steps left in the cache must not be wrong either.
    for i, (prompt, params) in enumerate(REQUESTS):
        output = engine.add_request(str(i), prompt, params)
        while engine.has_unfinished_requests:
            try:
                engine.step()
            except Broken:
                num_failures += 1
        assert tokens(output) == expected[i]


def test_rows_do_not_leak_over_many_failures_of_the_same_requests(expected: list[list[list[int]]]) -> None:
    failing = [True]

    def fault(where: str) -> BaseException | None:
        return Broken() if failing[0] and where == "after execute" else None

    engine = make_engine(make_executor=faulty(fault))
    outputs = add_all(engine)
    for _ in range(20):
        with pytest.raises(Broken):
            engine.step()
        check_books(engine)
    failing[0] = False
    while engine.has_unfinished_requests:
        engine.step()
    assert [tokens(output) for output in outputs] == expected


def test_the_core_alone_takes_ids_and_gives_ids() -> None:
    engine = make_engine(async_scheduling=True)
    core, params = engine.core, SamplingParams(temperature=0, max_tokens=5)
    assert isinstance(core, EngineCore) and not core.has_unfinished and core.step() == []
    prepared = engine.inputs.prepare(random_ids(9), params)
    [request] = engine.inputs.requests("a", prepared, priority=0, arrival_time=0.0)
    core.add(request)
    sampled = []
    num_steps = 0
    while core.has_unfinished:
        sampled += [token_id for update in core.step() for token_id in update.new_token_ids]
        num_steps += 1
    assert num_steps == 6  # the first returns nothing: its tokens are one step late
    assert request.finished and sampled == request.output_token_ids
    reference("qwen3").judge(random_ids(9), sampled)


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_a_prompt_is_hashed_when_its_step_is_under_way(async_scheduling: bool) -> None:
    num_findable: dict[str, int] = {}

    def look(point: str) -> None:
        num_findable.setdefault(point, len(engine.core.scheduler.kv.cache))

    engine = make_engine(make_executor=faulty(look, 2), async_scheduling=async_scheduling)
    engine.add_request("a", random_ids(40), SamplingParams(max_tokens=1))
    engine.step()
    assert num_findable["after sample"] == 0
    assert len(engine.core.scheduler.kv.cache) == 2


def test_its_loop_runs_ahead_as_the_lesson_asks_of_its_readers() -> None:
    assert contract_turn(EngineCore.turn) == 6


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_a_bound_on_steps_makes_chunks_beside_decodes_short_and_changes_no_token(async_scheduling: bool) -> None:
    """The bound is below what any step takes, so prompts get the fewest tokens once one has been timed."""
    engine = make_engine(max_step_ms=1e-6, max_num_batched_tokens=64, async_scheduling=async_scheduling)
    schedule, chunks = engine.core.scheduler.schedule, list[tuple[int, int]]()  # type: ignore[attr-defined]

    def watched() -> Any:
        plan = schedule()
        lens = [each.num_tokens for each in plan.scheduled]
        chunks.append((lens.count(1), sum(lens) - lens.count(1)))
        return plan

    engine.core.scheduler.schedule = watched  # type: ignore[attr-defined]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    prompts = [random_ids(60, seed=1), *(random_ids(70, seed=seed) for seed in (2, 3, 4))]
    outputs = [engine.add_request("0", prompts[0], params)]
    while not outputs[0].outputs[0].token_ids:
        engine.step()
    outputs += [engine.add_request(str(i), prompt, params) for i, prompt in enumerate(prompts[1:], 1)]
    while engine.has_unfinished_requests:
        engine.step()
    free = make_engine()
    expected = [free.add_request(str(i), prompt, params) for i, prompt in enumerate(prompts)]
    while free.has_unfinished_requests:
        free.step()
    assert list(map(tokens, outputs)) == list(map(tokens, expected))
    beside = [num_prompt_tokens for num_decodes, num_prompt_tokens in chunks if num_decodes and num_prompt_tokens]
    assert beside and max(beside) == 32
    assert max(num_prompt_tokens for num_decodes, num_prompt_tokens in chunks if not num_decodes) > 32
