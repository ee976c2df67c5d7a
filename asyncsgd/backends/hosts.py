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
import ipaddress
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import wait
from types import TracebackType
from typing import Any

from torch import distributed as dist

from asyncsgd.backends import mirror
from asyncsgd.backends.copies import ListedFolder
from asyncsgd.backends.copies import send as send_files
from asyncsgd.backends.host import Host, Signs, name_of_address, own_address, versions
from asyncsgd.backends.link import Alive, Begin, Gone, Hello, Lacking, Link, Message, Prepared, Refused, Stop
from asyncsgd.backends.pair import MEETING, Meeting, Pair
from asyncsgd.backends.segment import Segment
from asyncsgd.core.awake import awake
from asyncsgd.core.limits import POLL_SECONDS
from asyncsgd.errors import RunError

_BEFORE_A_WORD = 15.0
"""Seconds that rank 0 waits for a host before it says so."""


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
        self._mirror: Pair | None = None
        self._mirrors_on: int | None = None
        self.greetings: dict[int, Hello] = {}
        """What each other host has said of itself."""
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        for host in range(1, place.num_hosts):
            address = own_address(interface, self._address_of(host, stop))
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

    def mirror(self, host: int) -> Pair:
        """A pair with another host for copies of checkpoints; see `asyncsgd.backends.mirror`."""
        self._mirror = Pair(self._meetings[host], mirror.PAIR, serves=True)
        self._mirrors_on = host
        return self._mirror

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
            self._wait_until_all_have_left()

    def _address_of(self, host: int, stop: Callable[[], None]) -> str:
        """The address that another host has written into the store. Nothing is sent there before it has proved that
        it has the token."""
        store = dist.PrefixStore(self.place.prefix, self._store)
        name = name_of_address(host)
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

    def _wait_until_all_have_left(self) -> None:
        """Wait for the threads of the pairs with hosts that are not lost."""
        pairs = list(self._links.values())
        pairs += [pair for worker, pair in self._workers.items() if self.host_of(worker) in self._links]
        if self._mirror is not None and self._mirrors_on in self._links:
            pairs.append(self._mirror)
        began = awake()
        for pair in pairs:
            pair.join(max(0.0, began + self._signs.deadline - awake()))

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
            send_files(folders[number], self._links[host].deliver)

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
        lost = f"its host {hello.host} is lost: {reason}"
        for worker in range(hello.first, hello.first + hello.number):
            self._workers[worker].give_up(lost)
        if self._mirror is not None and host == self._mirrors_on:
            self._mirror.give_up(lost)


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
