"""Data parallelism (lesson 12): replicas of the engine, each with all of the model, share the requests among them.

A replica knows nothing of the others: at inference there are no gradients to exchange. So twice as many replicas take
twice as many requests, each as fast as before; weights are held as often, and a prefix that one has cached is new to
another. Only a mixture's experts may be shared, and then all step together (`distributed/lockstep.py`). Either way all
there is to decide is who gets a request, and that is this file.

Source: the balance is vLLM's, see "Data Parallel Deployment" in its documentation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence


def least_loaded(num_waiting: Sequence[int], num_running: Sequence[int]) -> int:
    """Return the replica with the smallest 4 * waiting + running, the first of several.

    A waiting request weighs more: it means that the replica has no room for another one in its steps.
    """
    loads = [4 * waiting + running for waiting, running in zip(num_waiting, num_running, strict=True)]
    return loads.index(min(loads))


class Balance:
    """Track how many requests each replica has, as the API process knows it.

    How many are unfinished is known here at any time, how many of them run only from a replica's last step. All others
    count as waiting, also those that are still on their way: a burst is spread before any replica has said a word.
    """

    def __init__(self, num_replicas: int, choose: Callable[[Sequence[int], Sequence[int]], int] | None = None) -> None:
        self._choose = choose or least_loaded
        self._num_unfinished = [0] * num_replicas
        self._num_running = [0] * num_replicas
        self._last_group: tuple[str | None, int] = (None, 0)

    def choose(self, group: str | None) -> int:
        """Choose the replica for a request.

        Args:
            group: of completions of one prompt, which come one after another. All go where the first went, since they
                share its blocks.
        """
        last_group, replica = self._last_group
        if group is None or group != last_group:
            running = [min(each) for each in zip(self._num_running, self._num_unfinished, strict=True)]
            waiting = [all_ - each for all_, each in zip(self._num_unfinished, running, strict=True)]
            replica = self._choose(waiting, running)
            self._last_group = group, replica
        self._num_unfinished[replica] += 1
        return replica

    def ended(self, replica: int) -> None:
        """Note that one of a replica's requests has ended."""
        self._num_unfinished[replica] -= 1

    def stepped(self, replica: int, num_running: int) -> None:
        """Note how many of a replica's requests took part in its last step."""
        self._num_running[replica] = num_running
