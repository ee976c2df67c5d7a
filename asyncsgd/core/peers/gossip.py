"""Gossip: workers average their models with neighbours; see `asyncsgd.rules.without_server` for the equations.

What is evaluated is the mean model. Gossip leaves it where it is, so it moves by the workers' steps divided by N, and
by nothing else.

Shapes: N workers, P parameters (gaps of the flat vector included).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from asyncsgd.core.peers.models import Peers, sum_of
from asyncsgd.core.protocol import Arrived
from asyncsgd.errors import UsageError
from asyncsgd.rules.without_server import ADPSGD, SGP
from asyncsgd.simulation.speeds import BLOCK, Streams, in_blocks

_PARTNERS = 13 << 32
"""What these random numbers are for, as `asyncsgd.data.random.Purpose` is, in the upper half of 64 bits. Neither there
nor in `asyncsgd.simulation.speeds` does 13 stand for anything else."""


def partners(topology: str, num_workers: int, seed: int) -> Callable[[int, int], int]:
    """Whom a worker averages with, as a function of (worker, how many batches it has computed before).

    The partner is a pure function of these and `seed`, uniform over the worker's neighbours.

    >>> partner = partners("ring", num_workers=5, seed=0)
    >>> sorted({partner(0, number) for number in range(20)})
    [1, 4]

    Args:
        topology: ``complete`` or ``ring``.
        num_workers: N, 2 or more.
    """
    streams = Streams(seed, _PARTNERS)
    ring = topology == "ring"
    num_neighbours = 2 if ring else num_workers - 1

    def choices(worker: int, block: int) -> Any:
        return streams.at(worker, block).integers(num_neighbours, size=BLOCK)

    choice_of = in_blocks(num_workers, BLOCK, choices)

    def partner(worker: int, number: int) -> int:
        choice: int = choice_of(worker, number)
        if ring:  # 0 is the worker before, 1 the worker after
            return (worker + 2 * choice - 1) % num_workers
        return choice if choice < worker else choice + 1  # nobody averages with itself

    return partner


class Averaging(Peers[ADPSGD]):
    """AD-PSGD. In evaluations `version` counts the gradients that were applied to all models.

    An average together with the step after it counts once in `versions`.
    """

    def __init__(self, rule: ADPSGD, *arguments: Any, **named: Any) -> None:
        super().__init__(rule, *arguments, **named)
        self._partner = partners(rule.topology, self._num_workers, self._seed)

    def _point(self, worker: int) -> Tensor:
        return self._vectors[worker].clone()  # a copy: other workers average this model while the gradient is in flight

    def _take(self, arrived: Arrived) -> tuple[float, list[int], bool]:
        worker = arrived.work.worker
        models = self._vectors
        learning_rate = self._schedule(self._num_arrived)
        if not arrived.gradient.weight:
            return learning_rate, [worker], True
        if self._num_workers > 1:
            partner = self._partner(worker, arrived.work.draw)
            models[worker].add_(models[partner]).mul_(0.5)
            models[partner].copy_(models[worker])
            self._average(worker, partner)
            self.versions[partner] += 1
        self._step(worker, arrived, learning_rate)
        self.view.version += 1
        return learning_rate, [worker], True

    def _average(self, worker: int, partner: int) -> None:
        """Average the running statistics of two workers."""
        if self.statistics is None:
            return
        own = self._statistics[worker].clone()
        others = self._statistics[partner].clone()
        self._statistics[worker] = self.statistics.mixed(own, others, 0.5)
        self._statistics[partner] = self.statistics.mixed(others, own, 0.5)


class Pushing(Peers[SGP]):
    """SGP: the numerators x_i and the weights w_i are kept, their quotient z_i is where gradients are computed.

    In evaluations `version` counts the gradients that were applied to all models, and what is on its way is part of the
    mean. The samples of a round count when it is over.
    """

    KEPT = (*Peers.KEPT, "weights", "in_transit", "_round", "_drawn", "_points")

    def __init__(self, rule: SGP, *arguments: Any, **named: Any) -> None:
        super().__init__(rule, *arguments, **named)
        if self._num_workers == 1 and rule.delay:
            raise UsageError(f"delay={rule.delay} has no effect: one worker sends no messages; type sgp:delay=0")
        self.weights = torch.ones_like(self._vectors[:, 0])
        """`(N,)`, the weights w_i."""
        self.in_transit: list[tuple[Tensor, Tensor, Tensor]] = []
        """What each worker will receive, `(N, P)` and `(N,)`, oldest first, and the sender's statistics, `(N, S)`."""
        self._round = 0
        self._points = self._vectors.clone()  # (N, P), the z_i at which this round's gradients are computed
        self._drawn = [0.0] * self._num_workers  # the seconds of each worker's gradient of this round

    @property
    def models(self) -> Tensor:
        return self._vectors / self.weights[:, None]

    def restored(self) -> None:
        """Bring statistics on their way to the CPU, where they belong: a state is read to the parameters' device."""
        on_their_way = []
        for numerators, weights, statistics in self.in_transit:
            on_their_way.append((numerators, weights, statistics.cpu()))
        self.in_transit = on_their_way

    def _sum(self) -> Tensor:
        total = sum_of(self._vectors)
        for numerators, _, _ in self.in_transit:
            total.add_(sum_of(numerators))
        return total

    def _point(self, worker: int) -> Tensor:
        return self._points[worker]

    def _take(self, arrived: Arrived) -> tuple[float, list[int], bool]:
        worker = arrived.work.worker
        # One learning rate a round: everybody's, with the round's samples counted.
        learning_rate = self._schedule(self.num_samples + self._num_workers * self._batch_size)
        self._step(worker, arrived, learning_rate)
        if arrived.gradient.weight:
            self.view.version += 1
        self._drawn[worker] = arrived.work.drawn
        if self.in_flight:  # the round is not over
            return learning_rate, [], False
        self._push()
        self._round += 1
        self._points = self.models
        self._waited = [max(self._drawn) - seconds for seconds in self._drawn]
        return learning_rate, list(range(self._num_workers)), True

    def _push(self) -> None:
        """Send half of everything along the exponential graph and receive what is due."""
        if self._num_workers == 1:
            return
        self._vectors.mul_(0.5)
        self.weights.mul_(0.5)
        num_distances = (self._num_workers - 1).bit_length()
        distance = 2 ** (self._round % num_distances)  # 1, 2, 4, ..., again and again: the exponential graph
        sent = (self._vectors.roll(distance, 0), self.weights.roll(distance), self._statistics.roll(distance, 0))
        self.in_transit.append(sent)
        if len(self.in_transit) > self.rule.delay:
            numerators, weights, statistics = self.in_transit.pop(0)
            self._vectors.add_(numerators)
            self.weights.add_(weights)
            if self.statistics is not None:
                share = (weights / self.weights)[:, None].cpu()
                self._statistics = self.statistics.mixed(self._statistics, statistics, share)

    def _average_statistics(self) -> None:
        """Give the mean model the mean of all running statistics, also of those on their way, as in `_sum`."""
        if self.statistics is None:
            return
        values = [self._statistics, *[statistics for _, _, statistics in self.in_transit]]
        weights = [self.weights, *[weights for _, weights, _ in self.in_transit]]
        self.statistics.become_mean(torch.cat(values), torch.cat(weights).cpu())
