"""Colors of the pictures in notebooks, in a light and a dark theme.

Requests have the visualizer's colors (`webui/teachllm_webui/view/palette.js`), the same in both themes: Okabe and Ito's
and Paul Tol's, which the color-blind can tell apart. All others are pairs. Text has a contrast of at least 4.5 to 1
against the paper, lines and bars 3 to 1 (WCAG 2, AA).
"""

from __future__ import annotations

from collections.abc import Mapping

Color = tuple[float, float, float]

BASE = (
    *((86, 180, 233), (230, 159, 0), (0, 158, 115), (204, 121, 167), (0, 114, 178), (213, 94, 0)),
    *((240, 228, 66), (122, 111, 208), (68, 170, 153), (162, 57, 107), (153, 153, 51), (201, 166, 107)),
)

# A picture is drawn in the light colors; its SVG replaces each of them by the variable of its name.
PAPER, INK, LINE, PALE = "#fdfdfd", "#24292f", "#7d8590", "#e7ebef"
GOOD, BAD, HIT = "#1a7f38", "#bc4c01", "#6f42c1"
BAR, OTHER_BAR = "#0969da", "#818b98"
SERIES = ("#0968d9", "#bc4c00", "#1a7f37", "#8250df", "#bf3989", "#59636e")
DARK: Mapping[str, str] = {
    **{PAPER: "#0d1117", INK: "#e6edf3", LINE: "#7d8591", PALE: "#2a313a"},
    **{GOOD: "#3fb950", BAD: "#f0883e", HIT: "#b392f0", BAR: "#4493f8", OTHER_BAR: "#768390"},
    **dict(zip(SERIES, ("#58a6ff", "#f0883e", "#3fb950", "#bc8cff", "#f778ba", "#9198a1"), strict=True)),
}


def color(index: int) -> Color:
    """Return the color of the request that came as number `index`, each part from 0 to 1; colors repeat."""
    red, green, blue = BASE[index % len(BASE)]
    return red / 255, green / 255, blue / 255


def series_color(index: int) -> str:
    """Return the color of the line or bar number `index`, which stands out from the paper; colors repeat."""
    return SERIES[index % len(SERIES)]


def ink_on(filled: Color) -> str:
    """Return black or white, whichever has the larger contrast against a color: at least 4.5 to 1."""
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in filled)
    return "#000000" if 0.2126 * red + 0.7152 * green + 0.0722 * blue > 0.179 else "#ffffff"
