"""Establish what attention a model of transformers asks for, by running it once without data.

config.json does not say it: a key like `sliding_window` may have no effect in the model's code, and a layer may call
attention twice. So the model runs two tokens on the meta device, where tensors have shapes and no values, with two
functions of ours in transformers' tables. One stands for attention and notes each call. The other stands for the masks
that the model makes, and notes which tokens each mask lets a query see.

Source: https://huggingface.co/docs/transformers/attention_interface
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from teachllm.errors import ModelError
from teachllm.models.registry import supported

IMPLEMENTATION = "teachllm_rehearsal"
# What models pass to attention besides q, k, v and the mask, and what has no effect here. That a layer has a window is
# in its mask, if it is so.
_HARMLESS = {
    *("dropout", "position_ids", "position_embeddings", "use_cache", "output_attentions", "output_hidden_states"),
    *("sliding_window", "softcap", "scaling", "is_causal"),
}
_QUERIES = (0, 1, 7, 100, 1 << 13, (1 << 17) + 1)  # positions at which a mask is looked at
# Of a vector's length, by how exact its numbers are; experts get other numbers of tokens, which rounds otherwise.
_TOLERANCE = {torch.float32: 1e-4}
_COARSE = 0.01
_WINDOW = "teachllm_window"  # attribute of a mask
_REHEARSAL = "teachllm_rehearsal"  # attribute of a layer's attention; not all models hand arguments down to it


@dataclass(slots=True)
class Rehearsal:
    """Note what a model asks for.

    Attributes:
        kv_shape: of keys and of values: number of heads, head size. None until a layer has called attention.
        windows: by layer, as `Shape.windows`; of some layers only, if the code looks at values that it lacks.
    """

    kv_shape: tuple[int, ...] | None = None
    windows: dict[int, int | None] = field(default_factory=dict)

    def __str__(self) -> str:
        heads = "no KV heads" if self.kv_shape is None else "{} KV heads of size {}".format(*self.kv_shape)
        return f"{heads} and windows of {', '.join(map(str, self.windows.values()))} tokens"


def register() -> None:
    """Put both functions into transformers' tables, under IMPLEMENTATION."""
    AttentionInterface.register(IMPLEMENTATION, _attention)
    AttentionMaskInterface.register(IMPLEMENTATION, _mask)


def rehearse(model: Any, num_layers: int) -> Rehearsal:
    """Run two tokens and return what attention was asked for.

    Args:
        model: made with IMPLEMENTATION, on any device.

    Raises:
        ModelError: a layer asks for what paged attention does not compute, or asks twice or never; or the model fails,
            on a device where there are values.
    """
    rehearsal, device = Rehearsal(), next(model.parameters()).device
    ids = torch.arange(2, device=device)
    with _failures_said(model):
        try:
            _run(model, rehearsal, ids, ids)
        except ModelError:
            raise
        except Exception:
            if device.type == "meta":  # experts and some kinds of rope look at values
                return rehearsal
            raise
    if missing := [layer for layer in range(num_layers) if layer not in rehearsal.windows]:
        raise _unsupported(model, f"layer {missing[0]} does not use transformers' attention interface")
    return rehearsal


def _run(model: Any, rehearsal: Rehearsal, ids: torch.Tensor, positions: torch.Tensor | None) -> torch.Tensor:
    """Run [num_tokens] ids at their positions, note the calls, and return [num_tokens, hidden_size].

    Args:
        positions: [num_tokens]; with None the model numbers the tokens itself.
    """
    for module in attention_modules(model):
        setattr(module, _REHEARSAL, rehearsal)
    row, places = ids.unsqueeze(0), None if positions is None else positions.unsqueeze(0)
    with torch.inference_mode():
        output = model.base_model(
            input_ids=row, position_ids=places, attention_mask=torch.ones_like(row), use_cache=False
        )
    hidden: torch.Tensor = output.last_hidden_state[0]
    return hidden


def check_tokens_apart(model: Any) -> None:
    """Refuse code in which a token meets others elsewhere than in attention, or that counts positions otherwise.

    A step's tokens are of many requests, in one row. With attention that looks at nothing but the token itself, a token
    at a position must come out the same wherever it stands in the row, and positions must begin at 0.

    Args:
        model: as in `rehearse`, with its weights.

    Raises:
        ModelError: it does not.
    """
    parameter = next(model.parameters())
    order = torch.tensor([2, 0, 3, 1], device=parameter.device)
    ids, positions = torch.arange(4, device=parameter.device), order.flip(0)
    with _failures_said(model):
        apart = _run(model, Rehearsal(), ids, positions)[order], _run(model, Rehearsal(), ids[order], positions[order])
        from_0 = _run(model, Rehearsal(), ids, None), _run(model, Rehearsal(), ids, ids)
    tolerance = _TOLERANCE.get(parameter.dtype, _COARSE)
    for expected, found in (apart, from_0):
        error, length = float((found.float() - expected.float()).norm()), float(expected.float().norm())
        if not error <= tolerance * length:  # nor if one of them is no number
            raise _unsupported(
                model, "tokens of a step meet elsewhere than in attention, or it counts positions by itself"
            )


