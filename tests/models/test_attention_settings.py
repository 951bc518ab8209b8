"""Settings that decide what attention computes, each in two spellings or by layer: as in transformers, or refused."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from teachllm import LLM, SamplingParams
from teachllm.errors import ModelError
from tests.checkpoints import make_checkpoint

PROMPT = [5 + 7 * i % 500 for i in range(60)]
NUM_TOKENS = 8
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
DEFAULT = {"rope_type": "default", "rope_theta": 10000.0}


def checkpoint(family: str, folder: Path, **changes: Any) -> Path:
    """A checkpoint whose config.json has other values; None takes a key away."""
    make_checkpoint(family, folder)
    raw = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps({key: raw[key] for key in raw if raw[key] is not None}))
    return folder


def ours(folder: Path, **settings: Any) -> list[int]:
    with closing(LLM(str(folder), skip_tokenizer_init=True, num_gpu_blocks_override=32, **settings)) as llm:
        params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, detokenize=False)
        return llm.generate({"prompt_token_ids": PROMPT}, params, use_tqdm=False)[0].outputs[0].token_ids


@torch.inference_mode()
def theirs(folder: Path) -> list[int]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    ids = list(PROMPT)
    for _ in range(NUM_TOKENS):
        ids.append(int(model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return ids[len(PROMPT) :]


@pytest.mark.parametrize("model_impl", ["teachllm", "transformers"])
@pytest.mark.parametrize(
    "changes",
    [
        {"rope_scaling": YARN, "rope_parameters": DEFAULT},
        {"rope_scaling": {"type": "linear", "factor": 4.0}, "rope_parameters": DEFAULT},
        {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": YARN | {"rope_theta": 10000.0}},
        {"rope_scaling": None, "rope_parameters": YARN | {"rope_theta": 10000.0}},
        {"rope_scaling": {}, "rope_parameters": YARN | {"rope_theta": 10000.0}},
    ],
    ids=["yarn beside default", "linear beside default", "linear beside yarn", "one spelling", "an empty one"],
)
def test_rope_scaling_counts_before_rope_parameters(changes: dict[str, Any], model_impl: str, tmp_path: Path) -> None:
    plain = ours(checkpoint("llama2", tmp_path / "plain", max_position_embeddings=512))
    folder = checkpoint("llama2", tmp_path / "scaled", max_position_embeddings=512, **changes)
    assert ours(folder, model_impl=model_impl) == theirs(folder) != plain


@pytest.mark.parametrize("name", ["longrope", "su", "proportional"])
def test_a_scaling_that_is_not_supported_is_refused_in_either_spelling(name: str, tmp_path: Path) -> None:
    for key in ("rope_scaling", "rope_parameters"):
        other = {"rope_parameters": DEFAULT} if key == "rope_scaling" else {}
        folder = checkpoint("llama2", tmp_path / key, **other, **{key: {"rope_type": name, "factor": 4.0}})
        with pytest.raises(ModelError, match=f"config.json: {key}: rope_type='{name}': must be one of"):
            ours(folder)


FULL, SLIDING = "full_attention", "sliding_attention"


@pytest.mark.parametrize("model_impl", ["teachllm", "transformers"])
@pytest.mark.parametrize("family", ["mistral", "qwen2", "qwen3"])
def test_layers_of_both_kinds_have_their_own_windows(family: str, model_impl: str, tmp_path: Path) -> None:
    num_layers = json.loads((checkpoint(family, tmp_path / "plain") / "config.json").read_text())["num_hidden_layers"]
    kinds = [SLIDING if index % 2 else FULL for index in range(num_layers)]
    window = {"sliding_window": 16, "use_sliding_window": True, "max_window_layers": 0}
    folder = checkpoint(family, tmp_path / "mixed", layer_types=kinds, **window)
    answer = ours(folder, model_impl=model_impl)
    assert answer == theirs(folder)


def test_only_other_kinds_of_layers_are_refused(tmp_path: Path) -> None:
    kinds = [FULL, "chunked_attention", FULL]
    with pytest.raises(ModelError, match=r"layers of type 'chunked_attention' \(layer_types in config.json\)"):
        ours(checkpoint("llama2", tmp_path, layer_types=kinds))
