"""Rotary embedding as a layer: a table of cosines and sines by position, and the ways to stretch it.

A model trained on short texts has never seen the angles of far positions. The scalings bring them back into the
range it knows: `linear` slows every channel down alike, `dynamic` raises the base as a text grows, `llama3` and
`yarn` slow only the channels whose wavelength is long compared with the texts of training.

Sources: Chen et al., "Extending Context Window of Large Language Models via Positional Interpolation", 2023; Peng
et al., "YaRN: Efficient Context Window Extension of Large Language Models", 2023; Llama 3.1's reference code.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import nn

from teachllm_kernels.attention.rotary import rotary_reference

SCALINGS = ("default", "linear", "dynamic", "llama3", "yarn")


@dataclass(frozen=True)
class RotaryConfig:
    """Describe how positions become angles.

    Attributes:
        theta: the base; channel i of a head turns by theta ** (-2 i / head_size) per position.
        scaling: one of SCALINGS.
        trained_len: `max_position_embeddings`, which `dynamic` starts to stretch at.
        parameters: the scaling's own settings, named as in config.json.
    """

    head_size: int
    theta: float = 10000.0
    scaling: str = "default"
    trained_len: int = 2048
    parameters: dict[str, float] = field(default_factory=dict)

    @property
    def context_len(self) -> int:
        """Return the longest sequence that the scaled model is meant for."""
        factor = self.parameters.get("factor", 1.0)
        if self.scaling in ("linear", "dynamic"):
            return int(self.trained_len * factor)
        if self.scaling == "yarn":
            return max(self.trained_len, int(self.parameters.get("original_max_position_embeddings", 0) * factor))
        return self.trained_len


class Rotary(nn.Module):
    """Tables for positions [0, max_len), looked up once per step and used by every layer."""

    cos: torch.Tensor
    signed_sin: torch.Tensor

    def __init__(self, config: RotaryConfig, max_len: int) -> None:
        super().__init__()
        cos, signed_sin = (torch.empty(max_len, 1, config.head_size) for _ in range(2))
        if not cos.is_meta:  # where PyTorch would take a second to load what it knows of such operations
            cos, signed_sin = _tables(config, max_len)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("signed_sin", signed_sin, persistent=False)

    def forward(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (cos, signed sin), each [num_tokens, 1, head_size], of positions, [num_tokens] int64."""
        return self.cos.index_select(0, positions), self.signed_sin.index_select(0, positions)

    @staticmethod
    def rotate(x: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """Turn x, [num_tokens, num_heads, head_size], by what `forward` returned."""
        return rotary_reference(x, *angles)


def _tables(config: RotaryConfig, max_len: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosines and signed sines of positions [0, max_len), each [max_len, 1, head_size], in the default dtype."""
    positions = torch.arange(max_len, dtype=torch.float32).unsqueeze(-1)
    angles = positions * inverse_frequencies(config, positions)  # [max_len, head_size / 2]
    cos, sin = angles.cos() * attention_factor(config), angles.sin() * attention_factor(config)
    # Float32 until here whatever the model's dtype: half precision cannot tell far positions apart.
    dtype = torch.get_default_dtype()
    return torch.cat((cos, cos), dim=-1).unsqueeze(1).to(dtype), torch.cat((-sin, sin), dim=-1).unsqueeze(1).to(dtype)


def inverse_frequencies(config: RotaryConfig, positions: torch.Tensor) -> torch.Tensor:
    """Return each channel pair's radians per position, [head_size / 2]; for `dynamic` [num_positions, head_size / 2].

    Args:
        positions: [num_positions, 1]; only `dynamic` looks at them.
    """
    exponents = torch.arange(0, config.head_size, 2, dtype=torch.float32) / config.head_size
    parameters = config.parameters
    frequencies = 1.0 / config.theta**exponents
    if config.scaling == "dynamic":
        # A token's angles depend on its own position alone, so they are the same however a prompt is chunked.
        growth = parameters["factor"] * (positions + 1) / config.trained_len - (parameters["factor"] - 1)
        theta = config.theta * growth.clamp(min=1.0) ** (config.head_size / (config.head_size - 2))
        return torch.where(growth > 1.0, 1.0 / theta**exponents, frequencies)
    if config.scaling == "linear":
        return frequencies / parameters["factor"]
    if config.scaling == "llama3":
        return _llama3(frequencies, parameters)
    if config.scaling == "yarn":
        return _yarn(frequencies, config)
    return frequencies


def attention_factor(config: RotaryConfig) -> float:
    """Return the factor by which YaRN multiplies cos and sin, which sharpens the softmax; 1.0 for all others."""
    if config.scaling != "yarn":
        return 1.0
    parameters = config.parameters
    given = parameters.get("attention_factor")
    if given is not None:
        return given

    def mscale(weight: float) -> float:
        return 0.1 * weight * math.log(parameters["factor"]) + 1.0 if parameters["factor"] > 1 else 1.0

    if parameters.get("mscale") and parameters.get("mscale_all_dim"):
        return mscale(parameters["mscale"]) / mscale(parameters["mscale_all_dim"])
    return mscale(1.0)


def _llama3(frequencies: torch.Tensor, parameters: dict[str, float]) -> torch.Tensor:
    """Channels that turned many times in training stay, those that turned rarely slow down, others lie between."""
    turns = parameters["original_max_position_embeddings"] / (2 * math.pi / frequencies)
    low, high = parameters["low_freq_factor"], parameters["high_freq_factor"]
    kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - kept) * frequencies / parameters["factor"] + kept * frequencies


def _yarn(frequencies: torch.Tensor, config: RotaryConfig) -> torch.Tensor:
    """As llama3, with the border drawn by channel number instead of wavelength."""
    parameters, size = config.parameters, config.head_size

    def channel(turns: float) -> float:
        """The (fractional) channel that turns so often in a text of the original length."""
        wavelength = parameters["original_max_position_embeddings"] / (turns * 2 * math.pi)
        return size * math.log(wavelength) / (2 * math.log(config.theta))

    low, high = channel(parameters.get("beta_fast") or 32.0), channel(parameters.get("beta_slow") or 1.0)
    if parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    if low == high:
        high += 0.001  # the ramp becomes a step
    slowed = ((torch.arange(size // 2, dtype=torch.float32) - low) / (high - low)).clamp(0.0, 1.0)
    return slowed * frequencies / parameters["factor"] + (1 - slowed) * frequencies
