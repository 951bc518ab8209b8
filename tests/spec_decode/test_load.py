"""A drafter that cannot work with the model is refused in one line, which names what is wrong and what helps."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from teachllm import EngineConfig, SamplingParams
from teachllm.engine.engine import Engine
from teachllm.models.model_config import load_model_config
from teachllm.models.registry import ModelError
from teachllm.spec_decode.load import DrafterConfig, load_drafter_config
from tests.checkpoints import make_checkpoint
from tests.spec_decode import forms
from tests.worker.doors import drain, random_ids, tiny

zeros = torch.zeros


def edited(head: forms.Head, tensors: dict[str, torch.Tensor | None] | None = None, **raw: Any) -> forms.Head:
    """The head with other settings and tensors; `...` and None take one out."""
    config = {key: value for key, value in (head[0] | raw).items() if value is not ...}
    return config, {key: value for key, value in (head[1] | (tensors or {})).items() if value is not None}


def make(method: str, model: Path | str, family: str = "llama2", **changes: Any) -> Engine:
    speculation = {key: changes.pop(key) for key in ("load_format", "num_speculative_tokens") if key in changes}
    given: Any = {"method": method, "model": str(model), "num_speculative_tokens": 3, "adaptive": False} | speculation
    return Engine(EngineConfig(**tiny(family, **changes), speculative_config=given))


def refusal(method: str, model: Path | str, family: str = "llama2", **changes: Any) -> str:
    with pytest.raises(ModelError) as error:
        make(method, model, family, **changes)
    message = str(error.value)
    assert "\n" not in message
    return message


def short(value: Any) -> str:
    """A parameter's name; one of a function is not the same in every process."""
    return "" if callable(value) else str(value)[:40]


# -- draft models ----------------------------------------------------------------------------------------------


def test_a_draft_model_with_another_vocabulary_is_refused() -> None:
    message = refusal("draft_model", "teachlm-draft")
    assert message == (
        "speculative model='teachlm-draft': its vocabulary has 4096 ids and the model's has 512: take a draft model "
        "of the same family"
    )


def test_a_draft_model_must_reach_as_far_as_the_model(tmp_path: Path) -> None:
    make_checkpoint("llama2", tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | {"max_position_embeddings": 64}))
    message = refusal("draft_model", tmp_path)
    assert f"speculative model='{tmp_path}': max_model_len=96 is more than the model's context of 64" in message
    assert message.endswith("set max_model_len=64 or less")
    make("draft_model", tmp_path, max_model_len=64).close()


def test_a_draft_model_that_is_not_there_or_not_supported_is_named_as_such(tmp_path: Path) -> None:
    assert (
        refusal("draft_model", "/nowhere/x")
        == "speculative model='/nowhere/x': model='/nowhere/x': there is no such folder"
    )
    mamba = forms.write(tmp_path, ({"architectures": ["MambaForCausalLM"], "model_type": "mamba"}, {"a": zeros(1)}))
    assert f"speculative model='{mamba}': MambaForCausalLM is not supported: it has a recurrent state" in refusal(
        "draft_model", mamba
    )


# -- heads for another model -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "family", "says"),
    [
        ({}, "qwen2", "the EAGLE head has hidden_size=64 and the model has 128: take its own head"),
        ({"vocab_size": 500}, "llama2", "the EAGLE head has vocab_size=500 and the model has 512: take its own head"),
        ({"target_hidden_size": 128}, "llama2", "the EAGLE head has hidden_size=128 and the model has 64"),
        (
            {"target_hidden_size": 64, "hidden_size": 32},
            "llama2",
            "an EAGLE head of hidden_size=32 beside 64 is not supported",
        ),
        ({"num_hidden_layers": 2}, "llama2", "an EAGLE head of 2 layers is not supported, only of one"),
        (
            {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 3]}},
            "llama2",
            "the EAGLE head reads layers (0, 1, 3) of a model that has 3",
        ),
        (
            {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, -1]}},
            "llama2",
            "the EAGLE head reads layers (0, 1, -1) of a model that has 3",
        ),
        ({"eagle_config": ...}, "qwen3", "the EAGLE head reads layers (2, 1, -1) of a model that has 2"),
        (
            {"max_position_embeddings": 64},
            "llama2",
            "max_model_len=96 is more than its context of 64: set max_model_len=64 or less",
        ),
        ({"vocab_size": ...}, "llama2", "lacks 'vocab_size'"),
        (
            {},
            "gemma2",
            "transformers' code for Gemma2ForCausalLM hands out none: take a draft model, or method=ngram",
        ),
    ],
    ids=short,
)
def test_an_eagle_head_for_another_model_is_refused(
    changes: dict[str, Any], family: str, says: str, tmp_path: Path
) -> None:
    folder = forms.write(tmp_path, edited(forms.eagle_3(), **changes))
    message = refusal("eagle", folder, family)
    assert message.startswith(f"speculative model='{folder}': ") and says in message


