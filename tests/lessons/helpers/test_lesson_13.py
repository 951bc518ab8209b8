"""Lesson 13: settings that serve the workload well are found, and others are told what they waste."""

from __future__ import annotations

import json
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from teachllm.bench.ladder import GPU, RUNGS, workload
from teachllm.config import EngineConfig
from teachllm.engine.llm_engine import Engine
from teachllm.sampling_params import SamplingParams
from teachllm.simulator.shapes import SHAPES
from teachllm_lessons.helpers.lesson_13 import (
    COMPUTED_AT_THE_TOP,
    SETTINGS,
    SMALL,
    bottom,
    draw_ladder,
    tokens_of_eight,
    told_ladder,
    top,
    which_rung,
)
from teachllm_lessons.results import committed
from tests.lessons.wrong_answers import keeps_contract, rejected
from tests.thorough import only_thorough


def test_the_ladders_own_settings_are_right() -> None:
    keeps_contract(SETTINGS, "in 23 steps in place of 104")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_gpu_blocks_override": 64}, r"64 blocks of 16 are 1024 slots, and the memory has room for 576"),
        ({"block_size": SMALL.max_len}, "EngineConfig refuses it: enable_prefix_caching=True shares full blocks"),
        ({"batch": 8}, "EngineConfig refuses it: .*unexpected keyword argument 'batch'"),
        ({"max_model_len": 128}, "max_model_len must stay 192"),
    ],
)
def test_others_are_told_what_they_waste(changes: dict[str, Any], words: str) -> None:
    rejected(SETTINGS, lambda: top() | changes, words)


@only_thorough
def test_the_bottom_is_no_answer() -> None:
    rejected(SETTINGS, bottom, "computes 418 tokens")
    rejected(SETTINGS, lambda: top() | {"max_num_seqs": 4}, "takes 34 steps, 28 are enough")
    uncached = {"enable_prefix_caching": False}
    rejected(SETTINGS, lambda: top() | uncached, "418 tokens, 320 are enough: all eight prompts begin alike")


def test_what_are_no_settings_are_no_answer() -> None:
    rejected(SETTINGS, lambda: None, "give a dict of EngineConfig's fields")


@only_thorough
def test_without_a_fault_no_rung_changes_an_answer(capsys: pytest.CaptureFixture[str]) -> None:
    which_rung()
    told = capsys.readouterr().out.splitlines()
    assert len(told) == 7 and all(line.endswith("the same answers") for line in told)


def test_the_committed_ladder_is_drawn_with_its_rungs() -> None:
    _, found = committed("ladder")
    (climbed,) = found["models"].values()
    drawn = draw_ladder(climbed["rungs"], "GPU")
    assert "recompute" in drawn.says and "graphs, running ahead" in drawn.says
    table = {line[:22].strip(): line[22:].split() for line in told_ladder(climbed["rungs"]).splitlines()[1:]}
    assert table["paged blocks"] == ["1,479", "102", "148", "ms", "16.32", "ms", "19.9", "ms"]
    assert table["chunked prefill"] == ["1,173", "134", "425", "ms", "16.28", "ms", "22.2", "ms"]
    assert table["speculation"][4::2] == ["5.57", "23.7"] and table["graphs, running ahead"][4::2] == ["1.25", "5.4"]
    assert table["KV cache"][4] == "7.31" and table["static batching"][4] == "16.67"
    assert "gaps of 5.57 ms (median) and 23.7 ms (p99)" in drawn.says
    labels = {text.get_text() for text in drawn.figure.axes[2].texts}
    assert {"5.57", "23.7"} <= labels
    dots = [ax for ax in drawn.figure.axes if ax.get_xscale() == "log"]
    assert dots and not any(ax.patches for ax in dots)  # a bar's length means nothing there
    assert climbed["ratio"] > 50
    with pytest.raises(FileNotFoundError, match="no result named"):
        committed("nothing-of-the-kind")


