"""`teachllm complete`: raw continuations of prompts by a running server, as they come."""

from __future__ import annotations

import contextlib
import json as json_format
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from teachllm_cli.commands.generate import read_prompts
from teachllm_cli.conversation.openai_client import OpenAIClient
from teachllm_cli.errors import one_line_errors
from teachllm_cli.options.sampling_options import (
    AsJson,
    GivenParams,
    NumCompletions,
    PromptFile,
    Prompts,
    sampling_command,
)
from teachllm_cli.options.server_options import PANEL, ApiKey
from teachllm_cli.terminal import answers, write_model_text


@dataclass
class Completion:
    """One continuation as far as it has come."""

    prompt: str
    text: str = ""
    finish_reason: str | None = None


@sampling_command
def complete(
    sampling: GivenParams,
    url: Annotated[
        str, typer.Option(help="Where the server is, with or without /v1.", rich_help_panel=PANEL)
    ] = "http://127.0.0.1:8000",
    model: Annotated[
        str | None,
        typer.Option("--model", "-m", help="Which of its models. Default: the first.", rich_help_panel=PANEL),
    ] = None,
    api_key: ApiKey = None,
    prompt: Prompts = None,
    prompt_file: PromptFile = None,
    json: AsJson = False,
    n: NumCompletions = 1,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Continue one or more prompts on a running server. What is piped into stdin is one prompt."""
    with one_line_errors(debug=debug):
        prompts = _prompts(prompt, prompt_file)
        body = {"prompt": prompts[0] if len(prompts) == 1 else prompts, "max_tokens": 128, **sampling}
        if n != 1:
            body["n"] = n
        with (
            contextlib.closing(OpenAIClient(url, api_key=api_key, model=model)) as client,
            contextlib.closing(client.stream("/v1/completions", body)) as chunks,
        ):
            print_chunks = _print_json if json else _print_readable
            print_chunks(chunks, [Completion(text) for text in prompts for _ in range(n)], n)


def _prompts(given: Sequence[str] | None, file: str | None) -> list[str]:
    prompts = [*(given or []), *(read_prompts(file) if file else [])]
    if not prompts and file is None and not sys.stdin.isatty():
        prompts = [text] if (text := sys.stdin.read().removesuffix("\n")) else []
    if not prompts:
        raise ValueError("no prompt: give --prompt TEXT, --prompt-file FILE (- reads stdin), or pipe one in")
    return prompts


def _grow(chunks: Iterable[Mapping[str, Any]], completions: Sequence[Completion]) -> Iterator[Mapping[str, Any]]:
    """Adds each chunk to the completions that it is of, and hands it on."""
    for chunk in chunks:
        for choice in chunk.get("choices") or ():
            completion = completions[choice.get("index") or 0]
            completion.text += choice.get("text") or ""
            completion.finish_reason = choice.get("finish_reason") or completion.finish_reason
        yield chunk


def _print_json(chunks: Iterable[Mapping[str, Any]], completions: Sequence[Completion], n: int) -> None:
    """In the order of the prompts, each as soon as all before it have been printed."""
    num_printed = 0
    for _ in _grow(chunks, completions):
        while num_printed < len(completions) and completions[num_printed].finish_reason:
            completion = completions[num_printed]
            line: dict[str, Any] = {
                "prompt": completion.prompt,
                "text": completion.text,
                "finish_reason": completion.finish_reason,
            }
            if n > 1:
                line["index"] = num_printed % n
            typer.echo(json_format.dumps(line))
            num_printed += 1


def _print_readable(chunks: Iterable[Mapping[str, Any]], completions: Sequence[Completion], n: int) -> None:
    """One is shown as it comes, and the next once it is complete. Alone in a pipe, it is without its prompt."""
    console = answers()
    has_prompts = console.is_terminal or len(completions) > 1
    usage: Mapping[str, Any] = {}
    current, shown = 0, -1
    for chunk in _grow(chunks, completions):
        usage = chunk.get("usage") or usage
        while current < len(completions) and (completions[current].text or completions[current].finish_reason):
            completion = completions[current]
            if shown < 0 and has_prompts:
                write_model_text(console, completion.prompt, style="bold")
            write_model_text(console, completion.text[max(shown, 0) :])
            shown = len(completion.text)
            if not completion.finish_reason:
                break
            console.print("\n" if current + 1 < len(completions) else "")
            current, shown = current + 1, -1
    if console.is_terminal and usage:
        figures = f"{usage.get('prompt_tokens')} prompt tokens; {usage.get('completion_tokens')} output tokens"
        console.print(
            f"[{figures}; {', '.join(str(each.finish_reason) for each in completions)}]", style="dim", markup=False
        )
