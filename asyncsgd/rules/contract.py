"""The contract of a rule: an arriving gradient in, a reply out.

A rule is a frozen dataclass of hyperparameters. It sees values only: gradients in the order of their arrivals, each
with its seconds. It asks no clock, no random generator, no process group and no model. So one and the same object
decides on real processes, on a virtual clock and in a replay, which takes order and seconds from the log and computes
the gradients again.

Shapes: P elements of the flat vector, which holds all parameters one after the other, with gaps that align them; N
workers.

`View.KEPT` names the attributes of a view that are saved in checkpoints; the state of a rule is saved whole. See
`asyncsgd.core.state`. The structs have ``gc=False``: they are made thousands of times a second and are never part of a
cycle, so Python need not look for cycles among them.
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
    """Tells a worker to start a gradient. The worker must be idle, or this reply must abandon what it computes.

    Without an offset the worker starts at the current parameters. On real processes it may start at newer ones, if it
    begins later. With an offset, or in a rule with `exact_start` or `needs_points`, it starts at exactly the parameters
    after this reply's step, plus the offset.
    """

    worker: int
    """The worker's number, from 0."""
    num_local_steps: int = 1
    """The steps that the worker's inner optimizer is to take, in rules with `local_steps`."""
    offset: Tensor | None = None
    """`(P,)`, added to the parameters where the worker starts. The server reads it before it calls the rule again,
    which may then overwrite it."""


class Arrival(Struct, frozen=True, gc=False):
    """A gradient that has just arrived at the server."""

    worker: int
    """The number of the worker that brings the gradient, from 0."""
    dispatch: int
    """The number of this gradient. The server counts up, over all workers, each time it starts one."""
    read_version: int
    """The version of the parameters that the worker read when it began. It is higher than the version at which the
    server dispatched the gradient if others were applied between the dispatch and the read.
    """
    gradient: Tensor
    """`(P,)`, mean over the batch's loss terms; in rules with `local_steps` the pseudo-gradient, start minus end. It is
    memory that the worker's next gradient overwrites, valid during the call only: use it, add it or copy it.
    """
    weight: float
    """The number of loss terms in the gradient's mean, e.g. of masked tokens. A mean of several gradients weights each
    of them by it, unless a rule says that it does not.
    """
    num_samples: int
    """The number of samples in its batches."""
    seconds: float
    """The time from dispatch to arrival, on the training clock. It is recorded, so a replay gives the rule the same
    number."""
    num_local_steps: int = 1
    """The steps that the worker's inner optimizer took, in rules with `local_steps`."""
    start_point: Tensor | None = None
    """`(P,)`, the parameters that the gradient started from, with the offset; None in rules without `needs_points`. It
    is valid during the call only.
    """


