"""Makes the golden files of quantized checkpoints: every layer is packed and unpacked by its format's own library.

A golden file holds one small layer, `golden/<case>.safetensors`: the tensors as a checkpoint stores them, named
`<case>.<tensor>`, and `<case>.dequantized`, the weight that the library itself makes of them, `[out, in]`, in the dtype
that the library gives. Its metadata holds `quantization_config` (what `config.json` says of such a model), `library`
(what packed and unpacked it, with versions) and, for ModelOpt, `hf_quant_config`. README.md beside the files says which
arithmetic reproduces `dequantized` bit for bit.

The files are committed; this script is run only to make new ones, in an environment of its own, since the libraries
ask for versions of torch and transformers that do not go together and work with the ones here all the same:

    pip install -c constraints.txt compressed-tensors==0.20.0 auto-round==0.16.1 nvidia-modelopt==0.47.0 optimum \
        accelerate datasets device-smi threadpoolctl logbar tokenicer pypcre defuser dill torchao zstandard
    pip install --no-deps --no-build-isolation gptqmodel==7.7.0 autoawq==0.2.9
    python tests/quantization/formats/make_golden.py    # all but the next one; or name some: ... gptqmodel autoawq

Groups in activation order (`weight_g_idx`) are gone from compressed-tensors since 0.19, so that case takes an old one:

    pip install --no-deps --target old compressed-tensors==0.17.1
    PYTHONPATH=old python tests/quantization/formats/make_golden.py compressed_tensors_g_idx
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

GOLDEN = Path(__file__).with_name("golden")
os.environ["GPTQMODEL_DISABLE_PACK_EXT"] = "1"  # its plain packing, not an extension compiled on the spot


@dataclass(frozen=True)
class Golden:
    """One layer as a checkpoint stores it, and the weight that its library reads out of it."""

    case: str
    library: str
    quantization_config: dict[str, Any]
    tensors: dict[str, Tensor]
    dequantized: Tensor  # [out, in]
    hf_quant_config: dict[str, Any] | None = None

    def save(self) -> None:
        """Writes `golden/<case>.safetensors`."""
        tensors = {f"{self.case}.{name}": tensor.detach().contiguous() for name, tensor in self.tensors.items()}
        tensors[f"{self.case}.dequantized"] = self.dequantized.detach().contiguous()
        metadata = {"library": self.library, "quantization_config": json.dumps(self.quantization_config)}
        if self.hf_quant_config is not None:
            metadata["hf_quant_config"] = json.dumps(self.hf_quant_config)
        path = GOLDEN / f"{self.case}.safetensors"
        save_file(tensors, path, metadata)
        sort_metadata(path)
        print(f"{path.name}: {path.stat().st_size / 1024:.0f} KiB, {self.library}")


def sort_metadata(path: Path) -> None:
    """safetensors writes its metadata in any order; in one order, the same golden file is the same bytes."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    ordered = json.dumps(header, separators=(",", ":")).encode().ljust(length)
    assert len(ordered) == length, path
    path.write_bytes(data[:8] + ordered + data[8 + length :])


def drawn(out_features: int, in_features: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """A weight, [out, in], whose rows and columns differ in size, as those of trained models do."""
    generator = torch.Generator().manual_seed(out_features * 1009 + in_features)
    weight = torch.randn(out_features, in_features, generator=generator) * 0.02
    weight *= torch.rand(out_features, 1, generator=generator) + 0.5
    weight *= 1 + 4 * (torch.rand(in_features, generator=generator) > 0.97)
    return weight.to(dtype)


def linear(weight: Tensor, bias: Tensor | None = None) -> nn.Linear:
    """nn.Linear with these parameters."""
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, dtype=weight.dtype)
    layer.weight.data = weight.clone()
    if bias is not None:
        layer.bias.data = bias.clone()
    return layer


def libraries(*names: str) -> str:
    """'name version' of each."""
    return ", ".join(f"{name} {version(name)}" for name in names)


