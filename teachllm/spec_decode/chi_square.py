"""Pearson's chi-square test: do counts fit what was expected of them, or is more than chance at work?

Source: Pearson, "On the criterion that a given system of deviations ... can be reasonably supposed to have arisen
from random sampling", 1900.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

_FEWEST_EXPECTED = 5.0  # of a cell, for its count to be near enough to normal


def chi_square_test(found: Sequence[int], expected: Sequence[float]) -> tuple[float, int, float]:
    """Apply Pearson's test to counts and what was expected of each.

    Cells of which little is expected are put together, the rarest first, until enough is expected of them.

    Returns:
        chi-square, its degrees of freedom, and the probability of one as large if nothing but chance is at work.
    """
    if any(count for count, share in zip(found, expected, strict=True) if share == 0.0):
        return math.inf, len(expected) - 1, 0.0  # what is impossible has happened
    groups: list[tuple[float, float]] = []
    group_found = group_expected = 0.0
    for share, count in sorted(zip(expected, found, strict=True)):
        group_found, group_expected = group_found + count, group_expected + share
        if group_expected >= _FEWEST_EXPECTED:
            groups.append((group_found, group_expected))
            group_found = group_expected = 0.0
    chi_square = sum((count - share) ** 2 / share for count, share in groups)
    return chi_square, len(groups) - 1, upper_gamma((len(groups) - 1) / 2, chi_square / 2)


def upper_gamma(a: float, x: float) -> float:
    """Compute the regularised upper incomplete gamma function Q(a, x), for a > 0 and x >= 0.

    By the series of 1 - Q below x = a + 1, by Lentz's continued fraction of Q above it: each converges fast there, and
    a small Q is no difference of large numbers. Source: Press et al., "Numerical Recipes", section 6.2.
    """
    if x == 0.0:
        return 1.0
    factor = math.exp(a * math.log(x) - x - math.lgamma(a))
    if x < a + 1.0:
        term = total = 1.0 / a
        n = 0
        while term > total * 1e-17:
            n += 1
            term *= x / (a + n)
            total += term
        return 1.0 - factor * total
    tiny = 1e-300
    b = x + 1.0 - a
    c, d = 1.0 / tiny, 1.0 / b
    fraction = d
    for n in range(1, 10_000):
        step = -n * (n - a)
        b += 2.0
        d = step * d + b
        c = b + step / c
        d, c = 1.0 / (d or tiny), c or tiny
        fraction *= d * c
        if abs(d * c - 1.0) < 1e-16:
            break
    return factor * fraction
