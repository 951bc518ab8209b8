"""Tell Prometheus about the server: vLLM's names, with our prefix, so that its dashboards work unchanged.

Numbers are kept as plain ones and turned into Prometheus' families when they are scraped: an inter-token latency is
noted for every token of every request, and a library call for each would be felt. Every number has one writer: what
steps tell is written in the engine's thread, what requests tell in the event loop.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from teachllm.config import EngineConfig
from teachllm.engine.observability.stats import StepStats
from teachllm.outputs import RequestOutput
from teachllm.sampling_params import SamplingParams

PREFIX = "teachllm:"
FINISH_REASONS = ("stop", "length", "abort", "error")

_LATENCIES = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0)
_FIRST_TOKENS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0)
_BETWEEN_TOKENS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0)
_COUNTS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)
_SMALL_COUNTS = (0, 1, 2, 5, 10, 20, 50, 100)
_CACHE_SETTINGS = ("block_size", "kv_cache_dtype", "enable_prefix_caching", "max_model_len")
_STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


class Histogram:
    """Count how often a value fell between two bounds."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def buckets(self) -> tuple[list[tuple[str, float]], float]:
        """Prometheus counts a value in every bucket whose bound it does not exceed."""
        found, total = [], 0
        for bound, count in zip((*map(float, self._bounds), float("inf")), self._counts, strict=True):
            total += count
            found.append(("+Inf" if bound == float("inf") else str(bound), float(total)))
        return found, self._sum


