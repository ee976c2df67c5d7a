"""Streaming DiLoCo; see `asyncsgd.rules.without_server` for the equations.

Workers step their own models. An outer step is taken when the last worker has sent its part of a fragment.

Shapes: N workers, P parameters (gaps of the flat vector included).
"""

from __future__ import annotations

from typing import Any

import torch

from asyncsgd.core.peers.models import Peers, sum_of
from asyncsgd.core.protocol import Arrived
from asyncsgd.errors import UsageError
from asyncsgd.rules.without_server import StreamingDiLoCo


class Streaming(Peers[StreamingDiLoCo]):
    """Streaming DiLoCo. In evaluations `version` counts outer steps, a fragment's as one.

    In `versions` inner steps and mixes count. Where a worker waits for the transfer of a result, the result is mixed
    into its model at once: nothing else can happen to the model meanwhile. The learning rate is that of the inner
    steps. Each worker takes the rate for N times its own steps, as if all workers were equally far, so that the
    iterates do not depend on the speeds.
    """

    KEPT = (
        *Peers.KEPT,
        "outer",
        "_momentum",
        "_sent",
        "_num_sent",
        "_ready_at",
        "_rounds",
        "_num_received",
        "_due",
        "_steps",
        "_since",
        "_idle_since",
        "_sent_statistics",
        "_mean_statistics",
    )

    def __init__(self, rule: StreamingDiLoCo, *arguments: Any, **named: Any) -> None:
        super().__init__(rule, *arguments, **named)
        number = self._num_workers
        fragments = rule.fragments
        num_parameters = len(self._mean)
        if fragments > num_parameters:
            raise UsageError(
                f"{fragments} fragments of {num_parameters} parameters leave some empty; "
                f"type fragments={num_parameters} or fewer"
            )
        self.outer = self._mean.detach().clone()
        """`(P,)`, the outer parameters."""
        self._momentum = torch.zeros_like(self.outer)
        self._sent = torch.zeros_like(self._vectors)
        # `(N, S)` and `(S,)`, what was sent and its mean; running statistics take no outer step.
        self._sent_statistics = self._statistics.clone()
        self._mean_statistics = self._statistics[0].clone()
        # Inner step modulo H -> the fragment that is sent, or received, after it; H = `num_local_steps`.
        self._sends: dict[int, int] = {}
        self._receives: dict[int, int] = {}
        for fragment in range(fragments):
            step = rule.offset(fragment)
            self._sends[step] = fragment
            self._receives[(step + rule.overlap) % rule.num_local_steps] = fragment
        # For each fragment:
        self._num_sent = [0] * fragments  # how many workers have sent it in this round
        self._rounds = [0] * fragments  # how many rounds are complete
        self._ready_at = [0.0] * fragments  # when the result of the last complete round is there, in seconds
        self._num_received = [[0] * number for _ in range(fragments)]  # how many results each worker has received
        self._due: list[list[int]] = [[] for _ in range(fragments)]  # the workers that wait for a result
        # For each worker:
        self._steps = [0] * number  # how many inner steps it has taken
        self._idle_since = [0.0] * number
        self._since: list[tuple[float, int]] = [(0.0, 0)] * number
        """(when the worker was mixed last, how many steps it has begun since). A group is the steps of a worker from
        one mix to the next. The times of a group are summed from its beginning all at once, so that rounding does not
        depend on how many steps a sum has."""

    def _rate(self, worker: int) -> float:
        return self._schedule((self._num_workers * self._steps[worker] + 1) * self._batch_size)

    def _begin_timing(self, worker: int) -> tuple[int, float]:
        """Time all steps of a worker since it was mixed last as one group.

        If a worker that was mixed at 10 s takes three steps, this returns (0, 10), (1, 10) and (2, 10), and leaves
        (10, 1), (10, 2) and (10, 3) in `_since`. Their `Work.num_local_steps` are 1, 2 and 3: the third gradient
        arrives when the times of all three have passed since 10 s.
        """
        since, number = self._since[worker]
        self._since[worker] = (since, number + 1)
        # The first step of a group waits for the transfer of the result that was mixed in, so it may begin after now.
        began = self._clock() if number else since
        self._waited[worker] = began - self._idle_since[worker]
        return number, since

    def _take(self, arrived: Arrived) -> tuple[float, list[int], bool]:
        """Take an inner step; then send the fragment that is to be sent, and receive the one that is due or wait for
        it.
        """
        worker = arrived.work.worker
        rule = self.rule
        learning_rate = self._rate(worker)
        self._step(worker, arrived, learning_rate)
        self._steps[worker] += 1
        self._idle_since[worker] = self._clock()
        step = self._steps[worker]
        to_send = self._sends.get(step % rule.num_local_steps)
        # In the first steps nothing has been sent yet that could arrive.
        to_receive = self._receives.get(step % rule.num_local_steps) if step > rule.overlap else None
        if to_receive is not None:
            self._due[to_receive].append(worker)
        if to_send is not None:
            self._send(worker, to_send)
        starting = [worker] if to_receive is None else self._receive(to_receive)
        if to_send is not None and to_send != to_receive:
            # The last worker to send completes the round, so those that waited for its result receive it now.
            starting += self._receive(to_send)
        return learning_rate, starting, True

    def _part(self, fragment: int) -> slice:
        """The elements of a fragment: every F-th parameter, so that all fragments have nearly the same size. The
        running statistics are divided in the same way.
        """
        return slice(fragment, None, self.rule.fragments)

    def _send(self, worker: int, fragment: int) -> None:
        """Take `worker`'s displacement on `fragment`. If it is the last worker's, take the outer step."""
        part = self._part(fragment)
        outer = self.outer[part]
        momentum = self._momentum[part]
        sent = self._sent[:, part]
        torch.sub(outer, self._vectors[worker, part], out=sent[worker])
        self._sent_statistics[worker, part] = self._statistics[worker, part]
        self._num_sent[fragment] += 1
        if self._num_sent[fragment] < self._num_workers:
            return
        self._num_sent[fragment] = 0
        self._rounds[fragment] += 1
        self._ready_at[fragment] = self._clock() + self.rule.transfer_seconds
        self.view.version += 1
        self._mean_statistics[part] = sum_of(self._sent_statistics[:, part]).div_(self._num_workers)
        mean = sum_of(sent).div_(self._num_workers)
        beta = self.rule.outer_momentum
        momentum.mul_(beta).add_(mean)  # Nesterov: m <- beta m + D, x <- x - eta_outer (D + beta m)
        outer.sub_(mean.add_(momentum, alpha=beta).mul_(self.rule.outer_learning_rate))

    def _receive(self, fragment: int) -> list[int]:
        """Mix the outer result into the models of the workers that wait for it, if its round is complete.

        Returns:
            These workers, which go on.
        """
        part = self._part(fragment)
        mix = self.rule.mix
        received = self._num_received[fragment]
        rounds = self._rounds
        # A fast worker may wait for the next round already, which is complete only once the slower ones have this one.
        receiving = sorted(worker for worker in self._due[fragment] if received[worker] < rounds[fragment])
        self._due[fragment] = [worker for worker in self._due[fragment] if received[worker] == rounds[fragment]]
        for worker in receiving:
            self._vectors[worker, part].mul_(mix).add_(self.outer[part], alpha=1.0 - mix)
            if self.statistics is not None:
                mixed = self.statistics.mixed(self._statistics[worker], self._mean_statistics, 1.0 - mix)
                self._statistics[worker, part] = mixed[part]
            received[worker] += 1
            self.versions[worker] += 1
            self._since[worker] = max(self._ready_at[fragment], self._clock()), 0
        return receiving
