"""`teachllm ladder`: where the speed comes from, one setting at a time."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from teachllm.config import EngineConfig
from teachllm_cli.bench_output import OutputJson, check_folder, number, write_json
from teachllm_cli.errors import one_line_errors
from teachllm_cli.terminal import answers, notes

if TYPE_CHECKING:
    from teachllm.bench.ladder import Result, Verdict


def ladder(
    model: Annotated[str, typer.Option("--model", "-m", help="A local folder, a hub id, or teachlm.")] = "teachlm",
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1; auto is the GPU where there is one.")] = "auto",
    dtype: Annotated[str, typer.Option(help="Of weights and KV cache; auto is float32 on a CPU.")] = "auto",
    plot: Annotated[Path | None, typer.Option(help="Write a picture, to a .svg or .png file.")] = None,
    output_json: OutputJson = None,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Run one workload from recomputing everything to the full engine, a setting at a time; two minutes on a laptop.

    Every rung has the same memory for KV. Greedy tokens must not change, and are compared.
    """
    with one_line_errors(debug):
        check_folder("--plot", plot)
        check_folder("--output-json", output_json)
        found, is_good = climb(EngineConfig(model=model, device=device, dtype=dtype), model, plot)
        write_json(output_json, found)
        if not is_good:
            raise ValueError("a rung that must not change a greedy token has changed one: what is said of it has both")


def climb(engine: EngineConfig, name: str, plot: Path | None) -> tuple[dict[str, Any], bool]:
    """Runs it and shows what came of it.

    Returns:
        All figures, and whether all tokens are as they must be.
    """
    import torch

    from teachllm.bench import ladder as rungs
    from teachllm.bench import ladder_plot
    from teachllm.bench.ceilings import ceilings_of

    size = rungs.GPU if rungs.kind_of_device(engine) == "cuda" else rungs.LAPTOP
    if plot is not None:
        ladder_plot.draw([], "")  # before minutes of work whose picture could not be drawn
    notes().print("measuring this machine's ceilings ...", style="dim")
    ceilings = ceilings_of(engine)
    results = []
    for result in rungs.climb(engine, size, ceilings, torch.cuda.device_count()):
        results.append(result)
        notes().print(f"{len(results)} of {len(rungs.RUNGS)}: {result.rung.name}", style="dim", markup=False)
    verdicts = rungs.compare(engine, results)
    title = f"{name} on {ceilings.device}: {size.num_requests} requests"
    _print(title, results, verdicts)
    gain = f"{rungs.gain(results):,.1f} times the tokens/s"
    answers().print(f"from the first rung to the best lossless one: {gain}", markup=False)
    found = rungs.as_json(size, ceilings, results, verdicts)
    if plot is not None:
        ladder_plot.write(found["rungs"], title, plot)
    return found, all(verdict.is_good for verdict in verdicts)


def _print(title: str, results: list[Result], verdicts: list[Verdict]) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, padding=(0, 0, 0, 2))
    table.add_column("rung", no_wrap=True)
    for column in ("tokens/s", "of ceiling", "TTFT s", "p99 gap ms", "KV waste"):
        table.add_column(column, justify="right", no_wrap=True)
    remarks = []
    for result, verdict in zip(results, verdicts, strict=True):
        name = result.rung.name
        remarks += [f"{name}: {text}" for text in (result.why_not, verdict.text) if text]
        if result.run is None:
            table.add_row(Text(name), "n/a", style="dim")
            continue
        found = result.run.figures
        waste = "n/a" if found.waste is None else f"{found.waste:.0%}"
        cells = (number(found.output_tokens_per_s), f"{result.run.of_ceiling:.1%}", number(found.ttft.mean))
        table.add_row(Text(name), *cells, number(1000 * found.itl.p99), waste)
    console = answers()
    console.print(Text(title, style="bold"))
    console.print(table)
    for remark in remarks:
        console.print(f"  {remark}", style="dim", markup=False)
