"""Lesson 07, sampling: what is predicted and judged, what a planted fault looks like, and an engine to look into."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from statistics import fmean
from typing import Any

import torch

from teachllm.core.scheduler_output import NewRow
from teachllm.engine.overrides import NO_OVERRIDES, EngineOverrides
from teachllm.sampling.device_parameters import parameters_of
from teachllm.sampling.filters import CountNucleus, apply_filters, best_of, count_nucleus, cut_min_p
from teachllm.sampling.penalties import apply_penalties
from teachllm.sampling.sampler import Sampler, SamplerOutput
from teachllm.sampling_params import SamplingParams
from teachllm_kernels.sampling.random_sample import gumbel_noise_reference
from teachllm_lessons.exercise import Exercise, Wrong, require
from teachllm_lessons.predict import Prediction
from teachllm_lessons.watch import Watch

QUESTION = "Why is a token slow?"  # several answers begin differently, each of them likely
_AT_A_TIME = 500  # draws, of 4,096 tokens each

KEPT = Prediction(
    asks="Tokens that top_p=0.9 keeps at temperature 2",
    answer=3667,
    because="Temperature 2 halves every logit, so a ratio of 40,000 becomes its square root, 200. If each other token "
    "weighs 1, the likeliest weighs 200 of 200 + 4,095 = 4,295, and 0.9 of that is 3,865.5. The likeliest has 200 of "
    "it; 3,666 others bring the rest. That is how top-p fails: it asks for a share of the probability, and at a high "
    "temperature the tail has it. The model is not far from the toy: for the first token of the answer above "
    "`top_p=0.9` keeps {cool} tokens at temperature 1, and {hot:,} at temperature 2.",
    unit=" tokens",
    within=0.001,
    traps={
        1: "At temperature 1 the likeliest token has 91%. At 2 it has less than 5%.",
        1687: "Temperature divides logits, which are logarithms: a ratio of probabilities is not halved, it becomes "
        "its square root.",
        3687: "That is 0.9 of all tokens. The likeliest counts for 200 of the others.",
    },
)


def peak_and_tail(ratio: float = 40_000.0, vocab_size: int = 4096) -> torch.Tensor:
    """Return logits of one token that is so many times as likely as each of all others."""
    return torch.zeros(vocab_size).index_fill(0, torch.tensor([0]), math.log(ratio))


class Looking(Sampler):
    """The engine's sampler, which keeps the logits that it is given."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.seen: list[torch.Tensor] = []

    def sample(self, logits: torch.Tensor, rows: list[int], *more: Any, **named: Any) -> SamplerOutput:
        self.seen.append(logits.clone())  # sampling writes into them
        return super().sample(logits, rows, *more, **named)


class Looked:
    """A watched engine, and the logits of its steps."""

    def __init__(self, **settings: Any) -> None:
        made: list[Looking] = []

        def make(*given: Any) -> Looking:
            made.append(Looking(*given))
            return made[-1]

        self.watch = Watch(overrides=EngineOverrides(make_sampler=make), **settings)
        self._sampler = made[0]

    @property
    def logits(self) -> torch.Tensor:
        """[vocab_size], of the first row of the latest step."""
        return self._sampler.seen[-1][0]

    def word(self, token_id: int) -> str:
        tokenizer = self.watch.engine.tokenizer
        assert tokenizer is not None
        return tokenizer.decode([token_id])


def filtered(logits: torch.Tensor, temperature: float = 1.0, **filters: Any) -> torch.Tensor:
    """The engine's filters on one row: [vocab_size], cut tokens at minus infinity."""
    params = SamplingParams(temperature=temperature, **filters)
    size = len(logits)
    return apply_filters(logits[None], parameters_of([params], size), params.num_candidates(size))[0]


def num_left(logits: torch.Tensor, **settings: Any) -> int:
    """Return how many tokens the engine's filters leave of one row."""
    return int((filtered(logits, **settings) > -math.inf).sum())


