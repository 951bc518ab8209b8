"""Measure what one request may cost the others: the largest of every kind, while a neighbour streams.

    PYTHONPATH=.:kernels:cli:webui:lessons python3 benchmarks/doors.py [--default] [--only TEXT] [--output FILE]

Each door is a field of an endpoint, at the largest value that the server takes, or refuses only after it has looked at
it. Printed for each: the status, the CPU time that the request took on the server's event loop and on the engine's
thread in the same process, the largest gap between two tokens of the neighbour, and the memory that the server's
processes took beyond the bytes of the answer. The gaps of the neighbour alone are the first row.

The server has the embedded model, its whole context, and `--max-num-batched-tokens 256`; with `--default` the default
settings, where a step of a long honest prompt sets the floor. The bars are 250 ms and 64 MB. Linux alone.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
WINGS = [str(ROOT / folder) for folder in (".", "kernels", "cli", "webui", "lessons", "benchmarks")]
sys.path[:0] = WINGS

from h200 import provenance, script_parser  # noqa: E402
from serve import server  # noqa: E402

GAP_MS, MEMORY_MB = 250.0, 64.0
_TEXT, _CHAT, _TOKENIZE, _DETOKENIZE = "/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"
_ROCKET = "\N{ROCKET}"  # four bytes in UTF-8
_POLL_S = 0.02
_TOKENS_OF_THE_CACHE = 90_000  # that the embedded model's KV cache holds, and some


@dataclass(frozen=True)
class Largest:
    """A request of the largest kind."""

    name: str
    path: str
    body: dict[str, Any]


@dataclass
class Cost:
    """What it did to the server and to the neighbour."""

    name: str
    status: int
    seconds: float
    loop_ms: float
    engine_thread_ms: float
    gap_ms: float
    memory_mb: float


def doors(max_model_len: int, vocab_size: int, longest_token: int, num_bytes: int = 1 << 20) -> Iterator[Largest]:
    """All of them, for a model.

    Args:
        longest_token: in characters.
        num_bytes: of the longest body that the server takes.
    """
    most = max_model_len - 1
    num_characters = max_model_len * longest_token
    short: dict[str, Any] = {"prompt": "A KV cache", "max_tokens": 16, "temperature": 0, "ignore_eos": True}
    message = [{"role": "user", "content": "Hi"}]
    long = num_bytes - 400

    def text(name: str, **fields: Any) -> Largest:
        return Largest(f"completions: {name}", _TEXT, {**short, **fields})

    def chat(name: str, **fields: Any) -> Largest:
        return Largest(f"chat: {name}", _CHAT, {"messages": message, "max_tokens": 16, "temperature": 0, **fields})

    yield text("prompt of the longest text that is tokenized", prompt="a " * (num_characters // 2), max_tokens=1)
    yield text("prompt of spaces", prompt=" " * num_characters, max_tokens=1)
    yield text("prompt of one word", prompt="a" * num_characters, max_tokens=1)
    yield text("prompt of rockets", prompt=_ROCKET * num_characters, max_tokens=1)
    yield text("prompt as long as the context", prompt=[7] * most, max_tokens=1)
    yield text("echo of the context", prompt=[7] * most, max_tokens=1, echo=True)
    yield text("echo and logprobs of the context", prompt=[7] * most, max_tokens=1, echo=True, logprobs=20)
    yield text("prompt_logprobs", prompt=[7] * most, max_tokens=1, prompt_logprobs=20)
    yield text("2048 prompts", prompt=["A KV cache"] * 2048, max_tokens=1)
    yield text("2048 prompts of rockets", prompt=[_ROCKET * 100] * 1000, max_tokens=1, echo=True)
    yield text("lists of ids", prompt=[[7] * 250] * 1000, max_tokens=1)
    yield text("n=128", n=128, temperature=1, max_tokens=64)
    yield text("n=128 with logprobs", n=128, temperature=1, max_tokens=48, logprobs=20)
    yield text("logprobs of the longest answer", max_tokens=most - 16, logprobs=20)
    yield text("stop strings", stop=[_ROCKET * 250 + str(i) for i in range(128)], max_tokens=64)
    yield text("stop strings, n=128", stop=["a" * 250 + str(i) for i in range(128)], n=128, max_tokens=32)
    yield text("stop_token_ids", stop_token_ids=list(range(5, 1029)), max_tokens=64)
    yield text("stop_token_ids before min_tokens", stop_token_ids=list(range(5, 1029)), min_tokens=32, max_tokens=64)
    yield text("allowed_token_ids", allowed_token_ids=list(range(vocab_size)), max_tokens=64)
    yield text("allowed_token_ids, n=64", allowed_token_ids=list(range(min(vocab_size, 4096))), n=64, max_tokens=32)
    yield text("logit_bias", logit_bias={str(i): 1.0 for i in range(min(4096, vocab_size))}, max_tokens=64)
    yield text("logit_bias, n=64", logit_bias={str(i): 1.0 for i in range(min(4096, vocab_size))}, n=64, max_tokens=32)
    yield text("logit_bias of wrong entries", logit_bias={f"{i:05x}": "" for i in range(num_bytes // 14)})
    yield text("bad_words", bad_words=[f"word {i:09d}" for i in range(1024)], max_tokens=64)
    yield text("bad_words of rockets", bad_words=[_ROCKET * 16] * 1024, max_tokens=64)
    yield text("a long bad word", bad_words=[" word" * 2000] + [f"w{i}" for i in range(1023)], max_tokens=64)
    yield text("bad_words, n=16", bad_words=[f"word {i:09d}" for i in range(1000)], n=16, max_tokens=32)
    yield text("cache_salt", cache_salt=_ROCKET * 1024)
    yield text("user", user=_ROCKET * (long // 12))
    yield text("an unknown field of objects", unknown=[{}] * (long // 3))
    yield text("an unknown field of lists in lists", unknown=json.loads("[" * 190 + "]" * 190))
    yield text("many unknown fields", **{f"unknown_{i:06d}": 1 for i in range(250)})
    yield text("too many fields", **{f"unknown_{i:06d}": 1 for i in range(40_000)})
    yield chat("one long message", messages=[{"role": "user", "content": "a " * (num_characters // 2)}])
    yield chat("4096 messages", messages=[{"role": "user", "content": "a"}] * 4096)
    yield chat("too many messages", messages=[{"role": "user", "content": ""}] * 30_000)
    parts = [{"type": "text", "text": "a"}] * 4096
    yield chat("4096 parts", messages=[{"role": "user", "content": parts}])
    call = {"type": "function", "function": {"name": "f", "arguments": "{}"}}
    yield chat("4096 calls", messages=[*message, {"role": "assistant", "content": None, "tool_calls": [call] * 4096}])
    deep = "[" * 900 + "]" * 900
    nested = {"type": "function", "function": {"name": "f", "arguments": f'{{"a": {deep}}}'}}
    yield chat("deep arguments", messages=[*message, {"role": "assistant", "tool_calls": [nested] * 400}])
    tool = {"type": "function", "function": {"name": "f", "description": _ROCKET * 30, "parameters": {}}}
    yield chat("1024 tools", tools=[tool] * 1024, tool_choice="none")
    yield chat("chat_template_kwargs", chat_template_kwargs={"a": "a" * long})
    yield chat("documents", documents=[{"text": "a" * 900}] * 1024)
    yield chat("logprobs", logprobs=True, top_logprobs=20, max_tokens=most - 64)
    yield chat("n=128 with logprobs", n=128, logprobs=True, top_logprobs=20, temperature=1, max_tokens=40)
    yield chat("stream of n=128 with logprobs", n=128, logprobs=True, top_logprobs=20, max_tokens=40, stream=True)
    yield Largest("tokenize: text", _TOKENIZE, {"prompt": "a " * (num_characters // 2), "return_token_strs": True})
    yield Largest("tokenize: rockets", _TOKENIZE, {"prompt": _ROCKET * num_characters, "return_token_strs": True})
    yield Largest("tokenize: chat", _TOKENIZE, {"messages": [{"role": "user", "content": "a "}] * 4096})
    yield Largest("detokenize", _DETOKENIZE, {"tokens": [7] * max_model_len})
    yield Largest("a body that is too long", _TEXT, {"prompt": "a" * 2 * num_bytes})


class Neighbour:
    """Streams for as long as it is wanted, and notes when its tokens come."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._ends = False
        self.times: list[float] = []
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        body = {"prompt": "Continuous batching means", "max_tokens": 1500, "ignore_eos": True, "stream": True}
        body |= {"return_token_ids": True}  # a token without text of its own is an event, too
        while not self._ends:
            with _open(self._url + _TEXT, body) as response:
                self.times.append(-time.perf_counter())  # a new stream: its wait is no gap
                for line in response:
                    if line.startswith(b"data: "):
                        self.times.append(time.perf_counter())
                    if self._ends:
                        break

    def largest_gap(self, since: float) -> float:
        """Milliseconds between two tokens of one stream."""
        times = self.times[:]
        gaps = [after - before for before, after in pairwise(times) if after >= since and before > 0 and after > 0]
        last = abs(times[-1])
        return 1000 * max([*gaps, time.perf_counter() - max(last, since)])

    def close(self) -> None:
        self._ends = True
        self._thread.join()


