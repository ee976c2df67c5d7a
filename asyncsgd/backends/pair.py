"""A pair: a gloo group of two, through which a server and a worker send each other messages and vectors.

A pair connects processes on different hosts, and processes on one host that cannot share memory. On one host the two
find each other through a file in a folder that only this user can enter, and gloo listens on loopback. On several hosts
they find each other in the store that torchrun opens, where anybody on the network can write. So both ends prove to
each other that they have the token of the run before anything else is read, and each message and each piece of a vector
has a tag; see `asyncsgd.backends.seal`. An end that sends a wrong tag is treated as gone, and nothing that it sent is
used."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import datetime
import multiprocessing
import os
import struct
import threading
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from msgspec import Struct
from torch import Tensor

from asyncsgd.backends import seal
from asyncsgd.backends.link import Alive, Gone, GradientFollows, Inherited, Link, Stop, encode
from asyncsgd.backends.segment import Segment

LOOPBACK = "127.0.0.1"
RENDEZVOUS_TIMEOUT = datetime.timedelta(minutes=30)
"""The longest wait for the other end to come up."""
_RECEIVE_TIMEOUT = datetime.timedelta(days=30)
"""The longest silence of a peer. A living one may be suspended; a dead one is noticed at once."""
_SERVER = 0
_WORKER = 1
_MESSAGE_CHANNEL = 0
_VECTOR_CHANNEL = 1
_TAG_CHANNEL = 2
"""Messages, vectors and the tags of a vector's pieces go through three channels, which gloo calls tags."""
_FRAME_BYTES = 1024
"""Messages are sent in frames of this size."""
_LENGTH = struct.Struct("!I")
_MAX_MESSAGE_BYTES = 1 << 28
_MAX_POSTED = 4096
"""Before there are more sends, the oldest is waited for."""
_PIECE_ELEMENTS = 1 << 20
"""So many elements of a vector have one tag. While the tag of a piece is computed, the next one is on its way."""
_LOOK_SECONDS = 0.2
"""How often `until_given_up` looks whether the pair has been given up."""
_ALIVE = encode(Alive())
"""A sign of life that says no more. Nobody needs to receive it."""
_PROOF = b"asyncsgd"
"""The first message that has a tag."""
_OTHER_TOKEN = (
    "it does not prove that it has the token; give all hosts the same one, and the same asyncsgd, or all "
    "--trust-network"
)
_TRUSTING = "it has a token and this side trusts the network; give all hosts the token, or all --trust-network"


class Greeting(Struct, forbid_unknown_fields=True):
    """The first message of each end. It has no tag."""

    random: bytes
    algorithms: tuple[str, ...]
    """The algorithms for tags that this end has; none if it trusts the network."""


@dataclasses.dataclass(frozen=True)
class Rendezvous:
    """Where the two ends of a pair find each other. Can be pickled for a child. The parent tells the child the folder,
    since the fork server may have another folder for temporary files.
    """

    folder: str = ""
    """A folder that only this user can enter; empty: the ends find each other in torchrun's store."""
    store: tuple[str, int] = ("", 0)
    """The address and the port of torchrun's store."""
    prefix: str = ""
    """The prefix of names in the store, which tells apart two starts by torchrun."""
    address: str = LOOPBACK
    """The address of this host on which gloo listens."""
    token: bytes = dataclasses.field(default=b"", repr=False)
    """The token of the run; empty: every process that comes here is trusted."""

    def open(self) -> Any:
        """Open the store in which the two ends find each other, and return it."""
        if self.folder:
            store: Any = dist.FileStore(f"{self.folder}/store")
        else:
            host, port = self.store
            store = dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=RENDEZVOUS_TIMEOUT)
        store.set_timeout(RENDEZVOUS_TIMEOUT)
        return dist.PrefixStore(self.prefix, store)

    def connect(self, worker: int) -> tuple[Link, Segment | None]:
        """Return the worker's end, which shares no segment with the server."""
        return Pair(self, f"worker{worker}", serves=False), None


LinkSource = Inherited | Rendezvous
"""How a worker comes to its link with the server."""


