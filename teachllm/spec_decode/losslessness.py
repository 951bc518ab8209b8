"""Is speculation lossless? Measured: what comes out of many rounds of drafting and verifying, beside what should.

On a vocabulary of 8 tokens a target can be a table, and the probability of each pair of first tokens is known exactly.
`check` draws that pair 100,000 times, each time in whole rounds, with another table as the drafter, and asks Pearson's
chi-square test whether the counts fit. No test can prove that they do. So it is shown what it sees: two rules that look
right and are not, and which it must find out.

What works here is what works in an engine, with tables in the place of its two models:

    drafts      `Sampler.draw_drafts`, for every node of a `DraftTree`
    tokens      `Sampler.sample` at every node: filters, then rejection sampling of what was drafted there; on a GPU
                with the kernel, on a CPU with `teachllm_kernels/speculation/rejection_reference.py`
    accepted    `DraftTree.walk`

Not in it: how a batch's rows are laid out, tree attention, and the kernels that draw and walk on a GPU. Those are
compared with the same on a CPU by tests.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from teachllm.core.scheduler_output import NewRow
from teachllm.sampling.device_parameters import parameters_of
from teachllm.sampling.filters import apply_filters
from teachllm.sampling.sampler import Sampler
from teachllm.sampling.verify import Proposals
from teachllm.sampling_params import SamplingParams
from teachllm.spec_decode.chi_square import chi_square_test
from teachllm.spec_decode.tree import DraftTree
from teachllm_kernels.speculation.rejection_reference import rejection_sample_reference

VOCAB_SIZE = 8
SUSPICIOUS = 1e-4  # a rule without bias has a smaller p-value once in ten thousand runs
_NUM_COMPARED = 2  # output tokens
_AT_A_TIME = 25_000  # samples: few enough for the processor's cache
_NUM_REQUESTS = 256  # samples are stretches of these, each as long as a round may reach
_STRETCH = 8
_FAR = 1 << 24  # tokens behind all of them

_CHAIN, _BRANCHES = ((0,), (0, 0)), ((0,), (1,), (2,), (0, 0), (0, 1), (1, 0))


@dataclass(frozen=True, slots=True)
class Rule:
    """A way to draft and verify.

    Attributes:
        name, about: what it is called, and how it works in a few words.
        paths: of its tree of drafts, level by level.
        is_lossless: whether it claims to be.
        replaced: siblings are drawn with replacement, which no engine does.
        temperature, top_k: as of a request's sampling parameters; 0 keeps all tokens.
        accepts_always: takes every draft for the target's own.
        per_path: verifies each path from the root as a chain of its own, and keeps the longest that is accepted.
    """

    name: str
    about: str
    paths: tuple[tuple[int, ...], ...]
    is_lossless: bool = True
    replaced: bool = False
    temperature: float = 1.0
    top_k: int = 0
    accepts_always: bool = False
    per_path: bool = False


_RULES = (
    Rule("chain", "the engine's: two drafts, one after the other", _CHAIN),
    Rule("short-chain", "the engine's: one draft, and a bonus token where it is accepted", ((0,),)),
    Rule(
        "tree",
        "the engine's: three siblings, two and one below; temperature 0.8, top-k 5",
        _BRANCHES,
        True,
        False,
        0.8,
        5,
    ),
    Rule("tree-replaced", "three siblings, two and one below, which may be equal", _BRANCHES, replaced=True),
    Rule("accept-always", "drafts are not verified", _CHAIN, False, accepts_always=True),
    Rule(
        "chain-per-path",
        "two siblings, two below each; each path verified as a chain",
        ((0,), (1,), (0, 0), (0, 1), (1, 0), (1, 1)),
        False,
        per_path=True,
    ),
)
RULES = {rule.name: rule for rule in _RULES}


@dataclass(frozen=True, slots=True)
class Losslessness:
    """Describe what `check` found.

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
        """Return the tokens per round."""
        return 1.0 + self.num_accepted / self.num_steps

    @property
    def is_biased(self) -> bool:
        return self.p_value < SUSPICIOUS

    @property
    def is_as_claimed(self) -> bool:
        return self.is_biased != self.rule.is_lossless


