"""A kernel's first launch is noticed where it must not happen: by what it loads, and by what it keeps."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from triton import knobs

from teachllm_kernels.first_launch import (
    FirstLaunchError,
    kept,
    observing_first_launches,
    refusing_first_launches,
)

CPU = torch.device("cpu")


def launch_first() -> None:
    """Do as Triton does at a kernel's first launch."""
    if knobs.compilation.listener is not None:
        knobs.compilation.listener(src=SimpleNamespace(name="_pick"), cache_hit=True)


@pytest.fixture
def heard() -> Iterator[list[Any]]:
    """What a listener of the user's hears."""
    heard: list[Any] = []
    before = knobs.compilation.listener
    knobs.compilation.listener = lambda *, src, **_: heard.append(src.name)
    yield heard
    knobs.compilation.listener = before


def test_a_first_launch_raises_inside_and_others_hear_of_it_as_before(heard: list[Any]) -> None:
    with pytest.raises(FirstLaunchError, match="_pick was launched for the first time"), refusing_first_launches():
        launch_first()
    launch_first()
    assert heard == ["_pick", "_pick"]


def test_other_threads_launch_what_they_like(heard: list[Any]) -> None:
    with refusing_first_launches():
        other = threading.Thread(target=launch_first)
        other.start()
        other.join()
    assert heard == ["_pick"]


def test_a_first_launch_is_observed_and_others_hear_of_it_as_before(heard: list[Any]) -> None:
    observed: list[tuple[str, bool]] = []
    with observing_first_launches(lambda *launch: observed.append(launch)):
        launch_first()
        with pytest.raises(FirstLaunchError), refusing_first_launches():
            launch_first()
    launch_first()
    assert observed == [("_pick", True)] * 2 and heard == ["_pick"] * 3


def test_a_tensor_that_is_kept_is_made_once_and_not_while_a_graph_is_recorded() -> None:
    made = kept(lambda device: torch.zeros(3, device=device))
    with refusing_first_launches(), pytest.raises(FirstLaunchError, match="would make a tensor that it keeps"):
        made(CPU)
    tensor = made(CPU)
    with refusing_first_launches():
        assert made(CPU) is tensor


def test_contexts_that_overlap_in_any_order_leave_nothing_behind(heard: list[Any]) -> None:
    before, seen = knobs.compilation.listener, list[str]()
    first, second = refusing_first_launches(), observing_first_launches(lambda name, is_cached: seen.append(name))
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    launch_first()
    second.__exit__(None, None, None)
    launch_first()
    assert knobs.compilation.listener is before
    assert (heard, seen) == (["_pick", "_pick"], ["_pick"])