def test_drafts_pay_after_the_last_prompt_and_not_before() -> None:
    _, found = committed("ladder")
    (climbed,) = found["models"].values()
    by_name = {rung["name"]: rung["figures"] for rung in climbed["rungs"]}
    plain, drafts = by_name["graphs, running ahead"], by_name["speculation"]
    prompts = [round(1000 * each["ttft"]["p99"]) for each in (plain, drafts)]
    rest = [round(1000 * (each["duration"] - each["ttft"]["p99"])) for each in (plain, drafts)]
    assert (prompts, rest) == ([163, 200], [87, 34])
    assert drafts["num_accepted_tokens"] / drafts["num_drafts"] + 1 == pytest.approx(4.0, abs=0.05)
    arrivals = drafts["num_output_tokens"] - drafts["num_accepted_tokens"]
    assert arrivals - drafts["num_requests"] == 1142


@only_thorough
def test_the_gpu_ladders_steps_are_what_the_lesson_says(tmp_path: Path) -> None:
    """A model of the same shape but small has the same plans, as lengths alone decide them."""
    small = {"num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 64, "head_dim": 32}
    shape = SHAPES["qwen3-0.6b"] | small | {"num_attention_heads": 1, "num_key_value_heads": 1}
    (tmp_path / "config.json").write_text(json.dumps(shape), encoding="utf-8")
    settings: dict[str, Any] = {
        **{"max_model_len": GPU.max_len, "block_size": GPU.max_len, "max_num_batched_tokens": GPU.max_len},
        **{"num_gpu_blocks_override": GPU.num_slots // GPU.max_len, "scheduling_policy": "static"},
        **{"enable_prefix_caching": False, "enable_chunked_prefill": False, "max_num_seqs": GPU.max_num_seqs},
    }
    steps = {"static": _steps_of(tmp_path, settings)}
    steps["static, a larger budget"] = _steps_of(tmp_path, settings | {"max_num_batched_tokens": GPU.num_slots})
    steps["continuous"] = _steps_of(tmp_path, settings | {"scheduling_policy": "fcfs"})
    assert [len(each) for each in steps.values()] == [1202, 279, 194]
    for rung in RUNGS[3:7]:
        settings |= rung.settings(GPU)
    top_steps = _steps_of(tmp_path, settings)
    begun, gaps = set[str](), Counter[bool]()
    for step in top_steps:
        has_prompt = any(each["phase"] == "prefill" for each in step["scheduled"])
        gaps[has_prompt] += sum(each["request_id"] in begun for each in step["scheduled"])
        begun |= {each["request_id"] for each in step["scheduled"] if each.get("num_sampled")}
    assert len(top_steps) == 114 and gaps == {True: 735, False: 1697}


def _steps_of(folder: Path, settings: dict[str, Any]) -> list[dict[str, Any]]:
    lines: list[str] = []
    config = EngineConfig(model=str(folder), device="cpu", load_format="dummy", skip_tokenizer_init=True, **settings)
    with closing(Engine(config, trace_sink=lines.append)) as engine:
        batch = workload(GPU, None, engine.model_config.vocab_size)
        for index, (prompt, num_output) in enumerate(zip(batch.prompts, batch.output_lens, strict=True)):
            params = SamplingParams(temperature=0.0, max_tokens=num_output, ignore_eos=True)
            engine.add_request(str(index), {"prompt_token_ids": prompt}, params)
        while engine.has_unfinished_requests:
            engine.step()
    return [line for line in map(json.loads, lines) if line["event"] == "step"]


def test_tokens_by_hand_are_what_the_engine_computes() -> None:
    computed, uncached = tokens_of_eight(top()), tokens_of_eight(bottom())
    recomputed = tokens_of_eight(bottom() | {"enable_kv_cache": False})
    assert (computed, uncached) == (60 + 7 * 12 + 8 * 9, 8 * (60 + 9))
    assert recomputed == 8 * sum(range(60, 70))
    told = {"uncached": uncached, "bottom": recomputed, "times": recomputed / computed}
    assert COMPUTED_AT_THE_TOP.compare(216, computed, **told).verdict == "right"
    for wrong, words in ((224, "last token"), (264, "second prompt"), (152, "one output token"), (552, "prefix cache")):
        assert words in COMPUTED_AT_THE_TOP.compare(wrong, computed, **told).text
