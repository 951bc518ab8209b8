"""Rejection sampling in Triton draws the reference's tokens: interpreted, or natively where there is a GPU."""

from __future__ import annotations

import random

import pytest
import torch

from teachllm.sampling.device_parameters import DeviceParameters, Parameters
from teachllm.sampling_params import FILTERS
from teachllm_kernels._triton import tl, triton
from teachllm_kernels.sampling import random_sample
from teachllm_kernels.sampling.philox import (
    STREAM_ACCEPT,
    STREAM_DRAFT,
    STREAM_SAMPLE,
    gumbel_noise,
    philox_uniform_reference,
)
from teachllm_kernels.sampling.random_sample import gumbel_sample_reference, sample_triton
from teachllm_kernels.speculation import rejection
from teachllm_kernels.speculation.rejection import rejection_sample_triton, workspace_bytes
from teachllm_kernels.speculation.rejection_reference import draft_sample_reference, rejection_sample_reference
from tests.kernels.cases import DEVICE, ON_GPU, pairs, per_device
from tests.kernels.sampling.sampling_cases import make_table, one_by_one, random_requests, row_of
from tests.thorough import THOROUGH, times

pytestmark = [pytest.mark.gpu] if ON_GPU else []
INFINITY = float("inf")
ANY = THOROUGH or ON_GPU


def expected_tokens(batch: dict, table: DeviceParameters) -> list[int]:
    def draw(i: int, one: torch.Tensor, p: Parameters) -> torch.Tensor:
        return rejection_sample_reference(
            one,
            p["temperature"],
            batch["draft_logits"],
            draft_rows=batch["draft_rows"][i : i + 1].long(),
            siblings=batch["siblings"][i : i + 1].long(),
            seeds=p["seed"],
            output_indices=batch["output_index"][i : i + 1],
            child_indices=p["child_index"],
            replaced=batch["replaced"],
        )

    return one_by_one(batch["logits"], batch["rows"], table, draw)


def sample(batch: dict, table: DeviceParameters) -> list[int]:
    before = batch["logits"].clone(), batch["draft_logits"].clone()
    tokens = rejection_sample_triton(
        batch["logits"],
        torch.tensor(batch["rows"], dtype=torch.int32, device=DEVICE),
        table.table,
        output_index=batch["output_index"],
        draft_logits=batch["draft_logits"],
        draft_rows=batch["draft_rows"],
        siblings=batch["siblings"],
        any_filtered=batch["any_filtered"],
        replaced=batch["replaced"],
    )
    assert torch.equal(batch["logits"], before[0]) and torch.equal(batch["draft_logits"], before[1])
    return tokens.tolist()


def propose(batch: dict, table: DeviceParameters, num_siblings: int) -> torch.Tensor:
    """[R, num_siblings] what a drafter draws for each row, from the rows of `draft_logits` that it is told."""
    siblings = torch.full((len(batch["rows"]), num_siblings), -1)
    for i, (row, source) in enumerate(zip(batch["rows"], batch["draft_rows"].tolist(), strict=True)):
        if row >= 0 and source >= 0:
            one = batch["draft_logits"][source : source + 1].float()
            p = row_of(table, row)
            heat, seed, child = p["temperature"], p["seed"], p["child_index"]
            at = batch["output_index"][i : i + 1]
            if batch["replaced"]:
                several = [draft_sample_reference(one, heat, seed + j, at, child, 1) for j in range(num_siblings)]
                siblings[i] = torch.cat(several, dim=1)[0]
            else:
                siblings[i] = draft_sample_reference(one, heat, seed, at, child, num_siblings)[0]
    return siblings.int().to(DEVICE)


