"""Which ranks are on which machine, and how the others are told where to join."""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from teachllm.config import EngineConfig
from teachllm.worker.processes.host_socket import SECRET
from teachllm.worker.processes.torchrun import plan_of_torchrun

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class HostPlan:
    """Ranks by machine. A machine is whatever joins as one: there may be several on one computer.

    Attributes:
        here: ranks that the engine starts itself.
        elsewhere: those of each machine that is to join.
        host, port: where the engine listens for them; port 0 is any that is free.
        secret: that they have to know.
        invite: called with the address when the engine listens, and with what to call if no worker will come.
        advice: what to do if one does not, with {address} in it.
        dismiss: called in the end.
    """

    here: Sequence[int]
    elsewhere: Sequence[Sequence[int]]
    host: str
    port: int
    secret: str
    invite: Callable[[str, Callable[[str], None]], None]
    advice: str
    dismiss: Callable[[], None] = lambda: None


def plan_of(config: EngineConfig) -> HostPlan:
    """Return the plan of a configuration."""
    if config.distributed_executor_backend == "torchrun":
        return plan_of_torchrun(config)
    if config.distributed_executor_backend == "ray":
        from teachllm.worker.processes.ray_ranks import plan_of_ray

        return plan_of_ray(config)
    return _plan_of_nodes(config)


def _plan_of_nodes(config: EngineConfig) -> HostPlan:
    """Plan `nnodes` machines with as many ranks each; users start a worker on all but this one."""
    size = config.num_local_ranks
    here, *elsewhere = [range(first, first + size) for first in range(0, config.num_ranks, size)]
    known = os.environ.get(SECRET)
    secret = known or secrets.token_urlsafe(32)

    def invite(address: str, _: Callable[[str], None]) -> None:
        log.warning(
            "waiting for %d more: on each machine run  %steachllm worker --join %s",
            len(elsewhere),
            "" if known else f"{SECRET}={secret} ",
            address,
        )

    advice = f"run teachllm worker --join {{address}} there, or lower nnodes={config.nnodes}"
    return HostPlan(here, elsewhere, config.master_addr, config.master_port, secret, invite, advice)
