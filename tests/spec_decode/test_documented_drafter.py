"""The drafters that are shown to readers run as they are shown."""

from __future__ import annotations

import re
import textwrap
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from teachllm import LLM, SamplingParams
from teachllm.spec_decode import drafter
from tests.thorough import only_thorough

PAGE = Path(__file__).parents[2] / "docs" / "speculation.md"
QUESTION = [{"role": "user", "content": "What is a KV cache?"}]


@pytest.fixture(scope="module")
def answer() -> str:
    with closing(LLM("teachlm", device="cpu")) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=100)
        return llm.chat(QUESTION, params, use_tqdm=False)[0].outputs[0].text


@only_thorough
def test_the_one_in_the_source_drafts_and_changes_nothing(answer: str) -> None:
    shown = re.findall(r"(?:^    .*\n|^\n)+", drafter.__doc__ or "", flags=re.MULTILINE)
    code = textwrap.dedent(next(block for block in shown if "class Echo" in block))
    assert code.rstrip().splitlines()[-1].startswith("LLM(")
    names: dict[str, Any] = {"LLM": partial(LLM, device="cpu")}
    exec(code.replace("\nLLM(", "\nllm = LLM("), names)
    with closing(names["llm"]) as llm:
        [output] = llm.chat(QUESTION, SamplingParams(temperature=0.0, max_tokens=100), use_tqdm=False)
        assert output.outputs[0].text == answer
        assert llm.speculation().stats.num_draft_tokens > 0


def test_the_one_in_the_documentation_does_what_the_page_says(answer: str, capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    (code,) = (block for block in blocks if "class Echo" in block)
    names: dict[str, Any] = {}
    exec(code, names)
    names["llm"].close()
    told = capsys.readouterr().out.splitlines()
    assert told == [answer, "0% accepted"]
    assert f"(`{told[1]}`)" in PAGE.read_text(encoding="utf-8")


@only_thorough
def test_looking_up_finds_nothing_in_a_first_answer_and_all_of_it_when_it_is_said_again(
    answer: str, capsys: pytest.CaptureFixture[str]
) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    (code,) = (block for block in blocks if "Say that again." in block)
    names: dict[str, Any] = {}
    exec(code.replace('"ngram"}', '"ngram", "adaptive": False}'), names)  # what is timed is not for a test
    names["llm"].close()
    first, second = capsys.readouterr().out.splitlines()
    assert first.endswith(answer) and second.endswith(answer)
    assert float(first.split()[0]) < 1.5 and float(second.split()[0]) > 4
