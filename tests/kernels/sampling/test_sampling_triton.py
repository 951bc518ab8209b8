"""The Triton sampler draws the reference's tokens: greedy, random, filtered and padding rows, side by side."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from teachllm import SamplingParams
from teachllm.core.scheduler_output import NewRow
from teachllm.sampling.device_parameters import DeviceParameters, Parameters
from teachllm.sampling.filters import apply_filters
from teachllm.sampling.shared_vocabulary import Columns
from teachllm.sampling.state import SamplingState
from teachllm.sampling_params import FILTERS
from teachllm_kernels._triton import tl, triton
from teachllm_kernels.sampling import random_sample
from teachllm_kernels.sampling.parameter_table import ParameterTable
from teachllm_kernels.sampling.philox import gumbel_noise, philox_words
from teachllm_kernels.sampling.random_sample import (
    gumbel_sample_reference,
    philox_reference,
    philox_uniform_reference,
    sample_triton,
    token_of_best,
)
from tests.distributed.one_of_two import OneOfTwo
from tests.kernels.cases import DEVICE, ON_GPU, pairs, per_device
from tests.kernels.sampling.sampling_cases import make_table, one_by_one, random_requests, row_of
from tests.request_kinds import EXAMPLES
from tests.thorough import times

pytestmark = [pytest.mark.gpu] if ON_GPU else []  # natively where there is a GPU, else interpreted


def expected_tokens(
    logits: torch.Tensor, rows: list[int], table: DeviceParameters, output_index: torch.Tensor
) -> list[int]:
    def draw(i: int, one: torch.Tensor, p: Parameters) -> torch.Tensor:
        return gumbel_sample_reference(one, p["temperature"], p["seed"], output_index[i : i + 1], p["child_index"])

    return one_by_one(logits, rows, table, draw)


def filtered(logits: torch.Tensor, table: DeviceParameters) -> torch.Tensor:
    """Filter by the only request of a table."""
    p = {name: values.cpu() for name, values in row_of(table, 0).items()}
    return apply_filters(logits, p, num_candidates=int(p["top_k"]))


def sample(
    logits: torch.Tensor,
    rows: list[int],
    table: DeviceParameters,
    output_index: torch.Tensor,
    any_random: bool = True,
    any_filtered: bool = True,
) -> list[int]:
    rows_on_device = torch.tensor(rows, dtype=torch.int32, device=DEVICE)
    before = logits.clone()
    tokens = sample_triton(
        logits,
        rows_on_device,
        table.table,
        output_index=output_index,
        any_random=any_random,
        any_filtered=any_filtered,
    )
    assert torch.equal(logits, before)
    return tokens.tolist()


@pairs(
    most=per_device(60, 300),
    few=4,
    vocab_size=per_device([61, 200], [50, 61, 64, 513, 700]),
    spread=[0.1, 5.0],
    quantum=[0.0, 0.75],  # or ties everywhere
    padding=[0, 3],
    is_masked=[False, True],
    # Small ones, so that a small vocabulary takes every path of a large one.
    sizes=[{}, {"_BLOCK": 128, "_TILE": 2, "_CANDIDATES": 16, "_SCAN_PROGRAMS": 5}],
    seed=per_device([0], range(100)),
)
def test_tokens_equal_the_references_for_every_mixture_of_rows(
    vocab_size: int, spread: float, quantum: float, padding: int, is_masked: bool, sizes: dict[str, int], seed: int
) -> None:
    rng = random.Random(f"{seed} {vocab_size} {quantum} {spread} {padding}")
    requests = random_requests(rng, vocab_size)
    rows = rng.sample([-1, *range(len(requests))], per_device(3, len(requests) + 1))
    logits = torch.randn(len(rows), vocab_size + padding) * spread
    if quantum:
        logits = (logits / quantum).round() * quantum
    if is_masked:
        logits[torch.rand(logits.shape) < 0.3] = float("-inf")
    logits = logits.to(DEVICE)[:, :vocab_size]
    output_index = torch.randint(0, 5000, (len(rows),)).to(DEVICE)
    table = make_table(vocab_size, requests)
    expected = expected_tokens(logits, rows, table, output_index)
    with pytest.MonkeyPatch.context() as patch:
        for name, size in sizes.items():
            patch.setattr(random_sample, name, size)
        assert sample(logits, rows, table, output_index) == expected


@pytest.mark.parametrize("vocab_size", [61, 200])  # one group of the kernel's, and four
@pytest.mark.parametrize("name", FILTERS)
def test_each_filter_alone_cuts_what_the_reference_cuts_and_no_more(name: str, vocab_size: int) -> None:
    """At positions where a token that is cut would have been drawn, and where the least likely that are kept are."""
    num_positions = 300
    table = make_table(vocab_size, [{"temperature": 1.5, "seed": 3, name: EXAMPLES[name]}])
    one = 2 * torch.randn(1, vocab_size, generator=torch.Generator().manual_seed(4))
    is_kept = filtered(one, table)[0].isfinite()
    p = table.gather(torch.zeros(num_positions, dtype=torch.int64, device=DEVICE))
    positions, logits = torch.arange(num_positions, device=DEVICE), one.to(DEVICE).expand(num_positions, -1)
    plain = gumbel_sample_reference(logits, p["temperature"], p["seed"], positions, p["child_index"])
    keeps, num_each = is_kept.to(DEVICE)[plain], per_device(3, 300)
    by_likelihood = one[0].to(DEVICE)[plain].where(keeps, torch.inf).argsort()[: keeps.sum()]
    positions = torch.cat([positions[~keeps][:num_each], positions[by_likelihood][:num_each]])
    logits, rows = logits[: len(positions)].contiguous(), [0] * len(positions)
    tokens = sample(logits, rows, table, positions)
    assert len(tokens) >= 6 and is_kept[tokens].all()
    assert tokens == expected_tokens(logits, rows, table, positions)


@pairs(
    vocab_size=per_device([61], [50, 61, 513]),
    num_ranks=per_device([1, 3], [1, 2, 3, 4]),
    quantum=[0.0, 0.75],
    block=[32, 128],
    seed=per_device([0], range(50)),
)
def test_the_best_of_each_rank_s_columns_is_the_token_of_all(
    vocab_size: int, num_ranks: int, quantum: float, block: int, seed: int
) -> None:
    generator, rows = torch.Generator().manual_seed(seed), [0, 2, -1]
    logits = torch.randn(len(rows), vocab_size, generator=generator)
    if quantum:
        logits = (logits / quantum).round() * quantum
    logits[torch.rand(logits.shape, generator=generator) < 0.2] = float("-inf")
    logits = logits.to(DEVICE)
    output_index = torch.randint(0, 5000, (len(rows),), generator=generator).to(DEVICE)
    table = make_table(vocab_size, [{}, {"temperature": 0.7, "seed": seed}, {"temperature": 2.0, "child_index": 3}])
    on_device, width = torch.tensor(rows, dtype=torch.int32, device=DEVICE), -(-vocab_size // num_ranks)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(random_sample, "_BLOCK", block)
        best = [
            sample_triton(
                logits[:, first : first + width],
                on_device,
                table.table,
                output_index=output_index,
                any_random=True,
                any_filtered=False,
                first_id=first,
            )
            for first in range(0, vocab_size, width)
        ]
    assert token_of_best(torch.stack(best)).tolist() == expected_tokens(logits, rows, table, output_index)


class Recorder(OneOfTwo):
    """Records what the rank would have sent."""

    def __init__(self, rank: int) -> None:
        super().__init__(rank)
        self.sent = list[torch.Tensor]()

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        self.sent.append(x)
        return x[None]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_columns_of_no_token_are_not_drawn_from(temperature: float) -> None:
    # As on a GPU, where nothing fills them: 0.0, which is more than any logit here.
    logits = torch.nn.functional.pad(-50 - torch.rand(3, 9, generator=torch.Generator().manual_seed(0)), (0, 1))
    rows, indices = torch.arange(3, dtype=torch.int32, device=DEVICE), torch.tensor([0, 3, 8], device=DEVICE)
    params = SamplingParams(temperature=temperature)
    new_rows = [(row, NewRow([1], 1, params, seed, 0, frozenset())) for row, seed in enumerate((5, 6, 7))]

    def draw(columns: Columns, logits: torch.Tensor) -> torch.Tensor:
        state = SamplingState(3, columns, torch.device(DEVICE))
        state.open_rows(new_rows)
        return state.draw(logits.to(DEVICE), rows, indices, temperature > 0, any_filtered=False, columns=columns)

    groups = [Recorder(0), Recorder(1)]
    for group, part in zip(groups, logits.split(5, dim=1), strict=True):
        draw(Columns(9, group), part)
    best = token_of_best(torch.cat([group.sent[0][None] for group in groups]))
    assert torch.equal(best, draw(Columns(9), logits[:, :9]))
    assert best.max() < 9


def test_an_unfiltered_batch_may_say_so_and_a_greedy_one_too() -> None:
    logits = torch.randn(3, 517, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    output_index = torch.tensor([4, 5, 6], device=DEVICE)
    requests = [{}, {"temperature": 0.8, "seed": -3}]
    table = make_table(517, requests)
    expected = expected_tokens(logits, [1, -1, 0], table, output_index)
    assert sample(logits, [1, -1, 0], table, output_index, any_filtered=False) == expected
    greedy = [0 if i == 1 else int(logits[i].argmax()) for i in range(3)]
    assert sample(logits, [0, -1, 0], table, output_index, any_random=False, any_filtered=False) == greedy


def test_the_lowest_of_equal_best_ids_wins_whatever_its_sign_of_zero() -> None:
    logits = torch.full((4, 3000), -1.0)
    logits[0, [2999, 1023, 1024]] = 5.0
    logits[1, 700], logits[1, 2500] = -0.0, 0.0
    logits[3] = float("-inf")
    tokens = sample(
        logits.to(DEVICE), [0] * 4, make_table(3000, [{}]), torch.zeros(4, dtype=torch.int64, device=DEVICE)
    )
    assert tokens == [1023, 700, 0, 0]


@pytest.mark.parametrize(
    "filters",
    per_device(
        [{"top_k": 30, "top_p": 0.5}, {"top_k": 7}][: times(1, 2)],
        [
            {"top_k": 7},
            {"top_k": 30, "top_p": 0.5},
            {"top_p": 0.35},
            {"min_p": 0.9},
        ],
    ),
)
def test_of_tied_logits_the_lowest_ids_are_kept(filters: dict) -> None:
    """A row of two values: which ids can be drawn is then the tie rule's doing alone."""
    vocab_size, num_draws = 150, per_device(1, 400)
    one = torch.zeros(1, vocab_size)
    one[:, 11::13] = 1.0
    logits = one.expand(num_draws, -1).contiguous().to(DEVICE)
    table = make_table(vocab_size, [{"temperature": 2.0, "seed": 9, **filters}])
    output_index = torch.arange(num_draws, device=DEVICE)
    tokens = sample(logits, [0] * num_draws, table, output_index)
    assert tokens == expected_tokens(logits, [0] * num_draws, table, output_index)
    kept = filtered(one, table)
    assert kept[0, tokens].isfinite().all()


