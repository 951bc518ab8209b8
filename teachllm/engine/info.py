"""What a model would need on this machine, told before any weight is read."""

from __future__ import annotations

from teachllm.config import EngineConfig
from teachllm.models.model_config import load_model_config
from teachllm.worker.executor import select_device
from teachllm.worker.kv_cache import plan_memory


def describe_model(config: EngineConfig) -> list[tuple[str, str, str]]:
    """Rows (what, amount, explanation): the model's shape, then its memory table.

    Raises:
        ValueError: the checkpoint is refused, or one sequence does not fit; one line says why.
    """
    device = select_device(config.device)
    model = load_model_config(config, device.type)
    resolved = config.resolve(model.max_model_len)
    windowed = sum(window is not None for window in model.windows)
    layers = f"hidden size {model.hidden_size}" + (f", {windowed} with a sliding window" if windowed else "")
    heads = f"{model.num_attention_heads} query and {model.num_kv_heads} KV heads of {model.head_size}"
    code = "this project's code" if model.implementation == "teachllm" else "transformers' code, our paged attention"
    return [
        ("architecture", model.architecture, code),
        ("parameters", f"{model.num_parameters / 1e6:,.1f} M", f"in {model.dtype} on {device}"),
        ("layers", str(model.num_layers), layers),
        ("heads", str(model.num_attention_heads), heads),
        ("context", f"{model.max_model_len} tokens", f"vocabulary of {model.vocab_size}"),
        *plan_memory(resolved, model, device).rows(),
    ]
