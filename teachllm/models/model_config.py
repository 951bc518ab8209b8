"""Describe a checkpoint from its description alone: shapes, sizes, context length, end-of-sequence ids.

What can be refused by its description is refused here, before a weight is read, and everything that memory
arithmetic needs is known here, before a weight is allocated.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from teachllm.checkpoint.files import find_folder, quantization_config, read_json
from teachllm.checkpoint.generation_config import generation_defaults, read_generation_config
from teachllm.checkpoint.json_values import JsonObject
from teachllm.config import EngineConfig
from teachllm.errors import ModelError
from teachllm.models.registry import architecture_of, check_supported, is_own, own_architectures
from teachllm.models.shape import Shape

if TYPE_CHECKING:
    from teachllm.quantization.formats.layer_schemes import Quantization

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_STORED_DTYPES = ("", "auto", "float64", *DTYPE_BYTES, "half", "float", "float8_e4m3fn", "float8_e5m2", "uint8", "int8")
_KV_CACHE_DTYPES = {"fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn", "int8": "int8"}


@dataclass(frozen=True, kw_only=True)
class ModelConfig(Shape):
    """A model's shape, and how this engine will use it.

    Attributes:
        path: local folder.
        device_type: "cpu" or "cuda", where it is to run: sizes depend on it.
        architecture: as config.json names it, for example "Qwen3ForCausalLM".
        implementation: "teachllm" or "transformers".
        dtype: "float32", "bfloat16" or "float16".
        max_model_len: `context_len`, or the shorter length that was asked for.
        eos_token_ids: generation_config.json's, else config.json's; an engine adds its tokenizer's.
        weight_bytes: of all that the model keeps in memory: weights, tied ones twice on a CPU, and rotary tables.
        active_bytes: of the parameters that `num_active_parameters` counts.
        quantization: how its weights are quantized, for people; None: they are not. See `quantization_of_model`.
        quantized_as_read: the method by which an unquantized checkpoint is quantized as it is loaded.
        load_format: as `EngineConfig.load_format`.
        num_w8a8_parameters: of the parameters that `num_active_parameters` counts, those of W8A8 products.
        generation_defaults: settings of requests that do not name them, see `generation_config.py`.
        raw: config.json, with `EngineConfig.hf_overrides`.
        kv_cache_dtype: as `EngineConfig.kv_cache_dtype`.
        first_layer: the index in the whole model of the first layer; of a rank that has a later stage not 0.
    """

    path: str
    device_type: str
    architecture: str
    implementation: str
    dtype: str
    max_model_len: int
    weight_bytes: int
    active_bytes: int
    quantization: str | None
    quantized_as_read: str | None
    load_format: str
    num_w8a8_parameters: int
    generation_defaults: dict[str, float | int]
    raw: dict[str, Any]
    kv_cache_dtype: str = "auto"
    first_layer: int = 0

    @property
    def has_experts(self) -> bool:
        """Return whether some of its layers are mixtures of experts."""
        return self.experts is not None

    @property
    def kv_dtype(self) -> str:
        """Return the dtype of the KV cache, by PyTorch's name."""
        return _KV_CACHE_DTYPES.get(self.kv_cache_dtype, self.dtype)

    @property
    def kv_bytes(self) -> int:
        """Return the bytes per value of the KV cache."""
        return 1 if self.has_quantized_kv else DTYPE_BYTES[self.dtype]

    @property
    def has_quantized_kv(self) -> bool:
        """Return whether the KV cache is quantized, with scales."""
        return self.kv_cache_dtype in _KV_CACHE_DTYPES


