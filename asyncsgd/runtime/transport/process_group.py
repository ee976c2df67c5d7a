"""Workers reached through torch.distributed: a gloo group of two, server and worker, and a server thread per worker.

A group per worker, because a gloo group fails as a whole when one member dies: so a dead worker takes nobody along.
Threads, because a gloo receive cannot be polled. Vectors travel as tensors, commands and messages in frames of a fixed
size.

Until a worker is idle its commands wait in a backlog, and of the gradients it has been asked for only the last counts.
The parameters are sent together with the command that needs them. The copy is made under the lock that the server holds
while it writes, so it is one consistent version. The lock lives in the server's process.

The two meet through a file in a folder that only this user can enter, and gloo listens on loopback. Nothing that
arrives is ever unpickled. This transport carries several hosts once the launcher does."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import queue
import struct
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from asyncsgd.runtime.transport.backlog import Backlog
from asyncsgd.runtime.transport.codec import Codec, ProtocolError
from asyncsgd.runtime.transport.messages import (
    COMMANDS,
    MESSAGE_KINDS,
    Command,
    Compute,
    Evaluate,
    Lost,
    Message,
    Stop,
)

HOST = "127.0.0.1"
TIMEOUT = datetime.timedelta(minutes=30)
"""Longest silence of a living peer: a gradient or an evaluation must not take longer. A dead peer is noticed at
once.
"""

_SERVER, _WORKER = 0, 1
_T = TypeVar("_T")


class _Link:
    """One end of a group of two."""

    def __init__(self, store: dist.Store, worker: int, rank: int) -> None:
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # missing in the stub
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=HOST)]
        options._timeout = TIMEOUT
        self._group: Any = dist.ProcessGroupGloo(dist.PrefixStore(f"worker{worker}", store), rank, 2, options)
        self._peer = 1 - rank

    def send_vector(self, vector: Tensor) -> None:
        self._group.send([vector], self._peer, 0).wait()

    def receive_vector(self, vector: Tensor) -> None:
        self._group.recv([vector], self._peer, 0).wait()

    def send(self, payload: bytes) -> None:
        """Send `payload` behind its length, in as many frames as it takes."""
        content = _LENGTH.pack(len(payload)) + payload
        for begin in range(0, len(content), _FRAME):
            part = content[begin : begin + _FRAME].ljust(_FRAME, b"\0")
            self.send_vector(torch.frombuffer(bytearray(part), dtype=torch.uint8))

    def receive(self) -> bytes:
        """Receive what `send` has sent."""
        content = self._receive_frame()
        (length,) = _LENGTH.unpack_from(content)
        while len(content) < _LENGTH.size + length:
            content += self._receive_frame()
        return content[_LENGTH.size : _LENGTH.size + length]

    def _receive_frame(self) -> bytes:
        frame = torch.empty(_FRAME, dtype=torch.uint8)
        self.receive_vector(frame)
        return frame.numpy().tobytes()


@dataclasses.dataclass(frozen=True)
class _Version:
    """Comes before a vector of parameters."""

    version: int


@dataclasses.dataclass(frozen=True)
class _GradientFollows:
    """Announces the gradient vector that comes before its `Computed`."""


_VERSIONS = Codec(_Version)
_MESSAGES = Codec(_GradientFollows, *MESSAGE_KINDS)
_FRAME = 1024
_LENGTH = struct.Struct("!I")


class ProcessGroupServer:
    """The server's end.

    Args:
        num_workers: N.
        size: P.
    """

    def __init__(self, num_workers: int, size: int) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="asyncsgd-", ignore_cleanup_errors=True)
        self._address = ProcessGroupAddress(f"{self._folder.name}/store", num_workers, size)
        self._parameters = torch.zeros(size)
        self._slots = [torch.zeros(size) for _ in range(num_workers)]
        self._version = 0
        self._lock = threading.Lock()
        self._backlogs = [Backlog() for _ in range(num_workers)]
        self._arrived = [threading.Condition() for _ in range(num_workers)]  # each guards the backlog of its worker
        self._messages: queue.SimpleQueue[tuple[int, Message]] = queue.SimpleQueue()
        for worker in range(num_workers):
            threading.Thread(target=self._serve, args=(worker,), daemon=True, name=f"worker{worker}").start()

    @property
    def address(self) -> ProcessGroupAddress:
        """What a worker needs to connect."""
        return self._address

    @property
    def parameters(self) -> Tensor:
        return self._parameters

    def gradient(self, worker: int) -> Tensor:
        return self._slots[worker]

    @contextlib.contextmanager
    def writing(self, version: int) -> Iterator[None]:
        with self._lock:
            yield
            self._version = version + 1

    def send(self, worker: int, command: Command) -> None:
        with self._arrived[worker]:
            self._backlogs[worker].put(command)
            self._arrived[worker].notify()

    def wait(self, timeout: float | None) -> Sequence[tuple[int, Message]]:
        try:
            return [self._messages.get(timeout=timeout)]
        except queue.Empty:
            return []

    def close(self) -> None:
        for worker in range(len(self._backlogs)):
            self.send(worker, Stop())
        self._folder.cleanup()

    def _next_command(self, worker: int) -> Command:
        """The next command for a worker that is idle; waits for it."""
        with self._arrived[worker]:
            self._arrived[worker].wait_for(lambda: len(self._backlogs[worker]) > 0)
            return self._backlogs[worker].take()

    def _serve(self, worker: int) -> None:
        """Thread of one worker: message, command, message, command, until either is gone."""
        snapshot = torch.empty_like(self._parameters)
        try:
            link = _Link(self._address.open_store(), worker, _SERVER)
            while True:
                message = _MESSAGES.decode(link.receive())
                if isinstance(message, _GradientFollows):
                    link.receive_vector(self._slots[worker])
                    message = _MESSAGES.decode(link.receive())
                self._messages.put((worker, message))
                command = self._next_command(worker)
                link.send(COMMANDS.encode(command))
                if isinstance(command, Stop):
                    return
                if isinstance(command, Compute) and command.exact_version is not None:
                    link.send(_VERSIONS.encode(_Version(command.exact_version)))
                    link.send_vector(self._slots[worker])
                elif isinstance(command, Compute | Evaluate):
                    with self._lock:
                        snapshot.copy_(self._parameters)
                        version = self._version
                    link.send(_VERSIONS.encode(_Version(version)))
                    link.send_vector(snapshot)
        except ProtocolError as error:
            self._messages.put((worker, Lost(f"it sent what no worker sends: {error}")))
        except RuntimeError as error:  # what gloo raises, whatever the reason
            self._messages.put((worker, Lost(str(error).splitlines()[0])))


@dataclasses.dataclass(frozen=True)
class ProcessGroupAddress:
    """Where a `ProcessGroupServer` is; names and numbers only."""

    store: str
    num_workers: int
    size: int

    def open_store(self) -> dist.Store:
        """The file through which server and workers find each other."""
        store = dist.FileStore(self.store, self.num_workers + 1)
        store.set_timeout(TIMEOUT)
        return store

    def connect(self, worker: int) -> ProcessGroupWorker:
        """Open the worker's end; called in the worker's process."""
        return ProcessGroupWorker(self, worker)


class ProcessGroupWorker:
    """A worker's end; see `ProcessGroupAddress.connect`."""

    def __init__(self, address: ProcessGroupAddress, worker: int) -> None:
        self._link = _Link(address.open_store(), worker, _WORKER)
        self._staging = torch.zeros(address.size)

    @property
    def slot(self) -> Tensor | None:
        return None

    def receive(self) -> Command:
        return COMMANDS.decode(self._or_eof(self._link.receive))

    def told_to_compute(self, seconds: float) -> bool:
        time.sleep(seconds)  # the server's thread sends nothing before it has this worker's answer
        return False

    def pull(self, parameters: Tensor, exact_version: int | None = None) -> int:
        version = int(_VERSIONS.decode(self._or_eof(self._link.receive)).version)
        target = parameters if parameters.is_cpu else self._staging
        self._or_eof(lambda: self._link.receive_vector(target))
        if target is not parameters:
            parameters.copy_(target)
        return version

    def push(self, gradients: Tensor) -> None:
        source = gradients if gradients.is_cpu else self._staging.copy_(gradients)
        self._or_eof(lambda: self._link.send(_MESSAGES.encode(_GradientFollows())))
        self._or_eof(lambda: self._link.send_vector(source))

    def answer(self, message: Message) -> None:
        self._or_eof(lambda: self._link.send(_MESSAGES.encode(message)))

    def _or_eof(self, exchange: Callable[[], _T]) -> _T:
        try:
            return exchange()
        except RuntimeError as error:  # what gloo raises, whatever the reason
            raise EOFError("the server is gone") from error