def test_a_model_that_transformers_runs_hands_out_no_features_whatever_its_architecture(tmp_path: Path) -> None:
    folder = forms.write(tmp_path, forms.eagle_3())
    assert "LlamaForCausalLM hands out none" in refusal("eagle", folder, model_impl="transformers")


@pytest.mark.parametrize(
    ("changes", "family", "says"),
    [
        ({}, "qwen2", "the Medusa heads have hidden_size=64 and the model has 128: take its own heads"),
        ({"vocab_size": 500}, "llama2", "the Medusa heads have vocab_size=500 and the model has 512"),
        ({"truncated_vocab_size": 100}, "llama2", "a truncated vocabulary are not supported: take heads with a whole"),
        ({"num_heads": ...}, "llama2", "describes no Medusa heads: it lacks 'num_heads' and 'medusa_num_heads'"),
        (
            {"num_heads": 2},
            "llama2",
            "it has 2 heads, one for each draft: set num_speculative_tokens to 2 or less, not to 3",
        ),
    ],
    ids=short,
)
def test_medusa_heads_for_another_model_are_refused(
    changes: dict[str, Any], family: str, says: str, tmp_path: Path
) -> None:
    folder = forms.write(tmp_path, edited(forms.medusa(), **changes))
    message = refusal("medusa", folder, family)
    assert message.startswith(f"speculative model='{folder}': ") and says in message


def test_the_authors_heads_of_another_size_are_refused_by_their_shapes(tmp_path: Path) -> None:
    folder = forms.write(tmp_path, forms.authors_medusa())  # their config.json names no sizes
    message = refusal("medusa", folder, "qwen2")
    assert "tensor 0.0.linear" in message and "config.json means [128" in message


# -- broken checkpoints ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "make_head", "tensors", "says"),
    [
        ("eagle", forms.eagle_3, {"fc.weight": None}, "{folder} lacks tensor fc.weight (1 missing in all)"),
        ("eagle", forms.eagle_1, {"layers.0.mlp.up_proj.weight": None}, "lacks tensor layers.0.mlp.up_proj.weight"),
        ("eagle", lambda: forms.eagle_3(draft_vocab_size=200), {"d2t": None}, "lacks tensor d2t (1 missing in all)"),
        (
            "eagle",
            forms.eagle_3,
            {"midlayer.self_attn.q_norm.weight": zeros(16)},
            "{file} holds tensor midlayer.self_attn.q_norm.weight, which the model of its config.json does not have",
        ),
        (
            "eagle",
            forms.eagle_3,
            {"fc.weight": zeros(64, 128)},
            "{file}: tensor fc.weight has shape [64, 128], config.json means [64, 192]",
        ),
        (
            "eagle",
            lambda: forms.eagle_3(draft_vocab_size=200),
            {"lm_head.weight": zeros(201, 64)},
            "{file}: tensor lm_head.weight has shape [201, 64], config.json means [200, 64]",
        ),
        (
            "eagle",
            lambda: forms.eagle_3(has_embedding=True),
            {"embed_tokens.weight": zeros(100, 64)},
            "{file}: tensor embed_tokens.weight has shape [100, 64], config.json means [512, 64]",
        ),
        (
            "eagle",
            lambda: forms.eagle_3(draft_vocab_size=200),
            {"d2t": torch.full((200,), 400)},
            "{folder}: tensor d2t leads to ids from 400 to 599, outside the vocabulary of 512",
        ),
        (
            "medusa",
            forms.medusa,
            {"blocks.1.layers.0.weight": None, "blocks.2.layers.1.bias": None},
            "{folder} lacks tensor blocks.1.layers.0.weight (2 missing in all)",
        ),
        (
            "medusa",
            lambda: forms.medusa(shares_head=False),
            {"lm_heads.1.weight": None},
            "lacks tensor lm_heads.1.weight",
        ),
        ("medusa", forms.medusa, {"blocks.7.layers.0.weight": zeros(64, 64)}, "holds tensor blocks.7.layers.0.weight"),
        (
            "medusa",
            forms.medusa,
            {"blocks.0.layers.0.weight": zeros(64, 32)},
            "{file}: tensor blocks.0.layers.0.weight has shape [64, 32], config.json means [64, 64]",
        ),
        ("medusa", forms.authors_medusa, {"2.2.weight": None}, "{folder} lacks tensor lm_heads.2.weight"),
    ],
    ids=short,
)
def test_a_tensor_that_is_missing_unknown_or_of_another_shape_is_named_with_its_file(
    method: str,
    make_head: Callable[[], forms.Head],
    tensors: dict[str, torch.Tensor | None],
    says: str,
    tmp_path: Path,
) -> None:
    folder = forms.write(tmp_path, edited(make_head(), tensors))
    assert says.format(folder=folder, file=f"{folder}/model.safetensors") in refusal(method, folder)


