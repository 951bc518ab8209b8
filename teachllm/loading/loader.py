"""From a checkpoint on disk to a model in memory.

Tensors are read one at a time, each straight into the parameter, or the slice of a merged parameter, that it fills:
the peak is the model and one tensor, never the checkpoint twice. Every tensor that the model declares must come,
with its shape, and no other: a silent gap would be a model that talks nonsense.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Container, Iterable
from pathlib import Path

import torch
from torch import nn

from teachllm.checkpoint.files import pickle_files, stored_tensors, tensors_to_load, wrong_shape
from teachllm.config import EngineConfig
from teachllm.distributed.ranks import ALONE, Ranks
from teachllm.errors import ModelError
from teachllm.layers.bound_module import BoundModule
from teachllm.layers.checkpoint_tensors import Destination, TensorDestination
from teachllm.layers.dtypes import torch_dtype
from teachllm.layers.linear import Linear
from teachllm.layers.norm import RMSNorm
from teachllm.layers.weights.gpu_scaled_weight import GPUScaledWeight
from teachllm.layers.weights.quantized_weight_loader import NOT_READ, Slot, formats_of, why_unknown
from teachllm.layers.weights.scheme import UNQUANTIZED, WEIGHT_FLOATS, Schemes
from teachllm.loading.random_weights import fill_parts_randomly, fill_randomly
from teachllm.loading.stored_weights import Progress, read_pickles, read_safetensors
from teachllm.models.base import Model
from teachllm.models.build import META, build_model, quantization_of_model
from teachllm.models.decoder import CausalLM
from teachllm.models.model_config import ModelConfig
from teachllm.models.moe import unstacked
from teachllm.models.moe_config import ExpertNames
from teachllm.models.tensor_names import is_derived, renaming
from teachllm.quantization.formats.scaled import Scaled


def load_model(
    model_config: ModelConfig,
    config: EngineConfig,
    device: torch.device,
    progress: Progress | None = None,
    ranks: Ranks = ALONE,
) -> Model:
    """Build the model on `device` and fill it; return it in eval mode, without gradients.

    Args:
        progress: called with (bytes read, bytes in all).
        ranks: the ranks that share it; the part of one is loaded.

    Raises:
        ModelError: the checkpoint is broken, names the tensor and the file; or holds pickles that were not asked for;
            or `batch_invariant` cannot hold here.
    """
    if config.batch_invariant:
        _check_invariant(model_config, device)
    folder, dtype = Path(model_config.path), torch_dtype(model_config.dtype)
    if config.load_format != "dummy":
        check_weights(folder, config.load_format)
    if model_config.implementation == "transformers":
        from teachllm.models.via_transformers.model import load_transformers_model

        model = load_transformers_model(model_config, config, device, dtype)
        if config.load_format == "dummy":
            fill_randomly(model, config.seed)
        model.eval().requires_grad_(False)
        return model
    quantization = quantization_of_model(model_config)
    schemes = UNQUANTIZED if quantization is None else quantization.schemes
    own = build_model(model_config, device, schemes, ranks)
    _warn_of_batch_scales(own, model_config)
    if config.load_format == "dummy":
        fill_parts_randomly(own.checkpoint_tensors(), config.seed)
    else:
        fill_from_checkpoint(own, model_config, _elsewhere(own, model_config, schemes, ranks), progress)
    finish_model(own, device, config.batch_invariant)
    _warn_of_fp8(own, model_config)
    own.eval().requires_grad_(False)
    return own


def _elsewhere(own: CausalLM, model_config: ModelConfig, schemes: Schemes, ranks: Ranks) -> frozenset[str]:
    """Return the names of the tensors that other ranks read."""
    if ranks.coords.layout.num_connected == 1:
        return frozenset()
    whole = build_model(model_config, META, schemes)
    return frozenset(name for name, _ in whole.checkpoint_tensors()) - {name for name, _ in own.checkpoint_tensors()}


def _warn_of_batch_scales(model: nn.Module, model_config: ModelConfig) -> None:
    """Warn if the checkpoint asks for scales that would be lossy."""
    parts = [part for module in model.modules() if isinstance(module, Linear) for part in module.unread()]
    if any(isinstance(part.scheme, Scaled) and part.scheme.of_batch for part in parts):
        warnings.warn(
            f"{model_config.path} asks for one scale for the activations of a whole batch (dynamic, per tensor). That "
            "is lossy: what a request gets would depend on what runs beside it. Each token gets a scale of its own",
            stacklevel=2,
        )


def _warn_of_fp8(model: nn.Module, model_config: ModelConfig) -> None:
    """Warn if activations are not quantized as the checkpoint asks."""
    names = [name for name, each in model.named_modules() if isinstance(each, GPUScaledWeight) and each.lacks_fp8]
    if names:
        warnings.warn(
            f"{model_config.path}: this GPU does not multiply fp8 (from compute capability 8.9 on they do), so of "
            f"{names[0].removesuffix('.weight')} and {len(names) - 1} more layers only the weights are quantized, and "
            "prompts gain nothing: take int8, by a checkpoint of it or with quantization='int8'",
            stacklevel=2,
        )


def check_weights(folder: Path, load_format: str, where: str = "") -> None:
    """Refuse a folder without readable weights.

    Args:
        where: to set another `load_format`, for the message; " in speculative_config".

    Raises:
        ModelError: there are none in this format, a shard is missing or truncated, or they are pickles.
    """
    if load_format == "pt":
        if not pickle_files(folder):
            raise ModelError(f"{folder} has no pytorch_model.bin: set load_format='auto'{where}")
    elif not stored_tensors(folder):
        if pickle_files(folder):
            raise ModelError(
                f"{folder} has its weights only as pickles (.bin), which can run code when they are read: "
                f"set load_format='pt'{where} if you trust them, or convert them to safetensors"
            )
        if any(folder.glob("consolidated*")):
            raise ModelError(
                f"{folder} has its weights only as consolidated files, in Mistral's own format: take the model's "
                "checkpoint in Hugging Face format"
            )
        raise ModelError(f"{folder} has no .safetensors file: set load_format='dummy'{where} for random weights")


def stored_names(folder: Path, load_format: str, where: str = "") -> list[str]:
    """Return the names of a checkpoint's tensors; with random weights there are none. Errors as in `check_weights`."""
    names = list(tensors_to_load(folder, load_format))
    if not names and load_format != "dummy":
        check_weights(folder, load_format, where)
    return names


