"""teachlm as a mixture of experts (training/upcycle.py): teachlm's answers, wherever its experts are, and uneven loads.

Its experts are one function, so an answer here is right even if a row went to an expert that the router did not pick.
What sees that has experts which differ: test_parallel.py's `test_experts_may_be_spread_over_ranks_or_cut`, and for
replicas all of test_expert_parallel.py.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from teachllm import LLM, SamplingParams
from teachllm.trace.reader import Trace, read_trace
from tests.bench.h200_script import load_script
from tests.engine.replicas.test_expert_parallel import SHARED, loads_of_all
from tests.golden.make_teachlm import QUESTIONS
from tests.thorough import only_thorough
from tests.worker.processes.child_threads import cores_in_threads, patched

upcycling = load_script("upcycle", "training")
pytestmark = only_thorough
NUM_LAYERS = 6
WAYS: dict[str, dict[str, Any]] = {
    "alone": {},
    "experts spread over replicas": SHARED,
    "every expert cut": {"tensor_parallel_size": 2},
    "experts spread": {"tensor_parallel_size": 2, "enable_expert_parallel": True},
}


def answer(model: str, **settings: Any) -> list[list[int]]:
    """The tokens of greedy answers."""
    chats = [[{"role": "user", "content": question}] for question in QUESTIONS[:8]]
    with closing(LLM(model, device="cpu", dtype="float32", max_num_seqs=4, **settings)) as llm:
        outputs = llm.chat(chats, SamplingParams(temperature=0.0, max_tokens=24), use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


@pytest.fixture(scope="module")
def mixture() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:  # 64 MB, which should not wait for pytest to forget them
        upcycling.upcycle(Path(folder))
        yield Path(folder)


@pytest.fixture(scope="module")
def dense() -> list[list[int]]:
    return answer("teachlm")


@pytest.fixture(scope="module", params=list(WAYS))
def answered(request: pytest.FixtureRequest, mixture: Path) -> Iterator[tuple[list[list[int]], list[Trace]]]:
    """Its answers, and the trace of each replica."""
    folder = mixture / request.param
    folder.mkdir()
    with patched(cores_in_threads):
        ids = answer(str(mixture), trace_path=str(folder / "run.jsonl"), **WAYS[request.param])
    yield ids, [read_trace(path) for path in sorted(folder.iterdir())]


def test_its_answers_are_those_of_teachlm(
    answered: tuple[list[list[int]], list[Trace]], dense: list[list[int]]
) -> None:
    assert len({token for ids in dense for token in ids}) > 64
    assert answered[0] == dense


def test_every_layer_is_busy_and_some_experts_more_than_others(
    answered: tuple[list[list[int]], list[Trace]],
) -> None:
    loads = loads_of_all(answered[1], upcycling.TOP_K)
    assert [len(layer) for layer in loads] == [upcycling.NUM_EXPERTS] * NUM_LAYERS
    assert all(0 < 1.5 * min(layer) < max(layer) for layer in loads)


def test_transformers_reads_it_as_the_same_model(mixture: Path, dense: list[list[int]]) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(mixture, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(mixture)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": QUESTIONS[0]}], add_generation_prompt=True, tokenize=True, return_dict=False
    )
    with torch.inference_mode():
        made = model.generate(torch.tensor([prompt]), max_new_tokens=24, do_sample=False, pad_token_id=0)
    assert made[0, len(prompt) :].tolist() == dense[0]
