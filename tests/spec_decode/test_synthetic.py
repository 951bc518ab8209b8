"""An engine that accepts drafts at random says so wherever its output could be taken for a text."""

from __future__ import annotations

import json
import warnings
from contextlib import closing
from pathlib import Path

import pytest

from teachllm import LLM, EngineConfig, SamplingParams
from teachllm.engine.async_llm import AsyncLLM
from tests.thorough import times
from tests.worker.engines import random_ids, tiny

SYNTHETIC = {"method": "ngram", "rejection_sample_method": "synthetic"}
SAID = "output means nothing: drafts are accepted at random, rejection_sample_method=synthetic"
PARAMS = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)


def test_it_warns_once_when_it_starts_and_labels_its_figures_and_its_trace(tmp_path: Path) -> None:
    trace = tmp_path / "run.jsonl"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        llm = LLM(**tiny(speculative_config=SYNTHETIC, trace_path=str(trace), trace_text=False))
        with closing(llm):
            for _ in range(2):
                llm.generate({"prompt_token_ids": random_ids(9)}, PARAMS, use_tqdm=False)
            found = llm.speculation()
    assert [str(each.message) for each in caught].count(SAID) == 1
    assert found is not None and found.is_synthetic and found.as_json()["is_synthetic"] is True
    header = json.loads(trace.read_text().splitlines()[0])
    assert header["config"]["speculative_config"]["rejection_sample_method"] == "synthetic"


def test_one_that_verifies_does_not_warn() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with closing(LLM(**tiny(speculative_config={"method": "ngram"}))) as llm:
            found = llm.speculation()
    assert not any("means nothing" in str(each.message) for each in caught)
    assert found is not None and not found.is_synthetic


@pytest.mark.parametrize("own_process", [False, True][: times(1, 2)])
def test_the_log_of_a_server_has_the_warning(own_process: bool, capfd: pytest.CaptureFixture[str]) -> None:
    config = EngineConfig(**tiny(speculative_config=SYNTHETIC))
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        warnings.showwarning = _as_python_does
        AsyncLLM.start(config, own_process=own_process).close()
    assert capfd.readouterr().err.count(SAID) == 1


def _as_python_does(message: Warning | str, category: type[Warning], filename: str, lineno: int, *more: object) -> None:
    """pytest would keep it to itself."""
    import os

    os.write(2, warnings.formatwarning(message, category, filename, lineno).encode())
