"""Exercises: a piece that the reader writes, a contract that judges it, and the engine that runs with it.

A contract is a function that takes a piece, tries it on cases from the smallest up, and raises `Wrong` at the first
that does not hold. The tests of the engine call the same functions with the engine's own pieces. A piece that keeps its
contract is put into an engine through its constructor, and that must say the same words as with its own.

Whatever a piece does, `check` comes back with one that can be used: the reader's, or else the engine's own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

from teachllm.engine.overrides import EngineOverrides
from teachllm_lessons.guard import Ran, Seconds, TooLong, run_guarded
from teachllm_lessons.watch import NoProgress, Watch

LIMIT = Seconds(computing=30.0, waiting=120.0)
LONGEST = Seconds(computing=300.0, waiting=300.0)
_SLOWER = 20  # times what the engine's own takes here and now, a piece may take, up to LONGEST
_MARKS = {"right": "✓", "wrong": "✗", "unwritten": "…", "unjudged": "?"}
VERDICT_TYPE = "application/vnd.teachllm.verdict+json"  # for `teachllm lesson check`, beside the text


class SlowMachine(Exception):
    """The engine's own piece was not done in time either, so nothing can be said of the reader's."""


class Wrong(AssertionError):
    """A piece does something else than its contract says: the smallest case that shows it, in a few lines."""


def require(holds: bool, message: str) -> None:
    """Raises `Wrong` with the message unless it holds."""
    if not holds:
        raise Wrong(message)


@dataclass(frozen=True)
class Exercise:
    """One piece to write.

    Attributes:
        lesson: the number of its lesson.
        name: of what is written, as the reader's code calls it.
        contract: tries a piece on its own; returns how many cases held.
        live: runs an engine with it; returns what that did, in a sentence. Raises `Wrong` like the contract.
        reference: the engine's own piece, or the lesson's where the engine has none of the kind.
        hints: from a nudge to nearly all of it.
        whose: whose the reference is.
    """

    lesson: str
    name: str
    contract: Callable[[Any], int]
    live: Callable[[Any], str]
    reference: Any
    hints: tuple[str, str, str]
    whose: str = "the engine's"

    def hint(self, depth: int = 1) -> Hint:
        """A hint: 1 is a nudge, 2 says how, 3 nearly writes it."""
        return Hint(depth, self.hints[min(max(depth, 1), 3) - 1])


@dataclass(frozen=True)
class Hint:
    depth: int
    text: str

    def _repr_markdown_(self) -> str:
        return f"**Hint {self.depth} of 3.** {self.text}"

    def __repr__(self) -> str:
        return f"hint {self.depth} of 3: {self.text}"


@dataclass(frozen=True)
class Checked:
    """The verdict on a piece.

    Attributes:
        piece: what the rest of the notebook can use: the reader's if it is right, else the engine's own.
        verdict: "right": it keeps its contract and the engine runs with it; "unwritten": it is the empty frame; or
            "unjudged": even the engine's own takes too long here.
        message: what was found, in a few lines.
    """

    exercise: Exercise
    piece: Any
    verdict: Literal["right", "wrong", "unwritten", "unjudged"]
    message: str

    @property
    def is_right(self) -> bool:
        return self.verdict == "right"

    def _repr_mimebundle_(self, **_: Any) -> dict[str, Any]:
        told = {"lesson": self.exercise.lesson, "exercise": self.exercise.name, "verdict": self.verdict}
        return {
            "text/plain": repr(self),
            "text/markdown": self._markdown(),
            VERDICT_TYPE: told | {"says": self.message},
        }

    def _markdown(self) -> str:
        between = ":" if self.verdict == "wrong" else ""
        return f"{_MARKS[self.verdict]} **`{self.exercise.name}`**{between} {self.message}"

    def __repr__(self) -> str:
        return self._markdown().replace("**", "").replace("`", "")


def check(exercise: Exercise, piece: Any, limit: Seconds = LIMIT, longest: Seconds = LONGEST) -> Checked:
    """Judges a piece, and runs the engine with it if it may.

    Args:
        limit: what the contract may take, and the engine as much; more, where the engine's own piece is slow as well.
        longest: what each of them, and the same with the engine's own piece, may take then.
    """
    problem, cases, said = _judge(exercise, piece, limit, longest)
    if problem is None:
        message = f"keeps its contract in {cases} cases. {said}"
        return Checked(exercise, piece, "right", message)
    if isinstance(problem, NotImplementedError):
        problem, cases, said = _judge(exercise, exercise.reference, limit, longest)
        found = f": it holds in {cases} cases. {said}" if problem is None else f", which {said}"
        message = f"is not written yet, so {exercise.whose} own takes its place{found}"
        return Checked(exercise, exercise.reference, "unwritten", message)
    goes_on = f"The notebook goes on with {exercise.whose} own piece."
    if isinstance(problem, SlowMachine):
        return Checked(exercise, exercise.reference, "unjudged", f"{said}\n\n{goes_on}")
    hint = f"`{exercise.name.upper()}.hint(1)` may help."
    return Checked(exercise, exercise.reference, "wrong", f"{said}\n\n{goes_on} {hint}")


def _judge(exercise: Exercise, piece: Any, limit: Seconds, longest: Seconds) -> tuple[BaseException | None, int, str]:
    """(what is wrong, None if nothing is; cases of the contract; a sentence)."""
    tried = _run(exercise.contract, piece, exercise.reference, limit, longest)
    if tried.error is not None:
        return tried.error, 0, explain(tried)
    ran = _run(exercise.live, piece, exercise.reference, limit, longest)
    if ran.error is not None:
        return ran.error, 0, f"keeps its contract, and fails in the engine: {explain(ran)}"
    return None, tried.value, ran.value


def _run(trial: Callable[[Any], Any], piece: Any, reference: Any, limit: Seconds, longest: Seconds) -> Ran:
    """Try a piece; on a slow machine once more, with as much time as it needs there."""
    ran = run_guarded(lambda: trial(piece), limit)
    if not isinstance(ran.error, TooLong):
        return ran
    usual = run_guarded(lambda: trial(reference), longest)
    if isinstance(usual.error, TooLong):
        return replace(usual, error=SlowMachine())
    assert usual.took is not None
    allowed = usual.took.times(_SLOWER).or_less(longest).or_more(limit)
    return ran if allowed == limit else run_guarded(lambda: trial(piece), allowed)


def explain(ran: Ran) -> str:
    """Return what went wrong, for the one who wrote it."""
    error = ran.error
    at = f" ({ran.where})" if ran.where else ""
    if isinstance(error, Wrong):
        return str(error)
    if isinstance(error, TooLong) and ran.took is not None:
        took = f"{ran.took.waiting:.0f} seconds ({ran.took.computing:.0f} processor seconds)"
        return f"was still running after {took}{at}: does a loop of it never end?"
    if isinstance(error, SlowMachine) and ran.took is not None:
        took = f"{ran.took.waiting:.0f} seconds"
        return f"cannot be judged now: the reference was not done after {took} either. Is the machine busy? Try again."
    if isinstance(error, NoProgress):
        return f"lets no request go on: {error}"
    if isinstance(error, SystemExit):
        return f"ended the program{at}: a piece returns, it does not exit"
    return f"raised {type(error).__name__}: {error}{at}"


def add_some(watch: Watch) -> None:
    """Requests that meet most of what an engine does: a shared beginning, a long prompt, short ones."""
    shared = "A KV cache keeps the keys and values of the tokens that were computed before. " * 2
    watch.add("A", shared + "Why keys?", 12)
    watch.add("B", shared + "Why values?", 8)
    watch.add("C", "What is a block table?", 20)
    watch.add("D", "Explain paged attention, continuous batching and chunked prefill to me. " * 3, 6)


_SETTINGS = {"num_gpu_blocks_override": 48, "max_model_len": 256, "max_num_batched_tokens": 48, "max_num_seqs": 4}


_OWN_WORDS: dict[str, dict[str, list[int]]] = {}  # by settings: an engine takes a second to load


def own_words(**settings: Any) -> dict[str, list[int]]:
    """Return what an engine without overrides answers to `add_some`."""
    if (known := _OWN_WORDS.get(repr(settings))) is None:
        with Watch(**(_SETTINGS | settings)) as watch:
            add_some(watch)
            known = _OWN_WORDS[repr(settings)] = watch.run().all_tokens
    return known


def run_with(overrides: EngineOverrides, **settings: Any) -> Watch:
    """Run an engine with these overrides on `add_some`, and on the same a second time; then close it.

    Raises:
        Wrong: it says other words than with its own pieces, or keeps blocks of requests that have ended.
    """
    with Watch(overrides=overrides, **(_SETTINGS | settings)) as watch:
        add_some(watch)
        watch.run()
        first = watch.all_tokens
        add_some(watch)
        watch.run()
        for name, expected in own_words(**settings).items():
            for turn, found in (("", first[name]), (" the second time", watch.tokens(name))):
                require(
                    found == expected,
                    f"changes what the engine says: request {name}{turn} should go on with ids {expected[:6]} ..., and "
                    f"went on with {found[:6]} ...",
                )
        state = watch.state
        leaked = [number for number, block in enumerate(state.blocks) if block.users]
        require(not leaked, f"leaks: all requests have ended, and blocks {leaked[:8]} are still in use")
        pool = watch.engine.core.scheduler.kv.pool
        missing = len(pool) - pool.num_free_blocks
        require(not missing, f"leaks: all requests have ended, and {missing} of {len(pool)} blocks never came back")
    return watch
