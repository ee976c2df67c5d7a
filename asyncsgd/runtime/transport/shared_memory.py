"""Workers on the server's host: one shared segment for vectors, a local socket for commands.

The segment holds a control word, the server's parameters and one gradient slot per worker. The server applies
gradients straight from the slots to the parameters; a worker's ``.grad`` tensors are views into its slot, so a push
copies nothing.

A pull is one consistent version without any lock: the control word is 2 v while version v stands and 2 v + 1 while
the server writes version v + 1 (a sequence lock). A reader copies between two equal, even values and reads again
otherwise. If a reader must read again, the server has made progress. If the server was killed while it wrote, the word
stays odd for ever. So a reader that waits also checks that the server is still there. The order of the stores and loads
around the copy is that of x86; on other processors `asyncsgd.modes.check_transport` refuses this transport.

The segment is a file of the shared-memory file system, so workers may come from anywhere on this host (this library's
fork server or torchrun). On Linux it has no name: workers find it among the server's open files in /proc, so not even
SIGKILL at the worst moment leaves it behind. Elsewhere its name is removed as soon as all have opened it.

The socket lies in a folder that only this user can enter, and a worker's first message is its number.

No message to a worker may block the server, or a worker that stands still would block all the others. Messages for
which its socket has no room wait in a backlog. Of several requests for a gradient only the last counts, since each one
abandons the gradient before it."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import secrets
import select
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path

import torch
from torch import Tensor

from asyncsgd.errors import UsageError
from asyncsgd.numbers import spelled_bytes
from asyncsgd.runtime.transport.backlog import Backlog
from asyncsgd.runtime.transport.codec import Codec, ProtocolError
from asyncsgd.runtime.transport.messages import COMMANDS, MESSAGE_KINDS, Command, Lost, Message

_MESSAGES = Codec(*MESSAGE_KINDS)
_PAGE = 4096
_BACKLOG_SECONDS = 0.1
"""How often a wait looks whether a worker has made room for what it could not be sent."""


class Segment:
    """A shared file mapped as float32 vectors behind a page of int64 control words.

    Args:
        path: of the file.
        num_floats: length of the vector part.
    """

    def __init__(self, path: Path, num_floats: int) -> None:
        self._descriptor: int | None = None
        raw = torch.from_file(str(path), shared=True, size=_PAGE + 4 * num_floats, dtype=torch.uint8)
        self.control = raw[:_PAGE].view(torch.int64)
        """int64 `(512,)`: 0 is the sequence word, 1 the samples that arrived, 2 the frozen flag."""
        self.floats = raw[_PAGE:].view(torch.float32)
        self.path = path
        """Where others open it."""

    @classmethod
    def create(cls, num_floats: int) -> Segment:
        """Make and zero a new one, its memory reserved.

        Raises:
            UsageError: if the shared-memory file system is too small for it, with the fix.
        """
        directory = Path("/dev/shm") if os.path.isdir("/dev/shm") else Path(tempfile.gettempdir())
        needed = _PAGE + 4 * num_floats
        free = shutil.disk_usage(directory).free
        too_small = (
            f"the run needs {spelled_bytes(needed)} of shared memory and {directory} has {spelled_bytes(free)} free; "
            f"enlarge it (docker run --shm-size={2 * needed // 2**20 + 1}m, or mount -o remount,size=... {directory}), "
            f"take fewer workers, or, in mode async, type --transport process_group"
        )
        if needed > free:
            raise UsageError(too_small)
        path = directory / f"asyncsgd-{os.getpid()}-{secrets.token_hex(6)}"
        descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
        nameless = Path(f"/proc/{os.getpid()}/fd/{descriptor}")
        try:
            if nameless.exists():
                path.unlink()
                path = nameless
            if hasattr(os, "posix_fallocate"):  # reserve now: a full file system would kill with SIGBUS later
                os.posix_fallocate(descriptor, 0, needed)
            else:
                os.ftruncate(descriptor, needed)
            segment = cls(path, num_floats)
        except BaseException as error:
            if path is not nameless:
                path.unlink()
            os.close(descriptor)
            if isinstance(error, OSError):
                raise UsageError(too_small) from error
            raise
        segment._descriptor = descriptor
        return segment

    def unlink(self) -> None:
        """From here on nobody else can open it; the memory lives as long as somebody has it mapped. May be called
        twice, and by whoever has opened it: only the process that made a nameless one can close it.
        """
        if not self.path.is_relative_to("/proc"):
            self.path.unlink(missing_ok=True)
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


_SEQUENCE, SAMPLES, FROZEN = 0, 1, 2


class SharedMemoryServer:
    """The server's end.

    Args:
        num_workers: slots to reserve, N.
        size: P.
        extra: float32 elements to reserve behind the slots (optimizer state that Hogwild workers share).
        slots: whether workers need a gradient slot (Hogwild workers do not).
    """

    def __init__(self, num_workers: int, size: int, *, extra: int = 0, slots: bool = True) -> None:
        self._size = size
        self._num_slots = num_workers if slots else 0
        self._num_floats = size * (1 + self._num_slots) + extra
        self.segment = Segment.create(self._num_floats)
        self._folder = tempfile.TemporaryDirectory(prefix="asyncsgd-")
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(self._path)
        self._listener.listen(num_workers + 8)
        self._listener.setblocking(False)
        self._connections: dict[int, Connection] = {}
        self._backlog: dict[int, Backlog] = {}
        self._newcomers: list[Connection] = []
        """Those of workers that have not said yet who they are."""
        self._expected = num_workers

    @property
    def _path(self) -> str:
        return f"{self._folder.name}/socket"

    @property
    def address(self) -> SharedMemoryAddress:
        """What a worker needs to connect; holds names and numbers only."""
        return SharedMemoryAddress(self._path, str(self.segment.path), self._num_floats, self._size, self._num_slots)

    @property
    def parameters(self) -> Tensor:
        return self.segment.floats[: self._size]

    @property
    def extra(self) -> Tensor:
        """What was reserved behind the slots."""
        return self.segment.floats[self._size * (1 + self._num_slots) : self._num_floats]

    def gradient(self, worker: int) -> Tensor:
        return self.segment.floats[self._size * (1 + worker) : self._size * (2 + worker)]

    @contextlib.contextmanager
    def writing(self, version: int) -> Iterator[None]:
        self.segment.control[_SEQUENCE] = 2 * version + 1
        yield
        self.segment.control[_SEQUENCE] = 2 * version + 2

    def send(self, worker: int, command: Command) -> None:
        if worker not in self._connections:
            return  # lost before; `wait` has said so
        self._backlog.setdefault(worker, Backlog()).put(command)
        self._send_backlog(worker)

    def _send_backlog(self, worker: int) -> None:
        """Send a worker as much as its socket has room for."""
        connection, backlog = self._connections[worker], self._backlog[worker]
        room = select.poll()
        room.register(connection, select.POLLOUT)
        while backlog and room.poll(0):  # a socket that can be written to has room for many commands of this size
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # `wait` will find it closed
                connection.send_bytes(COMMANDS.encode(backlog.take()))
        if not backlog:
            del self._backlog[worker]

    def wait(self, timeout: float | None) -> Sequence[tuple[int, Message]]:
        for worker in list(self._backlog):
            self._send_backlog(worker)
        if self._backlog:
            timeout = _BACKLOG_SECONDS if timeout is None else min(timeout, _BACKLOG_SECONDS)
        by_connection = {connection: worker for worker, connection in self._connections.items()}
        messages: list[tuple[int, Message]] = []
        for ready in wait([self._listener, *self._newcomers, *by_connection], timeout):
            if ready is self._listener:
                self._newcomers.append(Connection(self._listener.accept()[0].detach()))
            elif ready in self._newcomers:
                self._meet(ready)
            else:
                worker = by_connection[ready]  # type: ignore[index]
                messages.append((worker, self._receive(worker)))
        return messages

    def _receive(self, worker: int) -> Message:
        try:
            message: Message = _MESSAGES.decode(self._connections[worker].recv_bytes())
            return message
        except ProtocolError as error:
            reason = f"it sent what no worker sends: {error}"
        except (EOFError, OSError):
            reason = "its process ended"
        self._connections.pop(worker).close()
        self._backlog.pop(worker, None)
        return Lost(reason)

    def _meet(self, newcomer: Connection) -> None:
        self._newcomers.remove(newcomer)
        with contextlib.suppress(EOFError, OSError):  # it is gone again
            self._connections[int(newcomer.recv_bytes())] = newcomer
        if len(self._connections) == self._expected:  # nobody else is to come
            self.segment.unlink()
            self._folder.cleanup()

    def close(self) -> None:
        for connection in self._connections.values():
            connection.close()
        for newcomer in self._newcomers:
            newcomer.close()
        self._connections.clear()
        self._newcomers.clear()
        self._backlog.clear()
        self._listener.close()
        self.segment.unlink()
        self._folder.cleanup()


@dataclasses.dataclass(frozen=True)
class SharedMemoryAddress:
    """Where a `SharedMemoryServer` is; names and numbers only."""

    socket_path: str
    segment_path: str
    num_floats: int
    size: int
    num_slots: int

    def connect(self, worker: int) -> SharedMemoryWorker:
        """Open the worker's end; called in the worker's process."""
        return SharedMemoryWorker(self, worker)


class SharedMemoryWorker:
    """A worker's end; see `SharedMemoryAddress.connect`."""

    def __init__(self, address: SharedMemoryAddress, worker: int) -> None:
        self.segment = Segment(Path(address.segment_path), address.num_floats)
        self._size, self._num_slots, self._worker = address.size, address.num_slots, worker
        client = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        client.connect(address.socket_path)
        self._connection = Connection(client.detach())
        self._connection.send_bytes(str(worker).encode())
        self._read_ahead = Backlog()

    @property
    def parameters(self) -> Tensor:
        """The server's own vector `(P,)`, for a worker that reads and writes it in place (Hogwild)."""
        return self.segment.floats[: self._size]

    @property
    def extra(self) -> Tensor:
        """What was reserved behind the slots."""
        return self.segment.floats[self._size * (1 + self._num_slots) :]

    @property
    def slot(self) -> Tensor | None:
        begin = self._size * (1 + self._worker)
        return self.segment.floats[begin : begin + self._size] if self._num_slots else None

    @property
    def version(self) -> int:
        """The version that stands or is being left, without any promise about the parameters."""
        return int(self.segment.control[_SEQUENCE]) // 2

    def receive(self) -> Command:
        if not self._read_ahead:
            self._look_ahead(None)
        # What has been abandoned meanwhile need not be computed. After Stop the server may be gone, as it may.
        while not self._read_ahead.stops and self._look_ahead(0.0):
            pass
        return self._read_ahead.take()

    def _look_ahead(self, timeout: float | None) -> bool:
        """Read the next command for a later `receive` if it comes within `timeout` seconds (None: whenever it comes).

        Returns:
            Whether one came.

        Raises:
            EOFError: if the server is gone.
        """
        try:
            if timeout is not None and not self._connection.poll(timeout):
                return False
            command: Command = COMMANDS.decode(self._connection.recv_bytes())
        except (EOFError, OSError) as error:
            raise EOFError("the server is gone") from error
        self._read_ahead.put(command)
        return True

    def told_to_compute(self, seconds: float) -> bool:
        end = time.monotonic() + seconds
        while not self._read_ahead.abandons:
            if not self._look_ahead(max(0.0, end - time.monotonic())):
                return False
        return True

    def pull(self, parameters: Tensor, exact_version: int | None = None) -> int:
        if exact_version is not None:
            slot = self.slot
            assert slot is not None
            parameters.copy_(slot)
            return exact_version
        shared = self.parameters
        while True:
            before = int(self.segment.control[_SEQUENCE])
            if before % 2 == 0:
                parameters.copy_(shared)
                if int(self.segment.control[_SEQUENCE]) == before:
                    return before // 2
            # The server is writing: let it have the core. If it was killed at that, its end of the socket is closed.
            time.sleep(0)
            self._look_ahead(0.0)

    def push(self, gradients: Tensor) -> None:
        slot = self.slot
        if slot is not None and gradients.data_ptr() != slot.data_ptr():  # computed on another device
            slot.copy_(gradients)

    def answer(self, message: Message) -> None:
        try:
            self._connection.send_bytes(_MESSAGES.encode(message))
        except (BrokenPipeError, ConnectionResetError) as error:
            raise EOFError("the server is gone") from error