def fill_from_checkpoint(
    model: CausalLM, model_config: ModelConfig, elsewhere: Container[str] = (), progress: Progress | None = None
) -> None:
    """Copy every tensor of a checkpoint to its place in the model. Errors are the same as in `fill`.

    Args:
        elsewhere: the names of tensors that other ranks read.
    """
    folder, load_format = Path(model_config.path), model_config.load_format
    rename = renaming(stored_names(folder, load_format), model_config.tied)

    def name_of(name: str) -> str | None:
        name = rename(name)
        return None if name in elsewhere or is_derived(name, model_config.tied) else name

    names = None if model.experts is None else model.experts.names
    fill(model.checkpoint_tensors(), folder, load_format, progress, name_of, names)


def fill(
    destinations: Iterable[tuple[str, Destination]],
    folder: Path,
    load_format: str,
    progress: Progress | None = None,
    name_of: Callable[[str], str | None] = str,
    experts: ExpertNames | None = None,
) -> None:
    """Copy every tensor of a checkpoint to its destination.

    Args:
        name_of: the name of its destination, given a tensor's; None: it is not read.
        experts: of the destinations, which may be stored in one piece.

    Raises:
        ModelError: a tensor is missing, unknown, or of another shape.
    """
    missing = dict(destinations)
    is_quantized = any(isinstance(each, Slot) and each.part is not None for each in missing.values())
    formats = formats_of(missing)

    def part(stored_name: str) -> TensorDestination | None:
        place = missing.get(name_of(stored_name) or "")
        return place if isinstance(place, TensorDestination) and place.ranges is not None else None

    read = read_pickles if load_format == "pt" else read_safetensors
    tensors = read(folder, progress, lambda name: name_of(name) is not None, part)
    for stored_name, tensor, file in tensors if experts is None else unstacked(tensors, experts):
        name = name_of(stored_name)
        if name is None:
            continue
        place = missing.pop(name, None)
        if place is None:
            if is_quantized and stored_name.endswith(".bias") and not bool(tensor.any()):
                continue  # GPTQ's tools write one for every layer
            raise ModelError(f"{file} holds tensor {stored_name}, {why_unknown(name, formats)}")
        if isinstance(place, Slot):
            try:
                place.put(tensor)
            except ModelError as error:  # names the layer
                raise ModelError(f"{file}: {error}") from None
            except ValueError as error:
                raise ModelError(f"{file}: tensor {stored_name} {error}") from None
            continue
        _put(tensor, place, stored_name, file)
    missing = {name: each for name, each in missing.items() if not (isinstance(each, Slot) and each.stored.is_optional)}
    if missing:
        name, lacking = next(iter(missing.items()))
        what = f"{name} of {lacking.format}" if isinstance(lacking, Slot) else name
        fix = f"take a complete checkpoint{', or correct quantization_config' if isinstance(lacking, Slot) else ''}"
        raise ModelError(
            f"{folder} lacks tensor {what}, which config.json means ({len(missing)} missing in all): {fix}"
        )


