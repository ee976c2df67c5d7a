"""Which host leads a run in which hosts come and go.

With ``torchrun --nnodes MIN:MAX`` all ranks are started again when a host comes, and torchrun numbers the hosts anew,
by their names. The folder of the run stays where it is. So the host with the newest checkpoint of the run leads,
whatever torchrun's number of it is, and hosts and workers are numbered from it on.

The process of torchrun's rank 0 opens the store, hears what each host has, and tells each its part:

    host            torchrun's rank 0
    Claim    ->                         its ranks, its checkpoint, and who led when it took part last
             <-             Agreed      its number and its first worker, and who leads; or Refused, with the reason
    Stop    <->             Stop

The two have a pair for it, so that nobody without the token has a say."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from multiprocessing.connection import wait
from typing import Any

import msgspec
from torch import distributed as dist

from asyncsgd.backends.host import address_of_host, name_of_address, own_address
from asyncsgd.backends.link import Agreed, Claim, Gone, Refused
from asyncsgd.backends.pair import RENDEZVOUS_TIMEOUT, Pair, Rendezvous
from asyncsgd.core.awake import awake
from asyncsgd.core.limits import POLL_SECONDS
from asyncsgd.errors import RunError

_END_SECONDS = 10.0
"""How many seconds a pair may take to end."""
_opened: list[Any] = []
"""The stores that this process has opened: other hosts use them for as long as it lives."""


def agree(
    number: int,
    num_hosts: int,
    claim: Claim,
    rendezvous: Rendezvous,
    interface: str | None,
    deadline: float,
    stop: Callable[[], None],
    tell: Callable[[str], None],
) -> Agreed:
    """Agree with the other hosts about who leads; called in the first rank of each host.

    Args:
        number: torchrun's number of this host.
        num_hosts: the hosts that torchrun has counted.
        claim: what this host has of the run; its address is filled in here.
        rendezvous: where the hosts meet, with their token.
        interface: see `asyncsgd.backends.hosts.Hosts`.
        deadline: seconds after which the others go on without a host that has not come.
        stop: raises when the user has asked to stop.
        tell: says a line to the user.

    Raises:
        RunError: if the run lies on a host that is not here, or torchrun's rank 0 is gone.
    """
    host, port = rendezvous.store
    if number == 0:
        _opened.append(dist.TCPStore(host, port, is_master=True, wait_for_workers=False, timeout=RENDEZVOUS_TIMEOUT))
        return _Hub(rendezvous, num_hosts, interface, deadline, stop, tell).agree(claim)
    address = own_address(interface, host)
    rendezvous = dataclasses.replace(rendezvous, address=address)
    rendezvous.open().set(name_of_address(number), address)
    pair = Pair(rendezvous, f"claim{number}", serves=False)
    pair.send(msgspec.structs.replace(claim, address=address))
    until = awake() + 2 * deadline  # rank 0 waits for one, and may begin later than this host
    try:
        if not _has_word(pair, until, stop):
            raise RunError(f"torchrun's rank 0 on {host} says nothing; see what it says there")
        answer = pair.receive()
    except Gone as gone:
        raise RunError(f"torchrun's rank 0 on {host} does not take this host: {gone}") from gone
    pair.leave()
    pair.join(_END_SECONDS)
    if isinstance(answer, Agreed):
        return answer
    reason = answer.reason if isinstance(answer, Refused) else f"it says {type(answer).__name__}"
    raise RunError(reason)


def parts_of(claims: Sequence[Claim]) -> list[Agreed]:
    """Return the part of each host in the run, by what each has of it; in the order of the claims.

    Raises:
        RunError: if the run has begun on a host that is not here, and nobody has a checkpoint of it.
    """
    names = [claim.host for claim in claims]
    leader, note = _leader_of(claims, names)
    num_samples = claims[leader].num_samples or 0
    order = [leader, *(number for number in range(len(claims)) if number != leader)]
    parts: dict[int, Agreed] = {}
    first = 0
    for number, place in enumerate(order):
        address = claims[leader].address
        parts[place] = Agreed(
            number, len(claims), first, address, names[leader], num_samples, note="" if number else note
        )
        first += claims[place].num_ranks
    return [parts[place] for place in range(len(claims))]


def _leader_of(claims: Sequence[Claim], names: Sequence[str]) -> tuple[int, str]:
    """The position of the claim whose host leads, and the note for the user; empty: there is none."""
    absent = [claim for claim in claims if claim.leader_before and claim.leader_before not in names]
    latest = max(absent, key=lambda claim: claim.samples_before, default=None)
    holders = [number for number, claim in enumerate(claims) if claim.num_samples is not None]
    if holders:
        leader = max(holders, key=lambda number: (claims[number].num_samples, -number))
        here = claims[leader].num_samples
        assert here is not None
        # A checkpoint that is newer than that from which the absent host led was made under its lead, or later.
        if latest is None or latest.samples_before < here:
            return leader, ""
        return leader, (
            f"{latest.leader_before}, which led this run from {latest.samples_before} samples on, is not here: the run "
            f"goes on from the checkpoint of {here} samples that lies on {names[leader]}"
        )
    if latest is not None:
        raise RunError(
            f"the run lies on {latest.leader_before}, which is not here; start torchrun there too. If that host is not "
            f"to be had, nothing is left of the run, and another --rdzv-id begins anew"
        )
    before = [claim.leader_before for claim in claims if claim.leader_before]  # all of them are here
    return (names.index(before[0]) if before else 0), ""


class _Hub:
    """The process of torchrun's rank 0, which hears all hosts and tells each its part.

    Args:
        rendezvous, num_hosts, interface, deadline, stop, tell: as of `agree`.
    """

    def __init__(
        self,
        rendezvous: Rendezvous,
        num_hosts: int,
        interface: str | None,
        deadline: float,
        stop: Callable[[], None],
        tell: Callable[[str], None],
    ) -> None:
        self._rendezvous = rendezvous
        self._num_hosts = num_hosts
        self._interface = interface
        self._until = awake() + deadline
        self._stop = stop
        self._tell = tell
        self._pairs: dict[int, Pair] = {}
        """Host, as torchrun numbers it -> the pair with it."""

    def agree(self, ours: Claim) -> Agreed:
        """Hear the other hosts, tell each its part, and return that of this one."""
        ours = self._meet(ours)
        claims = [ours]
        for number, pair in list(self._pairs.items()):
            claim, reason = self._claim_of(pair)
            if claim is None:
                del self._pairs[number]
                self._leave_out(number, reason)
            else:
                claims.append(claim)
        try:
            parts = parts_of(claims)
        except RunError as error:
            self._answer([Refused(str(error))] * len(self._pairs))
            raise
        self._answer(parts[1:])
        return parts[0]

    def _meet(self, ours: Claim) -> Claim:
        """Find the other hosts; the claim of this one, with the address on which they reach it."""
        store = self._rendezvous.open()
        for number in range(1, self._num_hosts):
            there = address_of_host(number, store, self._until, self._stop)
            if there is None:
                self._leave_out(number, "it does not come")
                continue
            address = own_address(self._interface, there)  # if hosts reach it by several, the last is told to all
            ours = msgspec.structs.replace(ours, address=address)
            rendezvous = dataclasses.replace(self._rendezvous, address=address)
            self._pairs[number] = Pair(rendezvous, f"claim{number}", serves=True)
        return ours

    def _claim_of(self, pair: Pair) -> tuple[Claim | None, str]:
        """Wait for the claim of a host. None, and the reason: the host takes no part."""
        try:
            if not _has_word(pair, self._until, self._stop):
                return None, "it says nothing"
            claim = pair.receive()
        except Gone as gone:
            return None, str(gone)
        if isinstance(claim, Claim):
            return claim, ""
        return None, f"it says {type(claim).__name__}"

    def _leave_out(self, number: int, reason: str) -> None:
        self._tell(f"note   torchrun's host {number} does not take part: {reason}; the others go on without it")

    def _answer(self, messages: Sequence[Agreed | Refused]) -> None:
        """Send each host its message, and end the pairs."""
        pairs = list(self._pairs.values())
        for pair, message in zip(pairs, messages, strict=True):
            with contextlib.suppress(Gone):  # it is heard later that nobody is there
                pair.send(message)
            pair.leave()
        for pair in pairs:
            pair.join(_END_SECONDS)


def _has_word(pair: Pair, until: float, stop: Callable[[], None]) -> bool:
    """Wait until there is something to read, until a moment of `awake` at most; whether there is."""
    while not wait([pair.fileno()], POLL_SECONDS):
        stop()
        if awake() > until:
            return False
    return True
