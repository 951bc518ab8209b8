"""Scales of a quantized KV cache: those of the checkpoint, or measured once, before the first request.

A scale determines the largest value that can be stored. It must be known before the first token is written, and stay:
made anew for each batch, it would make a token's quantized K and V depend on what runs beside it. So a text runs once
through the model, and the largest K and V of each head in each layer, with some room above them, determine its scale.
Larger values are clamped.

Steps of e4m3 grow with the value, so room costs it nothing: its scales are powers of two, by which a division is
exact. Steps of integers are all equal, and twice the room is half the precision.

Of several ranks each has the scales of its own heads. Whether a layer's are measured is agreed by those that share it,
and whether the text goes through the model by all: no rank waits for one that does not come.

Source: Wu et al., "Integer Quantization for Deep Learning Inference: Principles and Empirical Evaluation", 2020.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TypeAlias

import torch
from torch import nn

from teachllm.core.memory import KVCacheSpec
from teachllm.distributed.group import Group, agreed_least
from teachllm.distributed.ranks import ALONE, Ranks
from teachllm.distributed.shards import ALL, Shard
from teachllm.layers.attention import Attention, AttentionMetadata
from teachllm.layers.attention_backends.base import AttentionNeeds, AttentionSettings, KVCache
from teachllm.models.base import Model
from teachllm.models.model_config import ModelConfig
from teachllm.quantization.formats import layer_schemes
from teachllm.quantization.formats.kv_scale_dtype import dtype_of_kv_scales
from teachllm.spec_decode.drafter import FlatTokens, ModelDrafter
from teachllm_kernels.attention.kv_quantization import LARGEST
from teachllm_kernels.attention.paged_attention import paged_attention_reference

_NUM_TOKENS = 256  # of the text, at most: the same ones in every configuration
_ROOM = {torch.float8_e4m3fn: 2.0, torch.int8: 1.25}  # above the largest value that was seen
_FRACTIONS = 64  # steps between a power of two and the next, to which scales of integers are rounded up

Given: TypeAlias = tuple[torch.Tensor | None, torch.Tensor | None]  # scales of K and of V that a checkpoint has

# Prose, speech, numbers, code and other languages: what each makes large, the others may not.
TEXT = """The harbour wakes before the town does. At a quarter past four the first lorry comes down the hill, its \
lights still on, and stops beside the ice house; by five there are eleven of them. "You're late," says Marta, who is \
never late herself. Nobody answers her.

Minutes of 12 March 2019: 1. The budget of $48,250.00 is approved (7 votes to 2). 2. See also https://example.org/a?b=1.

def mean(values: list[float]) -> float:
    if not values:
        raise ValueError("no values")
    return sum(values) / len(values)  # 3.14159, -1e-6, 0xFF

{"name": "Aïcha", "scores": [98, 71, 100], "active": true, "note": null}

Le vent se lève. Die Straße ist naß. El niño corrió hacia el río. Погода сегодня хорошая. 今天天气很好。

