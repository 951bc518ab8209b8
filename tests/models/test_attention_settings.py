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


@pytest.mark.parametrize("model_impl", ["teachllm", "transformers"])
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
    family: str, changes: dict[str, Any], model_impl: str, tmp_path: Path
) -> None:
    without = ours(checkpoint(family, tmp_path / "without", **changes | {"original_max_position_embeddings": None}))
    folder = checkpoint(family, tmp_path / "with", **changes)
    assert ours(folder, model_impl=model_impl) == theirs(folder) != without


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


@pytest.mark.parametrize("model_impl", ["teachllm", "transformers"])
@pytest.mark.parametrize("family", ["mistral", "qwen2", "qwen3"])
def test_layers_of_both_kinds_have_their_own_windows(family: str, model_impl: str, tmp_path: Path) -> None:
    all_full, all_sliding = (mixed(family, tmp_path / kind, [kind] * 3) for kind in (FULL, SLIDING))
    folder = mixed(family, tmp_path / "mixed", [SLIDING, FULL, SLIDING])
    answer = ours(folder, model_impl=model_impl)
    assert answer == theirs(folder)
    assert answer not in (ours(all_full), ours(all_sliding))


def mixed(family: str, folder: Path, kinds: list[str], **changes: Any) -> Path:
    """A checkpoint with a window in the layers that are to have it; it may have fewer layers than are given."""
    num_layers = json.loads((checkpoint(family, folder) / "config.json").read_text())["num_hidden_layers"]
    window = {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 0}
    return checkpoint(family, folder, layer_types=kinds[:num_layers], **window | changes)


def test_layer_types_count_where_transformers_ignores_them_and_it_is_said(tmp_path: Path) -> None:
    kinds = [FULL, SLIDING, FULL]
    as_mistral = {"model_type": "mistral", "architectures": ["MistralForCausalLM"]}
    expected = ours(mixed("llama2", tmp_path / "mistral", kinds, **as_mistral))
    for family in ("llama2", "mixtral", "qwen3_moe"):
        folder = mixed(family, tmp_path / family, kinds)
        with pytest.warns(UserWarning, match="layer_types count here"):
            answer = ours(folder)
        assert answer != theirs(folder)
        assert family != "llama2" or answer == expected


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
        ("qwen3", {"mlp_bias": True}),
        ("llama2", {"kv_lora_rank": 16, "alibi": True, "index_topk": 4, "attn_layer_period": 2}),
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
        ({"max_position_embeddings": 10**9}, "max_position_embeddings=1000000000: must be a whole number from 1 to"),
        ({"intermediate_size": 10**9}, r"config.json means 1000000000 rows \(intermediate_size\)"),
        ({"vocab_size": 10**9}, r"config.json means 1000000000 rows \(vocab_size\)"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers=1000000000: must be a whole number from 1 to 4096"),
        ({"num_hidden_layers": 4000}, r"lacks tensor model.layers.3999.* \(num_hidden_layers\)"),
    ],
)
def test_a_size_that_no_tensor_has_is_refused_before_it_takes_memory(
    changes: dict[str, Any], says: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=says):
        ours(checkpoint("llama2", tmp_path, **changes))


@pytest.mark.parametrize("key", ["intermediate_size", "vocab_size"])
def test_so_is_one_of_a_model_that_runs_through_transformers(key: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has shape \[\d+, 64\], config.json means \[1000000000, 64\]"):
        ours(checkpoint("gemma2", tmp_path, **{key: 10**9}))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"num_hidden_layers": 5000, "layer_types": None}, "num_hidden_layers=5000: must be at most 3"),
        ({"num_attention_heads": 1000}, "config.json: num_attention_heads=1000: transformers gave"),
        ({"hidden_size": 3}, "config.json: hidden_size=3: transformers gave"),
    ],
)
def test_so_are_numbers_that_transformers_would_take_or_fail_at_without_a_name(
    changes: dict[str, Any], says: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=says):
        ours(checkpoint("gemma2", tmp_path, **changes))


@pytest.mark.parametrize("key", ["num_experts", "moe_intermediate_size"])
def test_so_is_a_size_of_experts(key: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=rf"config.json means 1000000 rows \({key} or "):
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
        return super().forward(hidden_states + 0.5 * before, *args, **others)


class OwnModel(LlamaModel):
    config_class = OwnConfig

    def __init__(self, config):
        super().__init__(config)
        if config.shifts:
            self.layers = nn.ModuleList(Layer(config, index) for index in range(config.num_hidden_layers))
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


@pytest.mark.parametrize("fault", [None, "shifts", "counts"])
def test_own_code_runs_unless_tokens_meet_beside_attention_or_have_its_own_positions(
    fault: str | None, tmp_path: Path
) -> None:
    changes = {"architectures": ["OwnForCausalLM"], "model_type": "own_llama", "shifts": False, "counts": False}
    where = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnForCausalLM"}
    folder = checkpoint("llama2", tmp_path / "own", **changes | {"auto_map": where} | ({fault: True} if fault else {}))
    (folder / "own.py").write_text(OWN_CODE)
    if fault is None:
        assert ours(folder, trust_remote_code=True) == ours(checkpoint("llama2", tmp_path / "plain"))
    else:
        with pytest.raises(ModelError, match="its tokens depend on their neighbours or their place in a step"):
            ours(folder, trust_remote_code=True)
