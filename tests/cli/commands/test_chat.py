"""`teachllm chat`: what is piped in, and what is typed."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from teachllm.sampling_params import SamplingParams
from teachllm_cli.commands import chat as chat_module
from teachllm_cli.conversation.answerers import EngineAnswerer
from teachllm_cli.conversation.chat_session import ChatSession
from teachllm_cli.conversation.history import Conversation, Turn


@pytest.fixture
def session(llm) -> ChatSession:
    console = Console(file=io.StringIO(), width=200, highlight=False)
    answerer = EngineAnswerer(llm, SamplingParams(temperature=0.0))
    return ChatSession(answerer=answerer, out=console, notes=console)


@pytest.fixture
def type_lines(monkeypatch, session):
    """Type lines into a session, then press Ctrl-D; returns what the terminal showed."""

    def type_them(*lines):
        waiting = list(lines)

        def next_line(_prompt):
            if not waiting:
                raise EOFError
            line = waiting.pop(0)
            if line is KeyboardInterrupt:
                raise KeyboardInterrupt
            return line

        monkeypatch.setattr("builtins.input", next_line)
        chat_module.talk(session)
        assert not waiting or lines[-len(waiting) - 1] == "/exit"
        return session.out.file.getvalue()

    return type_them


def test_a_piped_message_prints_the_answer_and_nothing_else(teachllm, llm) -> None:
    result = teachllm("chat", stdin="What is a\nKV cache?\n")
    assert result.stdout == "Keys and values, kept.\n"
    assert result.exit_code == 0
    assert llm.asked == [[("user", "What is a\nKV cache?")]]
    assert llm.closed


def test_a_piped_message_keeps_its_figures_on_stderr(teachllm, llm) -> None:
    result = teachllm("chat", "--stats", stdin="one two three four")
    assert result.stdout == "Keys and values, kept.\n"
    assert "4 prompt tokens, 2 from the prefix cache; 4 output tokens; first after" in result.stderr


def test_an_empty_stdin_is_refused_before_a_model_is_loaded(teachllm) -> None:
    result = teachllm("chat", stdin=" \n")
    assert result.exit_code == 1
    assert result.stdout == ""
    assert result.stderr.startswith("error: nothing to answer: stdin is empty")


def test_markup_and_control_characters_of_a_model_are_not_obeyed(teachllm, llm) -> None:
    llm.reply = "[bold]x[/bold]\x1b[31m\x07 \ty\r"
    assert teachllm("chat", stdin="Hi").stdout == "[bold]x[/bold] \ty\n"


def test_the_system_prompt_goes_first(teachllm, llm) -> None:
    teachllm("chat", "--system", "Be brief.", stdin="Hi")
    assert llm.asked == [[("system", "Be brief."), ("user", "Hi")]]


def test_a_chat_is_greedy_unless_the_checkpoint_or_a_flag_says_otherwise(teachllm, llm) -> None:
    teachllm("chat", stdin="Hi")
    assert llm.params.temperature == 0.0
    llm.generation_defaults = {"temperature": 0.6, "top_k": 20}
    teachllm("chat", stdin="Hi")
    assert (llm.params.temperature, llm.params.top_k) == (0.6, 20)
    teachllm("chat", "--temperature", "1.5", "--top-p", "0.5", "--seed", "7", "--max-tokens", "9", stdin="Hi")
    assert (llm.params.temperature, llm.params.top_k, llm.params.top_p) == (1.5, 20, 0.5)
    assert (llm.params.seed, llm.params.max_tokens) == (7, 9)


def test_ctrl_c_ends_a_piped_answer_quietly(teachllm, llm) -> None:
    llm.ctrl_c_after = 2
    result = teachllm("chat", stdin="Hi")
    assert result.exit_code == 130
    assert result.stdout == "Keys and"
    assert result.stderr == ""
    assert llm.closed


def test_earlier_turns_are_sent_again_as_they_were(type_lines, llm) -> None:
    type_lines("First?", "Second?")
    assert llm.asked[1] == [("user", "First?"), ("assistant", llm.reply), ("user", "Second?")]


def test_ctrl_c_stops_the_answer_keeps_what_was_said_and_keeps_the_chat(type_lines, llm) -> None:
    llm.ctrl_c_after = 2
    shown = type_lines("First?")
    assert "Keys and values,\nstopped\n" in shown
    assert llm.num_closed_streams == 1
    llm.ctrl_c_after = None
    type_lines("Second?")
    assert llm.asked[1] == [("user", "First?"), ("assistant", "Keys and values,"), ("user", "Second?")]


def test_ctrl_c_at_the_prompt_says_how_to_leave(type_lines, llm) -> None:
    assert "(Ctrl-D or /exit leaves)" in type_lines(KeyboardInterrupt, "Hi")
    assert llm.asked == [[("user", "Hi")]]


def test_exit_leaves_and_help_lists_every_command(type_lines, llm) -> None:
    shown = type_lines("/help", "/exit", "never read")
    for command in ("/help", "/reset", "/system TEXT", "/stats", "/exit", "Ctrl-C"):
        assert command in shown
    assert llm.asked == []


def test_reset_forgets_the_turns_and_keeps_the_system_prompt(type_lines, llm) -> None:
    type_lines("/system Be brief.", "First?", "/reset", "Second?")
    assert llm.asked[1] == [("system", "Be brief."), ("user", "Second?")]


def test_system_starts_the_conversation_over(type_lines, llm) -> None:
    shown = type_lines("First?", "/system", "/system Be brief.", "Second?", "/system")
    assert "There is no system prompt." in shown
    assert "Be brief." in shown
    assert llm.asked[1] == [("system", "Be brief."), ("user", "Second?")]


def test_stats_are_switched_on_and_off(type_lines) -> None:
    shown = type_lines("/stats", "one two", "/stats", "three")
    assert shown.count("from the prefix cache") == 1
    assert "2 prompt tokens, 1 from the prefix cache; 4 output tokens; first after" in shown
    assert "tokens/s" in shown


def test_an_unknown_command_is_named_and_not_sent(type_lines, llm) -> None:
    assert "/rest is no command: /help lists them." in type_lines("/rest")
    assert llm.asked == []


def test_a_conversation_that_outgrows_the_context_says_so_and_drops_its_oldest_turns(type_lines, session, llm) -> None:
    session.conversation = Conversation("Be brief.", [Turn("old " * 500, "o"), Turn("newer " * 300, "n")])
    shown = type_lines("Hi")
    assert "outgrew the context of 1000 tokens: the oldest turn is forgotten." in shown
    assert [text for _, text in llm.asked[0]] == ["Be brief.", "newer " * 300, "n", "Hi"]


def test_a_question_that_never_fits_is_refused_and_the_chat_goes_on(type_lines, capsys, llm) -> None:
    shown = type_lines("word " * 1000, "Hi")
    assert "error: the prompt has 1000 tokens and max_model_len=1000" in capsys.readouterr().err
    assert llm.reply in shown


def test_the_banner_names_the_model_and_where_it_runs(session) -> None:
    chat_module.print_banner(session)
    assert "teachlm on the CPU, with a context of 1000 tokens" in session.out.file.getvalue()


def test_an_answer_cut_off_by_max_tokens_says_what_to_raise(type_lines, llm, monkeypatch) -> None:
    whole = llm.stream_chat

    def cut(messages, params):
        for result in whole(messages, params):
            if result.finished:
                result.outputs[0].finish_reason = "length"
            yield result

    monkeypatch.setattr(llm, "stream_chat", cut)
    assert "cut off after 4 tokens: raise --max-tokens or --max-model-len" in type_lines("Hi")
