"""A user sees one clear line; `--debug` shows the traceback."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest

from teachllm.core.memory import NotEnoughMemoryError
from teachllm_cli import engine as engine_door
from teachllm_cli.__main__ import main
from teachllm_cli.errors import INTERRUPTED


def unframed(text: str) -> str:
    """Typer's message without the box around it and the lines it was broken into."""
    return " ".join(text.replace("│", " ").split())


@pytest.fixture
def engine_raises(monkeypatch) -> Callable[[BaseException], None]:
    """Lets the making of an engine end in an error."""

    def arrange(error: BaseException) -> None:
        def refuse(config):
            raise error

        monkeypatch.setattr(engine_door, "make_llm", refuse)

    return arrange


def test_settings_that_contradict_each_other_are_refused_in_one_line(teachllm, llm) -> None:
    result = teachllm("generate", "-p", "x", "--max-num-batched-tokens", "8", "--max-num-seqs", "16")
    assert result.exit_code == 1
    assert result.stderr.count("\n") == 1
    assert result.stderr.startswith("error: max_num_batched_tokens=8 is less than max_num_seqs=16")
    assert "raise the budget to 16, or set max_num_seqs=8" in result.stderr


def test_a_bad_sampling_value_says_what_is_allowed(teachllm, llm) -> None:
    result = teachllm("generate", "-p", "x", "--top-p", "1.5")
    assert (result.exit_code, result.stderr) == (1, "error: top_p=1.5: must be in (0, 1]\n")


def test_an_unknown_choice_lists_the_known_ones(teachllm, llm) -> None:
    result = teachllm("chat", "--dtype", "int3", stdin="Hi")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == "error: dtype='int3': choose one of auto, float32, bfloat16, float16\n"


def test_an_unknown_flag_and_a_value_of_the_wrong_type_are_named(teachllm) -> None:
    result = teachllm("chat", "--temprature", "1")
    assert result.exit_code == 2
    assert "No such option: --temprature" in unframed(result.stderr)
    result = teachllm("chat", "--max-tokens", "many")
    assert result.exit_code == 2
    assert "Invalid value for '--max-tokens'" in unframed(result.stderr)


def test_an_unknown_command_is_named(teachllm) -> None:
    result = teachllm("chatt")
    assert result.exit_code == 2
    assert "No such command 'chatt'" in unframed(result.stderr)


@pytest.mark.parametrize("kind", [ValueError, OSError, RuntimeError])
def test_what_the_engine_refuses_is_one_line_without_a_traceback(teachllm, engine_raises, kind) -> None:
    engine_raises(kind("model.safetensors: [bold]tensor[/bold]\n  is \x1b[31mcut short"))
    result = teachllm("chat", stdin="Hi")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == "error: model.safetensors: [bold]tensor[/bold] is [31mcut short\n"


def test_a_memory_table_stands_below_its_line(teachllm, engine_raises) -> None:
    engine_raises(NotEnoughMemoryError("too little: set max_model_len=8", "  weights  1 B\n  KV  2 B"))
    result = teachllm("chat", stdin="Hi")
    assert result.stderr == "error: too little: set max_model_len=8\n  weights  1 B\n  KV  2 B\n"


def test_an_unforeseen_error_is_one_line_with_its_kind(teachllm, engine_raises) -> None:
    engine_raises(ZeroDivisionError("integer division by zero"))
    result = teachllm("chat", stdin="Hi")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == "error: ZeroDivisionError: integer division by zero (--debug shows where)\n"


def test_debug_shows_the_traceback(teachllm, engine_raises) -> None:
    engine_raises(ValueError("refused"))
    result = teachllm("chat", "--debug", stdin="Hi")
    assert isinstance(result.exception, ValueError)
    assert result.exit_code == 1


def test_ctrl_c_while_loading_ends_with_130_and_no_word(teachllm, engine_raises) -> None:
    engine_raises(KeyboardInterrupt())
    result = teachllm("chat", stdin="Hi")
    assert (result.exit_code, result.output) == (130, "")


def test_ctrl_c_before_a_command_has_begun_ends_so_too(monkeypatch, capsys) -> None:
    def interrupted(prog_name: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("teachllm_cli.app.app", interrupted)
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == INTERRUPTED and capsys.readouterr().err == ""


def test_a_warning_is_one_line_too(teachllm, monkeypatch, llm) -> None:
    def warn(config):
        warnings.warn("running on the CPU: the GPU\nis too old", stacklevel=1)
        return llm

    monkeypatch.setattr(engine_door, "make_llm", warn)
    result = teachllm("generate", "-p", "x", "--max-tokens", "1")
    assert result.exit_code == 0, result.stderr
    assert "warning: running on the CPU: the GPU is too old\n" in result.stderr and "warnings.warn" not in result.stderr
