"""The engine's core elsewhere: refusals, seeds, traces, failed steps, and every way to end.

It is a thread here, with the code of both ends and the socket between them; once it is a process.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import tempfile
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import pytest

from teachllm import EngineConfig, SamplingParams
from teachllm.engine.async_llm import AsyncLLM
from teachllm.engine.llm_engine import Engine, EngineDeadError
from teachllm.engine.processes.core_messages import Died, Ready, Refused, decode_from_core, encode
from teachllm.models.model_config import load_model_config
from teachllm.trace.reader import read_trace
from tests.engine.processes.failing_traces import make_steps_fail
from tests.engine.streams import all_hear_that
from tests.processes import children, open_files
from tests.thorough import THOROUGH
from tests.waiting import wait_for
from tests.worker.engines import VARIED, drain, make_engine, random_ids, tiny, tokens
from tests.worker.processes.child_threads import cores_in_threads, in_processes, loading, patched, put_in_place, saying
from tests.worker.processes.process_trees import needs_proc

GREEDY = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
LONG = SamplingParams(temperature=0.0, max_tokens=80, ignore_eos=True)


def make_remote(**changes: Any) -> Engine:
    options = {name: changes.pop(name) for name in ("trace_sink", "progress") if name in changes}
    return Engine(EngineConfig(**tiny(**changes)), own_process=True, **options)


@pytest.fixture(autouse=True, scope="module")
def threads() -> Iterator[None]:
    with patched(cores_in_threads):
        yield


@pytest.fixture(scope="module")
def remote(threads: None) -> Iterator[Engine]:
    with closing(make_remote()) as engine:
        yield engine


def process_of(engine: Engine) -> Any:
    """Return what stands for the core's process."""
    return engine._core._links[0].process  # type: ignore[attr-defined]


def test_it_gives_what_an_engine_in_this_process_gives() -> None:
    found = []
    for make in (make_engine, make_remote):
        with closing(make()) as engine:
            outputs = [engine.add_request(str(i), random_ids(9, seed=i), each) for i, each in enumerate(VARIED)]
            drain(engine)
        found.append(outputs)
    for here, there in zip(*found, strict=True):
        assert tokens(here) == tokens(there) and len(here.outputs) == len(there.outputs)
        assert [each.finish_reason for each in here.outputs] == [each.finish_reason for each in there.outputs]
        for mine, its in zip(here.outputs, there.outputs, strict=True):
            assert mine.cumulative_logprob == pytest.approx(its.cumulative_logprob, abs=1e-3)
            assert [list(each) for each in mine.logprobs or ()] == [list(each) for each in its.logprobs or ()]
        assert [list(each or ()) for each in here.prompt_logprobs or ()] == [
            list(each or ()) for each in there.prompt_logprobs or ()
        ]


def test_what_is_refused_is_refused_at_once_and_with_the_numbers(remote: Engine) -> None:
    with pytest.raises(ValueError, match="the prompt has 96 tokens and max_model_len=96"):
        remote.add_request("long", random_ids(96), GREEDY)
    with pytest.raises(ValueError, match="not in the vocabulary"):
        remote.add_request("wrong", [10**6], GREEDY)
    with pytest.raises(ValueError, match="priority='high': must be a whole number"):
        remote.add_request("high", random_ids(4), GREEDY, priority="high")  # type: ignore[arg-type]
    assert not remote.has_unfinished_requests


def test_what_is_late_for_one_request_is_not_taken_for_another_of_its_name(remote: Engine) -> None:
    for _ in range(5):
        remote.add_request("a", random_ids(5), LONG)
        remote.step()
        remote.abort_request("a")
    output = remote.add_request("a", random_ids(9), GREEDY)
    drain(remote)
    engine = make_engine()
    expected = engine.add_request("a", random_ids(9), GREEDY)
    drain(engine)
    assert tokens(output) == tokens(expected)


def test_an_interrupt_ends_a_wait_and_the_core_cannot_be_looked_at(remote: Engine) -> None:
    remote.interrupt()
    assert remote.step() == []
    with pytest.raises(RuntimeError, match="in a process of its own"):
        _ = remote.core
    with closing(AsyncLLM.start(EngineConfig(**tiny()))) as llm, pytest.raises(ValueError, match="keeps its own pace"):
        llm.pause()


