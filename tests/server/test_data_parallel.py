"""A server of two replicas: one door, figures of both, a trace of each, and one end."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor

from tests.server.door import chunks, error_of
from tests.server.process import engine_processes, started
from tests.server.test_process import ENDLESS, refusal

SMALL = ("--device", "cpu", "--max-model-len", "1024", "--max-num-seqs", "4", "--num-gpu-blocks-override", "300")


def test_two_replicas_answer_behind_one_door_and_die_together() -> None:
    with started("--data-parallel-size", "2", "--trace-endpoint", *SMALL) as process:
        process.event("ready")
        engines = engine_processes(process.child.pid)
        assert len(engines) == 2
        assert process.http.get("/health").json() == {"status": "healthy"}

        def ask(number: int) -> dict:
            body = {"prompt": f"Number {number}", "max_tokens": 20, "ignore_eos": True, "temperature": 0}
            response = process.http.post("/v1/completions", json=body)
            assert response.status_code == 200
            return response.json()

        with ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(ask, range(8)))
        assert all(answer["usage"]["completion_tokens"] == 20 for answer in answers)

        told = process.http.get("/metrics").text
        values = dict(line.rsplit(" ", 1) for line in told.splitlines() if line.startswith("teachllm:"))
        label = 'model_name="teachlm"'
        assert float(values[f"teachllm:generation_tokens_total{{{label}}}"]) == 160
        assert float(values[f"teachllm:num_requests_running{{{label}}}"]) == 0
        for what in ("running", "waiting"):
            found = [f'teachllm:replica_requests_{what}{{{label},replica="{index}"}}' in values for index in range(3)]
            assert found == [True, True, False]

        arrivals = []
        for replica in range(2):
            with process.http.stream("GET", "/trace", params={"replica": replica}) as response:
                lines = (line for line in response.iter_lines() if line.startswith("data:"))
                assert '"event":"header"' in next(lines).replace(" ", "")
                arrivals.append(next(lines))
                assert '"event":"arrival"' in arrivals[-1].replace(" ", "")
        assert arrivals[0] != arrivals[1]
        error_of(process.http.get("/trace", params={"replica": 2}), 400)

        with process.stream({**ENDLESS, "max_tokens": 900}) as stream:
            pieces = stream.iter_text()
            text = next(pieces)
            os.kill(engines[1], signal.SIGKILL)  # not that of the request, which is in the first
            text += "".join(pieces)
        assert chunks(text)[-1]["error"]["code"] == 500
        assert process.http.get("/health").json() == {"status": "dead"}
        assert process.end() == 1
        assert "replica 1" in process.event("the engine died")["error"]
        assert process.other == []
    assert not any(os.path.exists(f"/proc/{pid}") for pid in engines)


def test_what_the_replicas_refuse_is_one_line() -> None:
    assert "max_model_len=100000" in refusal("--data-parallel-size", "2", "--max-model-len", "100000")
