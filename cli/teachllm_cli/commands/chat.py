"""`teachllm chat`: a conversation with a model, or one answer to what is piped in."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Annotated

import typer

from teachllm.config import EngineConfig
from teachllm_cli import engine as engine_door
from teachllm_cli.conversation.answerers import Answerer, EngineAnswerer, ServerAnswerer
from teachllm_cli.conversation.chat_session import ChatSession
from teachllm_cli.conversation.history import Conversation
from teachllm_cli.conversation.openai_client import OpenAIClient
from teachllm_cli.errors import print_error
from teachllm_cli.options.engine_options import engine_command, given_flags
from teachllm_cli.options.sampling_options import GivenParams, sampling_command
from teachllm_cli.options.server_options import PANEL, ApiKey
from teachllm_cli.terminal import answers, notes

_USUAL = {"max_tokens": 1024}


@engine_command
@sampling_command
def chat(
    context: typer.Context,
    engine: EngineConfig,
    sampling: GivenParams,
    system: Annotated[str | None, typer.Option(help="The system prompt.")] = None,
    stats: Annotated[
        bool, typer.Option("--stats", help="Show tokens, cache hits and speed after each answer.")
    ] = False,
    url: Annotated[
        str | None,
        typer.Option(
            help="Ask a running server in place of an engine here, like http://127.0.0.1:8000; --model then picks one "
            "of its models. What no flag says, the server decides.",
            rich_help_panel=PANEL,
        ),
    ] = None,
    api_key: ApiKey = None,
) -> None:
    """Talk to a model. What is piped into stdin is one message, and only its answer is printed."""
    flags = given_flags(context)
    if url is not None and (wrong := [flag for flag in flags if flag != "--model"]):
        raise ValueError(
            f"{wrong[0]} is a setting of an engine here, and --url asks one that runs: leave one of them out"
        )
    interactive = sys.stdin.isatty()
    message = "" if interactive else sys.stdin.read().strip()
    if not interactive and not message:
        raise ValueError('nothing to answer: stdin is empty (try: echo "What is a KV cache?" | teachllm chat)')
    if url is None:
        opened = _engine(engine, sampling)
    else:
        opened = _server(url, api_key, engine.model if "--model" in flags else None, sampling)
    with opened as answerer:
        session = ChatSession(
            answerer=answerer,
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


@contextlib.contextmanager
def _engine(engine: EngineConfig, sampling: GivenParams) -> Iterator[Answerer]:
    with contextlib.closing(engine_door.make_llm(engine)) as llm:
        yield EngineAnswerer(llm, engine_door.sampling_params(llm, _USUAL, sampling))


@contextlib.contextmanager
def _server(url: str, api_key: str | None, model: str | None, sampling: GivenParams) -> Iterator[Answerer]:
    with contextlib.closing(OpenAIClient(url, api_key=api_key, model=model)) as client:
        yield ServerAnswerer(client, _USUAL | sampling)


def print_banner(session: ChatSession) -> None:
    """Print the model, where it runs, and the one thing to know."""
    from rich.text import Text

    session.out.print(Text.assemble((session.answerer.name, "bold cyan"), f" {session.answerer.where}"))
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


def _prompt(session: ChatSession) -> str:
    """`> ` in colour. The marks \\001 and \\002 tell readline which characters take no room on the line."""
    try:
        import readline  # noqa: F401  # gives input() its history and editing keys
    except ImportError:
        return "> "
    return "\001\033[1;36m\002>\001\033[0m\002 " if session.out.color_system else "> "
