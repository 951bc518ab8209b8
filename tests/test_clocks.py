"""No test compares a clock: how long something takes depends on what else the machine does."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.clocks import CLOCKS, ClockComparisons

TESTS = Path(__file__).resolve().parent
# The bound on waiting. Nothing else in the tests may look at a clock to decide something.
ALLOWED = {"waiting.py": 1}

PLANTED = [
    "import time\nassert time.time() < 3",
    "import time as t\nassert 3 > t.perf_counter_ns()",
    "from time import monotonic as now\nif now() >= 3: raise ValueError",
    "from time import process_time\nwhile not process_time() > 5: pass",
    "import time\nbegan = time.monotonic()\nassert time.monotonic() - began < 30",
    "import time\ndef test():\n    began = time.time()\n    took = time.time() - began\n    assert took < 3",
    "import time\ndef test():\n    import time as clock\n    took: float = clock.thread_time()\n    assert 0 < took",
    "import time\ndef test():\n    if (took := time.perf_counter()) > 3: pass",
    "import time\nclass A:\n    def f(self): self.at = time.time()\n    def g(self): return self.at < 3",
    "import time\nclass A:\n    def f(self): self.at = time.time()\ndef test(a): assert a.at < 3",
    "import time\nclass A:\n    def now(self): return time.time()\n    def late(self): return self.now() > 3",
    "import time\ntimes = []\ntimes.append(time.perf_counter())\nassert max(times) < 3",
    "import time\ntook = {}\ntook['a'] = time.perf_counter()\nassert took['a'] < took['b']",
    "import time\ndef seconds(): return time.perf_counter()\nassert seconds() < 3 * seconds()",
    "import time\ndef test():\n    spent = 0\n    def f():\n        nonlocal spent\n        spent += time.time()\n"
    "    assert spent < 3",
    "import time\nclock = time.perf_counter\nassert clock() < 3",
    "import time\nclock = lambda: time.time() - 7\nassert clock() < 3",
    "import time\ndef wait(clock=time.monotonic):\n    return clock() < 3",
    "import time\nfor at in [time.time() for _ in range(3)]: assert at < 3",
    "import time\ngaps = [time.time()]\nassert all(gap < 3 for gap in gaps)",
    "import time\ngaps = [time.time()]\nfor i, gap in enumerate(gaps): assert gap < 3",
    "import time, statistics\nassert statistics.median([time.time()]) < 3",
    "import time, pytest\ntook = time.time()\nassert pytest.approx(took) == 3",
    "import time, pytest\nassert f() == pytest.approx(time.time(), rel=0.1)",
    "import time, pytest\npytest.mark.skipif(time.time() - 5, reason='late')",
    "import time\nassert time.time() - 5",
    "import time\nx = 1 if time.time() % 2 else 2",
    "import time\nhold(time.time() < 5, 'late')",
    "import time\nlate = [i for i in range(3) if time.time() > i]",
    "import time\na, b = 1, time.time()\nassert b < 3",
    "import time\ndef test():\n    began = int(time.time())\n    return began == 3",
    "import resource\nassert resource.getrusage(0).ru_utime < 3",
    "from timeit import default_timer\nassert default_timer() < 3",
    "import asyncio, time\nasync def test():\n    async def took(): return time.time()\n    assert await took() < 3",
    "import time\nclass A:\n    def __init__(self): self.now = time.time\n    def f(self): assert self.now() > 3",
    "import asyncio\nasync def test():\n    assert asyncio.get_running_loop().time() < 3",
    "import asyncio\nasync def test(loop):\n    due = loop.time()\n    assert due < 3",
    "import operator, time\nassert operator.lt(time.time(), 3)",
    "import time\nclass A:\n    def test(self): self.assertLess(time.time(), 3)",
    "from functools import partial\nimport time\nclock = partial(time.monotonic)\nassert clock() < 3",
    "from time import clock_gettime\nassert clock_gettime(1) < 3",
]
INNOCENT = [
    "import time\nrecorder = Recorder(time.perf_counter)",
    "import time\nprint(f'{time.time():.1f} seconds')",
    "import time\nevent.wait(timeout=max(0.0, 3 - time.monotonic()))",
    "import time\nwait(timeout=1 if time.time() > 3 else 2)",
    "import time\ntime.sleep(0.1)\nassert x < 3",
    "import time\nbegan = time.time()\nassert len([began]) == 1",
    "import time\nbegan = time.time()\nassert began is not None",
    "import time\ndef f():\n    x = time.time()\ndef g(x):\n    assert x < 3",
    "import time\na, b = 1, time.time()\nassert a < 3",
    "event = {'time': 3}\nassert event['time'] < 4",
    "class A:\n    def time(self): return 3\nassert A().time() == 3",
    "import time\nfor i, at in enumerate([time.time()]): assert i < 3",
]


def test_no_test_compares_a_clock() -> None:
    found = []
    for path in sorted(TESTS.rglob("*.py")):
        name = str(path.relative_to(TESTS))
        findings = ClockComparisons(path.read_text(encoding="utf-8")).findings()
        if len(findings) != ALLOWED.get(name, 0):
            found += [f"tests/{name}:{finding.line}: {finding.source}" for finding in findings] or [f"tests/{name}"]
    assert not found, "compares a clock (wait with tests/waiting.py):\n" + "\n".join(found)


@pytest.mark.parametrize("source", PLANTED)
def test_a_comparison_of_a_clock_is_found_in_every_form(source: str) -> None:
    assert ClockComparisons(source).findings()


@pytest.mark.parametrize("name", sorted(CLOCKS))
def test_every_clock_is_known_by_its_name_and_by_any_other(name: str) -> None:
    module, _, function = name.partition(".")
    for source in (f"import {module}\nassert {name}() < 3", f"from {module} import {function} as x\nassert x() < 3"):
        assert len(ClockComparisons(source).findings()) == 1


@pytest.mark.parametrize("source", INNOCENT)
def test_what_compares_no_clock_is_left_alone(source: str) -> None:
    assert ClockComparisons(source).findings() == []