def contract_count_nucleus(piece: CountNucleus) -> int:
    """Check how many tokens a nucleus has, from one row of three up."""
    cases = 0
    row = [0.5, 0.25, 0.25]
    for top_p, expected, so in (
        (0.6, 2, "the first has 0.5 of the 0.6, so the second is needed, too"),
        (0.5, 1, "the first reaches 0.5 all by itself, and the fewest are wanted"),
        (0.3, 1, "the first is more than 0.3 already: it stays, or nothing would be left to draw"),
        (0.75, 2, "two reach 0.75 exactly"),
        (0.8, 3, "two have 0.75 together, which is not enough"),
    ):
        _require_count(piece, [row], [top_p], [expected], so)
        cases += 1
    _require_count(piece, [[0.125] * 8], [0.5], [4], "of eight that are equally likely four have a half")
    _require_count(piece, [row, row], [0.3, 0.8], [1, 3], "every row has a top_p of its own")
    cases += 2

    tail = [2.0**-rank for rank in range(1, 60)]
    found = _count(piece, [tail], [1.0])[0]
    require(
        found == len(tail),
        f"count_nucleus([[1/2, 1/4, 1/8, ... 59 of them]], [1.0]) is {found}: a top_p of 1 cuts nothing, so keep 59. "
        "In 32 bits the sum is 1 long before the last token: at 1 the rounding must not decide.",
    )
    cases += 1

    generator = torch.Generator().manual_seed(7)
    for size in (2, 5, 50, 400):
        for heat in (0.5, 1.0, 3.0):
            p = (3 * torch.randn(8, size, generator=generator) / heat).softmax(dim=-1).sort(dim=-1, descending=True)[0]
            tops = [0.05, 0.3, 0.5, 0.8, 0.9, 0.95, 0.99, 1.0]
            for row, top_p, count in zip(p.tolist(), tops, _count(piece, p.tolist(), tops), strict=True):
                low, high = (_by_definition(row, top_p + slack) for slack in (-1e-5, 1e-5))
                if low == high or top_p == 1.0:  # else rounding may decide either way
                    expected = size if top_p == 1.0 else low
                    if count != expected:
                        raise Wrong(f"of {size} tokens at top_p={top_p} it keeps {count}, and {expected} reach it.")
                cases += 1
    return cases


def _by_definition(row: Sequence[float], top_p: float) -> int:
    total = 0.0
    for number, share in enumerate(row, 1):
        total += share
        if total >= top_p:
            return number
    return len(row)


def _count(piece: CountNucleus, rows: Sequence[Sequence[float]], top_p: Sequence[float]) -> list[int]:
    found = piece(torch.tensor(rows), torch.tensor(top_p))
    what = f"count_nucleus(probabilities [{len(rows)}, {len(rows[0])}], top_p [{len(top_p)}])"
    require(isinstance(found, torch.Tensor), f"{what} is {found!r}: give a tensor")
    shape = list(found.shape)
    require(shape == [len(rows), 1], f"{what} has shape {shape}: give [{len(rows)}, 1], one count for each row")
    require(not found.is_floating_point() and found.dtype != torch.bool, f"{what} is of {found.dtype}: give integers")
    return found[:, 0].tolist()


def _require_count(
    piece: CountNucleus, rows: list[list[float]], top_p: list[float], expected: list[int], so: str
) -> None:
    found = _count(piece, rows, top_p)
    require(found == expected, f"count_nucleus({rows}, {top_p}) is {found}: {so}; keep {expected}.")


_REQUESTS: tuple[dict[str, Any], ...] = (
    {"temperature": 1.0, "top_p": 0.6, "seed": 1},
    {"temperature": 2.0, "top_p": 0.9, "seed": 2},
    {"temperature": 2.0, "top_p": 0.5, "seed": 3, "min_p": 0.01},
    {"temperature": 1.5, "top_p": 0.97, "seed": 4, "top_k": 40},
    {"temperature": 2.5, "seed": 5, "top_k": 300},  # a filtered row whose top_p is 1
)


def _random_words(overrides: EngineOverrides) -> dict[str, list[int]]:
    with Watch(overrides=overrides, num_gpu_blocks_override=64, max_model_len=128) as watch:
        for name, params in zip("ABCDE", _REQUESTS, strict=True):
            watch.add(name, QUESTION, 16, **params)
        return watch.run().all_tokens


@lru_cache(maxsize=1)
def _own_random_words() -> dict[str, list[int]]:
    return _random_words(NO_OVERRIDES)


