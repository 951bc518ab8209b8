"""What has too little contrast on a page, by `contrast.js`, which runs in it before its own scripts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

INSTRUMENT = (Path(__file__).parent / "contrast.js").read_text(encoding="utf-8")


def failing(found: list[dict[str, Any]]) -> list[str]:
    """Return what has too little contrast, each once."""
    bad = [each for each in found if each["ratio"] < each["needed"]]
    return sorted({f"{each['ratio']:.2f} of {each['needed']}: {each['what']}" for each in bad})
