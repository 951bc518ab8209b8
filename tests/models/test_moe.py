"""Mixtures of experts: what their checkpoints may be, and what holders of a part of the experts make."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from teachllm.checkpoint import files
from teachllm.config import EngineConfig
from teachllm.errors import ModelError
from teachllm.layers import moe
from teachllm.layers.moe import Experts, route
from teachllm.loading.loader import load_model
from teachllm.models import build
from teachllm.models.decoder import CausalLM
from teachllm.models.model_config import ModelConfig, load_model_config
from tests.checkpoints import build_model, make_checkpoint
from tests.models.flat_batch import logits_by_schedule
from tests.thorough import THOROUGH

CPU = torch.device("cpu")
FAMILIES = ["qwen3_moe", "mixtral"]
MOE_KEYS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}


def load(path: Path | str, **settings: Any) -> tuple[ModelConfig, Any]:
    config = EngineConfig(model=str(path), **settings)
    description = load_model_config(config)
    return description, load_model(description, config, CPU)


def refusal(path: Path | str, **settings: Any) -> str:
    with pytest.raises(ModelError) as error:
        load(path, **settings)
    message = str(error.value)
    assert "\n" not in message
    return message


def config_only(folder: Path, architecture: str, **changes: Any) -> Path:
    """A folder whose config.json is a tiny mixture's with `changes`, and no weights; `...` leaves a key out."""
    raw = {
        **{"architectures": [architecture], "vocab_size": 512, "hidden_size": 64, "intermediate_size": 96},
        **{"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, **MOE_KEYS},
    }
    (folder / "config.json").write_text(json.dumps({k: v for k, v in (raw | changes).items() if v is not ...}))
    return folder


@pytest.mark.parametrize("name", FAMILIES)
def test_what_a_token_meets_and_what_lies_in_memory_are_counted_apart(name: str, tmp_path: Path) -> None:
    theirs: Any = build_model(name)
    num_parameters = sum(p.numel() for p in theirs.parameters())
    experts = [p for n, p in theirs.named_parameters() if ".experts." in n]
    num_experts, top_k = theirs.config.num_local_experts, theirs.config.num_experts_per_tok
    idle = sum(p.numel() for p in experts) * (num_experts - top_k) // num_experts
    ends = 2 * theirs.config.vocab_size * theirs.config.hidden_size
    stored = load_model_config(EngineConfig(model=make_checkpoint(name, tmp_path)))
    unread = load_model_config(EngineConfig(model=str(tmp_path), load_format="dummy"))
    for description in (stored, unread):
        assert description.implementation == "teachllm"
        assert description.num_parameters == num_parameters
        assert description.num_active_parameters == num_parameters - idle - ends
    _, model = load(tmp_path, load_format="dummy")
    assert all(weight.isfinite().all() and weight.std() > 0 for weight in (model.layers[0].mlp.experts.parameters()))


@pytest.mark.parametrize("name", FAMILIES)
def test_experts_stored_apart_or_in_one_piece_are_the_same(name: str, tmp_path: Path) -> None:
    theirs: Any = build_model(name)
    theirs.save_pretrained(tmp_path / "apart")
    theirs.save_pretrained(tmp_path / "stacked", save_original_format=False)
    theirs.save_pretrained(tmp_path / "shards", max_shard_size="100KB")
    names = {folder: set(stored_names(tmp_path / folder)) for folder in ("apart", "stacked", "shards")}
    assert any("experts.0." in each for each in names["apart"]) and names["apart"] == names["shards"]
    assert any(each.endswith("mlp.experts.gate_up_proj") for each in names["stacked"])
    (tmp_path / "pickle").mkdir()
    (tmp_path / "pickle" / "config.json").write_text((tmp_path / "apart" / "config.json").read_text())
    torch.save(theirs.state_dict(), tmp_path / "pickle" / "pytorch_model.bin")
    for folder, load_format in (("apart", "auto"), ("stacked", "auto"), ("shards", "auto"), ("pickle", "pt")):
        _, ours = load(tmp_path / folder, load_format=load_format)
        for layer, their_layer in zip(ours.layers, theirs.model.layers, strict=True):
            if hasattr(their_layer.mlp, "experts"):
                assert torch.equal(layer.mlp.experts.gate_up, their_layer.mlp.experts.gate_up_proj)
                assert torch.equal(layer.mlp.experts.down, their_layer.mlp.experts.down_proj)


def test_a_stack_of_another_shape_is_named(tmp_path: Path) -> None:
    build_model("mixtral").save_pretrained(tmp_path, save_original_format=False)
    file, stack = tmp_path / "model.safetensors", "model.layers.0.mlp.experts.down_proj"
    whole = load_file(file)
    for changed, says in (
        (whole[stack][0].clone(), f"tensor {stack}, which the model of its config.json does not have"),
        (whole[stack][:-1].clone(), "lacks tensor model.layers.0.block_sparse_moe.experts.4.w2.weight"),
        (whole[stack][..., 1:].clone(), "experts.0.w2.weight has shape [64, 95], config.json means [64, 96]"),
    ):
        save_file(whole | {stack: changed}, file, metadata={"format": "pt"})
        assert says in refusal(tmp_path)


def stored_names(folder: Path) -> list[str]:
    return [name for file in folder.glob("*.safetensors") for name in load_file(file)]


@pytest.mark.parametrize(
    ("name", "up", "router"),
    [
        ("qwen3_moe", "model.layers.2.mlp.experts.7.up_proj.weight", "model.layers.0.mlp.gate.weight"),
        (
            "mixtral",
            "model.layers.1.block_sparse_moe.experts.4.w3.weight",
            "model.layers.0.block_sparse_moe.gate.weight",
        ),
    ],
)
def test_missing_wrong_and_unknown_experts_are_named(name: str, up: str, router: str, tmp_path: Path) -> None:
    make_checkpoint(name, tmp_path)
    file = tmp_path / "model.safetensors"
    whole = load_file(file)

    def write(**changes: torch.Tensor | None) -> None:
        save_file({k: v for k, v in (whole | changes).items() if v is not None}, file, metadata={"format": "pt"})

    for tensor in (up, router):
        write(**{tensor: None})
        assert f"lacks tensor {tensor}, which config.json means (1 missing" in refusal(tmp_path)
    write(**{up: whole[up][:-1].clone()})
    message = refusal(tmp_path)
    size = whole[up].shape[0]
    assert up in message and f"[{size - 1}, 64]" in message and f"[{size}, 64]" in message
    extra = up.replace(".7.", ".8.").replace(".4.", ".5.")
    write(**{extra: whole[up].clone()})
    assert f"tensor {extra}, which the model of its config.json does not have" in refusal(tmp_path)


REFUSED = [
    ({"num_experts": 0}, ["num_experts=0: must be a whole number from 1"]),
    ({"num_experts": "8"}, ["num_experts='8'"]),
    ({"num_experts_per_tok": 5}, ["num_experts_per_tok=5: must be at most num_", "experts=4"]),
    ({"hidden_act": "gelu"}, ["hidden_act='gelu'"]),
]
REFUSED_QWEN = [
    ({"moe_intermediate_size": 0}, ["moe_intermediate_size=0"]),
    ({"decoder_sparse_step": 0}, ["decoder_sparse_step=0"]),
    ({"mlp_only_layers": [2]}, ["mlp_only_layers=[2]", "num_hidden_layers=2"]),
    ({"mlp_only_layers": 1}, ["mlp_only_layers=1"]),
]
CASES = [(architecture, *case) for architecture in ("Qwen3MoeForCausalLM", "MixtralForCausalLM") for case in REFUSED]
CASES += [("Qwen3MoeForCausalLM", *case) for case in REFUSED_QWEN]
QUANTIZED = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}


