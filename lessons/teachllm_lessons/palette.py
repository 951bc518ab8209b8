"""Colours and labels of requests, the visualizer's own (`webui/teachllm_webui/view/palette.js`).

Colours are Okabe and Ito's and Paul Tol's, which the colour-blind can tell apart. Ink and lines are middle greys: they
are read on white and on black alike, as a notebook's pictures have no background.
"""

from __future__ import annotations

Color = tuple[float, float, float]

BASE = (
    *((86, 180, 233), (230, 159, 0), (0, 158, 115), (204, 121, 167), (0, 114, 178), (213, 94, 0)),
    *((240, 228, 66), (122, 111, 208), (68, 170, 153), (162, 57, 107), (153, 153, 51), (201, 166, 107)),
)
INK, LINE, PALE = "#7f8791", "#7f879155", "#7f879122"
GOOD, BAD, HIT = "#0b9e73", "#d55e00", "#7a6fd0"
BAR, OTHER_BAR = "#3b82f6", "#94a3b8"


def color(index: int) -> Color:
    """Return the color of the request that came as number `index`, each part from 0 to 1; colors repeat."""
    red, green, blue = BASE[index % len(BASE)]
    return red / 255, green / 255, blue / 255


def ink_on(filled: Color) -> str:
    """Black or white, whichever is read on a colour."""
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in filled)
    return "#0b0d10" if 0.2126 * red + 0.7152 * green + 0.0722 * blue > 0.2 else "#ffffff"
