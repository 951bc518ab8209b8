"""Which parameters of a request are on the device, in which column, and what its row holds.

The columns come from `SamplingParams`: every parameter that a stage of the sampler reads has one, of float32 or int64
as its default is. A few numbers of the request itself are beside them. The columns that kernels read come first, see
`teachllm_kernels/sampling/parameter_table.py`; values are placed by their names.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from teachllm.core.scheduler_output import NewRow
from teachllm.sampling_params import DEFAULTS, PARAMETERS, SamplingParams
from teachllm_kernels.sampling.parameter_table import FLOAT_COLUMNS, INT_COLUMNS, ParameterTable

# The parameters of some rows, gathered: {column: [num_rows] float32 or int64}.
Parameters = Mapping[str, torch.Tensor]

_SIGN = 1 << 63
# What a request knows beside its parameters; its seed is the parameter's, or the engine has drawn it.
_OF_THE_REQUEST = ("seed", "child_index", "num_prompt_tokens", "is_filtered")


def _columns(read_by_kernels: tuple[str, ...], names: Iterable[str]) -> tuple[str, ...]:
    others = [name for name in names if name not in read_by_kernels]
    return (*read_by_kernels, *others)


_STAGED = [name for name, spec in PARAMETERS.items() if spec.stage is not None]
FLOATS = _columns(FLOAT_COLUMNS, (name for name in _STAGED if isinstance(DEFAULTS[name], float)))
INTS = _columns(INT_COLUMNS, (*_OF_THE_REQUEST, *(name for name in _STAGED if isinstance(DEFAULTS[name], int))))


def values_of(new_row: NewRow, vocab_size: int) -> dict[str, float]:
    """Return what a request's row of the table holds, by column."""
    params = new_row.sampling_params
    return {name: getattr(params, name) for name in _STAGED} | {
        "temperature": 0.0 if params.greedy else params.temperature,  # what is all but 0 is greedy beside others, too
        "top_k": params.num_candidates(vocab_size),
        "is_filtered": params.has_filter(vocab_size),
        "seed": (new_row.seed + _SIGN) % (2 * _SIGN) - _SIGN,  # the same 64 bits, read as signed
        "child_index": new_row.child_index,
        "num_prompt_tokens": new_row.num_prompt_tokens,
    }


def parameters_of(asked: Sequence[SamplingParams], vocab_size: int) -> Parameters:
    """Return the parameters of requests that are in no row of a table, on the host."""
    filled = DeviceParameters(len(asked), torch.device("cpu"))
    for row, params in enumerate(asked):
        filled.write(row, values_of(NewRow([], 0, params, 0, 0, frozenset()), vocab_size))
    filled.send()
    return filled.gather(torch.arange(len(asked)))


class DeviceParameters:
    """Keep the table on the device, and the host's copy, in which rows are written.

    Attributes:
        table: on the device, for kernels.
    """

    def __init__(self, max_num_rows: int, device: torch.device) -> None:
        self._floats = torch.zeros((max_num_rows, len(FLOATS)), dtype=torch.float32)
        self._ints = torch.zeros((max_num_rows, len(INTS)), dtype=torch.int64)
        self.table = ParameterTable(self._floats.to(device, copy=True), self._ints.to(device, copy=True))

    def write(self, row: int, values: Mapping[str, float]) -> None:
        """Write a row on the host; `send` brings it to the device."""
        self._floats.numpy()[row] = [values[name] for name in FLOATS]
        self._ints.numpy()[row] = [values[name] for name in INTS]

    def send(self) -> None:
        """Copy the table to the device whole: two copies, however many rows were written."""
        for there, here in ((self.table.floats, self._floats), (self.table.ints, self._ints)):
            # The host does not wait: the GPU reads pinned memory when its stream reaches the copy.
            there.copy_(here.pin_memory() if there.is_cuda else here, non_blocking=True)

    def gather(self, rows: torch.Tensor) -> Parameters:
        """Return the parameters of these request rows."""
        floats = zip(FLOATS, self.table.floats[rows].unbind(1), strict=True)
        ints = zip(INTS, self.table.ints[rows].unbind(1), strict=True)
        return dict([*floats, *ints])

    @property
    def num_prompt_tokens(self) -> torch.Tensor:
        """Return [max_num_rows] int64, on the device: the prompt length of each row's request."""
        return self.table.ints[:, INTS.index("num_prompt_tokens")]
