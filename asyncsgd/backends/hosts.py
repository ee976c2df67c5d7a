"""The other hosts of an asynchronous run: who they are, whether they have the same run, and whether they live.

Torchrun has started ranks on every host, and rank 0 leads. It starts the workers of its own host itself. On each other
host the first rank starts as many workers as its host has ranks; the other ranks end. So a worker, and a whole host,
can be lost without torchrun ending the rest.

Each other host has a pair with rank 0, beside those of its workers:

    host                        rank 0
    Hello           ->                     its name, workers, versions, hardware
                    <-          Begin      settings, fingerprints of data and initial parameters, prepared folders
    Lacking         ->                     where it lacks some of these; their files come as vectors
    Prepared        ->                     it has the same; or Refused, with the reason
    Alive           <->         Alive      every few seconds
                    <-          Stop       all is over
    Stop            ->                     it has heard so

A host that is silent for too long is lost, and with it its workers; a host that does not hear from rank 0 ends its
workers. Seconds in which this process stood still count for nobody."""

from __future__ import annotations

import contextlib
import dataclasses
import ipaddress
import os
import platform
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from multiprocessing.connection import wait
from pathlib import Path
from types import TracebackType
from typing import Any

from torch import distributed as dist

from asyncsgd import __version__
from asyncsgd.backends.addresses import address_of_interface, address_towards
from asyncsgd.backends.copies import ListedFolder, found_here, receive
from asyncsgd.backends.copies import send as send_files
from asyncsgd.backends.launch import Launch
from asyncsgd.backends.link import Alive, Begin, Gone, Hello, Lacking, Link, Message, Prepared, Refused, Stop
from asyncsgd.backends.pair import MEETING, Meeting, Pair
from asyncsgd.backends.segment import Segment
from asyncsgd.core.awake import awake
from asyncsgd.core.limits import POLL_SECONDS
from asyncsgd.errors import RunError

_DEADLINE = 60.0
_BETWEEN_SIGNS = 5.0
_SIGNS_BEFORE_DEADLINE = 4
"""How often a host says at least that it lives before it would be lost."""
_BEFORE_A_WORD = 15.0
"""Seconds that rank 0 waits for a host before it says so."""


@dataclasses.dataclass(frozen=True)
class Signs:
    """When hosts say that they live."""

    deadline: float = _DEADLINE
    """Seconds without a sign of life after which a host is lost."""

    @classmethod
    def of(cls, worker_deadline: float | None) -> Signs:
        return cls() if worker_deadline is None else cls(worker_deadline)

    @property
    def between(self) -> float:
        """Seconds between two signs of life."""
        return min(_BETWEEN_SIGNS, self.deadline / _SIGNS_BEFORE_DEADLINE)


def versions() -> dict[str, str]:
    """What must be equal on all hosts, since workers compute with it what the server believes."""
    python = ".".join(platform.python_version_tuple()[:2])
    return {"asyncsgd": __version__, "torch": metadata.version("torch").partition("+")[0], "python": python}


@dataclasses.dataclass(frozen=True)
class Host:
    """This host among those of a run, as torchrun numbers them."""

    number: int
    """Of this host; 0 has rank 0."""
    num_hosts: int
    first: int
    """Worker of this host: the rank of its first process."""
    num_workers: int
    leader: str
    """Address of the host of rank 0, as torchrun was given it."""
    port: int
    prefix: str

    @classmethod
    def of_torchrun(cls, launch: Launch) -> Host:
        """This process's; called in the first rank of a host."""
        assert launch.rank is not None
        attempt = f"{os.environ.get('TORCHELASTIC_RUN_ID')}/{os.environ.get('TORCHELASTIC_RESTART_COUNT')}"
        return cls(
            int(os.environ["GROUP_RANK"]),
            int(os.environ["GROUP_WORLD_SIZE"]),
            launch.rank - launch.local_rank,
            launch.ranks_here,
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            f"asyncsgd/{attempt}",
        )

    def meeting(self, address: str, token: bytes) -> Meeting:
        """Where this host meets another one, with gloo on `address`."""
        return Meeting("", (self.leader, self.port), self.prefix, address, token)