class Memory:
    """The most memory that a process and those below it had since this was made, beyond what they had then.

    A process that is forked from another has that one's memory, which is counted once.
    """

    def __init__(self, pid: int) -> None:
        self._pid, self._before = pid, _own_bytes(pid)
        self._first = dict(self._before)
        self._most = 0
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._ends.wait(_POLL_S):
            now = _own_bytes(self._pid)
            for pid, size in now.items():
                self._first.setdefault(pid, size)
            self._most = max(self._most, sum(size - self._first[pid] for pid, size in now.items()))

    def close(self) -> float:
        """MB."""
        self._ends.set()
        self._thread.join()
        return self._most / 1e6


def measure(door: Largest, url: str, pid: int, neighbour: Neighbour) -> Cost:
    """Sends the request and waits for its end."""
    data = json.dumps(door.body, ensure_ascii=False, separators=(",", ":")).encode()
    loop, engine = _thread_time(pid, "loop"), _thread_time(pid, "engine")
    memory, begin = Memory(pid), time.perf_counter()
    status, size = _send(url + door.path, data)
    seconds = time.perf_counter() - begin
    time.sleep(0.3)  # what comes after its end counts, too
    return Cost(
        door.name,
        status,
        seconds,
        loop_ms=_thread_time(pid, "loop") - loop,
        engine_thread_ms=_thread_time(pid, "engine") - engine,
        gap_ms=neighbour.largest_gap(begin),
        memory_mb=max(memory.close() - size / 1e6, 0.0),
    )


