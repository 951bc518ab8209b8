"""A trace of two stages, written by hand, whose shares anybody can count.

seconds   0    4 5          9     12       16    20  22  24
rank 0    |0000|s|1111111111|sssss|.........     |222|....       0, 1, 2  computes a step    s  send
rank 1    |rrrrrr|00000000|g00|rrr|1111111111    |rrr|2222       r  recv                     g  all_gather, 9 to 9.5
"""

from __future__ import annotations

import json
from typing import Any

HEADER = {
    "event": "header",
    "version": 1,
    "time": 0.0,
    "config": {
        "block_size": 16,
        "enable_kv_cache": True,
        "max_num_batched_tokens": 32,
        "max_num_seqs": 4,
        "scheduling_policy": "fcfs",
        "async_scheduling": False,
    },
    "model": {"path": "m", "architecture": "A", "dtype": "float32"},
    "num_blocks": 4,
}


def rank(stage: int, begin: float, end: float, sent: dict[str, Any], *exchanges: tuple[str, float, float]) -> Any:
    return {"stage": stage, "begin": begin, "end": end, "sent": sent, "exchanges": exchanges, "expected": sent}


def step(number: int, time: float, end: float, ranks: list[Any], **more: Any) -> dict[str, Any]:
    times: dict[str, Any] = {
        "time": time,
        "end": end,
        "schedule": 0.0,
        "execute": 0.0,
        "wait": end - time,
        "update": 0.0,
    }
    nothing: dict[str, Any] = {"scheduled": [], "preempted": [], "finished": {}, "waiting": {}, "block_events": []}
    blocks = {"used": 0, "cached": 0, "free": 4}
    return {"event": "step", "step": number, "blocks": blocks, "ranks": ranks} | times | nothing | more


TO, FROM = {"send": [1, 1000]}, {"recv": [1, 0], "all_gather": [1, 50]}
STEPS = [
    step(
        0, 0.0, 10.0, [rank(0, 0, 5, TO, ("send", 4, 1)), rank(1, 0, 10, FROM, ("recv", 0, 5), ("all_gather", 9, 0.5))]
    ),
    step(1, 5.0, 16.0, [rank(0, 5, 12, TO, ("send", 4, 3)), rank(1, 10, 16, FROM, ("recv", 0, 2))]),
    step(2, 20.0, 24.0, [rank(0, 20, 22, TO), rank(1, 20, 24, FROM, ("recv", 0, 2))]),
]


def lines(steps: list[dict[str, Any]] | None = None) -> list[str]:
    """Of JSON, each with its newline."""
    return [json.dumps(each) + "\n" for each in (HEADER, *(STEPS if steps is None else steps))]
