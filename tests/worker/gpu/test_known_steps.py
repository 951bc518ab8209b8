"""Known steps, and the graphs that hold them: one of each shape, and none that no graph holds."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from teachllm.config import EngineConfig
from teachllm.models.model_config import load_model_config
from teachllm.spec_decode.load import load_drafter_config
from teachllm.worker.gpu.cuda_graphs import FullKey, GraphSizes
from teachllm.worker.gpu.device_step import DeviceStep
from teachllm.worker.gpu.known_steps import mixed_sizes, prompt_steps
from teachllm.worker.gpu.memory.meta_runner import MetaRunner
from teachllm_kernels.dry_run import dry_run
from teachllm_kernels.gpu_type import GPU_TYPES


@pytest.mark.parametrize(("max_num_seqs", "max_num_tokens"), [(256, 16640), (5, 40), (1, 3)])
def test_a_few_short_prompts_have_one_step_for_each_shape(max_num_seqs: int, max_num_tokens: int) -> None:
    sizes = GraphSizes(max_num_seqs, max_num_tokens)
    found = [sizes.full(step) for step in prompt_steps(sizes)]
    expected = set()
    for count in range(1, 10):
        for num_tokens in range(count, 600):
            each = list(range(count))
            lens = [1] * (count - 1) + [num_tokens - count + 1]
            if count <= max_num_seqs and num_tokens <= max_num_tokens:
                expected.add(sizes.full(DeviceStep(each, lens, [0] * count, 0, each)))
    assert None not in found and len(found) == len(set(found))
    assert set(found) == expected - {None}


def test_mixed_sizes_are_those_that_steps_are_padded_to() -> None:
    assert mixed_sizes(GraphSizes(4, 40)) == [1, 2, 4, 8, 16, 24, 32, 40]
    found = mixed_sizes(GraphSizes(256, 16640))
    assert (len(found), found[-1]) == (23, 512)


def test_every_graph_that_may_be_needed_is_known() -> None:
    def keys(**settings: Any) -> list[FullKey]:
        config = EngineConfig(device="cuda", dtype="bfloat16", **settings)
        model = load_model_config(config, "cuda")
        config = config.resolve(model.max_model_len)
        with dry_run(GPU_TYPES["sm_90"]), torch.inference_mode():
            runner = MetaRunner(config, model, load_drafter_config(config, model, "cuda"))
            return runner.graph_runner.known_keys(is_adaptive=False)

    # Decodes of 1, 2, 4, 8, 16, 24, 32, 48, 64, 96, ... 256 sequences, sampled in four ways; a few prompts of 1 to 512
    # tokens in 23 sizes.
    found = keys()
    assert len(found) == 15 * 4 + 23
    assert {key.samples for key in found if not key.decode_len} == {False}
    small = keys(max_num_seqs=4, max_num_batched_tokens=4)
    assert len(small) == 3 * 4 + 3
    assert [key.num_tokens for key in small] == sorted((key.num_tokens for key in small), reverse=True)
    # Up to 64 sequences decode without drafts or with three, and in two ways.
    drafts = keys(speculative_config={"method": "ngram", "num_speculative_tokens": 3})
    assert len(drafts) == (9 * 2 + 6) * 2 + 23
