"""`teachllm run-batch`: a file of requests in OpenAI's batch format, answered into another one."""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO

import typer

from teachllm.config import EngineConfig
from teachllm_cli.bench_output import check_folder, progress_bar
from teachllm_cli.options.engine_options import engine_command
from teachllm_cli.options.serving_options import (
    ChatTemplate,
    EnableAutoToolChoice,
    EngineSeed,
    ServedModelName,
    ToolCallParser,
    read_template,
)
from teachllm_cli.terminal import loading_bar, notes

if TYPE_CHECKING:
    from teachllm.server.openai.batches.batch import Totals
    from teachllm.server.openai.batches.batch_file import BatchPlan


@engine_command
def run_batch(
    engine: EngineConfig,
    input_file: Annotated[
        str,
        typer.Option(
            "--input-file",
            "-i",
            help='Lines like {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {...}}; - is '
            "stdin.",
        ),
    ],
    output_file: Annotated[
        str,
        typer.Option(
            "--output-file", "-o", help="Gets a line for each, in the order in which they are answered; - is stdout."
        ),
    ],
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Start anew, where the output would be gone on with.")
    ] = False,
    max_concurrency: Annotated[
        int | None, typer.Option(min=1, help="Requests that are open at a time. Default: twice --max-num-seqs.")
    ] = None,
    seed: EngineSeed = 0,
    served_model_name: ServedModelName = None,
    chat_template: ChatTemplate = None,
    enable_auto_tool_choice: EnableAutoToolChoice = False,
    tool_call_parser: ToolCallParser = None,
) -> None:
    """Answer a file of requests as the server would. What the output file answers already is not asked again."""
    try:
        from teachllm.server.openai.batches.batch import LocalServer, Totals
        from teachllm.server.openai.batches.batch_file import make_plan, take_up
    except ModuleNotFoundError as error:
        raise ImportError(f"run-batch needs {error.name}: pip install 'teachllm[serve]'") from None
    options: dict[str, Any] = {
        "served_model_names": tuple(served_model_name or ()),
        "chat_template": read_template(chat_template),
        "enable_auto_tool_choice": enable_auto_tool_choice,
        "tool_call_parser": tool_call_parser,
    }
    with _open_input(input_file) as source, _locked(output_file):
        goes_on = _check_output(output_file, input_file) and not overwrite
        plan = make_plan(source, take_up(Path(output_file)) if goes_on else frozenset())
        with _open_output(output_file, goes_on) as output:
            for line in plan.refusals:
                output.write(line)
            output.flush()
            totals, began = Totals(), time.perf_counter()
            try:
                if plan.offsets:
                    with loading_bar(engine.model) as progress:
                        server = LocalServer.start(replace(engine, seed=seed), progress=progress, **options)
                    with contextlib.closing(server):
                        began = time.perf_counter()
                        _answer(server, source, plan, output, max_concurrency or 2 * server.max_num_seqs, totals)
            finally:
                _say(plan, totals, time.perf_counter() - began)


def _answer(
    server: Any, source: BinaryIO, plan: BatchPlan, output: BinaryIO, max_concurrency: int, totals: Totals
) -> None:
    num_known = plan.num_lines - len(plan.offsets)

    def write(line: bytes) -> None:
        output.write(line)
        output.flush()

    with progress_bar("answered") as update:

        def on_answer() -> None:
            update(num_known + totals.num_answered + totals.num_refused, plan.num_lines)

        update(num_known, plan.num_lines)
        asyncio.run(
            server.answer(
                source, plan.offsets, write, max_concurrency=max_concurrency, totals=totals, on_answer=on_answer
            )
        )


def _say(plan: BatchPlan, totals: Totals, seconds: float) -> None:
    """What has become of the lines, in one line on stderr."""
    num_refused = totals.num_refused + len(plan.refusals)
    num_left = len(plan.offsets) - totals.num_answered - totals.num_refused
    parts = [f"{totals.num_answered} of {plan.num_lines} lines answered"]
    if totals.num_answered:
        tokens = f"{totals.num_prompt_tokens:,} tokens in, {totals.num_output_tokens:,} out"
        parts[0] += f" in {seconds:.1f} s ({tokens}, {totals.num_output_tokens / seconds:,.0f} tokens/s)"
    parts += [f"{plan.num_before} were before"] if plan.num_before else []
    parts += [f"{num_refused} refused"] if num_refused else []
    parts += [f"{num_left} left for the same command to go on with"] if num_left else []
    notes().print("; ".join(parts), markup=False, soft_wrap=True)


def _open_input(name: str) -> BinaryIO:
    """It can be read again from anywhere."""
    return io.BytesIO(sys.stdin.buffer.read()) if name == "-" else Path(name).open("rb")


def _locked(name: str) -> contextlib.AbstractContextManager[None]:
    from teachllm.server.openai.batches.batch_file import locked

    if name == "-":
        return contextlib.nullcontext()
    check_folder("--output-file", Path(name))
    return locked(Path(name))


def _check_output(name: str, input_name: str) -> bool:
    """Return whether there is such a file.

    Raises:
        ValueError: there cannot be one.
    """
    path = Path(name)
    if name == "-":
        return False
    check_folder("--output-file", path)
    if not path.exists():
        return False
    if not path.is_file():
        raise ValueError(f"--output-file {name}: this is no file (- is stdout)")
    if input_name != "-" and os.path.samefile(name, input_name):
        raise ValueError(f"--output-file {name} is the input, too: choose another")
    return True


@contextlib.contextmanager
def _open_output(name: str, goes_on: bool) -> Iterator[BinaryIO]:
    if name == "-":
        yield sys.stdout.buffer
        return
    with open(name, "ab" if goes_on else "wb") as file:
        yield file