def _put(tensor: torch.Tensor, place: TensorDestination, name: str, file: Path) -> None:
    """Copy a tensor that was read, whole or this rank's part of it.

    Raises:
        ModelError: it has another shape, or is not of floating-point numbers.
    """
    shape: tuple[int, ...] = tuple(tensor.shape)
    if place.ranges is not None:
        if shape == place.shape:  # it was read in one piece with others
            tensor = tensor[place.ranges]
        shape = tuple(tensor.shape)
        expected = tuple(each.stop - each.start for each in place.ranges)
    else:
        expected = place.shape
    if place.target.is_floating_point() and tensor.dtype not in WEIGHT_FLOATS:
        dtype = str(tensor.dtype).removeprefix("torch.")
        raise ModelError(f"{file}: tensor {name} is of {dtype}, {NOT_READ}")
    if shape != expected:
        raise ModelError(wrong_shape(name, file, shape, expected))
    place.target.copy_(tensor)


def _check_invariant(model_config: ModelConfig, device: torch.device) -> None:
    reason = None
    if device.type == "cpu":
        reason = "a CPU's matrix products (oneDNN) add in an order that depends on the number of rows"
    elif model_config.implementation != "teachllm":
        reason = "transformers' model code calls cuBLAS, which adds in an order that depends on the number of rows"
    elif model_config.quantization is not None:
        reason = "products of quantized weights add in an order that depends on the number of rows"
    if reason is not None:
        raise ModelError(f"batch_invariant=True does not hold here, {reason}: set batch_invariant=False")


def finish_model(model: CausalLM, device: torch.device, batch_invariant: bool) -> None:
    """Build the execution weights of a whole model, its output head's included, and bind their kernels."""
    model.finish()
    finish(model, device)
    if device.type == "cpu":
        model.pack_head()
    for module in model.modules():
        if isinstance(module, BoundModule):
            module.is_fixed = batch_invariant


def finish(model: nn.Module, device: torch.device) -> None:
    """Build the execution weights of linear layers and norms from the loaded tensors."""
    for module in model.modules():
        if isinstance(module, Linear):
            module.finish()
        elif isinstance(module, RMSNorm) and device.type == "cpu":
            module.prepare()
