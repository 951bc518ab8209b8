"""Lesson 10, speculative decoding: what is predicted and judged, and what a planted fault looks like."""

from __future__ import annotations

import random
import time
import warnings
from array import array
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any

import torch

from teachllm.engine.overrides import NO_OVERRIDES, EngineOverrides
from teachllm.sampling.sampler import Sampler
from teachllm.spec_decode.chi_square import chi_square_test
from teachllm.spec_decode.drafter import Drafter
from teachllm.spec_decode.ngram import NgramDrafter
from teachllm_kernels.speculation.rejection_reference import (
    Judge,
    draft_sample_reference,
    judge,
    rejection_sample_reference,
)
from teachllm_lessons.exercise import Exercise, Wrong, require
from teachllm_lessons.helpers.pictures.lesson_10 import draw_verification
from teachllm_lessons.picture import Picture
from teachllm_lessons.predict import Prediction
from teachllm_lessons.watch import Watch

QUESTION = "What is a KV cache?"
MODELS = {"draft_model": "teachlm-draft", "eagle": "teachlm-eagle", "medusa": "teachlm-medusa"}
_LOOKED_AT = 4  # of the last tokens, the engine looks for so many at most
_SETTINGS: dict[str, Any] = {"num_gpu_blocks_override": 96, "max_model_len": 256, "check_invariants": False}

Propose = Callable[[Sequence[int], int], Sequence[int]]

TOKENS_PER_STEP = Prediction(
    asks="Tokens per step",
    answer=3.36,
    because="A draft counts only if all before it do: the first with probability a = 0.8, the second with a², and one "
    "token of the model's own comes in any case. The mean is 1 + a + a² + a³ + a⁴ = (1 - a⁵) / (1 - a) = 3.36; the "
    "coins of these {num_steps} steps scatter around it. With k drafts it is (1 - aᵏ⁺¹) / (1 - a): eight drafts bring "
    "4.33 tokens, one more for twice as many. At a = 0.5 four bring 1.94, and no number of drafts ever reaches 2.",
    within=0.05,
    traps={
        4.2: "That lets every draft count for itself, but a draft after a rejected one is lost.",
        2.36: "Those are the accepted drafts. The model's own token comes on top, whatever was rejected.",
        3.2: "That lets every draft count for itself, and leaves out the model's own token.",
        1.41: "All four are accepted with probability 0.41, but a step may accept some of them.",
    },
)


class Noted:
    """A drafter that keeps what it has proposed, by the number of tokens that were known then."""

    def __init__(self, propose: Propose) -> None:
        self._propose = propose
        self.proposed: dict[int, list[int]] = {}

    def propose(self, token_ids: Sequence[int], num_tokens: int) -> list[int]:
        found = list(self._propose(token_ids, num_tokens))
        self.proposed[len(token_ids)] = found
        return found


def speculating(
    method: str, *, overrides: EngineOverrides = NO_OVERRIDES, drafter: Drafter | None = None, num: int = 4, **more: Any
) -> Watch:
    """A watched engine that always drafts `num` tokens, unless told otherwise."""
    config = {"method": method, "num_speculative_tokens": num, "adaptive": False}
    if method in MODELS:
        config["model"] = MODELS[method]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="output means nothing")  # who accepts by coins has been told
        return Watch(overrides=overrides, drafter=drafter, speculative_config=config | more, **_SETTINGS)


def said_again(watch: Watch) -> list[int]:
    """A conversation in which the answer has been given, and is asked for once more."""
    tokenizer = watch.engine.tokenizer
    assert tokenizer is not None
    answer = (
        "A KV cache keeps the attention keys and values of all tokens a request has already processed. Each new token "
        "then computes only its own key and value and reads the rest."
    )
    messages = [("user", QUESTION), ("assistant", answer), ("user", "Say that again.")]
    return tokenizer.apply_chat_template([{"role": role, "content": content} for role, content in messages])


def _scheduled(watch: Watch, name: str | None) -> list[dict[str, Any]]:
    """Return what a request got, step by step; None: all of them."""
    scheduled_requests = [
        scheduled for line in watch.trace.lines if line["event"] == "step" for scheduled in line["scheduled"]
    ]
    return [scheduled for scheduled in scheduled_requests if name in (None, scheduled["request_id"])]


def tokens_a_step(watch: Watch, name: str | None = None) -> float:
    """Count over all steps that gave any request, or the named one, tokens after its first."""
    decodes = [scheduled["num_sampled"] for scheduled in _scheduled(watch, name) if scheduled["phase"] == "decode"]
    return sum(decodes) / len(decodes)


