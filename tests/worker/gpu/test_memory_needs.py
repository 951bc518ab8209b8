"""What is predicted before a weight is read: bytes by hand, of steps whose widest point can be told from the sizes.

A width is the elements that a token keeps alive at the widest point of the forward pass, of 2 bytes each. Throughout:
cosine and sine (float32, half a head each), the residual stream, and the output of the last norm. Beside them are QKV
and the attention output; or gate, up and their product, or only the product where Hopper's kernel gates.
"""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from teachllm import EngineConfig
from teachllm.core.memory import MemoryPlan
from teachllm.distributed.layout import layout_of
from teachllm.layers.attention import Attention
from teachllm.layers.attention_backends import selection
from teachllm.layers.weights.quantized_weights import Activations
from teachllm.layers.weights.scheme import UNQUANTIZED
from teachllm.models.build import build_model
from teachllm.models.model_config import ModelConfig, load_model_config
from teachllm.models.own_model import model_of_rank
from teachllm.spec_decode.load import load_drafter_config
from teachllm.worker.gpu.device_batch import DeviceBatch
from teachllm.worker.gpu.memory import meta_model
from teachllm.worker.gpu.memory.graph_needs import has_graphs
from teachllm.worker.gpu.memory.live_bytes import LiveBytes
from teachllm.worker.gpu.memory.measured import compare
from teachllm.worker.gpu.memory.meta_model import meta_ranks, representative_layers
from teachllm.worker.gpu.memory.predicted import PredictedNeeds, predict_needs
from teachllm.worker.kv_cache import kv_cache_specs
from teachllm_kernels import selection as kernel_table
from teachllm_kernels.attention.decode_plan import DecodePlan
from teachllm_kernels.dry_run import dry_run
from teachllm_kernels.gpu_type import GPUType
from teachllm_kernels.sampling.random_sample import workspace_bytes
from teachllm_kernels.selection import AS_PRODUCT, CASES
from tests.bench.h200_script import h200
from tests.quantization.format_checkpoints import FORMATS
from tests.worker.gpu.imagined_gpu import AMPERE, HOPPER, NOWHERE, describe

