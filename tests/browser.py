"""A headless Chromium for the tests of pages and pictures."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from tests.waiting import HANG_SECONDS

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"]
_FLAGS += ["--disable-component-update", "--disable-sync"]


def find_chromium() -> str | None:
    return next((found for name in _NAMES if (found := shutil.which(name))), None)


def install_chromium() -> str | None:
    """On Debian, as root: what a fresh container of a continuous check is. One process does it, the others wait."""
    if shutil.which("apt-get") is None or os.geteuid() != 0:
        return None
    with FileLock(Path(tempfile.gettempdir()) / "teachllm-chromium.lock"):
        for command in (["apt-get", "update"], ["apt-get", "install", "--yes", "--no-install-recommends", "chromium"]):
            if find_chromium() is None:
                subprocess.run(command, capture_output=True, timeout=HANG_SECONDS, check=False)
        return find_chromium()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    path = find_chromium() or install_chromium()
    if path is None:
        assert os.environ.get("CI") != "true", "CI must have a Chromium: apt-get install chromium"
        pytest.skip("no Chromium: apt-get install chromium")
    sync_api = pytest.importorskip("playwright.sync_api", reason="no playwright: pip install 'teachllm[dev]'")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=_FLAGS)
        yield browser
        browser.close()
