"""An engine's process, ranks and replicas of one machine, each killed twenty times in a row in the middle of its work.

    PYTHONPATH=.:kernels:cli python tests/server/deaths.py --times 20

`KINDS` has them all. Ranks of other machines, of torchrun and of Ray, and replicas that share experts, are killed by
tests alone: test_rank_hosts.py, test_torchrun.py, test_ray_ranks.py, test_expert_parallel.py.

Whatever was killed, every request ends with an error, the exit code is not 0, and no process, no memory with a name
and no file is left: see kill.py here, and tests/worker/processes/kill.py for programs. Prints the longest times of
each kind, which should be below five seconds, and "no violation"; or what was violated, and exits 1.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from random import Random

from tests.server.client import Violation
from tests.server.kill import Victims, kill_once, rank_of_server, replica_of_server
from tests.server.process import engine_processes
from tests.worker.processes.kill import Seconds, kill_a_rank


def in_program(ways: str) -> Callable[[Random, int], Seconds]:
    """A rank of a program with two, anywhere in the batch."""

    def kill(rng: Random, turn: int) -> Seconds:
        return kill_a_rank(turn % 2, rng.randint(1, 60), rng.uniform(0.0, 0.03), **{ways: 2})

    return kill


def in_server(choose: Callable[[int], Victims], *settings: str) -> Callable[[Random, int], Seconds]:
    """Whoever is chosen of a server's processes, given 0 and 1 in turns."""

    def kill(rng: Random, turn: int) -> Seconds:
        death = kill_once(rng, settings=(*settings, "--device", "cpu"), victims=choose(turn % 2))
        return Seconds(death.seconds_of_streams, death.seconds_of_server)

    return kill


KINDS = {
    "a rank of a program, tp=2": in_program("tensor_parallel_size"),
    "a rank of a program, pp=2": in_program("pipeline_parallel_size"),
    "the engine of a server": in_server(lambda turn: engine_processes),
    "a rank of a server, tp=2": in_server(rank_of_server, "--tensor-parallel-size", "2"),
    "a rank of a server, pp=2": in_server(rank_of_server, "--pipeline-parallel-size", "2"),
    "a replica of a server, dp=2": in_server(replica_of_server, "--data-parallel-size", "2"),
}


def die_again_and_again(seed: int, times: int, kinds: list[str]) -> int:
    """Prints what came of it; how often something was violated, which does not hide the next."""
    num_violations = 0
    for kind in kinds:
        rng, deaths = Random(f"{seed}, {kind}"), list[Seconds]()
        for turn in range(times):
            try:
                deaths.append(KINDS[kind](rng, turn))
            except (Violation, AssertionError) as violation:
                num_violations += 1
                print(f"violation: {kind}, death {turn + 1}: {violation}", flush=True)
        if deaths:
            requests, everything = (max(each) for each in zip(*deaths, strict=True))
            told = f"{requests:.2f} s at most to the end of requests, {everything:.2f} s to that of processes"
            print(f"{len(deaths)} of {times} deaths of {kind}: {told}", flush=True)
    return num_violations


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--seed", type=int, default=None, help="kill at the same times again")
    arguments = parser.parse_args()
    seed = Random().getrandbits(32) if arguments.seed is None else arguments.seed
    print(f"seed {seed}", flush=True)
    if num_violations := die_again_and_again(seed, arguments.times, arguments.kinds):
        print(f"{num_violations} violations with --seed {seed}")
        return 1
    print("no violation")
    return 0


if __name__ == "__main__":
    sys.exit(main())
