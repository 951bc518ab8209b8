"""What a checkpoint may be, and the one line that says why another one is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from teachllm.checkpoint import files
from teachllm.checkpoint.files import find_folder
from teachllm.config import EngineConfig
from teachllm.errors import ModelError
from teachllm.loading.loader import load_model
from teachllm.models.model_config import ModelConfig, load_model_config
from tests.checkpoints import build_model, make_checkpoint

CPU = torch.device("cpu")


def _load(path: Path | str, **settings: Any) -> tuple[ModelConfig, Any]:
    config = EngineConfig(model=str(path), **settings)
    description = load_model_config(config)
    return description, load_model(description, config, CPU)


def _weights(model: Any) -> list[tuple[str, torch.Tensor]]:
    """Every weight by name, those laid out for a CPU as plain matrices."""
    packed = [(name, m.packed) for name, m in model.named_modules() if getattr(m, "packed", None) is not None]
    return [*model.named_parameters(), *((name, weight.to_dense()) for name, weight in packed)]


def _refusal(path: Path | str, **settings: Any) -> str:
    with pytest.raises(ModelError) as error:
        _load(path, **settings)
    message = str(error.value)
    assert "\n" not in message
    return message


def _config_only(folder: Path, **changes: Any) -> Path:
    """A folder whose config.json is a tiny Llama's with `changes`, and no weights: refusals need none."""
    raw = {
        **{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 512, "hidden_size": 64},
        **{"intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2},
    }
    (folder / "config.json").write_text(json.dumps({k: v for k, v in (raw | changes).items() if v is not ...}))
    return folder


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return Path(make_checkpoint("llama2", tmp_path))


def _edit_weights(folder: Path, **tensors: torch.Tensor | None) -> None:
    weights = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        weights.pop(name, None)
        if tensor is not None:
            weights[name] = tensor
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


Q_PROJ = "model.layers.1.self_attn.q_proj.weight"


def test_description_of_a_checkpoint(tmp_path: Path) -> None:
    description, model = _load(make_checkpoint("qwen3", tmp_path), max_model_len=100)
    assert (description.implementation, description.dtype, description.max_model_len) == ("teachllm", "float32", 100)
    # The embedding is tied, so it counts once; a CPU holds it twice. The tables of cosines and sines are counted too.
    assert description.num_parameters == sum(p.numel() for p in build_model("qwen3").parameters())
    copied = description.vocab_size * description.hidden_size
    tables = sum(buffer.numel() for buffer in model.buffers())
    norms = 2 * (4 + 2 - 2) * description.head_size  # of q and k: once per head, not once for all
    assert description.weight_bytes == 4 * (description.num_parameters + copied + tables + norms)
    assert not model.training and not any(p.requires_grad for p in model.parameters())


def test_dtype_auto_is_the_checkpoints_on_a_gpu_and_float32_on_a_cpu(tmp_path: Path) -> None:
    config = EngineConfig(model=str(_config_only(tmp_path, torch_dtype="bfloat16")), load_format="dummy")
    assert load_model_config(config, "cpu").dtype == "float32"
    on_gpu = load_model_config(config, "cuda")
    tables = 2 * 2048 * 16  # cosines and sines of 2048 positions, for heads of 16
    assert on_gpu.dtype == "bfloat16" and on_gpu.weight_bytes == 2 * (on_gpu.num_parameters + tables)


def test_end_of_sequence_ids_and_defaults_come_from_the_generation_config_first(tmp_path: Path) -> None:
    folder = _config_only(tmp_path, eos_token_id=7)
    assert load_model_config(EngineConfig(model=str(folder), load_format="dummy")).eos_token_ids == {7}
    (folder / "generation_config.json").write_text('{"eos_token_id": [3, 4], "temperature": 0.6, "top_k": null}')
    description = load_model_config(EngineConfig(model=str(folder), load_format="dummy"))
    assert description.eos_token_ids == {3, 4}
    assert description.generation_defaults == {"temperature": 0.6}


def test_both_spellings_of_rope_mean_the_same(tmp_path: Path) -> None:
    scaling = {"factor": 4.0, "original_max_position_embeddings": 64}
    old = {"rope_theta": 5000.0, "rope_scaling": {"type": "yarn", **scaling}}
    new = {"rope_parameters": {"rope_type": "yarn", "rope_theta": 5000.0, **scaling}}
    tables = []
    for spelling in (old, new):
        description, model = _load(_config_only(tmp_path, max_position_embeddings=64, **spelling), load_format="dummy")
        assert description.max_model_len == 256
        tables.append(model.rotary.cos)
    assert torch.equal(*tables)


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({"model_type": "mistral"}, (4096, 4096)),
        ({"model_type": "mistral", "sliding_window": None}, (None, None)),
        ({"model_type": "qwen2", "sliding_window": 8}, (None, None)),
        (
            {
                "model_type": "qwen2",
                "sliding_window": 8,
                "use_sliding_window": True,
                "max_window_layers": 1,
            },
            (None, 8),
        ),
        (
            {
                **{"model_type": "qwen3", "sliding_window": 8, "use_sliding_window": True},
                **{"layer_types": ["sliding_attention", "full_attention"]},
            },
            (8, None),
        ),
    ],
)
def test_windows_are_read_as_each_family_means_them(tmp_path: Path, changes: dict, windows: tuple) -> None:
    folder = _config_only(tmp_path, **changes)
    assert load_model_config(EngineConfig(model=str(folder), load_format="dummy")).windows == windows


