"""`teachllm bench serve`: load on a server that speaks OpenAI's protocol, whoever made it.

Flags that `vllm bench serve` has, too, are spelled as it spells them.
"""

from __future__ import annotations

import datetime
import json
import math
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from teachllm_cli.bench_output import OutputJson, check_folder, number, progress_bar, write_json
from teachllm_cli.errors import one_line_errors
from teachllm_cli.terminal import answers, notes

if TYPE_CHECKING:
    from teachllm.bench.serve.dataset import Prompt
    from teachllm.bench.serve.load import Load

_NUM_RANDOM_PROMPTS = 1000
_ERRORS_SHOWN = 3
_SERVER, _DATA, _LOAD, _RESULT, _REQUEST = "Server", "Data", "Load", "Result", "Every request"


def _option(panel: str, text: str, *names: str, **more: Any) -> Any:
    return typer.Option(*names, help=text, rich_help_panel=panel, **more)


def serve(
    base_url: Annotated[
        str | None, _option(_SERVER, "Like http://127.0.0.1:8000. Default: what --host and --port make.")
    ] = None,
    host: Annotated[str, _option(_SERVER, "Where the server listens.")] = "127.0.0.1",
    port: Annotated[int, _option(_SERVER, "And on which port.", min=1, max=65535)] = 8000,
    endpoint: Annotated[
        str, _option(_SERVER, "/v1/completions, or /v1/chat/completions: every prompt is a message.")
    ] = "/v1/completions",
    model: Annotated[
        str | None, _option(_SERVER, "The model to ask. Default: the first of /v1/models.", "--model", "-m")
    ] = None,
    api_key: Annotated[
        str | None,
        _option(_SERVER, "Sent as a bearer token.", envvar=["OPENAI_API_KEY", "TEACHLLM_API_KEY"], show_default=False),
    ] = None,
    header: Annotated[list[str] | None, _option(_SERVER, "KEY=VALUE of every request. Can be repeated.")] = None,
    dataset_name: Annotated[str, _option(_DATA, "random, or custom: a file of prompts.")] = "random",
    dataset_path: Annotated[
        Path | None,
        _option(_DATA, 'Of custom: lines like {"prompt": "...", "output_tokens": 100}; a prompt is text or token ids.'),
    ] = None,
    custom_output_len: Annotated[int, _option(_DATA, "Output tokens of lines that name none.", min=1)] = 256,
    num_prompts: Annotated[
        int | None, _option(_DATA, f"Requests. Default: {_NUM_RANDOM_PROMPTS}; of custom: all.", min=1)
    ] = None,
    random_input_len: Annotated[int, _option(_DATA, "Prompt words, or ids, of a request.")] = 1024,
    random_output_len: Annotated[int, _option(_DATA, "Output tokens of a request.")] = 128,
    random_range_ratio: Annotated[
        float, _option(_DATA, "Draw each length uniformly from length x (1 - r) to length x (1 + r).")
    ] = 0.0,
    random_prefix_len: Annotated[int, _option(_DATA, "So many words, or ids, before them, the same in all.")] = 0,
    token_ids: Annotated[
        bool, _option(_DATA, "Random prompts are token ids in place of words.", "--token-ids")
    ] = False,
    vocab_size: Annotated[int, _option(_DATA, "Token ids are below this.", min=2)] = 1000,
    request_rate: Annotated[float, _option(_LOAD, "Requests per second; inf sends all at once.")] = math.inf,
    burstiness: Annotated[
        float, _option(_LOAD, "Shape of the gaps: 1 is a Poisson process, less comes in bursts, more evenly.")
    ] = 1.0,
    max_concurrency: Annotated[
        int | None, _option(_LOAD, "Requests that are out at a time; others wait here, unsent.")
    ] = None,
    num_warmups: Annotated[int, _option(_LOAD, "Random requests before, which do not count.", min=0)] = 0,
    seed: Annotated[int, _option(_LOAD, "Of prompts and arrivals.")] = 0,
    ignore_eos: Annotated[bool, _option(_REQUEST, "Run to the asked length.", "--ignore-eos")] = False,
    temperature: Annotated[float, _option(_REQUEST, "0 is greedy.")] = 0.0,
    top_p: Annotated[float | None, _option(_REQUEST, "As the server defines it; so are the next.")] = None,
    top_k: Annotated[int | None, _option(_REQUEST, "Not of OpenAI.")] = None,
    min_p: Annotated[float | None, _option(_REQUEST, "Not of OpenAI.")] = None,
    frequency_penalty: Annotated[float | None, _option(_REQUEST, "From -2 to 2.")] = None,
    presence_penalty: Annotated[float | None, _option(_REQUEST, "From -2 to 2.")] = None,
    repetition_penalty: Annotated[float | None, _option(_REQUEST, "Not of OpenAI.")] = None,
    extra_body: Annotated[
        str | None, _option(_REQUEST, "A JSON object whose fields go into the body; null takes one out of it.")
    ] = None,
    request_timeout: Annotated[float, _option(_REQUEST, "Seconds until an answer has failed.")] = 6 * 3600.0,
    percentile_metrics: Annotated[str, _option(_RESULT, "Of these times: ttft, tpot, itl, e2el.")] = (
        "ttft,tpot,itl,e2el"
    ),
    metric_percentiles: Annotated[str, _option(_RESULT, "These percentiles.")] = "50,90,99",
    goodput: Annotated[
        list[str] | None,
        _option(_RESULT, "Objectives in ms, as in --goodput ttft:200 tpot:20; of ttft, tpot, e2el."),
    ] = None,
    more_objectives: Annotated[list[str] | None, typer.Argument(hidden=True)] = None,
    output_json: OutputJson = None,
    save_detailed: Annotated[
        bool, _option(_RESULT, "With --output-json: times of every request, too.", "--save-detailed")
    ] = False,
    plot_timeline: Annotated[
        Path | None, _option(_RESULT, "Draw every request over time into this page.", metavar="FILE.html")
    ] = None,
    timeline_itl_thresholds: Annotated[
        str, _option(_RESULT, "Two times in ms between which chunks get another colour.")
    ] = "25,50",
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Send requests to a server at times of their own, and time its answers."""
    with one_line_errors(debug=debug):
        given = {name: value for name, value in locals().items() if name not in ("api_key", "header", "debug")}
        from teachllm.bench.serve.arrivals import arrival_times
        from teachllm.bench.serve.client import Target
        from teachllm.bench.serve.dataset import RandomLengths, random_prompts, read_prompts
        from teachllm.bench.serve.figures import details, figures, parse_metrics, parse_objectives, parse_percentiles
        from teachllm.bench.serve.load import measure, run
        from teachllm.bench.serve.timeline import check_plotly, parse_thresholds, write_timeline

        objectives = parse_objectives(_objectives(goodput, more_objectives))
        metrics, percentiles = parse_metrics(percentile_metrics), parse_percentiles(metric_percentiles)
        thresholds = parse_thresholds(timeline_itl_thresholds)
        check_folder("--output-json", output_json)
        check_folder("--plot-timeline", plot_timeline)
        if save_detailed and output_json is None:
            raise ValueError("--save-detailed has nowhere to write: add --output-json FILE")
        if plot_timeline is not None:
            check_plotly()

        lengths = RandomLengths(random_input_len, random_output_len, random_range_ratio, random_prefix_len)
        num_ids = vocab_size if token_ids else None
        if dataset_name == "custom":
            if dataset_path is None:
                raise ValueError("--dataset-name custom reads a file: add --dataset-path FILE")
            prompts = read_prompts(dataset_path, num_prompts, custom_output_len)
        elif dataset_name == "random":
            prompts = random_prompts(num_prompts or _NUM_RANDOM_PROMPTS, lengths, seed, num_ids)
        else:
            raise ValueError(f"--dataset-name {dataset_name}: must be random or custom")
        warmups = random_prompts(num_warmups, lengths, seed=seed + 1, num_ids=num_ids)
        sampling = {
            **{"temperature": temperature, "top_p": top_p, "top_k": top_k, "min_p": min_p},
            **{"frequency_penalty": frequency_penalty, "presence_penalty": presence_penalty},
            **{"repetition_penalty": repetition_penalty, "ignore_eos": ignore_eos or None},
        }
        url = base_url or f"http://{f'[{host}]' if ':' in host else host}:{port}"
        fields = sampling | _json_object("--extra-body", extra_body)
        target = Target(url, endpoint, model or "", fields, _headers(header, api_key), request_timeout)
        for prompt in prompts[:1]:
            target.body(prompt)
        arrivals_s = arrival_times(len(prompts), request_rate, burstiness, seed)

        with progress_bar("requests") as progress:
            load = run(measure(target, prompts, arrivals_s, max_concurrency, warmups, progress))
        found = {
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            **{"base_url": target.root, "endpoint": endpoint, "model_id": load.model, "num_prompts": len(prompts)},
            **{"request_rate": _json_number(request_rate), "burstiness": burstiness},
            "max_concurrency": max_concurrency,
            **figures(load, objectives, metrics, percentiles),
            "options": {name: _json_number(value) for name, value in given.items()},
        }
        write_json(output_json, found | (details(load) if save_detailed else {}))
        title = f"{load.model} at {target.root}{endpoint}: {len(prompts)} requests"
        if plot_timeline is not None:
            write_timeline(load.records, plot_timeline, title, thresholds)
            notes().print(f"The timeline, for any browser: {plot_timeline}", markup=False, soft_wrap=True)
        _say_failures(load)
        _warn(load, prompts, ignore_eos)
        _report(title, found, metrics, ["mean", *(f"p{percentile:g}" for percentile in percentiles)], objectives)


def _objectives(goodput: Sequence[str] | None, more: Sequence[str] | None) -> list[str]:
    """Return what stands behind one `--goodput`, as vLLM has it, or behind several."""
    if more and not goodput:
        raise ValueError(f"{more[0]!r} belongs to no flag (--help lists them)")
    return [*(goodput or ()), *(more or ())]


def _headers(given: Sequence[str] | None, api_key: str | None) -> dict[str, str]:
    found = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    for text in given or ():
        name, sign, value = text.partition("=")
        if not (name and sign):
            raise ValueError("--header: must be KEY=VALUE")
        found[name] = value
    return found


def _json_object(flag: str, text: str | None) -> dict[str, Any]:
    try:
        found = json.loads(text or "{}")
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise ValueError(f"{flag} {text}: must be a JSON object, like '{{\"top_k\": 20}}'")
    return found


def _json_number(value: Any) -> Any:
    """JSON has no infinity."""
    if isinstance(value, Path) or (isinstance(value, float) and math.isinf(value)):
        return str(value)
    return value


def _say_failures(load: Load) -> None:
    """How many requests failed, and the first errors.

    Raises:
        RuntimeError: all did.
    """
    failed = load.failed
    errors = list(dict.fromkeys(record.error for record in failed))
    if failed and not load.finished:
        raise RuntimeError(f"all {len(failed)} requests failed, the first with: {errors[0]}")
    for error in errors[:_ERRORS_SHOWN]:
        num = sum(record.error == error for record in failed)
        warnings.warn(f"{num} of {len(load.records)} requests failed: {error}", stacklevel=2)
    if len(errors) > _ERRORS_SHOWN:
        warnings.warn(f"and {len(errors) - _ERRORS_SHOWN} other errors: --output-json FILE has them", stacklevel=2)


def _warn(load: Load, prompts: Sequence[Prompt], ignore_eos: bool) -> None:
    for doubt in load.doubts():
        warnings.warn(doubt, stacklevel=2)
    other = sum(record.num_output_tokens != record.output_len for record in load.finished if record.has_usage)
    if ignore_eos and other:
        warnings.warn(f"{other} answers have another length than was asked for, despite --ignore-eos", stacklevel=2)


def _report(
    title: str,
    found: Mapping[str, Any],
    metrics: Sequence[str],
    columns: Sequence[str],
    objectives: Mapping[str, float],
) -> None:
    from rich.table import Table
    from rich.text import Text

    from teachllm.bench.serve.figures import METRICS

    console = answers()
    console.print(Text(f"{title}, {found['failed']} failed, {found['duration']:.2f} s", style="bold"))
    rates = Table(box=None, show_header=False, padding=(0, 1, 0, 2))
    rates.add_column(style="bold")
    rates.add_column(justify="right")
    rates.add_column()
    tokens = f"{found['total_input_tokens']:,} in, {found['total_output_tokens']:,} out"
    most = f"{found['max_concurrent_requests']:,} out at a time at most"
    rates.add_row("output", number(found["output_throughput"]), f"tokens/s  ({tokens})")
    rates.add_row("total", number(found["total_token_throughput"]), "tokens/s")
    rates.add_row("requests", number(found["request_throughput"]), f"requests/s  ({most})")
    if objectives:
        within = ", ".join(f"{metric} <= {limit:g} ms" for metric, limit in objectives.items())
        rates.add_row("goodput", number(found["request_goodput"]), f"requests/s  ({within})")
    console.print(rates)
    times = Table(box=None, padding=(0, 1, 0, 2))
    times.add_column("ms", style="bold")
    for column in columns:
        times.add_column(column, justify="right")
    times.add_column("", style="dim")
    for metric in metrics:
        values = (found[f"{column}_{metric}_ms"] for column in columns)
        times.add_row(metric, *("-" if value is None else number(value) for value in values), METRICS[metric])
    console.print(times)
    client = found["client"]
    console.print(
        f"This client sent p99 {number(client['p99_late_ms'])} ms late, {number(client['max_late_ms'])} ms at most, "
        f"and used {client['busy']:.0%} of a core at its busiest.",
        style="dim",
        markup=False,
    )
