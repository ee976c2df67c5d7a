"""AD-PSGD and SGP: workers average their models with one another; there is no server."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from asyncsgd.named_choices import parameter
from asyncsgd.rules.base import PeerRule


@dataclasses.dataclass(frozen=True)
class ADPSGD(PeerRule):
    """Without a server: who has finished a gradient averages models with one random neighbour, then takes its step.

    With x_i the model of worker i, j a uniformly random neighbour of i, and g_i computed at the x_i of its start:

        x_i, x_j <- (x_i + x_j) / 2,    x_i <- x_i - eta g_i

    The delay of g_i is how often partners averaged x_i away from where g_i was computed; the average that i itself
    starts belongs to its step and is not counted. Every exchange adds one to the delay of one gradient in flight, so
    delays are 1 on average, whatever the speeds and the graph.

    With one worker there is nobody to average with: sequential SGD. Real processes need a bipartite graph, or two
    workers could wait for each other. Here an exchange takes no time and is atomic, so any graph will do.

    Args:
        topology: ``complete``, everybody is a neighbour of everybody; or ``ring``, workers i - 1 and i + 1.

    Lian, Zhang, Zhang, Liu: Asynchronous Decentralized Parallel Stochastic Gradient Descent, ICML 2018, algorithm 1.
    """

    name: ClassVar[str] = "ad_psgd"

    topology: str = "complete"

    def __post_init__(self) -> None:
        if self.topology not in ("complete", "ring"):
            raise ValueError(f"topology must be complete or ring, got {self.topology!r}")


@dataclasses.dataclass(frozen=True)
class SGP(PeerRule):
    """Without a server: synchronous rounds of push-sum averaging on the directed exponential graph.

    In round k worker i computes g_i at z_i = x_i / w_i and steps x_i <- x_i - eta g_i. It keeps half of (x_i, w_i) and
    sends the other half to worker i + 2^(k mod ceil(log2 N)) modulo N. Sum w_i = N and, but for the gradients, sum x_i
    are conserved, what is on its way included; so z_i tends to the mean although x_i need not. With 2 workers and no
    delay it is synchronous SGD; with one worker, sequential SGD.

    A round takes as long as the slowest worker's gradient. Messages take no time of their own, so `delay` (overlap
    SGP) changes the iterates and not the clock. Gradients are always applied to the model at which they were computed.
    Only the neighbours' halves are late. A budget in samples is rounded up to whole rounds.

    Args:
        delay: rounds by which messages are late; those sent in round k are added at the end of round k + delay.

    Assran, Loizou, Ballas, Rabbat: Stochastic Gradient Push for Distributed Deep Learning, ICML 2019, algorithm 1
    (and overlap SGP).
    """

    together: ClassVar[bool] = True

    delay: int = parameter(0, at_least=0)