Why does ice float? Because water is densest at about 4 degrees Celsius: as it freezes, its molecules settle into an \
open lattice, and the solid takes up more room than the liquid did. What follows from that? Lakes freeze from the top, \
and fish live through the winter underneath."""


def enable_kv_quantization(module: Model | nn.Module, specs: Sequence[KVCacheSpec], device: torch.device) -> None:
    """Give each layer of a model, or of a drafter, scales of its quantized K and V: 1.0 until `calibrate`.

    Args:
        specs: of the layers, in their order.
    """
    for attention, spec in zip(_attentions(module), specs, strict=True):
        k_scale, v_scale = torch.ones(2, spec.num_kv_heads, device=device)
        attention.enable_kv_quantization((k_scale, v_scale))


@torch.inference_mode()
def calibrate(
    model: Model,
    config: ModelConfig,
    kv_caches: Sequence[KVCache],
    drafter: ModelDrafter | None = None,
    ranks: Ranks = ALONE,
) -> None:
    """Fill the scales of a model's layers, and of its drafter's; all have a quantized cache.

    Args:
        config: of the whole model.
        kv_caches: of the model, per layer. What they hold is lost, as is what the drafter's hold.
        drafter: with weights.
        ranks: the ranks that share the model, all of which call this. Each has the whole drafter.
    """
    device, dtype = kv_caches[0][0].device, kv_caches[0][0].dtype
    stored = dtype_of_kv_scales(layer_schemes.config_of(config.raw, Path(config.path)))
    drafts = drafter is not None and drafter.has_layers
    attentions = list(_attentions(model))
    given = [_given(each) if stored == dtype else (None, None) for each in attentions]
    given = _agreed(given, ranks.tensor, device)
    lacks_some = any(scale is None for scales in given for scale in scales)
    kv_heads = ranks.shard_spec(config.num_kv_heads).kv_heads
    if drafts or agreed_least(ranks.world, not lacks_some, device) == 0:
        ids = calibration_ids(Path(config.path), config.vocab_size, config.max_model_len)
        tokens, seen = _tokens(ids, kv_caches[0][0], device), _Seen()
        tokens[2].backend = seen
        features: dict[int, torch.Tensor] = {}
        aux_hidden_states = (
            {i: partial(_keep, features, i) for i in drafter.feature_layers} if drafter is not None else {}
        )
        input_ids, positions, metadata = tokens
        hidden = model(input_ids, positions, kv_caches, metadata, aux_hidden_states)
        _fill(attentions, given, seen.agreed(ranks.tensor, kv_heads), dtype)
    else:
        _fill(attentions, given, None, dtype)
    if drafter is not None and drafts:
        seen = tokens[2].backend = _Seen()
        drafter.propose(_FirstStep(tokens, hidden, features))
        attentions = list(_attentions(drafter.module))
        _fill(attentions, [(None, None)] * len(attentions), seen.agreed(ranks.tensor, ALL), dtype)


def calibration_ids(folder: Path, vocab_size: int, max_model_len: int) -> list[int]:
    """Return the text as a checkpoint's own tokenizer reads it, or random ids where it has none."""
    most, file = min(_NUM_TOKENS, max_model_len), folder / "tokenizer.json"
    if file.exists():
        from tokenizers import Tokenizer

        try:
            ids: list[int] = Tokenizer.from_file(str(file)).encode(TEXT).ids[:most]
        except Exception:  # a broken one is refused where text is wanted, and maybe none is
            ids = []
        if ids and max(ids) < vocab_size:
            return ids
    return torch.randint(vocab_size, (most,), generator=torch.Generator().manual_seed(0)).tolist()


