"""The engine's rules for drafts leave the model's distribution as it is, and the test that says so sees what does not.

The bar in `make test-thorough`: of ten runs of 100,000 samples a rule may have one p-value below 0.01, and none below
1e-4, nor may that of all runs together, whose chi-squares add up, be below 1e-3. So ten find nine times out of ten a
bias whose chi-square is 17 in the mean above its 63 degrees of freedom. `make test` has one run of 10,000, and of
5,000 for most of the wrong rules below, enough to see them. A rule that is biased must have all p-values below 1e-6.
"""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch

from teachllm.sampling import sampler, state
from teachllm.spec_decode import losslessness
from teachllm.spec_decode.chi_square import chi_square_test, upper_gamma
from teachllm.spec_decode.losslessness import RULES, check
from teachllm.spec_decode.tree import DraftTree
from teachllm_kernels.speculation.rejection_reference import rejection_sample_reference
from tests.kernels.cases import DEVICE, ON_GPU
from tests.thorough import THOROUGH, times

NUM_SAMPLES = times(10_000, 100_000)
NUM_BIASED_SAMPLES = times(5_000, 100_000)
SEEDS = range(times(1, 6))
BIASED_SEEDS = range(times(1, 6))
on_device = pytest.mark.gpu if ON_GPU else lambda test: test
LOSSLESS = [name for name, rule in RULES.items() if rule.is_lossless]
BIASED = [name for name, rule in RULES.items() if not rule.is_lossless]


def p_values_of_biased(rule: losslessness.Rule, num_samples: int = NUM_BIASED_SAMPLES) -> list[float]:
    return [check(rule, num_samples, seed).p_value for seed in BIASED_SEEDS]


@pytest.mark.parametrize("name", LOSSLESS)
def test_a_lossless_rule_draws_from_the_models_distribution(name: str) -> None:
    runs = [check(RULES[name], NUM_SAMPLES, seed) for seed in SEEDS]
    found = [run.p_value for run in runs]
    assert sum(p < 0.01 for p in found) <= 1 and min(found) >= 1e-4, found
    degrees, chi_square = sum(run.degrees_of_freedom for run in runs), sum(run.chi_square for run in runs)
    assert upper_gamma(degrees / 2, chi_square / 2) >= 1e-3, found


@pytest.mark.parametrize("name", BIASED)
def test_a_biased_rule_is_found_out_every_time(name: str) -> None:
    found = p_values_of_biased(RULES[name])
    assert max(found) < 1e-6, found


