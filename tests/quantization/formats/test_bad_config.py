"""Any value in quantization_config changes nothing, or is refused in one line that names file and key."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.checkpoint.mutations import ABSENT, Mutation, is_named, mutations, wrong_ones
from tests.checkpoints import make_checkpoint
from tests.quantization.format_checkpoints import FORMATS, generate, write_checkpoint
from tests.thorough import times

KEY = "quantization_config"
# Values that files of this kind have, and which the tensors of a file contradict if they are not its own.
OTHERS = [
    8,
    4,
    16,
    64,
    128,
    False,
    "int",
    "float",
    "channel",
    "tensor",
    "group",
    "block",
    "gptq",
    "awq",
    "fp8",
    "static",
    "token",
]
MAY_BE_MISSING = ("input_activations", "strategy", "weight_block_size")  # which means something else


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A checkpoint of each format."""
    plain = Path(make_checkpoint("llama2", tmp_path_factory.mktemp("plain")))
    found = {}
    for name in FORMATS:
        found[name] = tmp_path_factory.mktemp("quantized")
        write_checkpoint(name, plain, found[name])
    return found


def is_refusal(error: Exception, mutation: Mutation) -> bool:
    """Return whether an error says enough: a value that fits no tensor is named by the tensor."""
    words = str(error)
    return is_named(error, mutation) or ("tensor" in words and KEY in words and "\n" not in words)


def test_every_value_changes_nothing_or_is_refused_by_name(folders: dict[str, Path], tmp_path: Path) -> None:
    drawn = [each for each in mutations(folders, ["config.json"], 10**9) if each.path[0] == KEY]
    drawn = [each for each in drawn if each.path[-1] not in MAY_BE_MISSING or each.value not in (None, ABSENT)]
    drawn += [each._replace(value=value) for each in drawn[::13] for value in OTHERS]
    drawn = random.Random(0).sample(drawn, times(15, 200))
    expected = {name: generate(folders[name]) for name in {each.checkpoint for each in drawn}}
    wrong = wrong_ones(
        drawn, folders, tmp_path, generate, lambda _, mutation: expected[mutation.checkpoint], is_refusal
    )
    assert not wrong, wrong