def check(
    rule: Rule, num_samples: int = 100_000, seed: int = 0, device: str = "cpu", kernels: bool | None = None
) -> Losslessness:
    """Draw pairs of first tokens by a rule, and compare their counts with the exact probabilities.

    Args:
        num_samples: pairs, at least 100.
        seed: of the two models and of the samples; another one is another experiment. At most 2^31 - 1.
        device: "cpu" or "cuda".
        kernels: tokens come from the Triton kernel; None: on a GPU they do.

    Raises:
        ValueError: too few samples to say anything; a seed out of range; there is no such device.
    """
    if not 0 <= seed < 1 << 31:
        raise ValueError(f"seed={seed}: must be from 0 to {(1 << 31) - 1}")
    if num_samples < 100:
        raise ValueError(f"num_samples={num_samples}: must be at least 100, or there is nothing to compare")
    if device not in ("cpu", "cuda") or (device == "cuda" and not torch.cuda.is_available()):
        raise ValueError(
            f"device={device!r}: there is none here, choose {'cpu or cuda' if device != 'cuda' else 'cpu'}"
        )
    experiment = _Experiment(rule, seed, torch.device(device), device == "cuda" if kernels is None else kernels)
    counts, num_steps, num_accepted = [0] * VOCAB_SIZE**2, 0, 0
    for first in range(0, num_samples, _AT_A_TIME):
        for outputs, steps in experiment.samples(first, min(first + _AT_A_TIME, num_samples)):
            counts[outputs[0] * VOCAB_SIZE + outputs[1]] += 1
            num_steps, num_accepted = num_steps + steps, num_accepted + len(outputs) - steps
    probabilities = experiment.pairs()
    found = torch.tensor(counts).view(VOCAB_SIZE, VOCAB_SIZE).sum(dim=1) / num_samples
    return Losslessness(
        rule,
        num_samples,
        num_steps,
        num_accepted,
        *chi_square_test(counts, (probabilities.flatten() * num_samples).tolist()),
        expected=probabilities.sum(dim=1).tolist(),
        found=found.tolist(),
    )


@dataclass(frozen=True, slots=True)
class _Samples:
    """Samples at the beginning of a round.

    Attributes:
        rows: of the sampler, [n].
        lengths: tokens before the one to come, [n] int64.
        previous: the last of them, [n] int64.
    """

    rows: list[int]
    lengths: torch.Tensor
    previous: torch.Tensor


