"""A head's config.json with a value of a wrong type is refused in one line, which names the folder and the key."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from teachllm import EngineConfig
from teachllm.models.model_config import load_model_config
from teachllm.spec_decode.load import load_drafter_config
from tests.spec_decode.heads import forms
from tests.spec_decode.refusals import edited, make, refusal
from tests.worker.engines import tiny

COUNT, NUMBER = "must be a whole number from 1 to 2147483647", "must be a number between 0 and 4.61169e+18"

TWO = "must be at most 2, the number of layers that are stored"


@pytest.mark.parametrize(
    ("method", "make_head", "changes", "says"),
    [
        ("eagle", forms.eagle_3, {"draft_vocab_size": "4096"}, f"draft_vocab_size='4096': {COUNT}"),
        ("eagle", forms.eagle_3, {"eagle_config": [1]}, "eagle_config=[1]: must be an object"),
        (
            "eagle",
            forms.eagle_3,
            {
                "eagle_aux_hidden_state_layer_ids": ...,
                "eagle_config": {"eagle_aux_hidden_state_layer_ids": ["1", "3", "5"]},
            },
            "eagle_config: eagle_aux_hidden_state_layer_ids=['1', '3', '5']: must be a list of whole numbers",
        ),
        (
            "eagle",
            forms.eagle_3,
            {"eagle_aux_hidden_state_layer_ids": 2},
            "eagle_aux_hidden_state_layer_ids=2: must be a list",
        ),
        ("eagle", forms.eagle_3, {"target_hidden_size": 64.0}, f"target_hidden_size=64.0: {COUNT}"),
        ("eagle", forms.eagle_1, {"num_attention_heads": 0}, f"num_attention_heads=0: {COUNT}"),
        ("eagle", forms.eagle_1, {"rope_theta": "1e4"}, f"rope_theta='1e4': {NUMBER}"),
        ("eagle", forms.eagle_1, {"rope_scaling": 2}, "rope_scaling=2: must be an object"),
        (
            "eagle",
            forms.eagle_1,
            {"rope_scaling": {"rope_type": "linear", "factor": "2"}},
            f"rope_scaling: factor='2': {NUMBER}",
        ),
        ("eagle", forms.speculators_eagle_3, {"norm_output": "yes"}, "norm_output='yes': must be true or false"),
        (
            "eagle",
            forms.speculators_eagle_3,
            {"transformer_layer_config": "llama"},
            "transformer_layer_config='llama': must be an object",
        ),
        ("medusa", forms.medusa, {"num_heads": "4"}, f"num_heads='4': {COUNT}"),
        ("medusa", forms.medusa, {"num_hidden_layers": 2.5}, f"num_hidden_layers=2.5: {COUNT}"),
        ("medusa", forms.medusa, {"num_hidden_layers": -1}, f"num_hidden_layers=-1: {COUNT}"),
        ("medusa", forms.medusa, {"num_hidden_layers": 10**9}, f"num_hidden_layers=1000000000: {TWO}"),
        ("eagle", forms.nested_eagle_1, {"model": {"hidden_size": "64"}}, f"hidden_size='64': {COUNT}"),
        ("medusa", forms.medusa, {"medusa_fc_bias": 1}, "medusa_fc_bias=1: must be true or false"),
        (
            "medusa",
            forms.authors_medusa,
            {"medusa_num_heads": True},
            f"medusa_num_heads=True: {COUNT}",
        ),
    ],
)
def test_a_value_of_a_wrong_type_is_named_with_its_folder_and_key(
    method: str, make_head: Callable[[], forms.Head], changes: dict[str, Any], says: str, tmp_path: Path
) -> None:
    folder = forms.write(tmp_path, edited(make_head(), **changes))
    assert f"speculative model='{folder}': {folder}/config.json: {says}" == refusal(method, folder)


def test_null_means_the_same_as_an_absent_key(tmp_path: Path) -> None:
    nothing = {"target_hidden_size": None, "eagle_config": None, "rope_scaling": None, "norm_output": None}
    make("eagle", forms.write(tmp_path, edited(forms.eagle_3(), **nothing))).close()


@pytest.mark.parametrize(
    ("changes", "window", "num_kv_heads"),
    [({}, 9, 2), ({"sliding_window": None}, None, 2), ({"sliding_window": ...}, 4096, 2)],
)
def test_null_is_no_window_where_silence_means_one(
    changes: dict[str, Any], window: int | None, num_kv_heads: int, tmp_path: Path
) -> None:
    folder = forms.write(tmp_path, edited(forms.eagle_1_with_a_window(), **changes))
    config = EngineConfig(**tiny("llama2"), speculative_config={"method": "eagle", "model": str(folder)})
    drafter = load_drafter_config(config, load_model_config(config))
    assert drafter is not None
    [spec] = drafter.specs
    assert (spec.window, spec.num_kv_heads) == (window, num_kv_heads)