def live_count_nucleus(piece: CountNucleus) -> str:
    counts: list[int] = []

    def noted(probabilities: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
        found = piece(probabilities, top_p)
        counts.extend(found[top_p < 1.0].flatten().tolist())
        return found

    words = _random_words(EngineOverrides(make_sampler=partial(Sampler, nucleus=noted)))
    for name, expected in _own_random_words().items():
        require(
            words[name] == expected,
            f"changes what the engine says: request {name} should go on with ids {expected[:6]} ..., and went on with "
            f"{words[name][:6]} ...",
        )
    return (
        f"The engine ran with it: the same words in {len(words)} random requests, and from {min(counts)} to "
        f"{max(counts):,} tokens in a nucleus."
    )


COUNT_NUCLEUS = Exercise(
    lesson="07",
    name="count_nucleus",
    contract=contract_count_nucleus,
    live=live_count_nucleus,
    reference=count_nucleus,
    hints=(
        "The probabilities come sorted, the largest first. Ask of each token: have *those before it* reached p "
        "already? If not, it is needed.",
        "`probabilities.cumsum(dim=-1)` is what the tokens up to each have together, it included. Take its own share "
        "away again, and compare with `top_p[:, None]`, so that each row has its own. What is to be counted then is "
        "`True`s.",
        "`needed = (probabilities.cumsum(dim=-1) - probabilities) < top_p[:, None]`, and where `top_p` is 1, all are: "
        "`needed | (top_p[:, None] >= 1)`. Then `.sum(dim=-1, keepdim=True)`.",
    ),
)


def another_word() -> None:
    """The answer may be one of five words, of which one has been said; a penalty is to make it rarer."""
    with Watch(num_gpu_blocks_override=256, max_model_len=128, max_num_seqs=64) as watch:
        tokenizer = watch.engine.tokenizer
        assert tokenizer is not None
        words = {word: tokenizer.encode(word)[0] for word in (" tokens", " blocks", " work", " speed", " requests")}
        prompt = watch.ids("An engine can run short of tokens. What else does it run short of?")
        for penalty in (1.0, 1.5):
            asked: dict[str, Any] = {"temperature": 1.0, "seed": 1, "allowed_token_ids": [*words.values()]}
            watch.add(f"{penalty}", prompt, 1, n=100, repetition_penalty=penalty, **asked)
            watch.run()
            drawn = [completion.token_ids[0] for completion in watch.outputs[f"{penalty}"].outputs]
            counts = ", ".join(f"{drawn.count(token_id):3}{word}" for word, token_id in words.items())
            print(f"repetition_penalty={penalty}: {counts}")


def many_draws(logits: torch.Tensor, num: int, *, temperature: float, **filters: Any) -> tuple[list[int], list[float]]:
    """So many draws at one position by the engine's sampler: how often each token came, and was to be expected."""
    size = len(logits)
    sampler = Sampler(1, size, torch.device("cpu"))
    params = SamplingParams(temperature=temperature, max_tokens=None, **filters)
    sampler.open_rows([(0, NewRow([1], 1, params, 0, 5, frozenset(), ()))])
    counts = torch.zeros(size, dtype=torch.int64)
    for begin in range(1, num + 1, _AT_A_TIME):  # as if each was the next token of one request
        lengths = torch.arange(begin, min(begin + _AT_A_TIME, num + 1))
        rows, sequence = [0] * len(lengths), torch.ones(1, 1, dtype=torch.int64)
        drawn = sampler.sample(logits.repeat(len(lengths), 1), rows, lengths, sequence).token_ids
        counts += torch.bincount(drawn, minlength=size)
    exact = num * (filtered(logits, temperature, **filters) / temperature).double().softmax(dim=0)
    return counts.tolist(), exact.tolist()


def answers(
    filters: Mapping[str, Mapping[str, Any]], num: int, num_tokens: int = 10
) -> dict[str, dict[float, tuple[float, int]]]:
    """By filter and temperature: perplexity of the tokens of so many answers to `QUESTION`, and how many differ."""
    found: dict[str, dict[float, tuple[float, int]]] = {name: {} for name in filters}
    with Watch(num_gpu_blocks_override=192, max_model_len=128, max_num_seqs=num) as watch:
        for name, settings in filters.items():
            for temperature in (0.0, 0.5, 1.0, 1.5, 2.0, 2.5):
                asked = settings if temperature else {}
                request = f"{name} {temperature}"
                watch.add(request, QUESTION, num_tokens, n=num, temperature=temperature, seed=1, logprobs=0, **asked)
                watch.run()
                every = watch.outputs[request].outputs
                given = [
                    scores[token_id].logprob
                    for one in every
                    for token_id, scores in zip(one.token_ids, one.logprobs or (), strict=True)
                ]
                found[name][temperature] = math.exp(-fmean(given)), len({tuple(one.token_ids) for one in every})
    return found


def milliseconds_of_stages(vocab_size: int, num_rows: int = 1, repeats: int = 9) -> dict[str, float]:
    """Return what each stage takes on a row of so many logits, fastest of some runs."""
    logits = 3 * torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(0))
    ones, p = torch.ones(num_rows), torch.full((num_rows,), 0.9)
    many, history = torch.full((num_rows,), vocab_size), torch.arange(500).repeat(num_rows, 1)
    named = (torch.zeros(num_rows, dtype=torch.int64),) * 3
    lengths = torch.full((num_rows,), 500)
    stages: dict[str, Callable[[], object]] = {
        "argmax (greedy stops here)": lambda: logits.argmax(dim=-1),
        "penalties": lambda: apply_penalties(logits, history, lengths, lengths // 2, 2 * ones, ones, ones),
        "min_p": lambda: cut_min_p(logits, p / 9, logits.amax(dim=-1, keepdim=True)),
        "top_k 50": lambda: best_of(logits, 50, many),
        "top_p: sorts all": lambda: count_nucleus(best_of(logits, vocab_size, many).softmax(dim=-1), p),
        "noise": lambda: gumbel_noise_reference(*named, vocab_size, 0),
    }
    return {name: 1000 * _seconds(stage, repeats) for name, stage in stages.items()}


def _seconds(call: Callable[[], object], repeats: int) -> float:
    call()
    taken = []
    for _ in range(repeats):
        began = time.perf_counter()
        call()
        taken.append(time.perf_counter() - began)
    return min(taken)