# Of Qwen3-30B-A3B and Mixtral 8x7B, with fewer layers.
EXPERTS = {
    "many": {
        **{"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 128},
        **{"num_experts_per_tok": 8, "moe_intermediate_size": 768, "hidden_size": 2048, "num_attention_heads": 32},
        **{"num_key_value_heads": 4, "num_hidden_layers": 3},
    },
    "large": {
        **{"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_local_experts": 8},
        **{"hidden_size": 4096, "num_experts_per_tok": 2, "intermediate_size": 14336, "num_attention_heads": 32},
        **{"num_key_value_heads": 8, "num_hidden_layers": 2},
    },
    "some layers": {
        **{"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 16},
        **{"num_experts_per_tok": 2, "moe_intermediate_size": 128, "mlp_only_layers": [1], "num_hidden_layers": 3},
        **{"intermediate_size": 6144},
    },
}
MORE_SHAPES = {name: h200.SHAPES["qwen3-0.6b"] | changes for name, changes in EXPERTS.items()}
MORE_SHAPES["narrow"] = h200.SHAPES["qwen3-0.6b"] | {"intermediate_size": 256, "num_hidden_layers": 3}


@pytest.fixture(autouse=True)
def more_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, shape in MORE_SHAPES.items():
        monkeypatch.setitem(h200.SHAPES, name, shape)


def prediction(config: EngineConfig, model: ModelConfig, card: GPUType, rank: int = 0, **more: Any) -> PredictedNeeds:
    """Return a prediction for a rank on such a card."""
    with dry_run(card):
        return predict_needs(config, model_of_rank(model, layout_of(config).coords(rank)), NOWHERE, **more)


def predicted(config: EngineConfig, model: ModelConfig, card: GPUType, **more: Any) -> dict[str, int]:
    """Return what a prediction says by the names of a plan's fields."""
    return prediction(config, model, card, **more).needs


FROM_ROWS = 2048  # where gate and up are multiplied before they are written, see docs/kernels.md
VOCAB, ALL = 151936, 16384 + 256  # tokens of the largest step with default settings
FIXED = {"batch_invariant": True}
EIGHT = {"max_num_seqs": 8}  # 16,392 tokens
FEW = EIGHT | {"max_num_batched_tokens": 1024}
HALF = {"tensor_parallel_size": 2}
# What sampling takes beside the logits: 16 rows, each 14 copies of its logits in float32 and 24 bytes for each token of
# its sequence; or scoring a prompt, 16 rows of 9 copies.
SAMPLING = 16 * (14 * 4 * VOCAB + 24 * 20480)
SCORING = 16 * 9 * 4 * VOCAB

BYTES: dict[str, tuple[str, dict[str, Any], GPUType, int]] = {
    "0.6B": ("qwen3-0.6b", {}, AMPERE, 2 * ALL * (2 * 128 + 2 * 1024 + 3 * 3072)),
    "8B": ("qwen3-8b", {}, AMPERE, 2 * ALL * (2 * 128 + 2 * 4096 + 3 * 12288)),
    "0.6B, few tokens: hidden states, logits and sampling": (
        *("qwen3-0.6b", {"max_num_batched_tokens": 512}, AMPERE),
        2 * 512 * 1024 + 2 * 256 * VOCAB + SAMPLING,
    ),
    # Fixed products do not add to the residual in place, so two blocks' results and an input are there besides.
    "0.6B, fixed": ("qwen3-0.6b", FIXED, AMPERE, 2 * ALL * (2 * 128 + (2 + 3) * 1024 + 3 * 3072)),
    "8B, fixed": ("qwen3-8b", FIXED, AMPERE, 2 * ALL * (2 * 128 + (2 + 3) * 4096 + 3 * 12288)),
    "8B, fixed, on Hopper": ("qwen3-8b", FIXED, HOPPER, 2 * ALL * (2 * 128 + (2 + 3) * 4096 + 3 * 12288)),
    "attention is wider than the MLP": (
        *("narrow", EIGHT, AMPERE),
        2 * 16392 * (2 * 128 + 2 * 1024 + (16 + 2 * 8) * 128 + 16 * 128),
    ),
    "0.6B on Hopper: attention": (
        *("qwen3-0.6b", {}, HOPPER),
        2 * ALL * (2 * 128 + 2 * 1024 + (16 + 2 * 8) * 128 + 16 * 128),
    ),
    "8B on Hopper: a gated product": ("qwen3-8b", {}, HOPPER, 2 * ALL * (2 * 128 + 2 * 4096 + 12288)),
    # One token less than gated kernels take. The largest step, of 2,050 tokens, holds less than half of that.
    "8B on Hopper, one token short": (
        *("qwen3-8b", EIGHT | {"max_num_batched_tokens": FROM_ROWS + 2}, HOPPER),
        2 * (FROM_ROWS - 1) * (2 * 128 + 2 * 4096 + 3 * 12288),
    ),
    # An expert's activations and result for each of a token's experts; its id, weight and place. Experts do not add to
    # the residual in place.
    "many experts": (
        *("many", EIGHT, AMPERE),
        2 * 16392 * (2 * 128 + (2 + 2) * 2048 + 8 * (768 + 2048) + 6 * 8),
    ),
    "many experts on Hopper": (
        *("many", EIGHT, HOPPER),
        2 * 16392 * (2 * 128 + (2 + 2) * 2048 + 8 * (768 + 2048) + 6 * 8),
    ),
    "many experts, fixed": (
        *("many", EIGHT | FIXED, AMPERE),
        2 * 16392 * (2 * 128 + (2 + 3) * 2048 + 8 * (768 + 2048) + 6 * 8),
    ),
    "large experts": (
        *("large", EIGHT, AMPERE),
        2 * 16392 * (2 * 128 + (2 + 2) * 4096 + 2 * (14336 + 4096) + 6 * 2),
    ),
    "large experts on Hopper": (
        *("large", EIGHT, HOPPER),
        2 * 16392 * (2 * 128 + (2 + 2) * 4096 + 2 * (14336 + 4096) + 6 * 2),
    ),
    "large experts, fixed": (
        *("large", EIGHT | FIXED, AMPERE),
        2 * 16392 * (2 * 128 + (2 + 3) * 4096 + 2 * (14336 + 4096) + 6 * 2),
    ),
    # The dense layer between two with experts is the widest; what experts leave apart from the residual is still there.
    "experts in some layers": ("some layers", EIGHT, AMPERE, 2 * 16392 * (2 * 128 + (2 + 2) * 1024 + 3 * 6144)),
    "experts in some layers, on Hopper": (
        *("some layers", EIGHT, HOPPER),
        2 * 16392 * (2 * 128 + (2 + 2) * 1024 + 6144),
    ),
    "experts in some layers, fixed": (
        *("some layers", EIGHT | FIXED, AMPERE),
        2 * 16392 * (2 * 128 + (2 + 3) * 1024 + 3 * 6144),
    ),
    # 8-bit values take half an element: of a block's input, and of what goes into the last product. Until a block ends,
    # its input, a product's result and the residual are there.
    **{
        f"{size} in {method}": (name, {"quantization": method}, HOPPER, 2 * ALL * (2 * 128 + hidden + inner))
        for size, name, hidden, inner in (
            ("0.6B", "qwen3-0.6b", 11 * 1024 // 2, 3 * 3072 // 2),
            ("8B", "qwen3-8b", 11 * 4096 // 2, 3 * 12288 // 2),
        )
        for method in ("fp8", "int8")
    },
    "0.6B in int4: attention": (
        *("qwen3-0.6b", {"quantization": "int4"}, HOPPER),
        2 * ALL * (2 * 128 + 2 * 1024 + (16 + 2 * 8) * 128 + 16 * 128),
    ),
    "8B in int4: gate and up are dequantized": (
        *("qwen3-8b", {"quantization": "int4"}, HOPPER),
        2 * (2 * 12288 * 4096) + 2 * ALL * (2 * 128 + 2 * 4096 + 12288),
    ),
    "8B in int4, few tokens: gate and up are written": (
        *("qwen3-8b", FEW | {"quantization": "int4"}, HOPPER),
        2 * (2 * 12288 * 4096) + 2 * 1024 * (2 * 128 + 2 * 4096 + 2 * 12288),
    ),
    **{
        f"0.6B in {method}, few tokens": (
            *("qwen3-0.6b", FEW | {"quantization": method}, HOPPER),
            2 * 1024 * 1024 + 2 * 8 * VOCAB + SCORING,
        )
        for method in (None, "fp8", "int8", "int4")
    },
    # One of two ranks has half of the heads, widths and logits, and all logits besides. Sums are not added in place.
    **{
        f"half of 0.6B in {method}: logits": (
            *("qwen3-0.6b", HALF | {"quantization": method}, HOPPER),
            2 * ALL * 1024 + 2 * 256 * (VOCAB + VOCAB // 2) + SAMPLING,
        )
        for method in (None, "fp8", "int4")
    },
    "half of 8B: the MLP's end": (
        *("qwen3-8b", HALF, HOPPER),
        2 * ALL * (2 * 128 + (2 + 3) * 4096 + 6144 + 4096),
    ),
    "half of 8B in int8": (
        *("qwen3-8b", HALF | {"quantization": "int8"}, HOPPER),
        2 * ALL * (2 * 128 + 11 * 4096 // 2 + 3 * 6144 // 2),
    ),
    "half of 8B in int4: down is dequantized": (
        *("qwen3-8b", HALF | {"quantization": "int4"}, HOPPER),
        2 * (6144 * 4096) + 2 * ALL * (2 * 128 + (2 + 3) * 4096 + 6144 + 4096),
    ),
    "half of 8B in int4, few tokens": (
        *("qwen3-8b", HALF | FEW | {"quantization": "int4"}, HOPPER),
        2 * (2 * 6144 * 4096) + 2 * 1024 * (2 * 128 + (2 + 3) * 4096 + 2 * 6144),
    ),
    "half of 8B, few tokens": (
        *("qwen3-8b", HALF | FEW, HOPPER),
        2 * 1024 * 4096 + 2 * 8 * (VOCAB + VOCAB // 2) + SCORING,
    ),
    "the first half of the layers of 8B": (
        *("qwen3-8b", {"pipeline_parallel_size": 2}, HOPPER),
        2 * ALL * (2 * 128 + 2 * 4096 + 12288),
    ),
}


@pytest.mark.parametrize("case", list(BYTES))
def test_the_largest_step_holds_what_can_be_told_by_hand(case: str, tmp_path: Path) -> None:
    name, settings, card, expected = BYTES[case]
    config, model = describe(name, tmp_path, **settings)
    assert predicted(config, model, card)["activations"] == pytest.approx(expected, rel=1e-3)


def test_a_step_one_token_short_of_gated_kernels_is_told_apart_where_the_card_has_them(tmp_path: Path) -> None:
    settings = EIGHT | {"max_num_batched_tokens": FROM_ROWS + 2}
    config, model = describe("qwen3-8b", tmp_path, **settings)
    expected = 2 * (FROM_ROWS - 1) * (2 * 128 + 2 * 4096 + 3 * 12288)
    assert prediction(config, model, HOPPER).unmeasured == pytest.approx(expected, rel=1e-3)
    shorter = replace(config, max_num_batched_tokens=FROM_ROWS - 1)
    assert prediction(shorter, model, HOPPER).unmeasured == 0
    for fixed, card in ((False, AMPERE), (True, HOPPER)):  # gate and up are always written
        assert prediction(replace(config, batch_invariant=fixed), model, card).unmeasured == 0


@pytest.mark.parametrize(("quantization", "is_short"), [("int4", True), ("int8", False), ("fp8", False)])
def test_the_border_of_gated_kernels_is_that_of_the_weights_form(
    quantization: str, is_short: bool, tmp_path: Path
) -> None:
    config, model = describe("qwen3-0.6b", tmp_path, quantization=quantization)
    assert bool(prediction(config, model, HOPPER).unmeasured) == is_short  # 8-bit kernels gate any number of rows

    def found(**changes: Any) -> int:
        gating = [case.kernel.endswith("hopper_gated_linear") for case in CASES]
        cases = [case._replace(**changes) if gates else case for case, gates in zip(CASES, gating, strict=True)]
        with kernel_table.replaced_table(tuple(cases)):
            return prediction(config, model, HOPPER).unmeasured

    before, moved, written = found(), found(rows=(3000, kernel_table.MANY)), found(kernel=AS_PRODUCT)
    assert (moved > before) == is_short and written == 0


def test_a_drafters_gated_kernels_have_a_border_too(tmp_path: Path) -> None:
    draft = h200.write_shape("qwen3-0.6b", tmp_path)
    speculation = {"method": "draft_model", "model": str(draft), "num_speculative_tokens": 4}
    config, model = describe("qwen3-8b", tmp_path, quantization="fp8", speculative_config=speculation)
    drafter = load_drafter_config(config, model, "cuda")
    assert prediction(config, model, HOPPER, drafter=drafter).unmeasured
    assert not prediction(replace(config, speculative_config=None), model, HOPPER).unmeasured


@pytest.mark.parametrize("name", list(FORMATS))
def test_every_format_is_laid_out_without_its_values(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    how = FORMATS[name]
    monkeypatch.setitem(h200.SHAPES, name, h200.SHAPES["qwen3-0.6b"] | {"quantization_config": how.config})
    config, model = describe(name, tmp_path)
    width = 2 * 128 + 11 * 1024 // 2 + 3 * 3072 // 2  # as of W8A8 above
    if how.activations is Activations.BY_BLOCK:
        width += 2 * (1024 + 3072) // 128  # float32 scales of 128 inputs each
    elif how.activations is Activations.UNQUANTIZED and name != "fp8 of weights alone":
        width = 2 * 128 + 2 * 1024 + (16 + 2 * 8) * 128 + 16 * 128  # as of int4 above
    assert predicted(config, model, HOPPER)["activations"] == pytest.approx(2 * ALL * width, rel=1e-3)


@pytest.mark.parametrize(
    ("method", "model", "target", "width"),
    [
        # The model's hidden states; then embedding, residual stream, feature, a norm's output, and the layer's MLP.
        ("eagle", "teachlm-eagle", "teachlm", 256 + 2 * 64 + 3 * 256 + 256 + 3 * 768),
        ("draft_model", "teachlm", "teachlm-draft", 128 + 2 * 64 + 2 * 256 + 3 * 768),
        ("draft_model", "teachlm-draft", "teachlm", 2 * 64 + 2 * 256 + 3 * 768),  # the model itself is wider
        ("medusa", "teachlm-medusa", "teachlm", 2 * 64 + 2 * 256 + 3 * 768),
    ],
)
@pytest.mark.parametrize("settings", [{}, {"kv_cache_dtype": "int8", "max_num_batched_tokens": 2000, **EIGHT}])
def test_a_drafter_is_counted_too(method: str, model: str, target: str, width: int, settings: dict[str, Any]) -> None:
    speculation = {"method": method, "model": model}
    options: dict[str, Any] = {"model": target, "device": "cuda", "dtype": "bfloat16"} | settings
    config = EngineConfig(speculative_config=speculation, **options)  # type: ignore[arg-type]
    described = load_model_config(config, "cuda")
    config = config.resolve(described.max_model_len)
    assert config.max_num_batched_tokens
    needed = predicted(config, described, AMPERE, drafter=load_drafter_config(config, described, "cuda"))
    assert needed["activations"] == pytest.approx(2 * config.max_num_batched_tokens * width, rel=1e-3)


def test_a_model_of_transformers_code_is_estimated_by_its_width(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpt2 = {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "vocab_size": 5000}
    gpt2 |= {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128}
    monkeypatch.setitem(h200.SHAPES, "gpt2", gpt2)
    config, model = describe("gpt2", tmp_path, max_model_len=128, dtype="bfloat16")
    width = 4 * 64 + 3 * 256  # gate, up and product as of a gated MLP, which is four times as wide
    assert model.implementation == "transformers" and predicted(config, model, HOPPER)["activations"] == pytest.approx(
        2 * ALL * width, rel=1e-3
    )


def _weights(hidden: int, heads: int, kv_heads: int, mlps: int, num_layers: int, qk_norm: bool = True) -> int:
    """Elements, given those of the MLPs of all layers: a tied embedding, attention, norms; cosine and sine tables."""
    norms = 2 * hidden + qk_norm * (heads + kv_heads) * 128  # held once per head
    attention = 2 * (heads + kv_heads) * 128 * hidden
    return VOCAB * hidden + num_layers * (attention + norms) + mlps + hidden + 2 * 20480 * 128


@pytest.mark.parametrize(
    ("name", "elements"),
    [
        ("qwen3-0.6b", _weights(1024, 16, 8, 28 * 3 * 1024 * 3072, 28)),
        ("many", _weights(2048, 32, 4, 3 * (128 * 3 * 2048 * 768 + 128 * 2048), 3)),
        ("large", _weights(4096, 32, 8, 2 * (8 * 3 * 4096 * 14336 + 8 * 4096), 2, qk_norm=False)),
        ("some layers", _weights(1024, 16, 8, 2 * (16 * 3 * 1024 * 128 + 16 * 1024) + 3 * 1024 * 6144, 3)),
    ],
)
def test_weights_are_counted_as_they_are_held(name: str, elements: int, tmp_path: Path) -> None:
    assert describe(name, tmp_path)[1].weight_bytes == 2 * elements


@pytest.mark.parametrize(
    ("name", "settings"),
    [("qwen3-0.6b", {"quantization": "int4"}), ("some layers", {}), ("some layers", {"pipeline_parallel_size": 2})],
)
def test_a_few_layers_hold_what_all_do(
    name: str, settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(h200.SHAPES, name, h200.SHAPES[name] | {"num_hidden_layers": 9, "mlp_only_layers": [1, 4, 5]})
    config, model = describe(name, tmp_path, **settings)
    ranks = range(layout_of(config).num_ranks)
    few = [predicted(config, model, AMPERE, rank=rank) for rank in ranks]
    monkeypatch.setattr(meta_model, "representative_layers", lambda layers: list(range(len(layers))))
    assert few == [predicted(config, model, AMPERE, rank=rank) for rank in ranks]


def test_layers_of_another_class_or_window_are_of_another_kind() -> None:
    class Wider(torch.nn.Linear):
        pass

    def layers(kinds: list[type[torch.nn.Linear]]) -> list[torch.nn.Module]:
        return [kind(4, 1, device="meta") for kind in kinds]

    def nested(kinds: list[type[torch.nn.Linear]]) -> list[torch.nn.Module]:
        return [torch.nn.Sequential(each) for each in layers(kinds)]

    for make in (layers, nested):
        assert representative_layers(make([torch.nn.Linear] * 9)) == [0, 1, 8]
        assert representative_layers(make([torch.nn.Linear] * 4 + [Wider] * 5)) == [0, 1, 3, 4, 5, 8]
    windows = [None, None, None, None, 64, 64, 64, 32]
    attentions = [Attention(1.0, num_kv_heads=2, head_size=64, window=window) for window in windows]
    assert representative_layers(attentions) == [0, 1, 3, 4, 5, 6, 7]
    assert representative_layers(attentions[:4]) == [0, 1, 3]


def test_of_each_two_kinds_of_layers_that_follow_one_another_both_are_built() -> None:
    def layers(sizes: list[int]) -> list[torch.nn.Module]:
        return [torch.nn.Linear(size, 1, device="meta") for size in sizes]

    assert representative_layers(layers([4] * 36)) == [0, 1, 35]
    assert representative_layers(layers([4])) == [0]
    assert representative_layers(layers([4, 4, 4, 4, 8, 8, 8, 4, 4, 8])) == [0, 1, 3, 4, 5, 6, 7, 9]


def test_a_stage_has_its_own_layers_and_the_scheme_of_each(tmp_path: Path) -> None:
    config, whole = describe("qwen3-0.6b", tmp_path, pipeline_parallel_size=2)
    last = model_of_rank(whole, layout_of(config).coords(1))
    asked: list[str] = []
    schemes = replace(UNQUANTIZED, of=lambda name: asked.append(name))
    ranks = meta_ranks(config, last)
    assert ranks.coords.stage == 1 and 0 < last.first_layer < whole.num_layers
    built = build_model(last, NOWHERE, schemes, ranks, [last.first_layer, last.first_layer + 3])
    assert len(built.layers) == 2 and built.norm is not None and built.lm_head is not None
    found = {name.split(".")[2] for name in asked if name.startswith("model.layers.")}
    assert found == {str(last.first_layer), str(last.first_layer + 3)}
    first = model_of_rank(whole, layout_of(config).coords(0))
    built = build_model(first, NOWHERE, UNQUANTIZED, meta_ranks(config, first), [0])
    assert built.norm is None and built.lm_head is None


def test_buffers_are_those_of_the_runner(tmp_path: Path) -> None:
    config, model = describe("qwen3-8b", tmp_path)
    with dry_run(HOPPER), LiveBytes("meta") as live:
        kept = (
            DeviceBatch(256, 20480, 16, 16384 + 256, NOWHERE),
            DecodePlan.allocate(256, 32, 8, 128, NOWHERE),
        )
    assert kept
    sampler = 256 * 72  # the parameters of a row
    assert predicted(config, model, HOPPER)["buffers"] == live.now + sampler > 256 * 20480 * 4
    fixed = replace(config, batch_invariant=True)  # decodes are not planned
    assert predicted(fixed, model, HOPPER)["buffers"] < live.now


def test_what_a_drafter_keeps_is_among_the_buffers() -> None:
    found = []
    for method in ({"method": "eagle", "model": "teachlm-eagle"}, {"method": "ngram"}):
        options: dict[str, Any] = {"model": "teachlm", "device": "cuda", "dtype": "bfloat16"}
        options["speculative_config"] = method | {"num_speculative_tokens": 4}
        config = EngineConfig(**options)
        model = load_model_config(config, "cuda")
        config = config.resolve(model.max_model_len)
        drafter = load_drafter_config(config, model, "cuda")
        found.append(predicted(config, model, AMPERE, drafter=drafter)["buffers"])
    features, drawn_from = 3 * ALL * 256 * 2, 4 * 257 * 4096 * 2  # three layers' hidden states; logits of each draft
    assert found[0] - found[1] == features + drawn_from


def test_recordings_are_counted_by_the_largest_and_not_at_all_when_there_are_none(tmp_path: Path) -> None:
    config, model = describe("qwen3-8b", tmp_path)
    needed = predicted(config, model, AMPERE)
    # 512 tokens are too few to add to the residual in place: as of fixed products.
    tensors = 512 * (2 * 128 + (2 + 3) * 4096 + 3 * 12288) * 2 + 256 * (4096 + 151936) * 2
    assert tensors < needed["graphs"] < tensors + 400 * (1 << 20)
    for setting in ({"enforce_eager": True}, {"attention_backend": "flashinfer"}):
        without = predicted(replace(config, **setting), model, AMPERE)
        kept = 128 << 20 if "attention_backend" in setting else 0  # flashinfer's workspace
        assert without["buffers"] == needed["buffers"] + kept
        assert without["graphs"] == 0 < needed["graphs"]
        assert without["libraries"] == needed["libraries"] - (8320 << 10)  # a stream's workspace
    assert predicted(config, model, HOPPER)["libraries"] == (128 << 20) + 2 * (32 << 20)


@pytest.mark.parametrize(
    ("speculation", "num_layers"),
    [
        # Without drafts and with four, each with two ways of sampling, where it was one with four ways; a drafter of 2
        # layers runs once for each draft.
        ({"method": "ngram"}, 0),
        ({"method": "draft_model", "model": "teachlm-draft"}, 2 * 4 * 2),
    ],
)
def test_what_speculation_records_ahead_is_counted(speculation: dict[str, Any], num_layers: int) -> None:
    found = []
    for settings in (None, speculation | {"num_speculative_tokens": 4, "adaptive": False}):
        options: dict[str, Any] = {"model": "teachlm", "device": "cuda", "dtype": "bfloat16", "max_num_seqs": 1}
        config = EngineConfig(**options, speculative_config=settings)
        model = load_model_config(config, "cuda")
        config = config.resolve(model.max_model_len)
        found.append(predicted(config, model, AMPERE, drafter=load_drafter_config(config, model, "cuda"))["graphs"])
    kernels = num_layers * 9 * (8 << 10)
    # Logits of five tokens and padding, where it was one; and to sample: tiles, groups and candidates of a row.
    logits = (6 - 2) * (2 * (256 + 4096) + workspace_bytes(1, 4096))
    assert found[1] - found[0] == kernels + logits


def test_a_recording_that_dequantizes_has_room_for_it(tmp_path: Path) -> None:
    config, model = describe("qwen3-8b", tmp_path)
    (tmp_path / "int4").mkdir()
    quantized, described = describe("qwen3-8b", tmp_path / "int4", quantization="int4")
    more = predicted(quantized, described, HOPPER)["graphs"] - predicted(config, model, HOPPER)["graphs"]
    dequantized = 2 * (2 * 12288 * 4096)
    assert dequantized - 2 * 512 * 12288 <= more <= dequantized  # its peak may be where gate and up are not gated yet


def test_only_backends_that_can_be_recorded_have_graphs() -> None:
    for name in selection._ON_A_GPU:
        assert has_graphs(EngineConfig(attention_backend=name)) == (name not in ("flash_attn", "flashinfer"))
    assert has_graphs(EngineConfig()) and has_graphs(EngineConfig(batch_invariant=True))
    assert not has_graphs(EngineConfig(enforce_eager=True))


def test_a_prediction_that_fails_is_said_in_one_line_and_a_good_one_is_not(tmp_path: Path) -> None:
    _, model = describe("qwen3-8b", tmp_path)
    plan = MemoryPlan(1 << 40, 16 << 30, 2 << 30, kv_cache_specs(model), 16, 4096)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compare(plan, {"weights": (16 << 30) + (500 << 20), "activations": (2 << 30) - (60 << 20)})
    with pytest.warns(UserWarning, match=r"activations take 1\.50 GiB instead of 2\.00 GiB; the KV cache gets") as said:
        compare(plan, {"weights": 16 << 30, "activations": 3 << 29})
    assert len(said) == 1 and "weights" not in str(said[0].message)
