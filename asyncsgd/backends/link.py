"""The messages that a server and its workers, and the hosts of one run, send each other, and the pipe through which
they travel. Rank 0 is on the host of the server; see `asyncsgd.backends.hosts`, `mirror` and `election` for the others.

Messages are JSON of known tuples. What is received is never unpickled, and a worker that sends anything else is lost. A
worker inherits its end of a pipe, which nobody else has. Where vectors travel too, server and worker have the ends of a
pair in place of a pipe; see `asyncsgd.backends.pair`.

A worker obeys: it receives a command, carries it out, answers, and receives the next. So it never waits for another
worker. It has at most one gradient, one `Wake` and the shards of one evaluation unanswered, for which every pipe has
room: a worker that stands still blocks nobody.

Vectors lie in a segment (`asyncsgd.backends.segment`), in which each worker has a slot, or travel through the pair:
those of `Compute`, `Evaluate` and `Copy` after the message, a gradient between its `GradientFollows` and its
`Computed`."""

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


class MessageBase(Struct, array_like=True, tag=True, forbid_unknown_fields=True):
    """The base of all messages. A message is encoded as a list: its name, then its fields."""


class Compute(MessageBase):
    """Pull the parameters and compute the gradient of one batch, or take a local step on each of several."""

    dispatch: int
    batches: tuple[Range, ...]
    learning_rate: float | None
    """The learning rate of the local steps; None: one gradient, and no step."""
    version_in_slot: int | None
    """The version of the parameters in the worker's slot, from which it starts; through a pair that of the parameters
    that follow. None: it pulls the newest from the segment."""
    first_draw: int
    """The number of the first computing time that is drawn for these batches; see `asyncsgd.simulation.speeds`."""


class Evaluate(MessageBase):
    """Pull the parameters and evaluate shard `shard` of `num_shards`."""

    shard: int
    num_shards: int


class Wake(MessageBase):
    """End `Link.sleep_unless_woken`, in which a worker waits for its declared time to pass: its gradient is
    abandoned, or the parameters are frozen."""


class Proceed(MessageBase):
    """Go on after `Holding`."""


class Stop(MessageBase):
    """Stop work. This is the last command to a worker."""


class Unfinished(MessageBase):
    """Stop work, sent to a host in place of `Stop`: the run was interrupted, and may go on later."""


class Ready(MessageBase):
    """The worker has built its model and waits for commands."""

    layout: str
    """The `FlatModel.fingerprint` of the worker's model. If it differs from the server's, the worker has another
    model."""


class Computed(MessageBase):
    """The gradient lies in the worker's slot. Of a worker that steps the parameters: the step is taken."""

    dispatch: int
    read_version: int
    gradient: Gradient
    taken: Taken
    """The seconds that it took, without those that the server takes to apply it."""


class ShardEvaluated(MessageBase):
    """The sums of one shard."""

    shard: int
    sums: str
    """See `asyncsgd.tasks.base.encode_sums`."""
    peak_bytes: tuple[int, ...]
    """See `asyncsgd.worker.profile.peak_bytes`."""


class EvaluatedAgain(ShardEvaluated):
    """The sums of shard 0, whose worker has first estimated the running statistics at these parameters again. The
    server keeps these beside the running ones."""

    statistics: bytes
    """The statistics that were estimated: float64 `(S,)`."""


class Holding(MessageBase):
    """Hogwild only: a gradient is ready, and the worker waits for `Proceed` before it steps."""


class GradientFollows(MessageBase):
    """A gradient comes next through the pair. Its `Computed` follows."""


class Refused(MessageBase):
    """The sender refuses. A worker says so if no worker can train this model on these data, and ends. A host says so if
    it cannot take part, and rank 0 says so to a host that must not take part."""

    reason: str


class Hello(MessageBase):
    """The first message of another host."""

    host: str
    """The name of the host."""
    first_worker: int
    """The number of its first worker."""
    num_workers: int
    """The number of its workers."""
    versions: dict[str, str]
    """The versions that must be equal on all hosts."""
    hardware: dict[str, Any]
    """See `asyncsgd.worker.profile.hardware`."""


class Begin(MessageBase):
    """What rank 0 has prepared. A host compares it with what it has, and answers with `Prepared` or `Refused`."""

    settings: dict[str, Any]
    """The settings of the run, by name."""
    began_from: dict[str, Any]
    """The fingerprints of the run's data and initial parameters."""
    hardware: dict[str, Any]
    """The hardware of rank 0; see `asyncsgd.worker.profile.hardware`."""
    found: dict[str, Any]
    """What the task's `prepare` has found, if it lies in `folders`."""
    folders: tuple[ListedFolder, ...]
    """The folders of which hosts get copies. If there is none, each host prepares the task itself."""
    micro_batches: int
    """The number of parts in which a batch is computed."""
    changing_buffers: tuple[str, ...] | None
    """The buffers that forward passes change; see `asyncsgd.run.run.Run`."""
    mirror: int | None = None
    """The number of the host that keeps a copy of each checkpoint; None: no host does."""


