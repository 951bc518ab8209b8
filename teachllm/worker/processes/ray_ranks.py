"""Ranks that Ray places: an actor for each, wherever its cluster has room.

    placement group    a GPU for each rank, or a CPU, on as few machines as there can be
    actor              joins the engine as a machine with one rank, see `host.py`; how it ends, Ray says

Ray finds machines and starts processes there. What the engine and its ranks say to each other does not go through Ray:
it would be pickled.

Source: Moritz et al., "Ray: A Distributed Framework for Emerging AI Applications", OSDI 2018; placement groups are
https://docs.ray.io/en/latest/ray-core/scheduling/placement-group.html
"""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial
from typing import Any

from teachllm.config import EngineConfig
from teachllm.worker.processes.host_plan import HostPlan

_SECONDS_TO_PLACE = 60.0  # for what others have of the cluster


class RankActor:
    """One rank's place in the cluster. Ray has made its GPU the only one that it sees."""

    def work(self, address: str, secret: str, rank: int) -> None:
        """Work until the engine ends."""
        from teachllm.worker.processes.host import join

        join(address, secret, place=rank + 1)


def plan_of_ray(config: EngineConfig) -> HostPlan:
    """Plan an actor for each rank; the engine's own process has none.

    Joins the cluster that runs on this machine, or that RAY_ADDRESS names; where there is none, it starts one.

    Raises:
        ImportError: Ray is not installed.
        ValueError: the cluster is too small.
        TimeoutError: it has no room.
    """
    try:
        import ray
        from ray.util.placement_group import placement_group_table, remove_placement_group
    except ModuleNotFoundError:
        raise ImportError("distributed_executor_backend=ray needs Ray: pip install 'teachllm[ray]'") from None
    is_ours = not ray.is_initialized()
    if is_ours:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # it would tell its makers
        # What actors print Ray would print here on standard output, which is for answers; its log files have it.
        ray.init(include_dashboard=False, logging_level=logging.ERROR, log_to_driver=False)
    actors: list[Any] = []
    try:
        group = _place(config)
    except BaseException:
        if is_ours:
            ray.shutdown()
        raise
    here, nodes = ray.get_runtime_context().get_node_id(), placement_group_table(group)["bundles_to_node_id"]

    def invite(address: str, give_up: Callable[[str], None]) -> None:
        for rank, bundle in enumerate(by_machine(nodes, here)):
            actors.append(_start(config, group, bundle))
            ended = actors[-1].work.remote(address, secret, rank).future()
            ended.add_done_callback(partial(_tell, rank, give_up))

    def dismiss() -> None:
        if not ray.is_initialized():  # Ray has ended before us, and the actors with it; it would start again by itself
            return
        for actor in actors:
            ray.kill(actor)
        remove_placement_group(group)
        if is_ours:
            ray.shutdown()

    is_one_machine, secret = set(nodes.values()) == {here}, secrets.token_urlsafe(32)
    host = "127.0.0.1" if is_one_machine else ray.util.get_node_ip_address()
    elsewhere = [[rank] for rank in range(config.num_ranks)]
    return HostPlan([], elsewhere, host, 0, secret, invite, "`ray list actors` says what became of them", dismiss)


def by_machine(nodes: Mapping[int, str], here: str) -> list[int]:
    """Return bundles in the order of the ranks that they are for: neighbours share a machine, and the first are here.

    Args:
        nodes: of each bundle.
    """
    return sorted(nodes, key=lambda bundle: (nodes[bundle] != here, nodes[bundle], bundle))


def _place(config: EngineConfig) -> Any:
    """Reserve room for each rank."""
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group

    kind = _resource(config)
    there = int(ray.cluster_resources().get(kind, 0))
    if there < config.num_ranks:
        raise ValueError(
            f"tensor_parallel_size={config.tensor_parallel_size} x pipeline_parallel_size="
            f"{config.pipeline_parallel_size} need {config.num_ranks} {kind}s, and the Ray cluster has {there}: lower "
            "them, or add a machine by ray start --address"
        )
    group = placement_group([{kind: 1}] * config.num_ranks, strategy="PACK")
    if not group.wait(_SECONDS_TO_PLACE):
        remove_placement_group(group)
        raise TimeoutError(
            f"the Ray cluster had no {config.num_ranks} {kind}s to spare within {_SECONDS_TO_PLACE:g} s: `ray status` "
            "says how many are in use"
        )
    return group


def _start(config: EngineConfig, group: Any, bundle: int) -> Any:
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    needs = {"num_gpus": 1, "num_cpus": 0} if _resource(config) == "GPU" else {"num_cpus": 1}
    where = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle)
    return ray.remote(RankActor).options(**needs, scheduling_strategy=where).remote()


def _resource(config: EngineConfig) -> str:
    """Name the resource of which a rank has one."""
    return "GPU" if config.device.startswith("cuda") else "CPU"


def _tell(rank: int, give_up: Callable[[str], None], ended: Future[None]) -> None:
    """Report, in a thread of Ray's, that an actor has failed."""
    from ray.exceptions import RayTaskError

    error = ended.exception()
    if error is not None:
        cause = error.cause if isinstance(error, RayTaskError) else error
        *_, last = str(cause).strip().splitlines() or [type(cause).__name__]
        give_up(f"the Ray actor of rank {rank} has ended: {last.split('. ')[0].strip()}")
