"""Every family computes what transformers computes, however its tokens are cut into steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForCausalLM

from teachllm.config import EngineConfig
from teachllm.layers.norm import RMSNorm
from teachllm.models.loader import load_model
from teachllm.models.model_config import ModelConfig, load_model_config
from tests.checkpoints import ALL, OWN, VOCAB_SIZE, make_checkpoint
from tests.models.flat_batch import logits_by_schedule, random_schedule

LENGTHS = [70, 33, 5, 48]
CPU = torch.device("cpu")
PLAINLY: dict[str, Any] = {"attn_implementation": "eager", "experts_implementation": "eager"}


class _KeepFloat64(TorchFunctionMode):
    """transformers computes norms and softmax in float32 whatever the model's dtype; here they stay in float64."""

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if args and isinstance(args[0], torch.Tensor) and args[0].dtype == torch.float64:
            if func is torch.Tensor.float or (func is torch.Tensor.to and torch.float32 in (*args, *kwargs.values())):
                return args[0]
            if kwargs.get("dtype") is torch.float32:
                kwargs = kwargs | {"dtype": torch.float64}
        return func(*args, **kwargs)


@pytest.fixture(scope="module", params=list(ALL))
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_checkpoint(request.param, tmp_path_factory.mktemp("checkpoints") / request.param)


@pytest.fixture(scope="module")
def sequences() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(VOCAB_SIZE, (length,), generator=generator) for length in LENGTHS]


@pytest.fixture(scope="module")
def expected(family: str, sequences: list[torch.Tensor]) -> list[torch.Tensor]:
    """transformers' logits in float64; per sequence [length, vocab_size]."""
    model = AutoModelForCausalLM.from_pretrained(family, dtype=torch.float32, **PLAINLY)
    _double(model)
    with torch.inference_mode(), _KeepFloat64():
        return [_one_by_one(model, s) if "dynamic" in family else model(s[None]).logits[0] for s in sequences]


def _double(model: torch.nn.Module) -> torch.nn.Module:
    """To float64, except transformers' frequencies: positions become angles in float32 in both engines."""
    frequencies = {name: buffer for name, buffer in model.named_buffers() if name.endswith("inv_freq")}
    for module in model.modules():
        if getattr(module, "packed", None) is not None:  # oneDNN has no float64
            module.weight, module.packed = torch.nn.Parameter(module.packed.to_dense()), None
        if isinstance(module, RMSNorm):
            module.prepared = None
    model.double()
    for name, buffer in frequencies.items():
        owner, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(owner), attribute, buffer)
    return model


def _one_by_one(model: Any, sequence: torch.Tensor) -> torch.Tensor:
    """As `generate` does after a prompt of the trained length: dynamic rope looks at how long the text is by then."""
    trained = model.config.max_position_embeddings
    output = model(sequence[None, :trained], use_cache=True)
    rows = [output.logits[0]]
    for token in sequence[trained:]:
        output = model(token.view(1, 1), past_key_values=output.past_key_values, use_cache=True)
        rows.append(output.logits[0])
    return torch.cat(rows)


def _load(path: str, **settings: Any) -> tuple[ModelConfig, Any]:
    config = EngineConfig(model=path, **settings)
    model_config = load_model_config(config)
    return model_config, load_model(model_config, config, CPU)


def _largest_difference(got: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize("block_size", [16, 1])
def test_float64_logits_equal_transformers_to_the_last_digits(
    family: str, sequences: list[torch.Tensor], expected: list[torch.Tensor], block_size: int
) -> None:
    model_config, model = _load(family)
    steps = random_schedule(LENGTHS, seed=block_size)
    with _KeepFloat64() if model.implementation == "transformers" else nullcontext():
        got = logits_by_schedule(_double(model), model_config, sequences, steps, torch.float64, block_size)
    # Dynamic rope computes its base in float32, in another order of operations than transformers.
    assert _largest_difference(got, expected) < (1e-5 if "dynamic" in family else 1e-10)


def test_float32_logits_equal_transformers_however_the_tokens_are_cut(
    family: str, sequences: list[torch.Tensor], expected: list[torch.Tensor]
) -> None:
    model_config, model = _load(family)
    whole = [[(i, n) for i, n in enumerate(LENGTHS)]]
    for steps, block_size in ((random_schedule(LENGTHS, seed=7), 16), (whole, 512)):
        got = logits_by_schedule(model, model_config, sequences, steps, torch.float32, block_size)
        assert _largest_difference(got, expected) < 5e-5


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_stays_as_near_as_transformers_does(
    family: str, sequences: list[torch.Tensor], expected: list[torch.Tensor], dtype: str
) -> None:
    model_config, model = _load(family, dtype=dtype)
    torch_dtype = getattr(torch, dtype)
    got = logits_by_schedule(model, model_config, sequences, random_schedule(LENGTHS, seed=3), torch_dtype, 16)
    theirs = AutoModelForCausalLM.from_pretrained(family, dtype=torch_dtype, **PLAINLY)
    with torch.inference_mode():
        # Up to 60 tokens: beyond, dynamic rope depends on how transformers is called.
        baseline = [theirs(s[None, :60]).logits[0] for s in sequences]
    allowed = 2 * _largest_difference(baseline, [e[:60] for e in expected])
    assert _largest_difference([g[:60] for g in got], [e[:60] for e in expected]) <= allowed


@pytest.mark.parametrize("name", ["llama3", "mistral", "qwen2", "qwen3", "qwen3_moe", "mixtral"])
def test_our_families_give_the_same_through_the_transformers_backend(
    name: str, tmp_path: Path, sequences: list[torch.Tensor]
) -> None:
    path = make_checkpoint(name, tmp_path)
    steps = random_schedule(LENGTHS, seed=5)
    both = []
    for implementation in ("teachllm", "transformers"):
        model_config, model = _load(path, model_impl=implementation)
        assert model_config.implementation == model.implementation == implementation
        both.append(logits_by_schedule(model, model_config, sequences, steps, torch.float32, 16))
    assert _largest_difference(*both) < 5e-5


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("name", list(ALL))
def test_greedy_decoding_of_every_checkpoint_wanders(name: str, tmp_path: Path) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(make_checkpoint(name, tmp_path))
    prompts = torch.randint(VOCAB_SIZE, (8, 30), generator=torch.Generator().manual_seed(2))
    with _threads(1):
        outputs = model.generate(
            prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=64, do_sample=False, pad_token_id=0
        )
    assert all(len(set(row.tolist())) >= 16 for row in outputs[:, 30:])


def test_checkpoints_cover_the_shapes_that_are_promised(tmp_path: Path) -> None:
    shapes = []
    for name in OWN:
        shapes.append(load_model_config(EngineConfig(model=make_checkpoint(name, tmp_path / name))))
    assert {s.head_size for s in shapes} >= {32, 64, 128, 256}
    assert {s.num_attention_heads // s.num_kv_heads for s in shapes} >= {1, 2, 4}
    assert any(s.num_kv_heads == 1 and s.num_attention_heads > 2 for s in shapes)
    assert {s.raw["tie_word_embeddings"] for s in shapes} == {True, False}
