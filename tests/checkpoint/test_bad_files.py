"""Any value in a checkpoint's files gives what transformers computes with it, or one line that names file and key."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from teachllm import LLM, SamplingParams
from tests.checkpoint.mutations import ABSENT, Mutation, is_named, mutations, wrong_ones
from tests.checkpoints import make_checkpoint
from tests.thorough import times

FAMILIES = ("llama3", "llama_yarn", "llama_linear", "llama_dynamic", "mistral", "qwen2_window", "qwen3_moe", "mixtral")
FAMILIES += ("gemma2", "gptneox")
PROMPTS = [[5, 300, 17, 44, 9], [7, 8]]
NUM_TOKENS = 5
# Keys that our own model code does not read: they are about training, or about how to write.
NOT_READ = (
    *("transformers_version", "use_cache", "initializer_range", "attention_dropout", "pretraining_tp"),
    *("output_router_logits", "router_aux_loss_coef", "router_jitter_noise", "bos_token_id", "pad_token_id"),
)
# Keys that say what tensors there are, and of which sizes.
SHAPES = (
    *("architectures", "model_type", "vocab_size", "hidden_size", "intermediate_size", "head_dim", "attention_bias"),
    *("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "mlp_bias", "tie_word_embeddings"),
    *("num_experts", "num_local_experts", "moe_intermediate_size", "mlp_only_layers", "decoder_sparse_step"),
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Checkpoints with every file and key that is read, all in their places."""
    found = {}
    for family in FAMILIES:
        folder = tmp_path_factory.mktemp(family)
        make_checkpoint(family, folder)
        config = json.loads((folder / "config.json").read_text())
        config |= {"eos_token_id": 17}
        (folder / "config.json").write_text(json.dumps(config))
        generation = {"eos_token_id": [17, 23], "temperature": 0.7, "top_k": 20, "top_p": 0.9, "do_sample": True}
        (folder / "generation_config.json").write_text(json.dumps(generation))
        found[family] = folder
    return found


@pytest.fixture(scope="module")
def sharded(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The weights in three files and an index."""
    folder = tmp_path_factory.mktemp("sharded")
    model = AutoModelForCausalLM.from_pretrained(folders["llama3"])
    model.save_pretrained(folder, max_shard_size=200_000)
    shutil.copy(folders["llama3"] / "config.json", folder)
    assert len([*folder.glob("*.safetensors")]) >= 3
    return folder


def ours(folder: Path) -> list[list[int]]:
    """Return greedy tokens."""
    llm = LLM(str(folder), skip_tokenizer_init=True, num_gpu_blocks_override=16)
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS)
    try:
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], params, use_tqdm=False)
    finally:
        llm.close()
    return [output.outputs[0].token_ids for output in outputs]


@torch.inference_mode()
def theirs(folder: Path, mutation: Mutation) -> list[list[int]]:
    """Return transformers' greedy tokens, to the same ids of end of sequence."""
    if (mutation.path, mutation.value) == (("model_type",), ABSENT):  # an architecture of ours says as much
        raw = json.loads((folder / "config.json").read_text())
        model_type = raw["architectures"][0].removesuffix("ForCausalLM").lower().replace("moe", "_moe")
        (folder / "config.json").write_text(json.dumps(raw | {"model_type": model_type}))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    end = model.generation_config.eos_token_id
    ends = set(end if isinstance(end, list) else [end])
    answers = []
    for prompt in PROMPTS:
        answer: list[int] = []
        while len(answer) < NUM_TOKENS and not ends & set(answer):
            logits = model(torch.tensor([prompt + answer]), use_cache=False).logits[0, -1]
            answer.append(int(logits.argmax()))
        answers.append(answer)
    return answers


def is_refusal(error: Exception, mutation: Mutation) -> bool:
    """Return whether an error says enough: what config.json means wrongly may be named by the tensor that is not so.

    A context that is shorter than a prompt is no fault of a file.
    """
    words = str(error)
    is_size = mutation.key in SHAPES and "tensor" in words and "config.json" in words and "\n" not in words
    is_too_short = mutation.key == "max_position_embeddings" and "max_model_len=" in words
    return is_size or is_too_short or is_named(error, mutation)


def test_every_value_is_read_as_transformers_does_or_refused_by_name(folders: dict[str, Path], tmp_path: Path) -> None:
    files = ("config.json", "generation_config.json")
    drawn = mutations(folders, files, times(100, 1400), NOT_READ)
    wrong = wrong_ones(drawn, folders, tmp_path, ours, theirs, is_refusal)
    assert not wrong, wrong


def test_every_value_of_an_index_is_read_or_refused_by_name(sharded: Path, tmp_path: Path) -> None:
    drawn = mutations({"sharded": sharded}, ["model.safetensors.index.json"], times(5, 60), ["metadata"])
    wrong = wrong_ones(drawn, {"sharded": sharded}, tmp_path, ours, theirs, is_refusal)
    assert not wrong, wrong
