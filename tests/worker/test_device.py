"""Which device a setting means."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch

from teachllm.worker import device as device_module
from teachllm.worker.device import select_device


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Old GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    return monkeypatch


def test_a_device_is_found_by_its_name_and_a_gpu_by_default(two_gpus: pytest.MonkeyPatch) -> None:
    assert select_device("cpu") == torch.device("cpu")
    assert select_device("auto") == torch.device("cuda")
    assert select_device("cuda") == torch.device("cuda")
    assert select_device("cuda:1") == torch.device("cuda:1")
    two_gpus.setattr(torch.cuda, "device_count", lambda: 0)
    assert select_device("auto") == torch.device("cpu")


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ("capability", "Old GPU has compute capability 7.5: the kernels need 8.0"),
        (
            "driver",
            r"PyTorch cannot use the GPU \(The NVIDIA driver on your system is too old \(found version 11040\)\)",
        ),
        ("triton", "need Triton: pip"),
        ("hip", "Old GPU is AMD's: the kernels are compiled for it, and were never run"),
    ],
)
def test_a_gpu_that_cannot_be_used_is_refused_or_passed_over_aloud(
    two_gpus: pytest.MonkeyPatch, changed: str, says: str
) -> None:
    if changed == "triton":
        two_gpus.setattr(device_module, "find_spec", lambda name: None)
    elif changed == "hip":
        two_gpus.setattr(torch.version, "hip", "6.4")
    elif changed == "driver":

        def refuse(device: torch.device) -> None:
            raise RuntimeError(
                "The NVIDIA driver on your system is too old (found version 11040). Please update.\nMore."
            )

        two_gpus.setattr(torch.cuda, "get_device_capability", refuse)
    else:
        two_gpus.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    with pytest.raises(ValueError, match=says):
        select_device("cuda")
    with pytest.warns(UserWarning, match=f"^running on the CPU: .*{says}"):
        assert select_device("auto") == torch.device("cpu")


def test_a_pytorch_for_cpus_does_not_pass_a_gpu_over_in_silence(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(ValueError, match=r"^device='cuda': this PyTorch is a build for CPUs"):
        select_device("cuda")
    monkeypatch.setattr(device_module, "_DRIVER", tmp_path)
    with pytest.warns(UserWarning, match="though there is a GPU: this PyTorch is a build for CPUs"):
        assert select_device("auto") == torch.device("cpu")
    monkeypatch.setattr(device_module, "_DRIVER", tmp_path / "none")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert select_device("auto") == torch.device("cpu")


@pytest.mark.parametrize("name", ["gpu", "cuda:x", "", "mps", "meta", "cuda:-1"])
def test_an_unknown_device_lists_those_there_are(name: str) -> None:
    with pytest.raises(ValueError, match=f"^device='{name}': use auto, cpu, cuda or cuda:N$"):
        select_device(name)


@pytest.mark.parametrize(("name", "count"), [("cuda", 0), ("cuda:0", 0), ("cuda:2", 2)])
def test_a_gpu_that_is_not_there_says_how_many_are(monkeypatch: pytest.MonkeyPatch, name: str, count: int) -> None:
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    with pytest.raises(ValueError, match=f"^device='{name}': this machine has {count} CUDA devices; use device=cpu$"):
        select_device(name)
