"""From a speculative configuration to a drafter: refused, or described, before a weight is read; then loaded."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from teachllm.config import EngineConfig
from teachllm.core.memory import KVCacheSpec
from teachllm.models.checkpoint import find_folder, read_json, stored_tensors
from teachllm.models.loader import check_weights, fill, fill_randomly, load_model, new_module, pack
from teachllm.models.model_config import DTYPE_BYTES, ModelConfig, load_model_config
from teachllm.models.registry import ModelError
from teachllm.spec_decode.draft_model import DraftModel
from teachllm.spec_decode.drafter import KVCache, ModelDrafter
from teachllm.spec_decode.eagle import Eagle, EagleConfig, EagleHead
from teachllm.spec_decode.medusa import Medusa, MedusaConfig, MedusaHeads
from teachllm.spec_decode.tree import DraftTree
from teachllm.speculative_config import SpeculativeConfig

_NOT_READ = re.compile(r"(^|\.)(t2d|rotary_emb\.inv_freq)$")  # tensors of which the others say the same


@dataclass(frozen=True, kw_only=True)
class DrafterConfig:
    """A drafter with weights, before they are read.

    Attributes:
        model: the draft model; or the model, on which the heads sit.
        dtype: of weights and KV.
        specs: what each of its layers keeps per token.
        head: None: it is a model of its own.
        weight_bytes: of all that it keeps in memory beside the model.
    """

    speculation: SpeculativeConfig
    model: ModelConfig
    folder: Path
    load_format: str
    dtype: str
    specs: Sequence[KVCacheSpec]
    head: EagleConfig | MedusaConfig | None
    weight_bytes: int

    @property
    def tree(self) -> DraftTree:
        """The shape of its drafts."""
        paths, length = self.speculation.tree, self.speculation.num_speculative_tokens
        return DraftTree.chain(length) if paths is None else DraftTree.of(paths)

    @property
    def num_heads(self) -> int:
        """Query heads of its layers."""
        return self.head.llama.num_heads if isinstance(self.head, EagleConfig) else self.model.num_attention_heads


def load_drafter_config(config: EngineConfig, model: ModelConfig, device_type: str = "cpu") -> DrafterConfig | None:
    """Describes the drafter of a configuration; None: it has none, or one without weights.

    Args:
        config: resolved for the model.
        device_type: "cpu" or "cuda".

    Raises:
        ModelError: there is no such checkpoint, or it does not fit the model; in one line.
    """
    speculation = config.speculative_config
    if speculation is None or speculation.model is None:
        return None
    load_format = speculation.load_format or config.load_format
    wanted = replace(
        config, model=speculation.model, revision=speculation.revision, load_format=load_format, speculative_config=None
    )
    try:
        if speculation.method == "draft_model":
            return _draft_model_config(speculation, load_model_config(wanted, device_type), model, load_format)
        return _head_config(speculation, wanted, model)
    except ModelError as error:
        raise ModelError(f"speculative model={speculation.model!r}: {error}") from error


def _draft_model_config(
    speculation: SpeculativeConfig, draft: ModelConfig, model: ModelConfig, load_format: str
) -> DrafterConfig:
    if draft.vocab_size != model.vocab_size:
        raise ModelError(
            f"its vocabulary has {draft.vocab_size} ids and the model's has {model.vocab_size}: "
            "take a draft model of the same family"
        )
    size = DTYPE_BYTES[draft.dtype]
    return DrafterConfig(
        speculation=speculation,
        model=draft,
        folder=Path(draft.path),
        load_format=load_format,
        dtype=draft.dtype,
        specs=[KVCacheSpec(draft.num_kv_heads, draft.head_size, size, window) for window in draft.windows],
        head=None,
        weight_bytes=draft.weight_bytes,
    )


def _head_config(speculation: SpeculativeConfig, config: EngineConfig, model: ModelConfig) -> DrafterConfig:
    assert speculation.model is not None
    folder = find_folder(speculation.model, speculation.revision, config.load_format)
    raw = read_json(folder / "config.json")
    size = DTYPE_BYTES[model.dtype]
    head: EagleConfig | MedusaConfig
    specs: list[KVCacheSpec] = []
    if speculation.method == "medusa":
        head = MedusaConfig.parse(raw, model.hidden_size, model.vocab_size)
        if head.num_heads < speculation.num_speculative_tokens:
            raise ModelError(
                f"it has {head.num_heads} heads, one for each draft: set num_speculative_tokens to {head.num_heads} or "
                f"less, not to {speculation.num_speculative_tokens}"
            )
        module: torch.nn.Module = _on_meta(lambda: MedusaHeads(head))  # type: ignore[arg-type]
    else:
        stored = set(_stored_names(folder, config.load_format))
        head = EagleConfig.parse(raw, stored, model.num_layers, model.hidden_size, model.vocab_size)
        if model.implementation != "teachllm":
            raise ModelError(
                f"an EAGLE head reads hidden states inside the model; transformers' code for {model.architecture} "
                "hands out none: take a draft model, or method=ngram"
            )
        if model.max_model_len > head.llama.rotary.context_len:
            raise ModelError(
                f"max_model_len={model.max_model_len} is more than its context of {head.llama.rotary.context_len}: "
                f"set max_model_len={head.llama.rotary.context_len} or less"
            )
        specs = [KVCacheSpec(head.llama.num_kv_heads, head.llama.head_size, size)]
        module = _on_meta(lambda: EagleHead(head, model.max_model_len))  # type: ignore[arg-type]
    tensors = [*module.parameters(), *module.buffers()]
    return DrafterConfig(
        speculation=speculation,
        model=model,
        folder=folder,
        load_format=config.load_format,
        dtype=model.dtype,
        specs=specs,
        head=head,
        weight_bytes=sum(tensor.numel() for tensor in tensors) * size,
    )


def load_drafter(
    drafter: DrafterConfig, config: EngineConfig, model: Any, kv_caches: KVCache, device: torch.device
) -> ModelDrafter:
    """Builds a drafter on `device` and fills it.

    Args:
        model: the loaded one that it drafts for.
        kv_caches: per layer of the drafter (K, V).

    Raises:
        ModelError: the checkpoint is broken; names the tensor and the file.
    """
    if drafter.head is None:
        own = replace(config, load_format=drafter.load_format, speculative_config=None)
        return DraftModel(load_model(drafter.model, own, device), kv_caches)
    dtype = getattr(torch, drafter.dtype)
    if isinstance(drafter.head, MedusaConfig):
        medusa = drafter.head
        module: Any = new_module(lambda: MedusaHeads(medusa), device, dtype)
    else:
        eagle = drafter.head
        module = new_module(lambda: EagleHead(eagle, drafter.model.max_model_len), device, dtype)
    if drafter.load_format == "dummy":
        fill_randomly(module, config.seed)
    else:
        check_weights(drafter.folder, drafter.load_format)
        fill(module.checkpoint_tensors(), drafter.folder, drafter.load_format, name_of=_name)
        if isinstance(module, EagleHead):
            module.check(drafter.folder)
    if device.type == "cpu":
        pack(module)
    module.eval().requires_grad_(False)
    if isinstance(module, MedusaHeads):
        return Medusa(module, model)
    return Eagle(module, model, kv_caches)


def _name(name: str) -> str | None:
    """A tensor's name in the form that our modules use; None: it is not read."""
    if _NOT_READ.search(name):
        return None
    name = re.sub(r"^(medusa_heads?|model)\.", "", name)
    if found := re.fullmatch(r"(\d+)\.(\d+)\.linear\.(weight|bias)", name):  # as Medusa's authors write
        return f"blocks.{found[1]}.layers.{found[2]}.{found[3]}"
    if found := re.fullmatch(r"(\d+)\.\d+\.weight", name):
        return f"lm_heads.{found[1]}.weight"
    return name.replace("layers.0.midlayer.", "midlayer.")


def _stored_names(folder: Path, load_format: str) -> list[str]:
    """Names of a checkpoint's tensors; with random weights those of the smallest EAGLE-3 head."""
    if load_format == "dummy":
        return ["midlayer."]
    check_weights(folder, load_format)
    if load_format != "pt":
        return list(stored_tensors(folder))
    from teachllm.models.loader import read_pickles

    return [name for name, _, _ in read_pickles(folder, None)]


def _on_meta(build: Callable[[], torch.nn.Module]) -> torch.nn.Module:
    with torch.device("meta"):
        return build()