def scales_and_zeros(weight: Tensor, bits: int, group_of: Tensor, symmetric: bool) -> tuple[Tensor, Tensor]:
    """Round-to-nearest scales and zero points, [out, groups] each; `group_of` [in] names each column's group."""
    levels = 2**bits - 1
    groups = [weight[:, group_of == group] for group in range(int(group_of.max()) + 1)]
    low = torch.stack([columns.amin(1).clamp(max=0) for columns in groups], 1)
    high = torch.stack([columns.amax(1).clamp(min=0) for columns in groups], 1)
    if symmetric:
        largest = torch.maximum(-low, high)
        return 2 * largest / levels, torch.full_like(largest, (levels + 1) // 2)
    scales = (high - low) / levels
    return scales, torch.round(-low / scales)


# --- GPTQ -------------------------------------------------------------------------------------------------------------


def gptqmodel() -> Iterator[Golden]:
    """GPTQ in both checkpoint formats, by the library that transformers reads it with."""
    from gptqmodel.nn_modules.qlinear.torch import TorchLinear
    from gptqmodel.quantization import FORMAT, METHOD, QuantizeConfig
    from gptqmodel.utils.model import convert_gptq_v1_to_v2_format_module, convert_gptq_v2_to_v1_format_module

    def packed(
        case: str, bits: int, group_size: int, *, sym: bool = True, v1: bool = True, act_order: bool = False,
        positive_rows: bool = False, bias: bool = False, shape: tuple[int, int] = (32, 96),
    ) -> Golden:  # fmt: skip
        weight = drawn(*shape)
        if positive_rows:  # their zero points are 0, which version 1 stores as -1
            weight[::3] = weight[::3].abs()
        out_features, in_features = shape
        group_of = torch.arange(in_features, dtype=torch.int32) // (in_features if group_size == -1 else group_size)
        if act_order:  # columns take their groups in the order of their importance
            group_of = group_of[torch.randperm(in_features, generator=torch.Generator().manual_seed(7))]
        scales, zeros = scales_and_zeros(weight, bits, group_of, sym)
        module = TorchLinear(
            bits=bits, group_size=group_size, sym=sym, desc_act=act_order, in_features=in_features,
            out_features=out_features, bias=bias, pack_dtype=torch.int32, register_buffers=False,
        )  # fmt: skip
        layer = linear(weight, torch.linspace(-1, 1, out_features) if bias else None)
        module.pack_block(layer, scales, zeros, group_of)
        config = QuantizeConfig(
            bits=bits, group_size=group_size, sym=sym, desc_act=act_order, act_group_aware=False,
            method=METHOD.GPTQ, format=FORMAT.GPTQ if v1 else FORMAT.GPTQ_V2, offload_to_disk=False,
        )  # fmt: skip
        if v1:
            convert_gptq_v2_to_v1_format_module(module, config)
        tensors = {name: tensor.clone() for name, tensor in module.state_dict().items()}
        if v1:  # as its loader does before it runs
            convert_gptq_v1_to_v2_format_module(module, bits, torch.int32)
        module.post_init()
        dequantized = module.eval().dequantize_weight().T
        written = {key: value for key, value in config.to_dict().items() if key not in ("meta", "activation")}
        written["meta"] = {"quantizer": [f"gptqmodel:{version('gptqmodel')}"]}
        return Golden(case, libraries("gptqmodel"), json.loads(json.dumps(written)), tensors, dequantized)

    yield packed("gptq_v1_int4_sym_g32", 4, 32, bias=True)
    yield packed("gptq_v1_int4_sym_g64", 4, 64, shape=(32, 128))
    yield packed("gptq_v1_int4_sym_g128", 4, 128, shape=(32, 256))
    yield packed("gptq_v1_int4_sym_channel", 4, -1)
    yield packed("gptq_v1_int4_asym_g32", 4, 32, sym=False)
    yield packed("gptq_v1_int4_asym_g32_zero_is_0", 4, 32, sym=False, positive_rows=True)
    yield packed("gptq_v1_int4_sym_g32_desc_act", 4, 32, act_order=True)
    yield packed("gptq_v1_int4_sym_g64_desc_act", 4, 64, act_order=True, shape=(32, 128))
    yield packed("gptq_v1_int4_sym_g128_desc_act", 4, 128, act_order=True, shape=(32, 256))
    yield packed("gptq_v1_int4_sym_channel_desc_act", 4, -1, act_order=True)
    yield packed("gptq_v1_int8_sym_g32", 8, 32)
    yield packed("gptq_v1_int8_sym_g32_desc_act", 8, 32, act_order=True)
    yield packed("gptq_v1_int8_sym_g128", 8, 128, shape=(32, 256))
    yield packed("gptq_v1_int8_asym_channel", 8, -1, sym=False)
    yield packed("gptq_v2_int4_sym_g64", 4, 64, v1=False, shape=(32, 128))
    yield packed("gptq_v2_int4_asym_g32_zero_is_0", 4, 32, sym=False, v1=False, positive_rows=True)
    yield packed("gptq_v2_int4_asym_g32_desc_act", 4, 32, sym=False, v1=False, act_order=True)
    yield packed("gptq_v2_int8_asym_g64", 8, 64, sym=False, v1=False, shape=(32, 128))


# --- AWQ --------------------------------------------------------------------------------------------------------------


def autoawq() -> Iterator[Golden]:
    """AWQ, version "gemm", by the library that made most of the checkpoints there are."""
    from awq.models._config import AwqConfig
    from awq.modules.linear.gemm import WQLinear_GEMM
    from awq.utils.packing_utils import dequantize_gemm

    cases = [("g32", 32, (64, 96), True), ("g64", 64, (32, 128), False), ("g128", 128, (32, 256), False)]
    for case, group_size, shape, bias in [*cases, ("channel", -1, (32, 96), False)]:
        weight, size = drawn(*shape), shape[1] if group_size == -1 else group_size
        scales, zeros = scales_and_zeros(weight, 4, torch.arange(shape[1]) // size, symmetric=False)
        layer = linear(weight, torch.linspace(-1, 1, shape[0]) if bias else None)
        module = WQLinear_GEMM.from_linear(layer, 4, size, scales=scales.T, zeros=zeros.T)
        weight = dequantize_gemm(module.qweight, module.qzeros, module.scales, 4, size).T
        config = AwqConfig(q_group_size=group_size, modules_to_not_convert=["lm_head"]).to_transformers_dict()
        yield Golden(f"awq_gemm_int4_{case}", libraries("autoawq"), config, module.state_dict(), weight)


# --- AutoRound --------------------------------------------------------------------------------------------------------


def auto_round() -> Iterator[Golden]:
    """AutoRound's three packings of integers, each by the module that its exporter takes."""
    from auto_round.export.export_to_awq.utils import WQLinear_GEMM
    from auto_round.export.export_to_awq.utils import dequantize_gemm as dequantize_awq
    from auto_round_extension.torch.qlinear_torch import QuantLinear as PlainLinear
    from auto_round_extension.torch.qlinear_torch_zp import QuantLinear as ZeroMinusOneLinear

    def config(bits: int, group_size: int, sym: bool, packing_format: str) -> dict[str, Any]:
        return {
            "quant_method": "auto-round", "packing_format": packing_format, "bits": bits, "group_size": group_size,
            "sym": sym, "data_type": "int", "autoround_version": version("auto-round"),
            "block_name_to_quantize": "model.layers",
        }  # fmt: skip

    def rounded(
        bits: int, group_size: int, sym: bool, shape: tuple[int, int] | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(weight, scales, zeros)."""
        weight = drawn(*(shape or (32, 128 if group_size == 64 else 96)))
        size = weight.shape[1] if group_size == -1 else group_size
        scales, zeros = scales_and_zeros(weight, bits, torch.arange(weight.shape[1]) // size, sym)
        if sym:  # AutoRound's symmetric scales take the sign of the largest weight: that one is -2^(bits-1) exactly
            groups = weight.reshape(weight.shape[0], -1, size)
            scales = -groups.gather(-1, groups.abs().argmax(-1, keepdim=True))[..., 0] / 2 ** (bits - 1)
        return weight, scales, zeros

    def packed(
        case: str, module_class: Callable[..., Any], bits: int, group_size: int, sym: bool,
        shape: tuple[int, int] | None = None,
    ) -> Golden:  # fmt: skip
        weight, scales, zeros = rounded(bits, group_size, sym, shape)
        out_features, in_features = weight.shape
        module = module_class(bits, group_size, in_features, out_features, bias=False)
        module.device = "cpu"
        module.pack(linear(weight), scales, zeros, None, device="cpu")
        dequantized = module(torch.eye(in_features)).T  # it has no other way to show its weight
        packing_format = "auto_round:auto_gptq" if module_class is ZeroMinusOneLinear else "auto_round"
        tensors = module.state_dict()
        return Golden(
            case, libraries("auto-round"), config(bits, group_size, sym, packing_format), tensors,
            dequantized.to(module.scales.dtype),
        )  # fmt: skip

    yield packed("autoround_auto_gptq_int4_sym_g32", ZeroMinusOneLinear, 4, 32, True)
    yield packed("autoround_auto_gptq_int4_asym_g64", ZeroMinusOneLinear, 4, 64, False)
    yield packed("autoround_auto_gptq_int4_sym_g128", ZeroMinusOneLinear, 4, 128, True, (32, 256))
    yield packed("autoround_auto_gptq_int4_sym_channel", ZeroMinusOneLinear, 4, -1, True)
    yield packed("autoround_auto_gptq_int8_sym_g32", ZeroMinusOneLinear, 8, 32, True)
    yield packed("autoround_plain_int4_asym_g32", PlainLinear, 4, 32, False)
    yield packed("autoround_plain_int8_asym_g64", PlainLinear, 8, 64, False)

    for case, sym in (("autoround_auto_awq_int4_asym_g32", False), ("autoround_auto_awq_int4_sym_g32", True)):
        weight, scales, zeros = rounded(4, 32, sym)
        module = WQLinear_GEMM.from_linear(linear(weight), 4, 32, scales=scales.T, zeros=zeros.T, device="cpu")
        dequantized = dequantize_awq(module.qweight, module.qzeros, module.scales, 4, 32).T
        written = config(4, 32, sym, "auto_round:auto_awq")
        yield Golden(case, libraries("auto-round"), written, module.state_dict(), dequantized)


# --- compressed-tensors -----------------------------------------------------------------------------------------------


def compressed(
    case: str, scheme: Any, compression_format: str, weight: Tensor, *, group_of: Tensor | None = None,
    inputs: dict[str, Tensor] | None = None, ignore: tuple[str, ...] = ("lm_head",),
) -> Golden:  # fmt: skip
    """One layer by the compressor of `compression_format`; scales and zero points are the library's own."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    args = scheme.weights
    state = {"weight": weight} | (inputs or {})
    global_scale = None
    if args.strategy == "tensor_group":
        global_scale = generate_gparam(weight.amin(), weight.amax())
        state["weight_global_scale"] = global_scale
    low, high = (extremes(weight, args, function, group_of) for function in (torch.amin, torch.amax))
    state["weight_scale"], zeros = calculate_qparams(low, high, args, global_scale=global_scale)
    if not args.symmetric:
        state["weight_zero_point"] = zeros
    if group_of is not None:
        state["weight_g_idx"] = group_of
    compressor = BaseCompressor.get_value_from_registry(compression_format)
    tensors = compressor.compress(state, scheme)
    dequantized = compressor.decompress(dict(tensors), scheme)["weight"]
    config = QuantizationConfig(
        config_groups={"group_0": scheme}, format=compression_format, ignore=list(ignore),
        quantization_status="compressed",
    )  # fmt: skip
    written = config.model_dump(mode="json")
    return Golden(case, libraries("compressed-tensors"), written, tensors, dequantized)


def extremes(weight: Tensor, args: Any, function: Callable[..., Tensor], group_of: Tensor | None) -> Tensor:
    """Least or largest weight of whatever shares a scale, in the shape of the scales."""
    if args.strategy == "tensor":
        return function(weight).reshape(1)
    if args.strategy == "channel":
        return function(weight, 1, keepdim=True)
    if args.strategy == "block":
        rows, columns = args.block_structure
        padded = nn.functional.pad(weight, (0, -weight.shape[1] % columns, 0, -weight.shape[0] % rows))
        return function(padded.unflatten(1, (-1, columns)).unflatten(0, (-1, rows)), (1, 3))
    if group_of is not None:
        groups = [function(weight[:, group_of == group], 1) for group in range(int(group_of.max()) + 1)]
        return torch.stack(groups, 1)
    return function(weight.unflatten(1, (-1, args.group_size)), 2)


def compressed_tensors() -> Iterator[Golden]:
    """Every format of compressed-tensors that a language model's linear layers come in."""
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme, preset_name_to_scheme

    def scheme(preset: str = "", inputs: dict[str, Any] | None = None, **weights: Any) -> Any:
        if preset:
            return preset_name_to_scheme(preset, ["Linear"])
        activations = QuantizationArgs(**inputs) if inputs else None
        return QuantizationScheme(
            targets=["Linear"], weights=QuantizationArgs(**weights), input_activations=activations
        )

    bf16, fp16 = torch.bfloat16, torch.float16
    int4: dict[str, Any] = {"num_bits": 4, "type": "int"}
    int8: dict[str, Any] = {"num_bits": 8, "type": "int"}
    fp8: dict[str, Any] = {"num_bits": 8, "type": "float"}
    group: dict[str, Any] = {"strategy": "group", "group_size": 32}
    g64: dict[str, Any] = {"strategy": "group", "group_size": 64}
    g128: dict[str, Any] = {"strategy": "group", "group_size": 128}
    by_block: dict[str, Any] = {"strategy": "block", "block_structure": [32, 64]}
    per_token: dict[str, Any] = {"strategy": "token", "dynamic": True}
    static: dict[str, Any] = {"strategy": "tensor", "dynamic": False}
    one_scale = {"input_scale": torch.tensor([0.0123], dtype=bf16)}

    pack = "pack-quantized"
    yield compressed("ct_pack_int4_sym_g32", scheme(**int4, **group), pack, drawn(24, 128, bf16))
    yield compressed(
        "ct_pack_int4_asym_g32", scheme(**int4, **group, symmetric=False, actorder="weight"), pack, drawn(20, 128, bf16)
    )
    yield compressed("ct_pack_int4_sym_g64", scheme(**int4, **g64), pack, drawn(24, 128, bf16))
    yield compressed("ct_pack_int4_asym_g128", scheme(**int4, **g128, symmetric=False), pack, drawn(20, 256, bf16))
    yield compressed("ct_pack_int4_sym_channel", scheme(**int4, strategy="channel"), pack, drawn(40, 100, fp16))
    yield compressed(
        "ct_pack_int4_asym_channel", scheme(**int4, strategy="channel", symmetric=False), pack, drawn(20, 96, fp16)
    )
    yield compressed("ct_pack_int8_sym_g64", scheme(**int8, **g64), pack, drawn(16, 128, bf16))
    yield compressed("ct_pack_int8_asym_g64", scheme(**int8, **g64, symmetric=False), pack, drawn(18, 128, bf16))

    yield compressed("ct_pack_int8_sym_channel", scheme(**int8, strategy="channel"), pack, drawn(16, 98, bf16))

    ints = "int-quantized"
    yield compressed("ct_w8a8_int8_channel_dynamic", scheme("W8A8"), ints, drawn(24, 128, bf16))
    asymmetric_inputs = {
        "input_scale": one_scale["input_scale"],
        "input_zero_point": torch.tensor([-17]).to(torch.int8),
    }
    yield compressed(
        "ct_w8a8_int8_tensor_static",
        scheme(**int8, strategy="tensor", inputs={**int8, **static, "symmetric": False}),
        ints, drawn(16, 128, bf16), inputs=asymmetric_inputs,
    )  # fmt: skip

    floats = "float-quantized"
    yield compressed("ct_fp8_tensor_static", scheme("FP8"), floats, drawn(24, 128, bf16), inputs=one_scale)
    yield compressed("ct_fp8_channel_dynamic", scheme("FP8_DYNAMIC"), floats, drawn(24, 128, bf16))
    yield compressed("ct_fp8_block128", scheme("FP8_BLOCK"), floats, drawn(130, 128, bf16))
    yield compressed(
        "ct_fp8_block32x64", scheme(**fp8, **by_block, inputs={**fp8, **per_token}), floats, drawn(40, 128, bf16)
    )
    yield compressed("ct_naive_fp8_channel", scheme(**fp8, strategy="channel"), "naive-quantized", drawn(16, 128, fp16))

    # The global scale of the inputs is a divisor, like that of the weights.
    nvfp4_inputs = {"input_global_scale": torch.tensor([321.5])}
    yield compressed("ct_nvfp4", scheme("NVFP4"), "nvfp4-pack-quantized", drawn(24, 128, bf16), inputs=nvfp4_inputs)
    yield compressed("ct_nvfp4a16", scheme("NVFP4A16"), "nvfp4-pack-quantized", drawn(16, 128, bf16))
    yield compressed("ct_mxfp4a16", scheme("MXFP4A16"), "mxfp4-pack-quantized", drawn(24, 128, bf16))
    yield compressed("ct_mxfp8a16", scheme("MXFP8A16"), "mxfp8-quantized", drawn(16, 128, bf16))


def compressed_tensors_g_idx() -> Iterator[Golden]:
    """compressed-tensors before 0.19: groups in activation order."""
    from compressed_tensors import __version__
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    group_of = (torch.arange(96) // 32).to(torch.int32)
    group_of = group_of[torch.randperm(96, generator=torch.Generator().manual_seed(7))]
    for symmetric in (True, False):
        args = QuantizationArgs(
            num_bits=4, type="int", strategy="group", group_size=32, actorder="group", symmetric=symmetric
        )
        scheme = QuantizationScheme(targets=["Linear"], weights=args)
        case = f"ct_pack_int4_{'sym' if symmetric else 'asym'}_g32_g_idx"
        made = compressed(case, scheme, "pack-quantized", drawn(20, 96, torch.bfloat16), group_of=group_of)
        yield Golden(
            case, f"compressed-tensors {__version__}", made.quantization_config, made.tensors, made.dequantized
        )


# --- transformers -----------------------------------------------------------------------------------------------------


def transformers() -> Iterator[Golden]:
    """Fine-grained fp8 both ways."""
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize, Fp8Quantize
    from transformers.utils.quantization_config import FineGrainedFP8Config

    cases: list[tuple[str, tuple[int, int], Any, str]] = [
        ("hf_fp8_block128", (128, 128), (128, 128), "float"),
        ("hf_fp8_block32x64", (64, 128), (32, 64), "float"),
        ("hf_fp8_block32x64_ue8m0", (64, 128), (32, 64), "ue8m0"),
        ("hf_fp8_tensor", (24, 128), None, "float"),
    ]
    for case, shape, block, scale_fmt in cases:
        config = FineGrainedFP8Config(weight_block_size=block, modules_to_not_convert=["lm_head"], scale_fmt=scale_fmt)
        quantizer: Any = SimpleNamespace(quantization_config=config)
        quantize: Any = Fp8Quantize(quantizer)
        tensors = quantize.convert({"weight": drawn(*shape, torch.bfloat16)})
        dequantized = Fp8Dequantize(quantizer)._dequantize_one(
            tensors["weight"], tensors["weight_scale_inv"], torch.bfloat16
        )
        yield Golden(case, libraries("transformers"), config.to_dict(), tensors, dequantized)


# --- ModelOpt ---------------------------------------------------------------------------------------------------------


def modelopt() -> Iterator[Golden]:
    """NVIDIA ModelOpt: fp8 with a static scale of the inputs, NVFP4 in two levels of scales."""
    from modelopt.torch.export.convert_hf_config import convert_hf_quant_config_format
    from modelopt.torch.quantization.qtensor import FP8QTensor, NVFP4QTensor

    def golden(case: str, algorithm: dict[str, Any], tensors: dict[str, Tensor], dequantized: Tensor) -> Golden:
        kv_cache_and_exceptions = {"kv_cache_quant_algo": None, "exclude_modules": ["lm_head"]}
        hf_quant_config = {
            "producer": {"name": "modelopt", "version": version("nvidia-modelopt")},
            "quantization": {**algorithm, **kv_cache_and_exceptions},
        }
        written = convert_hf_quant_config_format(hf_quant_config) | {"quant_method": "modelopt"}
        return Golden(case, libraries("nvidia-modelopt"), written, tensors, dequantized, hf_quant_config)

    weight = drawn(24, 128, torch.bfloat16)
    scale = weight.float().abs().amax() / 448
    packed, scale = FP8QTensor.quantize(weight, scale)
    tensors = {"weight": packed._quantized_data, "weight_scale": scale, "input_scale": torch.tensor(0.0123)}
    yield golden("modelopt_fp8_tensor", {"quant_algo": "FP8"}, tensors, packed.dequantize(scale=scale))

    packed, scales, scale_2 = NVFP4QTensor.quantize(weight.clone(), 16)
    dequantized = packed.dequantize(scale=scales, double_scale=scale_2, block_sizes={-1: 16})
    tensors = {"weight": packed._quantized_data, "weight_scale": scales, "weight_scale_2": scale_2}
    tensors["input_scale"] = torch.tensor(0.0031)
    yield golden("modelopt_nvfp4", {"quant_algo": "NVFP4", "group_size": 16}, tensors, dequantized)


MAKERS: dict[str, Callable[[], Iterator[Golden]]] = {
    "gptqmodel": gptqmodel,
    "autoawq": autoawq,
    "auto_round": auto_round,
    "compressed_tensors": compressed_tensors,
    "transformers": transformers,
    "modelopt": modelopt,
    "compressed_tensors_g_idx": compressed_tensors_g_idx,
}


def main(names: list[str]) -> None:
    """Makes the golden files of the named libraries, by default of all that go into one environment."""
    GOLDEN.mkdir(exist_ok=True)
    for name in names or [name for name in MAKERS if name != "compressed_tensors_g_idx"]:
        for golden in MAKERS[name]():
            golden.save()


if __name__ == "__main__":
    main(sys.argv[1:])
