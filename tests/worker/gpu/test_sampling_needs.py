"""What sampling and scoring take stays within what was predicted for them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from teachllm import EngineConfig, SamplingParams
from teachllm.core.scheduler_output import NewRow
from teachllm.sampling.device_parameters import DeviceParameters
from teachllm.sampling.sampler import Sampler
from teachllm.sampling.shared_vocabulary import Columns
from teachllm.worker.gpu.device_batch import DeviceBatch
from teachllm.worker.gpu.gpu_sampling import GPUSampling
from teachllm.worker.gpu.launched_step import logprobs_of
from teachllm.worker.gpu.memory.live_bytes import LiveBytes
from teachllm.worker.gpu.memory.sampling_needs import (
    BYTES_OF_HISTORY,
    LOGITS_COPIES,
    SAMPLED_AT_ONCE,
    sampling_bytes,
)
from teachllm.worker.prompt_logprobs import PromptLogprobs
from teachllm_kernels.dry_run import dry_run
from teachllm_kernels.gpu_type import GPU_TYPES
from teachllm_kernels.sampling import random_sample
from tests.worker.gpu.imagined_gpu import NOWHERE


def test_sampling_with_every_parameter_stays_within_its_bound() -> None:
    vocab_size, num_rows, max_len = 20000, 8, 300
    sampler = Sampler(num_rows, vocab_size, torch.device("cpu"))
    params = SamplingParams(
        temperature=0.8,
        top_p=0.9,
        min_p=0.01,
        logprobs=5,
        repetition_penalty=1.1,
        presence_penalty=0.1,
        frequency_penalty=0.1,
    )
    sampler.open_rows([(row, NewRow([1, 2], 2, params, 0, 3, frozenset(), ())) for row in range(num_rows)])
    logits, lengths = torch.randn(num_rows, vocab_size), torch.full((num_rows,), max_len)
    token_ids = torch.zeros(num_rows, max_len, dtype=torch.int32)
    with LiveBytes() as live:
        sampler.sample(logits + 0, list(range(num_rows)), lengths, token_ids)
    bound = num_rows * (LOGITS_COPIES * 4 * vocab_size + BYTES_OF_HISTORY * max_len)
    assert 0.7 * bound < live.peak < bound


def test_scoring_a_prompt_stays_within_the_bound_of_sampling_even_for_one_request() -> None:
    vocab_size, num_tokens = 20000, 2 * SAMPLED_AT_ONCE
    config, model_config = EngineConfig(device="cuda", max_num_seqs=1).resolve(300), SimpleNamespace(vocab_size=20000)
    head = torch.randn(vocab_size, 8)
    scores = PromptLogprobs(lambda hidden: (hidden @ head.T).float(), Sampler(1, vocab_size, torch.device("cpu")))
    token_ids = torch.zeros(1, 300, dtype=torch.int32)
    row = NewRow([1] * num_tokens, num_tokens, SamplingParams(prompt_logprobs=5), 0, 0, frozenset(), ())
    scores.open_rows([(0, row)])
    share: Any = SimpleNamespace(start=0, num_tokens=num_tokens)
    with LiveBytes() as live:
        (entries,) = scores.score([share], [0], [0], torch.randn(num_tokens, 8), token_ids)
    assert entries is not None and len(entries) == num_tokens - 1
    bound = sampling_bytes(config, model_config)  # type: ignore[arg-type]
    assert 0.9 * bound < live.peak < bound


@pytest.mark.parametrize("num_rows", [1, 3, 256])
def test_the_samplers_workspaces_are_counted(num_rows: int) -> None:
    logits = torch.empty(num_rows, 151936, device=NOWHERE)
    rows = torch.zeros(num_rows, dtype=torch.int32, device=NOWHERE)
    table, index = DeviceParameters(num_rows, torch.device(NOWHERE)).table, rows.long()
    with dry_run(GPU_TYPES["sm_90"]), LiveBytes() as live:
        sampled = random_sample.sample_triton(logits, rows, table, index, any_random=True, any_filtered=True)
    assert sampled.shape == (num_rows,)
    assert (
        0.9 * random_sample.workspace_bytes(num_rows, 151936)
        < live.peak
        <= random_sample.workspace_bytes(num_rows, 151936)
    )


def test_rows_that_ask_for_more_are_sampled_a_few_at_a_time_and_get_what_they_would_together() -> None:
    num_rows, vocab_size, cpu = 2 * SAMPLED_AT_ONCE + 5, 300, torch.device("cpu")
    batch = DeviceBatch(num_rows, 40, 16, num_rows, cpu)
    sampler = Sampler(num_rows, vocab_size, cpu)
    for row in range(num_rows):
        params = SamplingParams(temperature=0.9, presence_penalty=0.5, top_k=50, logprobs=row % 3 or None)
        sampler.open_rows([(row, NewRow([row, 2], 2, params, 0, row, frozenset(), ()))])
    batch.positions.fill_(1)
    batch.header.sample_rows[:num_rows] = torch.arange(num_rows - 1, -1, -1)
    rows, logits = list(range(num_rows - 1, -1, -1)), torch.randn(num_rows, vocab_size)
    together = sampler.sample(logits.clone(), rows, torch.full((num_rows,), 2), batch.token_ids)
    outputs = GPUSampling(batch, sampler, None, None, Columns(vocab_size)).any(
        logits.clone(), rows, num_rows, [0] * num_rows
    )
    ids = torch.cat([output.token_ids for output in outputs])
    logprobs = logprobs_of(outputs)
    assert logprobs is not None and ids.equal(together.token_ids) and logprobs == together.logprobs
    assert batch.token_ids[rows, batch.num_known[rows] - 1].equal(ids.int())
    assert len({*ids.tolist()}) > 10 and sum(entry is None for entry in logprobs) == len(range(0, num_rows, 3))
