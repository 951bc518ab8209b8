"""A model as a row of blocks, of which one at a time is worked on.

Quantizers need to see a layer's inputs. To keep those of all layers would take more memory than the model; so the text
goes through one block at a time, and what comes out is what the next one gets:

    text -> embeddings -> [block 0] -> hidden states -> [block 1] -> ... ;   [ ] in float32, embeddings as stored

The code of the blocks is transformers', so that any decoder does that is made of `nn.Linear`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from torch import nn

from teachllm.checkpoint.files import StoredTensor, read_json, stored_tensors
from teachllm.errors import ModelError
from teachllm.models.registry import architecture_of, is_own
from teachllm.models.tensor_names import renaming

STORED_DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
BATCH = 8  # rows that go through a block together

Hook = Callable[[torch.Tensor], None]


@dataclass
class DecoderBlock:
    """One of a model's.

    Attributes:
        name: of the module, "model.layers.0".
        others: what it is called with besides hidden states; of one row, and broadcast.
    """

    name: str
    module: nn.Module
    others: dict[str, Any] = field(default_factory=dict)

    def linears(self) -> dict[str, nn.Linear]:
        """Return its linear layers, by their names below the block's."""
        return {name: each for name, each in self.module.named_modules() if isinstance(each, nn.Linear)}

    def to(self, device: str, dtype: torch.dtype) -> None:
        """Move the block's parameters, and what it is called with."""
        self.module.to(device, dtype)
        self.others = _on(self.others, device)

    def __call__(self, hidden: torch.Tensor, weights: Mapping[str, torch.Tensor] | None = None) -> torch.Tensor:
        """[rows, seq_len, hidden_size] -> the same.

        Args:
            weights: of linear layers, in place of their own.
        """
        if weights is None:
            found = self.module(hidden, **self.others)
        else:
            swapped = {f"{name}.weight": weight for name, weight in weights.items()}
            found = torch.func.functional_call(self.module, swapped, (hidden,), self.others)
        return found[0] if isinstance(found, tuple) else found

    @torch.no_grad()
    def run(self, hidden: torch.Tensor) -> torch.Tensor:
        """Call the block on many rows; the result replaces nothing."""
        return torch.cat([self(rows) for rows in hidden.split(BATCH)])

    @torch.no_grad()
    def watch(self, name: str, hidden: torch.Tensor, hook: Hook) -> None:
        """Run the block as far as one of its linear layers, and show that layer's inputs to `hook`.

        Args:
            hook: given [num_tokens, in] float32, for some rows at a time.
        """

        def show(_: nn.Module, arguments: tuple[torch.Tensor, ...]) -> None:
            hook(arguments[0].flatten(0, -2))
            raise _Stop

        handle = self.module.get_submodule(name).register_forward_pre_hook(show)
        try:
            for rows in hidden.split(BATCH):
                try:
                    self(rows)
                except _Stop:
                    continue
        finally:
            handle.remove()


def load(folder: Path) -> Any:
    """Load transformers' model of a checkpoint, in a dtype that holds all of its weights, whatever config.json says.

    Raises:
        ModelError: transformers does not know it or cannot load it.
    """
    from transformers import AutoModelForCausalLM

    dtypes = {STORED_DTYPES[each.dtype] for each in stored_tensors(folder).values() if each.dtype in STORED_DTYPES}
    dtype = reduce(torch.promote_types, dtypes) if dtypes else torch.float32
    with _named(folder):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, weights_only=True)
    return model.eval().requires_grad_(False)


def load_on_meta(folder: Path) -> Any:
    """Return the same model, to look at its layers: it takes no time and no memory. Errors are as in `load`."""
    from transformers import AutoConfig, AutoModelForCausalLM

    with _named(folder), torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))


def renamed(folder: Path, stored: Mapping[str, StoredTensor]) -> Callable[[str], str]:
    """Return a function from a tensor's name in a checkpoint to its name in transformers' model.

    Args:
        stored: the checkpoint's tensors.
    """
    raw = read_json(folder / "config.json")
    if not is_own(architecture_of(raw)):
        return str
    return renaming(stored, raw.get("tie_word_embeddings") is True)


