"""`--config FILE`: flags of a command out of a YAML file; and the short names of flags that vLLM has, too."""

from __future__ import annotations

from pathlib import Path

import pytest

ASK = ("generate", "--prompt", "Why is the sky blue?")
FILE = """\
max-model-len: 256
block_size: 8
enforce-eager: true
enable-chunked-prefill: false
prompt: [one, two three]
speculative-config: {method: medusa}
tokenizer: null
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "flags.yaml").write_text(FILE, encoding="utf-8")
    return tmp_path / "flags.yaml"


def test_a_file_gives_flags_in_either_spelling_and_those_of_the_command(teachllm, llm, file) -> None:
    result = teachllm("generate", "--config", str(file))
    assert result.exit_code == 0, result.output
    assert (llm.config.max_model_len, llm.config.block_size) == (256, 8)
    assert llm.config.enforce_eager and not llm.config.enable_chunked_prefill
    assert llm.config.speculative_config.model == "teachlm-medusa"
    assert llm.asked == [["one", "two three"]]


@pytest.mark.parametrize(
    ("text", "name", "value"),
    [
        ("{model: some/model, revision: 2024-05-01}", "revision", "2024-05-01"),
        ("trace: steps.jsonl", "trace_path", "steps.jsonl"),
        ("tp: 2", "tensor_parallel_size", 2),
        ("no-enable-prefix-caching: true", "enable_prefix_caching", False),
        ("no_enable_prefix_caching: false", "enable_prefix_caching", True),
        ("# nothing", "block_size", 16),
    ],
)
def test_a_file_has_the_names_and_values_that_could_be_typed(teachllm, llm, tmp_path, text, name, value) -> None:
    (tmp_path / "flags.yaml").write_text(text, encoding="utf-8")
    result = teachllm(*ASK, "--config", str(tmp_path / "flags.yaml"))
    assert result.exit_code == 0, result.output
    assert getattr(llm.config, name) == value


def test_one_value_is_enough_for_a_flag_that_may_come_several_times(teachllm, llm, tmp_path) -> None:
    (tmp_path / "flags.yaml").write_text("prompt: one", encoding="utf-8")
    assert teachllm("generate", "--config", str(tmp_path / "flags.yaml")).exit_code == 0
    assert llm.asked == [["one"]]


def test_what_is_typed_wins_wherever_it_stands(teachllm, llm, file) -> None:
    assert teachllm("generate", "--block-size", "4", "--config", str(file), "--prompt", "four").exit_code == 0
    assert (llm.config.max_model_len, llm.config.block_size) == (256, 4)
    assert llm.asked == [["four"]]


@pytest.mark.parametrize(
    "text, said",
    [
        ("blok-size: 8", "generate has no flag --blok-size"),
        ("config: other.yaml", "generate has no flag --config"),
        ("trace-path: steps.jsonl", "generate has no flag --trace-path"),
        ("no-enable-prefix-caching: perhaps", "true or false"),
        ("block-size: 2.5", "--block-size"),
        ("block-size: [8, 16]", "--block-size"),
        ("enforce-eager: perhaps", "--enforce-eager"),
        ("speculative-config: medusa", "--speculative-config"),
        ("hf-overrides: [1]", "--hf-overrides"),
        ("dtype: float8", "dtype"),
        ("- block-size", "must hold flags by name"),
        ("a: b: c", "cannot be read"),
    ],
)
def test_a_wrong_file_is_refused_by_the_flag_or_its_name(teachllm, llm, tmp_path, text: str, said: str) -> None:
    (tmp_path / "flags.yaml").write_text(text, encoding="utf-8")
    result = teachllm(*ASK, "--config", str(tmp_path / "flags.yaml"))
    assert result.exit_code != 0 and said in " ".join(result.output.replace("│", " ").split()), result.output
    assert llm.asked == [] and "Traceback" not in result.output


def test_a_file_that_is_not_there(teachllm) -> None:
    assert "cannot be read" in teachllm(*ASK, "--config", "/nowhere.yaml").output.replace("\n", " ")


def test_short_flags_are_those_of_vllm(teachllm, llm) -> None:
    short = ("-tp", "2", "-pp", "3", "-q", "int8", "-n", "2", "-ep")
    assert teachllm(*ASK, "-m", "some/model", *short).exit_code == 0
    assert (llm.config.model, llm.config.quantization, llm.config.nnodes) == ("some/model", "int8", 2)
    assert (llm.config.tensor_parallel_size, llm.config.pipeline_parallel_size) == (2, 3)
    assert llm.config.enable_expert_parallel
    assert teachllm(*ASK, "-dp", "2").exit_code == 0
    assert llm.config.data_parallel_size == 2


def test_objects_are_given_as_json(teachllm, llm) -> None:
    given = ("--hf-overrides", '{"rope_theta": 5.0}', "--override-generation-config", '{"top_k": 3}')
    assert teachllm(*ASK, *given, "--generation-config", "vllm").exit_code == 0
    assert llm.config.hf_overrides == {"rope_theta": 5.0}
    assert (llm.config.override_generation_config, llm.config.generation_config) == ({"top_k": 3}, "vllm")
