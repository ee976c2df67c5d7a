"""The other hosts of an asynchronous run: who they are, whether they have the same run, and whether they live.

Torchrun has started ranks on every host, and rank 0 leads. It starts the workers of its own host itself. On each other
host the first rank starts as many workers as its host has ranks; the other ranks end. So a worker, and a whole host,
can be lost without torchrun ending the rest.

Each other host has a pair with rank 0, beside those of its workers:

    host                        rank 0
    Hello           ->                     its name, workers, versions, hardware
    Alive           <->         Alive      from now on every few seconds, also while the run is prepared
                    <-          Begin      settings, fingerprints of data and initial parameters, prepared folders
    Lacking         ->                     where it lacks some of these; their files come as vectors
    Prepared        ->                     it has the same; or Refused, with the reason
    Alive           ->                     which of its workers have ended
                    <-          Stop       all is over; or Unfinished, where the run is not done
    Stop            ->                     it has heard so

A host that is silent for too long is lost. While the run is prepared, such a host takes no part. From
`Hosts.connect_workers` on, its workers are lost with it. A host that does not hear from rank 0 ends its workers.
Seconds in which a process stood still do not count in that process. The pair of a mirror has signs of life of its own.
Synchronous ranks send none."""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import wait
from types import TracebackType
from typing import Any

from asyncsgd.backends import mirror
from asyncsgd.backends.copies import ListedFolder
from asyncsgd.backends.copies import send as send_files
from asyncsgd.backends.host import SignsOfLife, ThisHost, address_of_host, own_address, versions
from asyncsgd.backends.link import (
    Alive,
    Begin,
    Gone,
    Hello,
    Lacking,
    Link,
    Message,
    Prepared,
    Refused,
    Stop,
    Unfinished,
)
from asyncsgd.backends.pair import RENDEZVOUS_TIMEOUT, Pair, Rendezvous
from asyncsgd.backends.segment import Segment
from asyncsgd.core.awake import awake
from asyncsgd.core.limits import POLL_SECONDS
from asyncsgd.errors import RunError

_WAIT_NOTICE_SECONDS = 15.0
"""Rank 0 waits so many seconds for a host before it tells the user."""


