"""Layers: the tables of rotary angles, merged projections, and plans shared between layers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from teachllm.distributed.shards import Shard
from teachllm.layers.attention import AttentionMetadata, paged_attention, write_kv
from teachllm.layers.attention_backends.base import AttentionSettings
from teachllm.layers.attention_backends.reference import ReferenceMetadata
from teachllm.layers.attention_backends.triton import TritonMetadata, check_heads
from teachllm.layers.checkpoint_tensors import TensorDestination
from teachllm.layers.linear import Linear
from teachllm.layers.rotary import Rotary, RotaryConfig, attention_factor, inverse_frequencies
from teachllm.layers.weights import base, dense_weight
from teachllm.layers.weights.dense_weight import DenseWeight
from teachllm_kernels import selection
from tests.distributed.one_of_two import OneOfTwo

SCALINGS = {
    "linear": {"factor": 4.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 2048},
    "yarn with its own settings": {
        **{"factor": 8.0, "original_max_position_embeddings": 1024, "beta_fast": 16, "beta_slow": 2},
        **{"mscale": 0.7, "mscale_all_dim": 1.3, "truncate": False},
    },
    "yarn with its attention factor": {
        **{"factor": 8.0, "original_max_position_embeddings": 1024, "attention_factor": 1.5}
    },
}


@pytest.mark.parametrize("name", list(SCALINGS))
@pytest.mark.parametrize("head_size", [32, 128])
def test_scaled_frequencies_equal_transformers(name: str, head_size: int) -> None:
    scaling, parameters = name.split()[0], SCALINGS[name]
    rope = {"rope_type": scaling, "rope_theta": 500000.0, **parameters}
    theirs = LlamaConfig(head_dim=head_size, max_position_embeddings=8192, rope_parameters=rope)
    expected, factor = ROPE_INIT_FUNCTIONS[scaling](theirs)
    ours = RotaryConfig(head_size, 500000.0, scaling, 8192, parameters)
    torch.testing.assert_close(inverse_frequencies(ours, torch.zeros(1, 1)), expected, rtol=1e-6, atol=0)
    assert attention_factor(ours) == pytest.approx(factor)


@pytest.mark.parametrize("position", [0, 63, 64, 65, 200])
def test_dynamic_frequencies_equal_transformers_for_a_text_that_ends_there(position: int) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
    theirs = LlamaConfig(head_dim=32, max_position_embeddings=64, rope_parameters=rope)
    expected, _ = ROPE_INIT_FUNCTIONS["dynamic"](theirs, seq_len=position + 1)
    ours = RotaryConfig(32, 10000.0, "dynamic", 64, {"factor": 4.0})
    got = inverse_frequencies(ours, torch.tensor([[float(position)]]))
    torch.testing.assert_close(got.flatten(), expected, rtol=1e-5, atol=0)


def test_angles_of_far_positions_do_not_depend_on_the_dtype_of_the_model() -> None:
    config = RotaryConfig(32)
    exact = Rotary(config, 4096).cos
    torch.set_default_dtype(torch.bfloat16)
    try:
        rounded = Rotary(config, 4096).cos
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(rounded, exact.bfloat16())


def test_a_merged_projection_is_its_parts_side_by_side() -> None:
    layer = Linear(8, {"q_proj": 6, "k_proj": 2, "v_proj": 3}, bias=True)
    places = dict(layer.checkpoint_tensors("qkv_proj"))
    weights = {name: torch.randn(place.shape) for name, place in places.items() if isinstance(place, TensorDestination)}
    for name, place in places.items():
        assert isinstance(place, TensorDestination)
        place.target.copy_(weights[name])
    x = torch.randn(5, 8)
    apart = [x @ weights[f"{p}.weight"].T + weights[f"{p}.bias"] for p in ("q_proj", "k_proj", "v_proj")]
    torch.testing.assert_close(layer(x), torch.cat(apart, dim=-1))


def test_a_token_is_written_to_its_slot_and_layers_with_one_window_share_a_plan() -> None:
    caches = (torch.zeros(2, 4, 1, 8), torch.zeros(2, 4, 1, 8))
    metadata = AttentionMetadata(
        query_start=torch.tensor([0, 2], dtype=torch.int32),
        seq_lens=torch.tensor([2], dtype=torch.int32),
        block_tables=torch.tensor([[1]], dtype=torch.int32),
        slot_mapping=torch.tensor([4, 5]),
        query_lens=[2],
        kv_lens=[2],
    )
    q, k, v = torch.randn(2, 2, 8), torch.randn(2, 1, 8), torch.randn(2, 1, 8)
    for window in (None, None, 1, 1):
        write_kv(k, v, caches, metadata)
        paged_attention(q, k, v, caches, metadata, AttentionSettings(1.0, window))
    assert len(metadata.prepared(ReferenceMetadata).plans) == 2
    assert torch.equal(caches[0][1, :2], k) and not caches[0][0].any() and not caches[0][1, 2:].any()


@pytest.mark.parametrize("heads", [(16, 8, 128), (32, 1, 64), (1, 1, 16), (4, 4, 256), (9, 3, 80)])
def test_a_gpu_takes_the_heads_of_common_models(heads: tuple[int, int, int]) -> None:
    check_heads(*heads, "float32")


@pytest.mark.parametrize(
    ("heads", "dtype", "says"),
    [
        ((4, 4, 8), "bfloat16", "^heads of 8: .* even sizes from 16 to 256; use device=cpu$"),
        ((4, 4, 33), "bfloat16", "^heads of 33: "),
        ((4, 4, 288), "float16", "^heads of 288: "),
        ((71, 1, 64), "float32", "^71 query heads on a KV head: .* up to 32 in float32; use dtype=bfloat16"),
        ((160, 1, 64), "bfloat16", "^160 query heads on a KV head: .* up to 128 in bfloat16; use device=cpu$"),
    ],
)
def test_heads_that_no_kernel_takes_are_refused(heads: tuple[int, int, int], dtype: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        check_heads(*heads, dtype)


@pytest.mark.parametrize(
    ("num_rows", "sizes", "changes", "is_gated"),
    [
        (2048, (64, 96), {}, True),
        (2047, (64, 96), {}, False),
        (2048, (64, 100), {}, False),  # copies begin at multiples of 16 bytes
        (2048, (60, 96), {}, False),
        (2048, (64, 96), {"bias": True}, False),
        (2048, (64, 96), {"is_fixed": True}, False),
        (2048, (64, 96), {"dtype": torch.float32}, False),
        (2048, (64, 96), {"has_hopper": False}, False),
    ],
)
def test_a_product_gates_itself_only_where_its_kernel_can(
    num_rows: int, sizes: tuple[int, int], changes: dict[str, Any], is_gated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    (num_in, num_out), dtype = sizes, changes.get("dtype", torch.bfloat16)
    layer = Linear(num_in, {"gate": num_out, "up": num_out}, changes.get("bias", False)).to("meta", dtype)
    assert isinstance(layer.weight, DenseWeight)
    monkeypatch.setattr(selection, "has_hopper", lambda device: changes.get("has_hopper", True))
    layer.weight.is_fixed = changes.get("is_fixed", False)
    products = ((dense_weight, "hopper_gated_linear"), (base, "silu_and_mul"), (DenseWeight, "product"))
    for module, name in products:
        monkeypatch.setattr(module, name, lambda *_, name=name: name)
    assert layer.gated(torch.empty(num_rows, num_in, dtype=dtype, device="meta")) == (
        "hopper_gated_linear" if is_gated else "silu_and_mul"
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton's interpreter is not in use")
@pytest.mark.parametrize("bias", [False, True])
def test_of_one_row_ranks_add_bias_and_residual_once(bias: bool) -> None:
    x, residual = torch.randn(1, 64), torch.randn(1, 24)
    whole = Linear(64, {"o_proj": 24}, bias)
    torch.nn.init.normal_(whole.weight.weight)
    if bias:
        torch.nn.init.normal_(whole.bias)
    expected = whole.one_row(x, residual=residual)
    parts = []
    for rank in range(2):
        part, columns = Shard(rank, 2), slice(32 * rank, 32 * rank + 32)
        layer = Linear(32, {"o_proj": 24}, bias, columns=part, group=OneOfTwo(rank))
        layer.weight.weight.data = whole.weight.weight.data[:, columns].contiguous()
        if bias:
            layer.bias.data = whole.bias.data
        parts.append(layer.one_row(x[:, columns].contiguous(), residual=residual))
    torch.testing.assert_close(parts[0] + parts[1], expected, rtol=1e-5, atol=1e-5)


def test_what_backends_prepare_in_a_step_is_kept_by_kind_and_for_that_step_alone() -> None:
    none = torch.zeros(0, dtype=torch.int32)
    steps = [AttentionMetadata(none, none, none, none, [], []) for _ in range(2)]
    own = steps[0].prepared(ReferenceMetadata)
    assert steps[0].prepared(ReferenceMetadata) is own and isinstance(own, ReferenceMetadata)
    assert isinstance(steps[0].prepared(TritonMetadata), TritonMetadata)
    assert steps[1].prepared(ReferenceMetadata) is not own
