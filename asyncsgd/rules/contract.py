"""The contract of a rule: an arriving gradient in, a reply out.

A rule is a frozen dataclass of hyperparameters. It sees values only, all of them functions of the order of
arrivals: no clock, no random generator, no process group, no model. So one and the same object decides on real
processes, on a virtual clock and in a replay.

Shapes: P elements of the flat vector, which holds all parameters one behind the other, with gaps that align them; N
workers.

What a class names in `KEPT` stands in checkpoints; see `asyncsgd.core.state`.
"""

from __future__ import annotations

import bisect
import dataclasses
import math
from collections.abc import Sequence
from typing import Any, ClassVar

from msgspec import Struct
from torch import Tensor

from asyncsgd.settings.choices import Named


class Start(Struct, frozen=True, gc=False):
    """A worker that is to start a gradient: it is idle, or this reply abandons the gradient that it computes.

    Without an offset it starts at the current parameters. On real processes it may start at newer ones, if it begins
    later. With an offset, or in a rule with `exact_start` or `needs_points`, it starts at exactly the parameters after
    this reply's step, plus the offset.
    """

    worker: int
    """Its number, from 0."""
    num_local_steps: int = 1
    """Steps of the worker's inner optimizer, in rules with `local_steps`."""
    offset: Tensor | None = None
    """`(P,)`, added to the parameters; read during the call only."""


class Arrival(Struct, frozen=True, gc=False):
    """A gradient that has just arrived at the server."""

    worker: int
    """The number of the worker that brings it, from 0."""
    dispatch: int
    """Number of this gradient: the server counts up, over all workers, each time it starts one."""
    read_version: int
    """The version of the parameters that the worker has read. It is at least the version at which the server had
    dispatched the gradient, which `View.in_flight` has, and is higher where others were applied before the read.
    """
    gradient: Tensor
    """`(P,)`, mean over the batch's loss terms; in rules with `local_steps` the pseudo-gradient, start minus end. It is
    memory that the worker's next gradient overwrites, valid during the call only: use it, add it or copy it.
    """
    weight: float
    """Loss terms behind the gradient (masked tokens). Means over arrivals use it as their weight."""
    num_samples: int
    """Samples of its batches."""
    seconds: float
    """Time from dispatch to arrival. It is recorded, so a replay gives the rule the same number."""
    num_local_steps: int = 1
    """Steps of the worker's inner optimizer, in rules with `local_steps`."""
    start_point: Tensor | None = None
    """`(P,)`, the parameters that the gradient started from, offset included; only in rules with `needs_points`. Valid
    during the call.
    """


class View:
    """What a rule may know of the server, which writes it; rules read it.

    Attributes:
        version: number of updates applied.
        learning_rate: the schedule's value with this arrival's samples counted; 1 in rules with `local_steps`. In
            `join` and `leave` it is that of the last arrival.
        workers: the workers present, in order.
        in_flight: worker -> its gradient in flight (`dispatch`, `version` at its start, `num_local_steps`), oldest
            dispatch first, the arriving worker already removed; see `asyncsgd.core.protocol.Work`.
    """

    __slots__ = ("_everyone", "_parameters", "in_flight", "learning_rate", "version", "workers")
    KEPT = ("version", "workers", "in_flight")

    def __init__(
        self,
        version: int = 0,
        learning_rate: float = 0.0,
        workers: Sequence[int] = (),
        parameters: Tensor | None = None,
    ) -> None:
        self.version = version
        self.learning_rate = learning_rate
        self._parameters = parameters
        self.workers = list(workers)
        self.in_flight = dict[int, Any]()
        self._everyone: tuple[Start, ...] | None = None

    @property
    def everyone(self) -> tuple[Start, ...]:
        """A start for every worker present, at the current parameters; one object until somebody comes or goes."""
        if self._everyone is None:
            self._everyone = tuple(map(Start, self.workers))
        return self._everyone

    def come(self, worker: int) -> None:
        """`worker` is present from now on; called by the server."""
        bisect.insort(self.workers, worker)
        self._everyone = None

    def go(self, worker: int) -> Any:
        """`worker` is present no more; what it had in flight, or None. Called by the server."""
        self.workers.remove(worker)
        self._everyone = None
        return self.in_flight.pop(worker, None)

    @property
    def parameters(self) -> Tensor:
        """`(P,)`, before this reply's step; only in rules with `needs_points`."""
        if self._parameters is None:
            raise RuntimeError("a rule that looks at the parameters sets needs_points = True")
        return self._parameters