@pytest.mark.parametrize("name", ["tree", "tree-replaced"])
def test_siblings_must_be_verified_as_they_were_drawn(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With replacement or without: either rule is biased for the other's siblings."""
    verify = rejection_sample_reference
    where = sampler if name == "tree" else losslessness  # the engine's, and the other one

    def the_other_way(*given: Any, replaced: bool = False, **more: Any) -> torch.Tensor:
        return verify(*given, replaced=not replaced, **more)

    monkeypatch.setattr(where, "rejection_sample_reference", the_other_way)
    assert max(p_values_of_biased(RULES[name], NUM_SAMPLES)) < 1e-6


@pytest.mark.parametrize("name", ["chain", "tree"])
def test_what_is_accepted_is_what_the_engine_accepts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own walk decides, and one that goes on after a rejection is found out."""
    monkeypatch.setattr(DraftTree, "walk", lambda self, sampled, drafts: list(range(len(self.levels))))
    assert max(p_values_of_biased(RULES[name])) < 1e-6


@on_device
@pytest.mark.skipif(not ON_GPU and not THOROUGH, reason="interpreted, it runs in make test-thorough")
@pytest.mark.parametrize("name", ["chain", "tree"] if ON_GPU else ["short-chain"])  # interpreted it is slow
def test_the_kernel_draws_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[int] = []
    kernel = state.rejection_sample_triton

    def noting(*given: Any, **more: Any) -> torch.Tensor:
        drawn.append(len(given[0]))
        return kernel(*given, **more)

    monkeypatch.setattr(state, "rejection_sample_triton", noting)
    assert check(RULES[name], 100, seed=5, device=DEVICE.type, kernels=True) == check(RULES[name], 100, seed=5)
    assert sum(drawn) >= 100


def test_a_draft_is_accepted_as_often_as_the_two_distributions_overlap() -> None:
    rule, num_samples = RULES["short-chain"], NUM_SAMPLES
    tables = losslessness._Experiment(rule, 3, torch.device("cpu"), kernels=False)
    p, q = tables._target[0].softmax(dim=0), tables._draft[0].softmax(dim=0)
    overlap = torch.minimum(p, q).sum().item()
    # A first draft that is accepted makes two tokens of one round; otherwise there is a second round.
    num_steps = check(rule, num_samples, seed=3).num_steps
    deviation = math.sqrt(num_samples * overlap * (1 - overlap))
    assert abs(num_steps - num_samples * (2 - overlap)) < 5 * deviation


def test_the_same_seed_is_the_same_experiment_and_another_one_is_not() -> None:
    rule = RULES["tree"]
    first = check(rule, 1000, seed=1)
    assert check(rule, 1000, seed=1) == first
    assert check(rule, 1000, seed=2).expected != first.expected


def test_how_many_samples_are_drawn_at_a_time_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    at_once = check(RULES["chain"], 1000)
    monkeypatch.setattr(losslessness, "_AT_A_TIME", 300)
    assert check(RULES["chain"], 1000) == at_once


def test_what_comes_out_is_summed_up() -> None:
    found = check(RULES["accept-always"], 1000)
    assert (found.num_samples, found.num_steps, found.num_accepted, found.mean_length) == (1000, 1000, 2000, 3.0)
    assert found.is_biased and found.is_as_claimed
    assert sum(found.expected) == pytest.approx(1) and sum(found.found) == pytest.approx(1)
    assert not replace(found, p_value=0.5).is_as_claimed
    filtered = check(RULES["tree"], 1000)
    assert sum(share > 0 for share in filtered.expected) == RULES["tree"].top_k


@pytest.mark.parametrize(
    ("samples", "seed", "device", "said"),
    [
        (99, 0, "cpu", "num_samples=99"),
        (1000, -1, "cpu", "seed=-1"),
        (1000, 2**31, "cpu", "seed="),
        (1000, 0, "tpu", "device='tpu'"),
    ],
)
def test_an_experiment_that_says_nothing_is_refused(samples: int, seed: int, device: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        check(RULES["chain"], samples, seed, device)


@pytest.mark.parametrize("x", [1e-3, 0.3, 1.0, 5.0, 25.0, 32.0, 40.0, 90.0, 250.0])
@pytest.mark.parametrize("whole", [0, 1, 2, 12, 31])
def test_the_gamma_function_equals_its_closed_forms(whole: int, x: float) -> None:
    """Q(n, x) is a Poisson sum, and Q(n + 1/2, x) one that begins with the error function."""
    half = math.erfc(math.sqrt(x)) + math.fsum(
        math.exp((k - 0.5) * math.log(x) - x - math.lgamma(k + 0.5)) for k in range(1, whole + 1)
    )
    assert upper_gamma(whole + 0.5, x) == pytest.approx(half, rel=1e-11, abs=0)
    if whole:
        poisson = math.fsum(math.exp(k * math.log(x) - x - math.lgamma(k + 1)) for k in range(whole))
        assert upper_gamma(whole, x) == pytest.approx(poisson, rel=1e-11, abs=0)


def test_the_gamma_function_is_1_at_0_falls_and_does_not_fail_far_out() -> None:
    values = [upper_gamma(31.5, x / 4) for x in range(2000)]
    assert values[0] == 1.0 and all(0.0 < b <= a for a, b in pairwise(values))
    assert upper_gamma(31.5, 1e6) == 0.0


@pytest.mark.parametrize(
    ("degrees", "chi_square", "p"),
    # From printed tables of the chi-square distribution.
    [(1, 3.841459, 0.05), (1, 10.827566, 0.001), (5, 15.086272, 0.01), (24, 36.415029, 0.05), (63, 82.528727, 0.05)],
)
def test_the_critical_values_of_printed_tables_have_their_p_values(degrees: int, chi_square: float, p: float) -> None:
    assert upper_gamma(degrees / 2, chi_square / 2) == pytest.approx(p, rel=1e-6)


def test_a_loaded_die_of_the_text_books() -> None:
    chi_square, degrees, p = chi_square_test([5, 8, 9, 8, 10, 20], [10.0] * 6)
    assert (chi_square, degrees) == (pytest.approx(13.4), 5)
    assert p == pytest.approx(0.0199, abs=1e-4)


def test_rare_cells_count_together_and_impossible_ones_at_once() -> None:
    chi_square, degrees, _ = chi_square_test([90, 0, 8, 0, 2], [94.0, 2.0, 2.0, 0.0, 2.0])
    assert degrees == 1
    assert chi_square == pytest.approx(4**2 / 94 + 4**2 / 6)
    assert chi_square_test([90, 10, 1], [90.0, 11.0, 0.0])[2] == 0.0
