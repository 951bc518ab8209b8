"""The table that `h200.py` ends with: our figure, the machine's limit, the peers, the target, and the ratio."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from teachllm.bench.workloads import is_rate

Peer = float | list[float] | None  # a figure, the range of its runs, or nothing


def best_of(peer: Peer, figure: str) -> float | None:
    """The better end of a range."""
    if isinstance(peer, list):
        return max(peer) if is_rate(figure) else min(peer)
    return peer


def ratio(ours: float, peer: Peer, figure: str) -> float | None:
    """Return how many times as fast as the peer at its best: above 1 is faster, for rates and for times."""
    theirs = best_of(peer, figure)
    if theirs is None:
        return None
    return ours / theirs if is_rate(figure) else theirs / ours


def is_reached(ours: float, target: float | None, figure: str) -> bool | None:
    """None without a target."""
    if target is None:
        return None
    return ours >= target if is_rate(figure) else ours <= target


def print_table(found: dict[str, Any], limits: dict[str, Any], peers: dict[str, Any], ceilings: dict[str, Any]) -> None:
    """One table a model. Each figure stands beside the limit of the card that it was measured on.

    Cards of one name differ, and so does one by its temperature: "of it" shows how much of a difference is the
    engine's. On a card of another name than the peers' no speeds are compared.

    Args:
        found: {model: {workload: {figure: value} or {"error": text}}}.
        limits: {model: {workload: {figure: value}}}, at `ceilings`.
        peers: what peers.json holds.
        ceilings: measured beside `found`, as peers.json has the peers'.
    """
    console = Console(width=None if Console().is_terminal else 140)
    is_same = ceilings["device"] == peers["ceilings"]["device"]
    failed = []
    for model, cells in found.items():
        table = Table(title=model, title_justify="left", title_style="bold")
        table.add_column("figure")
        for column in (
            "teachllm",
            "limit",
            "of it",
            "vLLM",
            "its limit",
            "of it",
            "nano-vllm",
            "HF",
            "to reach",
            "x vLLM",
        ):
            table.add_column(column, justify="right")
        for workload, figures in cells.items():
            if "error" in figures:
                table.add_row(workload, Text("failed", style="red"))
                failed.append(f"{model} {workload}: {figures['error']}")
                continue
            for figure, ours in figures.items():
                peer = peers["models"].get(model, {}).get(workload, {}).get(figure, {})
                limit = limits.get(model, {}).get(workload, {}).get(figure)
                reached = is_reached(ours, peer.get("to_reach"), figure)
                style = {True: "green", False: "red", None: ""}[reached]
                speed = ratio(ours, peer.get("vllm"), figure) if is_same else None
                table.add_row(
                    f"{workload} {figure}",
                    Text(number(ours), style=style),
                    number(limit),
                    share(ours, limit, figure),
                    number(peer.get("vllm")),
                    number(peer.get("limit")),
                    share(peer.get("vllm"), peer.get("limit"), figure),
                    number(peer.get("nano-vllm")),
                    number(peer.get("hf")),
                    target(peer.get("to_reach"), figure),
                    f"{speed:.2f}" if speed is not None else "",
                )
        console.print(table)
    for who, where in (("here", ceilings), ("the peers'", peers["ceilings"])):
        console.print(
            f"Ceilings, {who}: {where['device']}, reads {where['read_bandwidth'] / 1e12:.2f} TB/s, "
            f"products {where['gemm_flops'] / 1e12:.0f} TFLOP/s, attention {where['attention_flops'] / 1e12:.0f}",
            style="dim",
            highlight=False,
        )
    for line in failed:
        console.print(Text(line, style="red"))


def share(value: Peer, limit: Peer, figure: str) -> str:
    """Return how near a figure is to its limit, both at their best; "" without either."""
    if value is None or limit is None:
        return ""
    best, least = best_of(value, figure), best_of(limit, figure)
    assert best and least
    return f"{best / least if is_rate(figure) else least / best:.0%}"


def number(value: Peer) -> str:
    if value is None:
        return ""
    if isinstance(value, list):
        return "-".join(number(end) for end in value)
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def target(value: float | None, figure: str) -> str:
    return "" if value is None else f"{'≥' if is_rate(figure) else '≤'} {number(value)}"