class Lacking(MessageBase):
    """A host lacks some folders of `Begin`, and receives their files next."""

    folders: tuple[int, ...]
    """The positions of these folders in `Begin.folders`."""


class Prepared(MessageBase):
    """A host has the data and the model of the run, and starts its workers."""


class Alive(MessageBase):
    """A sign of life."""

    ended: tuple[tuple[int, str], ...] = ()
    """The workers of the host whose processes have ended, and how, in words."""


class PartOfFile(Struct, array_like=True, forbid_unknown_fields=True):
    """A part of a file in a run folder, which is sent to the mirror."""

    name: str
    """The path of the file within the folder, with slashes."""
    first: int
    """The position in the file at which the part begins, in bytes."""
    num_bytes: int


class Claim(MessageBase):
    """What a host has of a run in which hosts come and go."""

    host: str
    """The name of the host."""
    num_ranks: int
    address: str
    """The address on which the others reach it."""
    num_samples: int | None
    """The samples of its newest checkpoint of the run; None: it has none."""
    leader_before: str
    """The name of the host that led when this one took part last; empty: it did not, or led itself."""
    samples_before: int
    """The samples of the checkpoint from which `leader_before` went on then."""


class Agreed(MessageBase):
    """The part that a host has after hosts have come or gone."""

    number: int
    """The number of the host that receives this message. Host 0 leads."""
    num_hosts: int
    first: int
    """The number of its first worker, which is the rank of its first process."""
    leader: str
    """The address of the host that leads."""
    leader_name: str
    num_samples: int
    """The samples of the checkpoint from which the run goes on; 0: it begins."""
    note: str
    """What the leader tells the user; empty: nothing."""


class Copy(MessageBase):
    """A checkpoint, for the host that keeps copies. The bytes of the parts follow as vectors."""

    name: str
    parts: tuple[PartOfFile, ...]
    """The parts, in the order in which they are written."""
    kept: tuple[str, ...]
    """The names of the checkpoints that rank 0 has. The mirror removes all others."""


class CopyDone(MessageBase):
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
    | Claim
    | Agreed
    | Unfinished
)


def encode(message: Message) -> bytes:
    """Encode a message as JSON. It may hold NaN, which a loss may be."""
    return json.dumps(msgspec.to_builtins(message), separators=(",", ":")).encode()


def decode(payload: bytes) -> Message:
    """Decode a message. Raises ValueError if it is no message."""
    message: Message = msgspec.convert(json.loads(payload), Message)
    return message


class Gone(EOFError):
    """The other end has ended, or is not a process of this run."""


class Link:
    """One end of a pipe.

    >>> import multiprocessing
    >>> here, there = map(Link, multiprocessing.Pipe())
    >>> here.send(Evaluate(0, 2)), there.receive()
    (None, Evaluate(shard=0, num_shards=2))
    """

    ended = "its process ended"
    """The reason that `Gone` gives."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._received: collections.deque[Message] = collections.deque()
        """The messages that `receive` has not returned yet."""

    def fileno(self) -> int:
        return self._connection.fileno()

    def close(self) -> None:
        """Close this end. The other end sees that it is gone."""
        self._connection.close()

    def send(self, message: Message) -> None:
        """Send a message; returns at once. Raises `Gone`."""
        self._put(encode(message))

    def receive(self) -> Message:
        """Wait for the next message. Raises `Gone`."""
        if not self._received:
            self._read()
        return self._received.popleft()

    def sleep_unless_woken(self, seconds: float) -> bool:
        """Sleep for `seconds`, but at most until `Wake` or `Stop` comes. Other messages are kept for `receive`.

        Returns:
            Whether one of the two has come.
        """
        end = time.monotonic() + seconds
        while not self._woken():
            left = end - time.monotonic()
            if left <= 0 or not self._connection.poll(left):
                return False
            self._read()
        return True

    def is_readable(self) -> bool:
        """Whether `receive` would return, or raise, at once."""
        return bool(self._received) or self._connection.poll(0)

    def check(self) -> None:
        """Raise `Gone` if the other end is gone."""
        while self._connection.poll(0):
            self._read()

    def _woken(self) -> bool:
        if Wake() in self._received:
            self._received.remove(Wake())
            return True
        return Stop() in self._received

    def _put(self, payload: bytes) -> None:
        try:
            self._connection.send_bytes(payload)
        except OSError as error:
            raise Gone(self.ended) from error

    def _read(self) -> None:
        try:
            self._received.append(decode(self._connection.recv_bytes()))
        except (OSError, EOFError) as error:
            raise Gone(self.ended) from error
        except (ValueError, RecursionError) as error:
            raise Gone(f"it sent what no worker sends: {error}") from error


@dataclasses.dataclass(frozen=True)
class Inherited:
    """A worker's end of its pipe, and the segment. It can only be pickled while a process is started, for that
    process."""

    connection: Connection
    segment: Segment

    def connect(self, worker: int) -> tuple[Link, Segment | None]:
        """Return the worker's end, and the segment that it shares with the server. A `Rendezvous` needs the number of
        the worker, and this does not."""
        return Link(self.connection), self.segment