def verification(watch: Watch, noted: Noted, name: str, which: int) -> Picture:
    """A step that verified drafts: what was known, drafted, found and gained.

    Args:
        which: of the steps with drafts of this request, from 0.
    """
    tokenizer = watch.engine.tokenizer
    assert tokenizer is not None
    scheduled_requests = _scheduled(watch, name)
    scheduled = [each for each in scheduled_requests if each.get("num_draft")][which]
    known, prompt_len = scheduled["start"] + 1, scheduled_requests[0]["start"] + scheduled_requests[0]["num_tokens"]
    drafts = noted.proposed[known][: scheduled["num_draft"]]
    newest = watch.tokens(name)[known - prompt_len - 1]

    def words(token_ids: Sequence[int]) -> list[str]:
        return [tokenizer.token_text(token_id).replace("\n", r"\n") for token_id in token_ids]

    return draw_verification(words([newest]), words(drafts), words(scheduled["token_ids"]), scheduled["num_accepted"])


# ---- Propose ---------------------------------------------------------------------------------------------------------


def contract_propose(piece: Propose) -> int:
    """Check what prompt lookup proposes, from one token up."""
    cases = 0
    for tokens, num, expected, so in (
        ([5], 4, [], "nothing stood before"),
        ([1, 2, 3], 4, [], "3 has not been said before: no guess is an answer, too"),
        ([1, 2, 1], 1, [2], "1 stood here before, and 2 followed"),
        ([1, 2, 1], 4, [2, 1], "no more than that is known behind it: fewer are welcome"),
        ([1, 2, 3, 4, 1], 2, [2, 3], "two were asked for"),
        ([1, 2, 1], 0, [], "none were asked for"),
        ([1, 1], 3, [1], "1 was followed by 1"),
        (
            [12, 13, 14, 15, 13, 40, 12, 13],
            2,
            [14, 15],
            "13 alone was followed by 40, but 12 13 by 14: the longer match",
        ),
    ):
        found = _proposed(piece, tokens, num)
        require(found == expected, f"propose({tokens}, {num}) is {found}: {so}; propose {expected}.")
        cases += 1

    generator = random.Random(10)
    for case in range(400):
        tokens = [generator.randrange(2 + case % 3) for _ in range(generator.randrange(1, 4 + case // 20))]
        num = generator.randrange(1, 6)
        _require_a_copy(tokens, num, _proposed(piece, tokens, num))
        cases += 1

    text = [generator.randrange(50) for _ in range(2000)]
    began = time.perf_counter()
    for length in range(1900, 2000):
        piece(text[:length], 4)
    taken = (time.perf_counter() - began) / 100
    require(
        taken < 0.05,
        f"takes {1000 * taken:.0f} ms for 2,000 tokens, longer than the step that it is to save: look from the end, "
        "and stop at a match.",
    )
    return cases + 1


def _proposed(piece: Propose, tokens: Sequence[int], num: int) -> list[int]:
    given = array("q", tokens)
    found = piece(given, num)
    require(
        given.tolist() == list(tokens), f"propose changed the request's own tokens: {list(tokens)} to {list(given)}"
    )
    require(isinstance(found, (list, tuple, array)), f"propose({list(tokens)}, {num}) is {found!r}: give a list of ids")
    return [int(each) for each in found]


def _require_a_copy(tokens: Sequence[int], num: int, found: Sequence[int]) -> None:
    """It is what followed an earlier place before which the most tokens match the end."""
    length = len(tokens)

    def matching(end: int) -> int:
        count = 0
        while count < min(end, _LOOKED_AT) and tokens[end - 1 - count] == tokens[length - 1 - count]:
            count += 1
        return count

    places = {end: matching(end) for end in range(1, length)}
    best = max(places.values(), default=0)
    right = [list(tokens[end : end + num]) for end, count in places.items() if best and count == best] or [[]]
    what = f"propose({list(tokens)}, {num}) is {list(found)}"
    if list(found) not in right:
        end = list(tokens[length - best :])
        why = f"its end {end} stood before, followed by {right[-1]}" if best else "its last token is new: propose none"
        raise Wrong(f"{what}: {why}.")


def live_propose(piece: Propose) -> str:
    noted = Noted(piece)
    with speculating("custom", drafter=noted) as watch:
        watch.add("first", QUESTION, 24)
        watch.add("again", said_again(watch), 28)
        watch.run()
        own = _plain_words()
        for name, expected in own.items():
            require(watch.tokens(name) == expected, f"the words of {name} changed: that must not be possible")
        figures, gained = watch.figures, tokens_a_step(watch)
    require(figures.num_accepted_tokens > 0, "nothing that it proposes is accepted, though an answer is said again")
    share = figures.num_accepted_tokens / figures.num_draft_tokens
    return f"The engine ran with it: the same words, {gained:.2f} tokens per step, {share:.0%} of drafts accepted."


@lru_cache(maxsize=1)
def _plain_words() -> dict[str, list[int]]:
    with Watch(**_SETTINGS) as watch:
        watch.add("first", QUESTION, 24)
        watch.add("again", said_again(watch), 28)
        return watch.run().all_tokens


PROPOSE = Exercise(
    lesson="10",
    name="propose",
    contract=contract_propose,
    live=live_propose,
    reference=NgramDrafter(max_ngram=_LOOKED_AT, min_ngram=1).propose,
    hints=(
        "Take the last few tokens, and look for them earlier in the same list. What stood behind them then is the "
        "guess. If you find nothing, look for fewer of them.",
        "Try sizes 4, 3, 2, 1. For each, compare `tokens[end - size:end]` with the last `size` tokens, for every `end` "
        "from `len(tokens) - 1` down to `size`. The first that matches: `tokens[end:end + num_tokens]`.",
        "`tokens = list(token_ids)`; `for size in (4, 3, 2, 1):` and inside `for end in range(len(tokens) - 1, "
        "size - 1, -1):` and inside `if tokens[end - size:end] == tokens[-size:]: "
        "return tokens[end:end + num_tokens]`. At the end `return []`.",
    ),
)

# ---- Judge -----------------------------------------------------------------------------------------------------------

_COINS = 1000


def contract_judge(piece: Judge) -> int:
    """Check that emitted tokens follow p, and that drafts are accepted as often as p allows."""
    cases = 0
    for p, q, so in (
        ([0.5, 0.5], [0.5, 0.5], "the drafter is the model: every draft is as good as its own"),
        ([1.0, 0.0], [0.0, 1.0], "the model would never say what is drafted"),
        ([0.5, 0.5], [1.0, 0.0], "the drafter is certain"),
        ([0.25, 0.75], [0.75, 0.25], "the drafter likes the other one"),
        ([0.6, 0.3, 0.1], [0.2, 0.3, 0.5], "three tokens"),
        ([0.0, 0.5, 0.5], [0.4, 0.4, 0.2], "the model never says the first token"),
    ):
        _require_lossless(piece, p, q, so)
        cases += 1
    accepted, _ = _judged(piece, [[0.5, 0.5]], [[0.0, 1.0]], [0], [0.999])
    require(accepted == [True], "p = [0.5, 0.5], q = [0, 1] and token 0: p / q is infinite, so it is accepted")
    accepted, rest = _judged(piece, [[0.5, 0.5], [1.0, 0.0]], [[0.5, 0.5], [0.0, 1.0]], [1, 1], [0.9, 0.9])
    require(accepted == [True, False] and rest[1] == [1.0, 0.0], "two rows at once: each has a p and a q of its own")
    cases += 2
    generator = torch.Generator().manual_seed(10)
    for size in (2, 3, 6, 12):
        for _ in range(4):
            p, q = (2 * torch.randn(2, size, generator=generator, dtype=torch.float64)).softmax(dim=-1).tolist()
            _require_lossless(piece, p, q, "at random")
            cases += 1
    return cases


def _judged(
    piece: Judge, p: list[list[float]], q: list[list[float]], tokens: list[int], coins: list[float]
) -> tuple[list[bool], list[list[float]]]:
    given = torch.tensor(p, dtype=torch.float64), torch.tensor(q, dtype=torch.float64)
    found = piece(*given, torch.tensor(tokens)[:, None], torch.tensor(coins, dtype=torch.float64)[:, None])
    require(isinstance(found, tuple) and len(found) == 2, f"judge gives {type(found).__name__}: give (accepted, rest)")
    accepted, rest = found
    require(
        list(accepted.shape) == [len(tokens), 1] and list(rest.shape) == list(given[0].shape),
        f"for {len(tokens)} rows of {len(p[0])} tokens judge gives shapes {list(accepted.shape)} and "
        f"{list(rest.shape)}: give [{len(tokens)}, 1] and [{len(tokens)}, {len(p[0])}]",
    )
    says = "what a rejection draws from is not a number in some row: where p equals q, p - q adds up to 0"
    require(not rest.isnan().any(), says)
    return [bool(each) for each in accepted[:, 0]], rest.tolist()


def _require_lossless(piece: Judge, p: list[float], q: list[float], so: str) -> None:
    """Adds up what comes out: over every draft, as often as q says, and over coins from 0 to 1."""
    coins = [(number + 0.5) / _COINS for number in range(_COINS)]
    out, num_held = [0.0] * len(p), 0.0
    for token, share in enumerate(q):
        if share == 0.0:
            continue
        accepted, rests = _judged(piece, [p] * _COINS, [q] * _COINS, [token] * _COINS, coins)
        held = sum(accepted) / _COINS
        num_held += share * held
        out[token] += share * held
        if held < 1.0:
            rest = rests[accepted.index(False)]
            total = sum(rest)
            require(
                abs(total - 1.0) < 1e-6 and min(rest) >= 0.0,
                f"p = {_short(p)}, q = {_short(q)} ({so}): what is left adds up to {total:.3g} and not to 1: a "
                "probability for each token is wanted, so scale it.",
            )
            out = [each + share * (1.0 - held) * more for each, more in zip(out, rest, strict=True)]
    worst = max(range(len(p)), key=lambda token: abs(out[token] - p[token]))
    require(
        abs(out[worst] - p[worst]) < 3.0 / _COINS,
        f"changes what the model says. p = {_short(p)}, q = {_short(q)} ({so}): of 1,000 tokens "
        f"{1000 * out[worst]:.0f} are token {worst}, and by the model's own p it would be {1000 * p[worst]:.0f}.",
    )
    most = sum(map(min, p, q))
    require(
        num_held > most - 3.0 / _COINS,
        f"is right and of little use. p = {_short(p)}, q = {_short(q)} ({so}): {num_held:.0%} of drafts are accepted, "
        f"and {most:.0%} could be. Each one that is not is a step more.",
    )


def _short(numbers: Sequence[float]) -> str:
    return "[" + ", ".join(f"{number:.3g}" for number in numbers) + "]"


def _judged_words(overrides: EngineOverrides) -> tuple[dict[str, list[int]], float]:
    with speculating("draft_model", overrides=overrides) as watch:
        for number, temperature in enumerate((1.0, 1.8, 2.2)):
            watch.add("ABC"[number], "Why is a token slow?", 20, temperature=temperature, seed=number + 4)
        watch.run()
        figures = watch.figures
        return watch.all_tokens, figures.num_accepted_tokens / figures.num_draft_tokens


@lru_cache(maxsize=1)
def _own_judged_words() -> dict[str, list[int]]:
    return _judged_words(NO_OVERRIDES)[0]


def live_judge(piece: Judge) -> str:
    words, share = _judged_words(EngineOverrides(make_sampler=partial(Sampler, judge=piece)))
    for name, expected in _own_judged_words().items():
        require(
            words[name] == expected,
            f"with the engine's noise it gives other words: request {name} should go on with ids {expected[:6]} ..., "
            f"and went on with {words[name][:6]} ...",
        )
    return (
        f"The engine ran with it: the same words in 3 random requests, {share:.0%} of a draft model's drafts accepted."
    )


JUDGE = Exercise(
    lesson="10",
    name="judge",
    contract=contract_judge,
    live=live_judge,
    reference=judge,
    hints=(
        "Look at the picture of p and q. Where the drafter drafts too often, only the part of the drafts that p allows "
        "may stay. What is missing elsewhere is exactly what the rejected ones must be turned into.",
        "Accepted is `coin < p(token) / q(token)`; `p.gather(1, token)` has the model's probability of each row's "
        "draft. What is left is `p - q` where that is positive, 0 elsewhere, divided by its sum; or p, if that is 0.",
        "`accepted = coin * q.gather(1, token) < p.gather(1, token)`; `rest = (p - q).clamp(min=0)`; return accepted "
        "and `rest / rest.sum(dim=1, keepdim=True)`. Where p equals q that sum is 0 and nothing is rejected, but a "
        "tensor has all rows: `torch.where(total > 0, rest / total, p)`.",
    ),
)


def told_lengths(lengths: Mapping[str, int]) -> str:
    """Return which share of a run's steps of a request was to have how many drafts, in words."""
    total = sum(lengths.values())
    return ", ".join(f"{num}: {count / total:.1%}" for num, count in sorted(lengths.items()))


def greedy_and_random() -> None:
    """A greedy answer with a draft model; and 20,000 draws of one token for which something was drafted."""
    with speculating("draft_model") as watch:
        watch.add("A", QUESTION, 16)
        print(f"greedy: {watch.run().text('A')!r}")
    p, q = (torch.tensor(numbers) for numbers in ([0.5, 0.25, 0.15, 0.1], [0.1, 0.2, 0.2, 0.5]))
    num = 20_000
    heat, named = torch.ones(num), (torch.full((num,), 3), torch.arange(num), torch.zeros(num, dtype=torch.int64))
    drafts = draft_sample_reference(q.log().repeat(num, 1), heat, *named, num=1)
    rows = torch.zeros(num, dtype=torch.int64)
    tokens = rejection_sample_reference(p.log().repeat(num, 1), heat, q.log()[None], rows, drafts, *named)
    found = torch.bincount(tokens, minlength=4).tolist()
    for index, name in enumerate("abcd"):
        print(f"token {name}: drafted {q[index]:.2f}, by the model {p[index]:.2f}; came {found[index] / num:.3f}")
    print(f"probability of being so far off by chance: {chi_square_test(found, (num * p).tolist())[2]:.2g}")
