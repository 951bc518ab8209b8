"""A server of two replicas: one address, the metrics of both, a trace of each, and one end."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random

from teachllm import LLM, SamplingParams
from tests.server.fake_engine import error_of
from tests.server.kill import kill_under_load, replica_of_server
from tests.server.process import engine_processes, started
from tests.waiting import wait_for

SMALL = ("--device", "cpu", "--max-model-len", "2048", "--max-num-seqs", "4", "--num-gpu-blocks-override", "512")


def test_two_replicas_answer_as_one_engine_does_and_die_together(llm: LLM, tmp_path: Path) -> None:
    flags = ("--served-model-name", "m", "--data-parallel-size", "2", "--trace-endpoint", *SMALL)
    with started("teachlm", *flags, TMPDIR=str(tmp_path)) as process:
        prompts = [f"Number {number}" for number in range(8)]
        params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
        expected = [output.outputs[0].text for output in llm.generate(prompts, params, use_tqdm=False)]
        process.event("ready")
        assert len(engine_processes(process.child.pid)) == 2
        assert process.http.get("/health").json() == {"status": "healthy"}

        def ask(prompt: str) -> dict:
            body = {"prompt": prompt, "max_tokens": 20, "ignore_eos": True, "temperature": 0}
            response = process.http.post("/v1/completions", json=body)
            assert response.status_code == 200
            return response.json()

        with ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(ask, prompts))
        assert [answer["choices"][0]["text"] for answer in answers] == expected

        def metrics() -> dict[str, str]:
            lines = process.http.get("/metrics").text.splitlines()
            return dict(line.rsplit(" ", 1) for line in lines if line.startswith("teachllm:"))

        label = 'model_name="m"'
        running = f"teachllm:num_requests_running{{{label}}}"
        wait_for(lambda: float(metrics()[running]) == 0)  # of both replicas
        values = metrics()
        assert float(values[f"teachllm:generation_tokens_total{{{label}}}"]) == 160
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

        death = kill_under_load(process, tmp_path, Random(49), num_streams=8, victims=replica_of_server(1))
        assert death.exit_code == 1
        assert "replica 1" in process.event("the engine died")["error"]
