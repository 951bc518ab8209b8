"""`teachllm info`: versions, devices, and where memory would go."""

from __future__ import annotations

import json
import platform
import sys
import types

import pytest

from teachllm import __version__


@pytest.fixture(autouse=True)
def described(monkeypatch):
    """The models that were asked about, in place of real memory tables."""
    asked = []
    module = types.ModuleType("teachllm.engine.info")

    def describe_model(config, input_len, output_len):
        asked.append((config, input_len, output_len))
        return [("weights", "12.0 MiB", "6.3 million parameters in float32"), ("KV per token", "[6] KiB", "K and V")]

    module.describe_model = describe_model
    monkeypatch.setitem(sys.modules, "teachllm.engine.info", module)
    return asked


def test_tables_name_versions_devices_and_every_row_of_memory(teachllm) -> None:
    result = teachllm("info")
    for text in (__version__, platform.python_version(), "torch", "triton", "transformers", "cpu", "threads"):
        assert text in result.stdout
    for text in ("teachlm", "weights", "12.0 MiB", "[6] KiB", "K and V"):
        assert text in result.stdout
    assert result.exit_code == 0


def test_json_holds_the_same(teachllm, described) -> None:
    found = json.loads(
        teachllm("info", "--json", "--model", "some/model", "--dtype", "float16", "--input-len", "64").stdout
    )
    assert found["versions"]["teachllm"] == __version__
    assert "threads" in found["devices"]["cpu"]
    assert found["name"] == "some/model"
    assert found["model"][0] == {
        "what": "weights",
        "amount": "12.0 MiB",
        "explanation": "6.3 million parameters in float32",
    }
    config, *lengths = described[0]
    assert (config.dtype, lengths) == ("float16", [64, None])
