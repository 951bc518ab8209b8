"""EngineConfig (lesson 13): every knob of the engine, frozen and validated once.

Each rung from naive decoding to the full engine is a setting here, not another engine. What is left None
depends on the model (its context length) and is filled in by `resolve`; what contradicts itself is refused
in one line that names the setting to change.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from teachllm.sampling_params import as_flag, as_number, as_whole
from teachllm.speculative_config import SpeculativeConfig

CHOICES = {
    "dtype": ("auto", "float32", "bfloat16", "float16"),
    "load_format": ("auto", "safetensors", "pt", "dummy"),
    "model_impl": ("auto", "teachllm", "transformers"),
    "quantization": (None, "fp8", "int8", "int4"),
    "scheduling_policy": ("fcfs", "priority", "static"),
    "kv_cache_dtype": ("auto", "fp8", "fp8_e4m3", "int8"),
    "attention_backend": (None, "reference", "triton", "sdpa", "flash_attn", "flashinfer"),
    "startup": ("full", "fast"),
    "distributed_executor_backend": (None, "mp", "torchrun", "ray"),
}
_TYPES: dict[str, tuple[Callable[[Any], Any], str]] = {  # by their names in the class
    "int": (as_whole, "a whole number"),
    "float": (as_number, "a number"),
    "bool": (as_flag, "True or False"),
}
_DTYPE_ALIASES = {"half": "float16", "float": "float32"}
_PATHS = ("model", "tokenizer", "generation_config", "trace_path")
OBJECTS = {  # settings that are objects, with an example of each
    "override_generation_config": '{"temperature": 0.5}',
    "hf_overrides": '{"max_position_embeddings": 8192}',
}
_EMBEDDED_DRAFTERS = {"draft_model": "teachlm-draft", "eagle": "teachlm-eagle", "medusa": "teachlm-medusa"}
PARALLEL_SIZES = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Settings of one engine.

    Model:
        model: a local folder, a hub id, or "teachlm", the model that comes with the package.
        tokenizer: where to load the tokenizer from, if not from `model`.
        revision: branch, tag or commit on the hub.
        dtype: of weights, activations and KV cache; "auto" takes the checkpoint's, but float32 on a CPU. "half" is
            float16 and "float" is float32.
        load_format: "auto" reads safetensors; "pt" allows pickled weights, which can run code; "dummy" draws
            random weights from `config.json` alone.
        model_impl: this project's own model code, or transformers' with our paged attention.
        quantization: quantizes an unquantized checkpoint as it is loaded: "fp8" and "int8" (8 bits, activations too),
            "int4" (4 bits by groups of 128, 64 or 32). Embedding and output head stay. A checkpoint that is quantized
            already says so itself; see docs/quantization.md.
        trust_remote_code: lets a checkpoint bring its own Python.
        hf_overrides: values in place of those in config.json, as a JSON object: {"rope_scaling": {"rope_type": "yarn",
            "factor": 4.0, "original_max_position_embeddings": 32768}}.
        generation_config: where requests get the settings from that they do not name: "auto" is the checkpoint's
            generation_config.json, "vllm" (vLLM's word) no file at all, anything else a folder with such a file.
        override_generation_config: settings in place of that file's, as a JSON object: {"temperature": 0.5}.
        skip_tokenizer_init: prompts and results are token ids only.
        max_model_len: longest sequence, prompt and output together; None takes the model's context length.
        device: "cpu", "cuda", "cuda:1", ...; "auto" is the GPU where there is one.
        seed: of everything random that a request does not seed itself.

    KV cache:
        enable_kv_cache: False recomputes the whole sequence at every step, to see what the cache saves.
        block_size: tokens per block. `max_model_len` gives the contiguous, preallocated cache of pre-paging
            engines.
        gpu_memory_utilization: the share of the free memory that the engine may use.
        kv_cache_memory_bytes: KV cache size of each rank; None derives it from `gpu_memory_utilization` (on a CPU: what
            `max_num_seqs` sequences may need, but no more than 1 GiB or one sequence).
        num_gpu_blocks_override: number of blocks, whatever the memory arithmetic says.
        kv_cache_dtype: dtype of K and V in the cache: "auto" is the model's; "fp8" (the same as "fp8_e4m3") and "int8"
            quantize them to one byte with a scale per KV head. Half the memory or less, and decodes of long
            sequences read half as much; answers may differ. Scales of fp8 are the checkpoint's, if it has them; any
            others are measured at start, on a short text. See docs/quantization.md.
        enable_prefix_caching: share full blocks between equal prefixes; None is on where it is possible.

    Scheduling:
        max_num_batched_tokens: the token budget of a step; None is 2048, on a GPU `max_num_seqs` more than 16384, so
            that a prompt of that length stays whole beside the decodes.
        max_num_seqs: requests running at once.
        scheduling_policy: "fcfs", "priority" (lower first), or "static" (no request joins until the whole
            batch has finished).
        enable_chunked_prefill: a prompt may be computed over several steps.
        long_prefill_token_threshold: the most prompt tokens one request gets in a step; 0 is no limit.
        max_step_ms: how long a step should take at most in which requests decode, since it is the time between two of
            their tokens: prompts get as many tokens of it as fit, by what tokens were measured to take. None is no
            limit.
        async_scheduling: schedule the next step before the last one's tokens are known; None does so on a GPU.
        enforce_eager: no CUDA graphs; a CPU has none anyway.
        attention_backend: who computes attention. "reference" (CPU): PyTorch's products of matrices. "triton": this
            project's kernels, keys split among processors for decodes, tiles of queries for prompts. "sdpa": the
            same, but whole prompts of round lengths from 4096 tokens on by PyTorch's attention (cuDNN). "flash_attn",
            "flashinfer": everything by the package of that name, without CUDA graphs. None is "triton" where a Hopper
            GPU's own kernel takes the prompts, or the model is in float32, has a window in every layer or caps its
            scores, or the KV cache is quantized, else "sdpa". Only "reference" and "triton" read a
            quantized cache.
        batch_invariant: a request's logits do not change by one bit with what runs beside it or how its prompt is
            cut. On a GPU; slower, since no kernel may suit itself to the batch.
        max_logprobs: the most `logprobs` a request may ask for; -1 is no limit.
        check_invariants: verify the scheduler's books after every step.
        startup: what an engine on a GPU does before it is ready. "full": compile every kernel that it may launch, and
            record a CUDA graph for every size of step. "fast": compile them, and record a graph when its size comes up
            for the second time, while requests wait. A CPU has neither.

    Parallelism, see docs/parallelism.md:
        tensor_parallel_size: ranks that share every layer: each has some of its heads and a part of its widths.
        pipeline_parallel_size: stages, each of which has some of the layers; as many batches are in flight.
        data_parallel_size: replicas of the engine, each with its own requests.
        enable_expert_parallel: a mixture's experts are spread over the ranks whole, those of all replicas, instead of
            each being split, and held by every replica.
        disable_custom_all_reduce: leave all sums of ranks on GPUs to NCCL; otherwise small ones go through memory that
            the GPUs have for each other, where they can.
        distributed_executor_backend: who starts an engine's ranks: "mp", the engine itself; "torchrun", which runs this
            command once for each; "ray", as actors. None is "mp" where there is more than one rank.
        nnodes: machines that have the ranks, each as many. On all but this one a user runs `teachllm worker --join`.
        master_addr: this machine's address, at which the others reach it.
        master_port: where they join; 0 is any that is free.

    Speculation:
        speculative_config: who drafts tokens ahead, and how many, as a JSON object: {"method": "ngram"}, {"method":
            "draft_model", "model": "teachlm-draft", "num_speculative_tokens": 4}; see docs/speculation.md. The text is
            the same with and without it.

    Trace:
        trace_path: a file for the trace of all that happens, see docs/trace.md. Readable by its owner alone.
        trace_text: token ids and their text are in the trace.
    """

    model: str = "teachlm"
    tokenizer: str | None = None
    revision: str | None = None
    dtype: str = "auto"
    load_format: str = "auto"
    model_impl: str = "auto"
    quantization: str | None = None
    trust_remote_code: bool = False
    hf_overrides: Mapping[str, Any] | None = None
    generation_config: str = "auto"
    override_generation_config: Mapping[str, Any] | None = None
    skip_tokenizer_init: bool = False
    max_model_len: int | None = None
    device: str = "auto"
    seed: int = 0

    enable_kv_cache: bool = True
    block_size: int = 16
    gpu_memory_utilization: float = 0.9
    kv_cache_memory_bytes: int | None = None
    num_gpu_blocks_override: int | None = None
    kv_cache_dtype: str = "auto"
    enable_prefix_caching: bool | None = None

    max_num_batched_tokens: int | None = None
    max_num_seqs: int | None = None
    scheduling_policy: str = "fcfs"
    enable_chunked_prefill: bool = True
    long_prefill_token_threshold: int = 0
    max_step_ms: float | None = None
    async_scheduling: bool | None = None
    enforce_eager: bool = False
    attention_backend: str | None = None
    batch_invariant: bool = False
    max_logprobs: int = 20
    check_invariants: bool = False
    startup: str = "full"

    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    data_parallel_size: int = 1
    enable_expert_parallel: bool = False
    disable_custom_all_reduce: bool = False
    distributed_executor_backend: str | None = None
    nnodes: int = 1
    master_addr: str = "127.0.0.1"
    master_port: int = 29501

    speculative_config: SpeculativeConfig | None = None

    trace_path: str | None = None
    trace_text: bool = True

    def __post_init__(self) -> None:
        for name in _PATHS:
            if isinstance(path := getattr(self, name), os.PathLike):
                object.__setattr__(self, name, os.fspath(path))  # other processes are told settings as plain text
        if isinstance(self.dtype, str):
            object.__setattr__(self, "dtype", _DTYPE_ALIASES.get(self.dtype, self.dtype))
        if self.seed is None:
            object.__setattr__(self, "seed", 0)
        self._check_types()
        for name, choices in CHOICES.items():
            if getattr(self, name) not in choices:
                raise ValueError(f"{name}={getattr(self, name)!r}: choose one of {', '.join(c for c in choices if c)}")
        at_least_one = ("max_model_len", "block_size", "max_num_batched_tokens", "max_num_seqs")
        for name in (*at_least_one, *PARALLEL_SIZES, "nnodes", "num_gpu_blocks_override", "kv_cache_memory_bytes"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}={value}: must be at least 1")
        if self.long_prefill_token_threshold < 0:
            raise ValueError(f"long_prefill_token_threshold={self.long_prefill_token_threshold}: must be 0 or more")
        if self.max_logprobs < -1:
            raise ValueError(f"max_logprobs={self.max_logprobs}: must be 0 or more, or -1 for no limit")
        if not 0 <= self.master_port < 1 << 16:
            raise ValueError(f"master_port={self.master_port}: must be in 0..65535")
        if not 0.0 < self.gpu_memory_utilization <= 1.0:
            raise ValueError(f"gpu_memory_utilization={self.gpu_memory_utilization}: must be in (0, 1]")
        if not self.enable_kv_cache and self.enable_prefix_caching:
            raise ValueError("enable_prefix_caching=True needs a KV cache: set it to False, or enable_kv_cache=True")
        if not self.enable_kv_cache and self.kv_cache_dtype != "auto":
            raise ValueError(
                f"kv_cache_dtype={self.kv_cache_dtype!r} needs a KV cache: set it to 'auto', or enable_kv_cache=True"
            )
        if self.long_prefill_token_threshold and not (self.enable_chunked_prefill and self.enable_kv_cache):
            raise ValueError(
                f"long_prefill_token_threshold={self.long_prefill_token_threshold} limits a chunk, and there are no "
                "chunks: set it to 0, or set enable_chunked_prefill=True and enable_kv_cache=True"
            )
        if self.max_step_ms is not None and not 0 < self.max_step_ms < math.inf:
            raise ValueError(f"max_step_ms={self.max_step_ms}: must be above 0, and finite")
        if self.max_step_ms is not None and not (self.enable_chunked_prefill and self.enable_kv_cache):
            raise ValueError(
                f"max_step_ms={self.max_step_ms} limits a chunk, and there are no chunks: leave it out, or set "
                "enable_chunked_prefill=True and enable_kv_cache=True"
            )
        if self.async_scheduling and not self.enable_kv_cache:
            raise ValueError(
                "async_scheduling=True needs blocks that outlive a step: set it to False, or enable_kv_cache=True"
            )
        if self.async_scheduling and self.pipeline_parallel_size > 1:
            raise ValueError(
                f"async_scheduling=True needs sampled tokens where the next step begins, and with "
                f"pipeline_parallel_size={self.pipeline_parallel_size} that is another rank: set it to False. Stages "
                "work on several plans anyway"
            )
        if self.batch_invariant and self.tensor_parallel_size > 2:
            raise ValueError(
                f"batch_invariant=True with tensor_parallel_size={self.tensor_parallel_size}: in which order more than "
                "two ranks are added up depends on the batch; set tensor_parallel_size=2, or batch_invariant=False"
            )
        if self.batch_invariant and self.attention_backend not in (None, "triton"):
            raise ValueError(
                f"batch_invariant=True needs kernels that add in a fixed order, and attention_backend="
                f"{self.attention_backend!r} has none: set attention_backend=triton, or batch_invariant=False"
            )
        for name, example in OBJECTS.items():
            given = getattr(self, name)
            if not isinstance(given, Mapping | None):
                raise ValueError(f"{name}={given!r}: must be an object, like {example}")
            if given is not None:
                object.__setattr__(self, name, dict(given))  # other processes are told it as JSON
        if self.speculative_config is not None:
            drafters = _EMBEDDED_DRAFTERS if self.model == "teachlm" else {}
            object.__setattr__(self, "speculative_config", SpeculativeConfig.of(self.speculative_config, drafters))
            if not self.enable_kv_cache:
                raise ValueError(
                    "speculative_config needs cached tokens to verify drafts: leave it out, or set enable_kv_cache=True"
                )
        self._check_machines()
        self._check_lengths()

    def _check_types(self) -> None:
        """Refuse values of another type: "no" would count as true, and a text fails wherever it is compared first."""
        for field in fields(self):
            value = getattr(self, field.name)
            kind, _, may_be_none = str(field.type).partition(" | ")
            if value is None and may_be_none:
                continue
            if kind in _TYPES:
                convert, wanted = _TYPES[kind]
                try:
                    object.__setattr__(self, field.name, convert(value))
                except (TypeError, ValueError, OverflowError, RuntimeError):
                    raise ValueError(f"{field.name}={value!r}: must be {wanted}") from None
            elif kind == "str" and field.name not in CHOICES and not isinstance(value, str):
                raise ValueError(f"{field.name}={value!r}: must be a text")

    def _check_machines(self) -> None:
        if self.num_ranks % self.nnodes:
            raise ValueError(
                f"nnodes={self.nnodes} machines cannot have as many ranks each: tensor_parallel_size="
                f"{self.tensor_parallel_size} x pipeline_parallel_size={self.pipeline_parallel_size} are "
                f"{self.num_ranks}; set nnodes to a divisor of that"
            )
        backend = self.distributed_executor_backend
        if self.nnodes > 1 and backend not in (None, "mp"):
            raise ValueError(f"nnodes={self.nnodes} is for ranks that join, and {backend} starts all: leave nnodes out")
        if self.data_parallel_size > 1 and (self.nnodes > 1 or backend not in (None, "mp")):
            how = f"nnodes={self.nnodes}" if self.nnodes > 1 else f"distributed_executor_backend={backend}"
            raise ValueError(
                f"{how} is for the ranks of one engine, and data_parallel_size={self.data_parallel_size} are several "
                "engines: set it to 1"
            )

    def _check_lengths(self) -> None:
        """The rules between lengths; those that are still None are looked at again by `resolve`."""
        budget, length, seqs = self.max_num_batched_tokens, self.max_model_len, self.max_num_seqs
        if budget is not None and seqs is not None and budget < seqs:
            raise ValueError(
                f"max_num_batched_tokens={budget} is less than max_num_seqs={seqs}, so a step could not give every "
                f"running request its token: raise the budget to {seqs}, or set max_num_seqs={budget}"
            )
        if budget is not None and length is not None and budget < length:
            for name in ("enable_kv_cache", "enable_chunked_prefill"):
                if not getattr(self, name):
                    raise ValueError(
                        f"{name}=False computes a whole prompt in one step, and max_num_batched_tokens={budget} is "
                        f"less than max_model_len={length}: set max_num_batched_tokens={length}, or lower max_model_len"
                    )
        num_drafts = 0 if self.speculative_config is None else self.speculative_config.num_speculative_tokens
        if length is not None and num_drafts >= length:
            raise ValueError(
                f"num_speculative_tokens={num_drafts} drafts more than a sequence of "
                f"max_model_len={length} holds: draft less, or raise max_model_len"
            )
        if length is not None and self.block_size >= length and self.enable_prefix_caching:
            raise ValueError(
                f"enable_prefix_caching=True shares full blocks, and with block_size={self.block_size} no unfinished "
                f"sequence of max_model_len={length} fills one: set enable_prefix_caching=False, or block_size=16"
            )

    @property
    def num_ranks(self) -> int:
        """Processes that compute for one engine."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def num_local_ranks(self) -> int:
        """Return the number of ranks on each machine."""
        return self.num_ranks // self.nnodes

    @property
    def shares_experts(self) -> bool:
        """Return whether replicas step together, since each has only some of a mixture's experts."""
        return self.enable_expert_parallel and self.data_parallel_size > 1

    def resolve(self, model_max_len: int) -> EngineConfig:
        """The configuration with nothing left None that the scheduler reads.

        Args:
            model_max_len: the context length the checkpoint declares.

        Raises:
            ValueError: `max_model_len` exceeds it, or a default now contradicts a given setting.
        """
        length = self.max_model_len or model_max_len
        if length > model_max_len:
            raise ValueError(
                f"max_model_len={length} is more than the model's context of {model_max_len}: "
                f"set max_model_len={model_max_len} or less"
            )
        whole_prompts = not (self.enable_kv_cache and self.enable_chunked_prefill)
        on_gpu = self.device.startswith("cuda")
        usual = 16384 + (self.max_num_seqs or 256) if on_gpu else 2048
        budget = self.max_num_batched_tokens or max(usual, length if whole_prompts else 0, self.max_num_seqs or 0)
        running_ahead = self.async_scheduling
        if running_ahead is None:
            running_ahead = on_gpu and self.enable_kv_cache and self.pipeline_parallel_size == 1
        caching = self.enable_prefix_caching
        if caching is None:
            caching = self.enable_kv_cache and self.block_size < length
        return replace(
            self,
            max_model_len=length,
            max_num_batched_tokens=budget,
            max_num_seqs=self.max_num_seqs or min(256, budget),
            enable_prefix_caching=caching,
            async_scheduling=running_ahead,
        )
