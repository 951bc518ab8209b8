"""A scheduler, a worker that knows what every slot holds, and an observer who believes neither.

Property tests and the soak drive a `World` by the same few calls. After each it checks the scheduler's own
invariants and, from what it returns, the rules of the design: who gets a token, who gives way, why
others wait, which blocks may be written, what a trace of block events adds up to, and that every output is the one
computed beforehand without an engine.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from random import Random

from teachllm.config import EngineConfig
from teachllm.core import invariants
from teachllm.core.request import FinishReason, Request, RequestStatus, WaitReason
from teachllm.core.scheduler import Scheduler
from teachllm.core.scheduler_output import ModelRunnerOutput, SchedulerOutput
from teachllm.sampling_params import SamplingParams
from tests.core.fake_runner import EOS, VOCABULARY, FakeRunner, extend, next_token, require
from tests.core.observer import PoolModel, View

STOP_ID = 1
_FAMILIES = [[2 + (7 * i * (f + 1) + f) % (VOCABULARY - 2) for i in range(64)] for f in range(3)]


@dataclass(frozen=True)
class Setting:
    """What a world is made of."""

    config: EngineConfig
    num_blocks: int
    max_in_flight: int = 1
    max_drafts: int = 0
    seed: int = 0


@dataclass(frozen=True)
class Arrival:
    """A request to add: the first `shared` tokens of a family of prompts, then `tail`."""

    family: int
    shared: int
    tail: tuple[int, ...] = ()
    n: int = 1
    max_tokens: int | None = 8
    min_tokens: int = 0
    priority: int = 0
    salt: str | None = None
    waits_for_ids: bool = False
    prompt_logprobs: bool = False
    stops: bool = False  # STOP_ID ends it
    ignore_eos: bool = False


@dataclass
class Flight:
    plan: SchedulerOutput
    result: ModelRunnerOutput | None  # None: the step has failed, or stands behind one that has
    scheduled_requests: list[tuple[Request, int]]  # with the number of preemptions when it was made
    blocks: set[int] = field(default_factory=set)  # what the plan may write to


class World:
    """One engine without tensors, and its observer."""

    def __init__(self, setting: Setting) -> None:
        self.setting, self.config = setting, setting.config
        self.scheduler = Scheduler(setting.config, setting.num_blocks, b"root")
        self.scheduler.kv.record_events()
        self.pool = PoolModel(setting.num_blocks)
        self.flights: deque[Flight] = deque()
        self.expected: dict[str, tuple[list[int], FinishReason]] = {}
        self.live: dict[str, Request] = {}
        self.num_steps = self.num_finished = self.num_preempted = 0
        self._roots: dict[str, int] = {}
        self._contents: dict[bytes, list[int]] = {}  # block hash -> what a block of that hash holds
        self._num_added = 0
        self.unreported: list[str] = []  # preempted, and no plan has said so yet
        self.runner = FakeRunner(
            num_blocks=setting.num_blocks,
            block_size=setting.config.block_size,
            root_of=self._roots.__getitem__,
            keeps_cache=setting.config.enable_kv_cache,
            max_rows=self.scheduler.max_num_seqs,
            max_drafts=setting.max_drafts if setting.config.enable_kv_cache else 0,
            runs_ahead=lambda name: self.config.async_scheduling and not self.live[name].waits_for_ids,
            rng=Random(setting.seed),
        )

    # -- what a user does ----------------------------------------------------------------------------------

    def add(self, arrival: Arrival) -> None:
        """Adds a request, or `n` of a group; one that can never fit must be refused and change nothing."""
        prompt = _FAMILIES[arrival.family][: arrival.shared] + list(arrival.tail)
        group = f"g{self._num_added}" if arrival.n > 1 else None
        for child in range(arrival.n):
            name = f"r{self._num_added}"
            self._num_added += 1
            request = Request(
                request_id=name,
                prompt_token_ids=list(prompt),
                sampling_params=SamplingParams(
                    n=arrival.n,
                    max_tokens=arrival.max_tokens,
                    min_tokens=arrival.min_tokens,
                    stop_token_ids=[STOP_ID] if arrival.stops else [],
                    ignore_eos=arrival.ignore_eos,
                    prompt_logprobs=0 if arrival.prompt_logprobs else None,
                ),
                eos_token_ids=frozenset([EOS]),
                priority=arrival.priority,
                cache_keys=(arrival.salt,) if arrival.salt else (),
                group=group,
                child_index=child,
                waits_for_ids=arrival.waits_for_ids,
            )
            limit, size = self.scheduler.max_model_len, self.config.block_size
            longest = limit if arrival.max_tokens is None else min(len(prompt) + arrival.max_tokens, limit)
            fits = 0 < len(prompt) < limit and -(-longest // size) <= self.setting.num_blocks
            before = self._snapshot()
            try:
                self.scheduler.add(request)
            except ValueError as error:
                require(not fits, f"{name} is refused and would fit: {error}")
                require(before == self._snapshot(), f"refusing {name} has changed something")
                continue
            require(fits, f"{name} is accepted and can never fit")
            # Who may read its blocks: with prefix caching equal salts, without it the group, or nobody.
            scope = ("salt", arrival.salt) if self.config.enable_prefix_caching else ("group", group or name)
            self._roots[name] = root = _number_of(repr(scope))
            self.expected[name] = _expect(request, prompt, root, longest)
            self.live[name] = request
        self._check()

    def finish(self, index: int, reason: FinishReason) -> None:
        """Ends a live request from outside: an abort, or a stop string."""
        if not self.live:
            return
        name = sorted(self.live)[index % len(self.live)]
        request = self.live.pop(name)
        require(self.scheduler.finish(name, reason, "stop"), f"{name} cannot be ended")
        require(not self.scheduler.finish(name, reason), f"{name} is ended twice")
        require(request.finished and request.finish_reason is reason, f"{name} does not know that it has ended")
        self._check()

    def reset_prefix_cache(self) -> None:
        self.scheduler.kv.reset_prefix_cache()
        require(self.scheduler.kv.pool.num_cached_blocks == 0, "a free block keeps its content after a reset")
        self._check()

    # -- what an engine does -------------------------------------------------------------------------------

    @property
    def is_full(self) -> bool:
        return len(self.flights) >= self.setting.max_in_flight

    def schedule(self, fails: int = 0) -> bool:
        """Makes a plan and hands it to the worker; returns whether there was anything to do.

        Args:
            fails: 1, the worker dies before it looks at the plan; 2, in the middle of it.
        """
        view = View(self)
        plan = self.scheduler.schedule()
        view.check(plan)
        invariants.check_plan(self.scheduler, plan)
        if plan.scheduled:
            self.num_steps += 1
            self._launch(plan, fails)
        self._check()
        return bool(plan.scheduled)

    def _launch(self, plan: SchedulerOutput, fails: int) -> None:
        requests = [self.live[scheduled.request_id] for scheduled in plan.scheduled]
        flight = Flight(plan, None, [(request, request.num_preemptions) for request in requests])
        for scheduled, request in zip(plan.scheduled, requests, strict=True):
            first_written = scheduled.start // self.config.block_size if self.config.enable_kv_cache else 0
            fresh = scheduled.new_block_ids[max(first_written - scheduled.first_new_block, 0) :]
            for earlier in self.flights:
                require(not earlier.blocks & set(fresh), f"step {plan.step} takes blocks that a plan in flight writes")
            flight.blocks.update(request.block_ids[first_written:])
        if any(earlier.result is None for earlier in self.flights):
            pass  # the worker is dead, and nobody has noticed yet
        elif fails == 2:
            self.runner.execute_and_lose(plan)
        elif fails == 0:
            flight.result = self.runner.execute(plan)
        self.flights.append(flight)

    def retire(self) -> None:
        """Gives the oldest plan's result to the scheduler, or tells it that the step has failed."""
        if not self.flights:
            return
        flight = self.flights[0]
        if flight.result is None:
            tokens = {name: list(request.token_ids) for name, request in self.live.items()}
            self.unreported += [r.request_id for r in self.scheduler.running if self._is_named(r)]
            self.scheduler.fail(flight.plan)
            for late in self.flights:
                self.runner.seen(late.plan)
                self.unreported += late.plan.preempted
            self.flights.clear()
            for name, request in self.live.items():
                require(list(request.token_ids) == tokens[name], f"{name} loses or gains tokens in a failing step")
        else:
            self.flights.popleft()
            self._update(flight)
        self._check()

    def _update(self, flight: Flight) -> None:
        assert flight.result is not None
        wanted = {
            request.request_id: index
            for index, (request, preemptions) in enumerate(flight.scheduled_requests)
            if not request.finished and request.num_preemptions == preemptions
        }
        self.runner.seen(flight.plan)
        updates = self.scheduler.update(flight.plan, flight.result)
        require([u.request.request_id for u in updates] == list(wanted), "late tokens are taken, or others are lost")
        for update in updates:
            request = update.request
            name, index = request.request_id, wanted[request.request_id]
            scheduled, sampled = flight.plan.scheduled[index], flight.result.sampled_token_ids[index]
            output, reason = self.expected[name]
            require(request.output_token_ids == output[: request.num_output_tokens], f"{name} has wrong tokens")
            require(update.new_token_ids == sampled[: len(update.new_token_ids)], f"{name}: not what was sampled")
            accepted = [
                a for a, b in zip(update.new_token_ids, scheduled.draft_token_ids, strict=False) if a == b or b < 0
            ]
            at_most = max(len(sampled) - 1, 0)
            require(update.num_accepted == min(len(accepted), at_most), f"{name}: {update.num_accepted} accepted")
            ended = len(request.output_token_ids) == len(output)
            require(ended == request.finished, f"{name}: finished={request.finished} too early or late")
            if ended:
                require(request.finish_reason is reason, f"{name} ends with {request.finish_reason}, not {reason}")
                del self.live[name]
                self.num_finished += 1
            else:
                require(len(update.new_token_ids) == len(sampled), f"{name} drops tokens and goes on")

    def step(self) -> bool:
        """One turn of an engine's loop: schedule as far ahead as allowed, then wait for the oldest result."""
        worked = self.schedule()
        if self.is_full or not worked:
            worked |= bool(self.flights)
            self.retire()
        return worked

    def drain(self) -> None:
        """Until all is finished: within a bound, with every block free and every row closed."""
        bound = 100 + 20 * sum(request.max_len for request in self.live.values())
        for _ in range(bound):
            if not self.live and not self.flights:
                break
            require(self.step(), "requests are left, nothing is in flight, and nothing is scheduled")
        require(not self.live, f"not finished after {bound} steps: {sorted(self.live)}")
        kv = self.scheduler.kv
        require(kv.num_used_blocks == 0 and not kv.pinned, "blocks are used when nobody runs")
        require(not kv._committed, "steps are remembered that have retired")
        self.add(Arrival(family=0, shared=1, max_tokens=1))
        last = next(iter(self.live), None)
        if last is not None:
            self.step()
            require(set(self.runner.rows) == {last}, f"rows stay open: {sorted(self.runner.rows)}")
            while self.flights:
                self.retire()

    # -- what the observer checks --------------------------------------------------------------------------

    def _is_named(self, request: Request) -> bool:
        """Whether a plan in flight computes tokens for it."""
        return any((request, request.num_preemptions) in flight.scheduled_requests for flight in self.flights)

    def _snapshot(self) -> object:
        scheduler, kv = self.scheduler, self.scheduler.kv
        waiting = [(request.request_id, request.wait) for request in scheduler.waiting]
        tables = [(request.request_id, list(request.block_ids)) for request in scheduler.running]
        return waiting, tables, kv.pool.num_free_blocks, kv.pool.num_cached_blocks, sorted(scheduler.requests)

    def _check(self) -> None:
        scheduler, kv = self.scheduler, self.scheduler.kv
        invariants.check(scheduler)
        for event in kv.drain_events():
            self.pool.replay(event)
        blocks = kv.pool.blocks
        require(self.pool.users == [block.ref_count for block in blocks], "block events and ref counts differ")
        require(self.pool.hashes == [block.block_hash for block in blocks], "block events and hashes differ")
        free_order = [block.block_id for block in kv.pool.free_blocks()]
        require(list(self.pool.free) == free_order, "block events and the free list differ")
        require(set(self.live) == set(scheduler.requests), "a request is lost, or one that ended lives on")
        waiting = list(scheduler.waiting)
        require(waiting == sorted(waiting, key=self.key), "the queue is out of order")
        for place, request in enumerate(waiting):
            require(request.wait is not None, f"{request.request_id} waits without a reason")
            assert request.wait is not None
            reason = request.wait.reason
            was_preempted = request.status is RequestStatus.PREEMPTED
            if reason is WaitReason.PREEMPTED:
                require(was_preempted, f"{request.request_id} was not preempted")
            elif place > 0:
                require(reason is WaitReason.BEHIND_HEAD, f"{request.request_id}: {request.wait}, and is not the head")
        if all(flight.result is not None for flight in self.flights):
            for block in blocks:
                if block.block_hash is not None:
                    held = self.runner.block(block.block_id)
                    known = self._contents.setdefault(block.block_hash, held)
                    require(held == known, f"block {block.block_id} does not hold what its hash says")

    def key(self, request: Request) -> tuple[int, ...]:
        priority = request.priority if self.config.scheduling_policy == "priority" else 0
        return priority, int(request.request_id[1:])


def _number_of(text: str) -> int:
    content = 7
    for byte in text.encode():
        content = extend(content, byte)
    return content


def _expect(request: Request, prompt: list[int], root: int, longest: int) -> tuple[list[int], FinishReason]:
    """The output of a request, without an engine."""
    params, content, output = request.sampling_params, root, []
    stop_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else request.eos_token_ids)
    for token_id in prompt:
        content = extend(content, token_id)
    while True:
        token_id = next_token(content, request.child_index, len(output), params.min_tokens, stop_ids)
        output.append(token_id)
        content = extend(content, token_id)
        if token_id in stop_ids and len(output) >= params.min_tokens:
            return output, FinishReason.STOP
        if len(prompt) + len(output) >= longest:
            return output, FinishReason.LENGTH
