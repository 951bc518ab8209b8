"""Any value in quantization_config changes nothing, or is refused in one line that names file and key."""

from __future__ import annotations

import random
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints import make_checkpoint
from tests.models.mutations import Mutation, is_named, mutated, mutations
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
MAY_BE_MISSING = ("input_activations", "strategy")  # which means something else


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A checkpoint of each format."""
    plain = Path(make_checkpoint("llama2", tmp_path_factory.mktemp("plain")))
    found = {}
    for name in FORMATS:
        found[name] = tmp_path_factory.mktemp("quantized")
        write_checkpoint(name, plain, found[name])
    return found


def verdict(folder: Path, mutation: Mutation, expected: Any) -> str | None:
    """Return what is wrong; None: nothing."""
    try:
        found = generate(folder)
    except ValueError as error:
        return None if is_named(error, mutation) or KEY in str(error) else f"refused without file and key: {error}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None if found == expected else f"{found} is not {expected}"


def test_every_value_changes_nothing_or_is_refused_by_name(folders: dict[str, Path], tmp_path: Path) -> None:
    wrong = []
    expected: dict[str, Any] = {}
    drawn = [each for each in mutations(folders, ["config.json"], 10**9) if each.path[0] == KEY]
    drawn = [each for each in drawn if each.path[-1] not in MAY_BE_MISSING or each.value is not None]
    drawn += [each._replace(value=value) for each in drawn[::13] for value in OTHERS]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for i, mutation in enumerate(random.Random(0).sample(drawn, times(15, 200))):
            name = mutation.checkpoint
            if name not in expected:
                expected[name] = generate(folders[name])
            folder = mutated(folders[name], mutation, tmp_path / str(i))
            if (why := verdict(folder, mutation, expected[name])) is not None:
                wrong.append(f"{mutation}: {why}")
            shutil.rmtree(folder)
    assert not wrong, "\n".join(wrong)
