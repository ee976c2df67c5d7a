"""What a server and a worker say to each other, and the pipe through which it travels.

Messages are JSON of known tuples; what is received is never unpickled, and whoever sends anything else is lost. A
worker inherits its end of a pipe, which nobody else has. Where vectors travel too, the two are the ends of a pair; see
`asyncsgd.backends.pair`.

A worker obeys: it receives a command, carries it out, answers, and receives the next. So it never waits for another
worker. It has at most one gradient, one `Wake` and the shards of one evaluation unanswered, for which every pipe has
room: a worker that stands still blocks nobody.

Vectors lie in a segment, or travel through the pair in front of what they belong to."""

from __future__ import annotations

import collections
import dataclasses
import json
import time
from multiprocessing.connection import Connection
from typing import Any

import msgspec
from msgspec import Struct

from asyncsgd.backends.copies import ListedFolder
from asyncsgd.backends.segment import Segment
from asyncsgd.records.events import Gradient, Range, Taken


class Told(Struct, array_like=True, tag=True, forbid_unknown_fields=True):
    """A message: a tuple behind its name."""


class Compute(Told):
    """Pull the parameters and compute the gradient of one batch, or take a local step on each of several."""

    dispatch: int
    batches: tuple[Range, ...]
    learning_rate: float | None
    """Of the local steps; None: one gradient, and no step."""
    exact_version: int | None
    """If given, the starting point lies in the worker's slot, and this is its version."""
    first_draw: int
    """Where times are drawn for gradients: the number of the first of them."""


class Evaluate(Told):
    """Pull the parameters and evaluate shard `shard` of `num_shards`."""

    shard: int
    num_shards: int


class Wake(Told):
    """Wait no longer: the gradient is abandoned, or the parameters are frozen."""


class Proceed(Told):
    """Go on after `Holding`."""


class Stop(Told):
    """Stop work. This is the last command to a worker."""


class Ready(Told):
    """The worker has built its model and waits for commands."""

    layout: str
    """`Layout.fingerprint`; another one than the server's means another model."""


class Computed(Told):
    """A gradient lies in the worker's slot, or a step is taken."""

    dispatch: int
    read_version: int
    gradient: Gradient
    taken: Taken
    """Without the seconds that the server takes to apply it."""


class ShardEvaluated(Told):
    """The sums of one shard."""

    shard: int
    sums: str
    """See `asyncsgd.tasks.base.encode_sums`."""
    peak_bytes: tuple[int, ...]
    """See `asyncsgd.worker.profile.peak_bytes`."""


class EvaluatedAgain(ShardEvaluated):
    """The sums of shard 0, evaluated with running statistics that were estimated again."""

    statistics: bytes
    """float64 `(S,)`."""


class Holding(Told):
    """Hogwild only: a gradient is ready, and the worker waits for `Proceed` before it steps."""


class GradientFollows(Told):
    """A gradient comes through the pair, before its `Computed`."""


class Refused(Told):
    """The model cannot be trained so, whoever computes; the worker ends. Of a host: it cannot take part."""

    reason: str


class Hello(Told):
    """The first that another host says."""

    host: str
    """Its name."""
    first: int
    number: int
    """Its workers: the number of the first, and how many."""
    versions: dict[str, str]
    """Of the packages that must be equal on all hosts."""
    hardware: dict[str, Any]
    """See `asyncsgd.worker.profile.hardware`."""


class Begin(Told):
    """What rank 0 has prepared. A host compares it with what it has, and answers with `Prepared` or `Refused`."""

    settings: dict[str, Any]
    """Of the run, by name."""
    began_from: dict[str, Any]
    """Fingerprints of its data and initial parameters."""
    hardware: dict[str, Any]
    """Of rank 0; see `asyncsgd.worker.profile.hardware`."""
    found: dict[str, Any]
    """What the task's `prepare` has found, where it lies in folders of which hosts get copies."""
    folders: tuple[ListedFolder, ...]
    """These folders; none: each host prepares the task itself."""
    micro_batches: int
    moving: tuple[str, ...] | None
    """See `asyncsgd.run.run.Run`."""
    mirror: int | None = None
    """Number of the host that keeps a copy of each checkpoint; None: no host does."""