def named_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Return a checkpoint's tensors by their names in transformers' model. Errors as in `stored_tensors`."""
    stored = stored_tensors(folder)
    rename = renamed(folder, stored)
    return {rename(name): tensor for name, tensor in stored.items()}


def blocks_of(model: Any, stored: Mapping[str, StoredTensor]) -> list[DecoderBlock]:
    """Return a model's blocks.

    Args:
        stored: the tensors of its checkpoint, by the model's names.

    Raises:
        ModelError: they are not made of linear layers, or of other tensors than the checkpoint's; names the first.
    """
    name, num_layers = type(model).__name__, model.config.get_text_config().num_hidden_layers
    lists = [
        (path, module)
        for path, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == num_layers
    ]
    if not lists:
        raise ModelError(f"{name} cannot be quantized: it has no list of its {num_layers} blocks")
    path, modules = lists[0]
    blocks = [DecoderBlock(f"{path}.{index}", module) for index, module in enumerate(modules)]
    for block in blocks:
        for inner, module in block.module.named_modules():
            large = [key for key, each in module.named_parameters(recurse=False) if each.dim() > 1]
            if large and not isinstance(module, nn.Linear):
                kind = type(module).__name__
                raise ModelError(
                    f"{name} cannot be quantized: {block.name}.{inner}.{large[0]} belongs to a {kind}, and only "
                    "weights of plain linear layers (nn.Linear) are"
                )
        for inner, _ in block.module.named_parameters():
            found = stored.get(f"{block.name}.{inner}")
            if found is None:
                raise ModelError(f"{name} cannot be quantized: its checkpoint has no {block.name}.{inner}")
            if found.dtype not in STORED_DTYPES:
                raise ModelError(
                    f"{name} cannot be quantized: {block.name}.{inner} is {found.dtype}, not an unquantized weight"
                )
    return blocks


@torch.no_grad()
def enter(model: Any, blocks: list[DecoderBlock], rows: torch.Tensor) -> torch.Tensor:
    """Return what the first block gets, [num_rows, seq_len, hidden_size] float32; and what each is called with besides.

    No block runs: each is replaced by one that notes its arguments. What else there is becomes float32, too: positions
    lose much in fewer bits. Only the embedding stays as it is, which is large.

    Args:
        rows: [num_rows, seq_len] token ids.
    """
    arrived: list[torch.Tensor] = []

    def note(block: DecoderBlock) -> Callable[..., torch.Tensor]:
        def forward(hidden: torch.Tensor, *positional: Any, **others: Any) -> torch.Tensor:
            if positional:
                raise ModelError(f"{type(model).__name__} cannot be quantized: its blocks are called by position")
            block.others = others
            if block is blocks[0]:
                arrived.append(hidden)
            if block is blocks[-1]:
                raise _Stop
            return hidden

        return forward

    embedding = model.get_input_embeddings()
    apart = {embedding, *(module for block in blocks for module in block.module.modules())}
    for module in model.base_model.modules():
        if module not in apart:
            for parameter in module.parameters(recurse=False):
                parameter.data = parameter.data.float()
    for block in blocks:
        block.module.forward = note(block)
    try:
        for row in rows:
            try:
                model.base_model(inputs_embeds=embedding(row[None]).float(), use_cache=False)
            except _Stop:
                continue
    finally:
        for block in blocks:
            del block.module.forward
    return torch.cat(arrived)


@contextmanager
def _named(folder: Path) -> Iterator[None]:
    """Turn whatever transformers raises into one line."""
    try:
        yield
    except Exception as error:
        reason = str(error).partition("\n")[0]
        raise ModelError(f"{folder} cannot be loaded with transformers: {reason}") from error


def _on(value: Any, device: str) -> Any:
    """Return a value with all tensors in it on a device."""
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, dict):
        return {key: _on(each, device) for key, each in value.items()}
    if isinstance(value, tuple):
        return tuple(_on(each, device) for each in value)
    return value


class _Stop(Exception):
    """Stop the model: what was to be seen was seen."""