def test_a_forked_child_that_uses_and_closes_the_engine_leaves_its_parents_core_alone(remote: Engine) -> None:
    """The child says by its exit code how often it would have killed the core."""
    pid = os.fork()
    if pid == 0:
        code, killed = 99, []
        try:
            process_of(remote).kill = lambda: killed.append(process_of(remote))
            with pytest.raises(RuntimeError, match="the engine belongs to the process that this one was forked from"):
                remote.add_request("a", random_ids(9), GREEDY)
            with pytest.raises(RuntimeError, match="make one here, too"):
                remote.step()
            remote.close()
            code = len(killed)
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    output = remote.add_request("a", random_ids(9), GREEDY)
    drain(remote)
    assert len(tokens(output)[0]) == GREEDY.max_tokens


def test_resetting_the_prefix_cache_forgets_what_is_free(remote: Engine) -> None:
    def num_cached() -> int:
        output = remote.add_request("a", random_ids(40), GREEDY)
        drain(remote)
        return output.num_cached_tokens

    num_cached()
    assert num_cached() == 32
    remote.reset_prefix_cache()
    assert num_cached() == 0


def test_settings_that_are_refused_are_named_as_in_one_process() -> None:
    with pytest.raises(ValueError, match=r"max_model_len=100000 is more than the model's context"):
        make_remote(max_model_len=100_000)


def test_a_load_that_fails_is_told() -> None:
    wrong = EngineConfig(**tiny() | {"model": "/nowhere/at/all"})
    with pytest.raises(ValueError, match="there is no such folder"):
        Engine(wrong, own_process=True)
    with pytest.raises(ValueError, match="objects of this process"):
        Engine(EngineConfig(**tiny()), own_process=True, make_executor=lambda config, executor: executor)


@pytest.mark.parametrize("method", ["int8", "int4"])
def test_what_a_quantized_model_needs_of_a_gpu_comes_across(method: str) -> None:
    config = EngineConfig(**tiny(quantization=method, device="cuda"))
    plain = load_model_config(replace(config, quantization=None), "cuda")
    model_config = load_model_config(config, "cuda")
    assert model_config.weight_bytes < plain.weight_bytes
    assert (model_config.num_w8a8_parameters > 0) == (method == "int8")
    ready = Ready(config, model_config, num_blocks=7)
    assert decode_from_core(encode(ready)) == ready


