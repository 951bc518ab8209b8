"""Times in the page are the engine's, however it is played: those of the trace, which no pause is in."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest

from teachllm.trace.figures import figures
from teachllm_webui.presets import PRESETS, preset
from teachllm_webui.session import LiveSession
from tests.thorough import THOROUGH
from tests.waiting import wait_for
from tests.webui.runs import num_steps

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", [each.name for each in PRESETS] if THOROUGH else ["chunked"])
def test_ttft_itl_and_step_times_of_a_paced_and_paused_run_are_those_of_its_trace(
    session: LiveSession, page: Any, name: str
) -> None:
    session.start_preset(preset(name), play=False)
    wait_for(lambda: session.sides)
    session.set_speed(100)
    session.play()
    wait_for(lambda: all(num_steps(run) > 5 for run in session.runs))
    session.pause()
    session.set_speed(None)
    session.play()
    wait_for(lambda: all(run.is_done for run in session.runs))
    for run in session.runs:
        lines = run.log.upto()
        shown = page.evaluate(
            """(lines) => {
                const timeline = new teachllm.Timeline(lines);
                timeline.palette = new teachllm.Palette();
                const [series, sums] = [new teachllm.Series(), new teachllm.Figures()];
                series.extend(timeline), sums.extend(timeline);
                const { last } = timeline;
                const spans = timeline.steps.map((_, k) => timeline.spanOf(k));
                const cards = [...timeline.rows.keys()].map((id) => {
                    const { token_times: times, arrival } = timeline.stateAt(last).requests.get(id);
                    return [times[0] - arrival.time, (times.at(-1) - times[0]) / (times.length - 1)];
                });
                const ttft = series.ttft.map(({ value }) => value / 1000);
                return { ttft, itl: series.itl, spans, cards, at: sums.at(last) };
            }""",
            lines,
        )
        expected = figures(lines)
        mean = sum(shown["ttft"]) / len(shown["ttft"])
        assert mean == pytest.approx(expected.ttft.mean) == pytest.approx(shown["at"]["ttft"])
        assert sum(ttft for ttft, _ in shown["cards"]) / len(shown["cards"]) == pytest.approx(expected.ttft.mean)
        steps = [event for line in lines if (event := json.loads(line))["event"] == "step"]
        assert shown["at"]["longest"] == pytest.approx(longest(steps))
        widths = [end - begin for begin, end in shown["spans"]]
        busy = [step["end"] - max(step["time"], before["end"]) for before, step in pairwise(steps)]
        assert widths[1:] == pytest.approx([max(each, 0) for each in busy], abs=1e-9)


def longest(steps: list[dict[str, Any]]) -> float:
    """Of all times between two tokens of a request."""
    times: dict[str, list[float]] = {}
    for step in steps:
        for each in step["scheduled"]:
            if each.get("num_sampled"):
                times.setdefault(each["request_id"], []).append(step["end"])
    return max(later - earlier for each in times.values() for earlier, later in pairwise(each))