class Metrics:
    """All of a server's.

    Args:
        model_name: the label that every one of them has.
    """

    def __init__(self, model_name: str) -> None:
        self._model_name = model_name
        self._last: StepStats | None = None
        self._of_steps = dict.fromkeys(_COUNTERS, 0)
        self._held: list[int] = []  # drafts that were accepted, by their place among a request's
        self._finished = Counter(dict.fromkeys(FINISH_REASONS, 0))
        self._refused = Counter[tuple[int, str]]()
        self._cache: dict[str, str] = {}
        self._histograms = {name: Histogram(bounds) for name, (bounds, _) in _HISTOGRAMS.items()}
        self._between_tokens = self._histograms["inter_token_latency_seconds"]
        self._step_tokens = self._histograms["iteration_tokens_total"]
        self._registry = CollectorRegistry()
        self._registry.register(self)  # type: ignore[arg-type]
        ProcessCollector(registry=self._registry)

    def on_start(self, config: EngineConfig, num_blocks: int) -> None:
        """The engine is there; its KV cache is told as labels of a gauge that is always 1."""
        self._cache = {name: str(getattr(config, name)) for name in _CACHE_SETTINGS}
        self._cache["num_gpu_blocks"] = str(num_blocks)

    def on_step(self, stats: StepStats) -> None:
        """Called in the engine's thread."""
        self._last = stats
        for name, field in _FIELDS.items():
            self._of_steps[name] += getattr(stats, field)
        held = stats.num_accepted_tokens_per_pos
        self._held += [0] * (len(held) - len(self._held))
        for position, count in enumerate(held):
            self._held[position] += count
        if stats.num_tokens:
            self._step_tokens.observe(stats.num_tokens)

    def between_tokens(self, seconds: float) -> None:
        """A client waited so long for a request's next tokens."""
        self._between_tokens.observe(seconds)

    def on_silent_end(self, num_completions: int, failed: bool = False) -> None:
        """A request's end before its first token."""
        self._finished["error" if failed else "abort"] += num_completions

    def on_refusal(self, status: int, reason: str) -> None:
        """A request was refused, or failed before its answer began.

        Args:
            reason: the error's type.
        """
        self._refused[status, reason] += 1

    def on_params(self, params: SamplingParams) -> None:
        """A request was taken."""
        self._histograms["request_params_n"].observe(params.n)
        if params.max_tokens is not None:
            self._histograms["request_params_max_tokens"].observe(params.max_tokens)

    def on_end(self, output: RequestOutput, failed: bool = False) -> None:
        """A request's end, be it good or bad."""
        num_tokens = sum(len(completion.token_ids) for completion in output.outputs)
        for completion in output.outputs:
            self._finished["error" if failed else completion.finish_reason or "abort"] += 1
        note = {name: histogram.observe for name, histogram in self._histograms.items()}
        note["request_prompt_tokens"](len(output.prompt_token_ids))
        note["request_generation_tokens"](num_tokens)
        note["request_max_num_generation_tokens"](max(len(completion.token_ids) for completion in output.outputs))
        times = output.metrics
        if times is None:
            return
        note["request_preemptions"](times.num_preemptions)
        note["e2e_request_latency_seconds"](time.perf_counter() - times.arrival_time)
        scheduled, first, last = times.first_scheduled_time, times.first_token_time, times.last_token_time
        if scheduled is not None:
            note["request_queue_time_seconds"](scheduled - times.arrival_time)
        if first is None:
            return
        note["time_to_first_token_seconds"](first - times.arrival_time)
        if scheduled is not None:
            note["request_prefill_time_seconds"](first - scheduled)
        if last is not None:
            note["request_decode_time_seconds"](last - first)
            if scheduled is not None:
                note["request_inference_time_seconds"](last - scheduled)
            longest = max(len(completion.token_ids) for completion in output.outputs)
            if longest > 1:
                note["request_time_per_output_token_seconds"]((last - first) / (longest - 1))

    def text(self) -> bytes:
        """The page that Prometheus reads."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        labels, values = ["model_name"], [self._model_name]
        for name, (text, field) in _GAUGES.items():
            gauge = GaugeMetricFamily(PREFIX + name, text, labels=labels)
            gauge.add_metric(values, float(getattr(self._last, field, 0)))
            yield gauge
        waiting = GaugeMetricFamily(
            PREFIX + "num_requests_waiting_by_reason",
            "Requests that wait to be admitted, by what the first of them waits for.",
            labels=[*labels, "reason"],
        )
        for reason, count in () if self._last is None else self._last.waiting_reasons:
            waiting.add_metric([*values, reason], float(count))
        yield waiting
        if self._cache:
            text = "Settings of the KV cache, as labels; always 1."
            cache = GaugeMetricFamily(PREFIX + "cache_config_info", text, labels=[*labels, *self._cache])
            cache.add_metric([*values, *self._cache.values()], 1.0)
            yield cache
        for index, (name, text) in enumerate(_OF_REPLICAS.items()):
            gauge = GaugeMetricFamily(PREFIX + name, text, labels=[*labels, "replica"])
            for replica, counts in enumerate(() if self._last is None else self._last.replicas):
                gauge.add_metric([*values, str(replica)], float(counts[index]))
            yield gauge
        for name, text in _COUNTERS.items():
            counter = CounterMetricFamily(PREFIX + name, text, labels=labels)
            counter.add_metric(values, float(self._of_steps[name]))
            yield counter
        ended = CounterMetricFamily(
            PREFIX + "request_success", "Completions that ended, by reason.", labels=[*labels, "finished_reason"]
        )
        for reason, count in self._finished.items():
            ended.add_metric([*values, reason], float(count))
        yield ended
        refused = CounterMetricFamily(
            PREFIX + "requests_refused",
            "Requests that were answered with an error, by its status and its type.",
            labels=[*labels, "status", "reason"],
        )
        for (status, reason), count in self._refused.items():
            refused.add_metric([*values, str(status), reason], float(count))
        yield refused
        name, text = "spec_decode_num_accepted_tokens_per_pos", "Drafted tokens that were accepted, by position."
        accepted = CounterMetricFamily(PREFIX + name, text, labels=[*labels, "position"])
        for position, count in enumerate(self._held):
            accepted.add_metric([*values, str(position)], float(count))
        yield accepted
        for name, (_, text) in _HISTOGRAMS.items():
            buckets, total = self._histograms[name].buckets()
            histogram = HistogramMetricFamily(PREFIX + name, text, labels=labels)
            histogram.add_metric(values, buckets, total)
            yield histogram


_GAUGES = {
    "num_requests_running": ("Requests that take part in steps.", "num_running"),
    "num_requests_waiting": ("Requests that wait to be admitted.", "num_waiting"),
    "kv_cache_usage_perc": ("Share of the KV blocks in use; 1 is all.", "kv_cache_usage"),
}
_OF_REPLICAS = {  # in the order of StepStats.replicas
    "replica_requests_running": "Requests that take part in steps, of each replica where there are several.",
    "replica_requests_waiting": "Requests that wait to be admitted, of each replica where there are several.",
}
_COUNTERS = {
    "prefix_cache_queries": "Prompt tokens that were looked up in the prefix cache.",
    "prefix_cache_hits": "Prompt tokens that were found there.",
    "num_preemptions": "How often a request lost its blocks.",
    "prompt_tokens": "Prompt tokens, cached ones included, of requests that got their first token.",
    "generation_tokens": "Tokens sampled.",
    "spec_decode_num_drafts": "Times that a request's drafts were verified, one or more tokens at once.",
    "spec_decode_num_draft_tokens": "Drafted tokens that were verified.",
    "spec_decode_num_accepted_tokens": "Drafted tokens that were accepted.",
}
# What StepStats calls them.
_FIELDS = {name: name.removeprefix("spec_decode_") for name in _COUNTERS}
_FIELDS |= {"prompt_tokens": "num_prompt_tokens", "generation_tokens": "num_generation_tokens"}
_HISTOGRAMS = {
    "time_to_first_token_seconds": (_FIRST_TOKENS, "From arrival to the first token."),
    "inter_token_latency_seconds": (_BETWEEN_TOKENS, "Between one token, or several that came together, and the next."),
    "request_time_per_output_token_seconds": (_BETWEEN_TOKENS, "A request's mean time per token after the first."),
    "e2e_request_latency_seconds": (_LATENCIES, "From a request's arrival to its end."),
    "request_queue_time_seconds": (_LATENCIES, "From a request's arrival until it was first scheduled."),
    "request_prefill_time_seconds": (_LATENCIES, "From the first scheduling to the first token."),
    "request_decode_time_seconds": (_LATENCIES, "From the first token to the last."),
    "request_inference_time_seconds": (_LATENCIES, "From the first scheduling to the last token."),
    "request_prompt_tokens": (_COUNTS, "Prompt tokens of a request."),
    "request_generation_tokens": (_COUNTS, "Tokens that a request generated, of all its completions."),
    "request_max_num_generation_tokens": (_COUNTS, "Tokens of a request's longest completion."),
    "request_params_n": (_SMALL_COUNTS, "Completions that a request asked for."),
    "request_params_max_tokens": (_COUNTS, "Tokens at most of each completion, as a request asked or as it was set."),
    "request_preemptions": (_SMALL_COUNTS, "How often the completions of a request lost their blocks."),
    "iteration_tokens_total": (_STEP_TOKENS, "Tokens computed in a step."),
}
