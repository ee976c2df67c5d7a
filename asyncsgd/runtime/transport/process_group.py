"""Workers reached through torch.distributed: a gloo group of two, server and worker, and a server thread per worker.

A group per worker, because a gloo group fails as a whole when one member dies: so a dead worker takes nobody along.
Threads, because a gloo receive cannot be polled. Vectors travel as tensors, commands and messages as a length and
pickled bytes.

A worker is sent the parameters together with the command that needs them, when it is idle; the copy that is sent is
made under the lock that the server holds while it writes, so it is one consistent version. The lock lives in the
server's process.

Everything listens on loopback: this transport carries several hosts once the launcher does.
"""

from __future__ import annotations

import contextlib
import datetime
import pickle
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from asyncsgd.runtime.transport.base import Command, Compute, Evaluate, Lost, Message, Stop

HOST = "127.0.0.1"
TIMEOUT = datetime.timedelta(minutes=30)
"""Longest silence of a living peer: a gradient or an evaluation must not take longer. A dead peer is noticed at
once.
"""

_SERVER, _WORKER = 0, 1


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

    def send_object(self, content: object) -> None:
        payload = torch.frombuffer(bytearray(pickle.dumps(content)), dtype=torch.uint8)
        self.send_vector(torch.tensor([len(payload)]))
        self.send_vector(payload)

    def receive_object(self) -> object:
        length = torch.zeros(1, dtype=torch.int64)
        self.receive_vector(length)
        payload = torch.empty(int(length), dtype=torch.uint8)
        self.receive_vector(payload)
        return pickle.loads(payload.numpy().tobytes())


class _GradientFollows:
    """Announces the gradient vector that comes before its `Computed`."""


class ProcessGroupServer:
    """The server's end.

    Args:
        num_workers: N.
        size: P.
    """

    def __init__(self, num_workers: int, size: int) -> None:
        listener = socket.socket()
        listener.bind((HOST, 0))  # TCPStore would listen on every address of the host
        listener.listen()
        self._port = listener.getsockname()[1]
        self._store = dist.TCPStore(
            HOST,
            self._port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
            timeout=TIMEOUT,
        )
        self._parameters = torch.zeros(size)
        self._slots = [torch.zeros(size) for _ in range(num_workers)]
        self._version = 0
        self._lock = threading.Lock()
        self._commands: list[queue.SimpleQueue[Command]] = [queue.SimpleQueue() for _ in range(num_workers)]
        self._messages: queue.SimpleQueue[tuple[int, Message]] = queue.SimpleQueue()
        for worker in range(num_workers):
            threading.Thread(target=self._serve, args=(worker,), daemon=True, name=f"worker{worker}").start()

    @property
    def address(self) -> ProcessGroupAddress:
        """What a worker needs to connect."""
        return ProcessGroupAddress(self._port, len(self._parameters))

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
        self._commands[worker].put(command)

    def wait(self, timeout: float | None) -> Sequence[tuple[int, Message]]:
        try:
            return [self._messages.get(timeout=timeout)]
        except queue.Empty:
            return []

    def close(self) -> None:
        for commands in self._commands:
            commands.put(Stop())

    def _serve(self, worker: int) -> None:
        """Thread of one worker: message, command, message, command, until either is gone."""
        snapshot = torch.empty_like(self._parameters)
        try:
            link = _Link(self._store, worker, _SERVER)
            while True:
                message = link.receive_object()
                if isinstance(message, _GradientFollows):
                    link.receive_vector(self._slots[worker])
                    message = link.receive_object()
                self._messages.put((worker, message))  # type: ignore[arg-type]
                command = self._commands[worker].get()
                link.send_object(command)
                if isinstance(command, Stop):
                    return
                if isinstance(command, Compute) and command.exact_version is not None:
                    link.send_object(command.exact_version)
                    link.send_vector(self._slots[worker])
                elif isinstance(command, Compute | Evaluate):
                    with self._lock:
                        snapshot.copy_(self._parameters)
                        version = self._version
                    link.send_object(version)
                    link.send_vector(snapshot)
        except RuntimeError as error:  # what gloo raises, whatever the reason
            self._messages.put((worker, Lost(str(error).splitlines()[0])))


class ProcessGroupAddress:
    """Where a `ProcessGroupServer` is; can be pickled."""

    def __init__(self, port: int, size: int) -> None:
        self.port = port
        self.size = size

    def connect(self, worker: int) -> ProcessGroupWorker:
        """Open the worker's end; called in the worker's process."""
        return ProcessGroupWorker(self, worker)


class ProcessGroupWorker:
    """A worker's end; see `ProcessGroupAddress.connect`."""

    def __init__(self, address: ProcessGroupAddress, worker: int) -> None:
        store = dist.TCPStore(HOST, address.port, is_master=False, wait_for_workers=False, timeout=TIMEOUT)
        self._link = _Link(store, worker, _WORKER)
        self._staging = torch.zeros(address.size)

    @property
    def slot(self) -> Tensor | None:
        return None

    def receive(self) -> Command:
        return self._or_eof(self._link.receive_object)  # type: ignore[return-value]

    def told_to_compute(self, seconds: float) -> bool:
        time.sleep(seconds)  # the server's thread sends nothing before it has this worker's answer
        return False

    def pull(self, parameters: Tensor, exact_version: int | None = None) -> int:
        version = self._or_eof(self._link.receive_object)
        target = parameters if parameters.is_cpu else self._staging
        self._or_eof(lambda: self._link.receive_vector(target))
        if target is not parameters:
            parameters.copy_(target)
        return version  # type: ignore[return-value]

    def push(self, gradients: Tensor) -> None:
        source = gradients if gradients.is_cpu else self._staging.copy_(gradients)
        self._or_eof(lambda: self._link.send_object(_GradientFollows()))
        self._or_eof(lambda: self._link.send_vector(source))

    def answer(self, message: Message) -> None:
        self._or_eof(lambda: self._link.send_object(message))

    def _or_eof(self, exchange: Callable[[], object]) -> object:
        try:
            return exchange()
        except RuntimeError as error:  # what gloo raises, whatever the reason
            raise EOFError("the server is gone") from error
