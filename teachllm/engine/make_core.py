"""Make an engine's core in this process: a device, a model on it, an executor, and maybe a trace."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any

from teachllm.config import EngineConfig
from teachllm.core.prefix_cache import hash_root
from teachllm.distributed.layout import layout_of
from teachllm.engine.engine_core import EngineCore, describe
from teachllm.engine.host_drafting import HostDrafting
from teachllm.engine.observability.ceilings import device_name, known_ceilings
from teachllm.engine.observability.engine_clock import EngineClock
from teachllm.engine.observability.step_roofline import StepRoofline
from teachllm.engine.observability.step_traffic import StepTraffic
from teachllm.engine.observability.trace_file import TraceFile
from teachllm.engine.overrides import NO_OVERRIDES, EngineOverrides
from teachllm.engine.text.token_texts import load_tokenizer
from teachllm.engine.text.tokenizer import Tokenizer
from teachllm.engine.text.trace_texts import TraceTexts
from teachllm.models.model_config import ModelConfig, load_model_config
from teachllm.models.own_model import model_of_rank
from teachllm.spec_decode.draft_length import make_draft_length
from teachllm.spec_decode.drafter import Drafter, check_drafter
from teachllm.spec_decode.load import DrafterConfig, load_drafter_config
from teachllm.spec_decode.ngram import NgramDrafter
from teachllm.spec_decode.step_times import Prior
from teachllm.startup_progress import StartupProgress
from teachllm.trace.recorder import Recorder
from teachllm.worker.cpu.model_runner import ModelRunner
from teachllm.worker.device import select_device
from teachllm.worker.executor import Executor, InProcessExecutor
from teachllm.worker.processes.multiprocess import MultiprocessExecutor, Peers
from teachllm.worker.runner import Runner


def make_core(
    config: EngineConfig,
    *,
    needs_tokenizer: bool = True,
    recorder: Recorder | None = None,
    trace_sink: Callable[[str], None] | None = None,
    progress: StartupProgress | None = None,
    make_executor: Callable[[EngineConfig, Executor[Any]], Executor[Any]] | None = None,
    drafter: Drafter | None = None,
    peers: Peers | None = None,
    overrides: EngineOverrides = NO_OVERRIDES,
) -> tuple[EngineCore, ModelConfig, Tokenizer | None]:
    """Load a model and join it with a scheduler.

    Args:
        needs_tokenizer: False loads it only if a trace needs it.
        drafter: of method "custom".
        peers: replicas that have the other experts.

    Other arguments are as in `Engine`.

    Raises:
        ValueError: the checkpoint or the settings are refused; one line says why and what to change.
    """
    device = select_device(config.device)
    model = load_model_config(config, device.type)
    config = replace(config, device=str(device)).resolve(model.max_model_len)
    _check_drafter(config, drafter)
    of_runner = overrides.given("attention", "make_sampler")
    is_shared = config.num_ranks > 1 or peers is not None or config.distributed_executor_backend is not None
    if of_runner and (is_shared or device.type != "cpu"):
        raise ValueError(
            f"a piece of your own for {', '.join(of_runner)} works on a CPU in one process: set device=cpu"
        )
    is_traced = recorder is None and (config.trace_path is not None or trace_sink is not None)
    tokenizer = load_tokenizer(config, model.path) if needs_tokenizer or (is_traced and config.trace_text) else None
    file = TraceFile(config.trace_path) if is_traced and config.trace_path is not None else None
    if is_traced:
        sink = _to_all([each for each in (file, trace_sink) if each is not None])
        recorder = Recorder(sink, EngineClock(), TraceTexts(tokenizer) if config.trace_text else None)
    model_drafter_config = load_drafter_config(config, model, device.type)
    check_ranks(config, model, model_drafter_config)
    built: MultiprocessExecutor | InProcessExecutor[Any]
    try:
        if is_shared:
            built = MultiprocessExecutor(config, progress, times_steps=recorder is not None, peers=peers)
        else:
            runner: Runner[Any]
            if device.type == "cuda":
                from teachllm.worker.gpu.gpu_model_runner import GPUModelRunner

                runner = GPUModelRunner(config, model, device, progress, model_drafter_config)
            else:
                runner = ModelRunner(config, model, device, progress, model_drafter_config, **of_runner)
            runner.observe(recorder is not None)
            built = InProcessExecutor(runner)
    except BaseException:
        if file is not None:
            file.close()
        raise
    try:
        executor: Executor[Any] = built if make_executor is None else make_executor(config, built)
        root = hash_root(
            model.path, config.revision, model.dtype, model.quantization, model.kv_dtype, config.block_size
        )
        roofline: StepRoofline | None = None
        traffic: StepTraffic | None = None
        if recorder is not None:
            num_devices = config.tensor_parallel_size if device.type == "cuda" else 1  # ranks share a CPU
            roofline = StepRoofline(model, known_ceilings(device_name(str(device)), model.dtype), num_devices)
            traffic = StepTraffic(config, model) if layout_of(config).num_connected > 1 else None
        core = EngineCore(
            config,
            executor,
            root,
            recorder,
            roofline=roofline,
            traffic=traffic,
            on_close=None if file is None else file.close,
            overrides=overrides,
            **_speculation(config, model, drafter, model_drafter_config, built.prepare),
        )
        if model_drafter_config is not None and model_drafter_config.max_len < model.max_model_len:
            core.scheduler.drafter_len = model_drafter_config.max_len
            drafter_model = model_drafter_config.speculation.model
            warnings.warn(
                f"the context of speculative model={drafter_model!r} is {model_drafter_config.max_len} tokens of the "
                f"model's {model.max_model_len}: beyond them requests go on without drafts",
                stacklevel=2,
            )
        if recorder is not None and roofline is not None:
            shape = {"path": model.path, "architecture": model.architecture, "dtype": model.dtype}
            ceilings = None if roofline.ceilings is None else asdict(roofline.ceilings)
            machine = {"device": device_name(str(device)), "ceilings": ceilings}
            recorder.header(describe(config), shape, executor.num_blocks, machine=machine)
    except BaseException:
        built.close()
        if file is not None:
            file.close()
        raise
    return core, model, tokenizer


def check_ranks(config: EngineConfig, model: ModelConfig, drafter: DrafterConfig | None) -> None:
    """Check the ranks before any process is started.

    Raises:
        ValueError: the ranks cannot share this model, or what is asked for besides.
    """
    layout = layout_of(config)
    if config.enable_expert_parallel and (layout.num_expert_ranks == 1 or not model.has_experts):
        why = "there is one rank" if model.has_experts else f"{model.architecture} has none"
        raise ValueError(
            f"enable_expert_parallel=True spreads experts over ranks, and {why}: set it to False"
            + (", or tensor_parallel_size=2, or data_parallel_size=2" if model.has_experts else "")
        )
    if layout.num_connected == 1:
        return
    if config.device.startswith("cuda") and layout.replicas > 1:
        raise ValueError(
            "enable_expert_parallel=True: replicas share experts only on CPUs yet; set device=cpu, or "
            "enable_expert_parallel=False"
        )
    if config.device.startswith("cuda") and config.pipeline_parallel_size > 1 and config.speculative_config is not None:
        raise ValueError(
            f"pipeline_parallel_size={config.pipeline_parallel_size}: stages on GPUs verify no drafts; leave "
            "speculative_config out, or share layers by tensor_parallel_size"
        )
    for stage in range(layout.pipeline):
        model_of_rank(model, layout.coords(layout.stage(stage)[0]))
    if drafter is not None and config.pipeline_parallel_size > 1:
        raise ValueError(
            f"pipeline_parallel_size={config.pipeline_parallel_size}: a drafter with weights reads what other stages "
            'compute; set it to 1, or speculative_config={"method": "ngram"}'
        )


def _speculation(
    config: EngineConfig,
    model: ModelConfig,
    drafter: Drafter | None,
    model_drafter_config: DrafterConfig | None,
    prepare: Callable[[Sequence[int], bool], Prior | None],
) -> dict[str, Any]:
    """Return what a core needs to speculate, by the names of `EngineCore`'s arguments."""
    speculation = config.speculative_config
    if speculation is None:
        return {}
    if speculation.synthetic_rate is not None:
        warnings.warn(
            "output means nothing: drafts are accepted at random, rejection_sample_method=synthetic", stacklevel=3
        )
    if speculation.method == "ngram" and not config.device.startswith("cuda"):  # a GPU searches its own rows
        drafter = NgramDrafter(speculation.prompt_lookup_max, speculation.prompt_lookup_min)
    cost = 0.0 if model_drafter_config is None else model_drafter_config.weight_bytes / model.weight_bytes
    return {
        "drafter": None if drafter is None else HostDrafting(drafter, model.vocab_size),
        "draft_length": make_draft_length(speculation, cost, prepare),
    }


def _check_drafter(config: EngineConfig, drafter: Drafter | None) -> None:
    """Check the drafter before anything is loaded.

    Raises:
        ValueError: a learner's drafter is missing, is one too many, or is none.
    """
    speculation = config.speculative_config
    if (drafter is not None) != (speculation is not None and speculation.drafts_on_host):
        raise ValueError(
            'a drafter of your own and speculative_config={"method": "custom"} need each other: pass drafter=..., or '
            "choose another method"
        )
    if drafter is not None:
        check_drafter(drafter)


def _to_all(sinks: Sequence[Callable[[str], None]]) -> Callable[[str], None]:
    """Make one sink out of several."""
    if len(sinks) == 1:
        return sinks[0]

    def sink(line: str) -> None:
        for each in sinks:
            each(line)

    return sink
