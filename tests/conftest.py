"""What every test shares: one thread, Hypothesis without a deadline, GPU tests that say why they are skipped."""

from __future__ import annotations

import gc
import os
import sys
import tempfile
from collections.abc import Generator

# No test reads the user's ceilings, or leaves some there.
os.environ["TEACHLLM_CACHE"] = os.path.join(tempfile.gettempdir(), f"teachllm-cache-{os.getpid()}")
os.environ["OMP_NUM_THREADS"] = "1"  # tiny tensors gain nothing from a second thread
if not os.path.exists("/dev/nvidiactl"):
    os.environ["TRITON_INTERPRET"] = "1"  # without a GPU kernels are interpreted; read when Triton is imported

import pytest
from hypothesis import HealthCheck, settings

from tests import ready_children
from tests.thorough import times

if sys.platform == "linux":
    ready_children.install()

settings.register_profile(
    "teachllm",
    max_examples=times(60, 500),
    deadline=None,  # the first example pays for imports
    print_blob=True,  # a failure can be played again
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("teachllm")


def pytest_configure(config: pytest.Config) -> None:
    if sys.platform == "linux" and config.pluginmanager.hasplugin("nbmake"):
        ready_children.install_kernels()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if not on_gpu:
        return
    import torch

    if not torch.cuda.is_available():
        for item in on_gpu:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device, and torch sees none"))


@pytest.hookimpl(optionalhook=True, wrapper=True)
def pytest_xdist_auto_num_workers() -> Generator[None, int, int]:
    """One more than there are processors: whoever has started a program, or a browser, waits for it."""
    return 1 + (yield)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Modules of all tests, and what they import, stay: no collection of garbage need look at them."""
    gc.disable()
    found = yield
    gc.enable()
    gc.collect()
    gc.freeze()
    return found


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Where kernels are interpreted, quickly; whether they are is known once Triton has been imported."""
    if "triton.runtime.interpreter" in sys.modules and os.environ.get("TRITON_INTERPRET") == "1":
        from tests.kernels.quick_interpreter import quicken

        quicken()
    if "tests.processes" in sys.modules:  # where a test counts what is open
        ready_children.start_nursery()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """What else could have been tested here, said where it is read."""
    skipped = terminalreporter.stats.get("skipped", [])
    if num_pages := sum("no Chromium" in str(report.longrepr) for report in skipped):
        terminalreporter.write_line(
            f"{num_pages} tests of the page were skipped: no Chromium (apt-get install chromium)"
        )
