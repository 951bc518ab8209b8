"""`teachllm spec check`: what it shows, and when it fails."""

from __future__ import annotations

import pytest

from teachllm.sampling import sampler
from teachllm.spec_decode import losslessness

FEW = ("--samples", "2000")


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")


def test_every_rule_is_shown_with_figures_a_picture_and_a_verdict(teachllm) -> None:
    result = teachllm("spec", "check", *FEW)
    assert result.exit_code == 0, result.stderr
    lines = result.stdout.splitlines()
    for name, rule in losslessness.RULES.items():
        described, figures, picture = (line.split(maxsplit=1)[1] for line in lines if line.split()[:1] == [name])
        assert described.strip() == rule.about
        assert rule.about.startswith("the engine's: ") == (name in ("chain", "short-chain", "tree"))
        assert figures.startswith("2,000 ")
        assert any(bar in picture for bar in "▁▂▃▄▅▆▇█")
        verdict = "lossless as far as this can tell" if rule.is_lossless else "biased"
        assert picture.rstrip().endswith(verdict)
    for text in ("accepted", "mean", "chi-square", "degrees of", "p-value", "expected", "found"):
        assert text in result.stdout


def test_one_rule_can_be_chosen_and_the_figures_are_those_of_the_measurement(teachllm) -> None:
    found = losslessness.check(losslessness.RULES["tree"], 3000, seed=4)
    result = teachllm("spec", "check", "--samples", "3000", "--seed", "4", "--rule", "tree")
    assert result.exit_code == 0 and "chain" not in result.stdout
    figures = next(line.split() for line in result.stdout.splitlines() if "3,000" in line)
    assert figures[:4] == ["tree", "3,000", f"{found.mean_length - 1:.2f}", f"{found.mean_length:.2f}"]
    assert figures[4:] == [f"{found.chi_square:.4g}", "24", f"{found.p_value:.2g}"]


def test_it_says_what_was_put_to_the_test_and_what_was_not(teachllm) -> None:
    said = " ".join(teachllm("spec", "check", *FEW, "--rule", "chain").stdout.split())
    assert "Sampler.draw_drafts, Sampler.sample (on a CPU the kernel's reference) and DraftTree.walk" in said
    assert "not the models, tree attention" in said
    told = " ".join(teachllm("spec", "check", "--help").stdout.split())
    assert "--device" in told and "Sampler" in told


def test_a_rule_that_breaks_its_claim_fails(teachllm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler, "rejection_sample_reference", lambda *_, siblings, **__: siblings[:, 0].clone())
    result = teachllm("spec", "check", *FEW, "--rule", "chain", "--rule", "accept-always")
    assert result.exit_code == 1
    assert result.stderr.startswith("error: chain claims to be lossless, and is not: p-value ")
    assert "accept-always" not in result.stderr and "chi-square" in result.stdout


def test_a_biased_rule_that_is_not_found_out_fails(teachllm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(losslessness, "SUSPICIOUS", 0.0)
    result = teachllm("spec", "check", *FEW, "--rule", "chain-per-path")
    assert result.exit_code == 1
    assert result.stderr == ("error: chain-per-path is biased, and 2,000 samples do not show it: raise --samples\n")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--rule", "tee"), "--rule tee: choose among chain, short-chain, tree, tree-replaced, "),
        (("--samples", "5"), "num_samples=5: must be at least 100"),
        (("--seed", "-1"), "seed=-1: must be from 0"),
        (("--device", "tpu"), "device='tpu': "),
    ],
)
def test_what_cannot_be_measured_is_one_line(teachllm, arguments: tuple[str, ...], said: str) -> None:
    result = teachllm("spec", "check", *arguments)
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith(f"error: {said}") and result.stderr.count("\n") == 1
