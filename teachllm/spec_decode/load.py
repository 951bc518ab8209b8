"""From a speculative configuration to a drafter: refused, or described, before a weight is read; then loaded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from teachllm.checkpoint.files import find_folder
from teachllm.config import EngineConfig
from teachllm.core.memory import KVCacheSpec
from teachllm.errors import ModelError
from teachllm.layers.checkpoint_tensors import checkpoint_tensors
from teachllm.layers.dtypes import torch_dtype
from teachllm.loading.loader import check_weights, fill, finish, load_model, stored_names
from teachllm.loading.random_weights import fill_parts_randomly
from teachllm.models.base import Model
from teachllm.models.build import META, new_module
from teachllm.models.decoder import CausalLM
from teachllm.models.draft_heads.base import read_settings
from teachllm.models.draft_heads.eagle import EagleHead
from teachllm.models.draft_heads.eagle_config import EagleConfig, tensor_name
from teachllm.models.draft_heads.medusa import MedusaConfig, MedusaHeads
from teachllm.models.model_config import ModelConfig, load_model_config
from teachllm.spec_decode.draft_model import DraftModel
from teachllm.spec_decode.drafter import KVCache, ModelDrafter
from teachllm.spec_decode.eagle import Eagle
from teachllm.spec_decode.medusa import Medusa
from teachllm.spec_decode.tree import DraftTree
from teachllm.spec_decode.vocabulary import check_vocabularies
from teachllm.speculative_config import SpeculativeConfig

_WHERE = " in speculative_config"


@dataclass(frozen=True, kw_only=True)
class DrafterConfig:
    """A drafter with weights, before they are read.

    Attributes:
        target: the model that it drafts for.
        model: the draft model; or the target, on which the heads sit.
        dtype: of weights; and of KV, unless the model's cache is quantized: then so is the drafter's.
        specs: what each of its layers keeps per token.
        head: None: it is a model of its own.
        max_len: longer sequences it does not draft for: the model's `max_model_len`, or its own context, if that is
            shorter.
        weight_bytes: of all that it keeps in memory beside the model.
    """

    speculation: SpeculativeConfig
    target: ModelConfig
    model: ModelConfig
    folder: Path
    load_format: str
    dtype: str
    specs: Sequence[KVCacheSpec]
    head: EagleConfig | MedusaConfig | None
    max_len: int
    weight_bytes: int

    @property
    def kv_dtype(self) -> str:
        """Return the dtype of its KV cache, by PyTorch's name."""
        return self.target.kv_dtype if self.target.has_quantized_kv else self.dtype

    @property
    def tree(self) -> DraftTree:
        """Return the shape of the drafter's drafts."""
        return DraftTree.of_config(self.speculation)

    @property
    def num_heads(self) -> int:
        """Return the number of query heads of the drafter's layers."""
        return self.head.llama.num_heads if isinstance(self.head, EagleConfig) else self.model.num_attention_heads


