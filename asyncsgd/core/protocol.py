"""The protocol between a method, which decides, a backend, which computes, and the loop between the two.

A method is an algorithm as a whole: a server with its rule, or peers. The user chooses a runtime, such as `Virtual(4)`
(`asyncsgd.run.runtimes`); a backend is the object that carries it out. A gradient in flight is a `Work`. What may
happen is `Happened`: a worker joined, a worker left, or a gradient arrived. A `Step` is the method's answer to it: what
starts, what stops and what is recorded. Elsewhere a step is one of the optimizer.

Shapes: P parameters (gaps of the flat vector included), S running statistics of the model, as of BatchNorm. The effect
of a gradient on the statistics is `(3, S)`. Its rows are s_1, the statistics after the gradient; s_0, those that it
began with; and q, the weight that s_0 still has in s_1. See `asyncsgd.core.running_statistics`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from msgspec import Struct
from torch import Tensor

from asyncsgd.records.events import Evaluation, Gradient, Ranges, Record, StageUse, Taken


class Work(Struct, gc=False):
    """A gradient in flight. The rule's view, the backend and `Arrived` share this object."""

    worker: int
    """The number of the worker, from 0."""
    dispatch: int
    """The number of this gradient. Gradients are counted over all workers, in the order of the starts."""
    version: int
    """The server's version when it dispatched this gradient. The worker may read a newer one when it begins. If there
    is a `point`, this is the version of the point, which may be older than the dispatch."""
    num_local_steps: int
    """Under a server, the number of batches of the gradient: 1, or with local steps as many as the worker's inner
    optimizer takes steps. The gradient takes so many of the worker's random computing times, those with the numbers
    `draw`, `draw` + 1, and so on. For peers it is a count of these times too, from `began` to the arrival, but not of
    batches: the gradient of a peer has one batch, and the times of a group of steps are counted from the beginning of
    the group, so this is 1, 2, ... for its first, second, ... gradient."""
    batches: Ranges
    """The batches of the gradient: ranges of positions in a stream of batches. Simulated problems have
    a stream for each worker (`OwnStreams`), tasks one for all (`BatchStream`)."""
    point: Tensor | None
    """`(P,)`, where the gradient is to be computed: the parameters of `version`, plus the offset of its `Start` if that
    has one. To be read, not changed. None: the worker takes the parameters that it finds when it begins. The virtual
    clock computes a gradient only when it arrives, so it keeps the parameters of the start here."""
    rate: float | None
    """The learning rate of local steps; None without them."""
    began: float
    """When the gradient was dispatched, in seconds of the training clock; a worker may read the parameters later. For
    peers: when the first gradient of its group was dispatched; see `num_local_steps`."""
    draw: int
    """Each batch of a worker uses one of its random computing times, which are numbered from 0 for each worker. This is
    the number of the time of this gradient's first batch or, for peers, of the first batch of its group."""
    drawn: float = 0.0
    """The computing time that the virtual clock drew for the last batch of this gradient, in seconds. Only the records
    of peers use it, whose gradients have one batch."""
    statistics: Tensor | None = None
    """`(S,)`, the running statistics at `point`; None if the model has none, or if there is no `point`."""


class Pinned(Struct, frozen=True, gc=False):
    """A start at exactly these parameters. The server holds it until there are batches, and then makes a `Work` of
    it."""

    worker: int
    num_local_steps: int
    version: int
    point: Tensor
    """`(P,)`, the parameters."""
    statistics: Tensor | None
    """`(S,)`, the running statistics; None if the model has none."""


class Moved(Struct, frozen=True, gc=False):
    """What one gradient did to the running statistics of its worker's model. The server keeps it until it uses the
    gradient, and its own statistics follow, or until it drops the gradient."""

    worker: int
    batches: Ranges
    """The batches of the gradient, for rules that follow the first batch of a step alone."""
    vectors: Tensor
    """`(3, S)`, the effect of the gradient on the statistics."""
    weight: float
    """The number of loss terms in the gradient's mean."""


class Joined(Struct, frozen=True, gc=False):
    """`worker` takes part from now on."""

    worker: int


class Left(Struct, frozen=True, gc=False):
    """`worker` is gone, and so is the gradient that it had in flight."""

    worker: int
    reason: str = ""
    """Why the worker is gone; empty if it leaves in good order. `STOPPED` of
    `asyncsgd.records.events` says that it was there when the run was stopped, and joins again."""


class Arrived(Struct, frozen=True, gc=False):
    """A gradient that was in flight has arrived."""

    work: Work
    """What its worker was given."""
    read_version: int
    """The version at which the gradient was computed."""
    vector: Tensor
    """`(P,)`, the gradient itself, or start minus end of local steps. It is memory of the backend, valid until the next
    call of `Backend.next`."""
    gradient: Gradient
    """What the worker reports of the gradient: its loss, and how many loss terms and samples it has."""
    seconds: float
    """The time from dispatch to arrival, on the training clock."""
    taken: Taken
    """How `seconds` divides into pulling parameters, computing and pushing the gradient. It also has how long the
    worker waited before the dispatch, and how long a synchronous rank took for its own step."""
    moved: Tensor | None = None
    """`(3, S)`, the effect of the gradient on the model's running statistics, valid as long as `vector`; None: the
    model has none."""


Happened = Joined | Left | Arrived


