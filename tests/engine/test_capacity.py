"""How many equal requests run at once is predicted exactly: that many run undisturbed, one more does not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from teachllm import EngineConfig, SamplingParams
from teachllm.engine.capacity import num_undisturbed
from teachllm.engine.info import describe_model
from teachllm.worker.processes.multiprocess import MultiprocessExecutor
from tests.checkpoints import make_checkpoint
from tests.spec_decode.drafters import speculation
from tests.thorough import THOROUGH
from tests.worker.engines import drain, make_engine, random_ids, tiny
from tests.worker.processes.child_threads import ranks_in_threads


def resolved(**settings: object) -> EngineConfig:
    defaults: dict[str, object] = {"max_model_len": 96, "max_num_batched_tokens": 64, "max_num_seqs": 50}
    return EngineConfig(**(defaults | settings)).resolve(96)  # type: ignore[arg-type]


def disturbed(num_requests: int, num_blocks: int, input_len: int, output_len: int, **settings: object) -> bool:
    """Whether real requests on a real model were preempted or waited for blocks."""
    engine = make_engine(num_gpu_blocks_override=num_blocks, max_num_seqs=50, **settings)
    params = SamplingParams(max_tokens=output_len, temperature=0.0, ignore_eos=True)
    for index in range(num_requests):
        engine.add_request(str(index), {"prompt_token_ids": random_ids(input_len, seed=index)}, params)
    waited = False
    schedule = engine.core.scheduler.schedule

    def watched():
        nonlocal waited
        plan = schedule()
        waited |= any("blocks" in str(request.wait) for request in engine.core.scheduler.waiting)
        return plan

    engine.core.scheduler.schedule = watched
    drain(engine)
    return waited or engine.core.scheduler.num_preemptions > 0


SHAPES = [(24, 20, 40), (25, 33, 16), (17, 1, 63), (30, 48, 16), (21, 16, 33)]
BOTH = [(*shape, ahead) for shape in SHAPES for ahead in (False, True)]


@pytest.mark.parametrize(
    ("num_blocks", "input_len", "output_len", "async_scheduling"),
    BOTH if THOROUGH else [BOTH[0], BOTH[3]],
)
def test_the_number_runs_undisturbed_and_one_more_does_not(
    num_blocks: int, input_len: int, output_len: int, async_scheduling: bool
) -> None:
    settings = {"async_scheduling": async_scheduling}
    count = num_undisturbed(resolved(**settings), num_blocks, input_len, output_len)
    assert count >= num_blocks // -(-(input_len + output_len) // 16)
    assert not disturbed(count, num_blocks, input_len, output_len, **settings)
    assert disturbed(count + 1, num_blocks, input_len, output_len, **settings)


def test_a_request_that_never_fits_runs_no_times_and_the_limit_is_the_limit() -> None:
    assert num_undisturbed(resolved(), 3, 40, 20) == 0
    assert num_undisturbed(resolved(), 10_000, 40, 20) == 50


def test_of_a_mixture_of_experts_it_is_said_how_much_a_token_meets(tmp_path: Path) -> None:
    moe = describe_model(resolved(model=make_checkpoint("mixtral", tmp_path)))
    dense = describe_model(resolved())
    found = {what: explanation for what, _, explanation in moe}["parameters"]
    assert found == "in float32 on cpu; between embedding and output head a token meets 0.1 M"
    assert {what: explanation for what, _, explanation in dense}["parameters"] == "in float32 on cpu"


def test_requests_longer_than_the_context_are_refused() -> None:
    with pytest.raises(ValueError, match=r"input_len=90 and output_len=7 make 97 tokens, and max_model_len is 96"):
        num_undisturbed(resolved(), 100, 90, 7)


def test_info_ends_with_the_number() -> None:
    config = EngineConfig(**tiny(num_gpu_blocks_override=24, max_num_seqs=50))
    count = num_undisturbed(resolved(), 24, 20, 40)
    row = describe_model(config, 20, 40)[-1]
    assert row == ("requests at once", str(count), "of 20 tokens in and 40 out: none waits for blocks or loses them")
    assert "of 95 tokens in and 1 out" in describe_model(config, output_len=1)[-1][2]
    assert "of 1 token in and 95 out" in describe_model(config, 1, 95)[-1][2]
    assert describe_model(config)[-1][2].startswith("of 1 token in and 95 out")


def test_info_counts_a_draft_models_weights_and_its_layers_of_kv() -> None:
    config = EngineConfig(**tiny(num_gpu_blocks_override=24))
    plain = {what: amount for what, amount, _ in describe_model(config)}
    given = speculation("draft_model", "qwen3")
    drafting = {what: amount for what, amount, _ in describe_model(replace(config, speculative_config=given))}
    amounts = [[float(rows[name].split()[0]) for rows in (plain, drafting)] for name in ("weights", "KV per token")]
    # The draft model is as large as the model.
    assert all(twice == pytest.approx(2 * once, rel=0.01) for once, twice in amounts)
    assert plain["layers"] == drafting["layers"]


def test_info_says_what_each_rank_has_and_the_table_is_of_the_tightest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks_in_threads(monkeypatch)
    config = EngineConfig(model=make_checkpoint("llama_yarn", tmp_path), device="cpu", max_num_seqs=4)
    sizes = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}
    executor = MultiprocessExecutor(replace(config, **sizes).resolve(512))  # type: ignore[arg-type]
    executor.close()
    rows = {what: (amount, why) for what, amount, why in describe_model(replace(config, **sizes))}  # type: ignore[arg-type]
    for rank, layers in enumerate(["0 to 1, embedding", "0 to 1, embedding", "2 to 2, output head"]):
        assert f"of layers {layers}: 4 query and 1 KV heads; KV " in rows[f"rank {rank}"][1]
    assert rows["rank 0"][1].endswith(f"KV 512 B per token, {executor.num_blocks} blocks")
    assert rows["rank 2"][1].endswith(f"KV 256 B per token, {executor.num_blocks} blocks")
    assert rows["what follows"][0] == "rank 0" and rows["KV per token"][0] == "512 B"
    assert rows["weights"][0] == rows["rank 0"][0] and rows["KV cache"][1].startswith(f"{executor.num_blocks} blocks")
    alone = {what: amount for what, amount, _ in describe_model(config)}
    assert "rank 0" not in alone and alone["KV per token"] == "1.5 KiB"


def test_info_refuses_what_ranks_cannot_share(tmp_path: Path) -> None:
    config = EngineConfig(model=make_checkpoint("llama2", tmp_path), device="cpu", tensor_parallel_size=4)
    with pytest.raises(ValueError, match="does not divide the model's attention heads"):
        describe_model(config)
