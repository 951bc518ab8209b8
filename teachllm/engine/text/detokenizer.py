"""Text out of token ids while they arrive, and stop strings found in it (lesson 00).

A token is not a piece of text: a character can span tokens, and some decoders drop the space of whichever token
comes first. So the newest tokens are always decoded together with a few before them, and only what can no longer
change is shown:

    ids    ... seen ... | window: decoded at every step         |
    text   ... settled, never touched again ... | held: half a character, or a possible stop string |

The window restarts wherever the text ends in a whole character, so a token costs the same however long the output.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from teachllm.engine.text.stop_strings import stop_strings
from teachllm.engine.text.tokenizer import MAX_TOKENS_PER_CHARACTER, REPLACEMENT, Tokenizer
from teachllm.sampling_params import SamplingParams

_NUM_CONTEXT_TOKENS = 6  # prompt tokens decoded along, so that the output's first token keeps its leading space
_MAX_WINDOW = 32  # tokens without a whole character at their end before the window is cut inside


@dataclass(slots=True, frozen=True)
class StopMatch:
    """A stop string ended the output.

    Attributes:
        stop: which one.
        num_tokens_used: how many of the ids given to `append` belong to the output; the rest are dropped.
    """

    stop: str
    num_tokens_used: int


class IncrementalDetokenizer:
    """The text of one completion.

    What is shown only ever grows, and after `finish` it is what decoding all ids at once gives. (One exception: a
    tokenizer with byte fallback blanks a whole run of byte tokens if the run turns out invalid, while here the valid
    characters in it have already been shown and stay.)

    Args:
        tokenizer: turns ids into text.
        prompt_token_ids: its last few tokens are the context of the first output token.
        params: stop strings, `min_tokens`, and how to treat special tokens.

    Attributes:
        added: what each id of the last `append` added to the text, before a stop string was cut from it: nothing for
            a character's tokens but the last one, and None for an id that is no part of the text.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], params: SamplingParams) -> None:
        self._tokenizer = tokenizer
        self._stops = stop_strings(params.stop_strings) if params.stop_strings else None
        self._stop_state = 0
        self._include_stop = params.include_stop_str_in_output
        self._min_tokens = params.min_tokens
        self._skip_special = params.skip_special_tokens
        self._enabled = params.detokenize
        self._num_tokens = 0
        self.added: list[str | None] = []
        self._settled = ""  # all text that can no longer change
        self._num_shown = 0  # characters of it that are shown: the rest could become a stop string
        # Ids of the window, and how many characters of its text are settled (or belong to the prompt).
        self._window, self._num_context, self._num_settled = list[int](), 0, 0
        self._prompt_rest = ""  # what the prompt ends with that is no character, unless the output completes it
        if self._enabled:
            self._begin([i for i in prompt_token_ids[-4 * _NUM_CONTEXT_TOKENS :] if self._has_text(i)])

    @property
    def text(self) -> str:
        """Return the text to show."""
        return self._settled[: self._num_shown]

    @property
    def is_whole(self) -> bool:
        """Return whether the newest text ends in a whole character."""
        return self._num_settled == len(self._decode(self._window))

    def append(self, token_ids: Sequence[int], finished_by_token: bool = False) -> StopMatch | None:
        """Take newly sampled ids.

        Args:
            finished_by_token: the last id ended the output; its text is not shown (unless the request includes
                stop strings in its output).

        Returns:
            The stop string that ended the output, if one did. Nothing may be appended after that.
        """
        self.added = [None] * len(token_ids)
        if not self._enabled:
            return None
        if finished_by_token and not self._include_stop:
            token_ids = token_ids[:-1]
        for count, token_id in enumerate(token_ids, start=1):
            self._num_tokens += 1
            if not self._has_text(token_id):
                continue
            start = len(self._settled)
            self._settle(token_id)
            self.added[count - 1] = self._settled[start:]
            if len(self._settled) == start:
                continue
            stop = self._find_stop(start)
            if stop is not None:
                return StopMatch(stop, count)
        self._num_shown = len(self._settled) - self._num_held()
        return None

    def finish(self) -> str:
        """Show what was held back: no more tokens will come. After a stop string there is nothing left to show.

        Returns:
            The text that the last tokens, which are no whole character, have added.
        """
        if not self._enabled:
            return ""
        rest = self._without_prompt(self._decode(self._window)[self._num_settled :])
        self._settled += rest
        self._window, self._num_settled = [], 0
        self._num_shown = len(self._settled)
        return rest

    def _settle(self, token_id: int) -> None:
        """Add a token to the window and move text that can no longer change into `_settled`."""
        self._window.append(token_id)
        text = self._decode(self._window)
        whole = text.rstrip(REPLACEMENT)  # replacement characters at the end may be a character in the making
        if len(whole) > self._num_settled:
            self._settled += self._without_prompt(whole[self._num_settled :])
            self._num_settled = len(whole)
            if len(whole) == len(text):
                self._restart_window()
        elif len(self._window) > _MAX_WINDOW:
            self._cut_window(text)

    def _begin(self, ids: list[int]) -> None:
        """Take the prompt's last ids as context: from where a character begins to where the last whole one ends.

        Half a character at the front would do more harm than it seems: a decoder with byte fallback blanks the whole
        run of byte tokens that it stands in. Half a one at the end is shown as soon as the output completes it.
        """
        start = max(len(ids) - _NUM_CONTEXT_TOKENS, 0)
        literal = self._tokenizer.replacement_ids
        starts = (first for first in range(start, -1, -1) if self._begins_whole(ids[first:], literal))
        self._window = ids[next(starts, len(ids)) :]
        text = self._decode(self._window)
        self._num_settled = len(text.rstrip(REPLACEMENT))
        self._prompt_rest = text[self._num_settled :]
        ends = (len(self._window) - cut for cut in range(min(MAX_TOKENS_PER_CHARACTER, len(self._window) + 1)))
        whole = (end for end in ends if not self._decode(self._window[:end]).endswith(REPLACEMENT))
        self._num_context = next(whole, len(self._window))  # without any, these are bytes that are no character

    def _begins_whole(self, ids: list[int], literal: list[int]) -> bool:
        """Return whether the first character is not cut off in front; `literal` are U+FFFD's own ids."""
        if literal and ids[: len(literal)] == literal:
            return True
        counts = range(1, MAX_TOKENS_PER_CHARACTER + 1)
        return any(not self._decode(ids[:count]).startswith(REPLACEMENT) for count in counts)

    def _restart_window(self) -> None:
        """Keep, once everything is settled, only the last added token or tokens as context for the next."""
        self._window = self._window[self._num_context :]
        self._num_context = len(self._window)
        self._num_settled = len(self._decode(self._window))

    def _without_prompt(self, text: str) -> str:
        """Return the output's first text without what is the prompt's in it."""
        if not self._prompt_rest:
            return text
        length = min(len(self._prompt_rest), len(text) - len(text.lstrip(REPLACEMENT)))
        self._prompt_rest = self._prompt_rest[length:] if length == len(text) else ""
        return text[length:]

    def _cut_window(self, text: str) -> None:
        """Settle the front of a window of invalid bytes, so that not even garbage is decoded over and over."""
        for cut in range(len(self._window) - MAX_TOKENS_PER_CHARACTER, MAX_TOKENS_PER_CHARACTER, -1):
            front, back = self._window[:cut], self._window[cut:]
            front_text = self._decode(front)
            # Equal only if no character lies across the cut.
            if len(front_text) >= self._num_settled and front_text + self._decode(back) == text:
                self._settled += self._without_prompt(front_text[self._num_settled :])
                self._window, self._num_settled, self._num_context = back, 0, 0
                return

    def _find_stop(self, start: int) -> str | None:
        """Look for stop strings that end after `start` in the text; cut the text at the stop string that ends first.

        The end decides and not the start, so that the result does not depend on how tokens cut the text.
        """
        if self._stops is None:
            return None
        looks = self._num_tokens >= self._min_tokens
        self._stop_state, found = self._stops.read(self._stop_state, self._settled[start:], looks)
        if found is None:
            return None
        end = start + found.end
        self._settled = self._settled[: end if self._include_stop else end - len(found.stop)]
        self._num_shown = len(self._settled)
        self._window, self._num_settled = [], 0
        return found.stop

    def _num_held(self) -> int:
        """Return how many characters at the end could be the beginning of a stop string."""
        return 0 if self._include_stop or self._stops is None else self._stops.num_held(self._stop_state)

    def _has_text(self, token_id: int) -> bool:
        return not (self._skip_special and token_id in self._tokenizer.special_ids)

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)
