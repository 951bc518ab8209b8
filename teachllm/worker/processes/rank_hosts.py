"""The ranks of an engine on several machines, and the lines to and from them.

                         ┌── ring ────▶ ranks of this machine ── pipes ───┐
    write(message) ──────┤                                                ├──▶ receive() -> frames
                         └── socket ──▶ another machine ◀────── socket ───┘
                                        `host.py`: a ring and pipes there

A message crosses the network once for each machine. Every machine joins by itself, so the first thing is to wait for
all. See `rank_lines.py` for what these words mean, `host_messages.py` for what is said.
"""

from __future__ import annotations

import time
import weakref
from dataclasses import replace

from teachllm.distributed.rendezvous import keep_store
from teachllm.worker.processes.agreement import ranks_text
from teachllm.worker.processes.child import only_here, refuse_elsewhere
from teachllm.worker.processes.host_lines import HostLines
from teachllm.worker.processes.host_messages import Order
from teachllm.worker.processes.host_plan import HostPlan
from teachllm.worker.processes.host_socket import port_of
from teachllm.worker.processes.rank_lines import RankWork, whole
from teachllm.worker.processes.rank_processes import devices_of

_SECONDS_TO_JOIN = 600.0  # you may have to type a command on each machine
_SECONDS_TO_MEET = 600.0  # a checkpoint may have to be downloaded there


class RankHosts:
    """`RankLines` to ranks on several machines.

    Raises:
        ValueError: one cannot listen where the settings say.
    """

    def __init__(self, plan: HostPlan) -> None:
        self._plan = plan
        self._hosts = HostLines(plan)
        self._local = self._hosts.local
        self._refuse_elsewhere = refuse_elsewhere()
        self.frames = self._local.frames
        self.sentinel = self._hosts.sentinel
        # Whoever drops this without closing it leaves nothing behind.
        self._finalizer = weakref.finalize(self, only_here(HostLines.close), self._hosts)

    @property
    def death(self) -> str | None:
        """Implement `RankLines.death`."""
        return self._hosts.death

    def start(self, work: RankWork) -> None:
        """Implement `RankLines.start`; waits until all machines have joined.

        Raises:
            ValueError: a machine has other versions, or this one has too few GPUs.
            TimeoutError: one is missing; names its ranks.
            EngineDeadError: one has gone since it joined, or its launcher has given up.
        """
        hosts, plan = self._hosts, self._plan
        devices_of(work.config, len(plan.here))  # before others are waited for
        address = f"tcp://{plan.host}:{port_of(hosts.router)}"
        plan.invite(address, hosts.end)
        deadline = time.monotonic() + _SECONDS_TO_JOIN
        while missing := hosts.missing:
            seconds = deadline - time.monotonic()
            if seconds <= 0:
                absent = "; ".join(map(ranks_text, missing))
                raise TimeoutError(
                    f"{len(missing)} of {len(plan.elsewhere)} machines did not join within {_SECONDS_TO_JOIN:g} s, "
                    f"which should have {absent}: {plan.advice.format(address=address)}"
                )
            self.receive(seconds)
        if work.config.num_ranks > 1:
            rendezvous, hosts.store = keep_store(plan.host, _SECONDS_TO_MEET)
            work = replace(work, rendezvous=rendezvous)
        hosts.begin(work)
        self._local.start(work)

    def write(self, message: bytes) -> None:
        """Implement `RankLines.write`."""
        self._check()
        with whole(self.end):
            self._hosts.tell(Order(message))
            self._local.write(message)

    def receive(self, seconds: float | None = None) -> None:
        """Implement `RankLines.receive`."""
        self._check()
        with whole(self.end):
            has_news = self._hosts.take()  # the router's descriptor only tells of what comes after one has looked
        if self._hosts.wait(0 if has_news or self.frames else seconds):
            self._check()
            self._local.receive(0)
            with whole(self.end):
                self._hosts.take()
        self._check()

    def end(self, why: str) -> None:
        """Implement `RankLines.end`."""
        self._hosts.end(why)

    def kill(self) -> None:
        """Implement `RankLines.kill`."""
        self._hosts.kill()

    def close(self) -> None:
        """Implement `RankLines.close`."""
        self._finalizer()

    def _check(self) -> None:
        self._refuse_elsewhere()
        self._hosts.check()
