"""Rules without a server: every worker keeps a model of its own, and models are averaged."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from asyncsgd.rules.contract import PeerRule
from asyncsgd.settings.choices import parameter


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
        super().__post_init__()
        if self.topology not in ("complete", "ring"):
            raise ValueError(f"topology must be complete or ring, got {self.topology!r}")


@dataclasses.dataclass(frozen=True)
class SGP(PeerRule):
    """Without a server: synchronous rounds of push-sum averaging on the directed exponential graph.

    In round k worker i computes g_i at z_i = x_i / w_i and steps x_i <- x_i - eta g_i. It keeps half of (x_i, w_i) and
    sends the other half to worker i + 2^(k mod ceil(log2 N)) modulo N. Messages conserve sum w_i = N and sum x_i, if
    what is on its way is counted; only gradient steps change sum x_i. So z_i tends to the mean although x_i need not.
    With 2 workers and no delay it is synchronous SGD; with one worker, sequential SGD.

    A round takes as long as the slowest worker's gradient. Messages take no time of their own, so `delay` (overlap
    SGP) changes the iterates and not the clock. Gradients are always applied to the model at which they were computed.
    Only the neighbours' halves are late. A budget in samples is rounded up to whole rounds.

    Args:
        delay: rounds by which messages are late; those sent in round k are added at the end of round k + delay.

    Assran, Loizou, Ballas, Rabbat: Stochastic Gradient Push for Distributed Deep Learning, ICML 2019, algorithm 1
    (and overlap SGP).
    """

    lock_step: ClassVar[bool] = True

    delay: int = parameter(0, at_least=0)


@dataclasses.dataclass(frozen=True)
class StreamingDiLoCo(PeerRule):
    """Without a server: DiLoCo in fragments of the parameters, the outer results arriving `overlap` inner steps late.

    Fragment p holds parameters p, p + F, p + 2F, ... After the inner steps s = o_p, o_p + H, o_p + 2H, ... above 0,
    with the offset o_p = floor(p H / F), every worker sends x - y_i on the fragment; F = `fragments`:

        D = (1/N) sum_i (x - y_i),    m <- beta m + D,    x <- x - eta_outer (D + beta m)        (on the fragment)
        `overlap` inner steps later:  y_i <- mix y_i + (1 - mix) x                               (on the fragment)

    x is the outer parameters, on each fragment those after its last outer step. y_i is the model of worker i. One
    fragment, no overlap and mix 0 is DiLoCo. Every gradient is fresh: the delay is that of the outer result.

    Sending never blocks. Once the slowest worker has sent its part, the result is there for everybody
    `transfer_seconds` later. A worker takes it after `overlap` more inner steps of its own, and waits only if it is not
    there by then. With overlap 0 that is a barrier at every synchronisation, as in DiLoCo. Which worker waits changes
    nothing in what is computed, except where a budget ends in mid-round.

    Args:
        num_local_steps: H, inner steps between two synchronisations of the same fragment.
        fragments: at most H, so that each has an inner step of its own to be sent after.
        overlap: inner steps between sending and receiving, below H: a fragment is on its way once at a time.
        mix: share of the worker's own parameters that survives when a result arrives, in [0, 1).
        outer_learning_rate: eta_outer.
        outer_momentum: beta, in [0, 1).
        transfer_seconds: on the training clock, from the last worker's sending a fragment to the result's being there.

    Douillard, Donchev, Rush, Kale, Charles, Garrett, Teston, Lacey, McIlroy, Shen, Rame, Szlam, Ranzato, Barham:
    Streaming DiLoCo with overlapping communication: Towards a Distributed Free Lunch, 2025, algorithm 2. Deviations: a
    fragment is every F-th parameter in place of every F-th block of layers, and outer gradients are not quantised.
    """

    name: ClassVar[str] = "streaming_diloco"
    in_rounds: ClassVar[bool] = True

    num_local_steps: int = parameter(10, at_least=1)
    fragments: int = parameter(2, at_least=1)
    overlap: int = parameter(1, at_least=0)
    mix: float = parameter(0.5, at_least=0, below=1)
    outer_learning_rate: float = parameter(0.7, above=0)
    outer_momentum: float = parameter(0.9, at_least=0, below=1)
    transfer_seconds: float = parameter(0.0, at_least=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.fragments > self.num_local_steps or self.overlap >= self.num_local_steps:
            raise ValueError(
                f"fragments must be at most num_local_steps={self.num_local_steps} and overlap less, got "
                f"{self.fragments} and {self.overlap}"
            )

    def offset(self, fragment: int) -> int:
        """o_p, in inner steps.

        >>> [StreamingDiLoCo(num_local_steps=10, fragments=4).offset(fragment) for fragment in range(4)]
        [0, 2, 5, 7]
        """
        return fragment * self.num_local_steps // self.fragments
