"""What every test shares: one thread, Hypothesis without a deadline, GPU tests that say why they are skipped."""

from __future__ import annotations

import gc
import os
import signal
import tempfile

# No test reads the user's ceilings, or leaves some there.
os.environ["TEACHLLM_CACHE"] = os.path.join(tempfile.gettempdir(), f"teachllm-cache-{os.getpid()}")
os.environ["OMP_NUM_THREADS"] = "1"  # tiny tensors gain nothing from a second thread
if not os.path.exists("/dev/nvidiactl"):
    os.environ["TRITON_INTERPRET"] = "1"  # without a GPU kernels are interpreted; read when Triton is imported

import pytest
from hypothesis import HealthCheck, settings

from tests.browser import browser  # noqa: F401
from tests.budget import Budget
from tests.thorough import times

collect_ignore = ["other_clients"]  # `make test-clients` runs them

settings.register_profile(
    "teachllm",
    max_examples=times(40, 500),
    deadline=None,  # the first example pays for imports
    print_blob=True,  # a failure can be played again
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("teachllm")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--budget", action="store_true", help="print the CPU seconds of each folder beside its share")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Budget())
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell starts what runs in background
        signal.signal(signal.SIGINT, signal.default_int_handler)
    gc.disable()  # while modules are imported, which stay


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # Tests of the page wait for a browser. Each worker begins with a part of the list, and takes over what is left at
    # another's end: at the end both would wait, each for a browser of its own.
    items.sort(key=lambda item: "webui" not in item.path.parts)
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if not on_gpu:
        return
    import torch

    if not torch.cuda.is_available():
        for item in on_gpu:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device, and torch sees none"))


@pytest.fixture(autouse=True)
def starts_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, have this process's engines compile and record what they meet: a full start takes longer than a test.
    Those in processes of their own start as a user's do."""
    if not os.path.exists("/dev/nvidiactl"):
        return
    from teachllm.worker.gpu import gpu_model_runner
    from teachllm.worker.gpu.startup.compile_process import Compiling

    monkeypatch.setattr(gpu_model_runner, "start_compiling", lambda *engine: Compiling(None, None))
    monkeypatch.setattr(gpu_model_runner.GraphRunner, "record_known", lambda *known: None)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """What else could have been tested here, said where it is read."""
    skipped = terminalreporter.stats.get("skipped", [])
    if num_pages := sum("no Chromium" in str(report.longrepr) for report in skipped):
        terminalreporter.write_line(
            f"{num_pages} tests of the page were skipped: no Chromium (apt-get install chromium)"
        )
