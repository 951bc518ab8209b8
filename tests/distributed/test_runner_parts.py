"""Runners of several ranks, given the same plans, sample what one alone does."""

from __future__ import annotations

import contextlib
import itertools
import random
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from teachllm import SamplingParams
from teachllm.config import EngineConfig
from teachllm.core.request import Request
from teachllm.core.scheduler import Scheduler
from teachllm.core.scheduler_output import NewRow, ScheduledRequest, SchedulerOutput
from teachllm.distributed.group import ProcessGroup
from teachllm.distributed.layout import Layout
from teachllm.distributed.ranks import Ranks
from teachllm.distributed.shards import spread
from teachllm.distributed.step_bytes import Counts, expected_rows, step_bytes
from teachllm.models import moe as models_moe
from teachllm.models.model_config import ModelConfig, load_model_config
from teachllm.models.own_model import model_of_rank
from teachllm.sampling.shared_filters import num_told
from teachllm.sampling.shared_vocabulary import Columns
from teachllm.sampling_params import FILTERS, PENALTIES
from teachllm.worker.cpu.model_runner import ModelRunner
from teachllm.worker.gpu.gpu_model_runner import GPUModelRunner
from teachllm_kernels.comm.one_shot_all_reduce import SymmetricBuffer
from tests.checkpoints import VOCAB_SIZE, build_config, make_checkpoint
from tests.distributed.processes import buffers_in, on_processes, through_host
from tests.distributed.threads import on_ranks
from tests.request_kinds import asking
from tests.thorough import THOROUGH, times
from tests.worker.gpu.interpreted_gpu import InterpretedRunner, interpret

NUM_BOX_ROWS, HIDDEN_SIZE = 8, 64  # some steps have more tokens
LAYOUTS = [Layout(2, 1), Layout(1, 2), Layout(2, 2), Layout(1, 3), Layout(4, 1)]
PARAMS = {
    "greedy": {"temperature": 0.0},
    "random": {"temperature": 0.9, "seed": 3},
    "filtered": asking(*FILTERS, temperature=0.8, seed=5),
    "nucleus": asking("top_p", temperature=0.8, seed=6),
    "penalties and logprobs": asking(*PENALTIES, "logprobs", "prompt_logprobs", temperature=0.7),
}
FEW_TOKENS = {"max_tokens": 6}  # each takes a second where kernels are interpreted


def work(
    ranks: Ranks,
    folder: str,
    params: dict[str, Any],
    counts_bytes: bool = False,
    make_runner: Callable[..., Any] = ModelRunner,
    device: str = "cpu",
) -> dict[str, list[int]]:
    """One rank's tokens of some requests, for which there are too few blocks. It has a scheduler of its own: told what
    the last stage sampled, all make the same plans, as if one had made them for all.

    Args:
        counts_bytes: what every step sends is looked at.
        make_runner: for `device`.
    """
    limits = {"num_gpu_blocks_override": 24, "max_num_batched_tokens": 16, "max_num_seqs": 4}
    of_device = {"device": device, "block_size": 4 if device == "cpu" else 16, "async_scheduling": False}
    layout = ranks.coords.layout
    shared = {"tensor_parallel_size": layout.tensor, "pipeline_parallel_size": layout.pipeline}
    config = EngineConfig(model=folder, **of_device, **limits, **shared)
    model = load_model_config(config, device)
    config = config.resolve(model.max_model_len)
    runner = make_runner(config, model, torch.device(device), ranks=ranks)
    scheduler = Scheduler(config, runner.memory.num_blocks, b"")
    draw = random.Random(1)
    requests = [
        Request(
            request_id=str(i),
            prompt_token_ids=[draw.randrange(VOCAB_SIZE) for _ in range(draw.randrange(3, 30))],
            sampling_params=SamplingParams(ignore_eos=True, **{"max_tokens": times(8, 12)} | params),
            eos_token_ids=frozenset(),
            arrival_time=0.0,
        )
        for i in range(6)
    ]
    for request in requests:
        scheduler.add(request)
    flying: deque[tuple[SchedulerOutput, Any]] = deque()
    while scheduler.has_unfinished or flying:
        plan = scheduler.schedule()
        if plan.scheduled:
            ranks.world.traffic.take()
            flying.append((plan, runner.sample(runner.execute(plan)).result()))
            if counts_bytes:
                counted, expected = ranks.world.traffic.take(), predicted(ranks, model, plan, requests[0])
                assert counted == expected, f"rank {ranks.coords.rank} sent {counted}, predicted were {expected}"
        if len(flying) >= layout.pipeline or not plan.scheduled:
            oldest, output = flying.popleft()
            told = torch.tensor([ids[0] if ids else -1 for ids in output.sampled_token_ids])
            ranks.world.broadcast(told, layout.stage(layout.pipeline - 1)[0])
            output.sampled_token_ids = [[i] if i >= 0 else [] for i in told.tolist()]
            if not ranks.coords.is_last_stage:
                runner.receive_sampled_tokens(oldest.step, output.sampled_token_ids)
            scheduler.update(oldest, output)
    return {request.request_id: list(request.token_ids) for request in requests}