class Step(Struct, frozen=True, gc=False):
    """What follows from something that happened."""

    start: Sequence[Work] = ()
    """The gradients that start now, in order."""
    stop: Sequence[Work] = ()
    """The gradients that were in flight until now and that nobody waits for any more: they were abandoned, or their
    worker is gone."""
    changed: bool = False
    """Whether the loop looks for an evaluation that is due, since the parameters that are evaluated have changed. A
    server says so after each update. Peers say so at each arrival that counts in `Method.num_samples`, also at one
    whose batch has no loss term and so changes nothing."""
    record: Record | None = None
    """The record of what happened, for the log; None if nobody reads records."""


@dataclasses.dataclass(frozen=True)
class Measured:
    """What an evaluation says of some parameters: on the whole evaluation set, of one version. The fields up to
    `worker_losses` are those of `records.events.Evaluation`; the others go into the records
    `MemoryUsed`, `StagesUsed` and `Fault`."""

    loss: float
    """The mean over all loss terms of the set."""
    weight: float | None = None
    """The number of these loss terms."""
    metrics: Mapping[str, float | None] = dataclasses.field(default_factory=dict)
    details: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    eval_seconds: float = 0.0
    """Real seconds, which are not on the training clock."""
    worker_losses: tuple[float | None, ...] = ()
    """The loss of each worker's share of the set; None: the share has no loss terms. Empty: one process has evaluated
    all of it."""
    peak_bytes: tuple[tuple[int, int, int], ...] = ()
    """See `peak_bytes` of `records.events.MemoryUsed`."""
    stages: tuple[StageUse, ...] = ()
    """See `stages` of `records.events.StagesUsed`."""
    score_error: str | None = None
    """What is wrong with the task's `metrics` or `details`, which then say nothing."""

    def record(self, *, version: int, num_samples: int, train_seconds: float) -> Evaluation:
        said = {name: value for name, value in vars(self).items() if name in Evaluation.__struct_fields__}
        return Evaluation(version=version, total_samples=num_samples, train_seconds=train_seconds, **said)


class NoWorkerLeft(Exception):
    """No worker is left, or nothing will happen any more. The message says why, and how the user can avoid it."""


class Method(Protocol):
    """Decides what follows from an event: a server with a rule, or peers. It keeps no clock and no file, and does not
    end the run. It knows the budget only to stop handing out batches."""

    @property
    def version(self) -> int:
        """The version of the parameters that are evaluated."""

    @property
    def num_samples(self) -> int:
        """How many samples have arrived, used or not."""

    @property
    def parameters(self) -> Tensor:
        """`(P,)`, the parameters that are evaluated."""

    @property
    def cut_short(self) -> str | None:
        """Why this state cannot be continued with a larger budget: a run that had the larger budget from its start
        would have gone another way before this point. None: it can be continued."""

    def react(self, happened: Happened) -> Step:
        """Change with what happened, and return what follows. The loop calls it."""

    @property
    def present(self) -> Sequence[int]:
        """The workers that take part now, idle ones first.

        An idle worker leaves before a busy one. A busy worker gives its batches back when it leaves, and an idle worker
        that was still there would be started on them. The loop lets all workers leave, in this order, after a resume of
        a run whose gradients in flight were lost with the stop; see `Backend.loses_flights`.
        """

    def extend(self) -> Step | None:
        """Start the workers that the old budget kept waiting. The loop calls it after a resume, for a budget that may
        be larger. None: no worker starts.
        """


class Backend(Protocol):
    """Computes gradients and evaluations, and knows what time it is."""

    @property
    def now(self) -> float:
        """The training clock, in seconds; it stands still during evaluations."""

    @property
    def present(self) -> Sequence[int]:
        """The workers that the backend has, in the order in which they join when training begins, or begins again."""

    @property
    def may_stop(self) -> bool:
        """Whether the run may be stopped and saved now. It may not between two arrivals of one round of synchronous
        ranks (processes of torch.distributed, each with a copy of the model): each rank has then taken the step on its
        copy, and the method has not heard of all gradients of the round.
        """

    @property
    def loses_flights(self) -> bool:
        """Whether gradients that are in flight at a checkpoint must be computed again. If so, all workers leave after a
        resume, their batches are given back, and they join again."""

    def running(self) -> AbstractContextManager[None]:
        """Return the context in which the loop trains: the training clock runs only within it. It is entered after the
        first evaluation, or after a resume."""

    def next(self, until: float) -> Happened | None:
        """Wait for what happens next, and return it with the clock at its time.

        Args:
            until: a time on the training clock, in seconds.

        Returns:
            None if `until` came first, with the clock at it or just past it. None also if nothing that concerns the
            caller has happened for a while, half a second on real processes, or if an abandoned gradient came: the
            caller looks at signals and asks again.

        Raises:
            NoWorkerLeft: if nothing will happen any more.
        """

    def stop(self, works: Sequence[Work]) -> None:
        """Take back gradients that nobody waits for any more; see `Step.stop`. The loop calls it before `start`."""

    def start(self, works: Sequence[Work]) -> None:
        """Start gradients, in the order given."""

    def freeze(self) -> Iterable[Arrived]:
        """Let the workers of Hogwild, which step the shared parameters themselves, stand still. Yield the steps that
        they had taken. The parameters stay fixed until `next` is called. Other backends yield nothing.
        """

    def evaluate(self, parameters: Tensor) -> Measured:
        """Evaluate `parameters`, all of them of one version, on the whole evaluation set.

        Raises:
            NoWorkerLeft: if no worker is left to do it.
        """
