"""Stop strings are found where a plain search finds them, and each character of a text is read once."""

from __future__ import annotations

import gc

from hypothesis import example, given
from hypothesis import strategies as st

from teachllm.engine.text.stop_strings import FoundStop, StopStrings, stop_strings

LETTERS = st.text("ab", min_size=1, max_size=5)


def first_stop(text: str, start: int, stops: list[str]) -> FoundStop | None:
    """Search plainly for the string that ends first behind `start`; of several the longest."""
    for end in range(start + 1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            return FoundStop(max(ending, key=len), end - start)
    return None


@given(st.lists(LETTERS, min_size=1, max_size=6, unique=True), st.lists(st.text("abc", max_size=6), max_size=6))
@example(["stop", "top it"], ["a sto", "p it"])
@example(["aab", "a"], ["ba"])
def test_the_string_that_ends_first_is_found_however_the_text_is_cut(stops: list[str], pieces: list[str]) -> None:
    tree, state, text = StopStrings(stops), 0, ""
    for piece in pieces:
        state, found = tree.read(state, piece, looks=True)
        assert found == first_stop(text + piece, len(text), stops)
        if found is not None:
            return
        text += piece


@given(st.lists(LETTERS, min_size=1, max_size=6, unique=True), st.text("abc", max_size=20))
def test_what_is_held_back_could_still_become_a_stop_string(stops: list[str], text: str) -> None:
    tree = StopStrings(stops)
    state, found = tree.read(0, text, looks=False)
    beginnings = {stop[:length] for stop in stops for length in range(len(stop))}
    ends = (text[len(text) - count :] for count in range(len(text), -1, -1))
    assert found is None and tree.num_held(state) == len(next(end for end in ends if end in beginnings))


def test_a_character_costs_the_same_however_many_strings_there_are() -> None:
    class Counting(StopStrings):
        num_steps = 0

        def _after(self, node: int, character: str) -> int:
            self.num_steps += 1
            return super()._after(node, character)

    text = "a" * 1000
    for stops in (["ab"], ["a" * length + "b" for length in range(1, 120)]):
        tree = Counting(stops)
        built = tree.num_steps
        tree.read(0, text, looks=True)
        assert tree.num_steps - built == len(text)


def test_live_requests_with_the_same_strings_share_one_tree() -> None:
    one, other = stop_strings(("x", "y")), stop_strings(("x", "y"))
    assert one is other and stop_strings(("x",)) is not one
    del one, other
    gc.collect()
    assert stop_strings(("x", "y")).num_held(0) == 0
