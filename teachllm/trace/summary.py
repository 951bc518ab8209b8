"""A trace in a dozen rows: what ran, how fast, what the blocks held, and why requests waited."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterator

from teachllm.trace.draft_lengths import draft_lengths
from teachllm.trace.figures import Figures, Spread, figures
from teachllm.trace.ranks import rank_figures
from teachllm.trace.reader import Trace

Row = tuple[str, str]  # what, and how much


def summary(trace: Trace) -> list[Row]:
    """Rows for people, the name of each first."""
    return list(_rows(trace, figures([trace.header, *trace.lines])))


def _rows(trace: Trace, found: Figures) -> Iterator[Row]:
    config, model = trace.header["config"], trace.header["model"]
    device = trace.header.get("machine", {}).get("device", "an unknown device")
    yield "model", f"{config.get('model')} ({model.get('architecture')}, {model.get('dtype')}) on {device}"
    yield (
        "engine",
        (
            f"{trace.header['num_blocks']:,} blocks of {config['block_size']} tokens; at most "
            f"{config['max_num_batched_tokens']:,} tokens and {config['max_num_seqs']:,} requests per step; "
            f"{config['scheduling_policy']}{', asynchronous' if config['async_scheduling'] else ''}"
        ),
    )
    steps = trace.steps
    if not steps:
        yield "steps", "none"
        return
    step_s = statistics.fmean(line["end"] - line["time"] for line in steps)
    parts = {name: statistics.fmean(line[name] for line in steps) for name in ("schedule", "execute", "wait", "update")}
    yield (
        "steps",
        (
            f"{found.num_steps:,} in {_seconds(found.duration)}, {_seconds(step_s)} each; of the host's time "
            + ", ".join(f"{name} {_seconds(value)}" for name, value in parts.items())
        ),
    )
    ends = Counter(request.finish_reason or "unfinished" for request in trace.replay.requests.values())
    yield "requests", f"{found.num_requests:,}: " + ", ".join(f"{count} {reason}" for reason, count in ends.items())
    num_prompt = sum(line["num_prompt_tokens"] for line in trace.lines if line["event"] == "arrival")
    yield (
        "tokens",
        (
            f"{num_prompt:,} in ({found.prefix_hit_rate:.0%} from the prefix cache), {found.num_output_tokens:,} out, "
            f"{found.output_tokens_per_s:,.0f}/s; {found.budget_used:.0%} of the budget"
        ),
    )
    yield "TTFT", _spread(found.ttft)
    yield "ITL", _spread(found.itl)
    most = max(line["blocks"]["used"] for line in steps)
    waste = "" if found.waste is None else f"; {found.waste:.0%} of their slots empty"
    yield "KV blocks", f"{found.blocks_used:.0%} in use, {most:,} at most{waste}"
    if found.num_drafts:
        held = f"{found.num_accepted_tokens:,} of {found.num_draft_tokens:,} drafted tokens accepted"
        yield (
            "speculation",
            (
                f"{held} ({found.num_accepted_tokens / found.num_draft_tokens:.0%}), "
                f"mean length {1 + found.num_accepted_tokens / found.num_drafts:.2f}"
            ),
        )
    yield from _rank_rows(trace)
    if lengths := draft_lengths(steps):
        times = [f"{each.count:,} time{'s' if each.count > 1 else ''}" for each in lengths]
        told = (f"{each.length} ({count}: {each.why})" for each, count in zip(lengths, times, strict=True))
        yield "drafts asked", "; ".join(told)
    if found.num_preemptions:
        yield "preempted", f"{found.num_preemptions:,} times"
    waits = Counter(reason for line in steps for reason, _ in line["waiting"].values())
    if waits:
        most_first = (f"{count:,} {reason.replace('_', ' ')}" for reason, count in waits.most_common())
        yield "waiting", f"requests x steps: {', '.join(most_first)}"
    bounds = [line.get("roofline", {}).get("bound") for line in steps]
    for name, values in (("bound by", bounds), ("graphs", [line.get("graph_mode") for line in steps])):
        counts = Counter(value for value in values if value is not None)
        if counts:
            shares = (f"{what} in {count / len(steps):.0%}" for what, count in counts.most_common())
            yield name, f"{', '.join(shares)} of the steps"
    for line in trace.lines:
        if line["event"] == "error":
            yield "error", line["message"]


def _rank_rows(trace: Trace) -> Iterator[Row]:
    ranks = rank_figures(trace.lines)
    if ranks:
        num_stages = len({each.stage for each in ranks})
        stages = "one stage" if num_stages == 1 else f"{num_stages} stages"
        whole = _seconds(ranks[0].seconds)
        yield "ranks", f"{len(ranks)} in {stages}; shares are of the {whole} in which any of them had a step"
    for each in ranks:
        shares = f"computes {each.computes:.0%}, exchanges {each.exchanges:.0%}, bubble {each.bubble:.0%}"
        num_bytes = sum(count for _, count in each.sent.values())
        most_first = sorted(each.operations.items(), key=lambda item: -item[1])
        took = ", ".join(f"{operation} {share:.0%}" for operation, share in most_first)
        sends = f"sends {num_bytes / 1000:,.1f} kB per step{'; in ' if took else ''}{took}"
        yield f"rank {each.rank}", f"stage {each.stage}: {shares}; {sends}"


def _spread(values: Spread) -> str:
    return f"{_seconds(values.p50)} (median), {_seconds(values.mean)} (mean), {_seconds(values.p99)} (99%)"


def _seconds(value: float) -> str:
    """With three digits, in the unit that suits."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value / 1e-6:.3g} us"
