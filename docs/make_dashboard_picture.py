"""Make docs/grafana/dashboard-{light,dark}.png: the panels of docs/grafana/teachllm.json over a loaded server.

.venv/bin/python docs/make_dashboard_picture.py

The server, the load and the figures are real: Prometheus scrapes the server every second and evaluates each panel's own
expressions. Only the drawing is ours (plotly), so that no Grafana is needed. It needs Chromium and Prometheus.
"""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
from playwright.sync_api import sync_playwright
from plotly.offline import get_plotlyjs

FOLDER = Path(__file__).with_name("grafana")
PHASES = ((2, 40), (14, 240), (2, 40))  # requests per second, requests; the second is more than the server takes
SERVER = ["--max-num-seqs", "8", "--num-gpu-blocks-override", "90", "--no-log-requests"]  # small enough to be full
VARIABLES = {"$model": ".*", "$__rate_interval": "10s"}
COLUMN, ROW = 52, 32  # pixels of the dashboard's grid
ROWS = 28  # the panels below are about speculation, and this server does none
INK = {"light": ("#ffffff", "#f4f5f5", "#24292e"), "dark": ("#181b1f", "#111217", "#ccccdc")}
COLOURS = ("#3274d9", "#e0912b", "#56a64b", "#d1453f")


def main() -> None:
    panels = json.loads((FOLDER / "teachllm.json").read_text())["panels"]
    panels = [panel for panel in panels if panel["gridPos"]["y"] < ROWS]
    with tempfile.TemporaryDirectory() as folder:
        port = free_port()
        with running([sys.executable, "-m", "teachllm_cli", "serve", "--port", str(port), *SERVER]):
            wait_for(f"http://127.0.0.1:{port}/health")
            with prometheus(Path(folder), port) as url:
                began = time.time()
                for seed, (rate, count) in enumerate(PHASES):
                    load(port, rate, count, seed)
                data = {panel["id"]: query(url, panel, began, time.time()) for panel in panels}
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for scheme in INK:
            tab = browser.new_page(viewport={"width": 24 * COLUMN, "height": ROWS * ROW})
            tab.set_content(page(panels, data, scheme))
            tab.wait_for_selector(".js-plotly-plot .main-svg")
            tab.screenshot(path=FOLDER / f"dashboard-{scheme}.png")
        browser.close()


def load(port: int, rate: float, count: int, seed: int) -> None:
    shape = ["--random-prefix-len", "64", "--random-input-len", "80", "--random-output-len", "60"]
    more = ["--token-ids", "--ignore-eos", "--random-range-ratio", "0.6", "--num-warmups", "0"]
    command = [sys.executable, "-m", "teachllm_cli", "bench", "serve", "--base-url", f"http://127.0.0.1:{port}"]
    command += ["--request-rate", str(rate), "--num-prompts", str(count), "--seed", str(seed), *shape, *more]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


@contextmanager
def running(command: list[str]) -> Iterator[None]:
    process = subprocess.Popen(command)
    try:
        yield
    finally:
        process.terminate()
        process.wait(30)


@contextmanager
def prometheus(folder: Path, target: int) -> Iterator[str]:
    """Its address, while it scrapes."""
    job = {"job_name": "teachllm", "static_configs": [{"targets": [f"127.0.0.1:{target}"]}]}
    settings = {"global": {"scrape_interval": "1s"}, "scrape_configs": [job]}
    (folder / "prometheus.yml").write_text(json.dumps(settings))  # JSON is YAML
    url = f"127.0.0.1:{free_port()}"
    command = ["prometheus", f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'data'}"]
    with running([*command, f"--web.listen-address={url}", "--log.level=error"]):
        wait_for(f"http://{url}/-/ready")
        yield f"http://{url}"


