"""A trace as one HTML page that needs no server and no network: style, script and trace lines, all inside.

The same files are what the live page loads. Every file of `view/` is a plain script that adds to `window.teachllm`;
there is no build step: they are put one after the other.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from html import escape
from pathlib import Path

VIEW = Path(__file__).parent / "view"
SCRIPTS = (  # each may use those before it
    *("replay.js", "check.js", "timeline.js", "palette.js", "dom.js", "format.js", "text.js", "theme.js", "card.js"),
    *("pool_painter.js", "pool.js", "batch_painter.js", "batch.js", "step.js", "queue.js", "tokens.js", "tables.js"),
    *("rank_times.js", "ranks_painter.js", "ranks.js"),
    *("series.js", "figures.js", "chart.js", "metrics.js", "about.js", "transport.js", "keyboard.js"),
    *("place.js", "panels.js", "pointed.js", "view.js"),
)

PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<link rel="icon" href="data:,">
<style>{style} body {{ margin: 0; }}</style>
</head>
<body>
<main id="view" aria-label="{title}"></main>
<script>{script}</script>
<script type="application/json" id="trace">{trace}</script>
<script>
window.view = teachllm.mount(document.getElementById("view"), {{
  lines: JSON.parse(document.getElementById("trace").textContent),
  title: {name},
}});
</script>
</body>
</html>
"""


@dataclass(frozen=True)
class Assets:
    """The text of the script, which sets `window.teachllm`, and of the style sheet."""

    script: str
    style: str


def assets() -> Assets:
    """Return what a page needs to call `teachllm.mount(element, {lines})`."""
    script = "\n".join((VIEW / name).read_text(encoding="utf-8") for name in SCRIPTS)
    return Assets(script, (VIEW / "view.css").read_text(encoding="utf-8"))


def html_page(lines: Iterable[str], title: str) -> str:
    """A self-contained page.

    Args:
        lines: of a trace. One that is no JSON is handed on as text: the page says which it is and shows those before.
        title: of the page.
    """
    found = assets()
    return PAGE.format(
        title=escape(title),
        style=found.style,
        script=_inside_script(found.script),
        trace=embedded_json([line for line in lines if line.strip()]),
        name=_inside_script(json.dumps(title)),
    )


def embedded_json(lines: list[str]) -> str:
    """A JSON list of the lines, each a text that the page parses; no `<` is left that could end its script element."""
    return json.dumps(lines).replace("<", "\\u003c")


def _inside_script(code: str) -> str:
    """JavaScript that a script element can hold: in strings and regular expressions, `\\/` is `/` and `\\!` is `!`."""
    return code.replace("</script", "<\\/script").replace("<!--", "<\\!--")
