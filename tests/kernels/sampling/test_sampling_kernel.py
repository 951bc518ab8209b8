"""Philox gives the published numbers, and Gumbel noise draws from exactly the softmax."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from teachllm_kernels.sampling.random_sample import (
    cost,
    gumbel_noise_reference,
    gumbel_sample_reference,
    philox_reference,
    philox_uniform_reference,
)
from tests.thorough import times

WORD = 0xFFFFFFFF
# Random123's known answers for philox4x32 with 10 rounds: counter, key, result.
KNOWN_ANSWERS = [
    ([0, 0, 0, 0], [0, 0], [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([WORD] * 4, [WORD] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]


def philox_plain(counter: list[int], key: list[int]) -> list[int]:
    """The paper's definition, in Python's unbounded integers."""
    c, k = list(counter), list(key)
    for _ in range(10):
        left, right = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(right >> 32) ^ c[1] ^ k[0], right & WORD, (left >> 32) ^ c[3] ^ k[1], left & WORD]
        k = [(k[0] + 0x9E3779B9) & WORD, (k[1] + 0xBB67AE85) & WORD]
    return c


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN_ANSWERS)
def test_philox_gives_the_published_answers(counter: list[int], key: list[int], answer: list[int]) -> None:
    assert philox_reference(torch.tensor(counter), torch.tensor(key)).tolist() == answer
    assert philox_plain(counter, key) == answer


words = st.integers(0, WORD)


@settings(max_examples=times(10, 500))
@given(st.lists(st.tuples(words, words, words, words, words, words), min_size=1, max_size=5))
def test_many_philox_calls_at_once_equal_one_at_a_time(inputs: list[tuple[int, ...]]) -> None:
    columns = torch.tensor(inputs).T
    expected = [philox_plain(list(row[:4]), list(row[4:])) for row in inputs]
    assert philox_reference(columns[:4], columns[4:]).T.tolist() == expected


@settings(max_examples=times(10, 500))
@given(st.integers(-(2**63), 2**63 - 1), st.integers(0, 2**20), st.integers(0, 100), st.integers(1, 21))
def test_the_counter_words_carry_what_the_module_says(
    seed: int, output_index: int, child: int, vocab_size: int
) -> None:
    uniform = philox_uniform_reference(
        torch.tensor([7, seed]), torch.tensor([3, output_index]), torch.tensor([1, child]), vocab_size, stream=2
    )
    assert uniform.shape == (2, vocab_size)
    key = [seed & WORD, (seed >> 32) & WORD]
    for index in range(vocab_size):
        word = philox_plain([index // 4, output_index, child, 2], key)[index % 4]
        assert math.isclose(uniform[1, index].item(), (word + 0.5) / 2**32, rel_tol=1e-6, abs_tol=1e-9)


def test_uniform_numbers_never_reach_0_or_1_and_the_noise_is_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    for word in (0, WORD):
        monkeypatch.setattr(
            "teachllm_kernels.sampling.philox.philox_reference",
            lambda counter, key, word=word: torch.full_like(counter, word),
        )
        zero = torch.zeros(1, dtype=torch.int64)
        uniform = philox_uniform_reference(zero, zero, zero, 8)
        assert (uniform > 0).all() and (uniform < 1).all()
        assert (-torch.log(-torch.log1p(-uniform))).isfinite().all()


@pytest.mark.parametrize("num_parts", [2, 3, 7])
def test_the_noise_of_some_tokens_is_to_the_bit_that_of_all(num_parts: int) -> None:
    names, vocab_size = [torch.tensor([3, 5]), torch.tensor([0, 9]), torch.tensor([1, 0])], 30_030
    whole, width = gumbel_noise_reference(*names, vocab_size, stream=0), vocab_size // num_parts
    parts = [gumbel_noise_reference(*names, width, 0, part * width) for part in range(num_parts)]
    assert torch.equal(torch.cat(parts, dim=1), whole)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_follow_the_softmax(temperature: float) -> None:
    logits = torch.tensor([2.0, 0.0, -1.0, 1.0, float("-inf"), 0.5, -3.0])
    num_draws = 20_000
    draws = gumbel_sample_reference(
        logits.expand(num_draws, -1),
        torch.full((num_draws,), temperature),
        torch.full((num_draws,), 1234),
        torch.arange(num_draws),
        torch.zeros(num_draws, dtype=torch.int64),
    )
    expected = (logits / temperature).softmax(0) * num_draws
    counts = torch.bincount(draws, minlength=7).float()
    assert counts[4] == 0
    possible = expected > 0
    chi_square = ((counts - expected).square() / expected)[possible].sum().item()
    assert chi_square < 25.7  # 5 degrees of freedom, probability 1e-4; the seed is fixed, so this does not flicker


def test_draws_of_children_positions_and_seeds_are_unrelated() -> None:
    logits = torch.zeros(3, 50_000)
    one, two = torch.ones(1, dtype=torch.int64), torch.full((1,), 2)
    uniform = [
        philox_uniform_reference(seed, output, child, logits.shape[1])[0]
        for seed, output, child in ((one, one, one), (two, one, one), (one, two, one), (one, one, two))
    ]
    uniform.append(philox_uniform_reference(one, one, one, logits.shape[1], stream=1)[0])
    correlation = torch.corrcoef(torch.stack(uniform)) - torch.eye(len(uniform))
    assert correlation.abs().max() < 0.02
    for numbers in uniform:
        assert abs(numbers.mean().item() - 0.5) < 0.005
        assert abs(numbers.var().item() - 1 / 12) < 0.002


def test_cost_counts_the_logits_once() -> None:
    num_bytes, operations = cost(num_rows=2, vocab_size=1000)
    assert num_bytes == 2 * (4 * 1000 + 8)
    assert operations == 500 * 70 + 2000 * 6  # a Philox call serves four of the 2000 ids
