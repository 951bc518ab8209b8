"""Any other decoder through transformers' own model code, with our paged attention in place of theirs.

transformers calls attention through a table of functions, and hands them the module that calls. So a function in that
table reaches our KV cache and metadata, and the model's code stays as it is. A name that only this table knows also
switches off the attention masks: the model builds none, and ours does the masking.

Source: https://huggingface.co/docs/transformers/attention_interface
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AutoModelForCausalLM
from transformers.modeling_outputs import MoeModelOutputWithPast

from teachllm.checkpoint.files import StoredTensor, stored_tensors, wrong_shape
from teachllm.config import EngineConfig
from teachllm.errors import ModelError
from teachllm.layers.attention import Attention, AttentionMetadata, paged_attention, write_kv
from teachllm.models.base import AuxOut, PagedKV
from teachllm.models.model_config import ModelConfig
from teachllm.models.moe_config import MoeConfig
from teachllm.models.registry import supported
from teachllm.models.shape import Shape
from teachllm.models.via_transformers import rehearsal
from teachllm.models.via_transformers.config import create, read_config
from teachllm.models.via_transformers.rehearsal import Rehearsal

_ATTENTION = "teachllm_paged"
_HANDED = "teachllm_handed"  # attribute of a layer's attention


def load_transformers_model(
    model_config: ModelConfig, config: EngineConfig, device: torch.device, dtype: torch.dtype
) -> TransformersModel:
    """Build the model with transformers, filled from the checkpoint unless load_format is "dummy".

    Raises:
        ModelError: a tensor is missing, unknown or of another shape.
    """
    folder = Path(model_config.path)
    register()
    hf_config = read_config(folder, config)
    if config.load_format == "dummy":
        model = create(hf_config, config.trust_remote_code, _ATTENTION).to(dtype)
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
        _check_loaded(info, folder, {} if config.load_format == "pt" else stored_tensors(folder))
    model = model.to(device).eval()
    _check_rehearsal(model, model_config)
    return TransformersModel(model, model_config)


def _check_loaded(info: dict[str, Any], folder: Path, stored: Mapping[str, StoredTensor]) -> None:
    for name, *shapes in info["mismatched_keys"]:
        found, expected = shapes
        raise ModelError(wrong_shape(name, stored[name].file if name in stored else folder, found, expected))
    for name in sorted(info["missing_keys"]):
        raise ModelError(
            f"{folder} lacks tensor {name}, which config.json means ({len(info['missing_keys'])} missing in all)"
        )
    for name in sorted(info["unexpected_keys"]):
        file = stored[name].file if name in stored else folder
        raise ModelError(f"{file} holds tensor {name}, which the model of its config.json does not have")


def _check_rehearsal(model: Any, model_config: ModelConfig) -> None:
    """Rehearse once more, with values: all layers are reached now.

    Raises:
        ModelError: as `rehearse` and, of a model with its own code, `check_tokens_apart`; or the model asks for other
            attention than its config.json made us expect.
    """
    model.set_attn_implementation(rehearsal.IMPLEMENTATION)
    found = rehearsal.rehearse(model, model_config.num_layers)
    if not type(model).__module__.startswith("transformers."):
        rehearsal.check_tokens_apart(model)
    model.set_attn_implementation(_ATTENTION)
    expected = Rehearsal((model_config.num_kv_heads, model_config.head_size), dict(enumerate(model_config.windows)))
    if found != expected:
        raise ModelError(
            f"{type(model).__name__} is not supported: its layers have {found}, where config.json means {expected}; "
            f"{supported()}"
        )


def register() -> None:
    """Put our functions into transformers' tables."""
    AttentionInterface.register(_ATTENTION, _attention)
    rehearsal.register()


