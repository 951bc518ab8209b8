"""Where a step goes: kernels by group, overlap counted once, and floors that add up to the step's."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from teachllm import LLM
from teachllm.bench.batch import Batch
from teachllm.bench.step_profile import Event, group_of, profile_decode, summarize
from teachllm.roofline import Ceilings, StepShape, step_work

FOLDER = Path(__file__).parent.parent.parent / "kernels" / "teachllm_kernels"
CEILINGS = Ceilings("test", "float32", 1e9, 1e9, 1e12, 1e12)


def test_kernels_are_gathered_and_overlap_is_busy_once() -> None:
    events = [
        Event("_gemv", 0, 10),
        Event("_paged_decode", 8, 20),  # began before the one in front had ended
        Event("_gemv", 30, 40),
        Event("_rms_norm", 32, 36),  # beside another
    ]
    rows, busy_ms = summarize(events, num_steps=2)
    assert busy_ms == pytest.approx(0.015)
    assert [(row.name, row.group, row.calls) for row in rows] == [
        ("_gemv", "matrix products", 1.0),
        ("_paged_decode", "attention", 0.5),
        ("_rms_norm", "norms and the rest", 0.5),
    ]
    assert [row.ms for row in rows] == pytest.approx([0.007, 0.005, 0.003])  # 10 + 4, 20 - 10, 36 - 30; half of each


@pytest.mark.parametrize(
    ("name", "group"),
    [
        ("nvjet_sm90_tst_64x64_64x13_4x1_v_bz_TNT", "matrix products"),
        ("void cublasLt::splitKreduce_kernel<32, 16, int>", "matrix products"),
        ("_skinny_gemm", "matrix products"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop", "attention"),
        ("_paged_prefill", "attention"),
        ("_pick", "sampling"),
        ("_silu_and_mul", "norms and the rest"),
    ],
)
def test_a_kernel_is_known_by_its_name(name: str, group: str) -> None:
    assert group_of(name) == group


KERNELS = {
    "attention": [
        *("_hopper_decode", "_hopper_prefill", "_paged_decode", "_paged_prefill", "_plan_decode", "_plan_prefill"),
        "_merge_splits",
    ],
    "matrix products": [
        *("_skinny_gemm", "_batch_invariant_gemm", "_gemv", "_hopper_gated_linear", "_hopper_linear"),
        *("_hopper_packed_linear", "_packed_gemv", "_packed_linear"),
        *("_hopper_scaled_mm", "_scaled_gemv", "_scaled_linear"),
        "_grouped_gemm",
    ],
    "routing to experts": ["_combine", "_group", "_route"],
    "exchanges of ranks": ["_one_shot_all_reduce"],
    "drafts": [
        *("_accept_drafts", "_draft_inputs", "_draft_proposals", "_find_matches", "_following", "_propose"),
        *("_move_kv", "_push_drafts", "_synthetic_drafts"),
    ],
    "sampling": ["_append_tokens", "_cut", "_measure", "_pick", "_reject", "_scan", "_settle"],
    "norms and the rest": [
        *("_kv_write", "_rms_norm", "_rope_kv_write", "_silu_and_mul", "_step_inputs", "_write_runs"),
        *("_dequantize", "_quantize_rows", "_scale_sums", "_silu_and_mul_quantized"),
    ],
}


def test_every_kernel_of_this_project_has_its_group() -> None:
    sources = [file.read_text() for file in FOLDER.rglob("*.py")]
    found = {name for source in sources for name in re.findall(r"^\s+(_\w+)\[.*\]\(", source, re.M)}
    assert {name: group_of(name) for name in found} == {
        name: group for group, names in KERNELS.items() for name in names
    }


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    settings: dict[str, Any] = {"load_format": "dummy", "skip_tokenizer_init": True, "max_num_seqs": 2}
    llm = LLM("teachlm", device="cpu", max_model_len=128, **settings)
    yield llm
    llm.engine.close()


def test_more_requests_than_run_at_once_are_refused(llm: LLM) -> None:
    with pytest.raises(ValueError, match="3 requests do not run all at once with max_num_seqs=2"):
        profile_decode(llm, Batch([[5] * 4] * 3, [1] * 3), CEILINGS, num_steps=2)


def test_a_decode_step_of_the_embedded_model(llm: LLM, tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    steps = profile_decode(llm, Batch([[5] * 9, [6] * 20], [1, 1]), CEILINGS, num_steps=4, trace_path=trace)
    assert steps.num_steps == 4 and not llm.engine.has_unfinished_requests
    assert 0 < steps.busy_ms <= steps.wall_ms and 0 < steps.host_ms <= steps.unprofiled_ms
    assert "matrix products" in steps.groups()
    assert json.loads(trace.read_text())["traceEvents"]
    # Two requests with 5 + 5 + 5 tokens, 4 / 2 of them after the middle: the floors are the step's bytes, divided.
    total = sum(floor.ms for floor in steps.floors.values()) / 1000 * CEILINGS.read_bandwidth
    lens = [9 + 15 - 2, 20 + 15 - 2]
    assert total == pytest.approx(step_work(llm.engine.model_config, StepShape([1, 1], lens, 2)).num_bytes)


def test_steps_beyond_the_longest_sequence_are_refused(llm: LLM) -> None:
    with pytest.raises(ValueError, match="more than max_model_len=128"):
        profile_decode(llm, Batch([[5] * 84], [1]), CEILINGS)
