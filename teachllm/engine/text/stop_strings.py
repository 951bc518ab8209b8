"""Stop strings, looked for in a text that grows: each character is read once, however many strings there are.

The strings are laid out as a tree of their beginnings. A state is the node for the longest beginning that the text ends
with; where no string goes on with the next character, the state falls back to the next shorter beginning that the text
ends with, which is known beforehand (Aho and Corasick, 1975, "Efficient string matching").

    "stop", "top it"      s ─ t ─ o ─ p        reading "stop i": after "stop" the state falls back to "top",
                          t ─ o ─ p ─ _ ─ i ─ t      from where " i" goes on
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakValueDictionary

_live: WeakValueDictionary[tuple[str, ...], StopStrings] = WeakValueDictionary()


@dataclass(frozen=True, slots=True)
class FoundStop:
    """A stop string in a piece of text.

    Attributes:
        end: index in the piece behind its last character.
    """

    stop: str
    end: int


class StopStrings:
    """The tree of some strings; any number of texts can be read with it."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._children: list[dict[str, int]] = [{}]
        self._longest: list[str | None] = [None]  # of the strings that the text ends with, at each node
        self._depth = [0]
        for stop in stops:
            node = 0
            for character in stop:
                node = self._children[node].get(character) or self._add_child(node, character)
            self._longest[node] = stop
        self._shorter = [0] * len(self._children)
        self._fall_back()

    def _add_child(self, node: int, character: str) -> int:
        child = len(self._children)
        self._children[node][character] = child
        self._children.append({})
        self._longest.append(None)
        self._depth.append(self._depth[node] + 1)
        return child

    def _fall_back(self) -> None:
        """Find for each node the next shorter beginning, shorter nodes first."""
        queue = deque(self._children[0].values())
        while queue:
            node = queue.popleft()
            shorter = self._shorter[node]
            self._longest[node] = self._longest[node] or self._longest[shorter]
            for character, child in self._children[node].items():
                self._shorter[child] = self._after(shorter, character)
                queue.append(child)

    def _after(self, node: int, character: str) -> int:
        while character not in self._children[node]:
            if node == 0:
                return 0
            node = self._shorter[node]
        return self._children[node][character]

    def read(self, state: int, piece: str, looks: bool) -> tuple[int, FoundStop | None]:
        """Read another piece of a text.

        Args:
            state: after the text before it; 0 at the beginning.
            looks: a string that ends in this piece is to be found.

        Returns:
            The state after it, and the string that ends first; of strings that end at one place, the longest.
        """
        for end, character in enumerate(piece, start=1):
            state = self._after(state, character)
            if looks and (stop := self._longest[state]) is not None:
                return state, FoundStop(stop, end)
        return state, None

    def num_held(self, state: int) -> int:
        """Return how many characters at the text's end could be the beginning of a string that goes on."""
        while not self._children[state] and state:
            state = self._shorter[state]
        return self._depth[state]


def stop_strings(stops: tuple[str, ...]) -> StopStrings:
    """Return the tree of these strings, which all live requests that have the same ones share."""
    found = _live.get(stops)
    if found is None:
        found = _live[stops] = StopStrings(stops)
    return found