@pairs(
    most=per_device(60, 300),
    few=4,
    vocab_size=per_device([61, times(140, 200)], [50, 61, 64, 513, 700]),
    num_siblings=per_device([1, 2], [1, 2, 3, 5]),
    replaced=[False, True],
    dtypes=[(torch.float32, torch.bfloat16), (torch.float16, torch.float32), *per_device([], [(torch.bfloat16,) * 2])],
    likeness=[0.0, 0.7, *per_device([], [1.0])],
    spread_and_quantum=[(0.1, 0.0), (5.0, 0.75), *[(5.0, 0.0)] * ANY],  # with a quantum there are ties everywhere
    padding=[0, 3],
    is_masked=[False, True],
    is_small=[False, True],
    seed=per_device([0], range(100)),
)
def test_tokens_equal_the_references_for_every_mixture_of_rows(
    vocab_size: int,
    num_siblings: int,
    replaced: bool,
    dtypes: tuple[torch.dtype, torch.dtype],
    likeness: float,
    spread_and_quantum: tuple[float, float],
    padding: int,
    is_masked: bool,
    is_small: bool,
    seed: int,
) -> None:
    (dtype, draft_dtype), (spread, quantum) = dtypes, spread_and_quantum
    rng = random.Random(f"{seed} {vocab_size} {num_siblings} {replaced} {dtype} {likeness} {spread}")
    requests = random_requests(rng, vocab_size)
    rows = rng.sample([-1, *range(len(requests))], per_device(times(2, 3), len(requests) + 1))
    num_drafted = len(rows)
    noise, other = torch.randn(2, num_drafted, vocab_size + padding)
    logits, drafted = noise * spread, likeness * noise + (1 - likeness) * other
    drafted = drafted.roll(1, dims=0) * spread  # a drafter's rows need not be in the model's order
    if quantum:
        logits, drafted = ((t / quantum).round() * quantum for t in (logits, drafted))
    if is_masked:
        for some in (logits, drafted):
            some[torch.rand(some.shape) < 0.3] = -INFINITY
    table = make_table(vocab_size, requests)
    sources = [rng.choice([-1, *range(num_drafted)]) for _ in rows]
    batch = {
        "logits": logits.to(DEVICE, dtype)[:, :vocab_size],
        "draft_logits": drafted.to(DEVICE, draft_dtype)[:, :vocab_size],
        "rows": rows,
        "draft_rows": torch.tensor(sources, dtype=torch.int32, device=DEVICE),
        "output_index": torch.randint(0, 5000, (len(rows),)).to(DEVICE),
        "replaced": replaced,
        "any_filtered": True,
    }
    batch["siblings"] = propose(batch, table, num_siblings)
    for i in range(len(rows)):
        batch["siblings"][i, rng.randrange(num_siblings + 1) :] = -1
    expected = expected_tokens(batch, table)
    with pytest.MonkeyPatch.context() as patch:
        if is_small:  # so that a small vocabulary takes every path of a large one
            patch.setattr(rejection, "_BLOCK", 128)
            patch.setattr(rejection, "_PROGRAMS", 5)
            patch.setattr(random_sample, "_TILE", 2)
            patch.setattr(random_sample, "_CANDIDATES", 16)
        assert sample(batch, table) == expected


def one_request(num_rows: int, vocab_size: int, **request: float) -> tuple[dict, DeviceParameters]:
    """Return a batch of one request's positions, whose drafter is no good, and its parameters."""
    generator = torch.Generator().manual_seed(11)
    logits, drafted = (torch.randn(2, num_rows, vocab_size, generator=generator) * 2).to(DEVICE)
    batch = {
        "logits": logits,
        "draft_logits": drafted,
        "rows": [0] * num_rows,
        "draft_rows": torch.arange(num_rows, dtype=torch.int32, device=DEVICE),
        "output_index": torch.arange(num_rows, device=DEVICE),
        "replaced": False,
        "any_filtered": any(name in request for name in FILTERS),
    }
    return batch, make_table(vocab_size, [{"temperature": 1.0, "seed": 5} | request])


@pytest.mark.parametrize(
    ("num_siblings", "filters"), [(2, {"top_k": 9}), *per_device([], [(n, {}) for n in (1, 2, 5)])]
)
def test_accepted_and_rejected_proposals_both_come_out_as_the_reference_has_them(
    num_siblings: int, filters: dict
) -> None:
    batch, table = one_request(per_device(4, 120), 60, **filters)
    batch["siblings"] = propose(batch, table, num_siblings)
    tokens = sample(batch, table)
    assert tokens == expected_tokens(batch, table)
    hits = [token in row for token, row in zip(tokens, batch["siblings"].tolist(), strict=True)]
    assert any(hits) and not all(hits)


def test_rows_without_proposals_have_the_tokens_of_a_plain_draw_and_greedy_ones_the_best() -> None:
    vocab_size = per_device(117, 517)
    batch, table = one_request(6, vocab_size, top_k=40)
    table = make_table(
        vocab_size, [{"temperature": 0.8, "seed": -3}, {}, {"temperature": 1.0, "top_p": 0.7, "seed": 1}]
    )
    rows = batch["rows"] = [0, 1, -1, 2, 1, 0]
    batch["siblings"] = torch.full((6, 2), 3, dtype=torch.int32, device=DEVICE)
    batch["siblings"][5] = -1
    batch["draft_rows"][[0, 3]] = -1
    on_rows = torch.tensor(rows, dtype=torch.int32, device=DEVICE)
    plain = sample_triton(
        batch["logits"], on_rows, table.table, batch["output_index"], any_random=True, any_filtered=True
    )
    assert sample(batch, table) == plain.tolist()


