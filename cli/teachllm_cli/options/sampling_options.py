"""The options of a request that `chat`, `generate` and `complete` share: one per parameter that names its help text.

SamplingParams is where a parameter is declared, checked and explained. A command that takes `sampling: GivenParams` and
is decorated with `sampling_command` gets an option for each. One that is not given is the checkpoint's default, else
greedy.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Annotated, Any, get_type_hints

import typer

from teachllm.sampling_params import PARAMETERS, SamplingParams

GivenParams = dict[str, Any]  # {parameter: value} of the options that were given
Prompts = Annotated[list[str] | None, typer.Option("--prompt", "-p", help="May be given several times.")]
PromptFile = Annotated[str | None, typer.Option(help="A file with one prompt a line; - reads them from stdin.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object a line.")]
NumCompletions = Annotated[int, typer.Option(help="Completions of each prompt.")]

# What a command does where the option is not given and that is not clear.
_DEFAULTS_TOLD = {
    "temperature": "Default: the checkpoint's own, else 0.",
    "max_tokens": "Default: what the checkpoint recommends, or else 128, in a chat 1024.",
}


def sampling_command(command: Callable[..., None]) -> Callable[..., None]:
    """Replace the parameter `sampling` of a command by the options that make it."""
    options = list(_options())

    @functools.wraps(command)
    def run(**values: Any) -> None:
        given = {option.name: values.pop(option.name) for option in options}
        command(sampling={name: value for name, value in given.items() if value is not None}, **values)

    parameters: list[inspect.Parameter] = []
    for own in inspect.signature(command, eval_str=True).parameters.values():
        parameters += options if own.name == "sampling" else [own.replace(kind=own.KEYWORD_ONLY)]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def _options() -> Iterator[inspect.Parameter]:
    types = get_type_hints(SamplingParams)
    for name, spec in PARAMETERS.items():
        if spec.option is None:
            continue
        kind: Any = list[str] if name == "stop" else types[name]  # it may be given several times
        text = " ".join(filter(None, (spec.option, _DEFAULTS_TOLD.get(name))))
        option = typer.Option(help=text, rich_help_panel="Sampling")
        annotation = Annotated[kind | None, option]
        yield inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=annotation, default=None)
