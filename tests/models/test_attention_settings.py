"""Settings that decide what attention computes, each in two spellings or by layer: as in transformers, or refused."""

from __future__ import annotations

import json
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, GPT2Config, OPTConfig

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


def by_both(folder: Path) -> list[list[int]]:
    """Return the greedy tokens of our own model code, and of transformers' in this engine."""
    return [ours(folder, model_impl=each) for each in ("teachllm", "transformers")]


def ours(folder: Path, **settings: Any) -> list[int]:
    with closing(LLM(str(folder), skip_tokenizer_init=True, num_gpu_blocks_override=32, **settings)) as llm:
        params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, detokenize=False)
        return llm.generate({"prompt_token_ids": PROMPT}, params, use_tqdm=False)[0].outputs[0].token_ids


@torch.inference_mode()
def theirs(folder: Path, kinds: list[str] | None = None) -> list[int]:
    """Return transformers' greedy tokens, with a mask per layer in place of its own where kinds of layers are given."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    if kinds is not None:
        for layer, kind in zip(model.model.layers, kinds, strict=False):  # some families have fewer layers
            window = model.config.sliding_window if kind == SLIDING else None
            layer.register_forward_pre_hook(partial(with_mask, window), with_kwargs=True)
    ids = list(PROMPT)
    for _ in range(NUM_TOKENS):
        ids.append(int(model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return ids[len(PROMPT) :]


def with_mask(window: int | None, layer: Any, args: Any, others: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Give a layer of transformers a mask of the last `window` tokens."""
    seen = torch.ones(args[0].shape[1], args[0].shape[1]).tril()
    if window is not None:
        seen = seen.triu(1 - window)
    return args, others | {"attention_mask": torch.zeros_like(seen).masked_fill(seen == 0, -torch.inf)[None, None]}


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
def test_rope_scaling_counts_before_rope_parameters(changes: dict[str, Any], tmp_path: Path) -> None:
    plain = ours(checkpoint("llama2", tmp_path / "plain", max_position_embeddings=512))
    folder = checkpoint("llama2", tmp_path / "scaled", max_position_embeddings=512, **changes)
    expected = theirs(folder)
    assert by_both(folder) == [expected] * 2
    assert expected != plain


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama2", {"rope_scaling": YARN, "original_max_position_embeddings": 32}),
        ("llama2", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}, "original_max_position_embeddings": 32}),
        ("llama3", {"original_max_position_embeddings": 16}),
    ],
    ids=["yarn", "yarn without its own", "llama3"],
)
def test_a_length_of_training_beside_the_scaling_counts_before_one_inside(
    family: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    without = ours(checkpoint(family, tmp_path / "without", **changes | {"original_max_position_embeddings": None}))
    folder = checkpoint(family, tmp_path / "with", **changes)
    expected = theirs(folder)
    assert by_both(folder) == [expected] * 2
    assert expected != without


@pytest.mark.parametrize("spelling", [{"type": None, "rope_type": "linear"}, {"type": "linear"}])
def test_a_kind_of_rope_has_two_spellings(spelling: dict[str, Any], tmp_path: Path) -> None:
    rope = spelling | {"factor": 2.0, "rope_theta": 10000.0}
    folder = checkpoint("llama2", tmp_path / "spelled", rope_parameters=rope)
    assert ours(folder) == theirs(folder) != ours(checkpoint("llama2", tmp_path / "plain"))


@pytest.mark.parametrize("name", ["longrope", "su", "proportional"])
def test_a_scaling_that_is_not_supported_is_refused_in_either_spelling(name: str, tmp_path: Path) -> None:
    for key in ("rope_scaling", "rope_parameters"):
        other = {"rope_parameters": DEFAULT} if key == "rope_scaling" else {}
        folder = checkpoint("llama2", tmp_path / key, **other, **{key: {"rope_type": name, "factor": 4.0}})
        with pytest.raises(ModelError, match=f"config.json: {key}: rope_type='{name}': must be one of"):
            ours(folder)


FULL, SLIDING = "full_attention", "sliding_attention"


@pytest.mark.parametrize("family", ["mistral", "qwen2", "qwen3"])
def test_layers_of_both_kinds_have_their_own_windows(family: str, tmp_path: Path) -> None:
    all_full, all_sliding = (mixed(family, tmp_path / kind, [kind] * 3) for kind in (FULL, SLIDING))
    folder = mixed(family, tmp_path / "mixed", [SLIDING, FULL, SLIDING])
    expected = theirs(folder)
    assert by_both(folder) == [expected] * 2
    assert expected not in (ours(all_full), ours(all_sliding))


def mixed(family: str, folder: Path, kinds: list[str], **changes: Any) -> Path:
    """A checkpoint with a window in the layers that are to have it; it may have fewer layers than are given."""
    num_layers = json.loads((checkpoint(family, folder) / "config.json").read_text())["num_hidden_layers"]
    window = {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 0}
    return checkpoint(family, folder, layer_types=kinds[:num_layers], **window | changes)


@pytest.mark.parametrize("family", ["llama2", "mixtral", "qwen3_moe"])
def test_layer_types_count_where_transformers_ignores_them_and_it_is_said(family: str, tmp_path: Path) -> None:
    kinds = [FULL, SLIDING, FULL]
    folder = mixed(family, tmp_path, kinds)
    with pytest.warns(UserWarning, match="layer_types count here"):
        answer = ours(folder)
    assert answer == theirs(folder, kinds) != theirs(folder)


def test_an_override_chooses_the_class_that_the_same_value_in_the_file_would(tmp_path: Path) -> None:
    folder = mixed("mistral", tmp_path, [SLIDING, FULL, SLIDING])
    answer = ours(folder, model_impl="transformers", hf_overrides={"rms_norm_eps": 1e-6})
    assert answer == theirs(folder) == ours(folder)


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_layers_with_a_window_that_is_switched_off_are_refused(family: str, tmp_path: Path) -> None:
    folder = mixed(family, tmp_path, [FULL, SLIDING, FULL], use_sliding_window=False)
    with pytest.raises(ModelError, match=r"config.json: layer_types=.*must be full_attention in all layers"):
        ours(folder)


def test_only_other_kinds_of_layers_are_refused(tmp_path: Path) -> None:
    kinds = [FULL, "chunked_attention", FULL]
    with pytest.raises(ModelError, match=r"layers of type 'chunked_attention' \(layer_types in config.json\)"):
        ours(checkpoint("llama2", tmp_path, layer_types=kinds))


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("mistral", {"attention_bias": True, "mlp_bias": True}),
        ("llama2", {"hidden_act": "swish"}),
        ("qwen3", {"mlp_bias": True}),
        ("llama2", {"kv_lora_rank": 16, "alibi": True, "index_topk": 4, "attn_layer_period": 2}),
        (
            "llama2",
            {"sliding_window": 0, "max_window_layers": -1, "use_sliding_window": [], "partial_rotary_factor": 1},
        ),
        ("mistral", {"max_window_layers": -1, "use_sliding_window": []}),
    ],
)
def test_what_an_architecture_does_not_read_changes_nothing(
    family: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    folder = checkpoint(family, tmp_path / "changed", **changes)
    assert ours(folder) == theirs(folder) == ours(checkpoint(family, tmp_path / "plain"))


@pytest.mark.parametrize("family", ["llama2", "gemma2"])
@pytest.mark.parametrize("value", [False, 0, []])
def test_attention_to_later_tokens_is_refused(family: str, value: Any, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"attention to later tokens \(is_causal in config.json\)"):
        ours(checkpoint(family, tmp_path, is_causal=value))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"num_attention_heads": 128, "num_key_value_heads": 128, "head_dim": None}, "num_attention_heads=128"),
        (
            {"rope_parameters": YARN | {"rope_theta": 1}},
            "rope_theta=1: must be a number between 1 and",
        ),
        (
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}, "head_dim": 2},
            "rope_type='dynamic': must be another one for heads of size 2",
        ),
        (
            {"rope_parameters": {"rope_type": "linear", "factor": 1e18, "rope_theta": 1e4}},
            "rope_parameters: factor=1e\\+18: must be small enough for a context of at most 16777216 tokens",
        ),
        ({"max_position_embeddings": 10**9}, "max_position_embeddings=1000000000: must be a whole number from 1 to"),
        ({"intermediate_size": 10**9}, r"config.json means \[1000000000, 64\] \(intermediate_size\)"),
        ({"vocab_size": 10**9}, r"config.json means \[1000000000, 64\] \(vocab_size\)"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers=1000000000: must be a whole number from 1 to 1024"),
        ({"num_hidden_layers": 1000}, r"has the tensors of 3 layers, and config.json means 1000 \(num_hidden_layers\)"),
    ],
)
def test_a_size_that_no_tensor_has_is_refused_before_it_takes_memory(
    changes: dict[str, Any], says: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=says):
        ours(checkpoint("llama2", tmp_path, **changes))


