"""Ranks that torchrun has started: it runs a command once for each of them, and they find each other in its store.

    torchrun --nproc-per-node 2 -m teachllm_cli generate ... \\
        --tensor-parallel-size 2 --distributed-executor-backend torchrun

    process 0     runs the command. The engine in it listens for the others, and the store says where.
    the others    join as machines with one rank each, see `host.py`, and end with the engine

Source: PyTorch, "torchrun (Elastic Launch)", https://docs.pytorch.org/docs/stable/elastic/run.html
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from teachllm.config import EngineConfig

if TYPE_CHECKING:
    from teachllm.worker.processes.host_plan import HostPlan

_SECONDS = 600.0  # for process 0 to listen
_WHERE, _SETTINGS = "teachllm/where", "teachllm/settings"  # keys of the store


def works_for_process_0(config: EngineConfig) -> bool:
    """For every process that is to have an engine: in all but the first this is where it works, until that one ends.

    Returns:
        Whether this is one of those, and is through with it.

    Raises:
        ValueError: torchrun and the settings do not go together, or those of two processes differ.
        EngineDeadError: the engine has gone, or a rank.
    """
    if config.distributed_executor_backend != "torchrun":
        _check_that_nobody_else_computes_the_same(config)
        return False
    _check_size(config)
    from teachllm.worker.processes.agreement import check_agreement, facts_of

    rank, store, mine = _number("RANK"), _store(), json.dumps(facts_of(config))
    if rank == 0:
        store.compare_set(_SETTINGS, "", mine)  # the first that it is asked for
        return False
    check_agreement({0: json.loads(store.get(_SETTINGS)), rank: json.loads(mine)})
    try:
        from teachllm.worker.processes.host import join
    except ModuleNotFoundError as error:
        raise ImportError(f"ranks of torchrun need {error.name}: pip install 'teachllm[serve]'") from None
    address, secret = json.loads(store.get(_WHERE))
    join(address, secret, place=rank, first_gpu=_number("LOCAL_RANK"), joined=_leave_signals_to_process_0)
    return True


def plan_of_torchrun(config: EngineConfig) -> HostPlan:
    """Each process is a machine with one rank, and this one the first."""
    from teachllm.worker.processes.host_plan import HostPlan

    _check_size(config)
    store, secret = _store(), secrets.token_urlsafe(32)

    def invite(address: str, _: Callable[[str], None]) -> None:
        store.set(_WHERE, json.dumps([address, secret]))

    is_one_machine = _number("LOCAL_WORLD_SIZE") == config.num_ranks
    host = "127.0.0.1" if is_one_machine else os.environ["MASTER_ADDR"]
    elsewhere = [[rank] for rank in range(1, config.num_ranks)]
    return HostPlan([0], elsewhere, host, 0, secret, invite, "torchrun has started them, and they may have said why")


def _leave_signals_to_process_0(_: Sequence[int]) -> None:
    """torchrun passes Ctrl-C and SIGTERM on to all. The first process may have answers to finish, and ends this one."""
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)


def _check_size(config: EngineConfig) -> None:
    """Raises ValueError unless there is a process for each rank."""
    sizes = f"tensor_parallel_size={config.tensor_parallel_size} x pipeline_parallel_size="
    needed = f"{sizes}{config.pipeline_parallel_size} need {config.num_ranks}"
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        raise ValueError(
            "distributed_executor_backend=torchrun, and torchrun has not started this: run torchrun --nproc-per-node "
            f"{config.num_ranks} -m teachllm_cli ..., or set it to mp"
        )
    if _number("WORLD_SIZE") != config.num_ranks:
        raise ValueError(
            f"torchrun has started {_number('WORLD_SIZE')} processes, and {needed}: give it --nproc-per-node "
            f"{config.num_ranks}, or fewer on each of several machines"
        )


def _check_that_nobody_else_computes_the_same(config: EngineConfig) -> None:
    """Every process of torchrun would start all ranks."""
    is_torchrun = "TORCHELASTIC_RUN_ID" in os.environ and _number("WORLD_SIZE") > 1
    if is_torchrun and config.num_ranks > 1 and config.distributed_executor_backend is None:
        raise ValueError(
            f"torchrun has started {_number('WORLD_SIZE')} processes, and each would be an engine with "
            f"{config.num_ranks} ranks of its own: set distributed_executor_backend=torchrun, or mp if that is meant"
        )


def _store() -> Any:
    """That of torchrun: a table which a process of its own keeps."""
    import torch.distributed as dist

    host, port = os.environ["MASTER_ADDR"], _number("MASTER_PORT")
    return dist.TCPStore(host, port, None, False, timedelta(seconds=_SECONDS))


def _number(variable: str) -> int:
    return int(os.environ[variable])
