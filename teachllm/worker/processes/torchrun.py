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
_WHERE, _SETTINGS = "where", "settings"  # keys of the store
_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # that are read


def works_for_process_0(config: EngineConfig) -> bool:
    """Work for process 0, in every process but the first, until the engine ends.

    Returns:
        Whether this process is not the first, and its work is done.

    Raises:
        ValueError: torchrun and the settings do not go together, or those of two processes differ; or the others work
            for another engine already.
        EngineDeadError: the engine has gone, or a rank.
    """
    if config.distributed_executor_backend != "torchrun":
        _check_that_no_other_process_computes_the_same(config)
        return False
    _check_size(config)
    from teachllm.worker.processes.agreement import check_agreement, facts_of

    rank, store, mine = _number("RANK"), _store(), json.dumps(facts_of(config))
    if rank == 0:
        if store.check([_WHERE]):
            raise ValueError(
                "torchrun's other processes work for the first engine of this program and end with it: start torchrun "
                "again for another one, or set distributed_executor_backend=mp"
            )
        store.compare_set(_SETTINGS, "", mine)  # the first that it is asked for
        return False
    check_agreement({0: json.loads(store.get(_SETTINGS)), rank: json.loads(mine)})
    try:
        from teachllm.worker.processes.host import join
        from teachllm.worker.processes.host_socket import SECRET
    except ModuleNotFoundError as error:
        raise ImportError(f"ranks of torchrun need {error.name}: pip install 'teachllm[serve]'") from None
    address, told = json.loads(store.get(_WHERE))
    secret = told or os.environ.get(SECRET)
    if not secret:
        raise ValueError(f"{SECRET} is set where torchrun's first process runs, and not here: set it on every machine")
    join(address, secret, place=rank, first_gpu=_number("LOCAL_RANK"), joined=_leave_signals_to_process_0)
    return True


def plan_of_torchrun(config: EngineConfig) -> HostPlan:
    """Plan each process as a machine with one rank, and this one as the first. Any process that can reach torchrun's
    store can read it: only a secret that the user has not set goes there."""
    from teachllm.worker.processes.host_plan import HostPlan
    from teachllm.worker.processes.host_socket import SECRET

    _check_size(config)
    store, known = _store(), os.environ.get(SECRET)
    secret = known or secrets.token_urlsafe(32)

    def invite(address: str, _: Callable[[str], None]) -> None:
        store.set(_WHERE, json.dumps([address, None if known else secret]))

    is_one_machine = _number("LOCAL_WORLD_SIZE") == config.num_ranks
    host = "127.0.0.1" if is_one_machine else os.environ["MASTER_ADDR"]
    elsewhere = [[rank] for rank in range(1, config.num_ranks)]
    return HostPlan([0], elsewhere, host, 0, secret, invite, "torchrun has started them, and they may have said why")


def _leave_signals_to_process_0(_: Sequence[int]) -> None:
    """Leave Ctrl-C and SIGTERM, which torchrun passes on to all, to the first process. It may have answers to
    finish, and ends this one."""
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)


def _check_size(config: EngineConfig) -> None:
    """Raise ValueError unless there is a process for each rank."""
    sizes = f"tensor_parallel_size={config.tensor_parallel_size} x pipeline_parallel_size="
    needed = f"{sizes}{config.pipeline_parallel_size} need {config.num_ranks}"
    if unset := [name for name in _VARIABLES if name not in os.environ]:
        raise ValueError(
            f"distributed_executor_backend=torchrun, and torchrun has not started this ({', '.join(unset)} not set): "
            f"run torchrun --nproc-per-node {config.num_ranks} -m teachllm_cli ..., or set it to mp"
        )
    if _number("WORLD_SIZE") != config.num_ranks:
        raise ValueError(
            f"torchrun has started {_number('WORLD_SIZE')} processes, and {needed}: give it --nproc-per-node "
            f"{config.num_ranks}, or fewer on each of several machines"
        )


def _check_that_no_other_process_computes_the_same(config: EngineConfig) -> None:
    """Raise ValueError if every process of torchrun would start all ranks."""
    is_torchrun = {"TORCHELASTIC_RUN_ID", "WORLD_SIZE"} <= os.environ.keys() and _number("WORLD_SIZE") > 1
    if is_torchrun and config.num_ranks > 1 and config.distributed_executor_backend is None:
        raise ValueError(
            f"torchrun has started {_number('WORLD_SIZE')} processes, and each would be an engine with "
            f"{config.num_ranks} ranks of its own: set distributed_executor_backend=torchrun, or mp if that is meant"
        )


def _store() -> Any:
    """Return torchrun's store: a table which a process of its own keeps. It outlives the processes that torchrun
    starts again, so each attempt has keys of its own, as in PyTorch."""
    import torch.distributed as dist

    host, port = os.environ["MASTER_ADDR"], _number("MASTER_PORT")
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = dist.TCPStore(host, port, None, False, timedelta(seconds=_SECONDS))
    return dist.PrefixStore(f"teachllm/attempt_{attempt}", store)


def _number(variable: str) -> int:
    return int(os.environ[variable])
