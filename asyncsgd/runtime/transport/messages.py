"""What passes between the server and a worker, and the two ends that every transport has.

A worker obeys: it receives a command, carries it out, answers, and receives the next. So it never waits for another
worker. Commands sent to a busy worker are carried out in order, later, without the gradients that were abandoned
meanwhile; see `Backlog`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from torch import Tensor

from asyncsgd.records.events import Gradient, Range, Taken
from asyncsgd.runtime.transport.codec import Codec


@dataclasses.dataclass(frozen=True)
class Compute:
    """Pull the parameters and compute the gradient of one batch, or take a local step on each of several."""

    dispatch: int
    batches: tuple[Range, ...]
    learning_rate: float | None = None
    """Of the local steps; None: one gradient, and no step."""
    exact_version: int | None = None
    """If given, the starting point lies in the worker's slot, and this is its version."""
    first_draw: int = 0
    """Where times are drawn for gradients: the number of the first of them."""


@dataclasses.dataclass(frozen=True)
class Evaluate:
    """Pull the parameters and evaluate shard `shard` of `num_shards`."""

    shard: int
    num_shards: int


@dataclasses.dataclass(frozen=True)
class Proceed:
    """Go on after `Holding`."""


@dataclasses.dataclass(frozen=True)
class Stop:
    """Stop work. This is the last command to a worker."""


Command = Compute | Evaluate | Proceed | Stop


@dataclasses.dataclass(frozen=True)
class Ready:
    """The worker has built its model and waits for commands."""

    layout: str
    """`Layout.fingerprint`; another one than the server's means another model."""


@dataclasses.dataclass(frozen=True)
class Computed:
    """A gradient lies in the worker's slot."""

    dispatch: int
    read_version: int
    gradient: Gradient
    taken: Taken
    """Without the seconds that the server takes to apply it."""


@dataclasses.dataclass(frozen=True)
class Evaluated:
    """The sums of one shard."""

    shard: int
    sums: str
    """See `asyncsgd.tasks.base.encode_sums`."""
    peak_bytes: tuple[int, ...] = ()
    """See `asyncsgd.runtime.memory.peak_bytes`."""


@dataclasses.dataclass(frozen=True)
class Holding:
    """Hogwild only: a gradient is ready, and the worker waits for `Proceed` before it steps."""


@dataclasses.dataclass(frozen=True)
class Lost:
    """The worker is gone; the transport's own message, the last of this worker."""

    reason: str


Message = Ready | Computed | Evaluated | Holding | Lost

COMMANDS = Codec(Compute, Evaluate, Proceed, Stop)
MESSAGE_KINDS = (Ready, Computed, Evaluated, Holding)
"""What a worker may say; `Lost` is the transport's own."""


class ServerEnd(Protocol):
    """The server's end, for all workers."""

    @property
    def parameters(self) -> Tensor:
        """The server's vector `(P,)`; whoever owns a `Server` on it changes it inside `writing` only."""

    def writing(self, version: int) -> AbstractContextManager[None]:
        """A context within which the parameters are on their way from `version` to `version` + 1."""

    def gradient(self, worker: int) -> Tensor:
        """The worker's slot `(P,)`: its gradient from its `Computed` until the next `Compute` is sent to it; in between
        an exact starting point may be written there.
        """

    def send(self, worker: int, command: Command) -> None:
        """Send a command; returns at once. A worker that is gone is reported by `wait`, not here."""

    def wait(self, timeout: float | None) -> Sequence[tuple[int, Message]]:
        """Wait for messages, at most `timeout` seconds (None: for ever); an empty result means it ran out."""

    def close(self) -> None:
        """Let go of every worker and free everything; may be called twice."""


class WorkerEnd(Protocol):
    """A worker's end."""

    @property
    def slot(self) -> Tensor | None:
        """Where the worker's gradient is to be computed, `(P,)`, or None if `push` takes it from anywhere."""

    def receive(self) -> Command:
        """Wait for the next command.

        Raises:
            EOFError: if the server is gone.
        """

    def pull(self, parameters: Tensor, exact_version: int | None = None) -> int:
        """Copy one consistent version into `parameters`, `(P,)`, and return that version.

        With `exact_version` of a `Compute` it is the starting point in the slot instead.
        """

    def told_to_compute(self, seconds: float) -> bool:
        """Wait for `seconds`, or until the server asks for another gradient, which abandons this one: then True.

        A transport that cannot look ahead waits and says False.
        """

    def push(self, gradients: Tensor) -> None:
        """Bring the gradient `(P,)` to the slot; nothing to do where it was computed there."""

    def answer(self, message: Message) -> None:
        """Send a message; returns at once."""
