"""Thousands of requests of every kind against a server, and processes of every kind that are killed again and again.

    PYTHONPATH=.:kernels:cli python tests/server/soak.py --requests 3000 --clients 64
    PYTHONPATH=.:kernels:cli python tests/server/soak.py --hostile --seconds 600 --clients 16 --kills 0

Some clients hang up at a random token, some send what no server should accept; with `--hostile` some send the largest
that it accepts (hostile.py), and the disk for its trace is full. Afterwards no block is held, memory has stayed flat,
and every request is in the metrics. What is killed, and what must hold then: deaths.py. Prints figures and "no
violation"; or what was violated and the seed that `--seed` plays again, and exits 1. On loopback, with the embedded
model.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from random import Random

import aiohttp

from tests.bench.h200_script import load_script
from tests.processes import processes_for_texts
from tests.server import ledger
from tests.server.client import Seen, Violation, connect, hold, perform
from tests.server.deaths import KINDS, die_again_and_again
from tests.server.hostile import hostile_ask, hostile_asks
from tests.server.process import Process, engine_processes, started
from tests.server.traffic import MAX_REQUEST_BYTES, SETTINGS, Pool, make_ask, make_pool
from tests.waiting import wait_for

MAX_GROWTH = 0.05  # of memory, over the second half
MAX_GROWTH_AFTER = 0.10  # with hostile requests: from the first minute's end to ten seconds after the last
FULL_DISK = "/dev/full"
_ENVIRONMENT = {"OMP_NUM_THREADS": "1"}  # beside other work, several wait for one another
_SECONDS_BETWEEN_SAMPLES, _SECONDS_OF_REST = 0.1, 10.0
_PAGE_BYTES = 4096


@dataclass(frozen=True)
class Memory:
    """Resident bytes of one process, sampled at a steady rate while there was load, and ten seconds after it."""

    name: str
    samples: Sequence[int]
    after: int = 0

    @property
    def after_the_first_minute(self) -> int:
        """Or at the end of what was shorter."""
        return self.samples[: round(60 / _SECONDS_BETWEEN_SAMPLES)][-1]

    @property
    def second_half(self) -> Sequence[int]:
        return self.samples[len(self.samples) // 2 :]

    @property
    def spread(self) -> float:
        """Of the second half: how far the largest lies above the smallest, as a share of it."""
        return max(self.second_half) / min(self.second_half) - 1

    @property
    def growth(self) -> float:
        """From the third quarter's median to the fourth's, as a share of it."""
        middle = len(self.second_half) // 2
        third, fourth = self.second_half[:middle], self.second_half[middle:]
        return statistics.median(fourth) / statistics.median(third) - 1

    def __str__(self) -> str:
        first, last = self.samples[0] / 1e6, self.samples[-1] / 1e6
        return (
            f"{self.name}: {first:.1f} MB at first, {last:.1f} MB at last; over the second half, spread "
            f"{self.spread:.2%}, growth of the median {self.growth:+.2%}; {self.after_the_first_minute / 1e6:.1f} MB "
            f"after a minute, {self.after / 1e6:.1f} MB ten seconds after the end"
        )


@dataclass(frozen=True)
class Load:
    """What came of a load on a server that goes on running.

    Attributes:
        all_seen: Requests, as their clients saw them.
        num_lines: Lines of the server's log before it.
        before, after: Metrics, with no request open.
        seconds, seconds_until_idle: of the load, and from its end until nothing was held.
    """

    all_seen: list[Seen]
    memory: list[Memory]
    num_lines: int
    before: ledger.Page
    after: ledger.Page
    seconds: float
    seconds_until_idle: float


def soak(
    seed: int, num_requests: int, num_clients: int, seconds: float | None = None, is_hostile: bool = False
) -> tuple[Load, Counter[str]]:
    """Start a server, load it, tell it to end and compare all accounts of it.

    Raises:
        Violation: what must hold does not.
    """
    more = ("--trace", FULL_DISK) if is_hostile else ()
    with started(*SETTINGS, *more, **_ENVIRONMENT) as process:
        process.event("ready")
        found = load(process, seed, num_requests, num_clients, seconds, is_hostile)
        process.child.terminate()
        hold(process.end() == 0, f"told to end, the server's exit code is {process.child.returncode}")
        return found, settle(process, found)


def load(
    process: Process,
    seed: int,
    num_requests: int,
    num_clients: int,
    seconds: float | None = None,
    is_hostile: bool = False,
) -> Load:
    """Load a server that is ready, and wait until it holds nothing any more.

    Args:
        seconds: after which no client begins with another request; memory is looked at ten seconds after the last.

    Raises:
        Violation: an answer is not what it has to be.
    """
    pool = make_pool(Random(seed), process.http)
    if is_hostile:
        max_model_len, vocab_size, longest_token = load_script("doors").facts(process.url, "teachlm")
        asks = hostile_asks(max_model_len, vocab_size, longest_token, MAX_REQUEST_BYTES)
        pool = replace(pool, make_hostile=partial(hostile_ask, asks=asks))
    before = _page(process)
    num_lines = len(process.log)
    pids = {"front": process.child.pid, "engine": engine_processes(process.child.pid)[0]}
    files = {name: _files(pid) for name, pid in pids.items()}
    took, all_seen, memory = asyncio.run(_load(process.url, pool, pids, seed, num_requests, num_clients, seconds))
    until_idle, after = _until_idle(process, files, pids)
    if seconds is not None:
        time.sleep(_SECONDS_OF_REST)
        memory = [replace(each, after=_resident_bytes(pids)[each.name]) for each in memory]
    process.http.post("/v1/completions", json={"prompt": "Once", "max_tokens": 1}).raise_for_status()
    return Load(all_seen, memory, num_lines, before, after, took, until_idle)


def settle(process: Process, found: Load) -> Counter[str]:
    """Compare clients, log and metrics of a server that has ended; return completions by what became of them.

    Raises:
        Violation: they do not agree, or the server complained.
    """
    other = [line for line in process.other if not (FULL_DISK in line and line.startswith("the trace ends here"))]
    hold(not other, f"beside the log, the server wrote {other}")
    named = {seen.name for seen in found.all_seen}
    log = [line for line in process.log[found.num_lines : -1] if line.get("request_id") in named]
    return ledger.check(found.before, found.after, log, found.all_seen)


async def _load(
    url: str,
    pool: Pool,
    pids: dict[str, int],
    seed: int,
    num_requests: int,
    num_clients: int,
    seconds: float | None,
) -> tuple[float, list[Seen], list[Memory]]:
    """Seconds that it took, what clients saw, and the memory of the processes meanwhile."""
    numbers = iter(range(num_requests))
    all_seen: list[Seen] = []
    is_over = asyncio.Event()
    if seconds is not None:
        asyncio.get_running_loop().call_later(seconds, is_over.set)

    async def client() -> None:
        async with connect(url) as session:
            for number in numbers:
                if is_over.is_set():
                    break
                ask = make_ask(Random(f"{seed}, {number}"), pool)
                all_seen.append(await perform(session, ask, f"soak-{number}"))

    samples: dict[str, list[int]] = {name: [] for name in _resident_bytes(pids)}
    sampling = asyncio.create_task(_sample(pids, samples))
    began = time.monotonic()
    try:
        async with asyncio.TaskGroup() as clients:
            for _ in range(num_clients):
                clients.create_task(client())
    except* (Violation, aiohttp.ClientError) as group:
        raise group.exceptions[0] from None
    finally:
        sampling.cancel()
    return time.monotonic() - began, all_seen, [Memory(name, taken) for name, taken in samples.items()]


async def _sample(pids: dict[str, int], samples: dict[str, list[int]]) -> None:
    while True:
        for name, size in _resident_bytes(pids).items():
            samples[name].append(size)
        await asyncio.sleep(_SECONDS_BETWEEN_SAMPLES)


def _resident_bytes(pids: dict[str, int]) -> dict[str, int]:
    """Resident bytes of each process, and of the largest one for texts: their number follows the load."""
    found = {name: _resident_bytes_of(pid) for name, pid in pids.items()}
    found["texts"] = 0
    for pid in processes_for_texts(pids["front"]):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a worker that has just ended
            found["texts"] = max(found["texts"], _resident_bytes_of(pid))
    return found


def _resident_bytes_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE_BYTES


def _until_idle(process: Process, files: dict[str, Counter[str]], pids: dict[str, int]) -> tuple[float, ledger.Page]:
    """Wait until nothing is held; return how long that took, and the metrics then.

    Args:
        files: that were open before, one connection of ours among them.
    """
    began = time.monotonic()
    page: ledger.Page = {}

    def is_idle() -> bool:
        nonlocal page
        page = _page(process)
        return not any(page[name] for name in ledger.IDLE) and not any(
            _files(pid) - files[name] for name, pid in pids.items()
        )

    wait_for(is_idle)
    return time.monotonic() - began, page


def _page(process: Process) -> ledger.Page:
    return ledger.read_page(process.http.get("/metrics").text)


def _files(pid: int) -> Counter[str]:
    """Open files of a process, by their kind or name, without the sockets of its text workers."""
    found: Counter[str] = Counter()
    for file in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # it has been closed meanwhile
            found[str(file.readlink()).split(":")[0]] += 1
    found["socket"] -= len(processes_for_texts(pid)[1:])  # the first has been there before
    return found


def check_memory(memory: Sequence[Memory]) -> None:
    """Raises Violation unless it has stayed flat over the second half."""
    for each in memory:
        hold(each.growth <= MAX_GROWTH, f"memory grows: {each}")
        hold(each.spread <= MAX_GROWTH, f"memory is not flat: {each}")


def check_memory_after(memory: Sequence[Memory]) -> None:
    """Raises Violation unless what each has in the end is what it had after the first minute.

    While hostile requests are served, it is more: their bodies and answers.
    """
    for each in memory:
        most = (1 + MAX_GROWTH_AFTER) * each.after_the_first_minute
        hold(0 < each.after <= most, f"memory is not given back: {each}")


def _report(soaked: Load, ended: Counter[str]) -> None:
    page, seen = soaked.after, soaked.all_seen
    kinds = Counter(_kind(each) for each in seen)
    num_left, num_bad = sum(each.has_left for each in seen), kinds["bad"]
    print(f"{len(seen):,} requests in {soaked.seconds:.1f} s; {num_left:,} hung up, {num_bad:,} malformed")
    print("  " + ", ".join(f"{count:,} {kind}" for kind, count in sorted(kinds.items())))
    print("completions " + ", ".join(f"{count:,} {name}" for name, count in ended.items()))
    print(
        f"{page['prompt_tokens_total']:,.0f} prompt tokens, {page['generation_tokens_total']:,.0f} sampled, "
        f"{page['num_preemptions_total']:,.0f} preemptions, {page['prefix_cache_hits_total']:,.0f} cached"
    )
    print(f"idle {soaked.seconds_until_idle:.2f} s after the load")
    for memory in soaked.memory:
        print(memory)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=None, help="3000, if there are no --seconds")
    parser.add_argument("--seconds", type=float, default=None)
    parser.add_argument("--hostile", action="store_true", help="with the largest requests, and a full disk")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--kills", type=int, default=20, help="of each kind")
    parser.add_argument("--seed", type=int, default=None, help="send the same requests again")
    arguments = parser.parse_args()
    seed = Random().getrandbits(32) if arguments.seed is None else arguments.seed
    print(f"seed {seed}", flush=True)
    num_requests = arguments.requests or (3000 if arguments.seconds is None else sys.maxsize)
    asked = (seed, num_requests, arguments.clients, arguments.seconds, arguments.hostile)
    num_violations = int(_try(lambda: _load_and_report(*asked)))
    num_violations += die_again_and_again(seed, arguments.kills, list(KINDS))
    if num_violations:
        print(f"{num_violations} violations with --seed {seed}")
        return 1
    print("no violation")
    return 0


def _kind(seen: Seen) -> str:
    if seen.ask.may_be_refused_with:
        return "hostile, hung up" if seen.ask.leaves else "hostile"
    return "bad" if seen.ask.refused_with else seen.ask.kind


def _load_and_report(seed: int, num_requests: int, num_clients: int, seconds: float | None, is_hostile: bool) -> None:
    soaked, ended = soak(seed, num_requests, num_clients, seconds, is_hostile)
    _report(soaked, ended)
    (check_memory_after if is_hostile else check_memory)(soaked.memory)


def _try(act: Callable[[], None]) -> bool:
    """Whether something was violated: one finding need not hide the next."""
    try:
        act()
    except (Violation, AssertionError) as violation:
        print(f"violation: {violation}", flush=True)
        return True
    return False


if __name__ == "__main__":
    sys.exit(main())