class Reply(Struct, frozen=True, gc=False):
    """What the server is to do, in this order: step, abandon, start. `msgspec.structs.replace` changes one."""

    direction: Tensor | None = None
    """One optimizer step along it, `version` + 1; `(P,)`, read-only, may share memory with the rule's state or
    with the arrival's gradient.
    """
    learning_rate_factor: float = 1.0
    """For this step only. A factor on the *gradient* belongs in `direction`: under AdamW the two differ."""
    uses: tuple[int, ...] = ()
    """Dispatches whose gradients are in this step; the server records (dispatch, delay)."""
    drops: tuple[int, ...] = ()
    """Dispatches, arriving or held, that will never be used."""
    abandon: tuple[int, ...] = ()
    """Dispatches in flight to be stopped; their batches are handed out again, and their results never reach the
    rule.
    """
    start: tuple[Start, ...] = ()
    """Workers that start a gradient; see `Start`."""
    again: bool = False
    """Call `resume` after this reply's step and abandons. The starts of all replies follow at the end, and all of it
    stands in one record.
    """


@dataclasses.dataclass(frozen=True)
class Rule(Named):
    """Base of all rules: `init`, `join`, `leave`, `arrive`, `resume`; the state belongs to the caller.

    The runtime calls `init` once, `join` for the initial workers in order, then `arrive` for every arrival. The state
    is updated in place and is part of checkpoints and replays: a dataclass of tensors, numbers and containers of them.
    """

    needs_plain_sgd: ClassVar[bool] = False
    """The rule has a momentum or an elastic pull of its own. Other optimizers of the server, weight decay and clipping
    are then refused.
    """
    needs_points: ClassVar[bool] = False
    """The rule looks at `Arrival.start_point` and `View.parameters`. That costs a vector per worker, and implies
    `exact_start`.
    """
    exact_start: ClassVar[bool] = False
    """Workers start at exactly the parameters after the reply's step, not at newer ones."""
    local_steps: ClassVar[bool] = False
    """Workers step an inner optimizer, which the schedule's learning rate drives, and return start minus end.

    The server then steps plain SGD at learning rate 1, so a direction is a displacement. Abandoning is not possible.
    """
    hears_of_empty: ClassVar[bool] = False
    """`arrive` is called for a gradient without a loss term too, whose weight is 0. By default the server drops it and
    starts its worker again, and the rule does not hear of it.
    """
    moves_by_first_batch: ClassVar[bool] = False
    """Running statistics, as of BatchNorm, follow one gradient of a step: that of the lowest batch, as torch's DDP has
    those of rank 0 alone. By default they follow all gradients of a step, one after the other.
    """
    in_rounds: ClassVar[bool] = False
    """All workers of a round start together, and one step takes all their gradients. No batches beyond a budget in
    samples are handed out, so the last round may be short. Under other rules a run ends while workers still compute.
    """

    @property
    def elastic_rate(self) -> float | None:
        """alpha of an elastic rule: on an arrival, the running statistics of the server and those of the worker each
        move by this share towards the other. None: the server's follow the gradients that are used.
        """
        return None

    def init(self, like: Tensor) -> Any:
        """Return the rule's state for a new run. Read the shape, dtype and device of `like`, `(P,)`, and not its
        values.
        """
        return None

    def join(self, state: Any, worker: int, view: View) -> Reply:
        """`worker` has entered `view.workers`. By default it starts at the current parameters, and takes the rule's
        `num_local_steps` where it has them.
        """
        return Reply(start=(Start(worker, getattr(self, "num_local_steps", 1)),))

    def leave(self, state: Any, worker: int, view: View) -> Reply:
        """`worker` has gone from `view.workers` and from `view.in_flight`. By default nothing follows."""
        return Reply()

    def arrive(self, state: Any, arrival: Arrival, view: View) -> Reply:
        """Decide what becomes of a gradient that has arrived: apply it, keep it, or drop it, and who starts next.

        Every gradient that arrives must be accounted for, at once or later: its dispatch stands in the `uses` of the
        step that has it in its direction, or in `drops`. A rule that keeps a gradient for later copies it. At the end
        of every reply somebody has to be in flight, unless nobody is present or the budget is spent.

        Args:
            state: what `init` returned, of this run alone; updated in place.
            arrival: the gradient, `(P,)`, with its worker, weight and the version that was read. Its tensors are the
                worker's slot: valid during the call only, to be read and not written.
            view: what the rule may know of the server. The arriving worker is idle now, so it is in `view.workers` and
                not in `view.in_flight`.

        Returns:
            What the server does, in this order, namely one optimizer step along `direction` (the version grows by one),
            the dispatches to abandon, the workers to start. ``Reply()`` keeps the gradient and leaves its worker idle.

        The delay of the gradient, if it is applied now, is ``view.version - arrival.read_version`` updates: 0 for a
        fresh one. Asynchronous SGD, x_{k+1} = x_k - gamma g(x_{k - delay}), is one line:

        >>> class Asynchronous(Rule):
        ...     def arrive(self, state, arrival, view):
        ...         return Reply(arrival.gradient, uses=(arrival.dispatch,), start=(Start(arrival.worker),))
        >>> arrival = Arrival(1, dispatch=7, read_version=4, gradient="g", weight=1.0, num_samples=8, seconds=0.5)
        >>> reply = Asynchronous().arrive(None, arrival, View(5, 0.1, workers=(0, 1)))
        >>> reply.direction, reply.uses, [start.worker for start in reply.start]
        ('g', (7,), [1])
        """
        raise TypeError(f"{type(self).__name__} does not define arrive()")

    def resume(self, state: Any, view: View) -> Reply:
        """Go on after a reply with `again`; by default nothing follows."""
        return Reply()


