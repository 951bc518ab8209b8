"""Notebooks run on the project beside them, whatever else is installed, and on one thread as all tests do."""

from __future__ import annotations

import os
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[1]
_WINGS = [str(_ROOT), *(str(_ROOT / wing) for wing in ("kernels", "cli", "webui", "lessons"))]
os.environ["PYTHONPATH"] = os.pathsep.join([*_WINGS, *filter(None, [os.environ.get("PYTHONPATH")])])
os.environ["OMP_NUM_THREADS"] = "1"