def test_sharded_and_pickled_checkpoints_load_the_same_weights(tmp_path: Path) -> None:
    model = build_model("qwen2")
    model.save_pretrained(tmp_path / "one")
    model.save_pretrained(tmp_path / "shards", max_shard_size="200KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 1
    (tmp_path / "pickle").mkdir()
    (tmp_path / "pickle" / "config.json").write_text((tmp_path / "one" / "config.json").read_text())
    torch.save(model.state_dict(), tmp_path / "pickle" / "pytorch_model.bin")
    _, one = _load(tmp_path / "one")
    for _, other in (_load(tmp_path / "shards"), _load(tmp_path / "pickle", load_format="pt")):
        for (name, a), (_, b) in zip(_weights(one), _weights(other), strict=True):
            assert torch.equal(a, b), name


def test_progress_ends_at_all_bytes(llama: Path) -> None:
    calls: list[tuple[int, int]] = []
    config = EngineConfig(model=str(llama))
    load_model(load_model_config(config), config, CPU, lambda done, total: calls.append((done, total)))
    assert calls[-1] == ((llama / "model.safetensors").stat().st_size,) * 2
    assert calls == sorted(calls)


@pytest.mark.parametrize("model_impl", ["teachllm", "transformers"])
def test_dummy_weights_need_a_config_alone_and_depend_on_the_seed(tmp_path: Path, model_impl: str) -> None:
    folder = _config_only(tmp_path)
    first, again, other = (
        _load(folder, load_format="dummy", model_impl=model_impl, seed=seed)[1] for seed in (1, 1, 2)
    )
    triples = list(zip(_weights(first), _weights(again), _weights(other), strict=True))
    assert all(torch.equal(a, b) for (_, a), (_, b), _ in triples)
    assert any(not torch.equal(a, c) for (_, a), _, (_, c) in triples)
    assert all(weight.isfinite().all() for _, weight in _weights(first))


REFUSED_CONFIGS = [
    (
        {"architectures": ["MambaForCausalLM"], "model_type": "mamba"},
        ["MambaForCausalLM", "recurrent", "supported are"],
    ),
    ({"architectures": ["JambaForCausalLM"], "model_type": "jamba"}, ["JambaForCausalLM", "hybrid"]),
    ({"architectures": ["DeepseekV3ForCausalLM"], "kv_lora_rank": 512}, ["DeepseekV3ForCausalLM", "latent attention"]),
    ({"architectures": ["T5ForConditionalGeneration"], "is_encoder_decoder": True}, ["T5For", "encoder"]),
    (
        {"architectures": ["Qwen3NextForCausalLM"], "layer_types": ["linear_attention"]},
        ["Qwen3Next", "linear_attention"],
    ),
    ({"architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss"}, ["GptOss", "attention sinks"]),
    ({"architectures": ["BertForMaskedLM"], "model_type": "bert"}, ["BertForMaskedLM", "language-model head"]),
    ({"architectures": ["NobodyForCausalLM"], "model_type": "nobody"}, ["nobody"]),
    ({"architectures": []}, ["names no architecture"]),
    (
        {"quantization_config": {"quant_method": "bitsandbytes"}},
        ["LlamaForCausalLM", "'bitsandbytes'", "gptq, awq", "float32, bfloat16 or float16"],
    ),
    ({"quantization_config": {"quant_method": "gptq", "bits": 3, "group_size": 128}}, ["LlamaForCausalLM", "3 bits"]),
    (
        {"quantization_config": {"quant_method": "gptq", "bits": 4}},
        ["LlamaForCausalLM", "config.json: quantization_config lacks 'group_size'"],
    ),
    ({"quantization_config": {"quant_method": "awq", "version": "gemv"}}, ["LlamaForCausalLM", "'gemv'", "'gemm'"]),
    ({"architectures": ["OwnForCausalLM"], "auto_map": {"AutoModel": "own.M"}}, ["OwnFor", "trust_remote_code=True"]),
    ({"hidden_act": "gelu"}, ["hidden_act='gelu'", "'silu'"]),
    ({"hidden_size": ...}, ["lacks 'hidden_size'"]),
    ({"num_key_value_heads": 3}, ["num_key_value_heads=3: must be a divisor of num_attention_heads=4"]),
    ({"hidden_size": 4, "num_key_value_heads": 4}, ["num_attention_heads=4: must be at most half of hidden_size=4"]),
    ({"head_dim": 7}, ["head_dim=7 is odd", "pairs of channels"]),
    ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, ["full_attention", "all layers", "turn alike"]),
    ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor=0.5: must be 1", "all channels of a head are turned"]),
    ({"head_dim": 2, "rope_scaling": {"type": "dynamic", "factor": 2.0}}, ["'dynamic'", "heads of size 2"]),
    (
        {
            "rope_scaling": {
                **{"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 1.0},
                "original_max_position_embeddings": 64,
            }
        },
        ["low_freq_factor=4.0: must be less than high_freq_factor"],
    ),
    ({"rope_scaling": {"type": "linear", "factor": 1e18}}, ["factor=1e+18: must be small enough for a context"]),
    ({"layer_types": ["full_attention"]}, ["layer_types", "one name per layer, num_hidden_layers=2"]),
    (
        {"quantization_config": {"quant_method": "auto-round", "data_type": "mx_fp"}},
        ["AutoRound with data_type 'mx_fp'", "only 'int'"],
    ),
    (
        {"quantization_config": {"quant_method": "auto-round", "data_type": "fp", "packing_format": "auto_round"}},
        ["AutoRound with data_type 'fp'", "'auto_round'", "only 'int'"],
    ),
    (
        {"quantization_config": {"quant_method": "auto-round", "packing_format": "mine"}},
        ["AutoRound in the packing 'mine' (packing_format)", "only"],
    ),
    ({"rope_scaling": {"type": "su", "factor": 2.0}}, ["'su'", "linear, dynamic, llama3, yarn"]),
    ({"rope_scaling": {"type": "linear"}}, ["config.json: rope_scaling lacks 'factor'"]),
    ({"architectures": ["BloomForCausalLM"], "model_type": "bloom"}, ["BloomForCausalLM", "ALiBi"]),
]


@pytest.mark.parametrize(("changes", "words"), REFUSED_CONFIGS)
def test_what_cannot_run_is_refused_by_name_before_a_weight_is_read(
    tmp_path: Path, changes: dict, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "stored_tensors", lambda folder: pytest.fail("looked for weights"))
    message = _refusal(_config_only(tmp_path, **changes))
    for word in words:
        assert word in message


def test_the_transformers_backend_refuses_what_does_not_use_its_attention_interface(tmp_path: Path) -> None:
    changes = {"architectures": ["CodeGenForCausalLM"], "model_type": "codegen", "n_positions": 64}
    message = _refusal(_config_only(tmp_path, **changes), load_format="dummy")
    assert "CodeGenForCausalLM" in message and "attention interface" in message


def test_our_code_is_not_forced_on_other_architectures(tmp_path: Path) -> None:
    folder = _config_only(tmp_path, architectures=["Gemma2ForCausalLM"], model_type="gemma2")
    message = _refusal(folder, model_impl="teachllm")
    assert "Gemma2ForCausalLM" in message and "model_impl='auto'" in message


def test_a_context_longer_than_the_models_is_refused(tmp_path: Path) -> None:
    message = _refusal(_config_only(tmp_path, max_position_embeddings=64), max_model_len=65, load_format="dummy")
    assert "max_model_len=65" in message and "set max_model_len=64" in message


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    assert "no such folder" in _refusal(tmp_path / "nowhere")
    assert "config.json" in _refusal(tmp_path)


def test_an_unreachable_hub_says_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def offline(*args: Any, **kwargs: Any) -> str:
        raise ConnectionError("no route to host")

    monkeypatch.setattr("huggingface_hub.snapshot_download", offline)
    with pytest.raises(ModelError, match=r"not a local folder.*ConnectionError.*download it elsewhere"):
        find_folder("somebody/something")


def test_broken_config_json_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    assert "config.json cannot be read" in _refusal(tmp_path)


def test_a_truncated_file_names_itself_and_a_tensor(llama: Path) -> None:
    file = llama / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:-10])
    message = _refusal(llama)
    assert "model.safetensors is truncated" in message and "model." in message.split("tensor ")[1]
    for rest in (content[:100], content[:4], b"", b"\xff" * 64):
        file.write_bytes(rest)
        assert "model.safetensors is broken or truncated" in _refusal(llama)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    build_model("llama2").save_pretrained(tmp_path, max_shard_size="200KB")
    shard = sorted(tmp_path.glob("*.safetensors"))[1]
    shard.unlink()
    message = _refusal(tmp_path)
    assert shard.name in message and "model.safetensors.index.json" in message


