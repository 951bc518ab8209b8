"""From a checkpoint on disk to a model in memory.

Tensors are read one at a time, each straight into the parameter, or the slice of a merged parameter, that it fills:
the peak is the model and one tensor, never the checkpoint twice. Every tensor that the model declares must come,
with its shape, and no other: a silent gap would be a model that talks nonsense.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TypeVar

import torch
from torch import nn

from teachllm.config import EngineConfig
from teachllm.layers.embedding import Embedding
from teachllm.layers.linear import Linear
from teachllm.layers.norm import RMSNorm
from teachllm.models.checkpoint import stored_tensors
from teachllm.models.llama import LlamaForCausalLM
from teachllm.models.llama_config import parse
from teachllm.models.model_config import ModelConfig
from teachllm.models.registry import ModelError

T = TypeVar("T")

Progress = Callable[[int, int], None]
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# Old checkpoints carry this table, which is computed here.
_DERIVED = "rotary_emb.inv_freq"


def load_model(
    model_config: ModelConfig, config: EngineConfig, device: torch.device, progress: Progress | None = None
) -> nn.Module:
    """Builds the model on `device` and fills it; in eval mode, without gradients.

    Args:
        progress: called with (bytes read, bytes in all).

    Raises:
        ModelError: the checkpoint is broken, names the tensor and the file; or holds pickles that were not asked for;
            or `batch_invariant` cannot hold here.
    """
    if config.batch_invariant:
        _check_invariant(model_config, device)
    folder, dtype = Path(model_config.path), _DTYPES[model_config.dtype]
    if config.load_format != "dummy":
        check_weights(folder, config.load_format)
    if model_config.implementation == "transformers":
        from teachllm.models.transformers_backend import load_transformers_model

        model: nn.Module = load_transformers_model(model_config, config, device, dtype)
        if config.load_format == "dummy":
            fill_randomly(model, config.seed)
        return model.eval().requires_grad_(False)
    own = new_module(lambda: LlamaForCausalLM(parse(model_config.raw), model_config.max_model_len), device, dtype)
    if config.load_format == "dummy":
        fill_randomly(own, config.seed)
    else:
        fill_from_checkpoint(own, folder, config.load_format, progress)
    if device.type == "cpu":
        pack(own)
        own.lm_head.pack(is_tied=own.lm_head is own.embed_tokens)
    for module in own.modules():
        if isinstance(module, Linear | Embedding):
            module.is_fixed = config.batch_invariant
    return own.eval().requires_grad_(False)


def check_weights(folder: Path, load_format: str) -> None:
    """Refuses a folder without readable weights.

    Raises:
        ModelError: there are none in this format, a shard is missing or truncated, or they are pickles.
    """
    if load_format == "pt":
        if not _pickles(folder):
            raise ModelError(f"{folder} has no pytorch_model.bin: set load_format='auto'")
    elif not stored_tensors(folder):
        if _pickles(folder):
            raise ModelError(
                f"{folder} has its weights only as pickles (.bin), which can run code when they are read: "
                "set load_format='pt' if you trust them, or convert them to safetensors"
            )
        raise ModelError(f"{folder} has no .safetensors file: set load_format='dummy' for random weights")


def fill_from_checkpoint(
    model: LlamaForCausalLM, folder: Path, load_format: str, progress: Progress | None = None
) -> None:
    """Copies every tensor of a checkpoint to its place in the model. Errors as in `fill`."""
    is_tied = model.lm_head is model.embed_tokens

    def name_of(name: str) -> str | None:
        return None if name.endswith(_DERIVED) or (name == "lm_head.weight" and is_tied) else name

    fill(model.checkpoint_tensors(), folder, load_format, progress, name_of)


def fill(
    destinations: Iterable[tuple[str, torch.Tensor]],
    folder: Path,
    load_format: str,
    progress: Progress | None = None,
    name_of: Callable[[str], str | None] = str,
) -> None:
    """Copies every tensor of a checkpoint to its destination.

    Args:
        name_of: the name of its destination, given a tensor's; None: it is not read.

    Raises:
        ModelError: a tensor is missing, unknown, or of another shape.
    """
    missing = dict(destinations)
    for stored_name, tensor, file in (read_pickles if load_format == "pt" else _read_safetensors)(folder, progress):
        name = name_of(stored_name)
        if name is None:
            continue
        destination = missing.pop(name, None)
        if destination is None:
            raise ModelError(f"{file} holds tensor {stored_name}, which the model of its config.json does not have")
        # A norm that all heads share is held once per head: each takes a copy.
        per_head = name.endswith("norm.weight") and destination.dim() == 2
        expected = destination.shape[1:] if per_head else destination.shape
        if tensor.shape != expected:
            shapes = f"{list(tensor.shape)}, config.json means {list(expected)}"
            raise ModelError(f"{file}: tensor {stored_name} has shape {shapes}")
        destination.copy_(tensor)
    if missing:
        raise ModelError(f"{folder} lacks tensor {next(iter(missing))} ({len(missing)} missing in all)")


def fill_randomly(model: nn.Module, seed: int) -> None:
    """Random weights that keep activations at unit size; equal for equal seeds on equal devices."""
    parameters = dict(model.named_parameters())
    generator = torch.Generator(next(iter(parameters.values())).device).manual_seed(seed)
    with torch.no_grad():
        for name, parameter in parameters.items():
            if "norm" in name or (parameter.dim() == 1 and name.endswith("weight")):
                parameter.fill_(1.0)
            elif name.endswith("bias"):
                parameter.zero_()
            else:
                parameter.normal_(0.0, parameter.shape[-1] ** -0.5, generator=generator)


def _check_invariant(model_config: ModelConfig, device: torch.device) -> None:
    reason = None
    if device.type == "cpu":
        reason = "a CPU's matrix products (oneDNN) add in an order that depends on the number of rows"
    elif model_config.implementation != "teachllm":
        reason = "transformers' model code calls cuBLAS, which adds in an order that depends on the number of rows"
    if reason is not None:
        raise ModelError(f"batch_invariant=True does not hold here, {reason}: set batch_invariant=False")


def pack(model: nn.Module) -> None:
    """Lays out for a CPU the weights of all linear layers and norms."""
    for module in model.modules():
        if isinstance(module, Linear):
            module.pack()
        elif isinstance(module, RMSNorm):
            module.prepare()


def new_module(build: Callable[[], T], device: torch.device, dtype: torch.dtype) -> T:
    """What `build` makes, on `device`, its parameters of `dtype`."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            return build()
    finally:
        torch.set_default_dtype(before)


