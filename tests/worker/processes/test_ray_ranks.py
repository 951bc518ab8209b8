"""Ranks that Ray places: the same tokens, and the end of one is the end of all."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from concurrent.futures import Future
from pathlib import Path
from types import ModuleType

import pytest

from teachllm import LLM, EngineConfig, SamplingParams
from teachllm.worker.processes.ray_ranks import _tell, by_machine
from tests.processes import descendants, is_gone
from tests.programs import environment_with
from tests.thorough import THOROUGH
from tests.waiting import HANG_SECONDS, wait_for
from tests.worker.engines import random_ids, tiny
from tests.worker.processes.process_trees import needs_proc

RAY = {"tensor_parallel_size": 2, "distributed_executor_backend": "ray"}
GREEDY = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
_SCRIPT = """
import json
from teachllm import LLM, SamplingParams
llm = LLM(**{settings!r})
try:
    while True:
        [output] = llm.generate([{{"prompt_token_ids": {prompt}}}], {greedy!r}, use_tqdm=False)
        print(json.dumps(output.outputs[0].token_ids), flush=True)
except RuntimeError as error:
    print(json.dumps([str(error)]), flush=True)
    raise
"""


@pytest.mark.ray
@needs_proc
@pytest.mark.skipif(not THOROUGH, reason="Ray starts a dozen processes")
def test_two_actors_give_what_one_process_gives_and_when_one_is_killed_nothing_is_left() -> None:
    pytest.importorskip("ray", reason="Ray is not installed")
    prompt = random_ids(9)
    [expected] = LLM(**tiny()).generate([{"prompt_token_ids": prompt}], GREEDY, use_tqdm=False)
    code = _SCRIPT.format(settings=tiny(**RAY), prompt=prompt, greedy=GREEDY)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", code], env=environment_with(), text=True, **pipes) as engine:
        try:
            assert engine.stdout is not None and engine.stderr is not None
            assert json.loads(engine.stdout.readline()) == expected.outputs[0].token_ids
            pids = descendants(engine.pid)
            actors = [pid for pid in pids if b"RankActor" in Path(f"/proc/{pid}/cmdline").read_bytes()]
            assert len(actors) == 2
            os.kill(actors[0], signal.SIGKILL)
            *_, last = [line for line in engine.stdout if line.startswith("[")]  # Ray has something to say, too
            [why] = json.loads(last)
            assert re.search("with rank [01] has gone|Ray actor of rank [01] has ended", why)
            assert engine.wait(HANG_SECONDS) == 1
            assert engine.stderr.read().count("Traceback") == 1
        finally:
            engine.kill()
    wait_for(lambda: all(map(is_gone, pids)))


def test_neighbouring_ranks_share_a_machine_and_the_first_are_here() -> None:
    assert by_machine({0: "b", 1: "a", 2: "c", 3: "a", 4: "b"}, here="b") == [0, 4, 1, 3, 2]


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    said = r"^distributed_executor_backend=ray needs Ray: pip install 'teachllm\[ray\]'$"
    with pytest.raises(ImportError, match=said):
        LLM(**tiny(**RAY))


def test_an_actor_that_ends_with_an_error_without_text_ends_the_wait_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    exceptions = ModuleType("ray.exceptions")
    exceptions.RayTaskError = type("RayTaskError", (Exception,), {})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "ray", ModuleType("ray"))
    monkeypatch.setitem(sys.modules, "ray.exceptions", exceptions)
    said, ended = list[str](), Future[None]()
    ended.set_exception(AssertionError())
    _tell(1, said.append, ended)
    assert said == ["the Ray actor of rank 1 has ended: AssertionError"]


@pytest.mark.ray
def test_a_cluster_that_is_too_small_is_refused_with_its_size(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = pytest.importorskip("ray", reason="Ray is not installed")
    from teachllm.worker.processes.ray_ranks import plan_of_ray

    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 64.0, "GPU": 1.0})
    said = r"^tensor_parallel_size=2 x pipeline_parallel_size=1 need 2 GPUs, and the Ray cluster has 1: lower them, or"
    with pytest.raises(ValueError, match=said):
        plan_of_ray(EngineConfig(device="cuda", **RAY))
