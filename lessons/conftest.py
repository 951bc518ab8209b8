"""Notebooks run on the project beside them, whatever else is installed, and on one thread as all tests do.

`make test` executes two of them; `make test-thorough` executes all. A notebook that is named is always executed.
"""

from __future__ import annotations

import os
from pathlib import Path

from tests.thorough import THOROUGH

_ROOT = Path(__file__).resolve().parents[1]
_WINGS = [str(_ROOT), *(str(_ROOT / wing) for wing in ("kernels", "cli", "webui", "lessons"))]
os.environ["PYTHONPATH"] = os.pathsep.join([*_WINGS, *filter(None, [os.environ.get("PYTHONPATH")])])
os.environ["OMP_NUM_THREADS"] = "1"

_USUAL = ("00_first_token.ipynb", "05_prefix_caching.ipynb")  # the shortest; the second runs a planted fault
collect_ignore = [path.name for path in Path(__file__).parent.glob("*.ipynb") if not (THOROUGH or path.name in _USUAL)]
