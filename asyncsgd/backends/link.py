"""What a server and a worker say to each other, and the two ways it travels: a pipe, or a gloo group of two.

Messages are JSON of known tuples; what is received is never unpickled, and whoever sends anything else is lost. A
worker inherits its end of a pipe, which nobody else has. Where vectors travel too, it meets the server through a file
in a folder that only this user can enter, and gloo listens on loopback.

A worker obeys: it receives a command, carries it out, answers, and receives the next. So it never waits for another
worker. It has at most one gradient, one `Wake` and the shards of one evaluation unanswered, for which every pipe has
room: a worker that stands still blocks nobody.

Vectors lie in a segment, or travel through the group of two in front of what they belong to."""

from __future__ import annotations

import collections
import dataclasses
import datetime
import json
import multiprocessing
import struct
import threading
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from msgspec import Struct
from torch import Tensor

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
    """A gradient comes through the group of two, before its `Computed`."""


class Refused(Told):
    """The model cannot be trained so, whoever computes; the worker ends."""

    reason: str


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

    >>> here, there = map(Link, multiprocessing.Pipe())
    >>> here.send(Evaluate(0, 2)), there.receive()
    (None, Evaluate(shard=0, num_shards=2))
    """

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
            raise Gone("its process ended") from error

    def _read(self) -> None:
        try:
            self._ahead.append(decode(self._connection.recv_bytes()))
        except (OSError, EOFError) as error:
            raise Gone("its process ended") from error
        except (ValueError, RecursionError) as error:
            raise Gone(f"it sent what no worker sends: {error}") from error


HOST = "127.0.0.1"
_MEETING = datetime.timedelta(minutes=30)
"""Longest wait for the other side to come up."""
_SILENCE = datetime.timedelta(days=30)
"""Of a living peer, which may be stopped. A dead one is noticed at once."""
_SERVER = 0
_WORKER = 1
_MESSAGES = 0
_VECTORS = 1
"""Tags."""
_FRAME = 1024
_LENGTH = struct.Struct("!I")


class Pair(Link):
    """One end of a gloo group of two, through which vectors travel too.

    A gloo receive cannot be polled, so a thread hands on what comes to a pipe. There is a group per worker, because a
    gloo group fails as a whole when one member dies: so a dead worker takes nobody along.

    Args:
        folder: where the two meet.
        worker: whose link it is.
        slot: at the server, where the worker's vectors are received, `(P,)`, and behind it what its gradients make of
            running statistics, where a model has some; empty: it is the worker's end.
    """

    def __init__(self, folder: str, worker: int, *, serves: bool, slot: Sequence[Tensor] = ()) -> None:
        ours, self._handed_on = multiprocessing.Pipe(duplex=False)
        super().__init__(ours)
        self._slot = slot
        self._rank, self._peer = (_SERVER, _WORKER) if serves else (_WORKER, _SERVER)
        self._group: Any = None
        self._lock = threading.Lock()
        self._early: list[bytes] = []  # messages for a peer that is not there yet
        self._posted: collections.deque[tuple[Any, Tensor]] = collections.deque(maxlen=1024)
        """What gloo may still be sending; it forgets what nobody holds."""
        threading.Thread(target=self._run, args=(folder, worker), daemon=True, name=f"worker{worker}").start()

    def send_vector(self, vector: Tensor) -> None:
        """Send a vector, which must not change before the other end answers; returns at once."""
        self._post(vector, _VECTORS)

    def receive_vector(self, vector: Tensor) -> None:
        """Wait for the next vector. Raises `Gone`."""
        try:
            self._group.recv([vector], self._peer, _VECTORS).wait()
        except RuntimeError as error:  # what gloo raises, whatever the reason
            raise Gone("its process ended") from error

    def flush(self) -> None:
        """Wait until all is sent that was."""
        try:
            while self._posted:
                self._posted.popleft()[0].wait()
        except RuntimeError as error:
            raise Gone("its process ended") from error

    def _put(self, payload: bytes) -> None:
        with self._lock:
            if self._group is None:
                self._early.append(payload)
            else:
                self._post_bytes(payload)

    def _post(self, tensor: Tensor, tag: int) -> None:
        try:
            self._posted.append((self._group.send([tensor], self._peer, tag), tensor))
        except RuntimeError as error:
            raise Gone("its process ended") from error

    def _post_bytes(self, payload: bytes) -> None:
        """Behind their length, in as many frames of one size as it takes."""
        content = _LENGTH.pack(len(payload)) + payload
        for begin in range(0, len(content), _FRAME):
            frame = bytearray(content[begin : begin + _FRAME].ljust(_FRAME, b"\0"))
            self._post(torch.frombuffer(frame, dtype=torch.uint8), _MESSAGES)

    def _run(self, folder: str, worker: int) -> None:
        """Connect, then hand on message after message until either is gone."""
        try:
            group = self._connected(folder, worker)
            with self._lock:
                self._group = group
                for payload in self._early:
                    self._post_bytes(payload)
            while True:
                payload = self._receive_bytes()
                if self._slot and payload == encode(GradientFollows()):
                    for vector in self._slot:
                        self.receive_vector(vector)
                else:
                    self._handed_on.send_bytes(payload)
        except (RuntimeError, OSError, EOFError):
            self._handed_on.close()

    def _connected(self, folder: str, worker: int) -> Any:
        store = dist.FileStore(f"{folder}/store")
        store.set_timeout(_MEETING)
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # missing in the stub
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=HOST)]
        options._timeout = _SILENCE
        return dist.ProcessGroupGloo(dist.PrefixStore(f"worker{worker}", store), self._rank, 2, options)

    def _receive_bytes(self) -> bytes:
        content = b""
        length = 0
        while len(content) < _LENGTH.size + length:
            frame = torch.empty(_FRAME, dtype=torch.uint8)
            self._group.recv([frame], self._peer, _MESSAGES).wait()
            content += frame.numpy().tobytes()
            (length,) = _LENGTH.unpack_from(content)
        return content[_LENGTH.size : _LENGTH.size + length]


@dataclasses.dataclass(frozen=True)
class Inherited:
    """A child's end of its pipe, and the segment; can be pickled for a child alone."""

    connection: Connection
    segment: Segment

    def join(self, worker: int) -> tuple[Link, Segment | None]:
        return Link(self.connection), self.segment


@dataclasses.dataclass(frozen=True)
class Meeting:
    """Where a child meets its server if vectors travel too. The folder is its parent's word, who may have set another
    folder for temporary files since children are forked; can be pickled for a child alone."""

    folder: str

    def join(self, worker: int) -> tuple[Link, Segment | None]:
        return Pair(self.folder, worker, serves=False), None


Way = Inherited | Meeting
"""How a worker comes to its link."""
