"""`teachllm chat`: a conversation with a model, or one answer to what is piped in."""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from teachllm.config import EngineConfig
from teachllm_cli import engine as engine_door
from teachllm_cli.chat_session import ChatSession
from teachllm_cli.conversation import Conversation
from teachllm_cli.engine_options import engine_command
from teachllm_cli.errors import print_error
from teachllm_cli.sampling_options import MaxTokens, MinP, RepetitionPenalty, Seed, Stop, Temperature, TopK, TopP
from teachllm_cli.terminal import answers, notes

if TYPE_CHECKING:
    from teachllm import LLM


@engine_command
def chat(
    engine: EngineConfig,
    system: Annotated[str | None, typer.Option(help="The system prompt.")] = None,
    stats: Annotated[
        bool, typer.Option("--stats", help="Show tokens, cache hits and speed after each answer.")
    ] = False,
    max_tokens: MaxTokens = 1024,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    min_p: MinP = None,
    repetition_penalty: RepetitionPenalty = None,
    seed: Seed = None,
    stop: Stop = None,
) -> None:
    """Talk to a model. What is piped into stdin is one message, and only its answer is printed."""
    interactive = sys.stdin.isatty()
    message = "" if interactive else sys.stdin.read().strip()
    if not interactive and not message:
        raise ValueError('nothing to answer: stdin is empty (try: echo "What is a KV cache?" | teachllm chat)')
    llm = engine_door.make_llm(engine)
    with contextlib.closing(llm):
        session = ChatSession(
            llm=llm,
            params=engine_door.sampling_params(
                llm,
                max_tokens=max_tokens,
                temperature=temperature,
                top_k=top_k,
                top_p=top_p,
                min_p=min_p,
                repetition_penalty=repetition_penalty,
                seed=seed,
                stop=stop,
            ),
            out=answers(),
            notes=answers() if interactive else notes(),
            show_stats=stats,
            interactive=interactive,
            conversation=Conversation(system=system),
        )
        if interactive:
            print_banner(session)
            talk(session)
        else:
            session.ask(message)


def print_banner(session: ChatSession) -> None:
    """Who answers, where it runs, and the one thing to know."""
    from rich.text import Text

    session.out.print(Text.assemble((session.llm.config.model, "bold cyan"), f" {_where(session.llm)}"))
    session.out.print("Ask something. /help lists the commands, Ctrl-C stops an answer, Ctrl-D leaves.\n", style="dim")


def talk(session: ChatSession) -> None:
    """Read lines and answer them, until /exit or Ctrl-D."""
    prompt = _prompt(session)
    while True:
        try:
            line = input(prompt).strip()
        except EOFError:
            session.out.print()
            return
        except KeyboardInterrupt:
            session.out.print("\n(Ctrl-D or /exit leaves)", style="dim")
            continue
        if line.startswith("/"):
            if not session.command(line):
                return
        elif line:
            answer(session, line)


def answer(session: ChatSession, question: str) -> None:
    """One answer under its speaker's colour; a question that is refused does not end the chat."""
    try:
        session.ask(question)
    except (ValueError, RuntimeError) as error:
        print_error(error)
    except KeyboardInterrupt:
        session.out.print("\nstopped", style="dim")
    session.out.print()


def _where(llm: LLM) -> str:
    device = llm.config.device
    place = "the CPU" if device.startswith("cpu") else f"the GPU ({device})"
    return f"on {place}, with a context of {llm.config.max_model_len} tokens"


def _prompt(session: ChatSession) -> str:
    """`> ` in colour. The marks \\001 and \\002 tell readline which characters take no room on the line."""
    try:
        import readline  # noqa: F401  # gives input() its history and editing keys
    except ImportError:
        return "> "
    return "\001\033[1;36m\002>\001\033[0m\002 " if session.out.color_system else "> "