class Lacking(Told):
    """A host lacks these folders of `Begin`, by number, and receives their files next."""

    folders: tuple[int, ...]


class Prepared(Told):
    """A host has the data and the model of the run, and starts its workers."""


class Alive(Told):
    """A sign of life."""


class PartOfFile(Struct, array_like=True, forbid_unknown_fields=True):
    """What is sent of a file in a run folder."""

    name: str
    """Its path within the folder, with slashes."""
    first: int
    """The byte with which it begins."""
    num_bytes: int


class Copy(Told):
    """A checkpoint, for the host that keeps copies. The bytes of the parts follow as vectors."""

    name: str
    parts: tuple[PartOfFile, ...]
    """In the order in which they are written."""
    kept: tuple[str, ...]
    """Names of the checkpoints that rank 0 has; others are removed."""


class CopyDone(Told):
    """The copy of a checkpoint is durable."""


Message = (
    Compute
    | Evaluate
    | Wake
    | Proceed
    | Stop
    | Ready
    | Computed
    | ShardEvaluated
    | EvaluatedAgain
    | Holding
    | GradientFollows
    | Refused
    | Hello
    | Begin
    | Lacking
    | Prepared
    | Alive
    | Copy
    | CopyDone
)


def encode(message: Message) -> bytes:
    """JSON, with NaN, which a loss may be."""
    return json.dumps(msgspec.to_builtins(message), separators=(",", ":")).encode()


def decode(payload: bytes) -> Message:
    """Raises ValueError if it is no message."""
    message: Message = msgspec.convert(json.loads(payload), Message)
    return message


class Gone(EOFError):
    """The other side has ended, or is none of ours."""


class Link:
    """One end of a pipe.

    >>> import multiprocessing
    >>> here, there = map(Link, multiprocessing.Pipe())
    >>> here.send(Evaluate(0, 2)), there.receive()
    (None, Evaluate(shard=0, num_shards=2))
    """

    ended = "its process ended"
    """Why `Gone` is raised."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._ahead: collections.deque[Message] = collections.deque()

    def fileno(self) -> int:
        return self._connection.fileno()

    def close(self) -> None:
        """The other end hears of it."""
        self._connection.close()

    def send(self, message: Message) -> None:
        """Send a message; returns at once. Raises `Gone`."""
        self._put(encode(message))

    def receive(self) -> Message:
        """Wait for the next message. Raises `Gone`."""
        if not self._ahead:
            self._read()
        return self._ahead.popleft()

    def rest(self, seconds: float) -> bool:
        """Let `seconds` pass, or less if `Wake` or `Stop` comes: then True. What else comes is kept for `receive`."""
        end = time.monotonic() + seconds
        while not self._woken():
            left = end - time.monotonic()
            if left <= 0 or not self._connection.poll(left):
                return False
            self._read()
        return True

    def is_readable(self) -> bool:
        """Whether `receive` would return, or raise, at once."""
        return bool(self._ahead) or self._connection.poll(0)

    def check(self) -> None:
        """Raise `Gone` if nobody is there."""
        while self._connection.poll(0):
            self._read()

    def _woken(self) -> bool:
        if Wake() in self._ahead:
            self._ahead.remove(Wake())
            return True
        return Stop() in self._ahead

    def _put(self, payload: bytes) -> None:
        try:
            self._connection.send_bytes(payload)
        except OSError as error:
            raise Gone(self.ended) from error

    def _read(self) -> None:
        try:
            self._ahead.append(decode(self._connection.recv_bytes()))
        except (OSError, EOFError) as error:
            raise Gone(self.ended) from error
        except (ValueError, RecursionError) as error:
            raise Gone(f"it sent what no worker sends: {error}") from error


@dataclasses.dataclass(frozen=True)
class Inherited:
    """A child's end of its pipe, and the segment; can be pickled for a child alone."""

    connection: Connection
    segment: Segment

    def join(self, worker: int) -> tuple[Link, Segment | None]:
        """The worker's end, and the segment that it shares with the server."""
        return Link(self.connection), self.segment
