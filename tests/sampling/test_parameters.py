"""SamplingParams is the list of parameters: what derives from it has every one of them, each in its place."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch

from teachllm import SamplingParams
from teachllm.core.scheduler_output import NewRow
from teachllm.sampling.device_parameters import FLOATS, INTS, DeviceParameters, parameters_of, values_of
from teachllm.sampling_params import DEFAULTS, FILTERS, PARAMETERS, PENALTIES
from teachllm_kernels.sampling import parameter_table
from tests.request_kinds import EXAMPLES, FILTER_VALUES, KINDS, MIXTURES, SAMPLING_KINDS, asking

VOCAB = 11


def test_every_parameter_has_an_example_and_a_kind_of_request() -> None:
    names = {field.name for field in fields(SamplingParams)}
    assert set(EXAMPLES) == names == {name for kind in KINDS.values() for name in kind}
    for name, value in EXAMPLES.items():
        assert getattr(SamplingParams(**{name: value}), name) == value != DEFAULTS[name]
    staged = {name for name, spec in PARAMETERS.items() if spec.stage is not None}
    for kinds in (SAMPLING_KINDS.values(), MIXTURES):
        assert staged <= {name for kind in kinds for name in kind}
    assert set(FILTER_VALUES) <= set(FILTERS)


def test_every_parameter_is_explained_and_every_number_has_a_range() -> None:
    for name, spec in PARAMETERS.items():
        assert f"\n        {name}: " in (SamplingParams.__doc__ or "")
        if isinstance(EXAMPLES[name], bool) or not isinstance(EXAMPLES[name], int | float) or name == "seed":
            continue
        bounds = spec.bounds
        assert bounds is not None, name
        for limit, outside in ((bounds.ge, -1), (bounds.gt, 0), (bounds.le, 1), (bounds.lt, 0)):
            if limit is not None:
                with pytest.raises(ValueError, match=rf"^{name}=.*: must be "):
                    SamplingParams(**{name: limit + outside})


def test_a_request_has_a_filter_or_a_penalty_as_soon_as_one_is_not_off() -> None:
    plain = SamplingParams()
    assert not plain.has_filter(VOCAB) and not plain.has_penalty
    for name in FILTERS:
        asked = replace(plain, **{name: EXAMPLES[name]})
        assert asked.has_filter(VOCAB) and not asked.has_penalty
        assert not replace(asked, temperature=0.0).has_filter(VOCAB)
    for name in PENALTIES:
        asked = replace(plain, **{name: EXAMPLES[name]})
        assert asked.has_penalty and not asked.has_filter(VOCAB)
    for top_k, num_candidates in ((-1, VOCAB), (0, VOCAB), (1, 1), (VOCAB - 1, VOCAB - 1), (VOCAB, VOCAB), (99, VOCAB)):
        params = SamplingParams(top_k=top_k)
        assert params.num_candidates(VOCAB) == num_candidates and params.has_filter(VOCAB) == (num_candidates < VOCAB)


@pytest.mark.parametrize("name", [name for name, spec in PARAMETERS.items() if spec.stage is not None])
def test_a_parameter_is_in_its_own_column_of_the_table_and_in_no_other(name: str) -> None:
    plain = parameters_of([SamplingParams()], VOCAB)
    asked = parameters_of([SamplingParams(**asking(name))], VOCAB)
    changed = {column for column in plain if not torch.equal(plain[column], asked[column])}
    assert changed == {name} | ({"is_filtered"} if name in FILTERS else set())
    assert asked[name].item() == pytest.approx(EXAMPLES[name])


def test_kernels_read_the_columns_that_the_host_writes() -> None:
    """The constants that kernels are compiled with, against a table whose cells are all different."""
    row = NewRow([], 21, SamplingParams(**asking("temperature", *FILTERS)), 31, 41, frozenset())
    made = DeviceParameters(3, torch.device("cpu"))
    made.write(1, values_of(row, VOCAB))
    made.send()
    halves = (("floats", parameter_table.FLOAT_COLUMNS, FLOATS), ("ints", parameter_table.INT_COLUMNS, INTS))
    for half, read, written in halves:
        assert written[: len(read)] == read and len(set(written)) == len(written)
        cells = getattr(made.table, half)[1]
        for name in read:
            column = getattr(parameter_table, name.upper())
            cell = cells[getattr(column, "value", column)]  # without Triton it is the number itself
            assert cell.item() == pytest.approx(float(values_of(row, VOCAB)[name]))
    assert set(FILTERS) <= {*parameter_table.FLOAT_COLUMNS, *parameter_table.INT_COLUMNS}


def test_a_seed_of_64_bits_is_read_as_signed_and_a_temperature_of_next_to_nothing_as_zero() -> None:
    for seed in (0, 5, 2**63 - 1, 2**63, 2**64 - 1):
        found = values_of(NewRow([], 0, SamplingParams(temperature=5e-6), 0, seed, frozenset()), VOCAB)
        assert -(2**63) <= found["seed"] < 2**63 and found["seed"] % 2**64 == seed
        assert found["temperature"] == 0.0