def test_an_embedding_may_be_narrower_than_the_layers(tmp_path: Path) -> None:
    torch.manual_seed(0)
    nothing = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    sizes = {"hidden_size": 64, "word_embed_proj_dim": 32, "ffn_dim": 96, "num_hidden_layers": 2, "vocab_size": 512}
    config = OPTConfig(**sizes, num_attention_heads=4, do_layer_norm_before=False, init_std=0.5, **nothing)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    answer = ours(tmp_path)
    assert answer == theirs(tmp_path) and len(set(answer)) > 2


@pytest.mark.parametrize("load_format", ["auto", "pt"])
@pytest.mark.parametrize("key", ["intermediate_size", "vocab_size"])
def test_a_size_that_no_tensor_has_is_refused_through_transformers_too(
    key: str, load_format: str, tmp_path: Path
) -> None:
    folder = checkpoint("gemma2", tmp_path, **{key: 10**9})
    if load_format == "pt":
        torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
        (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"has shape \[\d+, 64\], config.json means \[1000000000, 64\]"):
        ours(folder, load_format=load_format)


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("n_layer", 1000, "n_layer=1000: must be at most 2, as no tensor"),
        ("n_layer", 0, "n_layer=0: must be a whole number from 1"),
        ("n_layer", 10**9, "n_layer=1000000000: must be a whole number from 1 to 1024"),
        ("num_hidden_layers", 10**9, "num_hidden_layers=1000000000: must be a whole number from 1 to 1024"),
        ("n_embd", "64", "n_embd='64': must be a whole number from 1"),
        ("n_positions", -1, "n_positions=-1: must be a whole number from 1"),
        ("vocab_size", 10**9, r"tensor transformer.wte.weight has shape \[512, 64\]"),
    ],
)
def test_a_size_goes_by_the_name_that_its_family_has_for_it(name: str, value: Any, says: str, tmp_path: Path) -> None:
    sizes = {"n_layer": 2, "n_embd": 64, "n_head": 4, "n_positions": 128, "vocab_size": 512}
    nothing = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    AutoModelForCausalLM.from_config(GPT2Config(**sizes, **nothing)).save_pretrained(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    assert ours(tmp_path) == theirs(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(raw | {name: value}))
    with pytest.raises(ModelError, match=says):
        ours(tmp_path)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"num_hidden_layers": 1000, "layer_types": None}, "num_hidden_layers=1000: must be at most 3"),
        ({"num_hidden_layers": 10**9, "layer_types": None}, "num_hidden_layers=1000000000: .* number from 1 to 1024"),
        ({"num_attention_heads": 1000}, "config.json: num_attention_heads=1000: transformers gave"),
        ({"hidden_size": 3}, "config.json: hidden_size=3: transformers gave"),
    ],
)
def test_numbers_that_transformers_would_take_or_fail_at_without_a_name_are_refused(
    changes: dict[str, Any], says: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=says):
        ours(checkpoint("gemma2", tmp_path, **changes))


