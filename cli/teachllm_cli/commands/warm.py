"""`teachllm warm`: compile a model's kernels ahead of its first start."""

from __future__ import annotations

import time
from functools import partial
from typing import Annotated

import typer

from teachllm.config import EngineConfig
from teachllm_cli.bench_output import progress_bar
from teachllm_cli.options.engine_options import engine_command
from teachllm_cli.terminal import answers, notes


@partial(engine_command, runs=False)
def warm(
    engine: EngineConfig,
    gpu: Annotated[
        str | None,
        typer.Option(
            help="Type of GPU to compile for: sm_80, sm_86, sm_89, sm_90, sm_100, sm_120 or gfx942; by default this "
            "machine's."
        ),
    ] = None,
    processes: Annotated[
        int | None, typer.Option(min=1, help="Compile in so many processes; by default one for each core, up to 16.")
    ] = None,
) -> None:
    """Compile the kernels that an engine of these settings launches, into Triton's cache; reads no weights.

    It needs no GPU: an image can be built with a warm cache. TRITON_CACHE_DIR says where the cache is.
    """
    from teachllm.engine import warm as module

    began = time.perf_counter()
    with progress_bar("kernels") as progress:
        found = module.warm(engine, gpu, processes, progress)
    for failure in found.failures:
        notes().print(f"not compiled: {failure}", markup=False)
    answers().print(
        f"{found.num_compiled} kernels compiled for {found.target} in {time.perf_counter() - began:.0f} s, "
        f"{found.num_cached} were there already: {found.folder}",
        markup=False,
        soft_wrap=True,
    )
    if found.failures:
        raise typer.Exit(1)