class View:
    """What a rule may know of the server. The server writes these attributes, a rule only reads them.

    Attributes:
        version: number of updates applied.
        learning_rate: the schedule's value with this arrival's samples counted; 1 in rules with `local_steps`. In
            `join` and `leave` it is that of the last arrival.
        workers: the workers present, in order.
        in_flight: worker -> its gradient in flight, an `asyncsgd.core.protocol.Work`. Its `version` is the server's at
            the dispatch. Where the worker starts at exact parameters, it is the version of these, which may be older
            than the server's at the dispatch; see `Reply.again`. The oldest dispatch comes first. A gradient that
            arrives is no longer in it.
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
        """A start for every worker present, at the current parameters.

        It is made again when a worker comes or goes, and not at every step, since synchronous rules ask at each.
        """
        if self._everyone is None:
            self._everyone = tuple(map(Start, self.workers))
        return self._everyone

    def come(self, worker: int) -> None:
        """Add `worker` to those present. The server calls it."""
        bisect.insort(self.workers, worker)
        self._everyone = None

    def go(self, worker: int) -> Any:
        """Remove `worker`, and return the gradient that it had in flight, or None. The server calls it."""
        self.workers.remove(worker)
        self._everyone = None
        return self.in_flight.pop(worker, None)

    @property
    def parameters(self) -> Tensor:
        """`(P,)`, the server's parameters before this reply's step; only in rules with `needs_points`."""
        if self._parameters is None:
            raise RuntimeError("a rule that looks at the parameters sets needs_points = True")
        return self._parameters


class Reply(Struct, frozen=True, gc=False):
    """What the server is to do, in this order: step, abandon, start.

    A reply cannot be changed; ``msgspec.structs.replace(reply, ...)`` makes a changed copy.
    """

    direction: Tensor | None = None
    """`(P,)`, given to the server's optimizer in the place of a gradient: plain SGD does x <- x - learning_rate *
    direction. It is one step, and `version` grows by 1. None: no step. If `uses` is not empty and none of its gradients
    has a loss term, the server drops these and takes no step either. The direction is read only, so it may share memory
    with the rule's state or with the arrival's gradient.
    """
    learning_rate_factor: float = 1.0
    """A factor on the learning rate of this step. A factor on the *gradient* belongs in `direction`: under AdamW the
    two differ.
    """
    uses: tuple[int, ...] = ()
    """The dispatch numbers of the gradients in this step. The server records (dispatch, delay) of each."""
    drops: tuple[int, ...] = ()
    """The dispatch numbers of gradients, arriving or held, that will never be used."""
    abandon: tuple[int, ...] = ()
    """The dispatch numbers of gradients in flight that are to be stopped. Their batches are handed out again, and what
    they result in never reaches the rule.
    """
    start: tuple[Start, ...] = ()
    """The workers that start a gradient; see `Start`."""
    again: bool = False
    """Whether the server calls the rule's `resume` after this step, for another step at the same arrival. The workers
    of all these replies start after the last step. One that starts at exact parameters still gets those after the step
    of its own reply. The log has one event for all of it.
    """


@dataclasses.dataclass(frozen=True)
class Rule(Named):
    """Base of all rules: `init`, `join`, `leave`, `arrive`, and `resume` after a step with `Reply.again`. The state
    belongs to the caller. `Named` reads ``NAME:key=value,...`` as such an object and checks the bounds of its fields.

    The server calls `init` once, `join` for the initial workers in order, then `arrive` for every arrival. The state
    is updated in place and is part of checkpoints and replays: a dataclass of tensors, numbers and containers of them.
    """

    needs_plain_sgd: ClassVar[bool] = False
    """The rule has a momentum of its own. Other optimizers of the server, weight decay and clipping are then refused.
    """
    needs_points: ClassVar[bool] = False
    """The rule looks at `Arrival.start_point` and `View.parameters`, the parameters themselves. That costs a vector per
    worker. Its workers start at exactly the parameters after the reply's step. One whose batch had no loss term starts
    again at the parameters that are current then. In rules with `local_steps` it starts again at its point, since the
    worker goes on from a model of its own.
    """
    exact_start: ClassVar[bool] = False
    """Workers start at exactly the parameters after the reply's step, not at newer ones. A worker whose batch had no
    loss term starts again at the same parameters, not at the current ones.
    """
    local_steps: ClassVar[bool] = False
    """Workers step an inner optimizer, which the schedule's learning rate drives, and return start minus end.

    The server then steps plain SGD at learning rate 1: x <- x - direction. Abandoning is not possible.
    """
    hears_of_empty: ClassVar[bool] = False
    """`arrive` is also called for a gradient whose batch had no loss term, and whose weight is therefore 0. By default
    the server drops such a gradient and starts its worker again, and the rule does not hear of it.
    """
    moves_by_first_batch: ClassVar[bool] = False
    """Whether one gradient of a step alone moves the running statistics, as of BatchNorm: that whose batch has the
    lowest number, as torch's DDP keeps those of rank 0 alone. By default they are updated from all gradients of the
    step: one after the other or, in rules with `local_steps`, from their weighted mean.
    """
    in_rounds: ClassVar[bool] = False
    """All workers of a round start together, and one step takes all their gradients. If the run has a budget in
    samples, the server hands out no batch beyond it, so fewer workers may take part in the last round. Under other
    rules batches are handed out until the budget has arrived in gradients, and gradients then in flight are lost.
    """

    @property
    def elastic_rate(self) -> float | None:
        """alpha of an elastic rule: on an arrival, the running statistics of the server and those of the worker each
        move by this share towards the other. None: those of the server follow the gradients that it applies.
        """
        return None

    def init(self, like: Tensor) -> Any:
        """Return the rule's state for a new run. Read the shape, dtype and device of `like`, `(P,)`, and not its
        values.
        """
        return None

    def join(self, state: Any, worker: int, view: View) -> Reply:
        """Decide what follows when `worker` has entered `view.workers`. By default it starts at the current parameters
        and takes `self.num_local_steps` steps, or 1 if the rule has no such field.
        """
        return Reply(start=(Start(worker, getattr(self, "num_local_steps", 1)),))

    def leave(self, state: Any, worker: int, view: View) -> Reply:
        """Decide what follows when `worker` has gone from `view.workers` and `view.in_flight`. By default nothing."""
        return Reply()

    def arrive(self, state: Any, arrival: Arrival, view: View) -> Reply:
        """Decide what becomes of a gradient that has arrived: apply it, keep it, or drop it, and who starts next.

        Every gradient that arrives must be accounted for, at once or later: its dispatch stands in the `uses` of the
        step that has it in its direction, or in `drops`. A rule that keeps a gradient for later copies it. At the end
        of every reply somebody has to be in flight, unless nobody is present or the budget is spent.

        The delay of the gradient, if it is applied now, is ``view.version - arrival.read_version`` updates: 0 for a
        fresh one.

        Args:
            state: what `init` returned, of this run alone; updated in place.
            arrival: the gradient, `(P,)`, with its worker, weight and the version that was read. Its tensors are memory
                that the worker's next gradient overwrites: valid during the call only, to be read and not written.
            view: what the rule may know of the server. The arriving worker is idle now, so it is in `view.workers` and
                not in `view.in_flight`.

        Returns:
            What the server does, in this order, namely one optimizer step along `direction` (the version grows by one),
            the dispatches to abandon, the workers to start. ``Reply()`` keeps the gradient and leaves its worker idle.

        Asynchronous SGD, x_{k+1} = x_k - gamma g(x_{k - delay}), is one line:

        >>> class Asynchronous(Rule):
        ...     def arrive(self, state, arrival, view):
        ...         start = (Start(arrival.worker),)
        ...         return Reply(direction=arrival.gradient, uses=(arrival.dispatch,), start=start)
        >>> arrival = Arrival(1, dispatch=7, read_version=4, gradient="g", weight=1.0, num_samples=8, seconds=0.5)
        >>> reply = Asynchronous().arrive(None, arrival, View(5, 0.1, workers=(0, 1)))
        >>> reply.direction, reply.uses, [start.worker for start in reply.start]
        ('g', (7,), [1])
        """
        raise TypeError(f"{type(self).__name__} does not define arrive()")

    def resume(self, state: Any, view: View) -> Reply:
        """Decide what follows after the step of a reply with `again`. By default nothing."""
        return Reply()


@dataclasses.dataclass(frozen=True)
class PeerRule(Rule):
    """Base of the rules without a server: every worker keeps a model of its own.

    It derives from `Rule` so that it is found and configured by name, and none of `Rule`'s functions is called.
    `asyncsgd.core.peers` implements these rules, on the virtual clock and in a replay.
    """

    lock_step: ClassVar[bool] = False
    """Whether the workers go in lock-step: gradients that start together arrive together, when the slowest is done."""


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
        """Take all gradients out and return their mean, sum_i w_i g_i / sum_i w_i, `(P,)`, and their dispatch numbers.
        At least one gradient must be held.

        They are added in the order of (worker, dispatch), so the order of arrival changes no bit; the mean of one
        gradient is that gradient, bit for bit.
        """
        keys = sorted(self._gradients)
        dispatches = tuple([dispatch for _, dispatch in keys])
        total, total_weight = self._gradients.pop(keys[0])
        if len(keys) == 1:
            return total, dispatches
        total.mul_(total_weight)
        for key in keys[1:]:
            gradient, weight = self._gradients.pop(key)
            total.add_(gradient, alpha=weight)
            total_weight += weight
        if total_weight:  # else all weights are 0, and so is the sum
            total.div_(total_weight)
        return total, dispatches


class Collecting(Rule):
    """Base of the rules that hold gradients until there are enough, and then step along their mean.

    By default that is when nobody is in flight any more, and everybody idle starts again.
    """

    hears_of_empty: ClassVar[bool] = True

    def init(self, like: Tensor) -> Any:
        return Held()

    def arrive(self, state: Any, arrival: Arrival, view: View) -> Reply:
        state.add(arrival)
        return self.step_if_enough(state, view)

    def leave(self, state: Any, worker: int, view: View) -> Reply:
        return self.step_if_enough(state, view)

    def step_if_enough(self, state: Any, view: View) -> Reply:
        """Reply with the step along the gradients that are held if they are enough, else with nothing."""
        # If nobody is in flight, those that are held are all that there will be: the round is complete, or no batches
        # are left, or everybody has left. So it is when a run on real processes goes on from a checkpoint: all workers
        # leave then, and join again.
        is_waiting = view.in_flight and len(state) < self.num_required(view)
        if is_waiting or not len(state):
            return Reply()
        mean, uses = state.take()
        return Reply(self.direction(state, mean), uses=uses, start=self.who_starts(view))

    def num_required(self, view: View) -> float:
        """How many gradients make a step while somebody is in flight."""
        return math.inf

    def direction(self, state: Any, mean: Tensor) -> Tensor:
        """The direction of the step, `(P,)`, made of the `mean` of the gradients that were held, `(P,)`."""
        return mean

    def who_starts(self, view: View) -> tuple[Start, ...]:
        """The workers that start after the step."""
        return tuple([each for each in view.everyone if each.worker not in view.in_flight])