def test_a_file_that_was_cut_off_is_named_before_a_weight_is_read(tmp_path: Path) -> None:
    folder = forms.write(tmp_path, forms.eagle_3())
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    assert f"{file} is truncated: tensor " in refusal("eagle", folder)


@pytest.mark.parametrize(
    ("method", "head", "file"),
    [("eagle", forms.eagle_1(), "pytorch_model.bin"), ("medusa", forms.authors_medusa(), "medusa_lm_head.pt")],
)
def test_pickles_are_read_only_where_they_are_asked_for_and_never_run(
    method: str, head: forms.Head, file: str, tmp_path: Path
) -> None:
    folder = forms.write(tmp_path, head, file)
    message = refusal(method, folder)
    assert "only as pickles" in message and "set load_format='pt' if you trust them" in message
    make(method, folder, load_format="pt").close()
    torch.save({"0.0.linear.weight": Engine}, tmp_path / file)
    assert f"{tmp_path / file} cannot be read as plain tensors" in refusal(method, folder, load_format="pt")


def test_a_folder_without_weights_says_what_can_be_done(tmp_path: Path) -> None:
    folder = forms.write(tmp_path, forms.eagle_3(), "elsewhere.bin")
    assert f"{folder} has no .safetensors file: set load_format='dummy'" in refusal("eagle", folder)
    assert f"{folder} has no pytorch_model.bin: set load_format='auto'" in refusal("eagle", folder, load_format="pt")
    (tmp_path / "config.json").unlink()
    for method in ("eagle", "medusa", "draft_model"):
        assert f"{folder} has no config.json" in refusal(method, folder)


# -- what is accepted ------------------------------------------------------------------------------------------


def drafter_config(method: str, model: str, **changes: Any) -> DrafterConfig:
    given: Any = {"method": method, "model": model, "num_speculative_tokens": 2}
    config = EngineConfig(**tiny("llama2", **changes), speculative_config=given)
    found = load_drafter_config(config, load_model_config(config))
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("method", "make_head"),
    [
        ("eagle", forms.eagle_3),
        ("eagle", lambda: forms.eagle_3(draft_vocab_size=200)),
        ("medusa", forms.medusa),
    ],
)
def test_random_weights_need_a_config_alone(method: str, make_head: Callable[[], forms.Head], tmp_path: Path) -> None:
    raw, _ = make_head()
    (tmp_path / "config.json").write_text(json.dumps(raw))
    engine = make(method, tmp_path, load_format="dummy")
    drafter = engine.core.executor._runner._drafting.drafter  # type: ignore[attr-defined]
    assert len(drafter.feature_layers) == (3 if method == "eagle" else 0)
    engine.add_request("a", random_ids(20), SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
    assert len(drain(engine)["a"].outputs[0].token_ids) == 8


def test_a_map_to_all_of_the_models_ids_is_read_although_it_maps_to_as_many(tmp_path: Path) -> None:
    permuted = torch.randperm(512, generator=torch.Generator().manual_seed(0))
    maps = {"d2t": permuted - torch.arange(512), "t2d": torch.ones(512, dtype=torch.bool)}
    engine = make("eagle", forms.write(tmp_path, edited(forms.eagle_3(), maps)))
    head = engine.core.executor._runner._drafting.drafter.head  # type: ignore[attr-defined]
    hidden = torch.randn(1, 64)
    with torch.inference_mode():
        own = head.lm_head.logits(head.norm(hidden)[0])
        assert torch.equal(head.logits(hidden, None)[0, permuted], own[0])


@pytest.mark.parametrize(
    ("method", "head", "num_layers"),
    [("eagle", forms.eagle_3(has_embedding=True), 1), ("eagle", forms.eagle_1(), 1), ("medusa", forms.medusa(), 0)],
)
def test_memory_is_counted_for_weights_and_for_every_layers_k_and_v(
    method: str, head: forms.Head, num_layers: int, tmp_path: Path
) -> None:
    described = drafter_config(method, forms.write(tmp_path, head))
    num_stored = sum(tensor.numel() for tensor in head[1].values())
    tables = 2 * 96 * 16 * num_layers  # cosines and sines
    assert described.weight_bytes == 4 * (num_stored + tables)
    assert [(spec.num_kv_heads, spec.head_size) for spec in described.specs] == [(2, 16)] * num_layers


def test_a_drafter_without_weights_is_none() -> None:
    for given in (None, {"method": "ngram"}, {"method": "custom"}):
        config = EngineConfig(**tiny("llama2"), speculative_config=given)  # type: ignore[arg-type]
        assert load_drafter_config(config, load_model_config(config)) is None


def test_a_head_takes_the_engines_load_format_unless_it_has_its_own(tmp_path: Path) -> None:
    folder = forms.write(tmp_path, forms.medusa())
    assert drafter_config("medusa", folder).load_format == "auto"
    assert drafter_config("medusa", folder, load_format="safetensors").load_format == "safetensors"
