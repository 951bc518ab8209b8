"""The dashboard asks for metrics that there are."""

from __future__ import annotations

import json
import re
from pathlib import Path

from teachllm.server.metrics import Metrics

DASHBOARD = Path(__file__).parents[2] / "docs" / "grafana" / "teachllm.json"


def test_every_expression_of_the_dashboard_names_metrics_that_the_server_tells() -> None:
    told = {line.split("{")[0] for line in Metrics("m").text().decode().splitlines() if line.startswith("teachllm:")}
    panels = json.loads(DASHBOARD.read_text())["panels"]
    asked = {
        name for panel in panels for target in panel["targets"] for name in re.findall(r"teachllm:\w+", target["expr"])
    }
    assert len(panels) == 18 and len(asked) > 15
    assert asked <= told
