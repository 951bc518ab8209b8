"""What a checkpoint says of some of its layers alone is read: other bits, other groups, left as they were.

A file's layers differ by the rules of its config.json. The tensors alone tell which are quantized, not how.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from teachllm.errors import ModelError
from teachllm.quantization.formats import rounding
from tests.quantization.format_checkpoints import (
    FORMATS,
    Format,
    assert_same,
    edit,
    generate,
    projections,
    quantization,
    write_checkpoint,
    write_dequantized,
)


@dataclass(frozen=True)
class Rules:
    """Of a checkpoint in a format of `FORMATS`.

    Attributes:
        config: what says so in its quantization_config.
        others: what projections became that are not as usual, by a part of their names.
        plain: a part of the names of those that are not quantized.
        means: of projections, as errors call it; None: not quantized.
    """

    config: Mapping[str, Any]
    others: Mapping[str, Format]
    unquantized: str
    means: Mapping[str, str | None]


def by_16(name: str, bits: int) -> Format:
    """The format with groups of 16."""
    how, is_packed = FORMATS[name], name.startswith("packed")
    dtype = torch.float32 if is_packed else torch.float16
    return replace(how, quantize=lambda weight: rounding.grouped(weight, bits, 16, True, dtype))


_GROUP = FORMATS["packed int4"].config["config_groups"]["group_0"]
RULES = {
    "gptq int4": Rules(
        {
            "dynamic": {
                r"-:model\.layers\.2\.": {},
                r"+:.*\.down_proj$": {"bits": 8},
                r".*layers\.1\..*\.(k|up)_proj": {"group_size": 16},
                r".*layers\.1\.": {"bits": 4},  # the first that fits is the one
            }
        },
        {
            "down_proj": FORMATS["gptq int8"],
            "1.self_attn.k_proj": by_16("gptq int4", 4),
            "1.mlp.up": by_16("gptq int4", 4),
        },
        "layers.2.",
        {
            "0.mlp.down_proj": "GPTQ (bits 8, group_size 32)",
            "0.self_attn.k_proj": "GPTQ (bits 4, group_size 32)",
            "1.self_attn.k_proj": "GPTQ (bits 4, group_size 16)",
            "2.mlp.down_proj": None,
        },
    ),
    "auto-round, as gptq": Rules(
        {
            "extra_config": {
                "model.layers.0.mlp.up_proj": {"bits": 16},
                "model.layers.1.self_attn.k_proj": {"group_size": 16},
                r".*\.up_proj$": {"bits": 8, "group_size": 16},
            }
        },
        {"1.self_attn.k_proj": by_16("auto-round, as gptq", 8), "up_proj": by_16("auto-round, as gptq", 8)},
        "0.mlp.up_proj",
        {
            "0.mlp.up_proj": None,
            "1.mlp.up_proj": "GPTQ (bits 8, group_size 16)",
            "1.self_attn.k_proj": "GPTQ (bits 8, group_size 16)",
            "1.self_attn.q_proj": "GPTQ (bits 8, group_size 32)",
        },
    ),
    "packed int4": Rules(
        {
            "config_groups": {
                "group_0": _GROUP,
                "group_1": {
                    "targets": [r"re:.*\.down_proj$", "model.layers.1.self_attn.k_proj"],
                    "weights": _GROUP["weights"] | {"num_bits": 8, "symmetric": False},
                },
                "group_2": FORMATS["fp8 of weights alone"].config["config_groups"]["group_0"]
                | {"targets": ["re:.*gate_proj"], "format": "float-quantized"},
            },
            "ignore": ["lm_head", r"re:.*layers\.2\.mlp\."],
        },
        {
            "down_proj": FORMATS["packed int8 asymmetric"],
            "1.self_attn.k_proj": FORMATS["packed int8 asymmetric"],
            "gate_proj": FORMATS["fp8 of weights alone"],
        },
        "layers.2.mlp.",
        {
            "0.mlp.down_proj": "pack-quantized (num_bits 8, group_size 32)",
            "1.self_attn.k_proj": "pack-quantized (num_bits 8, group_size 32)",
            "1.self_attn.q_proj": "pack-quantized (num_bits 4, group_size 32)",
            "1.mlp.gate_proj": "float8_e4m3fn by channel",
            "2.mlp.down_proj": None,
        },
    ),
}


@pytest.mark.parametrize("name", RULES)
def test_each_layer_has_its_own_dequantized_weights(name: str, unquantized: Path, tmp_path: Path) -> None:
    rules = RULES[name]
    quantized = write_checkpoint(name, unquantized, tmp_path / "quantized", rules.unquantized, rules.others)
    assert any(rules.unquantized in key for key in projections(unquantized)) and not any(
        rules.unquantized in key for key in quantized
    )
    write_dequantized(quantized, unquantized, tmp_path / "dequantized")
    with pytest.raises(ModelError, match=r"config\.json is not this file's"):  # as long as nothing is said of them
        generate(tmp_path / "quantized")
    edit(tmp_path / "quantized", lambda config: config.update(rules.config))
    assert_same(generate(tmp_path / "quantized"), generate(tmp_path / "dequantized"))


@pytest.mark.parametrize("name", RULES)
def test_rules_are_read_where_there_is_no_file_to_look_into(name: str, unquantized: Path, tmp_path: Path) -> None:
    schemes = quantization(FORMATS[name].config | RULES[name].config, None).schemes
    for key, expected in RULES[name].means.items():
        found = schemes(f"model.layers.{key}")
        assert (found if found is None else str(found)) == expected, key
    write_checkpoint(name, unquantized, tmp_path)
    edit(tmp_path, lambda config: config.update(RULES[name].config))
    assert generate(tmp_path, load_format="dummy")


DOWN = [f"model.layers.{layer}.mlp.down_proj" for layer in range(3)]
K = "model.layers.1.self_attn.k_proj"


@pytest.mark.parametrize(
    ("name", "left_out"),
    [
        ("awq", {"modules_to_not_convert": ["down_proj", "layers.1.self_attn.k_proj"]}),
        ("nvfp4 of ModelOpt", {"ignore": None, "exclude_modules": ["*down_proj", K]}),
        ("fp8 of ModelOpt", {"ignore": ["*down_proj", "model.layers.1.*.k_proj"]}),
        ("fbgemm", {"modules_to_not_convert": [*DOWN, K]}),
        ("fp8 without blocks", {"ignored_layers": [*DOWN, K]}),
    ],
)
def test_layers_that_are_left_out_by_name_are_unquantized(
    name: str, left_out: dict[str, Any], unquantized: Path
) -> None:
    schemes = quantization(FORMATS[name].config | left_out, None).schemes
    assert {key for key in projections(unquantized) if schemes(key) is None} == {*DOWN, K}


def test_which_layers_of_pickles_are_quantized_their_tensors_tell(unquantized: Path, tmp_path: Path) -> None:
    write_checkpoint("gptq int4", unquantized, tmp_path, without="down_proj")
    expected = generate(tmp_path)
    torch.save(load_file(tmp_path / "model.safetensors"), tmp_path / "pytorch_model.bin")
    (tmp_path / "model.safetensors").unlink()
    assert_same(generate(tmp_path, load_format="pt"), expected)
