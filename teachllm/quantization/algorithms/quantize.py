"""Quantizing a checkpoint: block by block, and out into a folder.

Each block sees what the quantized blocks before it put out, so that what is rounded later can make up for what was
rounded before.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from teachllm.checkpoint.files import find_folder, quantization_config, read_json, stored_tensors
from teachllm.errors import ModelError
from teachllm.layers.weights.quantized_weights import GroupedWeight, Quantized, ScaledWeight
from teachllm.models.registry import architecture_of, family_of, is_own
from teachllm.quantization.algorithms import blocks, folding, methods, write
from teachllm.quantization.algorithms.blocks import DecoderBlock
from teachllm.quantization.algorithms.recipe import Recipe
from teachllm.quantization.algorithms.texts import calibration_rows, read_tokenizer
from teachllm.quantization.algorithms.write import Made

Progress = Callable[[int, int], None]


def quantize_model(
    model: str,
    out: Path,
    recipe: Recipe,
    progress: Progress = lambda done, total: None,
    device: str = "cpu",
    for_other_engines: bool = False,
) -> Recipe:
    """Write a quantized checkpoint.

    Args:
        model: "teachlm", a folder, or a hub id.
        out: a folder that is empty or not there.
        progress: called with (percent done, 100).
        device: where blocks are worked on, one at a time.
        for_other_engines: also write what this engine does not run.

    Returns:
        The recipe, with what `check` chose.

    Raises:
        ValueError: the model, the folder, the text or a setting will not do, or weights are not finite; one line says
            why.
    """
    write.check_empty(out)
    [recipe] = check(model, [recipe], for_other_engines)
    write.make_folder(out)
    folder = find_folder(model)
    write.write_checkpoint(folder, out, recipe, quantize_weights(folder, recipe, progress, device))
    return recipe


def check(model: str, recipes: Sequence[Recipe], for_other_engines: bool | None = False) -> list[Recipe]:
    """Refuse, before any weight is read, what cannot be quantized, and choose the group size where none is given.

    Args:
        model: as in `quantize_model`.
        recipes: all that look at a text look at the same one.
        for_other_engines: as in `quantize_model`; None: this engine measures what is made.

    Returns:
        The recipes, each with what was chosen.

    Raises:
        ValueError: of the checkpoint, a calibration text, or a layer that a recipe's format cannot hold.
    """
    folder = find_folder(model)
    check_unquantized(folder)
    raw = read_json(folder / "config.json")
    architecture = architecture_of(raw)
    is_taken = is_own(architecture) and family_of(architecture).parse(raw).experts is None
    if not is_taken and not for_other_engines:
        cannot = f"{architecture} takes no quantized weights in this engine"
        if for_other_engines is None:
            raise ModelError(
                f"{cannot}, so there is nothing to measure: take a model of this project's own code, without experts"
            )
        raise ModelError(f"{cannot}: add --for-other-engines to write it for those that do")
    layers = [
        (f"{block.name}.{name}", layer.out_features, layer.in_features)
        for block in blocks.blocks_of(blocks.load_on_meta(folder), blocks.named_tensors(folder))
        for name, layer in block.linears().items()
    ]
    fitted = [recipe.fitted(layers) for recipe in recipes]
    for recipe in fitted:
        for layer in layers:
            recipe.check_layer(*layer)
    smaller = next((each for each, given in zip(fitted, recipes, strict=True) if each.grid != given.grid), None)
    if smaller is not None:
        warnings.warn(
            f"groups of {smaller.grid.group_size}, the largest usual ones that divide the inputs of every layer",
            stacklevel=2,
        )
    for recipe in [recipe for recipe in fitted if recipe.needs_text][:1]:
        _rows(folder, recipe)
    return fitted


def check_unquantized(folder: Path) -> None:
    """Refuse what is not an unquantized checkpoint.

    Raises:
        ModelError: it is quantized already, or has no safetensors.
    """
    config = quantization_config(read_json(folder / "config.json"), folder)
    if config is not None:
        method = config.text("quant_method", "unnamed")
        raise ModelError(f"{folder} is quantized already ({method}): give the checkpoint that it was made of")
    if not stored_tensors(folder):
        raise ModelError(f"{folder} has no .safetensors file: convert its weights to safetensors first")


def quantize_weights(
    folder: Path, recipe: Recipe, progress: Progress = lambda done, total: None, device: str = "cpu"
) -> Made:
    """Quantize in memory a model that `check` lets pass. Arguments are as in `quantize_model`."""
    stored, model = blocks.named_tensors(folder), blocks.load(folder)
    parts, text = blocks.blocks_of(model, stored), None
    if recipe.needs_text:
        hidden = blocks.enter(model, parts, _rows(folder, recipe)).to(device)
        text = _Text(hidden, hidden if recipe.method == "autoround" else None)
    made = Made(parts[0].name.rpartition(".")[0])
    for index, block in enumerate(parts):
        stored_dtypes = {
            name: blocks.STORED_DTYPES[stored[f"{block.name}.{name}"].dtype]
            for name, _ in block.module.named_parameters()
        }
        block.to(device, torch.float32)
        _check_finite(block)
        before = {name: tensor.clone() for name, tensor in block.module.named_parameters() if tensor.dim() == 1}
        task = methods.Task(recipe, block, stored_dtypes, _percent(progress, index, len(parts)))
        quantized = methods.nearest(task) if text is None else text.through(task)
        made.weights |= {f"{block.name}.{name}": _on_cpu(each) for name, each in quantized.items()}
        made.changed |= {
            f"{block.name}.{name}": tensor.cpu()
            for name, tensor in block.module.named_parameters()
            if name in before and not torch.equal(tensor, before[name])
        }
        block.module.to("meta")  # its weights are no longer needed
    return made


def _rows(folder: Path, recipe: Recipe) -> torch.Tensor:
    """Return the token ids, [num_samples, seq_len]."""
    return calibration_rows(recipe.calibration, read_tokenizer(folder), recipe.num_samples, recipe.seq_len)


@dataclass
class _Text:
    """A calibration text on its way through the blocks.

    Attributes:
        hidden: [num_rows, seq_len, hidden_size], what the next block gets.
        unrounded: what it would get if nothing were quantized; None: the method does not ask for it.
    """

    hidden: torch.Tensor
    unrounded: torch.Tensor | None

    def through(self, task: methods.Task) -> dict[str, Quantized]:
        """Quantize a block, and run the text through it."""
        block = task.block
        if self.unrounded is not None:
            self.unrounded = block.run(self.unrounded)
        if not all(bool(each.isfinite().all()) for each in (self.hidden, self.unrounded) if each is not None):
            raise ModelError(methods.OVERFLOW.format(block.name))
        groups = _groups(block, self.hidden[:1], task.recipe.scales_inputs)
        task = replace(task, groups=groups, hidden=self.hidden, wanted=self.unrounded)
        quantized = methods.method_of(task.recipe)(task)
        methods.install(block, quantized)
        self.hidden = block.run(self.hidden)
        return quantized


def _check_finite(block: DecoderBlock) -> None:
    for name, tensor in block.module.named_parameters():
        if not bool(tensor.isfinite().all()):
            raise ModelError(f"{block.name}.{name} holds infinities or NaN: download the checkpoint again")


def _groups(block: DecoderBlock, row: torch.Tensor, with_sources: bool) -> list[folding.LayerGroup]:
    """Return the block's groups; raise ModelError if some linear layers do not run for every text."""
    groups = folding.groups_of(block, row) if with_sources else folding.sharing(block, row)
    idle = block.linears().keys() - {name for group in groups for name in group.names}
    if idle:
        raise ModelError(
            f"{block.name}.{min(idle)} does not run for every token, so calibration may miss it: "
            "use --method int8, fp8 or rtn"
        )
    return groups


def _percent(progress: Progress, index: int, num_blocks: int) -> Callable[[float], None]:
    """Convert parts of a block, 0 to 1, to percent of all."""
    done = float(index)

    def more(part: float) -> None:
        nonlocal done
        done += part
        progress(round(100 * done / num_blocks), 100)

    return more


def _on_cpu(quantized: Quantized) -> Quantized:
    if isinstance(quantized, ScaledWeight):
        return ScaledWeight(quantized.qweight.cpu(), quantized.scales.cpu(), quantized.activations)
    zeros, index = (None if each is None else each.cpu() for each in (quantized.zeros, quantized.group_index))
    return GroupedWeight(quantized.qweight.cpu(), quantized.scales.cpu(), zeros, quantized.bits, index)