@pytest.mark.parametrize(("architecture", "changes", "words"), CASES)
def test_a_mixture_that_cannot_be_is_refused_by_its_config_alone(
    architecture: str, changes: dict, words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "stored_tensors", lambda folder: pytest.fail("looked for weights"))
    message = refusal(config_only(tmp_path, architecture, **changes))
    assert all(word in message for word in ["config.json: ", *words])


@pytest.mark.parametrize("architecture", ["Qwen3MoeForCausalLM", "MixtralForCausalLM"])
@pytest.mark.parametrize(("changes", "settings"), [(QUANTIZED, {}), ({}, {"quantization": "int8"})])
def test_quantized_experts_are_refused_before_a_weight_is_read(
    architecture: str,
    changes: dict[str, Any],
    settings: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(files, "stored_tensors", lambda folder: pytest.fail("looked for weights"))
    message = refusal(config_only(tmp_path, architecture, **changes), **settings)
    assert architecture in message and "takes no quantized weights" in message and "unquantized checkpoint" in message


def on_meta(folder: Path) -> CausalLM:
    """Return the model of a folder with weights that are sizes only."""
    description = load_model_config(EngineConfig(model=str(folder), load_format="dummy"))
    return build.build_model(description, build.META)


def test_an_absent_key_means_what_it_means_to_the_family(tmp_path: Path) -> None:
    absent = dict.fromkeys(MOE_KEYS, ...)
    qwen = on_meta(config_only(tmp_path, "Qwen3MoeForCausalLM", **absent))
    assert qwen.experts.num_experts == 128 and qwen.experts.top_k == 8 and not qwen.experts.renormalizes
    assert qwen.layers[0].mlp.experts.gate_up.shape == (128, 2 * 768, 64)
    mixtral = on_meta(config_only(tmp_path, "MixtralForCausalLM", **absent))
    assert mixtral.experts.num_experts == 8 and mixtral.experts.top_k == 2 and mixtral.experts.renormalizes
    assert mixtral.layers[0].mlp.experts.down.shape == (8, 64, 96)
    assert mixtral.norm.eps == 1e-5 and qwen.norm.eps == 1e-6


@pytest.mark.parametrize(
    ("changes", "layers"),
    [
        ({}, (True, True, True, True)),
        ({"decoder_sparse_step": 2}, (False, True, False, True)),
        ({"mlp_only_layers": [0, 3]}, (False, True, True, False)),
    ],
)
def test_some_layers_have_experts_and_the_others_one_mlp(
    changes: dict, layers: tuple[bool, ...], tmp_path: Path
) -> None:
    folder = config_only(tmp_path, "Qwen3MoeForCausalLM", num_hidden_layers=4, **changes)
    model = on_meta(folder)
    assert tuple(hasattr(layer.mlp, "experts") for layer in model.layers) == model.experts.layers == layers


@pytest.mark.parametrize("name", FAMILIES if THOROUGH else FAMILIES[:1])
def test_a_gpus_kernels_give_the_logits_that_a_cpu_gives(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    description, model = load(make_checkpoint(name, tmp_path))
    sequences = [torch.randint(512, (length,), generator=torch.Generator().manual_seed(0)) for length in (6, 1)]
    steps = [[(0, 5)], [(0, 1), (1, 1)]] if THOROUGH else [[(0, 5), (1, 1)]]
    expected = logits_by_schedule(model, description, sequences, steps, torch.float32, 16)
    called = []
    for operation in ("route", "group", "combine", "grouped_gated", "grouped_down"):
        kernel = getattr(moe, f"{operation}_triton")

        def run(*args: Any, kernel: Any = kernel) -> Any:
            called.append(kernel)
            return kernel(*args)

        monkeypatch.setattr(moe, f"{operation}_reference", run)  # interpreted
    found = logits_by_schedule(model, description, sequences, steps, torch.float32, 16)
    assert len(called) == 5 * len(steps) * sum(model.experts.layers)
    assert all(torch.allclose(a, b, atol=5e-5) for a, b in zip(found, expected, strict=True))


@pytest.fixture
def whole() -> Experts:
    torch.manual_seed(0)
    experts = Experts(32, range(6), 24)
    for weight in experts.parameters():
        weight.data.normal_(0.0, 0.2)
    return experts


def part_of(whole: Experts, held: range, columns: slice) -> Experts:
    """What a holder of some experts, or of a slice of their width, has."""
    width = len(range(24)[columns])
    part = Experts(32, held, width)
    for index, expert in enumerate(held):
        gate, up, down = whole.parts(expert)
        for own, all_of_it in zip(part.parts(index), (gate[columns], up[columns], down[:, columns]), strict=True):
            own.copy_(all_of_it)
    return part


BY_EXPERTS = [(range(0, 2), slice(0, 24)), (range(2, 6), slice(0, 24))]
BY_WIDTH = [(range(0, 6), slice(0, 16)), (range(0, 6), slice(16, 24))]


@pytest.mark.parametrize(
    ("shares", "on_gpu"),
    [(BY_EXPERTS, False), (BY_WIDTH, False), (BY_EXPERTS, True), *([(BY_WIDTH, True)] if THOROUGH else [])],
    ids=["experts", "width", "experts on a GPU", *(["width on a GPU"] if THOROUGH else [])],
)
def test_holders_of_parts_add_up_to_the_whole(
    whole: Experts, shares: list[tuple[range, slice]], on_gpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.randn(7, 32)
    routes = route(torch.randn(7, 6), 3, True)
    expected = whole(x, routes)
    if on_gpu:
        monkeypatch.setattr(moe, "card_of", lambda device: "gpu")  # its kernels, interpreted
        assert torch.allclose(part_of(whole, whole.held, slice(0, 24))(x, routes), expected, atol=1e-5)
    assert torch.allclose(sum(part_of(whole, *share)(x, routes) for share in shares), expected, atol=1e-5)


def test_the_tokens_of_each_expert_are_counted_by_layer_if_that_is_wanted(tmp_path: Path) -> None:
    _, model = load(make_checkpoint("qwen3_moe", tmp_path))
    first, dense, last = (layer.mlp for layer in model.layers)
    xs = [torch.randn(9, 64), torch.randn(4, 64)]
    first(xs[0])
    counts = model.count_load()
    assert counts.shape == (2, 8) and not counts.any() and not hasattr(dense, "load")
    first(xs[0])
    first(xs[1])
    last(xs[1])
    for row, mlp, seen in ((0, first, torch.cat(xs)), (1, last, xs[1])):
        chosen = mlp.gate(seen).topk(3).indices.flatten()
        assert counts[row].tolist() == [int((chosen == expert).sum()) for expert in range(8)]
