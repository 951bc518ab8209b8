"""What an executor makes of what its ranks say, and of what they do not say: refusals, failed steps, Ctrl-C."""

from __future__ import annotations

import logging
import re
from dataclasses import replace
from typing import Any

import pytest
import torch

from teachllm import EngineConfig
from teachllm.core.memory import NotEnoughMemoryError
from teachllm.core.scheduler_output import ModelRunnerOutput, ScheduledRequest, SchedulerOutput
from teachllm.distributed.group import CollectiveError
from teachllm.distributed.lockstep import Lockstep, close_ends, lockstep_ends
from teachllm.distributed.rendezvous import Rendezvous
from teachllm.spec_decode.step_times import Prior
from teachllm.worker.errors import EngineDeadError
from teachllm.worker.processes import worker_process
from teachllm.worker.processes.agreement import check_agreement, facts_of
from teachllm.worker.processes.answers import Kind
from teachllm.worker.processes.multiprocess import Peers
from teachllm.worker.processes.plan_codec import encode_output
from teachllm.worker.processes.rank_processes import devices_of
from teachllm.worker.processes.worker_process import prior_of, table_of
from tests.worker.engines import tiny
from tests.worker.processes.scripted import TWO, frame, scripted

PLAN = SchedulerOutput(0, [ScheduledRequest("a", 0, 1, [], True, 0, [])])
FAILED = frame(0, Kind.FAILED, "KeyError: 7", 1)


