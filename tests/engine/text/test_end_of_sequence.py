"""Which ids end an answer: those that any of a checkpoint's files names, read as transformers reads them."""

from __future__ import annotations

import json
import shutil
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import teachllm
from teachllm import LLM, SamplingParams
from teachllm.config import EngineConfig
from teachllm.errors import ModelError
from teachllm.models.model_config import load_model_config
from teachllm.outputs import CompletionOutput

EMBEDDED = Path(teachllm.__file__).parent / "assets" / "teachlm"
ASK = [{"role": "user", "content": "What is a KV cache?"}]
TO_THE_END = SamplingParams(temperature=0, max_tokens=150, skip_special_tokens=False)
SHAPE = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
}


def fine_tune(folder: Path, config: dict[str, Any], generation: dict[str, Any] | None) -> Path:
    """Return a copy of the embedded model whose files name other ids; `...` leaves a key out."""
    shutil.copytree(EMBEDDED, folder, dirs_exist_ok=True)
    raw = json.loads((folder / "config.json").read_text()) | config
    (folder / "config.json").write_text(json.dumps({key: value for key, value in raw.items() if value is not ...}))
    (folder / "generation_config.json").unlink()
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


@pytest.fixture(scope="module")
def expected() -> CompletionOutput:
    """What the embedded model itself answers, to its end of sequence."""
    with closing(LLM("teachlm")) as llm:
        return llm.chat(ASK, TO_THE_END, use_tqdm=False)[0].outputs[0]


@pytest.mark.parametrize(
    ("config", "generation"),
    [
        ({"eos_token_id": 0}, {"eos_token_id": 0}),  # as a fine-tune for chats that kept its base's files
        ({"eos_token_id": 0}, {"eos_token_id": [0, 1]}),
        ({"eos_token_id": ...}, None),
        ({"eos_token_id": None}, {}),
    ],
)
def test_the_tokenizers_end_of_sequence_ends_an_answer_whatever_the_other_files_name(
    expected: CompletionOutput, tmp_path: Path, config: dict[str, Any], generation: dict[str, Any] | None
) -> None:
    with closing(LLM(str(fine_tune(tmp_path, config, generation)))) as llm:
        answer = llm.chat(ASK, TO_THE_END, use_tqdm=False)[0].outputs[0]
    assert expected.finish_reason == "stop" and answer == expected


@pytest.mark.parametrize("wrong", ["2", [2, "3"], 2.0, {"id": 2}, True])
@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
def test_an_id_that_is_none_is_refused_by_file_and_key(tmp_path: Path, file: str, wrong: Any) -> None:
    changes: tuple[Any, Any] = (
        ({"eos_token_id": wrong}, None) if file == "config.json" else ({}, {"eos_token_id": wrong})
    )
    with pytest.raises(ModelError, match=rf"^{file}: eos_token_id=.*: must be a token id or a list of token ids$"):
        load_model_config(EngineConfig(model=str(fine_tune(tmp_path, *changes))))


@pytest.mark.parametrize(
    ("architecture", "model_type"),
    [("LlamaForCausalLM", "llama"), ("Qwen3ForCausalLM", "qwen3"), ("GemmaForCausalLM", "gemma")],
)
def test_a_config_that_names_none_means_what_transformers_takes_it_to_mean(
    tmp_path: Path, architecture: str, model_type: str
) -> None:
    from transformers import AutoConfig

    raw = {"architectures": [architecture], "model_type": model_type, **SHAPE}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    default = AutoConfig.from_pretrained(tmp_path).eos_token_id
    found = load_model_config(EngineConfig(model=str(tmp_path), load_format="dummy")).eos_token_ids
    assert found == ({default} if default is not None else set())
