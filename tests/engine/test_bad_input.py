"""What a bad input gets: one clear line with the names and numbers, early, and nothing else is disturbed."""

from __future__ import annotations

import json
import os
import re
import shutil
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from teachllm import LLM, SamplingParams
from tests.engine.reference import reference
from tests.worker.engines import drain, make_engine, make_llm, num_used_blocks, random_ids, tokens

ROOT = Path(__file__).resolve().parents[2]
GREEDY = SamplingParams(temperature=0, max_tokens=8)
HELLO = [{"role": "user", "content": "Hello"}]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint to break."""
    return shutil.copytree(reference("qwen3").path, tmp_path / "model")


def change_config(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def refusal(make: Callable[[], object]) -> str:
    """The message of the ValueError that `make` raises, which must be one line."""
    with pytest.raises(ValueError) as refused:
        make()
    message = str(refused.value)
    assert message and "\n" not in message
    return message


def load_refusal(folder: Path, **settings: Any) -> str:
    return refusal(lambda: make_llm(model=str(folder), **settings))


# -- a request that can never fit --------------------------------------------------------------------------


def test_a_request_that_can_never_fit_is_refused_when_added_and_disturbs_nobody() -> None:
    engine = make_engine(num_gpu_blocks_override=4)
    other = engine.add_request("other", random_ids(20), GREEDY)
    engine.step()
    used, num_requests = num_used_blocks(engine), len(engine.core.scheduler.requests)
    for prompt, params, numbers in (
        (random_ids(96), GREEDY, ["96 tokens", "max_model_len=96", "shorten it to 95"]),
        (random_ids(500), GREEDY, ["500 tokens", "max_model_len=96"]),
        (random_ids(57), GREEDY, ["reach 65 tokens", "5 blocks of 16", "cache has 4", "lower max_tokens"]),
        (random_ids(2), replace(GREEDY, max_tokens=None), ["reach 96 tokens", "6 blocks of 16", "cache has 4"]),
        (random_ids(57), replace(GREEDY, n=3), ["reach 65 tokens"]),
        ([], GREEDY, ["the prompt is empty"]),
    ):
        message = refusal(lambda prompt=prompt, params=params: engine.add_request("a", prompt, params))
        assert all(number in message for number in numbers), message
        assert (num_used_blocks(engine), len(engine.core.scheduler.requests)) == (used, num_requests)
        engine.step()
    fits = engine.add_request("a", random_ids(56), GREEDY)  # 64 tokens: exactly all blocks
    drain(engine)
    reference("qwen3").judge_outputs([other, fits])
    assert [len(tokens(output)[0]) for output in (other, fits)] == [8, 8]


# -- prompts and parameters --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([5, 512, 6], "prompt token id 512 is not in the vocabulary of 512"),
        ([-1], "prompt token id -1 is not in the vocabulary of 512"),
        ({"prompt_token_ids": [1.5]}, "prompt token id 1.5 is not in the vocabulary of 512"),
        (["a", "b"], "prompt token id 'a' is not in the vocabulary of 512"),
        ([5, 1 << 70], f"prompt token id {1 << 70} is not in the vocabulary of 512"),
        ([5, None], "prompt token id None is not in the vocabulary of 512"),
        (torch.tensor([5, 512]), "prompt token id tensor(512) is not in the vocabulary of 512"),
        (torch.tensor([0.5]), "prompt token id tensor(0.5000) is not in the vocabulary of 512"),
        ("text", 'skip_tokenizer_init=True: give prompts as {"prompt_token_ids": [...]}'),
        ({}, 'a prompt dictionary has either "prompt" or "prompt_token_ids"'),
        ({"prompt": "a", "prompt_token_ids": [1]}, 'a prompt dictionary has either "prompt" or "prompt_token_ids"'),
        (None, "a prompt is a text, token ids, or a dictionary with either, not NoneType"),
        ({"prompt_token_ids": 7}, "a prompt is a text, token ids, or a dictionary with either, not int"),
    ],
)
def test_a_prompt_that_is_none_is_refused(prompt: Any, message: str) -> None:
    engine = make_engine()
    assert refusal(lambda: engine.add_request("a", prompt, GREEDY)) == message
    assert not engine.has_unfinished_requests


def test_a_text_whose_ids_the_model_does_not_have_is_refused_when_added() -> None:
    """A tokenizer may know more ids than the model it is used with."""
    llm = make_llm(skip_tokenizer_init=False, tokenizer=str(ROOT / "teachllm" / "assets" / "teachlm"))
    assert llm.tokenizer is not None and llm.tokenizer.vocab_size > 512
    for call in (
        lambda: llm.generate(["What is a KV cache? attention", [5]], GREEDY, use_tqdm=False),
        lambda: llm.chat([{"role": "user", "content": "attention"}], GREEDY, use_tqdm=False),
    ):
        assert re.fullmatch(r"prompt token id \d+ is not in the vocabulary of 512", refusal(call))
    assert not llm.engine.has_unfinished_requests
    params = SamplingParams(bad_words=["attention"])
    assert "bad_words: token id" in refusal(lambda: llm.generate([[5]], params, use_tqdm=False))
    assert len(tokens(llm.generate([[5]], GREEDY, use_tqdm=False)[0])[0]) == 8


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"logprobs": 21}, "logprobs=21 is more than max_logprobs=20"),
        ({"prompt_logprobs": 21}, "prompt_logprobs=21 is more than max_logprobs=20"),
        ({"allowed_token_ids": [512]}, "allowed_token_ids: token id 512 is not in the vocabulary (0 to 511)"),
        ({"logit_bias": {-1: 1.0}}, "logit_bias: token id -1 is not in the vocabulary (0 to 511)"),
        ({"stop_token_ids": [600]}, "stop_token_ids: token id 600 is not in the vocabulary (0 to 511)"),
        ({"bad_words": ["x"]}, "bad_words are text: drop them, or set skip_tokenizer_init=False"),
        ({"stop": ["x"]}, "stop strings are text: drop them, or set skip_tokenizer_init=False"),
        ({"allowed_token_ids": [5], "stop_token_ids": [5], "min_tokens": 2}, "together can forbid every token"),
    ],
)
def test_a_parameter_that_does_not_suit_the_model_is_refused_when_added(params: dict[str, Any], message: str) -> None:
    engine = make_engine()
    other = engine.add_request("other", random_ids(9), GREEDY)
    assert message in refusal(lambda: engine.add_request("a", [1, 2], SamplingParams(**params)))
    drain(engine)
    assert len(tokens(other)[0]) == 8


def test_a_chat_template_that_reaches_for_python_is_refused() -> None:
    llm = LLM("teachlm", device="cpu", max_model_len=256)
    for attack in (
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ messages.append(messages[0]) }}",
        "{% for i in range(10**9) %}{{ i }}{% endfor %}",
    ):
        message = refusal(lambda attack=attack: llm.chat(HELLO, GREEDY, use_tqdm=False, chat_template=attack))
        assert message.startswith("the chat template failed: ")
        assert "Security" in message or "Overflow" in message
    assert not llm.engine.has_unfinished_requests


# -- what cannot run is named before a weight is read ------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"architectures": ["MambaForCausalLM"], "model_type": "mamba"}, ["MambaForCausalLM", "a recurrent state"]),
        ({"architectures": ["T5ForConditionalGeneration"], "is_encoder_decoder": True}, ["T5For", "an encoder"]),
        ({"architectures": ["DeepseekV3ForCausalLM"], "kv_lora_rank": 512}, ["DeepseekV3", "latent attention"]),
        ({"architectures": ["BertForMaskedLM"], "model_type": "bert"}, ["BertForMaskedLM", "head"]),
        ({"architectures": []}, ["names no architecture"]),
    ],
)
def test_an_unsupported_architecture_is_named_with_what_is_supported(
    folder: Path, changes: dict[str, Any], parts: list[str]
) -> None:
    change_config(folder, **changes)
    with_weights = load_refusal(folder)
    assert all(part in with_weights for part in [*parts, "supported are LlamaForCausalLM", "Qwen3ForCausalLM"])
    (folder / "model.safetensors").unlink()
    assert load_refusal(folder) == with_weights


@pytest.mark.parametrize("method", ["bitsandbytes", "quark", "eetq"])
def test_an_unsupported_quantization_is_named(folder: Path, method: str) -> None:
    change_config(folder, quantization_config={"quant_method": method, "bits": 4})
    with_weights = load_refusal(folder)
    assert "Qwen3ForCausalLM" in with_weights and repr(method) in with_weights
    assert "float32, bfloat16 or float16" in with_weights
    (folder / "model.safetensors").unlink()
    assert load_refusal(folder) == with_weights


def test_code_from_a_checkpoint_is_refused_unless_asked_for(folder: Path) -> None:
    (folder / "code.py").write_text("raise SystemExit('ran')")
    change_config(folder, architectures=["OwnForCausalLM"], model_type="own", auto_map={"AutoConfig": "code.Config"})
    message = load_refusal(folder)
    assert "OwnForCausalLM" in message and "set trust_remote_code=True if you trust its authors" in message


# -- broken checkpoints ------------------------------------------------------------------------------------


def test_a_truncated_file_names_tensor_and_file(folder: Path) -> None:
    file = folder / "model.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[:-1000])
    message = load_refusal(folder)
    assert str(file) in message and "truncated" in message and re.search(r"tensor \S+ ends at byte \d+ of \d+", message)
    for broken in (
        data[:4],
        data[:100],
        b"",
        struct.pack("<Q", 1 << 60) + data[8:],
        struct.pack("<Q", 9) + b"not json!",
    ):
        file.write_bytes(broken)
        message = load_refusal(folder)
        assert str(file) in message and "broken or truncated" in message


def test_a_missing_shard_is_named(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    names = sorted(tensors)
    shards = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    (folder / "model.safetensors").unlink()
    for shard, held in shards.items():
        save_file({name: tensors[name] for name in held}, folder / shard)
    weight_map = {name: shard for shard, held in shards.items() for name in held}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    outputs = make_llm(model=str(folder)).generate([random_ids(9)], GREEDY, use_tqdm=False)
    reference("qwen3").judge_outputs(outputs)
    (folder / "model-00002-of-00002.safetensors").unlink()
    message = load_refusal(folder)
    assert "lacks the shard model-00002-of-00002.safetensors" in message and str(folder) in message


NORM = "model.layers.1.post_attention_layernorm.weight"
DOWN = "model.layers.0.mlp.down_proj.weight"


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        (lambda t: t.update({DOWN: torch.zeros(64, 97)}), [DOWN, "[64, 97]", "[64, 96]", "model.safetensors"]),
        (lambda t: t.update({NORM: torch.zeros(65)}), [NORM, "[65]", "[64]", "model.safetensors"]),
        (lambda t: t.pop(NORM), ["lacks tensor", NORM]),
        (lambda t: t.update({"model.extra": torch.zeros(1)}), ["model.extra", "does not have", "model.safetensors"]),
    ],
)
def test_a_tensor_that_does_not_fit_is_named_with_its_file(
    folder: Path, change: Callable[[dict[str, torch.Tensor]], object], parts: list[str]
) -> None:
    file = folder / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(file).items()}
    change(tensors)
    save_file(tensors, file)
    message = load_refusal(folder)
    assert all(part in message for part in [*parts, str(folder)]), message


def test_a_folder_that_is_no_checkpoint_says_what_it_lacks(folder: Path, tmp_path: Path) -> None:
    assert "has no config.json" in load_refusal(tmp_path)
    (folder / "model.safetensors").unlink()
    assert "has no .safetensors file: set load_format='dummy' for random weights" in load_refusal(folder)
    (folder / "config.json").write_text("{")
    assert "config.json cannot be read" in load_refusal(folder)


def test_a_checkpoint_without_a_tokenizer_says_so() -> None:
    for name in ("qwen3", "gemma2", "llama2"):  # of no files, transformers makes an empty tokenizer or an error
        message = load_refusal(Path(reference(name).path), skip_tokenizer_init=False)
        assert reference(name).path in message and "no tokenizer that can be loaded" in message


def test_pickled_weights_are_refused_unless_asked_for(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    torch.save(tensors, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    message = load_refusal(folder)
    assert "only as pickles (.bin), which can run code" in message and "set load_format='pt'" in message
    outputs = make_llm(model=str(folder), load_format="pt").generate([random_ids(9)], GREEDY, use_tqdm=False)
    reference("qwen3").judge_outputs(outputs)


class Attack:
    def __reduce__(self) -> tuple[Callable[[str], object], tuple[str]]:
        return os.mkdir, (os.environ["ATTACK"],)


def test_even_if_asked_for_a_pickle_runs_no_code(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTACK", str(folder / "owned"))
    torch.save({"model.norm.weight": Attack()}, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    message = load_refusal(folder, load_format="pt")
    assert "pytorch_model.bin cannot be read as plain tensors" in message
    assert not (folder / "owned").exists()


# -- models that are not there -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["no-such-model", "nobody/no-such-model", "./no/such/folder", "/no/such/folder", "a b"]
)
def test_an_unknown_model_is_one_line_that_says_what_to_do(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    message = load_refusal(Path(name)) if name.startswith("/") else refusal(lambda: make_llm(model=name))
    assert message.startswith(f"model={name!r}: ")
    assert "there is no such folder" in message or "check the name, or when offline" in message


# -- settings ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "parts"),
    [
        ({"max_num_batched_tokens": 4}, ["max_num_batched_tokens=4", "max_num_seqs=8", "raise the budget to 8"]),
        (
            {"enable_kv_cache": False},
            ["enable_kv_cache=False", "max_num_batched_tokens=64", "max_num_batched_tokens=96"],
        ),
        ({"enable_chunked_prefill": False}, ["enable_chunked_prefill=False", "set max_num_batched_tokens=96"]),
        ({"enable_prefix_caching": True, "block_size": 96}, ["block_size=96", "set enable_prefix_caching=False"]),
        ({"max_model_len": 513}, ["max_model_len=513", "context of 512", "set max_model_len=512 or less"]),
        ({"scheduling_policy": "random"}, ["scheduling_policy='random'", "fcfs, priority, static"]),
        ({"device": "tpu"}, ["device='tpu'", "use auto, cpu, cuda or cuda:N"]),
        ({"attention_backend": "triton"}, ["attention_backend='triton'", "use attention_backend=reference on a CPU"]),
        ({"batch_invariant": True}, ["batch_invariant=True", "a CPU's matrix products", "set batch_invariant=False"]),
    ],
)
def test_settings_that_contradict_each_other_are_refused_with_the_one_to_change(
    settings: dict[str, Any], parts: list[str]
) -> None:
    message = refusal(lambda: make_llm(**settings))
    assert all(part in message for part in parts), message


def test_too_little_memory_shows_the_table_and_what_fits() -> None:
    with pytest.raises(ValueError) as refused:
        make_llm(num_gpu_blocks_override=None, kv_cache_memory_bytes=400_000)
    first, *table = str(refused.value).splitlines()
    assert "would hold 48 tokens" in first and "set max_model_len=48 or less" in first
    assert [row.split("  ")[1].strip() for row in table][:3] == ["budget", "weights", "activations"]