@pytest.mark.parametrize("key", ["num_experts", "moe_intermediate_size"])
def test_a_size_of_experts_that_no_tensor_has_is_refused(key: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=rf"config.json means \[1000000, 64\] \({key} or "):
        ours(checkpoint("qwen3_moe", tmp_path, **{key: 10**6}))


# -- models with their own code ---------------------------------------------------------------------------------

OWN_CODE = """
import torch
from torch import nn
from transformers.models.llama.configuration_llama import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaForCausalLM, LlamaModel


class OwnConfig(LlamaConfig):
    model_type = "own_llama"


class Layer(LlamaDecoderLayer):
    def forward(self, hidden_states, *args, **others):
        before = torch.cat((torch.zeros_like(hidden_states[:, :1]), hidden_states[:, :-1]), 1)
        return super().forward(hidden_states + self.share * before, *args, **others)


class OwnModel(LlamaModel):
    config_class = OwnConfig

    def __init__(self, config):
        super().__init__(config)
        if config.shifts:
            self.layers = nn.ModuleList(Layer(config, index) for index in range(config.num_hidden_layers))
            for layer in self.layers:
                layer.share = config.shifts
            self.post_init()

    def forward(self, input_ids=None, position_ids=None, **others):
        return super().forward(input_ids=input_ids, position_ids=None if self.config.counts else position_ids, **others)


class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig

    def __init__(self, config):
        super().__init__(config)
        self.model = OwnModel(config)
        self.post_init()
"""


def own_code(folder: Path, **fault: Any) -> Path:
    changes = {"architectures": ["OwnForCausalLM"], "model_type": "own_llama", "shifts": 0.0, "counts": False}
    where = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnForCausalLM"}
    checkpoint("llama2", folder, **changes | {"auto_map": where} | fault)
    (folder / "own.py").write_text(OWN_CODE)
    return folder


def test_own_code_runs_where_tokens_meet_in_attention_alone(tmp_path: Path) -> None:
    expected = ours(checkpoint("llama2", tmp_path / "plain"))
    assert ours(own_code(tmp_path / "own"), trust_remote_code=True) == expected


@pytest.mark.parametrize("fault", [{"shifts": 0.5}, {"shifts": 0.002}, {"shifts": float("inf")}, {"counts": True}])
def test_own_code_whose_tokens_meet_elsewhere_or_that_counts_positions_by_itself_is_refused(
    fault: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match="tokens of a step meet elsewhere than in attention, or it counts positions"):
        ours(own_code(tmp_path, **fault), trust_remote_code=True)


def test_own_code_that_fails_is_refused_in_one_line(tmp_path: Path) -> None:
    folder = own_code(tmp_path)
    code = OWN_CODE.replace(
        "        return super().forward(input_ids=",
        "        input_ids[0, 9]\n        return super().forward(input_ids=",
    )
    (folder / "own.py").write_text(code)
    with pytest.raises(ModelError, match=r"its code fails with the values of config.json \(IndexError"):
        ours(folder, trust_remote_code=True)
