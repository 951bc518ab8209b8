"""Describe a checkpoint from its description alone: shapes, sizes, context length, end-of-sequence ids.

What can be refused by its description is refused here, before a weight is read, and everything that memory
arithmetic needs is known here, before a weight is allocated.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from teachllm.config import EngineConfig
from teachllm.models.checkpoint import find_folder, quantization_config, read_json, stored_tensors
from teachllm.models.registry import OWN, WITH_EXPERTS, ModelError, architecture_of, check_supported
from teachllm.models.shape import Shape

if TYPE_CHECKING:
    from teachllm.models.quantized_needs import Dequantized
    from teachllm.quantization.layer_schemes import Quantization

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_KV_CACHE_DTYPES = {"fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn", "int8": "int8"}
_SAMPLING_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_new_tokens")


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
        eos_token_ids: generation_config.json's, else config.json's.
        weight_bytes: of all that the model keeps in memory: weights, tied ones twice on a CPU, and rotary tables.
        active_bytes: of the parameters that `num_active_parameters` counts.
        quantization: how its weights are quantized, for people; None: they are not. See `of_model`.
        quantized_as_read: the method by which an unquantized checkpoint is quantized as it is loaded.
        load_format: as `EngineConfig.load_format`.
        num_w8a8_parameters: of the parameters that `num_active_parameters` counts, those of W8A8 products.
        dequantized: weights that a step of many tokens dequantizes on a GPU, see `Dequantized`.
        generation_defaults: sampling settings that generation_config.json recommends.
        raw: config.json.
        kv_cache_dtype: as `EngineConfig.kv_cache_dtype`.
    """

    path: str
    device_type: str
    architecture: str
    implementation: str
    dtype: str
    max_model_len: int
    eos_token_ids: frozenset[int]
    weight_bytes: int
    active_bytes: int
    quantization: str | None
    quantized_as_read: str | None
    load_format: str
    num_w8a8_parameters: int
    dequantized: tuple[tuple[int, int, int], ...]
    generation_defaults: dict[str, float | int]
    raw: dict[str, Any]
    kv_cache_dtype: str = "auto"

    @property
    def has_experts(self) -> bool:
        """Return whether some of its layers are mixtures of experts."""
        return self.architecture in WITH_EXPERTS

    @property
    def kv_dtype(self) -> str:
        """Return the dtype of the KV cache, by PyTorch's name."""
        return _KV_CACHE_DTYPES.get(self.kv_cache_dtype, self.dtype)

    @property
    def kv_bytes(self) -> int:
        """Bytes per value of the KV cache."""
        return 1 if self.has_quantized_kv else DTYPE_BYTES[self.dtype]

    @property
    def has_quantized_kv(self) -> bool:
        """Return whether the KV cache is quantized, with scales."""
        return self.kv_cache_dtype in _KV_CACHE_DTYPES


