"""A server with the embedded model, for clients that other projects make.

    make test-clients

The clients are installed as they are, in an environment of their own. The server runs in the project's, with the
Python that TEACHLLM_PYTHON names.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator

import pytest

FLAGS = ("--port", "0", "--log-format", "json", "--enable-auto-tool-choice", "--tool-call-parser", "hermes")
# Read when the package is imported: it would look for prices on the internet.
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"


@pytest.fixture(scope="session")
def base_url() -> Iterator[str]:
    """The address of a server, as clients want it."""
    command = [os.environ["TEACHLLM_PYTHON"], "-m", "teachllm_cli", "serve", "teachlm", *FLAGS]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield f"{_address(process)}/v1"
        finally:
            process.terminate()


def _address(process: subprocess.Popen[str]) -> str:
    assert process.stderr is not None
    events = {}
    for line in process.stderr:
        if line.startswith("{"):
            events |= {(event := json.loads(line))["event"]: event}
        if "ready" in events:
            return str(events["listening"]["url"])
    raise RuntimeError(f"the server ended with {process.wait()}")


def get_weather(city: str) -> str:
    """The weather of a city."""
    return f"sunny in {city}"


@pytest.fixture
def question() -> str:
    """What the embedded model answers by calling `get_weather`."""
    return "What is the weather in Paris?"