def test_a_row_without_filters_does_not_see_that_others_have_some() -> None:
    batch, table = one_request(per_device(times(1, 2), 20), per_device(100, 1500))
    batch["siblings"] = propose(batch, table, 2)
    tokens = sample(batch, table)
    assert tokens == expected_tokens(batch, table)
    assert sample(batch | {"any_filtered": True}, table) == tokens


@pytest.mark.parametrize("replaced", [False, True])
def test_where_nothing_is_left_p_stays_as_it_was(replaced: bool) -> None:
    """The drafter is the model, and still proposes what neither can say."""
    batch, table = one_request(per_device(2, 3), 300, seed=8)
    batch["logits"][:, 7] = -INFINITY
    batch["draft_logits"], batch["replaced"] = batch["logits"].clone(), replaced
    batch["siblings"] = torch.full((len(batch["rows"]), 2 if replaced else 1), 7, dtype=torch.int32, device=DEVICE)
    tokens = sample(batch, table)
    count = len(tokens)
    p = table.gather(torch.zeros(count, dtype=torch.int64, device=DEVICE))
    plain = gumbel_sample_reference(
        batch["logits"],
        p["temperature"],
        seeds=p["seed"],
        output_indices=batch["output_index"],
        child_indices=p["child_index"],
    )
    assert tokens == plain.tolist() == expected_tokens(batch, table)


def test_what_a_sure_drafter_has_left_is_not_lost_to_rounding_in_the_kernel() -> None:
    num_rows = per_device(2, 200)
    batch, table = one_request(num_rows, 70)
    batch["draft_logits"][:, 4] = 30.0  # so sure that in float32 nothing is left but this
    batch["siblings"] = propose(batch, table, 3)
    assert (batch["siblings"][:, 0] == 4).all()
    assert sample(batch, table) == expected_tokens(batch, table)


def test_a_row_without_a_possible_token_gives_its_first_also_where_the_drafter_had_none() -> None:
    batch, table = one_request(2, 100)
    batch["logits"][:] = -INFINITY
    batch["draft_logits"][1] = -INFINITY
    batch["siblings"] = torch.tensor([[5, 6], [7, -1]], dtype=torch.int32, device=DEVICE)
    assert sample(batch, table) == [0, 0]


def test_proposals_may_be_a_column_of_a_wider_tensor_but_logits_must_be_rows() -> None:
    batch, table = one_request(4, 64)
    several = propose(batch, table, 3)
    batch["siblings"] = several[:, :1]
    assert sample(batch, table) == expected_tokens(batch, table)
    with pytest.raises(ValueError, match="rows contiguous"):
        sample(batch | {"draft_logits": batch["draft_logits"].T.contiguous().T}, table)


def test_a_draft_is_drawn_by_the_sampler_from_a_stream_of_its_own() -> None:
    batch, table = one_request(per_device(3, 10), 333, temperature=0.6)
    on_rows = torch.zeros(len(batch["rows"]), dtype=torch.int32, device=DEVICE)
    drafts = sample_triton(
        batch["draft_logits"],
        on_rows,
        table.table,
        output_index=batch["output_index"],
        any_random=True,
        any_filtered=False,
        stream=STREAM_DRAFT,
    )
    batch["siblings"] = propose(batch, table, 1)
    assert drafts.tolist() == batch["siblings"][:, 0].tolist()


