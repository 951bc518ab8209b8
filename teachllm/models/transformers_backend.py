"""Any other decoder through transformers' own model code, with our paged attention in place of theirs.

transformers calls attention through a table of functions and hands further keyword arguments of `forward` down to
it. So a function in that table reaches our KV cache and metadata, and the model's code stays as it is. A name that
only this table knows also switches off the attention masks: the model builds none, and ours does the masking.

Source: https://huggingface.co/docs/transformers/attention_interface
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM
from transformers.modeling_outputs import MoeModelOutputWithPast

from teachllm.config import EngineConfig
from teachllm.layers.attention import Attention, AttentionMetadata, paged_attention, write_kv
from teachllm.models.checkpoint import stored_tensors
from teachllm.models.model_config import ModelConfig
from teachllm.models.registry import SUPPORTED, ModelError, check_supported
from teachllm.models.shape import Shape

_ATTENTION = "teachllm_paged"
_NO_INTERFACE = "it does not use transformers' attention interface"
# What models pass to attention besides q, k, v and the mask, and what has no effect here.
_HARMLESS = ("dropout", "position_ids", "position_embeddings", "use_cache", "output_attentions", "output_hidden_states")


def shape(folder: Path, trust_remote_code: bool) -> Shape:
    """Return what the engine must know of a checkpoint, and whether its model can run here at all.

    Raises:
        ModelError: transformers does not know the model, or it does not use plain causal grouped-query attention.
    """
    config = _config(folder, trust_remote_code)
    check_supported(config.to_dict() | {"architectures": config.architectures}, trust_remote_code)
    name = config.architectures[0]
    with torch.device("meta"):
        model = _create(config, trust_remote_code)
    if not (model._supports_attention_backend and model._can_set_attn_implementation()):
        raise ModelError(f"{name} is not supported: {_NO_INTERFACE}; {SUPPORTED}")
    attentions = [m for m in model.modules() if hasattr(m, "is_causal") and hasattr(m, "layer_idx")]
    if len(attentions) != config.num_hidden_layers or not all(m.is_causal for m in attentions):
        raise ModelError(f"{name} is not supported: it needs one causal self-attention per layer; {SUPPORTED}")
    shape = Shape(
        context_len=_context_len(config),
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        num_layers=config.num_hidden_layers,
        num_attention_heads=config.num_attention_heads,
        num_kv_heads=getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
        head_size=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        windows=_windows(config),
        tied=_is_tied(model),
        num_parameters=sum(p.numel() for p in model.parameters()),
        num_active_parameters=_num_active(model, config),
        peak_width=_peak_width(config),
        gated_peak_width=_peak_width(config),
        fixed_peak_width=_peak_width(config),
    )
    _rehearse(model, shape)
    return shape


def _rehearse(model: Any, shape: Shape) -> None:
    """Runs the model without data (on the meta device), so that `_attention` sees what it would be asked for.

    Raises:
        ModelError: as `_attention`, or the output head needs more than hidden states.
    """
    ours = TransformersModel(model.eval(), shape.windows)
    cache = torch.empty(1, 1, shape.num_kv_heads, shape.head_size, device="meta")
    ids = torch.zeros(2, dtype=torch.int64, device="meta")
    try:
        ours(ids, ids, [(cache, cache)] * shape.num_layers, None)
    except ModelError:
        raise
    except Exception:
        # Code that looks at values (experts, some ropes) cannot run without data; `_attention` checks at every call.
        pass
    try:
        ours.logits(torch.empty(1, shape.hidden_size, device="meta"))
    except Exception as error:
        name = type(model).__name__
        raise ModelError(
            f"{name} is not supported: its output head does not run alone ({error}); {SUPPORTED}"
        ) from error


def load_transformers_model(
    model_config: ModelConfig, config: EngineConfig, device: torch.device, dtype: torch.dtype
) -> TransformersModel:
    """Builds the model with transformers, filled from the checkpoint unless load_format is "dummy".

    Raises:
        ModelError: a tensor is missing, unknown or of another shape.
    """
    folder = Path(model_config.path)
    AttentionInterface.register(_ATTENTION, _attention)
    hf_config = _config(folder, config.trust_remote_code)
    if config.load_format == "dummy":
        model = _create(hf_config, config.trust_remote_code).to(dtype)
    else:
        try:
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                folder,
                config=hf_config,
                dtype=dtype,
                attn_implementation=_ATTENTION,
                trust_remote_code=config.trust_remote_code,
                use_safetensors=config.load_format != "pt",
                weights_only=True,
                ignore_mismatched_sizes=True,
                output_loading_info=True,
            )
        except Exception as error:
            raise ModelError(f"{folder} cannot be loaded: {str(error).splitlines()[0]}") from error
        model, info = loaded
        _check_loaded(info, folder)
    return TransformersModel(model.to(device), model_config.windows)


class TransformersModel(nn.Module):
    """A causal language model of transformers behind the interface of our own models.

    Its base model turns tokens into hidden states. Its head may do more than one product (soft cap, scale), so it
    runs as it is too, over hidden states that a stand-in base model hands to it.
    """

    fuses_decodes = False
    implementation = "transformers"

    def __init__(self, model: Any, windows: tuple[int | None, ...]) -> None:
        super().__init__()
        self.base = model.base_model
        setattr(model, model.base_model_prefix, _Given())
        self.head = model
        self.attentions = nn.ModuleList(Attention(0.0, window) for window in windows)  # a call says its scale

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        kv_caches: list[tuple[torch.Tensor, torch.Tensor]],
        metadata: AttentionMetadata | None,
    ) -> torch.Tensor:
        """One step, [num_tokens] int64 -> [num_tokens, hidden_size]; as `LlamaForCausalLM.forward`."""
        output = self.base(
            input_ids=input_ids.unsqueeze(0),
            position_ids=positions.unsqueeze(0),
            use_cache=False,
            kv_caches=kv_caches,
            metadata=metadata,
            attentions=self.attentions,
        )
        hidden = output.last_hidden_state.squeeze(0)
        return (
            hidden
            if metadata is None or metadata.logits_indices is None
            else hidden.index_select(0, metadata.logits_indices)
        )

    def logits(self, hidden: torch.Tensor, *, sharded: bool = False, in_float32: bool = True) -> torch.Tensor:
        """Return [num_rows, vocab_size] logits in float32 (float64 stays float64), whatever form is asked for.

        No other rank has a part of the vocabulary.
        """
        logits = self.head(inputs_embeds=hidden.unsqueeze(0), use_cache=False).logits.squeeze(0)
        return logits.to(torch.promote_types(logits.dtype, torch.float32))


class _Given(nn.Module):
    """Stands where the base model was: its output is its input."""

    def forward(self, *_: Any, inputs_embeds: torch.Tensor, **__: Any) -> MoeModelOutputWithPast:
        output = MoeModelOutputWithPast(last_hidden_state=inputs_embeds)  # type: ignore[arg-type]
        output.cross_attentions = None  # which some heads pass on
        return output


def _attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    kv_caches: list[tuple[torch.Tensor, torch.Tensor]] | None = None,
    metadata: AttentionMetadata | None = None,
    attentions: Any = (),
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """The function in transformers' table: [1, heads, num_tokens, head_size] in, [1, num_tokens, heads, head_size] out.

    Without metadata it is a rehearsal, whose result has only a shape.

    Raises:
        ModelError: the layer asks for something that paged attention does not compute.
    """
    index, name = module.layer_idx, type(module).__name__
    if kv_caches is None:
        raise ModelError(f"{name} is not supported: its model hands no further arguments down to attention")
    assert isinstance(index, int)
    unknown = [k for k, v in others.items() if v is not None and v is not False and k not in _HARMLESS]
    if attention_mask is not None:
        unknown.append("attention_mask")
    if key.shape[1::2] != kv_caches[index][0].shape[2:] or value.shape != key.shape:
        unknown.append(f"K of {list(key.shape)} and V of {list(value.shape)}")
    settings = attentions[index].settings
    if sliding_window is not None and sliding_window != settings.window:
        unknown.append(f"sliding_window={sliding_window} in layer {index}, where config.json means {settings.window}")
    if unknown:
        raise ModelError(f"{name} is not supported: it passes {', '.join(unknown)} to attention")
    if metadata is None:
        return torch.empty_like(query).transpose(1, 2), None
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    q, k, v = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))
    if q.is_cuda:  # kernels want a token's heads side by side
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    write_kv(k, v, kv_caches[index], metadata, settings.kv_scales)
    settings = replace(settings, scale=scale, soft_cap=softcap)
    out = paged_attention(q, k, v, kv_caches[index], metadata, settings)
    return out.unsqueeze(0), None


def _config(folder: Path, trust_remote_code: bool) -> Any:
    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except Exception as error:
        raise ModelError(f"{folder}/config.json: transformers gave {str(error).splitlines()[0]}") from error


def _create(config: Any, trust_remote_code: bool) -> Any:
    """A model with unfilled weights.

    Raises:
        ModelError: transformers has no causal language model for this config.
    """
    AttentionInterface.register(_ATTENTION, _attention)
    try:
        return AutoModelForCausalLM.from_config(
            config, attn_implementation=_ATTENTION, trust_remote_code=trust_remote_code
        )
    except Exception as error:
        # Older model code looks the name up in a table of its own.
        reason = _NO_INTERFACE if isinstance(error, KeyError) else str(error).splitlines()[0]
        raise ModelError(f"{config.architectures[0]} is not supported: {reason}; {SUPPORTED}") from error


def _is_tied(model: Any) -> bool:
    """Asked of the model: a key that config.json lacks means another thing to each architecture."""
    head = model.get_output_embeddings()
    return head is not None and head.weight is model.get_input_embeddings().weight


def _num_active(model: Any, config: Any) -> int:
    """Do the same as `Shape.num_active_parameters`.

    Experts lie stacked in tensors of three dimensions, or below a module called `experts`. What is not stacked there
    (a list of modules) is divided by its rows, which are more than the experts, so it counts for less than it is.
    """
    per_token = getattr(config, "num_experts_per_tok", None) or 1
    looked_up = (m for m in model.modules() if isinstance(m, nn.Embedding) or m is model.get_output_embeddings())
    apart = {id(p) for module in looked_up for p in module.parameters()}
    count = 0
    for name, p in model.named_parameters():
        if id(p) not in apart:
            is_expert = p.dim() > 2 or "experts" in name.split(".")
            num_experts = p.shape[:1].numel() if is_expert else 1
            count += min(per_token, num_experts) * (p.numel() // num_experts)
    return count


def _windows(config: Any) -> tuple[int | None, ...]:
    window = getattr(config, "sliding_window", None)
    layer_types = getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
    return tuple(window if kind == "sliding_attention" else None for kind in layer_types)


def _peak_width(config: Any) -> int:
    """As of a gated MLP whose gate, up and their product are there at once beside the residual stream."""
    inner = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    return 4 * config.hidden_size + 3 * inner


def _context_len(config: Any) -> int:
    """Return `max_position_embeddings`, or less where rope changes with the longest text of a batch.

    Such a rope (dynamic, longrope) makes one request's values depend on the requests that it is batched with,
    except below the length at which it starts to change.
    """
    length = config.max_position_embeddings
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope":
        return min(length, rope["original_max_position_embeddings"])
    return length


def _check_loaded(info: dict[str, Any], folder: Path) -> None:
    stored = stored_tensors(folder)
    for name, *shapes in info["mismatched_keys"]:
        file = stored[name].file if name in stored else folder
        expected = ", config.json means ".join(str(list(s)) for s in shapes)
        raise ModelError(f"{file}: tensor {name} has shape {expected}")
    for name in sorted(info["missing_keys"]):
        raise ModelError(f"{folder} lacks tensor {name} ({len(info['missing_keys'])} missing in all)")
    for name in sorted(info["unexpected_keys"]):
        file = stored[name].file if name in stored else folder
        raise ModelError(f"{file} holds tensor {name}, which the model of its config.json does not have")
