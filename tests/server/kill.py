"""A process of the engine that is killed in the middle of its work: everybody hears of it, and nothing stays behind."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, TypeAlias

import aiohttp

from tests.processes import descendants, is_gone, named_memory
from tests.server.client import DONE, Violation, check_error, connect, events, hold
from tests.server.process import Process, engine_processes, started
from tests.waiting import HANG_SECONDS, wait_for

_SETTINGS = ("--max-model-len", "2048", "--max-num-seqs", "12", "--num-gpu-blocks-override", "512")
_ENDLESS: dict[str, Any] = {"max_tokens": 1900, "ignore_eos": True}
Victims: TypeAlias = Callable[[int], list[int]]
_CHAT = [{"role": "user", "content": "Tell me a story."}]


@dataclass(frozen=True)
class Death:
    """
    Attributes:
        seconds_of_streams, seconds_of_server: from the kill to the end of the last stream, and of the process.
        health: what /health said after that of the streams: 503, or None if nobody listened any more.
        exit_code: of the server.
    """

    seconds_of_streams: float
    seconds_of_server: float
    health: int | None
    exit_code: int


def kill_once(
    rng: Random, num_streams: int = 16, settings: Sequence[str] = (), victims: Victims = engine_processes
) -> Death:
    """Starts a server, gives it work, kills its engine process and watches the rest; as `kill_under_load` says.

    Args:
        settings: of the server, behind those of all.
    """
    with tempfile.TemporaryDirectory() as folder, started(*_SETTINGS, *settings, TMPDIR=folder) as process:
        process.event("ready")
        return kill_under_load(process, Path(folder), rng, num_streams, victims)


def kill_under_load(process: Process, folder: Path, rng: Random, num_streams: int, victims: Victims) -> Death:
    """Give a server work, kill some of its processes and watch the rest.

    Args:
        folder: of the server's temporary files.
        victims: who is killed, given the server's process.

    Raises:
        Violation: something hangs, stays, or does not say that it failed.
    """
    family = descendants(process.child.pid)
    memory = named_memory([process.child.pid, *family])
    try:
        pids = victims(process.child.pid)
        seconds, killed_at, health = asyncio.run(_watch(process.url, pids, rng, num_streams))
        code = process.child.wait(HANG_SECONDS)
    except (aiohttp.ClientError, subprocess.TimeoutExpired) as error:
        raise Violation(f"{type(error).__name__}: {error}") from error
    ended_after = time.monotonic() - killed_at
    process.end()
    hold(code != 0, "the server's exit code is 0")
    _wait_until_gone([process.child.pid, *family])
    left = [path.name for path in folder.iterdir()]
    left += [path.name for path in memory if path.exists()]
    hold(not left, f"temporary files, or memory with a name, stay: {left}")
    hold(not process.other, f"beside the log, the server wrote {process.other}")
    died = process.event("the engine died")
    hold(bool(died["error"]), "the log does not say why the engine died")
    return Death(seconds, ended_after, health, code)


def rank_of_server(rank: int) -> Victims:
    """Of a server whose engine has ranks in processes of their own, one of these."""

    def victims(pid: int) -> list[int]:
        [engine] = engine_processes(pid)
        return [engine_processes(engine)[rank]]

    return victims


def replica_of_server(replica: int) -> Victims:
    """Of a server that has replicas of its engine, one of these."""
    return lambda pid: [engine_processes(pid)[replica]]


def kill_the_server(settings: Sequence[str]) -> None:
    """Kill a server without a warning: none of its processes stays behind."""
    with started(*_SETTINGS, *settings) as process:
        process.event("ready")
        family = descendants(process.child.pid)
        process.child.kill()
        _wait_until_gone(family)
        hold(len(family) > 1, f"the server had no processes but {family}")


async def _watch(url: str, pids: list[int], rng: Random, num_streams: int) -> tuple[float, float, int | None]:
    """Seconds until the last request ended, when the processes were killed, and the health after that."""
    async with connect(url) as session:
        begun = asyncio.Event()
        work = [_follow_stream(session, number, begun) for number in range(num_streams)]
        work += [_wait_for_answer(session, number) for number in range(4)]
        tasks = [asyncio.create_task(each) for each in work]
        async with asyncio.timeout(HANG_SECONDS):
            await begun.wait()
        await asyncio.sleep(rng.choice([0.0, rng.uniform(0.0, 1.0)]))  # mid-load means any moment of it
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        killed_at = time.monotonic()
        _, open_ones = await asyncio.wait(tasks, timeout=HANG_SECONDS)
        hold(not open_ones, f"{len(open_ones)} of {len(tasks)} requests hang")
        seconds = time.monotonic() - killed_at
        for task in tasks:
            task.result()
        return seconds, killed_at, await _health(session)


async def _follow_stream(session: aiohttp.ClientSession, number: int, begun: asyncio.Event) -> None:
    """A stream that ends with an error, if it has begun; else an error in its place."""
    body = _ENDLESS | {"stream": True, "n": 1 + number % 2}
    path, prompt = _prompt(number)
    async with session.post(path, json=body | prompt) as response:
        if response.status != 200:
            check_error(json.loads(await response.read()), response.status)
            hold(response.status in (500, 503), f"a dead engine's status is {response.status}")
            return
        told = []
        async for event in events(response):
            told.append(event)
            begun.set()
        hold(len(told) >= 2 and told[-1] == DONE, f"a stream ended with {told[-1:]}")
        check_error(told[-2], 500, 503)
        for event in told[:-2]:
            hold("error" not in event, f"an error in the middle of a stream: {event}")


async def _wait_for_answer(session: aiohttp.ClientSession, number: int) -> None:
    """An answer that is not streamed becomes an error."""
    path, prompt = _prompt(number)
    async with session.post(path, json=_ENDLESS | prompt) as response:
        hold(response.status in (500, 503), f"a dead engine's status is {response.status}")
        check_error(json.loads(await response.read()), response.status)


def _prompt(number: int) -> tuple[str, dict[str, Any]]:
    match number % 4:
        case 0:
            return "/v1/chat/completions", {"messages": _CHAT}
        case 1:
            return "/v1/completions", {"prompt": ["Once upon a time", "One day"]}
        case 2:
            return "/v1/completions", {"prompt": [5 + number % 7] * (10 * number + 1)}
    return "/v1/completions", {"prompt": "Once upon a time"}


async def _health(session: aiohttp.ClientSession) -> int | None:
    """Whoever asks is told that the engine is dead, and whoever wants more is refused, while somebody listens."""
    try:
        async with session.get("/health") as response:
            hold(response.status == 503, f"/health is {response.status} of a dead engine")
            hold(await response.json() == {"status": "dead"}, "/health does not say that the engine is dead")
        async with session.post("/v1/completions", json={"prompt": "a"}) as response:
            check_error(json.loads(await response.read()), 503)
        return 503
    except aiohttp.ClientConnectionError:
        return None


def _wait_until_gone(pids: list[int]) -> None:
    """Return when none of the processes is left; fail if one stays."""
    wait_for(lambda: all(map(is_gone, pids)))
