"""Where requests get the settings from that they do not name."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path

import pytest

from teachllm import LLM, SamplingParams
from teachllm.errors import ModelError
from tests.checkpoints import make_checkpoint
from tests.request_kinds import EXAMPLES

ADVISED = {"temperature": 0.6, "top_k": 20, "max_new_tokens": 9, "eos_token_id": [7, 9]}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = Path(make_checkpoint("llama3", tmp_path / "model"))
    (folder / "generation_config.json").write_text(json.dumps(ADVISED))
    return folder


def defaults(folder: Path, **settings: object) -> SamplingParams:
    with closing(LLM(str(folder), skip_tokenizer_init=True, num_gpu_blocks_override=8, **settings)) as llm:
        assert set(llm.engine.model_config.eos_token_ids) == {7, 9}  # ends of sequence are no setting
        return llm.get_default_sampling_params()


def test_the_checkpoint_recommends(folder: Path) -> None:
    assert defaults(folder) == SamplingParams(temperature=0.6, top_k=20, max_tokens=9)


@pytest.mark.parametrize(
    ("key", "parameter", "value"),
    [
        *((name, name, EXAMPLES[name]) for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")),
        ("max_new_tokens", "max_tokens", EXAMPLES["max_tokens"]),
    ],
)
def test_each_parameter_is_recommended_by_its_key(key: str, parameter: str, value: float, folder: Path) -> None:
    (folder / "generation_config.json").write_text(json.dumps({key: value, "eos_token_id": [7, 9]}))
    assert defaults(folder) == SamplingParams(**{parameter: value})


def test_a_user_leaves_it_alone_or_replaces_some_of_it(folder: Path) -> None:
    assert defaults(folder, generation_config="vllm") == SamplingParams()
    some = {"top_k": 5, "top_p": 0.5, "temperature": None}
    assert defaults(folder, override_generation_config=some) == SamplingParams(
        temperature=0.6, top_k=5, top_p=0.5, max_tokens=9
    )
    assert defaults(folder, generation_config="vllm", override_generation_config=some) == SamplingParams(
        top_k=5, top_p=0.5
    )


def test_another_folder_recommends(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "generation_config.json").write_text('{"do_sample": false, "eos_token_id": [9, 7]}')
    assert defaults(folder, generation_config=str(tmp_path / "other")) == SamplingParams(temperature=0)


def test_an_override_joins_the_recommendation_before_it_is_read(folder: Path) -> None:
    (folder / "generation_config.json").write_text(json.dumps(ADVISED | {"do_sample": False, "temperature": 0.7}))
    assert defaults(folder).temperature == 0
    assert defaults(folder, override_generation_config={"do_sample": True}).temperature == 0.7


@pytest.mark.parametrize(
    "settings, said",
    [
        ({"override_generation_config": {"temprature": 1.0}}, "override_generation_config has no 'temprature'"),
        ({"override_generation_config": {"top_k": 2.5}}, "override_generation_config: top_k=2.5"),
        ({"override_generation_config": {"temperature": -1.0}}, "override_generation_config: temperature=-1"),
        ({"generation_config": "/nowhere"}, "generation_config='/nowhere'"),
    ],
)
def test_no_request_could_have_it(folder: Path, settings: dict, said: str) -> None:
    with pytest.raises(ModelError, match=said):
        LLM(str(folder), skip_tokenizer_init=True, **settings)


@pytest.mark.parametrize("model_impl", ["teachllm", "transformers"])
def test_values_in_place_of_those_in_config_json(folder: Path, tmp_path: Path, model_impl: str) -> None:
    changed = {"max_position_embeddings": 48, "rms_norm_eps": 0.5}
    other = Path(make_checkpoint("llama3", tmp_path / "other"))
    (other / "config.json").write_text(json.dumps(json.loads((other / "config.json").read_text()) | changed))
    params, answers = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, detokenize=False), []
    for model, overrides in ((folder, changed), (other, None), (folder, None)):
        settings = {"hf_overrides": overrides, "model_impl": model_impl, "num_gpu_blocks_override": 16}
        with closing(LLM(str(model), skip_tokenizer_init=True, **settings)) as llm:
            output = llm.generate({"prompt_token_ids": list(range(5, 25))}, params, use_tqdm=False)[0]
            answers.append((llm.config.max_model_len, output.outputs[0].token_ids))
    assert answers[0] == answers[1] != answers[2]
