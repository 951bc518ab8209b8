"""`teachllm generate`: prompts in, continuations out."""

from __future__ import annotations

import json

from teachllm import SamplingParams
from teachllm.sampling_params import FILTERS, PARAMETERS
from tests.cli.conftest import as_options
from tests.request_kinds import EXAMPLES

KEYS = ["prompt", "text", "token_ids", "finish_reason", "num_prompt_tokens", "num_cached_tokens"]


def test_json_prints_one_object_a_line_in_the_order_of_the_prompts(teachllm, llm) -> None:
    result = teachllm("generate", "--prompt", "one two", "--prompt", "three", "--max-tokens", "4", "--json")
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    assert [line["prompt"] for line in lines] == ["one two", "three"]
    assert [list(line) for line in lines] == [KEYS, KEYS]
    assert lines[0]["text"] == llm.reply
    assert (lines[0]["num_prompt_tokens"], lines[0]["num_cached_tokens"]) == (2, 1)
    assert llm.asked == [["one two", "three"]]
    assert llm.closed


def test_several_completions_of_a_prompt_are_told_apart_by_index(teachllm, llm) -> None:
    result = teachllm("generate", "-p", "one", "--n", "3", "--json")
    assert [json.loads(line)["index"] for line in result.stdout.splitlines()] == [0, 1, 2]


def test_text_for_people_shows_prompt_completion_and_counts(teachllm, llm) -> None:
    llm.reply = " [red]four[/red]\x1b[0m"
    result = teachllm("generate", "-p", "one two three")
    assert result.stdout.startswith("one two three [red]four[/red]\n")
    assert "[3 prompt tokens, 1 cached; 2 output tokens; stop]" in result.stdout


def test_prompts_come_from_a_file_or_stdin_one_a_line(teachllm, llm, tmp_path) -> None:
    (tmp_path / "prompts.txt").write_text("a b\n\n  \nc\n", encoding="utf-8")
    teachllm("generate", "-p", "first", "--prompt-file", str(tmp_path / "prompts.txt"))
    teachllm("generate", "--prompt-file", "-", stdin="x\ny\n")
    assert llm.asked == [["first", "a b", "c"], ["x", "y"]]


def test_flags_of_the_request_reach_the_sampler(teachllm, llm) -> None:
    given = {name: EXAMPLES[name] for name, spec in PARAMETERS.items() if spec.option is not None}
    assert {*FILTERS, "temperature", "repetition_penalty", "seed", "max_tokens", "stop"} <= set(given)
    teachllm("generate", "-p", "one", *as_options(given))
    assert llm.params == SamplingParams(**given)


def test_without_a_flag_the_checkpoint_says_how_many_tokens_or_else_there_are_128(teachllm, llm) -> None:
    teachllm("generate", "-p", "one")
    assert llm.params.max_tokens == 128
    llm.generation_defaults = {"max_tokens": 2}
    teachllm("generate", "-p", "one")
    assert llm.params.max_tokens == 2
    teachllm("generate", "-p", "one", "--max-tokens", "7")
    assert llm.params.max_tokens == 7


def test_flags_of_the_engine_reach_its_configuration(teachllm, llm) -> None:
    flags = "--model some/model --dtype bfloat16 --block-size 32 --no-enable-prefix-caching --max-num-seqs 4"
    teachllm("generate", "-p", "one", *flags.split(), "--enforce-eager", "--no-enable-chunked-prefill")
    config = llm.config
    assert (config.model, config.dtype, config.block_size, config.max_num_seqs) == ("some/model", "bfloat16", 32, 4)
    assert config.enforce_eager
    assert not config.enable_prefix_caching
    assert not config.enable_chunked_prefill


def test_no_prompt_is_refused_with_the_flags_that_give_one(teachllm) -> None:
    result = teachllm("generate", "--json")
    assert result.exit_code == 1
    assert result.stderr == "error: no prompt: give --prompt TEXT, or --prompt-file FILE (- reads stdin)\n"


def test_a_prompt_file_that_is_not_there_is_named(teachllm) -> None:
    result = teachllm("generate", "--prompt-file", "/nowhere/prompts.txt")
    assert result.exit_code == 1
    assert "error: " in result.stderr
    assert "/nowhere/prompts.txt" in result.stderr