def load_model_config(config: EngineConfig, device_type: str = "cpu") -> ModelConfig:
    """Find the checkpoint of `config.model` and describe it.

    Args:
        device_type: "cpu" or "cuda"; decides what dtype="auto" means.

    Raises:
        ModelError: (a ValueError) no such checkpoint, an unsupported one, or a broken one; in one line.
    """
    folder = find_folder(config.model, config.revision, config.load_format, config.trust_remote_code)
    raw = read_json(folder / "config.json") | dict(config.hf_overrides or {})
    check_supported(raw, config.trust_remote_code)
    architecture = architecture_of(raw)
    implementation = _implementation(architecture, config.model_impl)
    quantization = _quantization(config, raw, folder, implementation, None)
    stored_dtype(raw)
    # Imported here: both load torch, and transformers takes seconds.
    if implementation == "teachllm":
        from teachllm.models.build import parse_config
        from teachllm.models.own_model import describe_own

        if quantization is not None and parse_config(raw).experts is not None:
            raise ModelError(
                f"{architecture} takes no quantized weights, as experts have no kernel for them: take its unquantized "
                "checkpoint, and leave quantization out"
            )
        raw, shape, stored = describe_own(folder, raw, config.load_format)
    else:
        from teachllm.models.via_transformers import shape as via_transformers_shape

        shape = via_transformers_shape.shape(folder, config)
        stored = {}
    dtype = _dtype(raw, config.dtype, device_type)
    max_model_len = config.max_model_len or shape.context_len
    if max_model_len > shape.context_len:
        raise ModelError(
            f"max_model_len={max_model_len} is more than the model's context of {shape.context_len}: "
            f"set max_model_len={shape.context_len} or less"
        )
    if stored and quantization is not None:  # by what is stored it is known which layers are
        quantization = _quantization(config, raw, folder, implementation, frozenset(stored))
    recommended = read_generation_config(config, folder)
    eos_token_ids = recommended.token_ids("eos_token_id") if recommended.has("eos_token_id") else shape.eos_token_ids
    shape, size = replace(shape, eos_token_ids=eos_token_ids), DTYPE_BYTES[dtype]
    found = ModelConfig(
        **vars(shape),
        path=str(folder),
        device_type=device_type,
        architecture=architecture,
        implementation=implementation,
        dtype=dtype,
        max_model_len=max_model_len,
        weight_bytes=shape.num_parameters * size,
        active_bytes=shape.num_active_parameters * size,
        quantization=None if quantization is None else quantization.name,
        quantized_as_read=config.quantization,
        load_format=config.load_format,
        num_w8a8_parameters=0,
        generation_defaults=generation_defaults(config, recommended),
        raw=raw,
        kv_cache_dtype=config.kv_cache_dtype,
    )
    if implementation == "transformers":
        return found
    from teachllm.models.own_model import with_bytes  # loads torch

    return with_bytes(found)


def _quantization(
    config: EngineConfig, raw: dict[str, Any], folder: Path, implementation: str, names: frozenset[str] | None
) -> Quantization | None:
    """Return how the projections are, or will be, quantized; None: not at all. `names`: see `of_config`.

    Raises:
        ModelError: a format that is not supported; or it is to be quantized, and is.
    """
    is_quantized = quantization_config(raw, folder) is not None
    if not is_quantized and config.quantization is None:
        return None
    from teachllm.quantization.formats.layer_schemes import quantization_of  # loads torch

    try:
        found = quantization_of(raw, folder, config.quantization, names)
    except ModelError as error:
        raise ModelError(f"{architecture_of(raw)}: {error}") from None
    if found is not None and is_quantized and config.quantization is not None:
        raise ModelError(
            f"quantization={config.quantization!r} is for unquantized checkpoints, and this one is quantized with "
            f"{found.name!r} already: leave quantization out"
        )
    if found is not None and implementation == "transformers":
        raise ModelError(
            f"{architecture_of(raw)} runs through transformers' code, which takes no quantized weights here "
            f"({found.name}): take its unquantized checkpoint, and leave quantization out"
        )
    return found


def _implementation(architecture: str, model_impl: str) -> str:
    if model_impl == "teachllm" and not is_own(architecture):
        raise ModelError(
            f"model_impl='teachllm' has no code for {architecture}, only for {', '.join(own_architectures())}: "
            "set model_impl='auto' to run it through transformers"
        )
    return "teachllm" if is_own(architecture) and model_impl != "transformers" else "transformers"


def _dtype(raw: dict[str, Any], requested: str, device_type: str) -> str:
    if requested != "auto":
        return requested
    return stored if device_type != "cpu" and (stored := stored_dtype(raw)) in DTYPE_BYTES else "float32"


def stored_dtype(raw: dict[str, Any]) -> str:
    """Return the dtype that config.json names, without "torch."; "" if it names none.

    Raises:
        ModelError: no dtype has such a name.
    """
    values = JsonObject(raw, "config.json")
    key = "dtype" if values.has("dtype") else "torch_dtype"
    name = values.text(key, "").removeprefix("torch.")
    if name not in _STORED_DTYPES:
        raise values.refusal(key, f"one of {', '.join(filter(None, _STORED_DTYPES))}")
    return name
