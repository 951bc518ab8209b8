"""Draw the times at which requests arrive: ahead, from a seed, whatever the answers.

The gaps between arrivals have a gamma distribution with the shape `burstiness`. At 1 they are exponential, which makes
the arrivals a Poisson process: users who know nothing of each other. Below 1 they come in bursts, above it ever more
evenly. A rate of infinity sends all at once.
"""

from __future__ import annotations

import itertools
import math
import random


def arrival_times(
    num_requests: int, request_rate: float = math.inf, burstiness: float = 1.0, seed: int = 0
) -> list[float]:
    """Return [num_requests] seconds, rising from 0.

    Args:
        request_rate: requests per second, on average.

    Raises:
        ValueError: a number is out of its range.
    """
    for name, value in (("request_rate", request_rate), ("burstiness", burstiness)):
        if not value > 0:
            raise ValueError(f"{name}={value}: must be more than 0")
    if math.isinf(request_rate):
        return [0.0] * num_requests
    if math.isinf(burstiness):
        raise ValueError("burstiness=inf: must be a number; 1 is a Poisson process, 1000 is nearly even")
    rng = random.Random(f"arrivals {seed}")
    gaps = (rng.gammavariate(burstiness, 1 / (request_rate * burstiness)) for _ in range(num_requests - 1))
    return list(itertools.accumulate(gaps, initial=0.0))
