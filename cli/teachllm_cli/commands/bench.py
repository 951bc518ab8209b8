"""`teachllm bench`: how fast a model runs here, and how fast anything could run it here.

Flags that `vllm bench` has, too, are spelled as it spells them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from teachllm.config import EngineConfig
from teachllm_cli import engine as engine_door
from teachllm_cli.bench_output import OutputJson, check_folder, number, progress_bar, write_json
from teachllm_cli.commands.bench_serve import serve
from teachllm_cli.options.engine_options import engine_command
from teachllm_cli.speculation_line import speculation_line
from teachllm_cli.terminal import answers, notes

if TYPE_CHECKING:
    from teachllm import LLM
    from teachllm.bench.latency import LatencyResult
    from teachllm.bench.step_profile import Floor, StepProfile
    from teachllm.bench.throughput import ThroughputResult
    from teachllm.engine.observability.speculation_stats import Speculation
    from teachllm.roofline import Ceilings

bench = typer.Typer(
    name="bench",
    no_args_is_help=True,
    help="Measure latency or throughput beside this machine's ceilings, or a server under load.",
)

_KERNELS_SHOWN = 4  # of each group
_TRACE = Path("profile-trace.json")


@bench.command()
@engine_command
def latency(
    engine: EngineConfig,
    input_len: Annotated[int, typer.Option(help="Prompt tokens of a request.")] = 32,
    output_len: Annotated[int, typer.Option(help="Output tokens of a request.")] = 128,
    batch_size: Annotated[int, typer.Option(help="Requests that arrive together.")] = 8,
    num_iters_warmup: Annotated[int, typer.Option(help="Iterations that do not count.")] = 10,
    num_iters: Annotated[int, typer.Option(help="Iterations that count; medians are shown.")] = 30,
    output_json: OutputJson = None,
    profile: Annotated[bool, typer.Option("--profile", help="Then show where a decode step goes.")] = False,
    profile_trace: Annotated[
        Path | None, typer.Option(help=f"With --profile: its file for Perfetto. Default: {_TRACE}.")
    ] = None,
) -> None:
    """Time one batch of equal requests with random prompts, from its arrival to its last token."""
    from teachllm.bench.latency import LatencyOptions, latency_batch, run_latency
    from teachllm.bench.step_profile import check_profile, profile_decode

    options = LatencyOptions(input_len, output_len, batch_size, num_iters_warmup, num_iters)
    trace = profile_trace or (_TRACE if profile else None)
    check_folder("--profile-trace", trace)
    title = f"{engine.model}: {batch_size} x ({input_len} tokens in, {output_len} out)"
    with _measured(engine, output_json) as (llm, ceilings):
        if trace is not None:
            check_profile(llm, latency_batch(llm, options))
        with progress_bar("iterations") as progress:
            result = run_latency(llm, options, ceilings, progress)
        found = _report(title, result, ceilings, output_json, llm.speculation())
        if trace is not None:
            steps = profile_decode(llm, latency_batch(llm, options), result.ceilings, trace_path=trace)
            _report_profile(steps)
            write_json(output_json, found | {"profile": asdict(steps)})
            notes().print(f"The same steps for https://ui.perfetto.dev: {trace}", markup=False, soft_wrap=True)


@bench.command()
@engine_command
def throughput(
    engine: EngineConfig,
    num_prompts: Annotated[int, typer.Option(help="Requests, all at once.")] = 1000,
    input_len: Annotated[int, typer.Option(help="Prompt tokens of a request.")] = 1024,
    output_len: Annotated[int, typer.Option(help="Output tokens of a request.")] = 128,
    random_range_ratio: Annotated[
        float, typer.Option(help="Draw each length uniformly from length x (1 - r) to length x (1 + r).")
    ] = 0.0,
    num_warmups: Annotated[
        int | None, typer.Option(help="Requests that run before and do not count. Default: as many as --num-prompts.")
    ] = None,
    output_json: OutputJson = None,
) -> None:
    """Count the tokens per second of many requests with random prompts."""
    from teachllm.bench.throughput import ThroughputOptions, run_throughput

    options = ThroughputOptions(num_prompts, input_len, output_len, random_range_ratio, num_warmups)
    with _measured(engine, output_json) as (llm, ceilings), progress_bar("requests") as progress:
        result = run_throughput(llm, options, ceilings, progress)
        speculation = llm.speculation()
    tokens = f"{result.num_prompt_tokens:,} tokens in, {result.num_output_tokens:,} out"
    title = f"{engine.model}: {num_prompts} requests, {tokens}, {result.elapsed_s:.2f} s"
    _report(title, result, ceilings, output_json, speculation)


bench.command()(serve)


@contextlib.contextmanager
def _measured(engine: EngineConfig, output_json: Path | None) -> Iterator[tuple[LLM, Ceilings]]:
    """The model, and the ceilings of where it runs: measured first, since an engine takes what memory there is."""
    check_folder("--output-json", output_json)
    from teachllm.bench.ceilings import ceilings_of

    ceilings = ceilings_of(engine)
    llm = engine_door.make_llm(replace(engine, skip_tokenizer_init=True))
    with contextlib.closing(llm):
        yield llm, ceilings


def _report(
    title: str,
    result: LatencyResult | ThroughputResult,
    measured: Ceilings,
    output_json: Path | None,
    speculation: Speculation | None,
) -> dict[str, Any]:
    """Prints figures, and writes what was found; returns that."""
    ceilings, found = result.ceilings, result.json
    if speculation is not None:
        found = found | {"speculation": speculation.as_json()}
    write_json(output_json, found)
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, padding=(0, 1, 0, 2))
    table.add_column("figure")
    for column in ("measured", "at the ceilings", "of them"):
        table.add_column(column, justify="right")
    for figure in result.figures:
        amounts = (f"{number(value)} {figure.unit}" for value in (figure.value, figure.limit))
        table.add_row(figure.name, *amounts, f"{figure.of_ceiling:.1%}")
    console = answers()
    console.print(Text(title, style="bold"))
    console.print(table)
    console.print(
        f"Ceilings of {ceilings.device}, as reached at best: reads {ceilings.read_bandwidth / 1e9:,.0f} GB/s, "
        f"copies {ceilings.copy_bandwidth / 1e9:,.0f} GB/s; in {ceilings.dtype} matrix products "
        f"{ceilings.gemm_flops / 1e12:,.2f} TFLOP/s, attention {ceilings.attention_flops / 1e12:,.2f} TFLOP/s",
        style="dim",
        markup=False,
    )
    if ceilings != measured:
        console.print(
            f"Reads were measured at {measured.read_bandwidth / 1e9:,.0f} GB/s and products at "
            f"{measured.gemm_flops / 1e12:,.2f} TFLOP/s before, and the engine came to more: the model fits a cache, "
            "or the ceilings were measured too low",
            style="dim",
            markup=False,
        )
    if speculation is not None:
        console.print(f"With warm-up, {speculation_line(speculation)}", style="dim", markup=False)
        console.print("The figures at the ceilings are of plain decoding, a token per step.", style="dim", markup=False)
    return found


def _report_profile(steps: StepProfile) -> None:
    """A step's groups beside their floors, then its longest kernels."""
    from rich.table import Table
    from rich.text import Text

    console = answers()
    console.print(Text(f"A decode step, mean of {steps.num_steps}: {number(steps.wall_ms)} ms", style="bold"))
    table = Table(box=None, padding=(0, 1, 0, 2))
    table.add_column("where it goes", no_wrap=True)
    for column in ("ms", "share", "floor ms", "of it", "calls"):
        table.add_column(column, justify="right")

    def add(name: str, ms: float, floor: Floor | None = None, calls: float | None = None, style: str = "") -> None:
        best = ("", "") if floor is None else (f"{floor.ms:.3f}", f"{floor.ms / ms:.1%}")
        num_calls = "" if calls is None else f"{calls:.4g}"
        table.add_row(Text(name), f"{ms:.3f}", f"{ms / steps.wall_ms:.1%}", *best, num_calls, style=style)

    for group, ms in steps.groups().items():
        add(group, ms, steps.floors.get(group))
        for row in [row for row in steps.rows if row.group == group][:_KERNELS_SHOWN]:
            add(f"  {row.name.removeprefix('void ')[:28]}", row.ms, calls=row.calls, style="dim")
    add("gaps between kernels", steps.gaps_ms)
    console.print(table)
    floors = ", ".join(f"{group}: {floor.bound}" for group, floor in steps.floors.items())
    console.print(
        f"Floors are set by the ceilings ({floors}); a group without one is overhead.", style="dim", markup=False
    )
    console.print(
        f"Without the profiler a step takes {number(steps.unprofiled_ms)} ms, "
        f"and the host is at work for {number(steps.host_ms)} ms of it."
    )