def scale_of(largest: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return scales, [num_kv_heads] float32, for the largest values that were seen.

    They are rounded up, so that what one device sums up a little differently than another gives the same ones.
    """
    mantissa, exponent = torch.frexp(largest.float() * _ROOM[dtype] / LARGEST[dtype])
    steps = 1 if dtype.is_floating_point else _FRACTIONS
    scale = torch.ldexp((mantissa * steps).ceil() / steps, exponent)
    return torch.where(largest > 0, scale, 1.0)


def _attentions(module: Model | nn.Module) -> Iterator[Attention]:
    """Return the attentions in the order of the layers."""
    return (each for each in module.modules() if isinstance(each, Attention))


def _given(attention: Attention) -> Given:
    """Return a checkpoint's scales, None where one cannot be a scale: unmeasured ones are 0, -1 or NaN."""
    k_scale, v_scale = (
        None if scale is None or not (scale.isfinite() & (scale > 0)).all() else scale
        for scale in (attention.k_scale, attention.v_scale)
    )
    return k_scale, v_scale


def _agreed(given: Sequence[Given], group: Group, device: torch.device) -> list[Given]:
    """Keep for each layer the scales that all ranks have: heads of one layer are measured together, or not."""
    has = torch.tensor([[scale is not None for scale in scales] for scales in given], dtype=torch.int32, device=device)
    all_have = group.all_gather(has).amin(0).bool().tolist()
    return [
        (k_scale if k_known else None, v_scale if v_known else None)
        for (k_scale, v_scale), (k_known, v_known) in zip(given, all_have, strict=True)
    ]


def _fill(
    attentions: Sequence[Attention], given: Sequence[Given], largest: torch.Tensor | None, dtype: torch.dtype
) -> None:
    """Fill the scales from `given`, else from `largest`: as in `_Seen.agreed`; None if all are given."""
    for i, attention in enumerate(attentions):
        assert attention.settings.kv_scales is not None
        for j, scale in enumerate(attention.settings.kv_scales):
            known = given[i][j]
            if known is None:
                assert largest is not None
                known = scale_of(largest[i, j], dtype)
            scale.copy_(known)


def _tokens(ids: list[int], k_cache: torch.Tensor, device: torch.device) -> FlatTokens:
    """Make one prompt, whose K and V go to the first slots."""
    num_tokens, num_slots = len(ids), k_cache.shape[0] * k_cache.shape[1]
    positions = torch.arange(num_tokens, device=device)
    metadata = AttentionMetadata(
        query_start=torch.tensor([0, num_tokens], dtype=torch.int32, device=device),
        seq_lens=torch.tensor([num_tokens], dtype=torch.int32, device=device),
        block_tables=torch.zeros((1, 1), dtype=torch.int32, device=device),
        slot_mapping=positions % num_slots,  # not read
        query_lens=[num_tokens],
        kv_lens=[num_tokens],
    )
    return torch.tensor(ids, device=device), positions, metadata


def _keep(features: dict[int, torch.Tensor], layer: int, residual: torch.Tensor) -> None:
    features[layer] = residual.clone()  # which the layers go on with


class _Seen:
    """Attention of one whole prompt to its own K and V, as they are before they are written.

    Attributes:
        largest: of each layer that was called, in order, of K and of V, [num_kv_heads].
    """

    name = "calibration"
    in_graphs = False
    splits_decodes = False
    workspace_bytes = 0

    def __init__(self) -> None:
        self.largest: list[tuple[torch.Tensor, torch.Tensor]] = []

    def agreed(self, group: Group, kv_heads: Shard) -> torch.Tensor:
        """Return the largest values of all ranks that have the same heads, [num_layers, 2 (K and V), num_kv_heads].

        Args:
            kv_heads: which of them are this rank's.
        """
        own = torch.stack([torch.stack(of_layer) for of_layer in self.largest])
        return group.all_gather(own).unflatten(0, (kv_heads.count, -1)).amax(1)[kv_heads.index]

    @staticmethod
    def check(needs: AttentionNeeds) -> None:
        """Accept everything."""

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        kv_cache: KVCache,
        metadata: AttentionMetadata,
        settings: AttentionSettings,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        k_largest, v_largest = (x.float().abs().amax(dim=(0, 2)) for x in (k, v))
        self.largest.append((k_largest, v_largest))
        return paged_attention_reference(
            q,
            k_cache=k[None],
            v_cache=v[None],
            block_tables=metadata.block_tables,
            query_lens=metadata.query_lens,
            kv_lens=metadata.query_lens,
            scale=settings.scale,
            window=settings.window,
            soft_cap=settings.soft_cap,
        )


class _FirstStep:
    """A `DraftBatch` of a prompt of which the drafter has computed nothing, and that asks for no drafts."""

    num_levels = 0

    def __init__(self, tokens: FlatTokens, hidden: torch.Tensor, features: Mapping[int, torch.Tensor]) -> None:
        self._tokens, self.hidden, self.features = tokens, hidden, features
        self._places = torch.arange(hidden.shape[0], device=hidden.device)
        self.last = self.newest = self._places[:0]

    def behind(self) -> FlatTokens:
        return self._tokens

    def verified(self) -> tuple[torch.Tensor, FlatTokens]:
        ids, *where = self._tokens
        return self._places, (ids.roll(-1), *where)  # type: ignore[return-value]

    def push(self, level: int, logits: torch.Tensor) -> None:
        raise AssertionError("nothing is drafted")

    def pushed(self, level: int, shift: int = 0) -> FlatTokens:
        raise AssertionError("nothing is drafted")

    def parents(self, level: int) -> torch.Tensor:
        raise AssertionError("nothing is drafted")
