"""The table that `h200.py` ends with: our figure, the machine's limit, the peers, the target, and the ratio."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from teachllm.bench.workloads import is_rate

Peer = float | list[float] | None  # a figure, the range of its runs, or nothing
COLUMNS = {"vllm": "vLLM", "nano-vllm": "nano-vllm", "hf": "HF"}


def best_of(peer: Peer, figure: str) -> float | None:
    """The better end of a range."""
    if isinstance(peer, list):
        return max(peer) if is_rate(figure) else min(peer)
    return peer


def ratio(ours: float, peer: Peer, figure: str) -> float | None:
    """How many times as fast as the peer at its best: above 1 is faster, for rates and for times."""
    theirs = best_of(peer, figure)
    if theirs is None:
        return None
    return ours / theirs if is_rate(figure) else theirs / ours


def is_reached(ours: float, target: float | None, figure: str) -> bool | None:
    """None without a target."""
    if target is None:
        return None
    return ours >= target if is_rate(figure) else ours <= target


def print_table(found: dict[str, Any], limits: dict[str, Any], peers: dict[str, Any]) -> None:
    """One table a model.

    Args:
        found: {model: {workload: {figure: value} or {"error": text}}}.
        limits: {model: {workload: {figure: value}}}, at the ceilings measured beside `found`.
        peers: what peers.json holds.
    """
    console = Console(width=None if Console().is_terminal else 140)
    failed = []
    for model, cells in found.items():
        table = Table(title=model, title_justify="left", title_style="bold")
        table.add_column("figure")
        for column in ("teachllm", "limit", *COLUMNS.values(), "to reach", "of vLLM's speed"):
            table.add_column(column, justify="right")
        for workload, figures in cells.items():
            if "error" in figures:
                table.add_row(workload, Text("failed", style="red"))
                failed.append(f"{model} {workload}: {figures['error']}")
                continue
            for figure, ours in figures.items():
                peer = peers["models"].get(model, {}).get(workload, {}).get(figure, {})
                reached = is_reached(ours, peer.get("to_reach"), figure)
                style = {True: "green", False: "red", None: ""}[reached]
                speed = ratio(ours, peer.get("vllm"), figure)
                table.add_row(
                    f"{workload} {figure}",
                    Text(number(ours), style=style),
                    number(limits.get(model, {}).get(workload, {}).get(figure)),
                    *(number(peer.get(name)) for name in COLUMNS),
                    target(peer.get("to_reach"), figure),
                    f"{speed:.2f}x" if speed is not None else "",
                )
        console.print(table)
    for line in failed:
        console.print(Text(line, style="red"))


def number(value: Peer) -> str:
    if value is None:
        return ""
    if isinstance(value, list):
        return "-".join(number(end) for end in value)
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def target(value: float | None, figure: str) -> str:
    return "" if value is None else f"{'≥' if is_rate(figure) else '≤'} {number(value)}"
