"""A gradient in flight, what may happen to it, and what follows: the words between a method, a backend and the loop.

Shapes: P parameters (gaps of the flat vector included).
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct
from torch import Tensor

from asyncsgd.records.events import Gradient, Range, Record, Taken


class Work(Struct, gc=False):
    """A gradient in flight: the same object for the rule's view, the backend and the record of its arrival."""

    worker: int
    dispatch: int
    version: int
    """The server's when it started. The worker may read a newer one when it begins, unless there is a `point`."""
    num_local_steps: int
    batches: tuple[Range, ...]
    point: Tensor | None
    """`(P,)`, where it starts exactly, at `version`; to be read, not changed. None: at the parameters that its worker
    finds when it begins."""
    rate: float | None
    """The learning rate of local steps; None without them."""
    began: float
    """On the training clock, in seconds."""
    draw: int
    """The gradients that its worker was given before: the number of the first time that is drawn for it."""
    drawn: float = 0.0
    """On the virtual clock the seconds that its last step takes."""
    statistics: Tensor | None = None
    """The running statistics at `point`, `(S,)`, of a model that has some."""


class Moved(Struct, frozen=True, gc=False):
    """What a gradient that may be used has made of the running statistics, and what decides how they follow it."""

    worker: int
    batches: tuple[Range, ...]
    vectors: Tensor
    """`(3, S)`, see `asyncsgd.running_statistics`."""
    weight: float
    """The loss terms behind the gradient."""


class Joined(Struct, frozen=True, gc=False):
    """`worker` takes part from now on."""

    worker: int


class Left(Struct, frozen=True, gc=False):
    """`worker` is gone, and so is what it had in flight."""

    worker: int
    reason: str = ""


class Arrived(Struct, frozen=True, gc=False):
    """A gradient that was in flight is there."""

    work: Work
    read_version: int
    """The version at which it was computed."""
    vector: Tensor
    """`(P,)`, the backend's own; valid until it is asked for what happens next."""
    gradient: Gradient
    seconds: float
    """From its start to its arrival, on the training clock."""
    taken: Taken
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