def test_a_long_path_of_temporary_files_is_none_of_a_socket(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = tmp_path / ("long" * 20)
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    addresses = put_in_place(monkeypatch, saying(Refused("heard", is_fault=False)))
    with pytest.raises(ValueError, match=r"^heard$"):
        make_remote()
    [address] = addresses
    assert not Path(address.removeprefix("ipc://")).parent.exists() and not list(folder.iterdir())


@pytest.mark.parametrize("where", ["start_child", "CoreLink.send"])
def test_a_process_that_cannot_be_started_leaves_nothing_behind(
    where: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail(*_: Any, **__: Any) -> NoReturn:
        raise OSError("no more processes")

    before = open_files()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    put_in_place(monkeypatch, loading)
    monkeypatch.setattr(f"teachllm.engine.processes.core_link.{where}", fail)
    with pytest.raises(OSError, match=r"^no more processes$"):
        make_remote()
    assert not open_files() - before and not list(tmp_path.iterdir())


def test_what_a_replica_dies_of_while_another_one_loads_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    why = "the process of rank 0 has ended with SIGKILL"
    put_in_place(monkeypatch, saying(Died(why)), loading)
    with pytest.raises(EngineDeadError, match=f"^{why}$"):
        make_remote(data_parallel_size=2)


def test_a_trace_comes_across_and_is_written_there(tmp_path: Path) -> None:
    lines: list[str] = []
    path, seen = tmp_path / "run.jsonl", list[tuple[str, int, int]]()
    with closing(make_remote(trace_sink=lines.append, trace_path=str(path), progress=lambda *n: seen.append(n))) as e:
        e.add_request("a", random_ids(9), GREEDY)
        drain(e)
    assert seen and seen[-1][0] == "weights" and seen[-1][1] == seen[-1][2] > 0
    assert path.read_text().splitlines() == lines
    events = [json.loads(line)["event"] for line in lines]
    assert events[:2] == ["header", "arrival"] and events.count("step") == 20
    assert read_trace(path).lines[-1]["event"] == "step"


def test_a_full_disk_ends_the_trace_and_not_the_requests(caplog: pytest.LogCaptureFixture) -> None:
    full = Path("/dev/full")  # every write fails
    if not full.exists():
        pytest.skip("needs /dev/full")
    with closing(make_remote(trace_path=str(full))) as engine:
        output = engine.add_request("a", random_ids(4), GREEDY)
        drain(engine)
    assert output.outputs[0].finish_reason == "length"
    assert caplog.text.count("the trace ends here: /dev/full cannot be written: No space left") == 1


def test_a_step_that_fails_is_told_once_and_many_in_a_row_end_the_process(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    make_steps_fail(monkeypatch)
    with closing(make_remote(trace_path=str(tmp_path / "run.jsonl"))) as engine:
        engine.add_request("a", random_ids(4), LONG)
        with pytest.raises(RuntimeError, match="No space left"):
            for _ in range(100):
                engine.step()
        engine.abort_request("a")
        engine.interrupt()
        assert engine.step() == []  # it was told once
        assert process_of(engine).poll() is None
        failures: list[RuntimeError] = []
        with pytest.raises(EngineDeadError, match="exit code 1"):
            for i in range(100):
                engine.add_request(str(i), random_ids(4), LONG)
                try:
                    engine.step()
                except EngineDeadError:
                    raise
                except RuntimeError as error:
                    failures.append(error)
        assert len(failures) == 4  # with the first one


def test_closing_ends_the_core_and_leaves_nothing_behind() -> None:
    engine = make_remote()
    folder = Path(engine._core._links[0]._folder)  # type: ignore[attr-defined]
    assert not folder.exists()  # once both ends are connected
    engine.add_request("a", random_ids(4), LONG)
    engine.close()
    assert process_of(engine).returncode == 0
    engine.close()


@needs_proc
@pytest.mark.skipif(not THOROUGH, reason="test_expert_parallel.py has cores and ranks in processes")
def test_a_core_in_a_process_serves_streams_and_all_hear_of_it_when_its_rank_is_killed() -> None:
    """Of a process that dies itself test_data_parallel.py shows the same."""
    ended: list[Exception | None] = []

    async def main(llm: AsyncLLM) -> None:
        prompts = [random_ids(4 + i, seed=i) for i in range(3)]
        answers = await asyncio.gather(*(answer(llm, prompt) for prompt in prompts))
        local = make_engine()
        outputs = [local.add_request(str(i), prompt, GREEDY) for i, prompt in enumerate(prompts)]
        drain(local)
        assert answers == [tokens(output) for output in outputs]
        streams = [await llm.submit(prompt, LONG) for prompt in prompts]
        for stream in streams:
            await anext(stream)
        [rank] = children(process_of(llm._engine).pid)
        os.kill(rank, signal.SIGKILL)
        await all_hear_that("the process of rank 0 has ended with SIGKILL", streams)
        with pytest.raises(EngineDeadError, match=r"^the process of rank 0 has ended with SIGKILL$"):
            await llm.submit(random_ids(4), GREEDY)
        wait_for(lambda: bool(ended))
        assert isinstance(ended[0], EngineDeadError)

    with in_processes():
        llm = AsyncLLM.start(EngineConfig(**tiny(distributed_executor_backend="mp")), on_end=ended.append)
    with closing(llm):
        asyncio.run(main(llm))
    assert process_of(llm._engine).returncode == 1


async def answer(llm: AsyncLLM, prompt: list[int]) -> list[list[int]]:
    *_, output = [output async for output in llm.generate(prompt, GREEDY)]
    return tokens(output)
