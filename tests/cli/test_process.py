"""`teachllm` as its user starts it: a process."""

from __future__ import annotations

import resource
import subprocess
import sys
from collections.abc import Callable

from teachllm import __version__
from tests.programs import environment_with, run_program


def start(*arguments: str, python: tuple[str, ...] = (), stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *python, "-m", "teachllm_cli", *arguments],
        env=environment_with(COLUMNS="100"),
        input=stdin,
        capture_output=True,
        text=True,
        timeout=120,
    )


def seconds_of(ask: Callable[[], subprocess.CompletedProcess[str]]) -> float:
    """What a process has computed: a machine that does something else meanwhile adds little."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    result = ask()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert result.returncode == 0, result.stderr
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def test_help_lists_the_commands_as_soon_as_typer_can() -> None:
    shown = start("--help").stdout
    for command in ("chat", "generate", "info"):
        assert command in shown
    bare = [sys.executable, "-c", "import typer.rich_utils"]
    least = min(seconds_of(lambda: subprocess.run(bare, capture_output=True, text=True)) for _ in range(3))
    assert min(seconds_of(lambda: start("--help")) for _ in range(3)) < 4 * least  # 2.5 times


def test_help_loads_neither_torch_nor_transformers() -> None:
    result = start("chat", "--help", python=("-X", "importtime"))
    imported = {line.rpartition("|")[2].strip() for line in result.stderr.splitlines()}
    assert "typer" in imported
    assert not imported & {"torch", "transformers", "numpy"}


def test_every_knob_of_the_engine_is_a_flag_of_every_command_that_starts_one() -> None:
    for command in ("chat", "generate", "info"):
        shown = start(command, "--help").stdout
        for flag in ("--model", "--dtype", "--device", "--max-model-len", "--block-size", "--enforce-eager", "--debug"):
            assert flag in shown, f"{command} {flag}"


def test_version_is_the_package_version() -> None:
    assert start("--version").stdout == f"teachllm {__version__}\n"


def test_a_refused_setting_is_one_line_and_exit_code_1() -> None:
    result = start("chat", "--block-size", "0", stdin="Hi")
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr == "error: block_size=0: must be at least 1\n"


def test_debug_prints_the_traceback() -> None:
    result = start("chat", "--block-size", "0", "--debug", stdin="Hi")
    assert result.returncode == 1
    assert "Traceback (most recent call last)" in result.stderr
    assert result.stderr.endswith("ValueError: block_size=0: must be at least 1\n")


def test_replicas_complete_prompts_as_one_engine_does() -> None:
    prompts = [word for text in ("Once upon a time", "The", "What is a KV cache?") for word in ("--prompt", text)]
    options = ("--json", "--max-tokens", "8", "--device", "cpu", *prompts)
    command = ("-m", "teachllm_cli", "generate", *options)
    one, two = run_program(*command), run_program(*command, "--data-parallel-size", "2")
    assert one.returncode == 0 and one.stdout == two.stdout, two.stderr
    assert len(one.stdout.splitlines()) == 3