@triton.jit
def _noise_of_a_stream(noise_ptr, seed_ptr, output_index_ptr, child_index_ptr, STREAM: tl.constexpr, N: tl.constexpr):
    key, output, child = tl.load(seed_ptr), tl.load(output_index_ptr), tl.load(child_index_ptr)
    tl.store(noise_ptr + tl.arange(0, N), gumbel_noise(tl.arange(0, N // 4), key, output, child, STREAM))


@pytest.mark.parametrize("stream", [STREAM_SAMPLE, STREAM_ACCEPT, STREAM_DRAFT])
def test_noise_of_every_stream_is_the_references(stream: int) -> None:
    noise = torch.empty(256, device=DEVICE)
    seed, output_index, child_index = one = [torch.tensor([value], device=DEVICE) for value in (-123456789, 17, 2)]
    _noise_of_a_stream[(1,)](
        noise_ptr=noise,
        seed_ptr=seed,
        output_index_ptr=output_index,
        child_index_ptr=child_index,
        STREAM=stream,
        N=256,
    )
    uniform = philox_uniform_reference(*(t.cpu() for t in one), 256, stream)[0].double()
    torch.testing.assert_close(noise.cpu().double(), -torch.log(-torch.log1p(-uniform)), rtol=1e-6, atol=3e-6)


# A GPU


def large_batch(num_rows: int, num_siblings: int) -> tuple[dict, DeviceParameters]:
    """Requests of every kind, five positions each, with a drafter that knows them well."""
    vocab_size, generator = 151_936, torch.Generator().manual_seed(num_rows)
    logits = torch.randn(num_rows, vocab_size, generator=generator) * 3
    drafted = (logits + torch.randn(num_rows, vocab_size, generator=generator)).bfloat16().to(DEVICE)
    filters = [{}, {}, {}, {"top_k": 50}, {"top_p": 0.9}, {"min_p": 0.05}, {"top_k": 20, "top_p": 0.8}]
    requests = [{"temperature": 0.0}]
    for i, some in enumerate(filters):
        requests += [{"temperature": 0.4, "seed": i, **some}, {"temperature": 0.9, "seed": i + 50, **some}]
    num_requests = -(-num_rows // 5)
    batch = {
        "logits": logits.bfloat16().to(DEVICE),
        "draft_logits": drafted,
        "rows": [(i // 5 + 1) % (len(requests) + 1) - 1 if num_requests > 1 else 1 for i in range(num_rows)],
        # Four drafts and then a position of its own, as in a chain.
        "draft_rows": torch.tensor([-1 if i % 5 == 4 else i for i in range(num_rows)], dtype=torch.int32).to(DEVICE),
        "output_index": torch.arange(num_rows, device=DEVICE),
        "replaced": False,
        "any_filtered": num_requests > 1,
    }
    table = make_table(vocab_size, requests)
    batch["siblings"] = propose(batch, table, num_siblings)
    return batch, table


@pytest.mark.gpu
@pytest.mark.parametrize("num_siblings", [1, 4])
@pytest.mark.parametrize("num_rows", [5, 320])
def test_tokens_equal_the_references_at_full_size(num_rows: int, num_siblings: int) -> None:
    batch, table = large_batch(num_rows, num_siblings)
    tokens, expected = sample(batch, table), expected_tokens(batch, table)
    # The reference adds up 150,000 probabilities in float32: a token on a nucleus' edge may differ.
    assert sum(a != b for a, b in zip(tokens, expected, strict=True)) <= num_rows // 50
    hits = [token in row for token, row in zip(tokens, batch["siblings"].tolist(), strict=True)]
    assert any(hits) and not all(hits)


@pytest.mark.gpu
@pytest.mark.parametrize("num_siblings", [1, 3])
def test_a_graph_replays_with_other_proposals(num_siblings: int) -> None:
    batch, table = large_batch(40, num_siblings)
    rows = torch.tensor(batch["rows"], dtype=torch.int32, device=DEVICE)
    out = torch.empty(40, dtype=torch.int64, device=DEVICE)
    names = ("logits", "output_index", "draft_logits", "draft_rows", "siblings", "replaced", "any_filtered")

    def call() -> None:
        rejection_sample_triton(rows=rows, table=table.table, **{name: batch[name] for name in names}, out=out)

    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    for step in range(3):
        batch["output_index"].add_(step)
        batch["rows"] = batch["rows"][5:] + batch["rows"][:5]
        rows.copy_(torch.tensor(batch["rows"], dtype=torch.int32))
        batch["draft_logits"].copy_(batch["draft_logits"].roll(step, dims=1))
        batch["siblings"].copy_(propose(batch, table, num_siblings))
        graph.replay()
        assert out.tolist() == sample(batch, table)


@pytest.mark.gpu
@pytest.mark.parametrize("num_siblings", [1, 3])
def test_a_rows_token_does_not_depend_on_the_batch(num_siblings: int) -> None:
    batch, table = large_batch(320, num_siblings)
    together = sample(batch, table)
    for i in range(0, 320, 7):
        names = ("logits", "rows", "draft_rows", "siblings", "output_index")
        alone = batch | {name: batch[name][i : i + 1] for name in names}
        assert sample(alone, table) == together[i : i + 1]


@pytest.mark.gpu
def test_the_workspace_is_counted() -> None:
    batch, table = large_batch(320, 3)
    sample(batch, table)
    torch.cuda.synchronize()
    rows = torch.tensor(batch["rows"], dtype=torch.int32, device=DEVICE)
    names = ("logits", "output_index", "draft_logits", "draft_rows", "siblings", "replaced", "any_filtered")
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    torch.cuda.reset_peak_memory_stats()
    rejection_sample_triton(rows=rows, table=table.table, **{name: batch[name] for name in names})
    torch.cuda.synchronize()
    used, counted = torch.cuda.memory_stats()["requested_bytes.all.peak"] - before, workspace_bytes(320, 151_936, 3)
    assert 0.9 * counted <= used <= counted
