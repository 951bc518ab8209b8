"""Is speculation lossless? Measured: what comes out of many rounds of drafting and verifying, beside what should.

On a vocabulary of 8 tokens a model can be a table, and the probability of each pair of first tokens is known exactly.
`check` lets the engine's own rule (`teachllm_kernels/rejection.py`) draw that pair 100,000 times, each time in whole
rounds, with another table as the drafter, and asks Pearson's chi-square test whether the counts fit. No test can prove
that they do. So it is shown what it sees: two rules that look right and are not, and which it must find out.

Source: Pearson, "On the criterion that a given system of deviations ... can be reasonably supposed to have arisen
from random sampling", 1900.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from teachllm.sampling.filters import apply_filters
from teachllm_kernels.rejection import draft_sample_reference, rejection_sample_reference
from teachllm_kernels.sampling import gumbel_sample_reference

VOCAB_SIZE = 8
SUSPICIOUS = 1e-4  # a rule without bias has a smaller p-value once in ten thousand runs
_NUM_COMPARED = 2  # output tokens
_FEWEST_EXPECTED = 5.0  # of a cell, for its count to be near enough to normal
_AT_A_TIME = 25_000  # samples: few enough for the processor's cache


@dataclass(frozen=True, slots=True)
class Rule:
    """A way to draft and verify.

    Attributes:
        name, about: what it is called, and how it works in a few words.
        branching: how many siblings each level of the tree has; a chain has one each.
        is_lossless: whether it claims to be.
        replaced: siblings are drawn with replacement.
        temperature, top_k: as of a request's sampling parameters; 0 keeps all tokens.
        accepts_always: takes every draft for the model's own.
        per_path: verifies each path from the root as a chain of its own, and keeps the longest that is accepted.
    """

    name: str
    about: str
    branching: tuple[int, ...]
    is_lossless: bool = True
    replaced: bool = False
    temperature: float = 1.0
    top_k: int = 0
    accepts_always: bool = False
    per_path: bool = False


_RULES = (
    Rule("chain", "two drafts, one after the other", (1, 1)),
    Rule("short-chain", "one draft, and a token more where it is accepted", (1,)),
    Rule("tree", "three siblings, two below each; temperature 0.8, top-k 5", (3, 2), temperature=0.8, top_k=5),
    Rule("tree-replaced", "three siblings, two below each, which may be equal", (3, 2), replaced=True),
    Rule("accept-always", "drafts are not verified", (1, 1), False, accepts_always=True),
    Rule("chain-per-path", "two siblings, two below each; each path verified as a chain", (2, 2), False, per_path=True),
)
RULES = {rule.name: rule for rule in _RULES}


@dataclass(frozen=True, slots=True)
class Losslessness:
    """What `check` found.

    Attributes:
        num_samples: pairs drawn.
        num_steps: rounds of drafting and verifying that took.
        num_accepted: drafts accepted in them.
        chi_square, degrees_of_freedom, p_value: of the pairs' counts.
        expected, found: [VOCAB_SIZE] share of the samples with each first token.
    """

    rule: Rule
    num_samples: int
    num_steps: int
    num_accepted: int
    chi_square: float
    degrees_of_freedom: int
    p_value: float
    expected: list[float]
    found: list[float]

    @property
    def mean_length(self) -> float:
        """Tokens per round."""
        return 1.0 + self.num_accepted / self.num_steps

    @property
    def is_biased(self) -> bool:
        return self.p_value < SUSPICIOUS

    @property
    def is_as_claimed(self) -> bool:
        return self.is_biased != self.rule.is_lossless


@dataclass(frozen=True, slots=True)
class _Models:
    """Logits after each token: [VOCAB_SIZE, VOCAB_SIZE] float32, of the model without what the rule's filter cuts."""

    target: torch.Tensor
    draft: torch.Tensor
    temperature: float

    @staticmethod
    def of(rule: Rule, seed: int) -> _Models:
        generator = torch.Generator().manual_seed(seed)
        target, other = torch.randn(2, VOCAB_SIZE, VOCAB_SIZE, generator=generator)
        draft = 0.6 * target + 0.6 * other
        if rule.top_k:
            every = torch.ones(VOCAB_SIZE)
            top_k = torch.full((VOCAB_SIZE,), rule.top_k)
            target = apply_filters(target, rule.temperature * every, top_k, every, 0.0 * every, rule.top_k)
        return _Models(target, draft, rule.temperature)

    def pairs(self) -> torch.Tensor:
        """[VOCAB_SIZE, VOCAB_SIZE] float64, the probability of each pair of tokens after token 0."""
        after = (self.target.double() / self.temperature).softmax(dim=-1)
        return after[0, :, None] * after


