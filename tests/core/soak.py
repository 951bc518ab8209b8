"""Sixty seconds of random work for the scheduler, checked after every step.

    PYTHONPATH=.:kernels:cli python tests/core/soak.py --seconds 60

Prints the number of steps and "no violation"; or the seed that `--seed` plays again, what was violated, and exits 1.
"""

from __future__ import annotations

import argparse
import sys
import threading
import traceback
from collections import Counter
from random import Random

from teachllm.config import EngineConfig
from teachllm.core.request import FinishReason
from tests.core.world import Arrival, Setting, World


def make_setting(rng: Random) -> Setting:
    """A setting that `EngineConfig` accepts."""
    length = rng.choice([24, 48, 64])
    keeps_cache, chunked, contiguous = rng.random() < 0.9, rng.random() < 0.7, rng.random() < 0.1
    block_size = length if contiguous else rng.randint(1, 16)
    num_seqs = rng.randint(1, 12)
    whole = not (keeps_cache and chunked)
    config = EngineConfig(
        max_model_len=length,
        block_size=block_size,
        max_num_seqs=num_seqs,
        max_num_batched_tokens=rng.randint(length, 2 * length) if whole else rng.randint(num_seqs, length),
        enable_kv_cache=keeps_cache,
        enable_chunked_prefill=chunked,
        enable_prefix_caching=keeps_cache and not contiguous and rng.random() < 0.7,
        long_prefill_token_threshold=0 if whole else rng.choice([0, 0, 1, 5, 16]),
        scheduling_policy=rng.choice(["fcfs", "fcfs", "priority", "static"]),
        async_scheduling=keeps_cache and rng.random() < 0.5,
    )
    one = -(-length // block_size)
    num_blocks = rng.randint(one, one + 2) if rng.random() < 0.5 else rng.randint(one, 5 * one)
    max_drafts, seed = rng.choice([0, 0, 1, 3]), rng.getrandbits(16)
    return Setting(config.resolve(length), num_blocks, rng.randint(1, 4), max_drafts, seed)


def make_arrival(rng: Random) -> Arrival:
    return Arrival(
        family=rng.randrange(3),
        shared=rng.randint(1, 40),
        tail=tuple(rng.randint(2, 9) for _ in range(rng.choice([0, 0, 1, 4]))),
        n=rng.choice([1, 1, 1, 2, 3]),
        max_tokens=rng.choice([1, 2, 5, 9, 24, 24, None]),
        min_tokens=rng.choice([0, 0, 1]),
        priority=rng.randint(-1, 1),
        salt=rng.choice([None, None, None, "a"]),
        waits_for_ids=rng.random() < 0.2,
        prompt_logprobs=rng.random() < 0.1,
        stops=rng.random() < 0.5,
        ignore_eos=rng.random() < 0.5,
    )


def run_world(seed: int) -> World:
    """One world from its arrivals to its end."""
    rng = Random(seed)
    world = World(make_setting(rng))
    for _ in range(rng.randint(20, 120)):
        dice = rng.random()
        if dice < 0.2 and len(world.live) < 16:
            world.add(make_arrival(rng))
        elif dice < 0.24:
            world.finish(rng.randrange(16), rng.choice([FinishReason.ABORT, FinishReason.STOP]))
        elif dice < 0.26 and not world.is_full:
            world.schedule(fails=rng.randint(1, 2))
        elif dice < 0.27:
            world.reset_prefix_cache()
        elif dice < 0.5:
            world.retire()
        else:
            world.step()
    world.drain()
    return world


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=None, help="play one seed again, or start from it")
    arguments = parser.parse_args()
    seed = Random().getrandbits(32) if arguments.seed is None else arguments.seed
    print(f"first seed {seed}", flush=True)
    counts: Counter[str] = Counter()
    time_is_up = threading.Event()
    timer = threading.Timer(arguments.seconds, time_is_up.set)
    timer.daemon = True
    timer.start()
    while not time_is_up.is_set():
        try:
            world = run_world(seed)
        except Exception:
            traceback.print_exc(file=sys.stdout)
            print(f"violation with --seed {seed}, after {counts['steps']:,} steps without one")
            return 1
        counts["worlds"] += 1
        counts["steps"] += world.num_steps
        counts["requests"] += world.num_finished
        counts["preemptions"] += world.num_preempted
        seed += 1
    print(", ".join(f"{count:,} {what}" for what, count in counts.items()))
    print(f"{counts['steps']:,} steps, no violation")
    return 0


if __name__ == "__main__":
    sys.exit(main())