@pytest.mark.parametrize("filters", [{"top_k": 3}, {"top_p": 0.2}][: per_device(times(1, 2), 2)])
def test_zeros_of_either_sign_are_ties(filters: dict) -> None:
    logits = torch.zeros(1, 50)
    logits[:, ::2] = -0.0
    table = make_table(50, [{"temperature": 0.3, **filters}])
    for step in range(per_device(1, 3)):
        output_index = torch.tensor([step], device=DEVICE)
        one = logits.roll(step, dims=1).to(DEVICE)
        assert sample(one, [0], table, output_index) == expected_tokens(one, [0], table, output_index)


@triton.jit
def _words_and_noise(words_ptr, noise_ptr, seed_ptr, output_index_ptr, child_index_ptr, N: tl.constexpr):
    quads, ids = tl.arange(0, N // 4), tl.arange(0, N)
    key, output, child = tl.load(seed_ptr), tl.load(output_index_ptr), tl.load(child_index_ptr)
    tl.store(words_ptr + ids, philox_words(quads, key, output, child).to(tl.int64))
    tl.store(noise_ptr + ids, gumbel_noise(quads, key, output, child))


@settings(max_examples=per_device(times(5, 60), 20))
@given(st.integers(-(2**63), 2**63 - 1), st.integers(0, 2**40), st.integers(0, 100))
def test_words_and_noise_are_the_references(seed: int, output_index: int, child_index: int) -> None:
    size = per_device(256, 4096)
    words = torch.empty(size, dtype=torch.int64, device=DEVICE)
    noise = torch.empty(size, device=DEVICE)
    one = [torch.tensor([value], device=DEVICE) for value in (seed, output_index, child_index)]
    _words_and_noise[(1,)](
        words_ptr=words,
        noise_ptr=noise,
        seed_ptr=one[0],
        output_index_ptr=one[1],
        child_index_ptr=one[2],
        N=size,
    )
    counter = torch.zeros(4, size // 4, dtype=torch.int64)
    counter[0] = torch.arange(size // 4)
    counter[1], counter[2] = output_index & 0xFFFFFFFF, child_index
    key = torch.tensor([[seed & 0xFFFFFFFF], [(seed >> 32) & 0xFFFFFFFF]])
    assert torch.equal(words.cpu(), philox_reference(counter, key).T.flatten())
    seed_column, index_column, child_column = (column.cpu() for column in one)
    uniform = philox_uniform_reference(seed_column, index_column, child_column, size)[0].double()
    torch.testing.assert_close(noise.cpu().double(), -torch.log(-torch.log1p(-uniform)), rtol=1e-6, atol=3e-6)


def test_a_wide_stride_between_rows_and_tables_that_kernels_cannot_read() -> None:
    table = make_table(64, [{"temperature": 1.0, "top_k": 3}])
    wide = torch.randn(2, 200, generator=torch.Generator().manual_seed(3)).to(DEVICE)
    logits, output_index = wide[:, 40:104], torch.tensor([1, 2], device=DEVICE)
    assert sample(logits, [0, 0], table, output_index) == expected_tokens(logits, [0, 0], table, output_index)
    with pytest.raises(ValueError, match="rows contiguous"):
        sample(logits.T.contiguous().T, [0, 0], table, output_index)
    floats, ints = table.table.floats, table.table.ints
    for wrong in ((floats[:, :2], ints), (floats, ints[:, :2]), (floats.repeat(2, 2)[:, ::2], ints)):
        with pytest.raises(ValueError, match="side by side"):
            ParameterTable(*wrong)


# A GPU


def large_batch(num_rows: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, list[dict], list[int]]:
    generator = torch.Generator().manual_seed(num_rows)
    logits = (torch.randn(num_rows, 151_936, generator=generator) * 3).to(dtype)
    filters = [{}, {"top_k": 50}, {"top_p": 0.9}, {"min_p": 0.05}, {"top_k": 20, "top_p": 0.8}, {"top_p": 0.2}]
    filters += [{"top_k": 50_000}, {"top_k": 3000, "top_p": 0.5, "min_p": 0.001}]
    requests = [{"temperature": 0.0}]
    for i, some in enumerate(filters):
        requests += [{"temperature": 0.6, "seed": i, **some}, {"temperature": 1.3, "seed": i, **some}]
    return logits, requests, [(i + 4) % (len(requests) + 1) - 1 for i in range(num_rows)]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_rows", [1, 18, 100])
def test_tokens_equal_the_references_at_full_size(num_rows: int, dtype: torch.dtype) -> None:
    logits, requests, rows = large_batch(num_rows, dtype)
    logits, table = logits.to(DEVICE), make_table(151_936, requests)
    output_index = torch.arange(num_rows, device=DEVICE)
    tokens = sample(logits, rows, table, output_index)
    expected = expected_tokens(logits, rows, table, output_index)
    # The reference adds up 150,000 probabilities in float32: a token on a nucleus' edge may differ.
    assert sum(a != b for a, b in zip(tokens, expected, strict=True)) <= num_rows // 50


@pytest.mark.gpu
def test_a_graph_replays_with_other_parameters() -> None:
    logits, requests, rows = large_batch(18)
    logits, table = logits.to(DEVICE), make_table(151_936, requests)
    rows_on_device = torch.tensor(rows, dtype=torch.int32, device=DEVICE)
    output_index = torch.zeros(18, dtype=torch.int64, device=DEVICE)
    out = torch.empty_like(output_index)

    def call() -> None:
        sample_triton(logits, rows_on_device, table.table, output_index, any_random=True, any_filtered=True, out=out)

    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    for step in range(3):
        output_index.fill_(step)
        rows = rows[1:] + rows[:1]
        rows_on_device.copy_(torch.tensor(rows, dtype=torch.int32))
        logits.copy_(logits.roll(step * 1000, dims=1))
        graph.replay()
        assert out.tolist() == sample(logits, rows, table, output_index)
        graph.replay()
        assert out.tolist() == expected_tokens(logits, rows, table, output_index)


@pytest.mark.gpu
def test_a_rows_token_does_not_depend_on_the_batch() -> None:
    logits, requests, rows = large_batch(64)
    logits, table = logits.to(DEVICE), make_table(151_936, requests)
    output_index = torch.arange(64, device=DEVICE)
    together = sample(logits, rows, table, output_index)
    alone = [sample(logits[i : i + 1], [rows[i]], table, output_index[i : i + 1])[0] for i in range(64)]
    assert together == alone


@pytest.mark.gpu  # interpreted, a filtered row takes 0.1 s: too long for a distribution
def test_draws_follow_the_softmax_of_what_the_filters_leave() -> None:
    logits = torch.tensor([2.0, 0.0, -1.0, 1.0, float("-inf"), 0.5, -3.0, 0.25])
    num_draws, filters = 20_000, {"top_k": 6, "top_p": 0.93}
    table = make_table(8, [{"temperature": 1.5, "seed": 77, **filters}])
    output_index = torch.arange(num_draws, device=DEVICE)
    rows = [0] * num_draws
    tokens = sample(logits.repeat(num_draws, 1).to(DEVICE), rows, table, output_index, any_filtered=True)
    kept = filtered(logits[None], table)[0]
    expected = (kept / 1.5).softmax(0) * num_draws
    counts = torch.bincount(torch.tensor(tokens), minlength=8).float()
    assert counts[expected == 0].sum() == 0
    chi_square = ((counts - expected).square() / expected)[expected > 0].sum().item()
    assert chi_square < 27.9  # at most 6 degrees of freedom, probability 1e-4; the seed is fixed