@dataclasses.dataclass(frozen=True)
class PeerRule(Rule):
    """Base of the rules without a server: every worker keeps a model of its own. It is a `Rule` for its name and its
    parameters alone.

    `asyncsgd.core.peers` carries them out, on the virtual clock and in a replay; none of `Rule`'s functions is called.
    """

    together: ClassVar[bool] = False
    """Whether gradients that start together arrive together, when the slowest is done."""


class Held:
    """Copies of gradients that have arrived and wait, with their weights.

    >>> import torch
    >>> held = Held()
    >>> held.add(Arrival(1, 7, 0, torch.tensor([4.0]), weight=1.0, num_samples=1, seconds=0.0))
    >>> held.add(Arrival(0, 9, 0, torch.tensor([1.0]), weight=3.0, num_samples=1, seconds=0.0))
    >>> mean, dispatches = held.take()
    >>> mean.item(), dispatches
    (1.75, (9, 7))
    """

    def __init__(self) -> None:
        self._gradients: dict[tuple[int, int], tuple[Tensor, float]] = {}

    def add(self, arrival: Arrival) -> None:
        """Copy the arriving gradient."""
        self._gradients[arrival.worker, arrival.dispatch] = (arrival.gradient.clone(), arrival.weight)

    def __len__(self) -> int:
        return len(self._gradients)

    def take(self) -> tuple[Tensor, tuple[int, ...]]:
        """Take all out: sum_i w_i g_i / sum_i w_i, `(P,)`, and the dispatches; one gradient at least is held.

        They are added in the order of (worker, dispatch), so the order of arrival changes no bit; the mean of one
        gradient is that gradient, bit for bit.
        """
        keys = sorted(self._gradients)
        (mean, weight), *others = map(self._gradients.pop, keys)
        if others:
            mean.mul_(weight)
            for gradient, its_weight in others:
                mean.add_(gradient, alpha=its_weight)
                weight += its_weight
            if weight:  # else all weights are 0, and so is the sum
                mean.div_(weight)
        return mean, tuple([dispatch for _, dispatch in keys])


class Collecting(Rule):
    """Base of the rules that hold gradients until there are enough, and then step along their mean.

    By default that is when nobody is in flight any more, and everybody idle starts again.
    """

    hears_of_empty: ClassVar[bool] = True

    def init(self, like: Tensor) -> Any:
        return Held()

    def arrive(self, state: Any, arrival: Arrival, view: View) -> Reply:
        state.add(arrival)
        return self.fire(state, view)

    def leave(self, state: Any, worker: int, view: View) -> Reply:
        return self.fire(state, view)

    def fire(self, state: Any, view: View) -> Reply:
        """The step along what is held, if it is enough; nothing if not."""
        # Where nobody is in flight nothing more will come: the round is complete, or no batches are left.
        if not len(state) or (view.in_flight and len(state) < self.enough(view)):
            return Reply()
        mean, uses = state.take()
        return Reply(self.direction(state, mean), uses=uses, start=self.following(view))

    def enough(self, view: View) -> float:
        """How many gradients make a step while somebody is in flight."""
        return math.inf

    def direction(self, state: Any, mean: Tensor) -> Tensor:
        """What is stepped along, `(P,)`."""
        return mean

    def following(self, view: View) -> tuple[Start, ...]:
        """Who starts after the step."""
        return tuple([each for each in view.everyone if each.worker not in view.in_flight])