def _fill_the_cache(url: str, vocab_size: int) -> None:
    """Use each block once: it takes its memory then, and not because of any door."""
    random = Random(0)
    prompts = [[random.randrange(5, vocab_size) for _ in range(250)] for _ in range(_TOKENS_OF_THE_CACHE // 250)]
    _send(url + _TEXT, json.dumps({"prompt": prompts, "max_tokens": 1}).encode())


def _send(url: str, data: bytes) -> tuple[int, int]:
    try:
        with _open(url, data) as response:
            size = sum(len(piece) for piece in iter(lambda: response.read(1 << 16), b""))
            return response.status, size
    except urllib.error.HTTPError as error:
        return error.code, len(error.read())


def _open(url: str, body: dict[str, Any] | bytes) -> Any:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return urllib.request.urlopen(urllib.request.Request(url, data, {"Content-Type": "application/json"}), timeout=600)


def _thread_time(pid: int, which: str) -> float:
    """CPU milliseconds of the process's main thread, which is the event loop, or of the one that is named so."""
    for task in Path(f"/proc/{pid}/task").iterdir():
        name = "loop" if task.name == str(pid) else (task / "comm").read_text().strip()
        if name == which:
            return int((task / "schedstat").read_text().split()[0]) / 1e6
    raise RuntimeError(f"the server has no thread {which}")


def _own_bytes(pid: int) -> dict[int, int]:
    """Memory that is no file's, of a process and of all below it."""
    found: dict[int, int] = {}
    waiting = [pid]
    while waiting:
        each = waiting.pop()
        try:
            _, resident, shared, *_ = map(int, Path(f"/proc/{each}/statm").read_text().split())
            tasks = list(Path(f"/proc/{each}/task").iterdir())
            waiting += [int(child) for task in tasks for child in (task / "children").read_text().split()]
        except OSError:  # it has ended
            continue
        found[each] = (resident - shared) * os.sysconf("SC_PAGE_SIZE")
    return found


def facts(url: str, model: str) -> tuple[int, int, int]:
    """Context, vocabulary and longest token of what is served."""
    from teachllm.checkpoint.files import find_folder
    from teachllm.engine.text.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(str(find_folder(model)))
    with urllib.request.urlopen(f"{url}/v1/models") as response:
        [card] = json.load(response)["data"]
    return card["max_model_len"], tokenizer.vocab_size, tokenizer.max_characters_per_token


def main(arguments: Sequence[str] | None = None) -> int:
    parser = script_parser(__doc__)
    parser.add_argument("--default", action="store_true", help="serve with the default settings")
    parser.add_argument("--only", help="the doors whose names hold this text")
    options = parser.parse_args(arguments)
    flags = ["--no-log-requests", *([] if options.default else ["--max-num-batched-tokens", "256"])]
    log = Path("/tmp/teachllm-doors.log")
    costs: list[Cost] = []
    with server({"model": "teachlm"}, flags, log) as url:
        pid = _server_pid(url)
        neighbour = Neighbour(url)
        known = facts(url, "teachlm")
        _fill_the_cache(url, known[1])
        begin = time.perf_counter()
        time.sleep(3)
        costs.append(Cost("the neighbour alone", 200, 3.0, 0.0, 0.0, neighbour.largest_gap(begin), 0.0))
        _show(costs[-1])
        for door in doors(*known):
            if options.only is None or options.only in door.name:
                costs.append(measure(door, url, pid, neighbour))
                _show(costs[-1])
        neighbour.close()
    over = [cost.name for cost in costs if cost.gap_ms > GAP_MS or cost.memory_mb > MEMORY_MB]
    print(f"{len(costs) - 1} doors; beyond {GAP_MS:.0f} ms or {MEMORY_MB:.0f} MB: {', '.join(over) or 'none'}")
    if options.output:
        result = provenance("doors.py", arguments, "cpu", options.commit)
        result["doors"] = [asdict(cost) for cost in costs]
        options.output.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return 0


def _server_pid(url: str) -> int:
    """Return the process that listens there."""
    port = url.rsplit(":", 1)[1]
    found = subprocess.run(["pgrep", "-f", f"teachllm_cli serve .*--port {port}"], capture_output=True, text=True)
    return int(found.stdout.split()[0])


def _show(cost: Cost) -> None:
    print(
        f"{cost.name:48} {cost.status:3} {cost.seconds:7.2f} s   loop {cost.loop_ms:7.0f} ms   engine's thread "
        f"{cost.engine_thread_ms:7.0f} ms   gap {cost.gap_ms:7.0f} ms   memory {cost.memory_mb:6.1f} MB",
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main())