@contextlib.contextmanager
def _failures_said(model: Any) -> Iterator[None]:
    """Say in one line what the model's own code raises.

    Raises:
        ModelError: whatever the block raises.
    """
    try:
        yield
    except ModelError as error:
        raise _unsupported(model, str(error)) from error
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise _unsupported(model, f"its code fails with the values of config.json ({reason})") from error


def _unsupported(model: Any, why: str) -> ModelError:
    return ModelError(f"{type(model).__name__} is not supported: {why}; {supported()}")


def attention_modules(model: nn.Module) -> list[Any]:
    """Return the modules that call attention: those with `layer_idx` and `is_causal`."""
    return [module for module in model.modules() if hasattr(module, "is_causal") and hasattr(module, "layer_idx")]


def check_call(module: nn.Module, key: torch.Tensor, value: torch.Tensor, shape: tuple[int, ...], others: Any) -> None:
    """Refuse what paged attention does not compute.

    Args:
        module: the layer's attention.
        key, value: [1, num_heads, num_tokens, head_size].
        shape: number of heads and head size that the cache has.
        others: further keyword arguments of the call.

    Raises:
        ModelError: names them.
    """
    given = (name for name, value in others.items() if value is not None and value is not False)
    unknown = [name for name in given if name not in _HARMLESS]
    if key.shape[1::2] != shape or value.shape != key.shape:
        unknown.append(f"K of {list(key.shape)} and V of {list(value.shape)}")
    if unknown:
        raise ModelError(f"{type(module).__name__} passes {', '.join(unknown)} to attention")


def layer_index(module: nn.Module, called: Any) -> int:
    """Return which layer calls attention.

    Args:
        called: indices of the layers that have called it in this step.

    Raises:
        ModelError: the layer calls it a second time, or does not know its index.
    """
    index = getattr(module, "layer_idx", None)
    name = type(module).__name__
    if not isinstance(index, int):
        raise ModelError(f"{name} does not say which layer it is of")
    if index in called:
        raise ModelError(f"{name} calls attention twice in layer {index}, which has one KV cache")
    return index


def _attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Note a call, and return what depends on each token alone: [1, num_tokens, num_heads, head_size]."""
    name = type(module).__name__
    rehearsal: Rehearsal = getattr(module, _REHEARSAL)
    index = layer_index(module, rehearsal.windows)
    rehearsal.kv_shape = rehearsal.kv_shape or tuple(key.shape[1::2])
    check_call(module, key, value, rehearsal.kv_shape, others)
    window = getattr(attention_mask, _WINDOW, ...)
    if window is ...:
        raise ModelError(f"{name} has masks that transformers' functions did not make")
    rehearsal.windows[index] = window
    repeated = query.shape[1] // key.shape[1]
    mixed = query + (key + value).repeat_interleave(repeated, dim=1)  # of the token itself, and all that it depends on
    return mixed.transpose(1, 2), None


def _mask(
    *, batch_size: int, q_length: int, kv_length: int, mask_function: Callable[..., Any], device: Any, **others: Any
) -> torch.Tensor:
    """Return a mask without content that says which window it is."""
    mask = torch.empty(batch_size, 1, q_length, kv_length, dtype=torch.bool, device=device)
    setattr(mask, _WINDOW, _window_of(mask_function))
    return mask


def _window_of(mask_function: Callable[..., Any]) -> int | None:
    """Return how many tokens back a mask looks, the query's own included; None: to the first one.

    Args:
        mask_function: (sequence, head, query's position, key's position) -> whether the query sees the key.

    Raises:
        ModelError: it is no window before the query.
    """
    nothing, counts = torch.tensor(0), []
    for position in _QUERIES:
        keys = torch.arange(position + 2)
        try:
            seen = torch.as_tensor(mask_function(nothing, nothing, torch.tensor(position), keys)).expand(len(keys))
            count = int(seen.sum())
            is_window = bool(seen[position + 1 - count : position + 1].all())
        except Exception as error:
            raise ModelError(f"its masks depend on more than positions ({str(error).splitlines()[0]})") from error
        if not is_window:
            raise ModelError("its masks let a token see others than the last ones before it")
        counts.append(count)
    window = counts[-1]
    if counts != [min(position + 1, window) for position in _QUERIES]:
        raise ModelError("its masks let tokens see different numbers of tokens before them")
    return None if window > _QUERIES[-1] else window
