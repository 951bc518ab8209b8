"""Drafts in rows on the device, interpreted or native, against the same in plain Python."""

from __future__ import annotations

import random
from typing import Any, NamedTuple

import pytest
import torch

from teachllm.spec_decode.tree import DraftTree
from teachllm_kernels.attention.kv_move import KVMover
from teachllm_kernels.attention.kv_move import cost as move_cost
from teachllm_kernels.speculation import draft_rows as rows_of_drafts
from teachllm_kernels.speculation import verify_drafts
from teachllm_kernels.speculation.draft_rows import draft_inputs, following_ids, push
from teachllm_kernels.speculation.verify_drafts import accept, draft_proposals
from teachllm_kernels.speculation.verify_drafts import synthetic_verdict as synthetic
from teachllm_kernels.step_inputs import step_inputs
from tests.kernels.cases import DEVICE, ON_GPU, per_device
from tests.thorough import times

pytestmark = [pytest.mark.gpu] if ON_GPU else []  # natively where there is a GPU, else interpreted
MAX_LEN, BLOCK_SIZE, MAX_DRAFTS = 40, 4, 4
CHAIN = DraftTree.chain(MAX_DRAFTS)
TREE = DraftTree.of([(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (1, 0, 0)])


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


class Flat(NamedTuple):
    """The inputs of a step's tokens, as they lie on the device before a kernel writes them."""

    input_ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    seq_lens: torch.Tensor

    @classmethod
    def of(cls, num_tokens: int, num_seqs: int) -> Flat:
        ids, positions, slots = (torch.full((num_tokens,), 77, device=DEVICE) for _ in range(3))
        return cls(ids, positions, slots, ints([-1] * num_seqs))


def draft(state: Rows, rows: list[int], asked: list[int], num_tokens: int, **options: Any) -> Flat:
    """Return a drafter's inputs."""
    flat = Flat.of(len(rows) * num_tokens, len(rows))
    draft_inputs(
        rows=ints(rows),
        num_drafts=ints(asked),
        token_ids=state.token_ids,
        num_known=state.num_known,
        block_tables=state.block_tables,
        block_size=BLOCK_SIZE,
        input_ids=flat.input_ids,
        positions=flat.positions,
        slot_mapping=flat.slots,
        seq_lens=flat.seq_lens,
        num_tokens=num_tokens,
        **options,
    )
    return flat


def step(state: Rows, rows: list[int], starts: list[int], planned: list[int], **options: Any) -> Flat:
    """Return a step's inputs."""
    flat = Flat.of(starts[-1], len(rows))
    step_inputs(
        rows=ints(rows),
        query_start=ints(starts),
        planned_start=ints(planned),
        token_ids=state.token_ids,
        num_known=state.num_known,
        block_tables=state.block_tables,
        block_size=BLOCK_SIZE,
        input_ids=flat.input_ids,
        positions=flat.positions,
        slot_mapping=flat.slots,
        seq_lens=flat.seq_lens,
        **options,
    )
    return flat


def header(rows: list[int], num_drafts: list[int]) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    """(first, row of each position, first as numbers), with a sequence of padding behind."""
    first = [0]
    for count in num_drafts:
        first.append(first[-1] + count + 1)
    per_position = [row for row, count in zip(rows, num_drafts, strict=True) for _ in range(count + 1)]
    return ints([*first, first[-1]]), ints([*per_position, -1]), first


@pytest.mark.parametrize(
    "tree", [CHAIN, TREE, DraftTree.chain(1), DraftTree((-1, -1, -1))], ids=["chain", "tree", "one", "siblings"]
)
@pytest.mark.parametrize("seed", range(per_device(times(1, 15), 15)))
def test_the_path_that_holds_is_kept_and_the_token_at_its_end(tree: DraftTree, seed: int) -> None:
    """Of each request: how many of the tree's nodes it verifies, their drafts, and how many of these are real."""
    num_levels, rng, size = len(tree.levels), random.Random(seed), len(tree.parents)
    step = [(size, [rng.randrange(2) for _ in range(size)], size) for _ in range(2)]
    step += [(rng.randint(0, size), [rng.randrange(3) for _ in range(size)], rng.randint(0, size)) for _ in range(3)]
    fields, num_before = 3 + 2 * num_levels, 3  # flat tokens of a prompt lie before
    rows = rng.sample(range(6), len(step))
    state = Rows(6, seed)
    num_drafts, real = [count for count, _, _ in step], [0] * 6
    first, of_row, begins = header(rows, num_drafts)
    sampled: list[int] = []
    told: list[tuple[list[int], list[int]]] = []
    for row, (count, drafts, num_real) in zip(rows, step, strict=True):
        known = state.known[row]
        state.token_ids[row, known : known + count] = ints(drafts[:count])
        tokens = [rng.randrange(2) for _ in range(count + 1)]
        path = tree.walk(tokens, drafts[: min(count, num_real)])
        sampled += tokens
        real[row] = num_real
        ids = [tokens[0], *(tokens[1 + node] for node in path)]
        told.append(([len(ids), min(num_real, count), *ids], path))
    num_real = ints(real)
    last, last_token = ints([[-5] * (len(rows) + 1)] * 2)
    path = torch.full((len(rows) + 1, num_levels), -7, dtype=torch.int32, device=DEVICE)
    places = None if tree is CHAIN else torch.arange(40, device=DEVICE)  # which are in order then
    outputs = torch.full((3, 6 * fields), -9, dtype=torch.int32, device=DEVICE)
    logit_index = ints([num_before + i for i in range(len(sampled))] + [0])
    accept(
        first=first,
        rows=of_row,
        logit_index=logit_index,
        sampled=ints([*sampled, 0], torch.int64),
        token_ids=state.token_ids,
        num_known=state.num_known,
        num_real=num_real,
        parents=tree.tensors(DEVICE).parents,
        last=last,
        last_token=last_token,
        path=path,
        places=places,
        outputs=outputs,
        output_row=ints([1]),
    )
    expected_places = list(range(40))
    for index, (row, (entry, nodes)) in enumerate(zip(rows, told, strict=True)):
        known, newest = state.known[row], num_before + begins[index]
        assert int(state.num_known[row]) == known + entry[0]
        assert state.token_ids[row, : known + entry[0]].tolist() == state.ids[row][:known] + entry[2:]
        at = outputs[1, index * fields :][:fields].tolist()
        assert at[: len(entry)] == entry
        assert at[3 + num_levels :][: len(nodes)] == nodes
        assert path[index].tolist() == nodes + [-1] * (num_levels - len(nodes))
        assert int(last[index]) == begins[index] + (1 + nodes[-1] if nodes else 0)
        assert int(last_token[index]) == newest + len(nodes)
        for level, node in enumerate(nodes):
            expected_places[newest + 1 + level] = newest + 1 + node
        assert int(num_real[row]) == 0
    assert places is None or places.tolist() == expected_places
    assert path[-1].tolist() == [-1] * num_levels
    others = [row for row in range(6) if row not in rows]
    assert state.num_known[others].tolist() == [state.known[row] for row in others]
    assert (outputs[[0, 2]] == -9).all() and (outputs[1, len(rows) * fields :] == -9).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kv_of_what_holds_goes_where_its_tokens_stand(dtype: torch.dtype) -> None:
    state, rows = Rows(4, 9), [2, -1, 0, 3]
    paths = [[1, 4, 6], [-1, -1, -1], [0, 3, -1], [0, 1, 2]]
    num_blocks = 110
    caches = [
        tuple(torch.randn(num_blocks, BLOCK_SIZE, heads, size, device=DEVICE).to(dtype) for _ in range(2))
        for heads, size in ((2, 16), (1, 6), (40, 32))
    ]
    before = [[tensor.flatten(0, 1).clone() for tensor in cache] for cache in caches]
    known = [state.known[row] + sum(node >= 0 for node in path) + 1 for row, path in zip(rows, paths, strict=True)]
    for row, count in zip(rows, known, strict=True):
        if row >= 0:
            state.num_known[row] = count
    for row in (0, 2, 3):  # no two tokens in one slot
        state.tables[row] = [row * 20 + i for i in range(MAX_LEN // BLOCK_SIZE)]
    state.block_tables = ints(state.tables)
    mover = KVMover(caches)  # type: ignore[arg-type]
    mover.move(ints(paths), ints([0, 1, 2, 3, 4]), ints([*rows, -1]), state.num_known, state.block_tables)
    for cache, old in zip(caches, before, strict=True):
        for tensor, expected in zip(cache, old, strict=True):
            untouched = expected.clone()
            for row, path in zip(rows, paths, strict=True):
                for place, node in enumerate(path):
                    if node >= 0:
                        source, target = (state.slot(row, state.known[row] + i) for i in (node, place))
                        expected[target] = untouched[source]
            assert torch.equal(tensor.flatten(0, 1), expected)
    assert move_cost(2, 100) == (400, 0)


@pytest.mark.parametrize(("num_tokens", "offset", "id_shift", "least"), [(2, -2, 0, 1), (1, 0, 0, 2), (1, 2, 1, 4)])
def test_a_drafter_gets_the_newest_tokens_of_the_requests_that_ask(
    num_tokens: int, offset: int, id_shift: int, least: int
) -> None:
    state, rows, asked = Rows(5, 3), [4, -1, 0, 2], [4, 4, 1, 3]
    ids, positions, slots, lens = draft(state, rows, asked, num_tokens, offset=offset, id_shift=id_shift, least=least)
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


def test_a_request_that_asks_for_no_drafts_has_the_token_before_the_newest_followed() -> None:
    """The block of the newest one is not theirs yet."""
    state, rows, asked = Rows(5, 3), [4, -1, 0, 2], [4, 0, 0, 1]
    ids, positions, slots, lens = draft(state, rows, asked, num_tokens=2, offset=-2, follows=True)
    expected: list[tuple[int, int, int]] = []
    for row, count in zip(rows, asked, strict=True):
        for at in (state.known[row] - 2, state.known[row] - 1):
            has_it = row >= 0 and (count > 0 or at == state.known[row] - 2)
            expected.append((state.ids[row][at], at, state.slot(row, at)) if has_it else (0, 0, -1))
    assert list(zip(ids.tolist(), positions.tolist(), slots.tolist(), strict=True)) == expected
    assert lens.tolist() == [0 if row < 0 else state.known[row] for row in rows]


def test_nodes_side_by_side_have_one_position_and_slots_of_their_own() -> None:
    state, rows, asked = Rows(5, 3), [4, 0, 2], [4, 3, 7]
    ids, positions, slots, lens = draft(state, rows, asked, num_tokens=2, offset=1, id_shift=1, least=4, depth=-1)
    expected: list[tuple[int, int, int]] = []
    for row, count in zip(rows, asked, strict=True):
        known = state.known[row]
        expected += [
            (state.ids[row][known + 2 + i], known - 1, state.slot(row, known + 1 + i)) if count >= 4 else (0, 0, -1)
            for i in range(2)
        ]
    assert list(zip(ids.tolist(), positions.tolist(), slots.tolist(), strict=True)) == expected
    assert lens.tolist() == [state.known[4] + 3, 0, state.known[2] + 3]


def test_positions_of_a_step_are_those_in_the_tree_and_slots_are_in_order() -> None:
    state, rows, planned = Rows(4, 8), [1, 3, -1], [30, 1, 0]
    starts, depths = [0, 4, 7, 9], TREE.tensors(DEVICE).depths
    ids, positions, slots, _ = step(state, rows, starts, planned, depths=depths, num_trees=1)
    newest = state.known[1] - 1
    assert positions.tolist() == [newest, newest + 1, newest + 1, newest + 2, 1, 2, 3, 0, 0]
    assert slots.tolist()[:4] == [state.slot(1, newest + i) for i in range(4)]
    assert slots.tolist()[4:] == [*(state.slot(3, 1 + i) for i in range(3)), -1, -1]
    assert ids.tolist()[:4] == state.ids[1][newest : newest + 4]


def test_pushed_drafts_stand_after_the_known_tokens_of_requests_that_ask_for_so_many() -> None:
    state, rows, asked = Rows(5, 4), [4, -1, 0, 2], [4, 4, 0, 2]
    num_real = ints([9] * 5)
    of_one_token = ints([11, 12, 13, 14], torch.int64)
    push(ints(rows), ints(asked), of_one_token, state.token_ids, state.num_known, num_real, index=1)
    expected = [list(ids) for ids in state.ids]
    expected[4][state.known[4] + 1], expected[2][state.known[2] + 1] = 11, 14
    assert state.token_ids.tolist() == expected
    assert num_real.tolist() == [9, 9, 2, 9, 2]
    push(ints(rows), ints(asked), ints([[1, 2, 3]] * 4), state.token_ids, state.num_known, num_real, index=0)
    expected[4][state.known[4] : state.known[4] + 3] = [1, 2, 3]
    expected[2][state.known[2] : state.known[2] + 2] = [1, 2]
    assert state.token_ids.tolist() == expected
    assert num_real.tolist() == [9, 9, 2, 9, 3]


def test_the_following_id_of_every_token_of_a_flat_batch() -> None:
    state, length = Rows(3, 5), 30
    starts, lens = [0, 3, 5, 5 + length], [8, 0, length + 1]
    following, positions = (torch.full((starts[-1],), 77, device=DEVICE) for _ in range(2))
    following_ids(ints([2, -1, 0]), ints(starts), ints(lens), state.token_ids, following, positions)
    expected = [5, 6, 7, 0, 0, *range(1, length + 1)]
    assert positions.tolist() == expected
    ids = [state.ids[2][i + 1] for i in (5, 6, 7)] + [0, 0] + [state.ids[0][i + 1] for i in range(1, length + 1)]
    assert following.tolist() == ids


@pytest.mark.parametrize("tree", [CHAIN, TREE])
def test_proposals_name_the_logits_that_drafts_were_drawn_from(tree: DraftTree) -> None:
    state, rows, num_drafts, num_drawn = Rows(5, 6), [3, 1, 4], [2, 0, 4], [9, 9, 9, 1, 3]
    first, of_row, begins = header(rows, num_drafts)
    tensors, width = tree.tensors(DEVICE), tree.most_siblings
    siblings = torch.full((begins[-1], width), -7, dtype=torch.int32, device=DEVICE)
    draft_rows = torch.full((begins[-1],), -7, dtype=torch.int32, device=DEVICE)
    draft_proposals(
        first=first,
        rows=of_row,
        token_ids=state.token_ids,
        num_known=state.num_known,
        num_drawn=ints(num_drawn),
        children=tensors.children,
        kept=tensors.kept,
        siblings=siblings,
        draft_rows=draft_rows,
        num_kept=len(tree.inner),
    )
    inner = [place for place, children in enumerate(tree.children) if children]
    at = 0
    for row, count in zip(rows, num_drafts, strict=True):
        for place in range(count + 1):
            drawn = [node for node in tree.children[place] if node < min(count, num_drawn[row])]
            ids = [state.ids[row][state.known[row] + node] for node in drawn]
            assert siblings[at].tolist() == ids + [-1] * (width - len(ids))
            assert int(draft_rows[at]) == (row * len(inner) + inner.index(place) if drawn else -1)
            at += 1


def test_a_coin_decides_which_drafts_hold_where_that_is_asked_for() -> None:
    num_rows = per_device(12, 200)
    state = Rows(num_rows, 7)
    first, of_row, begins = header(list(range(num_rows)), [MAX_DRAFTS] * num_rows)
    sampled = ints([6] * begins[-1], torch.int64)
    again, children = sampled.clone(), CHAIN.tensors(DEVICE).children
    for each in (sampled, again):
        synthetic(first, of_row, each, state.token_ids, state.num_known, children, rate=0.8)
    assert torch.equal(sampled, again)
    tokens = sampled.view(num_rows, MAX_DRAFTS + 1).tolist()
    drafts = [state.ids[row][state.known[row] :][:MAX_DRAFTS] for row in range(num_rows)]
    held = [a == b for mine, theirs in zip(tokens, drafts, strict=True) for a, b in zip(mine, theirs, strict=False)]
    least, most = per_device((0.6, 0.97), (0.74, 0.86))  # of the coins' 0.8, in three standard deviations and more
    assert least < sum(held) / len(held) < most
    assert {mine[-1] for mine in tokens} == {6}


def test_a_flat_batch_of_known_tokens_ends_with_the_newest() -> None:
    state, rows, planned = Rows(4, 8), [1, 3, -1], [0, 30, 0]
    ids, positions, slots, seq_lens = step(state, rows, [0, 3, 5, 7], planned, all_known=True)
    expected = [*range(3), *range(state.known[3] - 2, state.known[3])]
    assert positions[:5].tolist() == expected
    assert ids[:5].tolist() == [state.ids[row][p] for row, p in zip([1, 1, 1, 3, 3], expected, strict=True)]
    assert slots.tolist()[5:] == [-1, -1]
    assert seq_lens.tolist() == [3, state.known[3], 0]


def test_cost_counts_ids_in_and_out() -> None:
    assert verify_drafts.cost(1, 0) == (8 + 4 + 8 + 16, 0)
    assert verify_drafts.cost(2, 4) == (2 * (5 * 20 + 16), 0)
    assert rows_of_drafts.cost(2, 4) == (2 * 4 * 12, 0)
