"""The protocol between a method, which decides, a backend, which computes, and the loop between the two.

A gradient in flight is a `Work`. What may happen is `Happened`, what follows from it is a `Step`.

Shapes: P parameters (gaps of the flat vector included), S running statistics of the model; what a gradient made of them
is `(3, S)`, see `asyncsgd.core.running_statistics`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from msgspec import Struct
from torch import Tensor

from asyncsgd.records.events import Evaluation, Gradient, Range, Record, Taken


class Work(Struct, gc=False):
    """A gradient in flight: the same object for the rule's view, the backend and `Arrived`."""

    worker: int
    """The number of the worker, from 0."""
    dispatch: int
    """The number of this gradient, over all workers, in the order of the starts."""
    version: int
    """The server's when it started. The worker may read a newer one when it begins, unless there is a `point`."""
    num_local_steps: int
    """Steps of the worker's inner optimizer, one a batch; 1 where it computes the gradient of one batch."""
    batches: tuple[Range, ...]
    """The ranges of its stream that these batches are."""
    point: Tensor | None
    """`(P,)`, the parameters of `version`, at which the gradient is to be computed; to be read, not changed. None: at
    the parameters that its worker finds when it begins. The virtual clock, which computes a gradient when it arrives,
    keeps the parameters of its start here."""
    rate: float | None
    """The learning rate of local steps; None without them."""
    began: float
    """On the training clock, in seconds."""
    draw: int
    """How many computing times were drawn for its worker before: one for each batch that it was given. Its own are the
    next ones of the worker's stream."""
    drawn: float = 0.0
    """On the virtual clock the seconds that were drawn for its last step."""
    statistics: Tensor | None = None
    """The running statistics at `point`, `(S,)`, of a model that has some."""


class Pinned(Struct, frozen=True, gc=False):
    """A start at exactly these parameters, which has no batches yet; the server makes a `Work` of it."""

    worker: int
    num_local_steps: int
    version: int
    point: Tensor
    """`(P,)`."""
    statistics: Tensor | None
    """`(S,)`, of a model that has running statistics."""


class Moved(Struct, frozen=True, gc=False):
    """The running statistics of a worker's model after a gradient that may be used, and what decides how those of the
    server follow them."""

    worker: int
    batches: tuple[Range, ...]
    vectors: Tensor
    """`(3, S)`."""
    weight: float
    """The loss terms behind the gradient."""


class Joined(Struct, frozen=True, gc=False):
    """`worker` takes part from now on."""

    worker: int


class Left(Struct, frozen=True, gc=False):
    """`worker` is gone, and so is what it had in flight."""

    worker: int
    reason: str = ""
    """Empty where it leaves in good order."""


class Arrived(Struct, frozen=True, gc=False):
    """A gradient that was in flight is there."""

    work: Work
    """What its worker was given."""
    read_version: int
    """The version at which it was computed."""
    vector: Tensor
    """`(P,)`, the backend's own; valid until it is asked for what happens next."""
    gradient: Gradient
    """Its loss, loss terms and samples."""
    seconds: float
    """From its start to its arrival, on the training clock."""
    taken: Taken
    """The parts of `seconds`, and what the application takes."""
    moved: Tensor | None = None
    """What it has made of the model's running statistics, `(3, S)`, valid as `vector` is; None: it has none."""


Happened = Joined | Left | Arrived


class Step(Struct, frozen=True, gc=False):
    """What follows from something that happened."""

    start: Sequence[Work] = ()
    """Gradients that start now, in order."""
    stop: Sequence[Work] = ()
    """In flight until now, and nobody waits for them any more: they were abandoned, or their worker is gone."""
    changed: bool = False
    """Whether what is evaluated has changed."""
    record: Record | None = None
    """What happened, where somebody wants to know."""


@dataclasses.dataclass(frozen=True)
class Measured:
    """What an exact evaluation says of some parameters; the fields are those of `records.events.Evaluation`."""

    loss: float
    weight: float | None = None
    metrics: Mapping[str, float | None] = dataclasses.field(default_factory=dict)
    details: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    eval_seconds: float = 0.0
    worker_losses: tuple[float | None, ...] = ()
    peak_bytes: tuple[tuple[int, int, int], ...] = ()
    """As in `records.events.MemoryUsed`."""
    stages: tuple[tuple[int, int, float | None, float, float, float], ...] = ()
    """As in `records.events.StagesUsed`."""
    score_error: str | None = None
    """What is wrong with the task's `metrics` or `details`, which then say nothing."""

    def record(self, *, version: int, num_samples: int, train_seconds: float) -> Evaluation:
        said = {name: value for name, value in vars(self).items() if name in Evaluation.__struct_fields__}
        return Evaluation(version=version, total_samples=num_samples, train_seconds=train_seconds, **said)


class Nobody(Exception):
    """No worker is left, or none will do anything any more; the message says why, and what to type."""


class Method(Protocol):
    """Decides what follows from an event: a server with a rule, or peers. It knows no time, no budget, and no file."""

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
        """Why a run cannot become longer from here; None: it can."""

    def react(self, happened: Happened) -> Step:
        """Take in what happened, and say what follows."""

    @property
    def present(self) -> Sequence[int]:
        """The workers that take part. Where a backend `loses_flights`, they leave in this order after a resume: idle
        ones first, so that none of them is started on what a busy one has given back, only to leave in turn.
        """

    def extend(self) -> Step | None:
        """After a resume with a larger budget, start the workers that the old budget kept waiting; None: none wait."""


class Backend(Protocol):
    """Computes gradients and evaluations, and knows what time it is."""

    @property
    def now(self) -> float:
        """The training clock, in seconds; it stands still during evaluations."""

    @property
    def present(self) -> Sequence[int]:
        """The workers that are there from the beginning, in the order in which they join."""

    @property
    def may_stop(self) -> bool:
        """Whether the run may be stopped and saved now. It may not amid a round whose step all ranks have taken."""

    @property
    def loses_flights(self) -> bool:
        """Whether gradients that are in flight at a checkpoint must be computed again. Then all workers leave after a
        resume, their batches are given back, and they join again."""

    def running(self) -> AbstractContextManager[None]:
        """Return a context that is around all that happens after the first evaluation."""

    def next(self, until: float) -> Happened | None:
        """Wait for what happens next, and return it with the clock at its time.

        Args:
            until: a time on the training clock. If it comes first, None is returned, with the clock at it or just
                behind it.

        Raises:
            Nobody: if nothing will happen any more.
        """

    def stop(self, works: Sequence[Work]) -> None:
        """Take back gradients that nobody waits for any more; see `Step`. It is called before `start`."""

    def start(self, works: Sequence[Work]) -> None:
        """Start gradients, in the order given."""

    def freeze(self) -> Iterable[Arrived]:
        """Stop workers that step by themselves, and yield the steps that they had taken. The parameters stay fixed
        until `next` is called.
        """

    def evaluate(self, parameters: Tensor) -> Measured:
        """Evaluate `parameters` exactly.

        Raises:
            Nobody: if no worker is left to do it.
        """
