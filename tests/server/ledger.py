"""Every request accounted for: what clients saw, the server's log and its metrics have to tell the same story.

A client that hung up does not know how far its request had come. The log does: it has a line for every request, under
the id that the client gave it; and what the log says of all requests has to add up to what the metrics say.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from tests.server.client import Seen, hold

PREFIX = "teachllm:"
IDLE = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
Page = dict[str, float]


def read_page(text: str) -> Page:
    """The numbers of a page of metrics, under their names; requests that ended, under `ended_` and why."""
    page: Page = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            name = sample.name.removeprefix(PREFIX)
            if name == "request_success_total":
                page[f"ended_{sample.labels['finished_reason']}"] = sample.value
            elif "le" not in sample.labels:
                page[name] = page.get(name, 0.0) + sample.value
    return page


def num_ended(page: Page) -> int:
    """Completions that ended, for whatever reason."""
    return int(sum(value for name, value in page.items() if name.startswith("ended_")))


def check(before: Page, after: Page, log: Sequence[dict[str, Any]], all_seen: Sequence[Seen]) -> Counter[str]:
    """Compares them.

    Args:
        before, after: metrics, with no request open.

    Returns:
        Completions by what became of them.

    Raises:
        Violation: the first sum that is wrong.
    """
    lines = _check_log(log, all_seen)
    grown = {name: value - before.get(name, 0.0) for name, value in after.items()}
    run = [seen for seen in all_seen if seen.ask.num_completions and lines[seen.name]["status"] == 200]
    _check_ends(grown, run, lines)
    _check_tokens(grown, run, lines)
    return Counter({name: int(value) for name, value in grown.items() if name.startswith("ended_")})


def _check_log(log: Sequence[dict[str, Any]], all_seen: Sequence[Seen]) -> dict[str, dict[str, Any]]:
    """The line of each request, by its id."""
    for line in log:
        hold(line["level"] == "INFO" and "traceback" not in line, f"the log complains: {line.get('traceback', line)}")
    named = Counter(line["request_id"] for line in log if line["event"] == "request")
    lines = {line["request_id"]: line for line in log if line["event"] == "request"}
    for seen in all_seen:
        # One whose client left before the server had begun with it need not have been a request at all.
        expected = (0, 1) if seen.has_left and seen.status is None else (1,)
        hold(named[seen.name] in expected, f"{named[seen.name]} lines in the log for {seen.name}, {seen.ask.kind}")
        line = lines.setdefault(seen.name, {"status": None})
        if seen.status is not None:
            hold(line["status"] == seen.status, f"the log says {line}, the client saw status {seen.status}")
        if seen.has_left:
            # 400: the client left while its request was being read.
            statuses = (None, 200, 400, *seen.ask.may_be_refused_with)
            hold(line["status"] in statuses, f"a client hung up, and the log says {line}")
        elif seen.usage:
            told = (line["prompt_tokens"], line["completion_tokens"])
            generated = seen.ask.num_completions if seen.ask.scores else seen.usage["completion_tokens"]
            hold(told == (seen.usage["prompt_tokens"], generated), f"the log says {line}, the client saw {seen.usage}")
    return lines


def _check_ends(grown: Page, run: list[Seen], lines: dict[str, dict[str, Any]]) -> None:
    """Requests are counted by their end."""
    total = sum(seen.ask.num_completions for seen in run)
    hold(num_ended(grown) == total, f"{total} completions were admitted, {num_ended(grown)} ended by the metrics")
    hold(grown["ended_error"] == 0, f"{grown['ended_error']:.0f} completions ended with an error")
    reasons: Counter[str] = sum((seen.reasons for seen in run), Counter())
    for reason in ("stop", "length"):
        least = reasons[reason]
        hold(grown[f"ended_{reason}"] >= least, f"clients saw {least} of {reason}, metrics {grown[f'ended_{reason}']}")
    left = [seen for seen in run if seen.has_left]
    # Those who leave asked for completions that end at max_tokens alone: with fewer, at least one was aborted.
    aborted = [
        seen for seen in left if lines[seen.name]["completion_tokens"] < seen.ask.num_completions * seen.ask.max_tokens
    ]
    most = sum(seen.ask.num_completions for seen in aborted)
    found = grown["ended_abort"]
    hold(len(aborted) <= found <= most, f"{found:.0f} aborts by the metrics, not {len(aborted)} to {most}")
    hold(bool(aborted) or not left, f"of {len(left)} requests whose clients left, none was aborted")
    num_jobs = sum(seen.ask.num_prompts for seen in run)
    for name in ("request_prompt_tokens", "request_generation_tokens", "e2e_request_latency_seconds"):
        hold(grown[f"{name}_count"] == num_jobs, f"{name}: {grown[f'{name}_count']:.0f} requests, not {num_jobs}")


def _check_tokens(grown: Page, run: list[Seen], lines: dict[str, dict[str, Any]]) -> None:
    """Tokens of prompts and outputs add up, those of clients that left between two bounds."""
    num_tokens = {
        seen.name: seen.ask.num_prompt_tokens
        if seen.ask.num_prompt_tokens is not None
        else lines[seen.name]["prompt_tokens"]
        for seen in run
    }
    prompts = sum(num_tokens.values())
    found = grown["request_prompt_tokens_sum"]
    hold(found == prompts, f"the requests' prompts had {prompts} tokens, {found:.0f} by the metrics")
    generated = sum(lines[seen.name]["completion_tokens"] for seen in run)
    found = grown["request_generation_tokens_sum"]
    hold(found == generated, f"{generated} tokens were generated by the log, {found:.0f} by the metrics")
    # As the engine counts them, each completion has a prompt.
    computed = {seen.name: num_tokens[seen.name] * (seen.ask.num_completions // seen.ask.num_prompts) for seen in run}
    least = sum(computed[seen.name] for seen in run if not seen.has_left)
    most = sum(computed.values())
    found = grown["prompt_tokens_total"]
    hold(least <= found <= most, f"{found:.0f} prompt tokens were computed, not {least} to {most}")
    # The engine runs ahead until it knows that a completion has stopped, or that its client has left.
    cut = [seen for seen in run if seen.has_left or seen.reasons["stop"]]
    most = generated + sum(seen.ask.num_completions * seen.ask.max_tokens for seen in cut)
    most -= sum(lines[seen.name]["completion_tokens"] for seen in cut)
    found = grown["generation_tokens_total"]
    hold(generated <= found <= most, f"{found:.0f} tokens were sampled, not {generated} to {most}")
