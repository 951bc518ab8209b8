"""Fused kernels and fast paths compute the classes that they know, and a subclass is computed as it is written.

"As a GPU" are layers that take a GPU's way with Triton's kernels interpreted, on a CPU's tensors and weights.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from teachllm.distributed.ranks import WHOLE
from teachllm.layers.attention import AttentionMetadata
from teachllm.layers.linear import Rows
from teachllm.layers.norm import InputQuantization, QKNorm, RMSNorm
from teachllm.layers.rotary import Rotary
from teachllm.layers.weights.scheme import UNQUANTIZED
from teachllm.models.decoder import added_up
from teachllm.models.families.llama import LlamaAttention, LlamaLayer, LlamaMLP, parse
from tests.kernels.guard import guard

NUM_TOKENS, HIDDEN = 5, 64
WHOLE_LAYER: dict[str, Any] = {"schemes": UNQUANTIZED, "shard": WHOLE}
CONFIG = parse(
    {
        **{"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 128, "hidden_size": HIDDEN},
        **{"intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2},
        **{"head_dim": 32, "max_position_embeddings": 64},
    }
)


class ShiftedNorm(RMSNorm):
    """Another norm: its weight counts from 1."""

    def forward(self, y: Any, residual: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        whole = added_up(y, residual)
        return F.rms_norm(whole, whole.shape[-1:], eps=self.eps) * (1 + self.weight), whole


class ShiftedQKNorm(QKNorm):
    """The same for heads."""

    def forward(self, y: Any, residual: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        return F.rms_norm(y, y.shape[-1:], eps=self.eps) * (1 + self.weight), y


class GeluMLP(LlamaMLP):
    """Another activation."""

    def forward(self, x: Rows) -> torch.Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return F.gelu(gate) * up


class TwiceAttention(LlamaAttention):
    """Another attention."""

    def forward(self, *arguments: Any) -> torch.Tensor:
        return 2 * super().forward(*arguments)


def own() -> LlamaLayer:
    return LlamaLayer(CONFIG, 0, **WHOLE_LAYER)


def with_norm() -> LlamaLayer:
    layer = LlamaLayer(CONFIG, 0, **WHOLE_LAYER)
    layer.post_attention_layernorm = ShiftedNorm(HIDDEN, eps=CONFIG.norm_eps)
    return layer


def with_qk_norm() -> LlamaLayer:
    layer = LlamaLayer(CONFIG, 0, **WHOLE_LAYER)
    layer.self_attn.qk_norm = ShiftedQKNorm(4, 2, 32, eps=CONFIG.norm_eps, names=("q_norm", "k_norm"))
    return layer


def with_mlp() -> LlamaLayer:
    layer = LlamaLayer(CONFIG, 0, **WHOLE_LAYER)
    layer.mlp = GeluMLP(CONFIG, **WHOLE_LAYER)
    return layer


def with_attention() -> LlamaLayer:
    layer = LlamaLayer(CONFIG, 0, **WHOLE_LAYER)
    layer.self_attn = TwiceAttention(CONFIG, None, **WHOLE_LAYER)
    return layer


LAYERS = [own, with_norm, with_qk_norm, with_mlp, with_attention]


def filled(layer: LlamaLayer) -> LlamaLayer:
    generator = torch.Generator().manual_seed(0)
    for parameter in layer.parameters():
        parameter.data.normal_(0.0, parameter.shape[-1] ** -0.5, generator=generator)
    return layer.requires_grad_(False)


def run(layer: LlamaLayer, logits_indices: list[int] | None = None) -> torch.Tensor:
    """One request's five tokens through the layer as a model's last."""
    ids = torch.arange(NUM_TOKENS)
    metadata = AttentionMetadata(
        query_start=torch.tensor([0, NUM_TOKENS], dtype=torch.int32),
        seq_lens=torch.tensor([NUM_TOKENS], dtype=torch.int32),
        block_tables=torch.tensor([[0]], dtype=torch.int32),
        slot_mapping=ids,
        query_lens=[NUM_TOKENS],
        kv_lens=[NUM_TOKENS],
        logits_indices=None if logits_indices is None else torch.tensor(logits_indices, dtype=torch.int32),
    )
    hidden = torch.randn(NUM_TOKENS, HIDDEN, generator=torch.Generator().manual_seed(1))
    kv_cache = (torch.zeros(1, 16, 2, 32), torch.zeros(1, 16, 2, 32))
    angles = Rotary(CONFIG.rotary, NUM_TOKENS)(ids)
    return added_up(*layer(hidden, None, angles, kv_cache, metadata, is_last=True))


@pytest.mark.parametrize("make", LAYERS, ids=lambda make: make.__name__)
def test_a_layer_is_computed_as_it_is_written_as_a_gpu(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = filled(make())
    expected = run(layer)
    guard(monkeypatch)
    monkeypatch.setattr(torch.Tensor, "is_cpu", False)
    torch.testing.assert_close(run(layer), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("make", LAYERS, ids=lambda make: make.__name__)
def test_the_last_layer_computes_for_some_tokens_what_it_does_for_all(make: Any) -> None:
    layer = filled(make())
    torch.testing.assert_close(run(layer, [4, 1]), run(layer)[[4, 1]])


def test_no_fast_path_takes_a_class_that_it_does_not_know() -> None:
    assert not own().fuses_one_row and own().fuses_decodes  # a CPU has no kernel for it
    with torch.device("meta"):
        assert [make.__name__ for make in LAYERS if make().fuses_one_row] == ["own"]
    assert [make.__name__ for make in LAYERS if not make().fuses_decodes] == ["with_qk_norm"]


def test_a_norm_that_kernels_do_not_know_leaves_quantization_to_the_layer_after_it() -> None:
    x, eight_bits = torch.randn(3, HIDDEN), InputQuantization(torch.int8, None, False)
    norm = ShiftedNorm(HIDDEN, eps=1e-6)
    norm.weight.data.normal_()
    h, _ = norm.quantized(x, None, eight_bits)
    assert isinstance(h, torch.Tensor) and torch.equal(h, norm(x)[0])