class _Experiment:
    """A rule at work on two tables: logits after each token, [VOCAB_SIZE, VOCAB_SIZE] float32."""

    def __init__(self, rule: Rule, seed: int, device: torch.device, kernels: bool) -> None:
        self._rule, self._tree, self._seed = rule, DraftTree.of(rule.paths), seed
        self._device, self._kernels = device, kernels
        target, other = torch.randn(2, VOCAB_SIZE, VOCAB_SIZE, generator=torch.Generator().manual_seed(seed))
        self._target, self._draft = target.to(device), (0.6 * target + 0.6 * other).to(device)
        self._unread = torch.zeros((1, 1), dtype=torch.int64, device=device)  # what was said before: not read
        params = SamplingParams(temperature=rule.temperature, top_k=rule.top_k)
        num_children = len(rule.paths) if rule.per_path else 1
        self._sampler = Sampler(_NUM_REQUESTS * num_children, VOCAB_SIZE, device)
        rows = range(_NUM_REQUESTS * num_children)
        self._sampler.open_rows(
            [
                (row, NewRow([0], 1, params, row // _NUM_REQUESTS, (seed << 32) + row % _NUM_REQUESTS, frozenset()))
                for row in rows
            ]
        )

    def pairs(self) -> torch.Tensor:
        """Return the probability of each pair of tokens after token 0, [VOCAB_SIZE, VOCAB_SIZE] float64."""
        target, rule = self._target.cpu(), self._rule
        if rule.top_k:
            params = SamplingParams(temperature=rule.temperature, top_k=rule.top_k)
            target = apply_filters(target, parameters_of([params] * VOCAB_SIZE, VOCAB_SIZE), rule.top_k)
        after = (target.double() / rule.temperature).softmax(dim=-1)
        return after[0, :, None] * after

    def samples(self, first: int, end: int) -> list[tuple[list[int], int]]:
        """Return each sample's tokens after token 0, two or more, and how many rounds these took."""
        outputs: list[list[int]] = [[] for _ in range(first, end)]
        steps = [0] * len(outputs)
        short = list(range(len(outputs)))
        while short:
            lengths = [1 + (first + index) // _NUM_REQUESTS * _STRETCH + len(outputs[index]) for index in short]
            samples = _Samples(
                [(first + index) % _NUM_REQUESTS for index in short],
                torch.tensor(lengths, device=self._device),
                torch.tensor([outputs[index][-1] if outputs[index] else 0 for index in short], device=self._device),
            )
            for index, tokens in zip(short, self._round(samples), strict=True):
                outputs[index] += tokens
                steps[index] += 1
            short = [index for index in short if len(outputs[index]) < _NUM_COMPARED]
        return list(zip(outputs, steps, strict=True))

    def _round(self, samples: _Samples) -> list[list[int]]:
        """Run one step of an engine: return the accepted drafts of each sample, and the token after them."""
        drafts = self._drafts(samples)
        if not self._rule.per_path:
            return self._verify(samples, self._tree, drafts)
        # The mistake: each path has its own chance to be accepted, so what is drafted often comes out too often.
        best: list[list[int]] = [[] for _ in samples.rows]
        for child, node in enumerate(self._tree.levels[-1]):
            rows = [row + child * _NUM_REQUESTS for row in samples.rows]  # of other noise
            path = drafts[:, [self._tree.parents[node], node]]
            found = self._verify(_Samples(rows, samples.lengths, samples.previous), DraftTree.chain(2), path)
            best = [tokens if len(tokens) > len(old) else old for tokens, old in zip(found, best, strict=True)]
        return best

    def _drafts(self, samples: _Samples) -> torch.Tensor:
        """Draw the drafts, [n, nodes of the tree] int64."""
        drafts = torch.zeros((len(samples.rows), len(self._tree.parents)), dtype=torch.int64, device=self._device)
        for place, children in enumerate(self._tree.children):
            lengths, last = _at(self._tree, place, samples, drafts)
            if not children:
                continue
            if self._rule.replaced:  # each as if it was the only one, with noise of its own
                apart = [lengths + _FAR * (1 + sibling) for sibling in range(len(children))]
                drawn = torch.cat([self._sampler.draw_drafts(self._draft[last], samples.rows, at) for at in apart], 1)
            else:
                drawn = self._sampler.draw_drafts(self._draft[last], samples.rows, lengths, len(children))
            drafts[:, list(children)] = drawn
        return drafts

    def _verify(self, samples: _Samples, tree: DraftTree, drafts: torch.Tensor) -> list[list[int]]:
        """Sample at every place of a tree, and walk it."""
        sampled: list[torch.Tensor] = []
        for place, children in enumerate(tree.children):
            lengths, last = _at(tree, place, samples, drafts)
            siblings = drafts[:, list(children)]
            if self._rule.accepts_always and children:
                sampled.append(siblings[:, 0])
            else:
                sampled.append(self._sample(samples.rows, lengths, last, siblings))
        found = torch.stack(sampled, dim=1).tolist()
        outputs = []
        for tokens, drafted in zip(found, drafts.tolist(), strict=True):
            outputs.append([tokens[0], *(tokens[1 + node] for node in tree.walk(tokens, drafted))])
        return outputs

    def _sample(
        self, rows: list[int], lengths: torch.Tensor, last: torch.Tensor, siblings: torch.Tensor
    ) -> torch.Tensor:
        """Sample the token of one place of each sample, for which `siblings` [n, M] were drafted: return [n] int64."""
        logits = self._target[last]
        proposals = Proposals(siblings, self._draft, last) if siblings.shape[1] else None
        if self._rule.replaced and proposals is not None:
            temperature = torch.full((len(rows),), self._rule.temperature, device=self._device)
            seeds = (self._seed << 32) + torch.tensor(rows, device=self._device)
            return rejection_sample_reference(
                logits,
                temperature=temperature,
                draft_logits=self._draft,
                draft_rows=last,
                siblings=siblings,
                seeds=seeds,
                output_indices=lengths - 1,
                child_indices=torch.zeros_like(seeds),
                replaced=True,
            )
        if not self._kernels:
            return self._sampler.sample(logits, rows, lengths, self._unread, proposals).token_ids
        if proposals is not None:
            proposals = Proposals(siblings.int(), self._draft, last.int())
        at = torch.tensor(rows, dtype=torch.int32, device=self._device)
        variant = (True, self._rule.top_k > 0)
        return self._sampler.sample_positions(logits, at, lengths - 1, variant, proposals)


def _at(tree: DraftTree, place: int, samples: _Samples, drafts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return how many tokens stand before the ones that come after a place, and the last of them, [n] each."""
    if place == 0:
        return samples.lengths, samples.previous
    return samples.lengths + tree.depths[place - 1], drafts[:, place - 1]