@dataclass(frozen=True, slots=True)
class _Rows:
    """Samples in the middle of a round: [n] int64 each.

    Attributes:
        previous: the last token.
        output_index: how many tokens were put out before.
    """

    seeds: torch.Tensor
    previous: torch.Tensor
    output_index: torch.Tensor

    def choose(self, chosen: torch.Tensor) -> _Rows:
        return _Rows(self.seeds[chosen], self.previous[chosen], self.output_index[chosen])

    def followed_by(self, tokens: torch.Tensor) -> _Rows:
        return _Rows(self.seeds, tokens, self.output_index + 1)

    def draws(self, child: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """What names a draw. Different children make it another one; here, a sample has no other children."""
        return self.seeds, self.output_index, torch.full_like(self.seeds, child)


Propose = Callable[[int, torch.Tensor, _Rows], torch.Tensor]


def check(rule: Rule, num_samples: int = 100_000, seed: int = 0) -> Losslessness:
    """Draws pairs of first tokens by a rule, and compares their counts with the exact probabilities.

    Args:
        num_samples: pairs, at least 100.
        seed: of the two models and of the samples; another one is another experiment. At most 2^31 - 1.

    Raises:
        ValueError: too few samples to say anything; a seed out of range.
    """
    if not 0 <= seed < 1 << 31:
        raise ValueError(f"seed={seed}: must be from 0 to {(1 << 31) - 1}")
    if num_samples < 100:
        raise ValueError(f"num_samples={num_samples}: must be at least 100, or there is nothing to compare")
    models = _Models.of(rule, seed)
    counts, num_steps, num_accepted = torch.zeros(VOCAB_SIZE**2, dtype=torch.int64), 0, 0
    for first in range(0, num_samples, _AT_A_TIME):
        seeds = (seed << 32) + torch.arange(first, min(first + _AT_A_TIME, num_samples))
        pairs, steps, accepted = _sample(rule, models, seeds)
        counts += torch.bincount(pairs[:, 0] * VOCAB_SIZE + pairs[:, 1], minlength=VOCAB_SIZE**2)
        num_steps, num_accepted = num_steps + steps, num_accepted + accepted
    probabilities = models.pairs()
    expected = (probabilities.flatten() * num_samples).tolist()
    return Losslessness(
        rule,
        num_samples,
        num_steps,
        num_accepted,
        *chi_square_test(counts.tolist(), expected),
        expected=probabilities.sum(dim=1).tolist(),
        found=(counts.view(VOCAB_SIZE, VOCAB_SIZE).sum(dim=1) / num_samples).tolist(),
    )


def _sample(rule: Rule, models: _Models, seeds: torch.Tensor) -> tuple[torch.Tensor, int, int]:
    """[n, 2] the first tokens after token 0, how many rounds that took, how many drafts were accepted."""
    num_rows = len(seeds)
    length, previous = torch.zeros(2, num_rows, dtype=torch.int64)
    outputs = torch.zeros(num_rows, _NUM_COMPARED, dtype=torch.int64)
    num_steps = num_accepted = 0
    while len(short := (length < _NUM_COMPARED).nonzero()[:, 0]):
        rows = _Rows(seeds[short], previous[short], length[short])
        tokens, num_tokens = (_path_round if rule.per_path else _round)(rule, models, rows)
        num_steps, num_accepted = num_steps + len(short), num_accepted + int(num_tokens.sum()) - len(short)
        for place in range(tokens.shape[1]):
            is_output = (place < num_tokens) & (length[short] + place < _NUM_COMPARED)
            outputs[short[is_output], length[short[is_output]] + place] = tokens[is_output, place]
        length[short] += num_tokens
        previous[short] = tokens.gather(1, num_tokens[:, None] - 1)[:, 0]
    return outputs, num_steps, num_accepted


def _round(rule: Rule, models: _Models, rows: _Rows) -> tuple[torch.Tensor, torch.Tensor]:
    """One step of an engine: drafts a tree, verifies it from its root on, stops where no draft is accepted.

    Returns:
        [n, levels + 1] tokens, and how many of them there are: the accepted drafts and one more.
    """

    def propose(level: int, chosen: torch.Tensor, here: _Rows) -> torch.Tensor:
        # An engine drafts below every sibling; here, only where somebody is going to look.
        return _drafts(models, here, rule.branching[level], rule.replaced)

    return _verify(rule, models, rows, propose)


def _path_round(rule: Rule, models: _Models, rows: _Rows) -> tuple[torch.Tensor, torch.Tensor]:
    """The mistake: each path has its own chance to be accepted, so what is drafted often comes out too often."""
    best_num = torch.zeros_like(rows.seeds)
    best_tokens = torch.zeros(len(best_num), len(rule.branching) + 1, dtype=torch.int64)
    for i, first in enumerate(_drafts(models, rows, rule.branching[0]).unbind(1)):
        for j, second in enumerate(_drafts(models, rows.followed_by(first), rule.branching[1]).unbind(1)):
            path = _along(torch.stack((first, second), dim=1))
            tokens, num_tokens = _verify(rule, models, rows, path, child=i * rule.branching[1] + j)
            best_tokens = torch.where((num_tokens > best_num)[:, None], tokens, best_tokens)
            best_num = torch.maximum(best_num, num_tokens)
    return best_tokens, best_num


def _along(path: torch.Tensor) -> Propose:
    """Drafts that are known: [n, levels]."""
    return lambda level, chosen, rows: path[chosen, level : level + 1]


def _drafts(models: _Models, rows: _Rows, num: int, replaced: bool = False) -> torch.Tensor:
    """[n, num] tokens that the drafter proposes after each row's last."""
    logits, temperature = models.draft[rows.previous], torch.full((len(rows.seeds),), models.temperature)
    if not replaced:
        return draft_sample_reference(logits, temperature, *rows.draws(), num)
    return torch.cat([draft_sample_reference(logits, temperature, *rows.draws(j), 1) for j in range(num)], dim=1)


def _verify(
    rule: Rule, models: _Models, rows: _Rows, propose: Propose, child: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns what `_round` does; `propose` says what was drafted at a level for some of the rows."""
    num_rows, num_levels = len(rows.seeds), len(rule.branching)
    tokens = torch.zeros(num_rows, num_levels + 1, dtype=torch.int64)
    num_tokens = torch.zeros(num_rows, dtype=torch.int64)
    going = torch.arange(num_rows)
    for level in range(num_levels):
        siblings = propose(level, going, rows)
        token = siblings[:, 0]
        if not rule.accepts_always:
            token = rejection_sample_reference(
                models.target[rows.previous],
                torch.full((len(going),), models.temperature),
                models.draft,
                rows.previous,
                siblings,
                *rows.draws(child),
                replaced=rule.replaced,
            )
        tokens[going, level] = token
        num_tokens[going] += 1
        is_accepted = (siblings == token[:, None]).any(dim=1)
        going, rows = going[is_accepted], rows.followed_by(token).choose(is_accepted)
    # All accepted: the model has computed what follows the last one, too.
    temperature = torch.full((len(going),), models.temperature)
    token = gumbel_sample_reference(models.target[rows.previous], temperature, *rows.draws(child))
    tokens[going, num_levels] = token
    num_tokens[going] += 1
    return tokens, num_tokens


def chi_square_test(found: Sequence[int], expected: Sequence[float]) -> tuple[float, int, float]:
    """Pearson's test of counts against what was expected of each.

    Cells of which little is expected are put together, the rarest first, until enough is expected of them.

    Returns:
        chi-square, its degrees of freedom, and the probability of one as large if nothing but chance is at work.
    """
    if any(count for count, share in zip(found, expected, strict=True) if share == 0.0):
        return math.inf, len(expected) - 1, 0.0  # what is impossible has happened
    groups: list[tuple[float, float]] = []
    group_found = group_expected = 0.0
    for share, count in sorted(zip(expected, found, strict=True)):
        group_found, group_expected = group_found + count, group_expected + share
        if group_expected >= _FEWEST_EXPECTED:
            groups.append((group_found, group_expected))
            group_found = group_expected = 0.0
    chi_square = sum((count - share) ** 2 / share for count, share in groups)
    return chi_square, len(groups) - 1, upper_gamma((len(groups) - 1) / 2, chi_square / 2)


def upper_gamma(a: float, x: float) -> float:
    """The regularised upper incomplete gamma function Q(a, x), for a > 0 and x >= 0.

    By the series of 1 - Q below x = a + 1, by Lentz's continued fraction of Q above it: each converges fast there, and
    a small Q is no difference of large numbers. Source: Press et al., "Numerical Recipes", section 6.2.
    """
    if x == 0.0:
        return 1.0
    factor = math.exp(a * math.log(x) - x - math.lgamma(a))
    if x < a + 1.0:
        term = total = 1.0 / a
        n = 0
        while term > total * 1e-17:
            n += 1
            term *= x / (a + n)
            total += term
        return 1.0 - factor * total
    tiny = 1e-300
    b = x + 1.0 - a
    c, d = 1.0 / tiny, 1.0 / b
    fraction = d
    for n in range(1, 10_000):
        step = -n * (n - a)
        b += 2.0
        d = step * d + b
        c = b + step / c
        d, c = 1.0 / (d or tiny), c or tiny
        fraction *= d * c
        if abs(d * c - 1.0) < 1e-16:
            break
    return factor * fraction
