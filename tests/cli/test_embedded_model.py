"""The commands with the real engine and the model that comes with the package, each as a process."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from tests.programs import environment_with, run_program

GREEDY = ("--device", "cpu", "--temperature", "0")


def start(*arguments: str, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
    """What is piped in comes to a fresh interpreter, as a user's does."""
    command = ("-m", "teachllm_cli", *arguments, *(() if arguments[0] == "info" else GREEDY))
    if stdin is None:
        return run_program(*command, environment={"COLUMNS": "200"})
    pipes: dict[str, Any] = {"input": stdin, "capture_output": True, "text": True, "timeout": 120}
    return subprocess.run([sys.executable, *command], env=environment_with(COLUMNS="200"), **pipes)


def test_a_piped_question_prints_a_plain_answer_and_nothing_else() -> None:
    result = start("chat", stdin="What is a KV cache?\n")
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    assert "key" in result.stdout.lower()
    assert result.stdout.endswith("\n")
    assert all(line.isprintable() for line in result.stdout.splitlines())


def test_generate_prints_the_same_json_every_time() -> None:
    arguments = ("generate", "--prompt", "A KV cache", "--prompt", "Paged", "--max-tokens", "5", "--json")
    first, second = start(*arguments), start(*arguments)
    assert first.returncode == 0, first.stderr
    assert first.stdout == second.stdout
    lines = [json.loads(line) for line in first.stdout.splitlines()]
    assert [line["prompt"] for line in lines] == ["A KV cache", "Paged"]
    assert all(1 <= len(line["token_ids"]) <= 5 for line in lines)


def test_info_shows_where_the_memory_goes() -> None:
    result = start("info")
    assert result.returncode == 0, result.stderr
    for row in ("parameters", "weights", "KV per token", "KV per block", "KV cache"):
        assert row in result.stdout


def test_a_prompt_that_can_never_fit_is_one_line_with_the_numbers() -> None:
    result = start("generate", "--prompt", "word " * 100, "--max-model-len", "32")
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    assert "max_model_len" in result.stderr