# -- what ranks say while they load ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"block_size": 32}, "block_size: 16 at rank 0; 32 at rank 1: start all ranks with the same settings"),
        ({"torch": "1.0"}, f"torch: '{torch.__version__}' at rank 0; '1.0' at rank 1: install the same everywhere"),
    ],
    ids=["settings", "versions"],
)
def test_ranks_that_disagree_are_ended_and_what_differs_is_named(
    changes: dict[str, Any], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = facts_of(EngineConfig(**tiny(**TWO)))
    first = [frame(0, Kind.FACTS, facts), frame(1, Kind.FACTS, facts | changes)]
    with pytest.raises(ValueError, match=f"^the ranks disagree about {re.escape(says)}$"):
        scripted(monkeypatch, first)


def test_equal_ranks_agree_whatever_their_device() -> None:
    check_agreement({rank: facts_of(EngineConfig(device=f"cuda:{rank}")) for rank in range(2)})
    facts = {rank: facts_of(EngineConfig()) for rank in (2, 1, 0)}
    facts[1]["torch"] = "1.0"
    with pytest.raises(ValueError, match=r"'.*' at ranks 0, 2; '1.0' at rank 1"):
        check_agreement(facts)


@pytest.mark.parametrize(
    ("said", "error", "message"),
    [
        (["too large", False, None], ValueError, "too large"),
        (["KeyError: 'x'", True, None], RuntimeError, "rank 1: KeyError: 'x'"),
        (["it does not fit\nused  9", False, "used  9"], NotEnoughMemoryError, "it does not fit\nused  9"),
    ],
    ids=["a setting", "a fault", "memory"],
)
def test_what_a_rank_refuses_is_raised_and_ends_all(
    said: list[Any], error: type[Exception], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(error) as refused:
        scripted(monkeypatch, [frame(1, Kind.REFUSED, said)])
    assert str(refused.value) == message and type(refused.value) is error


def test_every_rank_has_the_blocks_that_the_poorest_one_has(monkeypatch: pytest.MonkeyPatch) -> None:
    executor, _ = scripted(monkeypatch, [frame(0, Kind.READY, 120), frame(1, Kind.READY, 90)])
    assert executor.num_blocks == 90


# -- what they say of steps --------------------------------------------------------------------------------


def test_a_rank_that_does_not_come_out_of_a_failed_step_is_named_and_all_end(monkeypatch: pytest.MonkeyPatch) -> None:
    executor, ranks = scripted(monkeypatch)
    ranks.script += [FAILED, frame(0, Kind.RESULT, {}, 2)]
    with pytest.raises(EngineDeadError, match=r"^rank 0: KeyError: 7; and rank 1 did not come out of that step$"):
        executor.execute(PLAN).result()
    assert ranks.death is not None and ranks.now == 20


def test_a_rank_that_fails_in_a_step_that_another_completed_is_named_and_all_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    executor, ranks = scripted(monkeypatch)
    output = ModelRunnerOutput([[5]])
    ranks.script.append((0, Kind.OUTPUT, 1, encode_output(output)))
    assert executor.execute(PLAN).result() == output
    ranks.script += [frame(1, Kind.FAILED, "KeyError: 7", 1), (0, Kind.OUTPUT, 2, encode_output(output))]
    later = executor.execute(PLAN)
    for _ in range(2):
        with pytest.raises(EngineDeadError, match=r"^rank 1 failed in a step that the others completed: KeyError: 7$"):
            later.result()


def test_an_answer_to_a_call_that_ctrl_c_ended_is_not_taken_for_one_to_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    executor, ranks = scripted(monkeypatch)
    step = executor.execute(PLAN)
    ranks.script += [FAILED, KeyboardInterrupt()]
    with pytest.raises(KeyboardInterrupt):
        step.result()  # in the middle of call 2, by which the ranks meet
    ranks.script += [frame(rank, Kind.RESULT, {}, number) for number in (2, 3) for rank in (0, 1)]
    with pytest.raises(RuntimeError, match=r"^rank 0: KeyError: 7$"):
        step.result()
    assert not ranks.script  # it has waited for the answers to call 3


def test_with_replicas_a_failed_step_is_the_end_and_a_plan_that_cannot_be_told_is_no_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ends = lockstep_ends(2)
    try:
        mine, other = map(Lockstep, ends)
        executor, ranks = scripted(monkeypatch, peers=Peers(0, Rendezvous("127.0.0.1", 1, None), mine))
        with pytest.raises(OverflowError):
            executor.execute(SchedulerOutput(0, [replace(PLAN.scheduled[0], start=2**63)]))
        assert other.hear() and not other.is_behind
        step = executor.execute(PLAN)
        assert other.hear() and other.is_behind
        ranks.script.append(FAILED)
        with pytest.raises(EngineDeadError, match=r"^a step that all replicas took failed: rank 0: KeyError: 7$"):
            step.result()
    finally:
        close_ends(ends)


def test_a_rank_shows_where_it_failed_but_not_where_it_waited_for_one_that_has_ended(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO):
        worker_process._log("a step failed", CollectiveError("rank 0: all_reduce failed: closed by peer"))
        assert caplog.text == ""
        try:
            raise KeyError("nobody")
        except KeyError as error:
            worker_process._log("a step failed", error)
    assert "a step failed" in caplog.text and "Traceback" in caplog.text and "KeyError: 'nobody'" in caplog.text


def test_each_rank_has_a_gpu_of_its_own_from_the_named_one_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert devices_of(EngineConfig(device="cuda", **TWO), 2) == ["cuda:0", "cuda:1"]
    assert devices_of(EngineConfig(device="cuda:2", **TWO), 2) == ["cuda:2", "cuda:3"]
    assert devices_of(EngineConfig(device="cpu", **TWO), 2) == ["cpu", "cpu"]
    with pytest.raises(
        ValueError, match=r"need 2 GPUs from cuda:3 on, and this machine has 4 .* tensor_parallel_size$"
    ):
        devices_of(EngineConfig(device="cuda:3", **TWO), 2)


def test_what_was_timed_crosses_as_a_table() -> None:
    prior = Prior(lambda count, level: count + level / 10, 0.25)
    found = prior_of(table_of(prior, 4, 3))
    assert found is not None and found.per_token_behind == 0.25 and prior_of({}) is None
    assert [found.ratio(count, 2) for count in (0, 1, 4, 9)] == [1.2, 1.2, 4.2, 4.2]