class Pair(Link):
    """One end of a pair.

    A gloo receive cannot be polled, so a thread puts what comes into a pipe. There is a group per worker, because a
    gloo group fails as a whole when one member dies. So a dead worker takes nobody along.

    Args:
        rendezvous: where the two ends find each other.
        name: whose pair it is, such as ``worker3``.
        serves: whether it is the server's end.
        slot: the vectors into which the thread receives what follows a `GradientFollows`: `(P,)`, the gradient, and if
            the model has running statistics its effect on them, `(3, S)`. Empty, as at a worker's end: whoever expects
            a vector receives it, with `receive_vector`.
    """

    def __init__(self, rendezvous: Rendezvous, name: str, *, serves: bool, slot: Sequence[Tensor] = ()) -> None:
        ours, self._handed_on = multiprocessing.Pipe(duplex=False)
        super().__init__(ours)
        self._rendezvous = rendezvous
        self._name = name
        self._slot = slot
        self._serves = serves
        self._rank = _SERVER if serves else _WORKER
        self._peer = _WORKER if serves else _SERVER
        self._group: Any = None
        self._sending: seal.Seal | None = None
        self._receiving: seal.Seal | None = None
        self._is_open = False
        self._leaves = False
        """Whether the thread ends with the next message of the other end."""
        self._has_met = threading.Event()
        """Set when the other end has come, or is known to be gone."""
        self._is_given_up = threading.Event()
        self._has_heard = False
        """Whether the other end has sent or taken anything since `exchange_signs` looked."""
        self._lock = threading.Lock()
        self._early: list[bytes] = []  # messages for a peer that is not there yet
        self._posted: collections.deque[tuple[Any, Tensor]] = collections.deque()
        """What gloo may still be sending. It is kept here, since gloo does not send what nobody holds."""
        self._thread = threading.Thread(target=self._run, daemon=True, name=name)
        self._thread.start()

    def send_vector(self, vector: Tensor) -> None:
        """Send a vector, which must not change before the other end answers; returns at once. To be called when the
        other end has come: see `deliver`."""
        tags = b""
        for piece in vector.split(_PIECE_ELEMENTS):
            self._post(piece, _VECTOR_CHANNEL)
            if self._sending is not None:
                tags += self._sending.tag(_VECTOR_CHANNEL, _bytes_of(piece))
        if self._sending is not None:
            self._post(_as_tensor(tags), _TAG_CHANNEL)

    def deliver(self, vector: Tensor) -> None:
        """Wait for the other end to come, send it a vector, and wait until it is sent. The vector may change then.

        Raises:
            Gone: if the other end is gone, or the pair has been given up.
        """
        self._has_met.wait()
        self.send_vector(vector)
        self.until_given_up(self.flush)

    def until_given_up(self, call: Callable[..., None], *arguments: Tensor) -> None:
        """Make a call of this pair that waits for gloo, which may wait for ever for a host that was cut off: it is made
        in a thread that can be left behind.

        Raises:
            Gone: if the other end is gone, or the pair has been given up.
        """

        def make() -> None:
            try:
                call(*arguments)
            except Gone as gone:
                self.give_up(str(gone))
            except Exception as error:
                raised.append(error)

        raised: list[Exception] = []
        waiting = threading.Thread(target=make, daemon=True)
        waiting.start()
        while waiting.is_alive() and not self._is_given_up.is_set():
            waiting.join(_LOOK_SECONDS)
        if raised:
            raise raised[0]
        if self._is_given_up.is_set():
            raise Gone(self.ended)

    def exchange_signs(self, interval: float, deadline: float) -> None:
        """Send a sign of life every `interval` seconds, and give the pair up where the other end, once it has come, is
        silent for `deadline` seconds; to be called at both ends, in a thread of its own. It returns when the pair has
        been given up. What has come or gone of a vector is a sign too, since signs wait behind it."""
        self._has_met.wait()
        # Looks are counted, and not seconds of a clock: those in which this process stood still count for nobody.
        silent = 0.0
        while not self._is_given_up.wait(interval):
            silent += interval
            if self._has_heard:
                self._has_heard = False
                silent = 0.0
            if silent >= deadline:
                self.give_up(f"no sign of life for {deadline:g} s")
            with contextlib.suppress(Gone):
                self.send(Alive())

    def receive_vector(self, vector: Tensor) -> None:
        """Wait for the next vector, and write it into `vector` as it comes. If this raises, `vector` must not be used.

        Raises:
            Gone: if the other end is gone, or has sent a wrong tag.
        """
        try:
            self._receive_pieces(vector.split(_PIECE_ELEMENTS))
        except RuntimeError as error:  # what gloo raises, whatever the reason
            raise Gone(self.ended) from error
        except seal.Untrusted as error:
            self.ended = str(error)
            raise Gone(self.ended) from error

    def flush(self) -> None:
        """Wait until everything is sent that was posted so far."""
        try:
            while self._posted:
                self._posted.popleft()[0].wait()
                self._has_heard = True
        except RuntimeError as error:
            raise Gone(self.ended) from error

    def join(self, seconds: float) -> None:
        """Wait up to `seconds` until the thread has ended, as it does when the other end has left. A thread that comes
        out of gloo while the interpreter ends would end this process by a signal."""
        self._thread.join(seconds)

    def leave(self) -> None:
        """Say `Stop`, and end the thread with the next message of the other end, such as its `Stop`. Where processes
        outlive their pair, both ends call this."""
        self._leaves = True
        with contextlib.suppress(Gone):
            self.send(Stop())

    def give_up(self, reason: str) -> None:
        """Make `receive` and `until_given_up` at this end raise `Gone` with this reason. May be called from any
        thread."""
        self.ended = reason
        self._is_given_up.set()
        self._has_met.set()
        with contextlib.suppress(OSError):
            self._handed_on.close()

    def _put(self, payload: bytes) -> None:
        with self._lock:
            if self._is_open:
                self._post_bytes(payload)
            else:
                self._early.append(payload)

    def _leave_group(self) -> None:
        """Close the connection. The other end sees that this one is gone."""
        with self._lock:
            self._is_open = False
            self._posted.clear()
            self._group = None

    def _held_group(self) -> Any:
        """The group. A reference keeps it alive during a call, though the thread may leave it meanwhile. Raises `Gone`
        where it has left."""
        group = self._group
        if group is None:
            raise Gone(self.ended)
        return group

    def _post(self, tensor: Tensor, channel: int) -> None:
        try:
            if len(self._posted) >= _MAX_POSTED:
                self._posted.popleft()[0].wait()
            work = self._held_group().send([tensor], self._peer, channel)
            self._posted.append((work, tensor))
        except RuntimeError as error:
            raise Gone(self.ended) from error

    def _post_bytes(self, payload: bytes) -> None:
        """Send the length of a message, the message and its tag, in frames of one size."""
        content = _LENGTH.pack(len(payload)) + payload
        if self._sending is not None:
            content += self._sending.tag(_MESSAGE_CHANNEL, payload)
        for begin in range(0, len(content), _FRAME_BYTES):
            frame = content[begin : begin + _FRAME_BYTES].ljust(_FRAME_BYTES, b"\0")
            self._post(_as_tensor(frame), _MESSAGE_CHANNEL)

    def _run(self) -> None:
        """Connect, then put each message into the pipe, until either end is gone."""
        try:
            self._group = self._connected()
            self._greet()
            with self._lock:
                for payload in self._early:
                    self._post_bytes(payload)
                self._is_open = True
            self._has_met.set()
            while not self._leaves:
                payload = self._receive_bytes()
                # The message is not decoded here: `receive` decodes it, in another thread.
                if self._slot and payload == encode(GradientFollows()):
                    for vector in self._slot:
                        self.receive_vector(vector)
                elif payload != _ALIVE:
                    self._handed_on.send_bytes(payload)
            # Before this thread leaves the group: what a group that is gone was sending is waited for in vain.
            with contextlib.suppress(Gone):
                self.flush()
            self._leave_group()
        except (seal.Untrusted, msgspec.ValidationError, msgspec.DecodeError) as error:
            self.give_up(str(error))
            self._leave_group()
        except (RuntimeError, OSError, EOFError):  # the connection is broken already, so there is none to close
            self.give_up(self.ended)

    def _connected(self) -> Any:
        """Wait for the other end, and return the gloo group of the two."""
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # missing in the stub
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=self._rendezvous.address)]
        options._timeout = _RECEIVE_TIMEOUT
        return dist.ProcessGroupGloo(dist.PrefixStore(self._name, self._rendezvous.open()), self._rank, 2, options)

    def _greet(self) -> None:
        """Greet, and have the other end prove that it has the token.

        Raises:
            Untrusted: if it does not.
        """
        token = self._rendezvous.token
        ours = Greeting(os.urandom(32), seal.available() if token else ())
        sent = msgspec.json.encode(ours)
        self._post_bytes(sent)
        if not token:
            if msgspec.json.decode(self._receive_bytes(), type=Greeting).algorithms:
                raise seal.Untrusted(_TRUSTING)
            return
        try:
            proof = self._exchange_proofs(sent, ours.algorithms)
        except seal.Untrusted as error:
            raise seal.Untrusted(_OTHER_TOKEN) from error
        except RuntimeError as error:  # the other end has seen our proof first, and left
            raise seal.Untrusted(_OTHER_TOKEN) from error
        if proof != _PROOF:
            raise seal.Untrusted(_OTHER_TOKEN)

    def _exchange_proofs(self, sent: bytes, algorithms: Sequence[str]) -> bytes:
        """Make the keys out of both greetings, send the proof, and return that of the other end."""
        received = self._receive_bytes()
        theirs = msgspec.json.decode(received, type=Greeting)
        greetings = (sent, received) if self._serves else (received, sent)
        algorithm = seal.common(algorithms, theirs.algorithms)
        of_server, of_worker = seal.seals(self._rendezvous.token, self._name, greetings, algorithm)
        if self._serves:
            self._sending = of_server
            self._receiving = of_worker
        else:
            self._sending = of_worker
            self._receiving = of_server
        self._post_bytes(_PROOF)
        return self._receive_bytes()

    def _receive_bytes(self) -> bytes:
        seal_bytes = 0 if self._receiving is None else seal.TAG_BYTES
        content = b""
        length = 0
        while len(content) < _LENGTH.size + length + seal_bytes:
            frame = torch.empty(_FRAME_BYTES, dtype=torch.uint8)
            self._held_group().recv([frame], self._peer, _MESSAGE_CHANNEL).wait()
            self._has_heard = True
            content += frame.numpy().tobytes()
            (length,) = _LENGTH.unpack_from(content)
            if length > _MAX_MESSAGE_BYTES:
                raise seal.Untrusted(f"it announced a message of {length} bytes")
        end = _LENGTH.size + length
        payload = content[_LENGTH.size : end]
        if self._receiving is not None:
            self._receiving.check(_MESSAGE_CHANNEL, payload, content[end : end + seal_bytes])
        return payload

    def _receive_pieces(self, pieces: Sequence[Tensor]) -> None:
        """Receive the pieces of a vector, and then their tags. A piece's tag is computed while the next one comes."""
        group = self._held_group()
        works = [group.recv([piece], self._peer, _VECTOR_CHANNEL) for piece in pieces]
        came = torch.empty(len(pieces) * seal.TAG_BYTES, dtype=torch.uint8)
        of_tags = None if self._receiving is None else group.recv([came], self._peer, _TAG_CHANNEL)
        expected = b""
        for piece, work in zip(pieces, works, strict=True):
            work.wait()
            self._has_heard = True
            if self._receiving is not None:
                expected += self._receiving.tag(_VECTOR_CHANNEL, _bytes_of(piece))
        if of_tags is not None:
            of_tags.wait()
            seal.check_equal(came.numpy().tobytes(), expected)


def _bytes_of(tensor: Tensor) -> memoryview:
    array: Any = tensor.detach().numpy()
    return memoryview(array).cast("B")


def _as_tensor(content: bytes) -> Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)