_routes = threading.local()  # `of_this_thread`: the experts that its router has chosen


@contextlib.contextmanager
def routes_listened_to() -> Iterator[None]:
    routed = models_moe.route

    def route(*args: Any) -> Any:
        routes = routed(*args)
        _routes.of_this_thread.append(routes.experts)
        return routes

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(models_moe, "route", route)
        yield


def serve_or_run(ranks: Ranks, folder: str, num_tokens: Sequence[int]) -> list[tuple[Counts, Counts]]:
    """Steps of replicas that share experts, each with tokens of its own, or none.

    Returns:
        What this rank sent in each step: counted, and predicted by where the router sent rows. How many a rank gets is
        known to the others, who tell.
    """
    config = EngineConfig(model=folder, block_size=4, num_gpu_blocks_override=24, max_num_seqs=4)
    model = load_model_config(config)
    config = config.resolve(model.max_model_len)
    runner = ModelRunner(config, model, torch.device("cpu"), ranks=ranks)
    moe = runner.model.experts
    holders = spread(moe.num_experts, ranks.experts.size)
    num_own = num_tokens[ranks.coords.replica]
    found = []
    for step in range(3):
        chosen = _routes.of_this_thread = list[torch.Tensor]()
        ranks.world.traffic.take()
        if num_own:
            ids = [(7 * step + 3 * i + ranks.coords.replica) % VOCAB_SIZE for i in range(num_own)]
            row = NewRow(ids, num_own, SamplingParams(temperature=0.0), 0, 1, frozenset())
            share = ScheduledRequest(str(step), 0, num_own, [], True, 0, [*range(-(-num_own // 4))], row)
            runner.sample(runner.execute(SchedulerOutput(step, [share], [str(step - 1)] if step else [])))
        else:
            runner.execute_dummy_step()
        counted = ranks.world.traffic.take()
        twins, each = ranks.tensor, -(-num_own // ranks.tensor.size)
        rows = []
        for experts in chosen:
            dispatched = experts[twins.rank * each : (twins.rank + 1) * each].tolist()
            goes = [sum(bool(set(token) & set(held)) for token in dispatched) for held in holders]
            comes = ranks.experts.all_gather(torch.tensor(goes))[:, ranks.experts.rank].tolist()
            rows.append((sum(goes) - goes[ranks.experts.rank], sum(comes) - comes[ranks.experts.rank]))
        sizes = (model_of_rank(model, ranks.coords).num_layers, model.hidden_size, 4, num_own, int(num_own > 0))
        found.append((counted, step_bytes(ranks.coords, *sizes, top_k=moe.top_k, rows=rows)))
    return found


def predicted(ranks: Ranks, model: ModelConfig, plan: SchedulerOutput, request: Request) -> Counts:
    """Of a plan for requests that are all like this one."""
    num_layers = model_of_rank(model, ranks.coords).num_layers
    num_sampled = sum(share.samples for share in plan.scheduled)
    sampled = [num_sampled]
    if request.sampling_params.top_k > 0:
        sampled += [num_sampled, num_told(request.sampling_params.top_k, Columns(model.vocab_size, ranks.tensor))]
    return step_bytes(ranks.coords, num_layers, model.hidden_size, 4, plan.num_tokens, *sampled)


def generate(
    folder: str, layout: Layout, params: dict[str, Any], counts_bytes: bool = False
) -> list[dict[str, list[int]]]:
    """By every rank."""
    return on_ranks(layout, partial(work, folder=folder, params=params, counts_bytes=counts_bytes))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_checkpoint("llama_yarn", tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="module")
def alone(folder: str) -> Callable[[str], dict[str, list[int]]]:
    """What one rank samples, of each kind of request."""
    return cache(lambda kind: generate(folder, Layout(), PARAMS[kind])[0])


CASES = [
    (Layout(2, 2), "penalties and logprobs"),
    (Layout(1, 3), "random"),
    (Layout(4, 1), "nucleus"),
]


@pytest.mark.parametrize(("layout", "kind"), itertools.product(LAYOUTS, PARAMS) if THOROUGH else CASES, ids=str)
def test_ranks_sample_what_one_alone_does_and_send_the_bytes_that_were_predicted(
    folder: str, alone: Callable[[str], dict[str, list[int]]], layout: Layout, kind: str
) -> None:
    counts_bytes = kind in ("greedy", "random", "filtered")  # what the others send depends on what is sampled
    expected = alone(kind)
    assert generate(folder, layout, PARAMS[kind], counts_bytes) == [expected] * layout.num_ranks
    assert len(set(expected["0"])) > 8


@pytest.mark.parametrize("kind", PARAMS if THOROUGH else ["filtered"])
def test_nobody_samples_a_row_of_no_token(kind: str, tmp_path: Path) -> None:
    config = build_config("llama_yarn")
    config.vocab_size = VOCAB_SIZE + 5
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    [expected] = generate(str(tmp_path), Layout(), PARAMS[kind])
    assert all(found == expected for found in generate(str(tmp_path), Layout(times(2, 4), 1), PARAMS[kind]))


@pytest.mark.parametrize("num_tokens", [(9, 14), (0, 5)], ids=["both have tokens", "one is idle"])
@pytest.mark.parametrize("layout", [Layout(1, 1, True, 2), Layout(2, 1, True, 2)], ids=["dp=2", "dp=2 x tp=2"])
def test_replicas_that_share_experts_send_the_bytes_that_were_predicted(
    layout: Layout, num_tokens: tuple[int, int], tmp_path: Path
) -> None:
    work = partial(serve_or_run, folder=make_checkpoint("qwen3_moe", tmp_path), num_tokens=num_tokens)
    with routes_listened_to():
        of_ranks = on_ranks(layout, work)
    for number, steps in enumerate(of_ranks):
        for counted, expected in steps:
            assert counted == expected, f"rank {number}"
    assert any(counted["all_to_all"][1] > 0 for steps in of_ranks for counted, _ in steps)


def test_rows_that_travel_are_about_as_many_as_a_fair_router_sends() -> None:
    draw = random.Random(0)
    for num_experts, top_k, num_ranks in ((8, 2, 2), (128, 8, 4), (6, 6, 3)):
        held = spread(num_experts, num_ranks)
        tokens = [set(draw.sample(range(num_experts), top_k)) for _ in range(4000)]
        sent = sum(bool(token & set(each)) for token in tokens for each in held[1:])
        assert expected_rows(4000, num_experts, top_k, num_ranks) == pytest.approx(sent, rel=0.03)


def as_on_a_gpu(ranks: Ranks, **more: Any) -> dict[str, list[int]]:
    """As `work`, by a GPU's runner."""
    if torch.cuda.is_available():
        return work(through_host(ranks), make_runner=GPUModelRunner, device="cuda", **more)
    with pytest.MonkeyPatch.context() as patch:
        interpret(patch)
        return work(ranks, make_runner=InterpretedRunner, **more)


def through_memory(ranks: Ranks, boxes: Path, **more: Any) -> dict[str, list[int]]:
    """As `work`, by a GPU's runner, interpreted, whose ranks write small sums' parts into each other's memory."""
    with pytest.MonkeyPatch.context() as patch:
        interpret(patch)
        assert isinstance(ranks.tensor, ProcessGroup)
        ranks.tensor._symmetric_buffer = SymmetricBuffer(
            ranks.tensor.rank, buffers_in(boxes, 2, NUM_BOX_ROWS, HIDDEN_SIZE)
        )
        return work(ranks, make_runner=InterpretedRunner, **more)


def all_on_gpus(ranks: Ranks, folder: str) -> dict[str, dict[str, list[int]]]:
    """As `work`, by a GPU's runner, for each kind of request: the processes that do it take seconds to begin."""
    return {kind: as_on_a_gpu(ranks, folder=folder, params=params) for kind, params in PARAMS.items()}


@pytest.mark.gpu
@pytest.mark.parametrize("layout", [Layout(2, 1), Layout(1, 2), Layout(2, 2)], ids=str)
def test_ranks_on_gpus_sample_what_one_alone_does(folder: str, layout: Layout) -> None:
    assert torch.cuda.is_available()
    [expected] = on_processes(Layout(), partial(all_on_gpus, folder=folder))
    assert on_processes(layout, partial(all_on_gpus, folder=folder)) == [expected] * layout.num_ranks


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available() or not THOROUGH, reason="on a GPU the test above runs; it takes long")
def test_interpreted_stages_sample_what_one_alone_does(folder: str) -> None:
    params = PARAMS["penalties and logprobs"] | FEW_TOKENS
    [expected] = generate(folder, Layout(), params)
    interpreted = partial(as_on_a_gpu, folder=folder, params=params)
    assert on_processes(Layout(1, 2), interpreted) == [expected] * 2


@pytest.mark.slow
@pytest.mark.skipif(
    torch.cuda.is_available() or not THOROUGH,
    reason="on a GPU memory is shared by `open_symmetric_buffer`; it takes long",
)
def test_interpreted_ranks_that_write_to_each_other_sample_what_one_alone_does(folder: str, tmp_path: Path) -> None:
    params = PARAMS["random"] | FEW_TOKENS
    [expected] = generate(folder, Layout(), params)
    boxes = buffers_in(tmp_path, 2, NUM_BOX_ROWS, HIDDEN_SIZE)
    through = partial(through_memory, folder=folder, boxes=tmp_path, params=params)
    assert on_processes(Layout(2, 1), through) == [expected] * 2
    for rank, box in enumerate(boxes):  # the other one's last sums are there
        assert (box[:, 1 - rank] != 0).any() and (box[:, rank] == 0).all()
