"""A session without a page: what its tabs are told, what it replays and forks, and what takes another one's place."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from teachllm.config import EngineConfig
from teachllm.trace.figures import figures
from teachllm_webui.live import LiveRun
from teachllm_webui.page import server_functions
from teachllm_webui.presets import PRESETS, Preset, Variant, preset
from teachllm_webui.session import LiveSession
from teachllm_webui.timeline import Seen, Status, Timeline
from teachllm_webui.trace_log import TraceLog
from tests.thorough import THOROUGH
from tests.waiting import HANG_SECONDS, wait_for
from tests.webui.runs import CONFIG, ask, finish, num_steps, step, trace_of

Make = Callable[..., LiveRun]

# -- reading


def test_a_long_poll_returns_at_once_when_there_is_something_and_waits_when_there_is_not(session: LiveSession) -> None:
    log = TraceLog(["a"], session.changed)
    session._install(([Timeline("", log)], Status()))
    first = session.news(Seen(), HANG_SECONDS)
    assert first["lines"] == [["a"]]
    seen = Seen(first["generation"], [1], first["status"])
    assert session.news(seen, 0.05)["lines"] == [[]]
    with ThreadPoolExecutor(1) as pool:
        news = pool.submit(session.news, seen, HANG_SECONDS)
        wait_for(lambda: session.changed._waiters)  # type: ignore[attr-defined]
        assert not news.done()
        log.append("b")
        assert news.result(HANG_SECONDS)["lines"] == [["b"]]


def test_a_growing_file_is_followed_line_by_line(session: LiveSession, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text('{"event":"header"}\n{"event":"arr')
    session.replay(path)
    assert session.news(Seen())["lines"] == [['{"event":"header"}']]
    with path.open("a") as file:
        file.write('ival"}\n')
    wait_for(lambda: len(session.sides[0].log) == 2)
    assert session.news(Seen(session.generation, [1]))["lines"] == [['{"event":"arrival"}']]


def test_another_trace_written_over_a_file_that_is_followed_begins_anew(session: LiveSession, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text('{"event":"header","time":1}\n{"event":"arrival"}\n')
    session.replay(path)
    before, old = session.generation, session.sides[0]
    with path.open("r+") as file:  # as an engine does that is started with the same name
        file.truncate(0)
        file.write('{"event":"header","time":2}\n{"event":"arrival"}\n{"event":"arrival"}\n')
    wait_for(lambda: session.generation > before)
    assert session.sides[0] is not old and len(old.log) == 2
    wait_for(lambda: len(session.sides[0].log) == 3)
    path.unlink()
    wait_for(lambda: session.status.error)
    assert "No such file" in (session.status.error or "")


def test_a_pipe_is_no_trace(session: LiveSession, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="not a regular file"):
        session.replay(tmp_path / "pipe")


def test_a_file_that_is_not_there_is_refused_in_words(session: LiveSession, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="No such file"):
        session.replay(tmp_path / "none.jsonl")


# -- failing


def test_an_engine_whose_thread_has_ended_is_an_error_and_not_a_silence(session: LiveSession) -> None:
    session.start(CONFIG, [ask(), ask()], play=False)
    wait_for(lambda: session.sides)
    (run,) = session.runs

    def full(line: str) -> None:
        raise OSError("no space left")

    run._write = full  # type: ignore[method-assign]
    run.inspect(lambda engine: setattr(engine.core.recorder, "_sink", full))
    run.play()
    wait_for(lambda: "no space left" in (session.news(Seen())["now"]["error"] or ""))
    wait_for(lambda: not run.is_playing and run.is_done)
    with pytest.raises(RuntimeError, match="the engine is closed"):
        session.submit(ask())
    session.start_preset(PRESETS[3])
    wait_for(lambda: session.status.preset == PRESETS[3].name)


def test_the_newest_error_is_shown_and_a_prompt_that_is_taken_clears_it(session: LiveSession) -> None:
    session.start(CONFIG, [ask()], play=False)
    wait_for(lambda: session.sides)
    session.runs[0].error = "a step failed"
    assert session.news(Seen())["now"]["error"] == "a step failed"
    session.fork(77, {})
    wait_for(lambda: "no step 77" in (session.news(Seen())["now"]["error"] or ""))
    session.submit(ask())
    assert session.news(Seen())["now"]["error"] is None


def test_settings_that_cannot_be_loaded_are_an_error_on_the_page(session: LiveSession) -> None:
    session.start(EngineConfig(model="/no/such/model", device="cpu"))
    wait_for(lambda: session.status.error)
    assert session.status.loading is None and "/no/such/model" in (session.status.error or "")


# -- forking


def test_the_session_shows_a_fork_beside_its_original_and_tells_every_tab(session: LiveSession) -> None:
    session.start(CONFIG, [ask(max_tokens=12), ask("What is a GPU?", 12)], play=False)
    wait_for(lambda: session.sides)
    before = session.generation
    step(session.runs[0], 5)
    session.fork(2, {"block_size": 8})
    wait_for(lambda: len(session.sides) == 2)
    assert session.generation == before + 1
    session.set_speed(None)
    session.play()
    wait_for(lambda: all(run.is_done for run in session.runs))
    tabs = [session.news(Seen()) for _ in range(2)]
    assert tabs[0] == tabs[1] and len(tabs[0]["lines"]) == 2
    headers = [json.loads(lines[0]) for lines in tabs[0]["lines"]]
    assert [header["config"]["block_size"] for header in headers] == [16, 8]
    left, right = (figures(side.log.upto()) for side in session.sides)
    assert session.status.since == 2 and left.num_finished == right.num_finished == 2
    assert left.waste and right.waste and right.waste < left.waste
    session.drop_fork()
    assert len(session.sides) == 1 and session.generation == before + 2


def test_a_prompt_goes_to_both_sides_or_to_none(session: LiveSession) -> None:
    session.start(CONFIG, [ask(max_tokens=20)], play=False)
    wait_for(lambda: session.sides)
    session.step()
    wait_for(lambda: num_steps(session.runs[0]) == 1)
    session.fork(0, {"num_gpu_blocks_override": 6})
    wait_for(lambda: len(session.sides) == 2)
    with pytest.raises(ValueError, match=r"fork at step 0.*blocks"):
        session.submit(ask("What is a token? " * 8, 100))
    session.submit(ask("What is a GPU?", 5))
    left, right = (trace_of(finish(run)).replay.requests for run in session.runs)
    assert {name: request.finish_reason for name, request in left.items()} == {
        **{"0": "length", "mine-1": "abort", "mine-2": "length"}
    }
    assert list(right) == ["0", "mine-2"] and right["mine-2"].output_ids == left["mine-2"].output_ids


def test_the_fork_of_a_file_loads_no_code_that_the_file_names(tmp_path: Path, session: LiveSession, make: Make) -> None:
    lines = finish(make(ask(max_tokens=5)))
    header = json.loads(lines[0])
    header["config"] |= {"trust_remote_code": True, "load_format": "pt"}
    path = tmp_path / "run.jsonl"
    path.write_text("\n".join([json.dumps(header), *lines[1:]]) + "\n")
    session.replay(path)
    session.fork(2, {})
    wait_for(lambda: len(session.sides) == 2)
    config = json.loads(session.sides[1].log.upto()[0])["config"]
    assert config["trust_remote_code"] is False and config["load_format"] == "auto"


def test_a_fork_that_is_refused_says_so_and_leaves_the_original(session: LiveSession) -> None:
    session.start(CONFIG, [ask()], play=False)
    wait_for(lambda: session.sides)
    session.step()
    wait_for(lambda: num_steps(session.runs[0]) == 1)
    session.fork(0, {"max_num_batched_tokens": 1, "max_num_seqs": 8})
    wait_for(lambda: session.status.error)
    assert "max_num_seqs" in (session.status.error or "") and len(session.sides) == 1
    session.step()
    wait_for(lambda: num_steps(session.runs[0]) == 2)


def test_a_recorded_trace_can_be_forked_and_goes_on(session: LiveSession, make: Make, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text("".join(line + "\n" for line in finish(make(ask(max_tokens=12), ask("What is a GPU?", 12)))))
    session.replay(path)
    session.set_speed(None)
    session.fork(4, {"max_num_seqs": 1})
    wait_for(lambda: len(session.sides) == 2)
    wait_for(lambda: session.runs[0].is_done)  # it plays by itself
    left, right = (trace_of(side.log.upto()).replay for side in session.sides)
    assert not any(request.is_live for side in (left, right) for request in side.requests.values())
    assert right.step > left.step


# -- replacing


def test_a_tab_that_would_replace_what_another_one_watches_is_asked(session: LiveSession) -> None:
    from teachllm_webui.page import server_functions

    news, drive = server_functions(session)
    session.start(CONFIG, [ask(max_tokens=8)], play=False)
    wait_for(lambda: session.sides)
    nothing = {"generation": -1, "cursors": [], "status": -1}
    order = {"action": "preset", "value": "paged", "tab": "one"}
    for tab in ("one", "two"):
        news(nothing | {"tab": tab})
    running = session.runs[0]
    assert "Another tab" in drive(order)["question"] and not session.status.loading
    assert drive({"action": "speed", "value": 20, "tab": "one"}) == {}
    assert drive(order | {"sure": True}) == {}
    wait_for(lambda: session.status.preset == "paged")
    wait_for(lambda: running.has_ended)
    session.set_speed(None)
    session.play()
    wait_for(lambda: session.status.is_done or not session._has_news(Seen()))
    wait_for(lambda: all(run.is_done for run in session.runs))
    assert drive(order | {"value": "prefix"}) == {}  # it has ended: nothing is lost


def test_of_many_quick_orders_the_newest_is_shown_and_the_others_leave_nothing_behind(session: LiveSession) -> None:
    threads = threading.active_count()
    several = [each for each in PRESETS if THOROUGH or each.name in ("paged", "batching", "preemption")]
    for chosen in (*several, *several[::-1], preset("prefix")):
        session.start_preset(chosen, play=False)
    wait_for(lambda: session.status.preset == "prefix" and not session.status.loading)
    wait_for(lambda: threading.active_count() <= threads + 1)


def test_a_preset_of_which_one_side_cannot_be_loaded_closes_the_other(session: LiveSession) -> None:
    threads = threading.active_count()
    variants = (Variant("good"), Variant("bad", {"model": "/no/such/model"}))
    session.start_preset(Preset(name="x", title="x", look_at="x", requests=(), variants=variants))
    wait_for(lambda: session.status.error)
    assert "/no/such/model" in (session.status.error or "") and not session.sides
    assert threading.active_count() <= threads


def test_pause_and_speed_count_for_what_is_being_loaded(session: LiveSession) -> None:
    session.start_preset(preset("prefix"))
    session.pause()
    session.set_speed(3)
    wait_for(lambda: session.sides)
    assert not session.runs[0].is_playing and session.news(Seen())["now"]["speed"] == 3
    with pytest.raises(ValueError, match=r"choose 0\.1 to 1000"):
        session.set_speed(1e-11)


def test_a_tab_of_another_generation_orders_nothing_about_what_it_does_not_see(session: LiveSession) -> None:
    drive = server_functions(session)[-1]
    session.start(CONFIG, [ask()], play=False)
    wait_for(lambda: session.sides)
    for order in ({"action": "abort", "side": 0, "value": "0"}, {"action": "fork", "step": 0}, {"action": "drop"}):
        assert "moved on" in drive(order | {"generation": session.generation - 1})["error"]
    assert session.runs[0].inspect(lambda engine: engine.unfinished_ids) == ["0"]
    assert drive({"action": "abort", "side": 0, "value": "0", "generation": session.generation}) == {}
    assert session.runs[0].inspect(lambda engine: engine.unfinished_ids) == []