def load_drafter_config(config: EngineConfig, model: ModelConfig, device_type: str = "cpu") -> DrafterConfig | None:
    """Describe the drafter of a configuration; return None if it has none, or one without weights.

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
        config,
        model=speculation.model,
        revision=speculation.revision,
        load_format=load_format,
        quantization=None,  # what the model is asked to be, its drafter need not be
        speculative_config=None,
        hf_overrides=None,
        generation_config="auto",
        override_generation_config=None,
    )
    try:
        if speculation.method == "draft_model":
            found = _draft_model_config(speculation, wanted, model, device_type)
        else:
            found = _head_config(speculation, wanted, model)
        num_ids = found.model.vocab_size if found.head is None else found.head.num_ids
        num_ids = min(num_ids, model.vocab_size)
        if found.tree.most_siblings > num_ids:
            raise ModelError(
                f"speculative_token_tree has {found.tree.most_siblings} guesses for a token, and the drafter has only "
                f"{num_ids} ids to guess among: give it fewer siblings"
            )
        return found
    except ModelError as error:
        raise ModelError(f"speculative model={speculation.model!r}: {error}") from error


def _draft_model_config(
    speculation: SpeculativeConfig, config: EngineConfig, model: ModelConfig, device_type: str
) -> DrafterConfig:
    draft = load_model_config(replace(config, max_model_len=None), device_type)
    if draft.max_model_len > model.max_model_len:
        draft = load_model_config(replace(config, max_model_len=model.max_model_len), device_type)
    if config.load_format != "dummy":
        check_weights(Path(draft.path), config.load_format, _WHERE)
    check_vocabularies(Path(draft.path), Path(model.path), draft.vocab_size, model.vocab_size)
    return DrafterConfig(
        speculation=speculation,
        target=model,
        model=draft,
        folder=Path(draft.path),
        load_format=config.load_format,
        dtype=draft.dtype,
        specs=[KVCacheSpec(draft.num_kv_heads, draft.head_size, draft.kv_bytes, window) for window in draft.windows],
        head=None,
        max_len=draft.max_model_len,
        weight_bytes=draft.weight_bytes,
    )


def _head_config(speculation: SpeculativeConfig, config: EngineConfig, model: ModelConfig) -> DrafterConfig:
    assert speculation.model is not None
    folder = find_folder(speculation.model, speculation.revision, config.load_format)
    settings = read_settings(folder)
    stored, max_len = stored_names(folder, config.load_format, _WHERE), model.max_model_len
    head: EagleConfig | MedusaConfig
    if speculation.method == "medusa":
        head = MedusaConfig.parse(settings, stored, model, speculation.num_speculative_tokens)
    else:
        # With random weights it is the smallest EAGLE-3 head.
        names = {tensor_name(name) or "" for name in stored or ["midlayer."]}
        head = EagleConfig.parse(settings, names, model)
        if model.implementation != "teachllm":
            raise ModelError(
                f"an EAGLE head reads hidden states inside the model; transformers' code for {model.architecture} "
                "hands out none: take a draft model, or method=ngram"
            )
        max_len = min(max_len, head.llama.context_len)
    specs, kept = [], head.kept
    if kept is not None:
        specs = [KVCacheSpec(kept.num_kv_heads, kept.head_size, model.kv_bytes, kept.window)]
    module = new_head(head, model, META)
    return DrafterConfig(
        speculation=speculation,
        target=model,
        model=model,
        folder=folder,
        load_format=config.load_format,
        dtype=model.dtype,
        specs=specs,
        head=head,
        max_len=max_len,
        weight_bytes=sum(each.nbytes for each in (*module.parameters(), *module.buffers())),
    )


def load_drafter(
    drafter: DrafterConfig, config: EngineConfig, model: Model, kv_caches: KVCache, device: torch.device
) -> ModelDrafter:
    """Build a drafter on `device` and fill it.

    Args:
        model: the loaded one that it drafts for.
        kv_caches: per layer of the drafter (K, V).

    Raises:
        ModelError: the checkpoint is broken; names the tensor and the file.
    """
    if drafter.head is None:
        own = replace(config, load_format=drafter.load_format, quantization=None, speculative_config=None)
        draft, target = drafter.model, drafter.target
        max_len = drafter.max_len if drafter.max_len < target.max_model_len else None
        return DraftModel(load_model(draft, own, device), kv_caches, draft.vocab_size, target.vocab_size, max_len)
    module = new_head(drafter.head, drafter.model, device)
    if drafter.load_format == "dummy":
        fill_parts_randomly(checkpoint_tensors(module), config.seed)
    else:
        check_weights(drafter.folder, drafter.load_format)
        fill(checkpoint_tensors(module), drafter.folder, drafter.load_format, name_of=drafter.head.tensor_name)
        module.check(drafter.folder)
    finish(module, device)
    module.eval().requires_grad_(False)
    return drafter_of(module, model, kv_caches)


def drafter_of(heads: EagleHead | MedusaHeads, model: Model, kv_caches: KVCache) -> Eagle | Medusa:
    """Return the drafter that guesses with heads on a model; `kv_caches` as of `load_drafter`."""
    if isinstance(heads, MedusaHeads):
        return Medusa(heads, model)
    assert isinstance(model, CausalLM)  # as `load_drafter_config` has checked
    return Eagle(heads, model, kv_caches)


def new_head(head: EagleConfig | MedusaConfig, model: ModelConfig, device: torch.device) -> EagleHead | MedusaHeads:
    """Return unfilled heads for a model, in its dtype."""

    def build() -> EagleHead | MedusaHeads:
        return MedusaHeads(head) if isinstance(head, MedusaConfig) else EagleHead(head, model.max_model_len)

    return new_module(build, device, torch_dtype(model.dtype))