def query(url: str, panel: dict[str, Any], start: float, end: float) -> list[tuple[str, list[float], list[float]]]:
    """[(legend, seconds, values)] of a panel, from its own expressions."""
    found = []
    for target in panel["targets"]:
        expression = target["expr"]
        for name, value in VARIABLES.items():
            expression = expression.replace(name, value)
        asked = urllib.parse.urlencode({"query": expression, "start": start, "end": end, "step": 1})
        with urllib.request.urlopen(f"{url}/api/v1/query_range?{asked}") as answer:
            results = json.load(answer)["data"]["result"]
        for result in results:
            legend = target["legendFormat"]
            for label, value in result["metric"].items():
                legend = legend.replace(f"{{{{{label}}}}}", value)
            points = [(float(at) - start, float(value)) for at, value in result["values"] if value != "NaN"]
            found.append((legend, [at for at, _ in points], [value for _, value in points]))
    return found


def page(panels: list[dict[str, Any]], data: dict[int, Any], scheme: str) -> str:
    paper, ground, ink = INK[scheme]
    boxes = []
    for panel in panels:
        place = panel["gridPos"]
        box = f"left:{place['x'] * COLUMN + 4}px;top:{place['y'] * ROW + 4}px;"
        box += f"width:{place['w'] * COLUMN - 8}px;height:{place['h'] * ROW - 8}px"
        chart = figure(panel, data[panel["id"]], scheme).to_html(full_html=False, include_plotlyjs=False)
        boxes.append(f'<div class="panel" style="{box}">{chart}</div>')
    style = f"body{{margin:0;background:{ground};color:{ink}}} .panel{{position:absolute;background:{paper}}}"
    return f"<style>{style}</style><script>{get_plotlyjs()}</script>{''.join(boxes)}"


def figure(panel: dict[str, Any], series: list[tuple[str, list[float], list[float]]], scheme: str) -> go.Figure:
    """One panel, as Grafana lays such a panel out."""
    paper, ground, ink = INK[scheme]
    place, unit = panel["gridPos"], panel["fieldConfig"]["defaults"]["unit"]
    is_stat, is_share = panel["type"] == "stat", unit == "percentunit"
    stacked = panel["fieldConfig"]["defaults"].get("custom", {}).get("stacking", {}).get("mode") == "normal"
    chart = go.Figure()
    for (legend, times, values), colour in zip(series, COLOURS, strict=False):
        fill = "tozeroy" if is_stat else None
        group = "one" if stacked else None
        chart.add_scatter(x=times, y=values, name=legend, line={"color": colour}, fill=fill, stackgroup=group)
    if is_stat and series and series[0][2]:
        peak = max(series[0][2])
        text = f"<b>{f'{peak:.0%}' if is_share else f'{peak:,.0f}'}</b> at most"
        place_of_it = {"xref": "paper", "yref": "paper", "x": 0, "y": 1.1, "yanchor": "bottom", "showarrow": False}
        chart.add_annotation(text=text, font={"size": 14}, **place_of_it)
    chart.update_layout(
        title={"text": panel["title"], "font": {"size": 14}, "x": 0.02, "y": 0.96, "yanchor": "top"},
        width=place["w"] * COLUMN - 8,
        height=place["h"] * ROW - 8,
        margin={"l": 8 if is_stat else 52, "r": 10, "t": 58 if is_stat else 36, "b": 4 if is_stat else 44},
        paper_bgcolor=paper,
        plot_bgcolor=paper,
        font={"color": ink, "size": 11},
        showlegend=not is_stat,
        legend={"orientation": "h", "y": -0.12},
    )
    chart.update_xaxes(visible=not is_stat, gridcolor=ground, ticksuffix=" s", zeroline=False)
    chart.update_yaxes(visible=not is_stat, gridcolor=ground, rangemode="tozero", zeroline=False)
    if is_share:
        chart.update_yaxes(tickformat=".0%", range=[0, 1])
    elif unit == "s":
        chart.update_yaxes(ticksuffix="s", tickformat=".3~s")
    return chart


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def wait_for(url: str, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            urllib.request.urlopen(url).close()
            return
        except OSError:
            time.sleep(0.1)
    raise TimeoutError(f"{url} does not answer")


if __name__ == "__main__":
    main()
