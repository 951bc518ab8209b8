"""Lesson 01: the engine's own attention keeps the contract, wrong ones are told why, and what is shown is so."""

from __future__ import annotations

import pytest
import torch

from teachllm.engine.overrides import EngineOverrides
from teachllm_lessons.helpers.lesson_01 import (
    ATTEND,
    MODELS,
    AttentionRecorder,
    attention_picture,
    how_likely_was_the_prompt,
    kv_bytes,
    uses,
    work_picture,
)
from teachllm_lessons.watch import Watch
from tests.lessons.wrong_answers import keeps_contract, rejected
from tests.thorough import only_thorough

NO_CACHE = {"enable_kv_cache": False, "enable_chunked_prefill": False, "enable_prefix_caching": False}


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    *,
    is_causal: bool = True,
    first: int | None = None,
    is_interleaved: bool = True,
) -> torch.Tensor:
    """Right by default; each argument makes one mistake."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1) if is_interleaved else x.repeat(1, group, 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    if is_causal:
        place = torch.arange(len(q)).unsqueeze(1) + (len(k) - len(q) if first is None else first)
        scores = scores.masked_fill(torch.arange(len(k)) > place, float("-inf"))
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)


def without_a_mask(*given: object) -> torch.Tensor:
    return attention(*given, is_causal=False)  # type: ignore[arg-type]


def queries_at_the_start(*given: object) -> torch.Tensor:
    return attention(*given, first=0)  # type: ignore[arg-type]


def one_place_late(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    return attention(q, k, v, scale, first=0 if len(q) == len(k) else len(k))


def heads_in_turn(*given: object) -> torch.Tensor:
    return attention(*given, is_interleaved=False)  # type: ignore[arg-type]


def without_the_scale(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    return attention(q, k, v, 1.0)


def scores_as_weights(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    scores = (torch.einsum("qhd,khd->hqk", q, k) * scale).tril(len(k) - len(q))
    return torch.einsum("hqk,khd->qhd", scores / scores.sum(-1, keepdim=True), v)


def with_exp(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    weights = (torch.einsum("qhd,khd->hqk", q, k) * scale).exp().tril(len(k) - len(q))
    return torch.einsum("hqk,khd->qhd", weights / weights.sum(-1, keepdim=True), v)


def flattened(*given: object) -> torch.Tensor:
    return attention(*given).flatten(1)  # type: ignore[arg-type]


def test_the_engines_own_is_right() -> None:
    keeps_contract(ATTEND, "in all 6 layers")


@pytest.mark.parametrize(
    ("piece", "words"),
    [
        (without_a_mask, r"two tokens of a prompt: .* the first token must not see the second"),
        (queries_at_the_start, r"one query, two keys with equal scores: .* it stands last and sees both"),
        (heads_in_turn, r"grouped heads: .* heads 0 and 1 read head 0"),
        (one_place_late, r"the last two of three tokens .* the first of these stands at place 1"),
        (without_the_scale, r"multiplied by `scale`, once"),
        (scores_as_weights, r"equal scores are equal weights"),
        (with_exp, r"exp\(1000\) is more than a float holds"),
        (flattened, r"shape \[1, 1\] came back, and should be that of q, \[1, 1, 1\]"),
    ],
)
def test_wrong_ones_are_told_why(piece: object, words: str) -> None:
    rejected(ATTEND, piece, words)


@only_thorough
def test_k_and_v_of_a_token_never_change_and_the_naive_engine_computes_them_again() -> None:
    recorder = AttentionRecorder()
    with Watch(
        num_gpu_blocks_override=8, max_model_len=64, overrides=EngineOverrides(attention=recorder), **NO_CACHE
    ) as watch:
        watch.add("A", "What is a KV cache?", 4)
        watch.run()
        assert "17 for the first time; grey: 45 once more" in work_picture(watch, "A").says
    first, second = recorder.seen[:6], recorder.seen[6:12]
    for before, after in zip(first, second, strict=True):
        for name in "qkv":
            old, new = getattr(before, name), getattr(after, name)
            torch.testing.assert_close(new[: len(old)], old)
        weights = before.weights(3)
        torch.testing.assert_close(weights @ before.v[:, 1], before.out[:, 3])
    says = attention_picture(["user", " a"], {"head": weights[:2, :2]}).says
    assert "over the tokens user ·a. head: the last token takes" in says


def test_a_query_is_used_once_and_a_key_in_every_step_from_its_own_on() -> None:
    recorder = AttentionRecorder()
    with Watch(num_gpu_blocks_override=8, max_model_len=64, overrides=EngineOverrides(attention=recorder)) as watch:
        watch.add("A", "What is a KV cache?", 4)
        watch.run()
    found = uses(recorder.seen[::6])
    assert [each.of_q for each in found] == [1] * 17
    assert [each.of_kv for each in found] == [*[4] * 14, 3, 2, 1]


def test_bytes_are_those_of_the_paper() -> None:
    assert kv_bytes(*MODELS["OPT-13B"]) == 800 * 1024
    assert 4 * kv_bytes(*MODELS["Llama 3.1 8B"]) == kv_bytes(*MODELS["Llama 2 7B"])


@only_thorough
def test_how_a_prompt_is_cut_does_not_change_how_likely_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    how_likely_was_the_prompt()
    said = [line[10:] for line in capsys.readouterr().out.splitlines()]
    assert len(said) == 2 and len(set(said)) == 1
