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

    In `versions` inner steps and mixes count. A model that waits for the transfer of a result has it mixed in already:
    nothing else can happen to it meanwhile. The learning rate is that of the inner steps. A worker asks for it as if
    all were as far as it is, so that the iterates do not depend on the speeds.
    """

    KEPT = (
        *Peers.KEPT,
        *("outer", "_momentum", "_sent", "_num_sent", "_ready_at", "_rounds", "_num_received", "_due"),
        *("_steps", "_since", "_idle_since", "_sent_statistics", "_mean_statistics"),
    )

    def __init__(self, rule: StreamingDiLoCo, *arguments: Any, **named: Any) -> None:
        super().__init__(rule, *arguments, **named)
        number = self._num_workers
        period = rule.num_local_steps
        if rule.fragments > len(self._mean):
            raise UsageError(
                f"{rule.fragments} fragments of {len(self._mean)} parameters leave some empty; "
                f"type fragments={len(self._mean)} or fewer"
            )
        self.outer = self._mean.detach().clone()
        """`(P,)`, the outer parameters."""
        self._momentum, self._sent = torch.zeros_like(self.outer), torch.zeros_like(self._vectors)
        # `(N, S)` and `(S,)`; no outer step touches them.
        self._sent_statistics = self._statistics.clone()
        self._mean_statistics = self._statistics[0].clone()
        # By inner step modulo H:
        self._sends = {rule.offset(fragment): fragment for fragment in range(rule.fragments)}
        self._receives = {(step + rule.overlap) % period: fragment for step, fragment in self._sends.items()}
        # Of each fragment: who has sent it in this round; rounds; when the last one's result is there; the results
        # that each worker has received; who waits for one.
        self._num_sent = [0] * rule.fragments
        self._rounds = [0] * rule.fragments
        self._ready_at = [0.0] * rule.fragments
        self._num_received = [[0] * number for _ in range(rule.fragments)]
        self._due: list[list[int]] = [[] for _ in range(rule.fragments)]
        # Of each worker:
        self._steps = [0] * number
        self._idle_since = [0.0] * number
        # Its clock is exact from mix to mix, so that a round's seconds do not depend on how they are added up: when it
        # was mixed last, and the steps that it has begun since.
        self._since: list[tuple[float, int]] = [(0.0, 0)] * number

    def _rate(self, worker: int) -> float:
        return self._schedule((self._num_workers * self._steps[worker] + 1) * self._batch_size)

    def _place(self, worker: int) -> tuple[int, float]:
        """All its steps since it was mixed last are timed together."""
        since, number = self._since[worker]
        self._since[worker] = since, number + 1
        self._waited[worker] = (self._clock() if number else since) - self._idle_since[worker]
        return number, since

    def _take(self, arrived: Arrived) -> tuple[float, list[int], bool]:
        """An inner step is done: send what is to be sent, then receive what is due or wait for it, then go on."""
        worker = arrived.work.worker
        rule = self.rule
        learning_rate = self._rate(worker)
        self._step(worker, arrived, learning_rate)
        self._steps[worker] += 1
        self._idle_since[worker] = self._clock()
        step = self._steps[worker]
        sending = self._sends.get(step % rule.num_local_steps)
        # In the first steps nothing has been sent yet that could arrive.
        due = self._receives.get(step % rule.num_local_steps) if step > rule.overlap else None
        if due is not None:
            self._due[due].append(worker)
        if sending is not None:
            self._send(worker, sending)
        following = [worker] if due is None else self._receive(due)
        if sending is not None and sending != due:
            following += self._receive(sending)
        return learning_rate, following, True

    def _part(self, fragment: int) -> slice:
        return slice(fragment, None, self.rule.fragments)

    def _send(self, worker: int, fragment: int) -> None:
        """Take `worker`'s displacement on `fragment`; with the last worker's, take the outer step."""
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
        momentum.mul_(beta).add_(mean)
        outer.sub_(mean.add_(momentum, alpha=beta).mul_(self.rule.outer_learning_rate))

    def _receive(self, fragment: int) -> list[int]:
        """Mix the outer result into the models of those who wait for it, if its round is complete; they go on."""
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