def _own_address(interface: str | None, other: str) -> str:
    return address_towards(other) if interface is None else address_of_interface(interface)


def _name_of_address(host: int) -> str:
    return f"address of host {host}"


class Hosts:
    """The other hosts, at rank 0. A context manager that lets them go at the end.

    Args:
        place: of this process.
        token: that all hosts have; empty where the network is trusted.
        interface: whose address gloo listens on; None: that of the way to each host.
        signs: of life.
        stop: raises when the user has asked to stop.
        tell: says a line to the user.
    """

    def __init__(
        self,
        place: Host,
        token: bytes,
        interface: str | None,
        signs: Signs,
        stop: Callable[[], None],
        tell: Callable[[str], None],
    ) -> None:
        self.place = place
        self._signs = signs
        self._tell = tell
        # Where torchrun has no store of its own, rank 0 opens the one in which all meet, for as long as it lives.
        self._store, _, _ = next(iter(dist.rendezvous("env://")))
        self._meetings: dict[int, Meeting] = {}
        self._links: dict[int, Pair] = {}
        self._workers: dict[int, Pair] = {}
        self.greetings: dict[int, Hello] = {}
        """What each other host has said of itself."""
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        for host in range(1, place.num_hosts):
            address = _own_address(interface, self._address_of(host, stop))
            self._meetings[host] = place.meeting(address, token)
            self._links[host] = Pair(self._meetings[host], f"host{host}", serves=True)
        for host, hello in self._answers(Hello, stop):
            if isinstance(hello, Hello):
                self.greetings[host] = hello
        self._check_versions()

    @property
    def workers_here(self) -> range:
        """The workers of this host."""
        return range(self.place.first, self.place.first + self.place.num_workers)

    def host_of(self, worker: int) -> int:
        """The number of the host of a worker on another one."""
        for host, hello in self.greetings.items():
            if hello.first <= worker < hello.first + hello.number:
                return host
        raise RunError(f"no host has worker {worker}: torchrun's numbers of ranks do not agree; start the run again")

    def hardware_of_ranks(self, here: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        """The hardware of every worker, in order."""
        hardware = [here] * self.place.num_workers
        for _, hello in sorted(self.greetings.items()):
            hardware += [hello.hardware] * hello.number
        return hardware

    def begin(self, notice: Begin, stop: Callable[[], None]) -> None:
        """Have every other host prepare the run, and wait for all.

        Args:
            stop: raises when the user has asked to stop.

        Raises:
            RunError: if one of them has other data, another model or other settings.
        """
        for link in self._links.values():
            with contextlib.suppress(Gone):  # it is heard below that nobody is there
                link.send(notice)
        for host, answer in self._answers(Prepared, stop, notice.folders):
            if isinstance(answer, Refused):
                raise RunError(f"{self._called(host)}: {answer.reason}")

    def pairs(self, segment: Segment, num_workers: int) -> dict[int, Link]:
        """A link to each worker of another host, whose vectors are received into its slot of the segment. From now on
        a host that is silent is lost."""
        for worker in range(num_workers):
            if worker in self.workers_here:
                continue
            slot = [segment.slots[worker]]
            if len(segment.statistics):
                slot.append(segment.moved[worker])
            self._workers[worker] = Pair(
                self._meetings[self.host_of(worker)], f"worker{worker}", serves=True, slot=slot
            )
        self._thread = threading.Thread(target=self._watch, name="hosts", daemon=True)
        self._thread.start()
        return dict(self._workers)

    def __enter__(self) -> Hosts:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        if self._thread is not None:
            self._thread.join()
        for link in self._links.values():
            with contextlib.suppress(Gone):
                link.send(Stop())
        if self._thread is not None:
            self._wait_for_answers_to_stop()

    def _address_of(self, host: int, stop: Callable[[], None]) -> str:
        """The address that another host has written into the store. Nothing is sent there before it has proved that
        it has the token."""
        store = dist.PrefixStore(self.place.prefix, self._store)
        name = _name_of_address(host)
        began = time.monotonic()
        has_told = False
        while not store.check([name]):
            stop()
            waited = time.monotonic() - began
            if waited > _BEFORE_A_WORD and not has_told:
                has_told = True
                self._tell(f"waits for host {host}: type the same command there, with --node-rank {host}")
            if waited > MEETING.total_seconds():
                raise RunError(f"host {host} has not come within {MEETING}; start torchrun there as well")
            time.sleep(0.05)
        try:
            return str(ipaddress.ip_address(store.get(name).decode()))
        except ValueError as error:
            raise RunError(f"the address of host {host} is none ({error}); start the run again") from error

    def _wait_for_answers_to_stop(self) -> None:
        """Wait until every host has heard that all is over, or is gone.

        What has not reached a host when this process ends is lost with its connection, and the host would believe that
        rank 0 is lost."""
        waiting = list(self._links.values())
        began = awake()
        while waiting and awake() - began < self._signs.deadline:
            wait([link.fileno() for link in waiting], POLL_SECONDS)
            waiting = [link for link in waiting if not _has_left(link)]

    def _check_versions(self) -> None:
        ours = versions()
        for host, hello in self.greetings.items():
            different = [name for name in ours if hello.versions.get(name) != ours[name]]
            if different:
                there = ", ".join(f"{name} {hello.versions.get(name)}" for name in different)
                here = ", ".join(f"{name} {ours[name]}" for name in different)
                reason = f"it has {there}, and rank 0 has {here}; install the same there"
                self._links[host].send(Refused(reason))
                raise RunError(f"{self._called(host)}: {reason}")

    def _called(self, host: int) -> str:
        hello = self.greetings.get(host)
        return f"host {host}" if hello is None else f"host {host} ({hello.host})"

    def _answers(
        self, kind: type[Message], stop: Callable[[], None], folders: Sequence[ListedFolder] = ()
    ) -> list[tuple[int, Message]]:
        """The next message of every other host: of this kind, or `Refused`. Who lacks some of `folders` is sent them
        first.

        Raises:
            RunError: if one is gone before it answers, or says something else.
        """
        answers: list[tuple[int, Message]] = []
        waiting = dict(self._links)
        while waiting:
            stop()
            wait([link.fileno() for link in waiting.values()], POLL_SECONDS)
            for host, link in list(waiting.items()):
                if not link.is_readable():
                    continue
                try:
                    message = link.receive()
                    if isinstance(message, Lacking):
                        self._send_folders(host, message.folders, folders)
                        continue
                except Gone as gone:
                    raise RunError(f"{self._called(host)} does not take part: {gone}") from gone
                if not isinstance(message, kind | Refused):
                    raise RunError(f"{self._called(host)} does not take part: it says {type(message).__name__}")
                answers.append((host, message))
                del waiting[host]
        return answers

    def _send_folders(self, host: int, wanted: Sequence[int], folders: Sequence[ListedFolder]) -> None:
        for number in wanted:
            if not 0 <= number < len(folders):
                raise RunError(f"{self._called(host)} asks for folder {number} of {len(folders)}; start the run again")
            send_files(folders[number], self._links[host].send_vector)

    def _watch(self) -> None:
        """Send signs of life and look for those of the hosts, until all is over."""
        heard = dict.fromkeys(self._links, awake())
        while not self._over.wait(self._signs.between):
            for host in list(heard):
                reason = _exchange_signs(self._links[host], heard, host, self._signs.deadline)
                if reason is not None:
                    del heard[host]
                    self._lose(host, reason)

    def _lose(self, host: int, reason: str) -> None:
        hello = self.greetings[host]
        del self._links[host]
        for worker in range(hello.first, hello.first + hello.number):
            self._workers[worker].give_up(f"its host {hello.host} is lost: {reason}")


def _exchange_signs(link: Pair, heard: dict[int, float], host: int, deadline: float) -> str | None:
    """Send a sign of life, and note when the other end has sent one; why it is lost, if it is."""
    try:
        link.send(Alive())
        while link.is_readable():
            link.receive()
            heard[host] = awake()
    except Gone as gone:
        return str(gone)
    if awake() - heard[host] > deadline:
        return f"no sign of life for {deadline:g} s"
    return None


def _has_left(link: Pair) -> bool:
    """Whether the other end has answered `Stop`, or is gone; signs of life before that are passed over."""
    try:
        while link.is_readable():
            if isinstance(link.receive(), Stop):
                return True
    except Gone:
        return True
    return False


class Member:
    """Another host than that of rank 0, in its first rank.

    Args:
        place: of this process.
        token, interface, signs: as of `Hosts`.
        hardware: of this host.
    """

    def __init__(
        self, place: Host, token: bytes, interface: str | None, signs: Signs, hardware: dict[str, Any]
    ) -> None:
        self.place = place
        self._signs = signs
        address = _own_address(interface, place.leader)
        self.meeting = place.meeting(address, token)
        self.meeting.open().set(_name_of_address(place.number), address)
        self._link = Pair(self.meeting, f"host{place.number}", serves=False)
        hello = Hello(socket.gethostname(), place.first, place.num_workers, versions(), hardware)
        self._link.send(hello)

    def told(self) -> Begin:
        """Wait for what rank 0 has prepared.

        Raises:
            RunError: if it is gone, or refuses this host.
        """
        try:
            message = self._link.receive()
        except Gone as gone:
            raise RunError(f"rank 0 on {self.place.leader} does not begin: {gone}") from gone
        if isinstance(message, Begin):
            return message
        if isinstance(message, Refused):
            raise RunError(message.reason)
        raise RunError(f"rank 0 on {self.place.leader} has stopped before the run began")

    def places_of(self, folders: Sequence[ListedFolder], cache: Path, tell: Callable[[str], None]) -> dict[str, str]:
        """Where this host has folders of rank 0, by their paths there; what it lacks it receives into `cache`.

        Args:
            tell: says a line to the user.

        Raises:
            RunError: if rank 0 is gone, or a file comes otherwise than it is there.
            UsageError: if the cache folder cannot be written.
        """
        places = {}
        lacking = []
        for number, folder in enumerate(folders):
            here = found_here(folder, cache)
            if here is None:
                lacking.append(number)
            else:
                places[folder.path] = here
        if not lacking:
            return places
        try:
            self._link.send(Lacking(tuple(lacking)))
            for number in lacking:
                folder = folders[number]
                size = f"{len(folder.files)} files, {folder.num_bytes / 1e6:.1f} MB"
                tell(f"host {self.place.number}: receives {Path(folder.path).name} from rank 0 ({size})")
                places[folder.path] = receive(folder, cache, self._link.receive_vector)
        except Gone as gone:
            raise RunError(f"rank 0 on {self.place.leader} does not begin: {gone}") from gone
        return places

    def answer(self, message: Prepared | Refused | Stop) -> None:
        with contextlib.suppress(Gone):
            self._link.send(message)
            self._link.flush()

    def stay(self) -> None:
        """Return when rank 0 lets this host go.

        Raises:
            RunError: if rank 0 is lost.
        """
        heard = awake()
        said = 0.0
        while True:
            try:
                if awake() - said > self._signs.between:
                    self._link.send(Alive())
                    said = awake()
                if wait([self._link.fileno()], POLL_SECONDS):
                    if isinstance(self._link.receive(), Stop):
                        self.answer(Stop())
                        return
                    heard = awake()
            except Gone as gone:
                raise RunError(self._lost(str(gone))) from gone
            if awake() - heard > self._signs.deadline:
                raise RunError(self._lost(f"no sign of life for {self._signs.deadline:g} s"))

    def _lost(self, reason: str) -> str:
        return (
            f"rank 0 on {self.place.leader} is lost ({reason}), and with it the run; its folder lies on that host. If "
            f"it has a checkpoint, the run goes on from there with --resume FOLDER"
        )
