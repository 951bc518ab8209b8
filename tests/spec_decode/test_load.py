"""A drafter that cannot work with the model is refused in one line, which names what is wrong and what helps."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from teachllm import EngineConfig, SamplingParams
from teachllm.models.model_config import load_model_config
from teachllm.spec_decode.load import DrafterConfig, load_drafter_config
from tests.spec_decode.heads import forms
from tests.spec_decode.refusals import edited, make, refusal, short
from tests.worker.engines import drain, random_ids, tiny

zeros = torch.zeros

# -- draft models ----------------------------------------------------------------------------------------------


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
            {"eagle_aux_hidden_state_layer_ids": [0, 1, 3]},
            "llama2",
            "reads the inputs of layers (0, 1, 3), and of the model's 3 layers it can read the inputs of 0 to 2",
        ),
        ({"eagle_aux_hidden_state_layer_ids": [0, 1, -1]}, "llama2", "reads the inputs of layers (0, 1, -1)"),
        (
            {"eagle_aux_hidden_state_layer_ids": ..., "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}},
            "llama2",
            "reads the outputs of layers (0, 1, 2), and of the model's 3 layers it can read the inputs of 0 to 2",
        ),
        ({"eagle_aux_hidden_state_layer_ids": ...}, "qwen3", "reads the inputs of layers (2, 1, -1)"),
        ({"draft_vocab_size": 900}, "llama2", "the EAGLE head has draft_vocab_size=900 and the model 512"),
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
    ("make_head", "changes", "tensors", "says"),
    [
        (
            forms.eagle_1,
            {},
            {"layers.0.input_layernorm.weight": zeros(64)},
            "an EAGLE head whose layer has an input_layernorm is not supported",
        ),
        (forms.eagle_1, {"add_para_norm": True}, {}, "an EAGLE head with add_para_norm=True is not supported"),
        (
            forms.eagle_3,
            {"eagle_config": {"use_aux_hidden_state": False}},
            {},
            "an EAGLE head with eagle_config.use_aux_hidden_state=False is not supported",
        ),
        (forms.eagle_3, {"parallel_drafting": True}, {}, "with parallel_drafting=True is not supported"),
        (
            forms.speculators_eagle_3,
            {"speculators_model_type": "peagle"},
            {},
            "a speculator of speculators_model_type='peagle' is not supported, only of 'eagle3'",
        ),
        (
            forms.speculators_eagle_3,
            {"norm_before_fc": True, "fc_norm": True},
            {},
            "has norm_before_fc or fc_norm, not both",
        ),
    ],
    ids=short,
)
def test_a_form_of_eagle_that_computes_something_else_is_refused_by_its_name(
    make_head: Callable[[], forms.Head],
    changes: dict[str, Any],
    tensors: dict[str, torch.Tensor | None],
    says: str,
    tmp_path: Path,
) -> None:
    assert says in refusal("eagle", forms.write(tmp_path, edited(make_head(), tensors, **changes)))


@pytest.mark.parametrize(
    ("changes", "family", "says"),
    [
        ({}, "qwen2", "the Medusa heads have hidden_size=64 and the model has 128: take its own heads"),
        ({"vocab_size": 500}, "llama2", "the Medusa heads have vocab_size=500 and the model has 512"),
        ({"truncated_vocab_size": 100}, "llama2", "a truncated vocabulary are not supported: take heads with a whole"),
        ({"num_heads": ...}, "llama2", "describes no Medusa heads: it lacks 'num_heads' and 'medusa_num_heads'"),
    ],
    ids=short,
)
def test_medusa_heads_for_another_model_are_refused(
    changes: dict[str, Any], family: str, says: str, tmp_path: Path
) -> None:
    folder = forms.write(tmp_path, edited(forms.medusa(), **changes))
    message = refusal("medusa", folder, family)
    assert message.startswith(f"speculative model='{folder}': ") and says in message


@pytest.mark.parametrize("head", [forms.medusa(num_heads=2), forms.authors_medusa(num_heads=2, num_said=5)])
def test_medusa_heads_are_counted_where_they_are_stored(head: forms.Head, tmp_path: Path) -> None:
    folder = forms.write(tmp_path, head)
    assert "it has 2 heads, one for each draft: set num_speculative_tokens to 2 or less, not to 3" in refusal(
        "medusa", folder
    )
    make("medusa", folder, num_speculative_tokens=2).close()


def test_a_tree_has_no_more_siblings_than_the_drafter_has_ids(tmp_path: Path) -> None:
    folder = forms.write(tmp_path, forms.eagle_3(draft_vocab_size=4))
    tree = {"num_speculative_tokens": 1, "speculative_token_tree": "[(0,), (1,), (2,), (3,)]"}
    make("eagle", folder, **tree).close()
    message = refusal("eagle", folder, **(tree | {"speculative_token_tree": "[(0,), (1,), (2,), (3,), (4,)]"}))
    assert "speculative_token_tree has 5 guesses for a token, and the drafter has only 4 ids to guess among" in message


def test_the_authors_heads_of_another_size_are_refused_by_their_shapes(tmp_path: Path) -> None:
    folder = forms.write(tmp_path, forms.authors_medusa())  # their config.json names no sizes
    message = refusal("medusa", folder, "qwen2")
    assert "tensor 0.0.linear" in message and "config.json means [128" in message


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
    [
        ("eagle", forms.eagle_3(has_embedding=True), 1),
        ("eagle", forms.eagle_3(draft_vocab_size=200), 1),
        ("eagle", forms.eagle_1(), 1),
        ("medusa", forms.medusa(), 0),
    ],
    ids=["eagle 3", "eagle 3 with its own ids", "eagle", "medusa"],
)
def test_memory_is_counted_for_weights_and_for_every_layers_k_and_v(
    method: str, head: forms.Head, num_layers: int, tmp_path: Path
) -> None:
    described = drafter_config(method, forms.write(tmp_path, head))
    # The third head is not needed, and a map of the model's ids not read.
    read = {name: tensor for name, tensor in head[1].items() if name != "t2d" and not name.startswith("blocks.2")}
    tables = 4 * 2 * 96 * 16 * num_layers  # cosines and sines
    assert described.weight_bytes == sum(tensor.nbytes for tensor in read.values()) + tables
    assert [(spec.num_kv_heads, spec.head_size) for spec in described.specs] == [(2, 16)] * num_layers


def test_a_drafter_without_weights_is_none() -> None:
    for given in (None, {"method": "ngram"}, {"method": "custom"}):
        config = EngineConfig(**tiny("llama2"), speculative_config=given)  # type: ignore[arg-type]
        assert load_drafter_config(config, load_model_config(config)) is None


def test_a_head_takes_the_engines_load_format_unless_it_has_its_own(tmp_path: Path) -> None:
    folder = forms.write(tmp_path, forms.medusa())
    assert drafter_config("medusa", folder).load_format == "auto"
    assert drafter_config("medusa", folder, load_format="safetensors").load_format == "safetensors"