class Hosts:
    """The other hosts, as rank 0 sees them. A context manager that lets them go at the end.

    Args:
        this_host: the host of rank 0.
        token: the token that all hosts have; empty where the network is trusted.
        interface: the network interface whose address gloo listens on; None: that of the way to each host.
        signs: how often hosts send signs of life, and after how many silent seconds a host is lost.
        check_stop: raises when the user has asked to stop.
        tell: says a line to the user.
    """

    def __init__(
        self,
        this_host: ThisHost,
        token: bytes,
        interface: str | None,
        signs: SignsOfLife,
        check_stop: Callable[[], None],
        tell: Callable[[str], None],
    ) -> None:
        self.this_host = this_host
        self._signs = signs
        self._tell = tell
        self._store = this_host.open_store()
        self._rendezvous: dict[int, Rendezvous] = {}
        self._links: dict[int, Pair] = {}
        self._workers: dict[int, Pair] = {}
        self._mirror: Pair | None = None
        self._mirror_host: int | None = None
        self.greetings: dict[int, Hello] = {}
        """Host -> its first message, in which it describes itself. Host 0, which is this one, is not in it."""
        self.is_unfinished = False
        """Whether the run is not done when all is over."""
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        for host in range(1, this_host.num_hosts):
            there = self._address_of(host, check_stop)
            if there is None:
                continue
            address = own_address(interface, there)
            self._rendezvous[host] = this_host.rendezvous(address, token)
            self._links[host] = signs.through(Pair(self._rendezvous[host], f"host{host}", serves=True))
        patience = signs.deadline if this_host.is_elastic else math.inf
        for host, hello in self._answers((Hello,), check_stop, patience=patience):
            assert isinstance(hello, Hello)
            self.greetings[host] = hello
        self._check_versions()

    def host_of(self, worker: int) -> int:
        """The number of the host on which `worker` runs, a worker of another host than this."""
        for host, hello in self.greetings.items():
            if hello.first_worker <= worker < hello.first_worker + hello.num_workers:
                return host
        raise RunError(f"no host has worker {worker}: torchrun's numbers of ranks do not agree; start the run again")

    def hardware_of_ranks(self, here: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        """The hardware of every worker, in order."""
        hardware = [here] * self.this_host.num_workers
        for _, hello in sorted(self.greetings.items()):
            hardware += [hello.hardware] * hello.num_workers
        return hardware

    def begin(self, notice: Begin, check_stop: Callable[[], None]) -> None:
        """Have every other host prepare the run, and wait for all.

        Args:
            check_stop: raises when the user has asked to stop.

        Raises:
            RunError: if one of them has other data, another model or other settings; where hosts come and go, such a
                host is left out in place of that.
        """
        for link in self._links.values():
            with contextlib.suppress(Gone):  # `_answers` raises for a host that is gone
                link.send(notice)
        for host, answer in self._answers((Prepared, Refused), check_stop, notice.folders):
            if isinstance(answer, Refused):
                self._leave_out(host, f": {answer.reason}")

    def connect_workers(self, segment: Segment) -> dict[int, Link]:
        """Connect the workers of the other hosts, which are lost with their hosts from now on.

        Returns:
            A link to each of these workers. The worker's gradient, and its effect on running statistics, are received
            into the segment.
        """
        for host, hello in self.greetings.items():
            for worker in range(hello.first_worker, hello.first_worker + hello.num_workers):
                slot = [segment.slots[worker]]
                if len(segment.statistics):
                    slot.append(segment.moved[worker])
                self._workers[worker] = Pair(self._rendezvous[host], f"worker{worker}", serves=True, slot=slot)
        self._thread = threading.Thread(target=self._watch, name="hosts", daemon=True)
        self._thread.start()
        return dict(self._workers)

    def mirror(self, host: int) -> Pair:
        """A pair with another host for copies of checkpoints; see `asyncsgd.backends.mirror`."""
        self._mirror = self._signs.through(Pair(self._rendezvous[host], mirror.PAIR, serves=True))
        self._mirror_host = host
        return self._mirror

    def __enter__(self) -> Hosts:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        if self._thread is not None:
            self._thread.join()
        last_word = Unfinished() if self.is_unfinished else Stop()
        for link in self._links.values():
            with contextlib.suppress(Gone):
                link.send(last_word)
        if self._thread is not None:  # only hosts that were watched answer `Stop`
            self._wait_for_answers_to_stop()
            self._wait_until_all_have_left()

    def _address_of(self, host: int, check_stop: Callable[[], None]) -> str | None:
        """The address of another host, which the user may still have to start; None: it is left out."""
        began = awake()
        patience = self._signs.deadline if self.this_host.is_elastic else _WAIT_NOTICE_SECONDS
        address = address_of_host(host, self._store, began + patience, check_stop)
        if address is None and not self.this_host.is_elastic:
            self._tell(f"waits for host {host}: type the same command there, with --node-rank {host}")
            address = address_of_host(host, self._store, began + RENDEZVOUS_TIMEOUT.total_seconds(), check_stop)
        if address is None:
            waited = f"{awake() - began:.0f} s"
            self._leave_out(host, f" has not come within {waited}; start torchrun there as well")
        return address

    def _leave_out(self, host: int, reason: str) -> None:
        """Go on without a host that takes no part, where hosts come and go.

        Args:
            reason: what the host did, after its name.

        Raises:
            RunError: where all hosts have to take part.
        """
        what = self._called(host) + reason
        if not self.this_host.is_elastic:
            raise RunError(what)
        self._tell(f"note   {what}; the others go on without it")
        self._links.pop(host, None)
        self.greetings.pop(host, None)

    def _wait_for_answers_to_stop(self) -> None:
        """Wait until every host has heard that all is over, or is gone.

        A message that has not reached a host when this process ends is lost. The host would then believe that rank 0 is
        lost."""
        waiting = list(self._links.values())
        began = awake()
        while waiting and awake() - began < self._signs.deadline:
            wait([link.fileno() for link in waiting], POLL_SECONDS)
            waiting = [link for link in waiting if not _has_left(link)]

    def _wait_until_all_have_left(self) -> None:
        """Wait for the threads of the pairs that connect this process with hosts that are not lost."""
        pairs = list(self._links.values())
        for worker, pair in self._workers.items():
            if self.host_of(worker) in self._links:
                pairs.append(pair)
        if self._mirror is not None and self._mirror_host in self._links:
            pairs.append(self._mirror)
        began = awake()
        for pair in pairs:
            pair.join(max(0.0, began + self._signs.deadline - awake()))

    def _check_versions(self) -> None:
        ours = versions()
        for host, hello in list(self.greetings.items()):
            different = [name for name in ours if hello.versions.get(name) != ours[name]]
            if different:
                there = ", ".join(f"{name} {hello.versions.get(name)}" for name in different)
                here = ", ".join(f"{name} {ours[name]}" for name in different)
                reason = f"it has {there}, and rank 0 has {here}; install the same there"
                with contextlib.suppress(Gone):  # it takes no part anyway
                    self._links[host].send(Refused(reason))
                self._leave_out(host, f": {reason}")

    def _called(self, host: int) -> str:
        hello = self.greetings.get(host)
        return f"host {host}" if hello is None else f"host {host} ({hello.host})"

    def _answers(
        self,
        kinds: tuple[type[Message], ...],
        check_stop: Callable[[], None],
        folders: Sequence[ListedFolder] = (),
        patience: float = math.inf,
    ) -> list[tuple[int, Message]]:
        """Wait for the next message of every other host, and return these messages with the numbers of the hosts. A
        host that lacks some of `folders` is sent them first.

        Args:
            patience: the seconds after which a host that has said nothing is left out.

        Raises:
            RunError: if a host is gone before it answers, or sends a message of another kind, and all have to take
                part.
        """
        answers: list[tuple[int, Message]] = []
        waiting = dict(self._links)
        until = awake() + patience
        while waiting:
            check_stop()
            wait([link.fileno() for link in waiting.values()], POLL_SECONDS)
            if awake() > until:
                for host in waiting:
                    self._leave_out(host, " says nothing")
                break
            for host, link in list(waiting.items()):
                if not link.is_readable():
                    continue
                try:
                    message = link.receive()
                    if isinstance(message, Lacking):
                        self._send_folders(host, message.folders, folders)
                        continue
                except Gone as gone:
                    del waiting[host]
                    self._leave_out(host, f" does not take part: {gone}")
                    continue
                del waiting[host]
                if isinstance(message, kinds):
                    answers.append((host, message))
                else:
                    self._leave_out(host, f" does not take part: it says {type(message).__name__}")
        return answers

    def _send_folders(self, host: int, wanted: Sequence[int], folders: Sequence[ListedFolder]) -> None:
        for number in wanted:
            if not 0 <= number < len(folders):
                raise RunError(f"{self._called(host)} asks for folder {number} of {len(folders)}; start the run again")
            send_files(folders[number], self._links[host].deliver)

    def _watch(self) -> None:
        """Look which hosts are lost, until all is over."""
        while not self._over.wait(self._signs.interval):
            for host in list(self._links):
                try:
                    self._hear(host)
                except Gone as gone:
                    self._lose(host, gone)

    def _hear(self, host: int) -> None:
        """Give up the pairs of the workers that have ended, for the case that gloo has not noticed it.

        Raises:
            Gone: if the host is lost.
        """
        link = self._links[host]
        while link.is_readable():
            message = link.receive()
            if isinstance(message, Alive):
                for worker, how in message.ended:
                    if worker in self._workers and self.host_of(worker) == host:
                        self._workers[worker].give_up(how)

    def _lose(self, host: int, reason: Gone) -> None:
        hello = self.greetings[host]
        del self._links[host]
        lost = f"its host {hello.host} is lost: {reason}"
        for worker in range(hello.first_worker, hello.first_worker + hello.num_workers):
            self._workers[worker].give_up(lost)
        if self._mirror is not None and host == self._mirror_host:
            self._mirror.give_up(lost)  # it may not have met this end yet, and then has no signs of life


def _has_left(link: Pair) -> bool:
    """Whether the other end has answered `Stop`, or is gone. Signs of life that came before are skipped."""
    try:
        while link.is_readable():
            if isinstance(link.receive(), Stop):
                return True
    except Gone:
        return True
    return False
