"""Known steps: one of each shape that a graph has, and none that no graph holds."""

from __future__ import annotations

import pytest

from teachllm.worker.gpu.cuda_graphs import GraphSizes
from teachllm.worker.gpu.device_step import DeviceStep
from teachllm.worker.gpu.known_steps import mixed_sizes, prompt_steps


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