@pytest.mark.parametrize("model_impl", ["teachllm", "transformers"])
def test_missing_wrong_and_unknown_tensors_are_named(llama: Path, model_impl: str) -> None:
    weight = load_file(llama / "model.safetensors")[Q_PROJ]
    _edit_weights(llama, **{Q_PROJ: None})
    assert f"lacks tensor {Q_PROJ}" in _refusal(llama, model_impl=model_impl)
    _edit_weights(llama, **{Q_PROJ: weight[:-1].clone()})
    message = _refusal(llama, model_impl=model_impl)
    assert Q_PROJ in message and "[63, 64]" in message and "[64, 64]" in message and "model.safetensors" in message
    _edit_weights(llama, **{Q_PROJ: weight, "model.layers.1.self_attn.q_proj.bias": weight[0].clone()})
    message = _refusal(llama, model_impl=model_impl)
    assert "q_proj.bias" in message and "does not have" in message


def test_pickles_are_refused_unless_asked_for_and_then_read_without_code(tmp_path: Path) -> None:
    _config_only(tmp_path)
    assert "no .safetensors file" in _refusal(tmp_path)
    assert "no pytorch_model.bin" in _refusal(tmp_path, load_format="pt")
    torch.save({"x": Path("a")}, tmp_path / "pytorch_model.bin")
    message = _refusal(tmp_path)
    assert "pickles" in message and "load_format='pt'" in message
    assert "pytorch_model.bin cannot be read as plain tensors" in _refusal(tmp_path, load_format="pt")
