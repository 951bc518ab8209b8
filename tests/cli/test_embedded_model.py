"""The commands with the real engine and the model that comes with the package."""

from __future__ import annotations

import json
import subprocess

from teachllm import __version__
from tests.programs import start_program
from tests.thorough import THOROUGH
from tests.waiting import HANG_SECONDS

GREEDY = ("--device", "cpu", "--temperature", "0")


def in_a_process(*arguments: str, stdin: str) -> tuple[int, str, str]:
    """As its user starts it."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with start_program("-m", "teachllm_cli", *arguments, **pipes) as process:
        stdout, stderr = process.communicate(stdin, timeout=HANG_SECONDS)
    return process.returncode, stdout, stderr


def test_a_piped_question_prints_a_plain_answer_and_nothing_else(teachllm) -> None:
    """In `make test` in this process: test_ranks.py and tests/server start the program."""
    if THOROUGH:
        code, stdout, stderr = in_a_process("chat", *GREEDY, stdin="What is a KV cache?\n")
    else:
        result = teachllm("chat", *GREEDY, stdin="What is a KV cache?\n")
        code, stdout, stderr = result.exit_code, result.stdout, result.stderr
    assert (code, stderr) == (0, "")
    assert "key" in stdout.lower() and stdout.endswith("\n")
    assert all(line.isprintable() for line in stdout.splitlines())


def test_generate_prints_the_same_json_every_time(teachllm) -> None:
    arguments = ("generate", "--prompt", "A KV cache", "--prompt", "Paged", "--max-tokens", "5", "--json", *GREEDY)
    first, second = teachllm(*arguments), teachllm(*arguments)
    assert first.exit_code == 0, first.stderr
    assert first.stdout == second.stdout
    lines = [json.loads(line) for line in first.stdout.splitlines()]
    assert [line["prompt"] for line in lines] == ["A KV cache", "Paged"]
    assert all(1 <= len(line["token_ids"]) <= 5 for line in lines)


def test_info_shows_where_the_memory_goes(teachllm) -> None:
    result = teachllm("info")
    assert result.exit_code == 0, result.stderr
    for row in ("parameters", "weights", "KV per token", "KV per block", "KV cache"):
        assert row in result.stdout


def test_a_prompt_that_can_never_fit_is_one_line_with_the_numbers(teachllm) -> None:
    result = teachllm("generate", "--prompt", "word " * 100, "--max-model-len", "32", *GREEDY)
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1
    assert "max_model_len" in result.stderr


def test_every_knob_of_the_engine_is_a_flag_of_every_command_that_starts_one(teachllm, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    for command in ("chat", "generate", "info"):
        shown = teachllm(command, "--help").stdout
        for flag in ("--model", "--dtype", "--device", "--max-model-len", "--block-size", "--enforce-eager", "--debug"):
            assert flag in shown, f"{command} {flag}"


def test_version_is_the_package_version(teachllm) -> None:
    assert teachllm("--version").stdout == f"teachllm {__version__}\n"


def test_a_refused_setting_is_one_line_and_exit_code_1(teachllm) -> None:
    result = teachllm("chat", "--block-size", "0", stdin="Hi")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == "error: block_size=0: must be at least 1\n"
    debugged = teachllm("chat", "--block-size", "0", "--debug", stdin="Hi")
    assert isinstance(debugged.exception, ValueError) and debugged.exit_code == 1