class TransformersModel(nn.Module):
    """A causal language model of transformers behind the interface of our own models.

    Its base model turns tokens into hidden states. Its head may do more than one product (soft cap, scale), so it
    runs as it is too, over hidden states that a stand-in base model hands to it.
    """

    implementation = "transformers"
    fuses_decodes = False
    experts: MoeConfig | None = None

    def __init__(self, model: Any, shape: Shape) -> None:
        super().__init__()
        self.base = model.base_model
        setattr(model, model.base_model_prefix, _Given())
        self.head = model
        heads = (shape.num_kv_heads, shape.head_size)
        self._layers = [Attention(0.0, *heads, window) for window in shape.windows]  # a call says its scale
        self.attentions = nn.ModuleList(self._layers)
        self._handed = _Handed()
        for module in rehearsal.attention_modules(self.base):
            setattr(module, _HANDED, self._handed)

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        kv_caches: Sequence[PagedKV],
        metadata: AttentionMetadata,
        aux_hidden_states: Mapping[int, AuxOut] | None = None,
        receive: Callable[[], torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Compute one step as `Model` does; its code hands out no residual streams and has no stages."""
        assert not aux_hidden_states and receive is None
        self._handed.step = _PagedStep(kv_caches, metadata, self._layers)
        output = self.base(input_ids=input_ids.unsqueeze(0), position_ids=positions.unsqueeze(0), use_cache=False)
        hidden = output.last_hidden_state.squeeze(0)
        return hidden if metadata.logits_indices is None else hidden.index_select(0, metadata.logits_indices)

    def logits(self, hidden: torch.Tensor, *, sharded: bool = False, in_float32: bool = True) -> torch.Tensor:
        """Return [num_rows, vocab_size] logits in float32 (float64 stays float64), whatever form is asked for.

        No other rank has a part of the vocabulary.
        """
        logits = self.head(inputs_embeds=hidden.unsqueeze(0), use_cache=False).logits.squeeze(0)
        return logits.to(torch.promote_types(logits.dtype, torch.float32))

    def execute_dummy_step(self) -> None:
        """Do nothing: no rank has experts of its own."""

    def count_load(self) -> torch.Tensor:
        """Raise: `experts` is None."""
        raise NotImplementedError("transformers' code does not say which expert gets a token")


class _Given(nn.Module):
    """Stands where the base model was: its output is its input."""

    @property
    def decoder(self) -> _Given:
        """Return itself: OPT calls the decoder inside of its base model."""
        return self

    def forward(self, *_: Any, inputs_embeds: torch.Tensor, **__: Any) -> MoeModelOutputWithPast:
        output = MoeModelOutputWithPast(last_hidden_state=inputs_embeds)
        output.cross_attentions = None  # which some heads pass on
        return output


@dataclass(slots=True)
class _PagedStep:
    """Describe what attention needs of a step.

    Attributes:
        kv_caches: K and V of each layer, [num_blocks, block_size, num_kv_heads, head_size].
        called: indices of the layers that have called attention.
    """

    kv_caches: Sequence[PagedKV]
    metadata: AttentionMetadata
    attentions: Sequence[Attention]
    called: set[int] = field(default_factory=set)


class _Handed:
    """Hold the step under way, where attention finds it: not all models hand arguments of `forward` down to it."""

    step: _PagedStep


def _attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    softcap: float | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Attend for transformers' table: map [1, heads, num_tokens, head_size] to [1, num_tokens, heads, head_size].

    Raises:
        ModelError: the layer asks for something that paged attention does not compute.
    """
    step: _PagedStep = getattr(module, _HANDED).step
    index = rehearsal.layer_index(module, step.called)
    step.called.add(index)
    kv_cache, metadata = step.kv_caches[index], step.metadata
    rehearsal.check_call(module, key, value, kv_cache[0].shape[2:], others | {"a mask": attention_mask})
    settings = step.attentions[index].settings
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    q, k, v = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))
    if not q.is_cpu:  # kernels want a token's heads side by side
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    write_kv(k, v, kv_cache, metadata, settings.kv_scales)
    settings = replace(settings, scale=scale, soft_cap=softcap)
    out = paged_attention(q, k, v, kv_cache, metadata, settings)
    return out.unsqueeze(0), None
