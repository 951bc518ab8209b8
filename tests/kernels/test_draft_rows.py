"""Drafts in rows on the device, interpreted or native, against the same in plain Python."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from teachllm_kernels.draft_rows import accept, cost, draft_inputs, draft_proposals, following_ids, push
from teachllm_kernels.draft_rows import synthetic_verdict as synthetic
from teachllm_kernels.step_inputs import step_inputs

pytestmark = [pytest.mark.gpu] if torch.cuda.is_available() else []  # natively where there is a GPU, else interpreted
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
MAX_LEN, BLOCK_SIZE, MAX_DRAFTS = 40, 4, 4
FIELDS = MAX_DRAFTS + 3


def ints(values: list, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype, device=DEVICE)


class Rows:
    """Some rows: their ids, known tokens, block tables; more of them than a step names."""

    def __init__(self, num_rows: int, seed: int) -> None:
        rng = random.Random(seed)
        self.ids = [[rng.randrange(6) for _ in range(MAX_LEN)] for _ in range(num_rows)]
        self.known = [rng.randint(2, MAX_LEN - 3 * MAX_DRAFTS) for _ in range(num_rows)]
        self.tables = [[rng.randrange(100) for _ in range(MAX_LEN // BLOCK_SIZE)] for _ in range(num_rows)]
        self.token_ids, self.num_known, self.block_tables = ints(self.ids), ints(self.known), ints(self.tables)

    def slot(self, row: int, position: int) -> int:
        return self.tables[row][position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE


def header(rows: list[int], num_drafts: list[int]) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    """(first, row of each position, first as numbers), with a sequence of padding behind."""
    first = [0]
    for count in num_drafts:
        first.append(first[-1] + count + 1)
    per_position = [row for row, count in zip(rows, num_drafts, strict=True) for _ in range(count + 1)]
    return ints([*first, first[-1]]), ints([*per_position, -1]), first


steps = st.lists(st.tuples(st.integers(0, MAX_DRAFTS), st.integers(0, MAX_DRAFTS)), min_size=1, max_size=5)


@settings(max_examples=40, deadline=None)
@given(step=steps, seed=st.integers(0, 1000))
def test_drafts_are_kept_up_to_the_first_that_is_not_what_was_sampled(step: list[tuple[int, int]], seed: int) -> None:
    rng = random.Random(seed)
    rows = rng.sample(range(6), len(step))
    state = Rows(6, seed)
    num_drafts, real = [drafts for drafts, _ in step], [0] * 6
    first, of_row, begins = header(rows, num_drafts)
    sampled: list[int] = []
    told: list[list[int]] = []
    for row, (count, num_right) in zip(rows, step, strict=True):
        known = state.known[row]
        drafts = state.ids[row][known : known + count]
        tokens = [*drafts[:num_right], *(7 + i for i in range(count + 1))][: count + 1]
        held = min(num_right, count)
        sampled += tokens
        real[row] = rng.randint(0, MAX_DRAFTS)
        told.append([held + 1, min(real[row], count), *tokens[: held + 1]])
    num_real, last = ints(real), ints([-5] * (len(rows) + 1))
    outputs = torch.full((3, 6 * FIELDS), -9, dtype=torch.int32, device=DEVICE)
    logits_rows = ints([*sampled, 0], torch.int64)
    accept(
        *(first, of_row, logits_rows, state.token_ids, state.num_known, num_real, last, outputs, ints([1])),
        num_fields=FIELDS,
    )
    for index, (row, entry) in enumerate(zip(rows, told, strict=True)):
        known = state.known[row]
        assert int(state.num_known[row]) == known + entry[0]
        assert state.token_ids[row, : known + entry[0]].tolist() == state.ids[row][:known] + entry[2:]
        assert outputs[1, index * FIELDS :][: len(entry)].tolist() == entry
        assert int(last[index]) == begins[index] + entry[0] - 1
        assert int(num_real[row]) == 0
    others = [row for row in range(6) if row not in rows]
    assert state.num_known[others].tolist() == [state.known[row] for row in others]
    assert (outputs[[0, 2]] == -9).all() and (outputs[1, len(rows) * FIELDS :] == -9).all()


@pytest.mark.parametrize(("num_tokens", "offset", "id_shift", "least"), [(2, -2, 0, 1), (1, 0, 0, 2), (1, 2, 1, 4)])
def test_a_drafter_gets_the_newest_tokens_of_who_asks_and_nobody_elses(
    num_tokens: int, offset: int, id_shift: int, least: int
) -> None:
    state, rows, asked = Rows(5, 3), [4, -1, 0, 2], [4, 4, 1, 3]
    ids, positions, slots = (torch.full((len(rows) * num_tokens,), 77, device=DEVICE) for _ in range(3))
    lens = ints([-1] * len(rows))
    draft_inputs(
        *(ints(rows), ints(asked), state.token_ids, state.num_known, state.block_tables, BLOCK_SIZE),
        *(ids, positions, slots, lens),
        num_tokens=num_tokens,
        offset=offset,
        id_shift=id_shift,
        least=least,
    )
    for seq, (row, count) in enumerate(zip(rows, asked, strict=True)):
        at = slice(seq * num_tokens, (seq + 1) * num_tokens)
        if row < 0 or count < least:
            assert (ids[at].tolist(), slots[at].tolist(), int(lens[seq])) == ([0] * num_tokens, [-1] * num_tokens, 0)
            continue
        places = range(state.known[row] + offset, state.known[row] + offset + num_tokens)
        assert ids[at].tolist() == [state.ids[row][place + id_shift] for place in places]
        assert positions[at].tolist() == list(places)
        assert slots[at].tolist() == [state.slot(row, place) for place in places]
        assert int(lens[seq]) == places[-1] + 1


def test_pushed_drafts_stand_behind_the_known_tokens_of_who_asks_for_so_many() -> None:
    state, rows, asked = Rows(5, 4), [4, -1, 0, 2], [4, 4, 0, 2]
    num_real = ints([9] * 5)
    push(*(ints(rows), ints(asked), ints([11, 12, 13, 14], torch.int64), state.token_ids, state.num_known), num_real, 1)
    expected = [list(ids) for ids in state.ids]
    expected[4][state.known[4] + 1], expected[2][state.known[2] + 1] = 11, 14
    assert state.token_ids.tolist() == expected
    assert num_real.tolist() == [9, 9, 2, 9, 2]
    push(*(ints(rows), ints(asked), ints([[1, 2, 3]] * 4), state.token_ids, state.num_known), num_real, 0)
    expected[4][state.known[4] : state.known[4] + 3] = [1, 2, 3]
    expected[2][state.known[2] : state.known[2] + 2] = [1, 2]
    assert state.token_ids.tolist() == expected
    assert num_real.tolist() == [9, 9, 2, 9, 3]


def test_the_following_id_of_every_token_of_a_flat_batch() -> None:
    state = Rows(3, 5)
    positions = [5, 6, 7, 0, 0, *range(70 % MAX_LEN)]
    starts = [0, 3, 5, 5 + 70 % MAX_LEN]
    following = torch.full((len(positions),), 77, device=DEVICE)
    following_ids(ints([2, -1, 0]), ints(starts), ints(positions, torch.int64), state.token_ids, following)
    expected = [state.ids[2][i + 1] for i in (5, 6, 7)] + [0, 0] + [state.ids[0][i + 1] for i in range(70 % MAX_LEN)]
    assert following.tolist() == expected


def test_proposals_name_the_logits_that_a_draft_was_drawn_from() -> None:
    state, rows, num_drafts = Rows(5, 6), [3, 1, 4], [2, 0, 3]
    first, of_row, _ = header(rows, num_drafts)
    siblings, draft_rows = torch.full((2, 8), -7, dtype=torch.int32, device=DEVICE)
    num_drawn = ints([4, 4, 4, 1, 3])
    draft_proposals(
        *(first, of_row, state.token_ids, state.num_known, num_drawn, siblings, draft_rows), max_drafts=MAX_DRAFTS
    )
    after = {row: state.ids[row][state.known[row] :] for row in rows}
    assert siblings.tolist() == [after[3][0], -1, -1, -1, *after[4][:3], -1]
    assert draft_rows.tolist() == [3 * MAX_DRAFTS, -1, -1, -1, *(4 * MAX_DRAFTS + i for i in range(3)), -1]


def test_a_coin_decides_which_drafts_hold_where_that_is_asked_for() -> None:
    num_rows = 200
    state = Rows(num_rows, 7)
    first, of_row, begins = header(list(range(num_rows)), [MAX_DRAFTS] * num_rows)
    sampled = ints([6] * begins[-1], torch.int64)
    again = sampled.clone()
    for each in (sampled, again):
        synthetic(*(first, of_row, each, state.token_ids, state.num_known), rate=0.8, max_drafts=MAX_DRAFTS)
    assert torch.equal(sampled, again)
    tokens = sampled.view(num_rows, MAX_DRAFTS + 1).tolist()
    drafts = [state.ids[row][state.known[row] :][:MAX_DRAFTS] for row in range(num_rows)]
    held = [a == b for mine, theirs in zip(tokens, drafts, strict=True) for a, b in zip(mine, theirs, strict=False)]
    assert 0.74 < sum(held) / len(held) < 0.86  # 800 coins of 0.8: a standard deviation is 0.014
    assert {mine[-1] for mine in tokens} == {6}


def test_a_flat_batch_of_known_tokens_ends_with_the_newest() -> None:
    state, rows, planned = Rows(4, 8), [1, 3, -1], [0, 30, 0]
    lens = [3, 2, 2]
    starts = ints([0, 3, 5, 7])
    ids, positions, slots = (torch.full((7,), 77, device=DEVICE) for _ in range(3))
    seq_lens = ints([-1] * 3)
    step_inputs(
        *(ints(rows), starts, ints(planned), state.token_ids, state.num_known, state.block_tables, BLOCK_SIZE),
        *(ids, positions, slots, seq_lens),
        all_known=True,
    )
    expected = [*range(3), *range(state.known[3] - 2, state.known[3])]
    assert positions[:5].tolist() == expected
    assert ids[:5].tolist() == [state.ids[row][p] for row, p in zip([1, 1, 1, 3, 3], expected, strict=True)]
    assert slots.tolist()[5:] == [-1, -1]
    assert seq_lens.tolist() == [lens[0], state.known[3], 0]


def test_cost_counts_ids_in_and_out() -> None:
    assert cost(1, 0) == (8 + 4 + 8 + 16, 0)
    assert cost(2, 4) == (2 * (5 * 20 + 4 * 12 + 16), 0)
