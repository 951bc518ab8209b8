"""Ranks and replicas as a user meets them: what they refuse in one line, and that nothing of them outlives Ctrl-C."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.processes import children, descendants, is_gone, num_rings
from tests.programs import start_program
from tests.thorough import THOROUGH, only_thorough
from tests.waiting import HANG_SECONDS, wait_for

CPU = ("--device", "cpu", "--dtype", "float32")
TP, PP, DP = "--tensor-parallel-size", "--pipeline-parallel-size", "--data-parallel-size"


GENERATE, INFO = ("generate", "--prompt", "x"), ("info",)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ((TP, "3"), "tensor_parallel_size=3 does not divide the model's attention heads (8): set tensor_parallel_"),
        ((TP, "16"), "tensor_parallel_size=16 does not divide the model's attention heads (8): set tensor_parallel_"),
        ((TP, "0"), "tensor_parallel_size=0: must be at least 1"),
        ((PP, "7"), "pipeline_parallel_size=7 is more than the model's 6 layers: set pipeline_parallel_size=6 or less"),
        ((PP, "2", "--async-scheduling"), "async_scheduling=True needs sampled tokens where the next step begins, and"),
        ((TP, "2", "--enable-expert-parallel"), "enable_expert_parallel=True spreads experts over ranks, and Qwen3For"),
        pytest.param(  # which imports transformers
            (TP, "2", "--model-impl", "transformers"),
            "Qwen3ForCausalLM runs through transformers' code, of which no ",
            marks=only_thorough,
        ),
    ],
    ids=str,
)
def test_what_ranks_cannot_share_is_one_line_and_nobody_is_started(teachllm, flags: tuple[str, ...], says: str) -> None:
    before = children(os.getpid()), num_rings(os.getpid())
    for command in (GENERATE, INFO) if THOROUGH or flags == (TP, "3") else (GENERATE,):
        result = teachllm(*command, *CPU, *flags)
        assert (result.exit_code, result.stdout) == (1, "")
        assert result.stderr.startswith(f"error: {says}") and result.stderr.count("\n") == 1
        assert (children(os.getpid()), num_rings(os.getpid())) == before


@pytest.mark.skipif(not THOROUGH, reason="starts two processes each: make test-thorough")
@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ((TP, "2", "--kv-cache-memory-bytes", "1000"), "the KV cache would hold 0 tokens, less than one sequence"),
        ((TP, "2", "--trace", "/nowhere/run.jsonl"), "trace_path='/nowhere/run.jsonl' cannot be written: No such"),
        ((DP, "2", "--enable-expert-parallel"), "enable_expert_parallel=True spreads experts over ranks, and Qwen3For"),
    ],
    ids=["memory", "trace", "experts"],
)
def test_what_started_ranks_or_replicas_refuse_is_one_line_and_ends_all(
    teachllm, flags: tuple[str, ...], says: str
) -> None:
    before = children(os.getpid()), num_rings(os.getpid()), os.listdir("/dev/fd")
    result = teachllm("generate", "--prompt", "x", *CPU, *flags)
    assert (result.exit_code, result.stdout) == (1, "")
    first, *table = result.stderr.splitlines()
    assert first.startswith(f"error: {says}") and all(line.startswith("  ") for line in table)
    assert (children(os.getpid()), num_rings(os.getpid()), os.listdir("/dev/fd")) == before


@pytest.mark.slow
@only_thorough
@pytest.mark.parametrize(("ranks", "is_loading"), [(TP, True), (TP, False), (DP, False)], ids=str)
def test_ctrl_c_ends_all_of_them_without_a_word(ranks: str, is_loading: bool, tmp_path: Path) -> None:
    files = tmp_path / "temporary"
    files.mkdir()
    trace = tmp_path / ("run-0.jsonl" if ranks == DP else "run.jsonl")
    endless = ("--prompt", "a b c", "--temperature", "0", "--max-tokens", "4000", "--stop", "never")
    options = (*CPU, ranks, "2", "--trace", str(tmp_path / "run.jsonl"))
    child = start_program(  # in a session, as a shell gives each command a group of its own
        *("-m", "teachllm_cli", "generate", *endless, *options),
        environment={"TMPDIR": str(files)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        if is_loading:
            wait_for(lambda: len(children(child.pid)) == 2)
        else:
            wait_for(lambda: trace.exists() and '"event":"step"' in trace.read_text())
        family = descendants(child.pid)
        assert len(family) == 2
        os.killpg(child.pid, signal.SIGINT)
        # Waits for whatever has its pipes open, as ranks do.
        assert child.communicate(timeout=HANG_SECONDS) == ("", "")
        assert child.returncode == 130
        assert all(map(is_gone, family)) and not list(files.iterdir())
    finally:
        child.kill()
