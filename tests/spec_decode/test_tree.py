"""A tree of drafts: who comes after whom, who sees whom, and which of them hold."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from teachllm.spec_decode.tree import DraftTree

# 0 and 1 after the newest token; 2 and 3 after 0, 4 after 1; 5 after 2
PATHS = [(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0)]
TREE = DraftTree.of(PATHS)


def test_a_tree_is_read_from_its_paths() -> None:
    assert TREE.parents == (-1, -1, 0, 0, 1, 2)
    assert TREE.depths == (1, 1, 2, 2, 2, 3)
    assert TREE.children == ((0, 1), (2, 3), (4,), (5,), (), (), ())
    assert TREE.levels == ((0, 1), (2, 3, 4), (5,))
    assert TREE.most_siblings == 2 and not TREE.is_chain
    assert [TREE.num_levels(num_nodes) for num_nodes in range(7)] == [0, 1, 1, 2, 2, 2, 3]


def test_a_node_sees_the_newest_token_its_ancestors_and_itself() -> None:
    for node, path in enumerate(PATHS):
        ancestors = [other for other, shorter in enumerate(PATHS) if path[: len(shorter)] == shorter]
        assert TREE.sees[node + 1] == 1 + sum(1 << (other + 1) for other in ancestors)
    assert TREE.sees[0] == 1


@pytest.mark.parametrize(
    ("sampled", "drafts", "held"),
    [
        ([4], [], 0),
        ([4, 5], [4], 1),
        ([4, 5], [5], 0),
        ([4, 5, 6], [4, 5], 2),
        ([4, 5, 6], [4, 9], 1),
        ([4, 5, 6], [9, 5], 0),  # after one that fell, none holds
        ([7, 7, 7], [7, 7], 2),
    ],
)
def test_of_a_chain_drafts_hold_up_to_the_first_that_is_not_what_its_position_samples(
    sampled: list[int], drafts: list[int], held: int
) -> None:
    chain = DraftTree.chain(4)
    assert chain.is_chain and chain.walk(sampled, drafts) == list(range(held))


@pytest.mark.parametrize(
    ("sampled", "drafts", "path"),
    [
        # what the newest token and each node sample; what was drafted
        ([10, 20, 0, 30, 0, 0, 40], [10, 11, 20, 21, 22, 30], [0, 2, 5]),
        ([11, 0, 22, 0, 0, 40, 0], [10, 11, 20, 21, 22, 30], [1, 4]),
        ([10, 21, 0, 0, 40, 0, 0], [10, 11, 20, 21, 22, 30], [0, 3]),
        ([12, 20, 22, 0, 0, 0, 0], [10, 11, 20, 21, 22, 30], []),
        ([10, 22, 22, 0, 0, 0, 0], [10, 11, 20, 21, 22, 30], [0]),  # 22 was drafted, after another token
        ([10, 20, 0, 30], [10, 11, 20], [0, 2]),  # of a tree of which only the first nodes were drafted
        ([10, 20], [10], [0]),
    ],
)
def test_of_a_tree_the_path_holds_on_which_each_draft_is_what_the_position_before_it_samples(
    sampled: list[int], drafts: list[int], path: list[int]
) -> None:
    assert TREE.walk(sampled, drafts) == path


@given(
    sampled=st.lists(st.integers(0, 2), min_size=7, max_size=7),
    drafts=st.lists(st.integers(0, 2), max_size=6),
)
def test_what_holds_is_a_path_that_cannot_go_on(sampled: list[int], drafts: list[int]) -> None:
    path = TREE.walk(sampled[: len(drafts) + 1], drafts)
    before = -1
    for node in path:
        assert TREE.parents[node] == before and drafts[node] == sampled[before + 1]
        before = node
    following = [node for node in range(len(drafts)) if TREE.parents[node] == before]
    assert all(drafts[node] != sampled[before + 1] for node in following)
