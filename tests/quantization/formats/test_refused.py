"""What is broken, not supported, or not what config.json says is named: the layer or its group, why, what would do."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from teachllm.errors import ModelError
from tests.quantization.format_checkpoints import (
    FORMATS,
    Tensors,
    assert_same,
    edit,
    edit_tensors,
    generate,
    quantization,
    write_checkpoint,
)

DOWN = "model.layers.1.mlp.down_proj"
NOT_THIS_FILE = r"config.json is not this file's: correct its quantization_config \(quant_method, bits, group_size\)"
WITHOUT_SCALES = (
    r"quantized weights without their scales, or not those of quantization_config .*: take a complete checkpoint"
)
BROKEN = "the file is broken, download it again"


def without_tensor(name: str) -> Callable[[Tensors], None]:
    def spoil(tensors: Tensors) -> None:
        del tensors[f"{DOWN}.{name}"]

    return spoil


def in_place_of(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Tensors], None]:
    def spoil(tensors: Tensors) -> None:
        tensors[f"{DOWN}.{name}"] = change(tensors[f"{DOWN}.{name}"]).contiguous()

    return spoil


@pytest.mark.parametrize(
    ("name", "spoil", "says"),
    [
        (
            "gptq int4",
            without_tensor("scales"),
            rf"lacks tensor {DOWN}.scales of GPTQ \(bits 4, group_size 32\), which config.json means \(1 mis",
        ),
        (
            "gptq int4",
            without_tensor("qzeros"),
            rf"lacks tensor {DOWN}.qzeros of .* take a complete checkpoint, or corr",
        ),
        (
            "gptq int4",
            in_place_of("qweight", lambda t: t[:-1]),
            rf"{DOWN}.qweight has shape \[11, 64\], and \[12, 64\] in GPTQ \(bits 4, group_size 32\): {NOT_THIS_FILE}",
        ),
        (
            "gptq int4",
            in_place_of("qweight", lambda t: t.short()),
            rf"{DOWN}.qweight is of int16, and int32 in GPTQ .*: {NOT_THIS_FILE}",
        ),
        ("gptq int4", in_place_of("g_idx", lambda t: t + 5), f"{DOWN}: g_idx names group 7 of 3: {BROKEN}"),
        ("gptq int4", in_place_of("g_idx", lambda t: t.clamp(max=1)), f"{DOWN}: g_idx .* 0 to 64 inputs: {BROKEN}"),
        (
            "awq",
            in_place_of("qweight", lambda t: t.t()),
            rf"{DOWN}.qweight has shape .* in AWQ \(bits 4, group_size 32\)",
        ),
        (
            "packed int4",
            in_place_of("weight_shape", lambda t: t + 1),
            f"{DOWN}: weight_shape .*65, 97.*: {NOT_THIS_FILE}",
        ),
        ("packed int4", without_tensor("weight_scale"), f"{DOWN}.weight_packed, {WITHOUT_SCALES}"),
        (
            "fp8",
            in_place_of("weight", lambda t: t.float()),
            f"{DOWN}.weight is of float32, and float8_e4m3fn in float8_",
        ),
        ("fp8", without_tensor("weight_scale"), f"{DOWN}.weight is of float8_e4m3fn, {WITHOUT_SCALES}"),
        (
            "int8",
            in_place_of("weight_scale", lambda t: t[:3]),
            f"{DOWN}.weight_scale has shape .* in int8 by channel: ",
        ),
        ("int8", without_tensor("weight_scale"), f"{DOWN}.weight is of int8, {WITHOUT_SCALES}"),
        ("nvfp4", without_tensor("weight_scale"), f"{DOWN}.weight_[a-z_]*, {WITHOUT_SCALES}"),
        ("nvfp4", without_tensor("weight_global_scale"), f"lacks tensor {DOWN}.weight_global_scale of nvfp4"),
        ("fp8", in_place_of("weight_scale", lambda t: t / 0), f"{DOWN}: a scale is infinite or NaN: {BROKEN}"),
        ("awq", in_place_of("scales", lambda t: t * torch.nan), f"{DOWN}: a scale is infinite or NaN: {BROKEN}"),
        ("mxfp4", without_tensor("weight_scale"), f"{DOWN}.weight_packed, {WITHOUT_SCALES}"),
        ("mxfp4", in_place_of("weight_scale", lambda t: t | 255), f"{DOWN}: a scale is NaN: {BROKEN}"),
        (
            "nvfp4 of ModelOpt",
            without_tensor("weight_scale"),
            f"{DOWN}.(weight is of uint8|[a-z_2]*), {WITHOUT_SCALES}",
        ),
        ("nvfp4 of ModelOpt", without_tensor("weight_scale_2"), f"lacks tensor {DOWN}.weight_scale_2 of nvfp4"),
        (
            "fp8 by block, as DeepSeek writes it",
            without_tensor("weight_scale_inv"),
            f"{DOWN}.weight is of float8_e4m3fn, {WITHOUT_SCALES}",
        ),
    ],
)
def test_a_broken_quantized_checkpoint_is_refused_by_tensor(
    name: str, spoil: Callable[[Tensors], None], says: str, unquantized: Path, tmp_path: Path
) -> None:
    write_checkpoint(name, unquantized, tmp_path)
    edit_tensors(tmp_path, spoil)
    with pytest.raises(ModelError, match=says):
        generate(tmp_path)


@pytest.mark.parametrize(
    ("name", "taken_for", "says"),
    [
        ("gptq int4", "awq", rf"_proj\.[a-z_]+(, which| has shape .*, and .* in) AWQ .*{NOT_THIS_FILE}"),
        (
            "awq",
            "gptq int4",
            rf"_proj\.qweight has shape .*, and .* in GPTQ \(bits 4, group_size 32\): {NOT_THIS_FILE}",
        ),
        ("gptq int8", "gptq int4", rf"_proj\.qweight has shape .* in GPTQ \(bits 4, .*{NOT_THIS_FILE}"),
        ("gptq int4", "gptq int8", rf"_proj\.qweight has shape .* in GPTQ \(bits 8, .*{NOT_THIS_FILE}"),
        (
            "packed int4",
            "packed int8 asymmetric",
            r"_proj\.weight_packed has shape .* in pack-quantized \(num_bits 8, ",
        ),
        ("packed int4", "int8", rf"_proj\.weight_(packed|shape), which int8 by channel does not have: {NOT_THIS_FILE}"),
        ("gptq int4", "packed int4", rf"_proj\.[a-z_]+, {WITHOUT_SCALES}"),
        ("mxfp4", "nvfp4", rf"_proj\.weight_(scale|packed) .* in nvfp4: {NOT_THIS_FILE}"),
        ("int8", "fp8", rf"_proj\.weight is of int8, and float8_e4m3fn in float8_e4m3fn by channel: {NOT_THIS_FILE}"),
    ],
)
def test_a_file_in_another_packing_than_config_json_says(
    name: str, taken_for: str, says: str, unquantized: Path, tmp_path: Path
) -> None:
    write_checkpoint(name, unquantized, tmp_path)
    edit(tmp_path, lambda config: (config.clear(), config.update(FORMATS[taken_for].config)))
    with pytest.raises(ModelError, match=rf"model.safetensors(:| holds) tensor model\.layers\.\d\..*{says}"):
        generate(tmp_path)


@pytest.mark.parametrize("part", ["self_attn.sinks", "self_attn.q_norm.weight", "self_attn.q_proj.bias"])
def test_what_is_no_part_of_a_quantized_weight_is_not_taken_for_one(
    part: str, unquantized: Path, tmp_path: Path
) -> None:
    write_checkpoint("gptq int4", unquantized, tmp_path)
    edit_tensors(tmp_path, lambda tensors: tensors.update({f"model.layers.1.{part}": torch.ones(64)}))
    with pytest.raises(ModelError, match=rf"holds tensor .*{part}, which the model of its config.json does not have"):
        generate(tmp_path)


@pytest.mark.parametrize(
    ("name", "changes", "says"),
    [
        (
            "gptq int4",
            {"group_size": 40},
            r"model.layers.0.self_attn.q_proj \[64, 64\]: groups of 40 do not divide its 64 inputs: correct group_size"
            ", or quantization_config in config.json must leave this layer out",
        ),
        (
            "gptq int4",
            {"group_size": None},
            r"config.json: quantization_config lacks 'group_size'",
        ),
        (
            "awq",
            {"group_size": "32"},
            r"config.json: quantization_config: group_size='32': must be a whole number from -1",
        ),
        ("gptq int4", {"bits": 3}, "every layer: 3 bits are not supported, only 4 and 8: take a checkpoint with these"),
        ("gptq int4", {"bits": "4"}, "config.json: quantization_config: bits='4': must be a whole number"),
        ("gptq int4", {"bits": 4.0}, "config.json: quantization_config: bits=4.0: must be a whole number"),
        ("gptq int4", {"dynamic": [1]}, r"config.json: quantization_config: dynamic=\[1\]: must be an object"),
        ("awq", {"modules_to_not_convert": 5}, "quantization_config: modules_to_not_convert=5: must be a list"),
        ("packed int4", {"ignore": [1, 2]}, r"quantization_config: ignore=\[1, 2\]: must be a list of strings"),
        ("packed int4", {"config_groups": 5}, "quantization_config: config_groups=5: must be an object"),
        ("fp8 without blocks", {"ignored_layers": 5}, "quantization_config: ignored_layers=5: must be a list"),
        ("fp8 by block, as DeepSeek writes it", {"weight_block_size": 5}, "weight_block_size=5: must be a list"),
        ("gptq int4", {"dynamic": {"+:.*": {"bits": 2}}}, r"layers.0.self_attn.q_proj: 2 bits are not supported"),
        (
            "gptq int4",
            {"dynamic": {"+:*": {}}},
            r"dynamic: \+:\*=\{\}: must be under a regular expression, and '\*' is none \(nothing to repeat",
        ),
        (
            "gptq int4",
            {"dynamic": {".*": 8}},
            r"config.json: quantization_config: dynamic: \.\*=8: must be an object",
        ),
        ("fp8 without blocks", {"activation_scheme": "x"}, "activation_scheme='x': must be dynamic or static"),
        (
            "gptq int4",
            {"checkpoint_format": "gptq_v2"},
            "means zeros of 8, and all are 7: write checkpoint_format='gptq' into q",
        ),
        ("gptq int8", {"checkpoint_format": "gptq_v2"}, "of 128, and all are 127: write checkpoint_format='gptq' into"),
        ("gptq int4", {"checkpoint_format": "marlin"}, "GPTQ in the layout 'marlin' .*: take a checkpoint in these"),
        ("awq", {"bits": 8}, "every layer in AWQ: 8 bits are not supported, only 4: take a checkpoint with these"),
        (
            "awq",
            {"version": "gemv"},
            r"AWQ in the layout 'gemv' \(version\) is not supported, only 'gemm': take a checkpoint in this",
        ),
        (
            "auto-round",
            {"data_type": "mx_fp"},
            "data_type 'mx_fp' is not supp.* 'int': take a checkpoint with this",
        ),
        (
            "auto-round",
            {"packing_format": "x"},
            r"AutoRound in the packing 'x' \(packing_format\) is not .*: take a checkpoint in these",
        ),
        ("auto-round", {"bits": "4"}, "config.json: quantization_config: bits='4': must be a whole number"),
        ("auto-round, as gptq", {"packing_format": "auto_round"}, "write packing_format='auto_round:auto_gptq' into q"),
        (
            "auto-round, as awq",
            {"bits": 8},
            r"q_proj in the packing 'auto_round:auto_awq': 8 bits are not .* only 4: take",
        ),
        (
            "auto-round, as awq",
            {"extra_config": {DOWN: {"bits": 8}}},
            rf"{DOWN} in the packing 'auto_round:auto_awq': 8 bits are not supported, only 4",
        ),
        (
            "fp8 by block, as DeepSeek writes it",
            {"weight_block_size": ["128", "128"]},
            r"quantization_config: weight_block_size=\['128', '128'\]: must be a list of whole numbers",
        ),
        (
            "nvfp4 of ModelOpt",
            {"quant_algo": "W4A8_AWQ"},
            "ModelOpt's W4A8_AWQ is not supported.*: take a checkpoint in",
        ),
    ],
)
def test_settings_that_no_such_file_has_are_refused(
    name: str, changes: dict[str, Any], says: str, unquantized: Path, tmp_path: Path
) -> None:
    write_checkpoint(name, unquantized, tmp_path)
    edit(tmp_path, lambda config: config.update(changes))
    with pytest.raises(ModelError, match=says):
        generate(tmp_path)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ("gptq", "config.json: quantization_config='gptq': must be an object"),
        (["bits", 4], r"config.json: quantization_config=\['bits', 4\]: must be an object"),
        ({"quant_method": ["gptq"]}, r"config.json: quantization_config: quant_method=\['gptq'\]: must be a string"),
    ],
)
def test_what_is_no_settings_at_all_is_refused(config: Any, says: str, unquantized: Path, tmp_path: Path) -> None:
    write_checkpoint("gptq int4", unquantized, tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | {"quantization_config": config}))
    with pytest.raises(ModelError, match=says):
        generate(tmp_path)


@pytest.mark.parametrize("missing", ["bits", "group_size"])
def test_a_setting_that_is_missing_is_named(missing: str) -> None:
    config = {key: value for key, value in FORMATS["gptq int4"].config.items() if key != missing}
    with pytest.raises(ModelError, match=rf"^config.json: quantization_config lacks '{missing}'$"):
        quantization(config, None)


@pytest.mark.parametrize(
    ("part", "changes", "says"),
    [
        ("weights", {"num_bits": 3}, "the format 'pack-quantized' with 3-bit int weights by group is not supported"),
        (
            "weights",
            {"type": "float"},
            "the format 'pack-quantized' with 4-bit float weights by group is not supported",
        ),
        ("", {"weights": "int4"}, r"a name \('int4'\) in place of settings is not supported: write them out"),
        ("", {"input_activations": "int8"}, "in place of settings is not supported: write them out"),
    ],
)
def test_a_group_of_compressed_tensors_is_named_by_its_targets(part: str, changes: dict[str, Any], says: str) -> None:
    group = {"targets": ["re:.*mlp.*"], "input_activations": None, "format": "pack-quantized"}
    group["weights"] = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
    changed: Any = group[part] if part else group
    changed.update(changes)
    config = {"quant_method": "compressed-tensors", "config_groups": {"group_7": group}}
    with pytest.raises(
        ModelError,
        match=rf"quantization_config: config_groups: compressed-tensors, group_7 of \['re:\.\*mlp\.\*'\]: .*{says}",
    ):
        quantization(config, None)


def test_a_preset_in_place_of_a_group_is_named() -> None:
    config = {"quant_method": "compressed-tensors", "config_groups": {"W8A8": ["Linear"]}}
    with pytest.raises(
        ModelError, match=r"W8A8 of \['Linear'\]: a name \('W8A8'\) in place of settings is not supported"
    ):
        quantization(config, None)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"strategy": "group", "group_size": 128}, None),  # activations stay: no kernel multiplies these
        (
            {"num_bits": 4},
            r"\['Linear'\]: a product of float weights and 4-bit float activations is not .*: take a check",
        ),
        ({"type": "int"}, "float weights and 8-bit int activations is not supported: take a checkpoint with "),
        ({"symmetric": False}, "float weights and activations that are not symmetric is not supported: take a checkpo"),
        ({"strategy": "channel"}, "float weights and activations by channel is not supported: take a checkpoint with "),
    ],
)
def test_activations_that_do_not_go_with_the_weights(
    changes: dict[str, Any], says: str | None, unquantized: Path, tmp_path: Path
) -> None:
    write_checkpoint("fp8", unquantized, tmp_path / "odd")
    edit(tmp_path / "odd", lambda config: config["config_groups"]["group_0"]["input_activations"].update(changes))
    if says is not None:
        with pytest.raises(ModelError, match=says):
            generate(tmp_path / "odd")
        return
    write_checkpoint("fp8 of weights alone", unquantized, tmp_path / "alone")
    assert_same(generate(tmp_path / "odd"), generate(tmp_path / "alone"))
