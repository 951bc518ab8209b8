"""Measure what crosses between processes in a step: bytes, and microseconds to encode and to decode.

    PYTHONPATH=.:kernels:cli:webui:lessons python3 benchmarks/plan_codec.py [--output FILE]

Plans and outputs go to the ranks of one machine in a codec of the standard library (`worker/processes/plan_codec.py`);
requests and updates cross between the API process and the engine process as msgspec structs
(`engine/processes/core_messages.py`). A decode step has so many requests with 1,000 known tokens, of which every 16th
enters a new block; a prompt step starts four requests of 1,000 tokens. Times are the median of 300 calls.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from array import array
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "kernels"), str(ROOT / "benchmarks")]

from h200 import provenance, script_parser  # noqa: E402

from teachllm import SamplingParams  # noqa: E402
from teachllm.core.scheduler_output import (  # noqa: E402
    ModelRunnerOutput,
    NewRow,
    ScheduledRequest,
    SchedulerOutput,
)
from teachllm.engine.observability.stats import NOTHING  # noqa: E402
from teachllm.engine.processes.core_messages import (  # noqa: E402
    Add,
    Stepped,
    Update,
    decode_from_core,
    decode_to_core,
    encode,
)
from teachllm.worker.processes.plan_codec import (  # noqa: E402
    decode_output,
    decode_plan,
    encode_output,
    encode_plan,
)

_CALLS = 300
_KNOWN = 1000  # tokens of a request


def decode_step(num_requests: int) -> SchedulerOutput:
    """Return the plan of a step of decodes."""
    scheduled = [
        ScheduledRequest(
            request_id=f"chatcmpl-{index:032x}",
            start=_KNOWN,
            num_tokens=1,
            draft_token_ids=[],
            samples=True,
            first_new_block=_KNOWN // 16,
            new_block_ids=[index] if index % 16 == 0 else [],
        )
        for index in range(num_requests)
    ]
    return SchedulerOutput(step=12345, scheduled=scheduled)


def prompt_step(num_requests: int) -> SchedulerOutput:
    """Return the plan of a step that starts requests."""
    scheduled = []
    for index in range(num_requests):
        params = SamplingParams(temperature=0.7, top_p=0.9, max_tokens=256)
        row = NewRow(list(range(_KNOWN)), _KNOWN, params, 0, seed=index, stop_token_ids=frozenset({151645}))
        blocks = list(range(-(-_KNOWN // 16)))
        scheduled.append(ScheduledRequest(f"chatcmpl-{index:032x}", 0, _KNOWN, [], True, 0, blocks, new_row=row))
    return SchedulerOutput(step=12345, scheduled=scheduled)


def stepped(num_requests: int) -> Stepped:
    """Return what the engine process says of a step of decodes."""
    updates = [
        Update(index, [1000 + index], 0, 0, _KNOWN, 0, 0, 1.5, None, None, None, None) for index in range(num_requests)
    ]
    return Stepped(updates, NOTHING, [])


def added() -> Add:
    """Return what the API process says of a new request."""
    prompt, params = array("q", range(_KNOWN)).tobytes(), SamplingParams(temperature=0.7, top_p=0.9, max_tokens=256)
    return Add(7, "chatcmpl-7", prompt, params, 1.5, 0, (), None, 0, 7, (), frozenset({151645}))


def microseconds(call: Callable[[], object]) -> float:
    """Return the median time of a call."""
    times = []
    for _ in range(_CALLS):
        begin = time.perf_counter_ns()
        call()
        times.append(time.perf_counter_ns() - begin)
    return statistics.median(times) / 1000


def measure() -> list[dict[str, Any]]:
    """Return a row for each message: its name, bytes, and microseconds to encode and to decode."""
    cases: list[tuple[str, Callable[[Any], bytes], Callable[[bytes], object], Any]] = []
    for count in (1, 64, 256):
        cases.append((f"plan of {count} decodes", encode_plan, decode_plan, decode_step(count)))
        output = ModelRunnerOutput([[1000 + index] for index in range(count)])
        cases.append((f"output of {count} decodes", encode_output, decode_output, output))
        cases.append((f"updates of {count} decodes", encode, decode_from_core, stepped(count)))
    cases.append(("plan of 4 prompts of 1,000", encode_plan, decode_plan, prompt_step(4)))
    cases.append(("request with a prompt of 1,000", lambda message: encode([message]), decode_to_core, added()))
    rows = []
    for name, write, read, message in cases:
        content = write(message)
        to_write, to_read = microseconds(partial(write, message)), microseconds(partial(read, content))
        rows.append({"message": name, "bytes": len(content), "encode_us": to_write, "decode_us": to_read})
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    options = script_parser((__doc__ or "").partition("\n")[0]).parse_args(arguments)
    rows = measure()
    for row in rows:
        print(
            f"{row['message']:32} {row['bytes']:8,} bytes  {row['encode_us']:7.1f} us to encode"
            f"  {row['decode_us']:7.1f} us to decode"
        )
    if options.output is not None:
        result = provenance("plan_codec.py", arguments, "CPU", options.commit) | {"messages": rows}
        options.output.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
