"""`teachllm generate`: raw continuations of prompts, all in one batch."""

from __future__ import annotations

import json as json_format
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from teachllm.config import EngineConfig
from teachllm.outputs import RequestOutput
from teachllm_cli import engine as engine_door
from teachllm_cli.options.engine_options import engine_command
from teachllm_cli.options.sampling_options import (
    AsJson,
    GivenParams,
    NumCompletions,
    PromptFile,
    Prompts,
    sampling_command,
)
from teachllm_cli.speculation_line import speculation_line
from teachllm_cli.terminal import answers, notes, write_model_text

if TYPE_CHECKING:
    from rich.console import Console


@engine_command
@sampling_command
def generate(
    engine: EngineConfig,
    sampling: GivenParams,
    prompt: Prompts = None,
    prompt_file: PromptFile = None,
    json: AsJson = False,
    n: NumCompletions = 1,
) -> None:
    """Continue one or more prompts as they are, without a chat template."""
    prompts = [*(prompt or []), *(read_prompts(prompt_file) if prompt_file else [])]
    if not prompts:
        raise ValueError("no prompt: give --prompt TEXT, or --prompt-file FILE (- reads stdin)")
    llm = engine_door.make_llm(engine)
    try:
        params = engine_door.sampling_params(llm, {"max_tokens": 128}, sampling | {"n": n})
        results = llm.generate(prompts, params, use_tqdm=not json and notes().is_terminal)
        speculation = llm.speculation()
    finally:
        llm.close()
    print_results = _print_json if json else _print_readable
    print_results(prompts, results)
    if speculation is not None and not json:
        answers().print(f"[{speculation_line(speculation)}]", style="dim", markup=False, soft_wrap=True)


def read_prompts(name: str) -> list[str]:
    """The lines that hold more than white space."""
    text = sys.stdin.read() if name == "-" else Path(name).read_text(encoding="utf-8")
    return [line for line in text.splitlines() if line.strip()]


def _print_json(prompts: Sequence[str], results: Sequence[RequestOutput]) -> None:
    for prompt, result in zip(prompts, results, strict=True):
        for output in result.outputs:
            line = {
                "prompt": prompt,
                "text": output.text,
                "token_ids": output.token_ids,
                "finish_reason": output.finish_reason,
                "num_prompt_tokens": len(result.prompt_token_ids),
                "num_cached_tokens": result.num_cached_tokens,
            }
            if len(result.outputs) > 1:
                line["index"] = output.index
            typer.echo(json_format.dumps(line))


def _print_readable(prompts: Sequence[str], results: Sequence[RequestOutput]) -> None:
    console = answers()
    for prompt, result in zip(prompts, results, strict=True):
        for output in result.outputs:
            _print_completion(console, prompt, output.text)
            console.print(
                f"[{len(result.prompt_token_ids)} prompt tokens, {result.num_cached_tokens} cached; "
                f"{len(output.token_ids)} output tokens; {output.finish_reason}]\n",
                style="dim",
                markup=False,
            )


def _print_completion(console: Console, prompt: str, text: str) -> None:
    """The prompt in bold and what the model made of it, as one text."""
    write_model_text(console, prompt, style="bold")
    write_model_text(console, text)
    console.print()