def load_model_config(config: EngineConfig, device_type: str = "cpu") -> ModelConfig:
    """Finds the checkpoint of `config.model` and describes it.

    Args:
        device_type: "cpu" or "cuda"; decides what dtype="auto" means.

    Raises:
        ModelError: (a ValueError) no such checkpoint, an unsupported one, or a broken one; in one line.
    """
    folder = find_folder(config.model, config.revision, config.load_format, config.trust_remote_code)
    raw = read_json(folder / "config.json")
    check_supported(raw, config.trust_remote_code)
    architecture = architecture_of(raw)
    implementation = _implementation(architecture, config.model_impl)
    quantization = _quantization(config, raw, folder, implementation, None)
    shape = _shape(folder, raw, implementation, config.trust_remote_code)
    dtype = _dtype(raw, config.dtype, device_type)
    max_model_len = config.max_model_len or shape.context_len
    if max_model_len > shape.context_len:
        raise ModelError(
            f"max_model_len={max_model_len} is more than the model's context of {shape.context_len}: "
            f"set max_model_len={shape.context_len} or less"
        )
    stored = {} if config.load_format in ("dummy", "pt") else stored_tensors(folder)
    if stored and quantization is not None:  # by what is stored it is known which layers are
        quantization = _quantization(config, raw, folder, implementation, frozenset(stored))
    generation = folder / "generation_config.json"
    defaults = read_json(generation) if generation.exists() else {}
    num_parameters, size = shape.num_parameters, DTYPE_BYTES[dtype]
    if stored and quantization is None:  # quantized tensors do not tell the number of weights
        num_parameters = sum(t.num_elements for t in stored.values())
        if shape.tied and "lm_head.weight" in stored:
            num_parameters -= stored["lm_head.weight"].num_elements
    saved_bytes, widths, num_w8a8 = 0, dict[str, int](), 0
    dequantized: tuple[Dequantized, ...] = ()
    if quantization is not None and device_type != "cpu":
        from teachllm.models.quantized_needs import needs_of  # loads torch

        saved_bytes, widths, dequantized, num_w8a8 = needs_of(raw, quantization.schemes, size)
    num_kept = num_parameters
    if implementation == "teachllm":
        from teachllm.models.llama_config import parse

        num_kept += parse(raw).num_beside(max_model_len, shape.tied and device_type == "cpu")
    return ModelConfig(
        **(asdict(shape) | {"num_parameters": num_parameters} | widths),
        path=str(folder),
        device_type=device_type,
        architecture=architecture,
        implementation=implementation,
        dtype=dtype,
        max_model_len=max_model_len,
        eos_token_ids=_eos_token_ids(defaults, raw),
        weight_bytes=num_kept * size - saved_bytes,
        active_bytes=shape.num_active_parameters * size - saved_bytes,
        quantization=None if quantization is None else quantization.name,
        quantized_as_read=config.quantization,
        load_format=config.load_format,
        num_w8a8_parameters=num_w8a8,
        dequantized=dequantized,
        generation_defaults=_generation_defaults(defaults),
        raw=raw,
        kv_cache_dtype=config.kv_cache_dtype,
    )


def _generation_defaults(generation: dict[str, Any]) -> dict[str, float | int]:
    """Return what generation_config.json advises; one that says not to sample advises temperature 0."""
    advised = {name: generation[name] for name in _SAMPLING_DEFAULTS if generation.get(name) is not None}
    return advised | {"temperature": 0.0} if generation.get("do_sample") is False else advised


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
    if architecture_of(raw) in WITH_EXPERTS:
        raise ModelError(
            f"{architecture_of(raw)} takes no quantized weights, as experts have no kernel for them: take its "
            "unquantized checkpoint, and leave quantization out"
        )
    from teachllm.quantization.layer_schemes import quantization_of  # loads torch

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
    if model_impl == "teachllm" and architecture not in OWN:
        raise ModelError(
            f"model_impl='teachllm' has no code for {architecture}, only for {', '.join(OWN)}: "
            "set model_impl='auto' to run it through transformers"
        )
    return "teachllm" if architecture in OWN and model_impl != "transformers" else "transformers"


def _shape(folder: Path, raw: dict[str, Any], implementation: str, trust_remote_code: bool) -> Shape:
    # Imported here: both load torch, and transformers takes seconds.
    if implementation == "teachllm":
        from teachllm.models.llama_shape import shape

        return shape(raw)
    from teachllm.models import transformers_backend

    return transformers_backend.shape(folder, trust_remote_code)


def _dtype(raw: dict[str, Any], requested: str, device_type: str) -> str:
    if requested != "auto":
        return requested
    stored = raw.get("dtype") or raw.get("torch_dtype")
    return str(stored) if device_type != "cpu" and stored in DTYPE_BYTES else "float32"


def _eos_token_ids(generation_config: dict[str, Any], raw: dict[str, Any]) -> frozenset[int]:
    for source in (generation_config, raw):
        ids = source.get("eos_token_id")
        if ids is not None:
            return frozenset(ids) if isinstance(ids, list) else frozenset([ids])
    return frozenset()
