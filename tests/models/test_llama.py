"""Which way a block goes on a GPU, decided without one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from teachllm.distributed.ranks import WHOLE
from teachllm.layers.attention import AttentionMetadata
from teachllm.layers.weights.scheme import UNQUANTIZED
from teachllm.models.families import llama_fast_paths
from teachllm.models.families.llama import LlamaLayer
from teachllm.models.families.llama_config import parse
from teachllm_kernels.dry_run import dry_run
from teachllm_kernels.gpu_type import GPU_TYPES
from tests.bench.h200_script import h200


class Taken(Exception):
    """A way was taken."""


@pytest.mark.parametrize(
    ("num_rows", "x_shape", "way"), [(1, (1, 64), "one decode"), (4, (4, 64), "any"), (4, (1, 4, 64), "any")]
)
def test_a_part_of_several_decodes_is_not_one_decode(
    monkeypatch: pytest.MonkeyPatch, num_rows: int, x_shape: tuple[int, ...], way: str
) -> None:
    def take(name: str) -> Any:
        def raise_taken(*_: Any, **__: Any) -> None:
            raise Taken(name)

        return raise_taken

    shape = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
    config = parse(h200.SHAPES["qwen3-0.6b"] | shape | {"intermediate_size": 96})
    with dry_run(GPU_TYPES["sm_90"]), torch.device("meta"):  # which takes a GPU's way
        layer = LlamaLayer(config, 0, schemes=UNQUANTIZED, shard=WHOLE)
    monkeypatch.setattr(llama_fast_paths, "decode_one_row", take("one decode"))
    monkeypatch.setattr(layer.self_attn, "forward", take("any"))
    none = torch.zeros(0, dtype=torch.int32)
    metadata = AttentionMetadata(none, none, none, torch.zeros(num_rows, dtype=torch.int64), [], [], is_fused=True)
    residual = None if num_rows == 1 else torch.zeros(num_rows, 64, device="meta")
    with dry_run(GPU_TYPES["sm_90"]), pytest.raises(Taken, match=way):
        layer(torch.zeros(x_shape, device="meta"), residual, (none, none), (none, none), metadata)