def _read_safetensors(folder: Path, progress: Progress | None) -> Iterator[tuple[str, torch.Tensor, Path]]:
    from safetensors import SafetensorError, safe_open

    stored = stored_tensors(folder)
    files = list(dict.fromkeys(tensor.file for tensor in stored.values()))
    total, done = sum(file.stat().st_size for file in files), 0
    for file in files:
        try:
            with safe_open(file, framework="pt") as reader:
                for name in reader.keys():  # noqa: SIM118 (the reader is no dictionary)
                    tensor = reader.get_tensor(name)
                    yield name, tensor, file
                    done += tensor.nbytes
                    if progress is not None:
                        progress(done, total)
        except SafetensorError as error:
            raise ModelError(f"{file} cannot be read: {error}") from None
    if progress is not None:
        progress(total, total)


def _pickles(folder: Path) -> list[Path]:
    return sorted([*folder.glob("pytorch_model*.bin"), *folder.glob("medusa_lm_head.pt")])


def read_pickles(folder: Path, progress: Progress | None) -> Iterator[tuple[str, torch.Tensor, Path]]:
    """(name, tensor, file) of every tensor of a checkpoint in pickles, of which only plain tensors are read.

    Raises:
        ModelError: a file holds anything else.
    """
    files = _pickles(folder)
    total, done = sum(file.stat().st_size for file in files), 0
    for file in files:
        try:
            tensors = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
        except Exception as error:
            raise ModelError(f"{file} cannot be read as plain tensors: {str(error).splitlines()[0]}") from None
        for name, tensor in tensors.items():
            yield name, tensor, file
        done += file.stat().st_size
        if progress is not None:
            progress(done, total)
