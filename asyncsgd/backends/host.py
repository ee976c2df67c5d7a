"""This host among those of a run, as torchrun numbers them, and what hosts agree about."""

from __future__ import annotations

import dataclasses
import ipaddress
import math
import os
import platform
import threading
import time
from collections.abc import Callable
from importlib import metadata
from typing import Any

from torch import distributed as dist

from asyncsgd import __version__
from asyncsgd.backends.addresses import address_of_interface, address_towards
from asyncsgd.backends.launch import Launch, PlaceOfHost
from asyncsgd.backends.pair import Pair, Rendezvous
from asyncsgd.core.awake import awake
from asyncsgd.errors import RunError

_DEADLINE_SECONDS = 60.0
_MAX_INTERVAL_SECONDS = 5.0
_MIN_SIGNS = 4
"""A host sends at least so many signs of life within the deadline."""


@dataclasses.dataclass(frozen=True)
class SignsOfLife:
    """How often hosts send signs of life, the messages `Alive`, and how long one may be silent."""

    deadline: float = _DEADLINE_SECONDS
    """A host is lost after so many seconds without a sign of life; infinite: none are sent."""

    @classmethod
    def of(cls, worker_deadline: float | None, has_server: bool = True) -> SignsOfLife:
        """Synchronous ranks, which have no server, send none."""
        if not has_server:
            return cls(math.inf)
        return cls() if worker_deadline is None else cls(worker_deadline)

    @property
    def interval(self) -> float:
        """The seconds between two signs of life."""
        return min(_MAX_INTERVAL_SECONDS, self.deadline / _MIN_SIGNS)

    def through(self, pair: Pair) -> Pair:
        """Exchange them through a pair from now on, and return it."""
        if self.deadline < math.inf:
            threading.Thread(target=pair.exchange_signs, args=(self.interval, self.deadline), daemon=True).start()
        return pair


def versions() -> dict[str, str]:
    """The versions that must be equal on all hosts, since the server uses what workers compute unseen."""
    python = ".".join(platform.python_version_tuple()[:2])
    return {"asyncsgd": __version__, "torch": metadata.version("torch").partition("+")[0], "python": python}


def store_of_torchrun() -> tuple[str, int]:
    """Return the address and the port of the store in which all ranks meet."""
    return os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])


def prefix_of_start() -> str:
    """A prefix for names in the store, which no other start of the ranks by torchrun has."""
    return f"asyncsgd/{os.environ.get('TORCHELASTIC_RUN_ID')}/{os.environ.get('TORCHELASTIC_RESTART_COUNT')}"


@dataclasses.dataclass(frozen=True)
class ThisHost:
    """This host among those of a run, with all that it needs to find the others.

    Where hosts come and go, the hosts have agreed about `number`, `num_hosts` and `leader`; see `PlaceOfHost`.
    Otherwise these are torchrun's.
    """

    number: int
    """The number of this host. Rank 0 is on host 0."""
    num_hosts: int
    first_worker: int
    """The rank of the first process of this host. The workers of a host are numbered by its ranks."""
    num_workers: int
    """The number of workers on this host."""
    leader: str
    """The address of the host of rank 0."""
    store: tuple[str, int]
    """The address and the port of torchrun's store."""
    prefix: str
    """The prefix of names in the store: it tells apart two starts by torchrun."""
    is_elastic: bool = False
    """Whether hosts come and go, and have agreed who leads; see `asyncsgd.backends.election`."""

    @classmethod
    def of_torchrun(cls, launch: Launch) -> ThisHost:
        """Return the host of this process, which is the first rank of it."""
        assert launch.rank is not None
        store = store_of_torchrun()
        here = launch.agreed
        if here is None:
            here = PlaceOfHost(int(os.environ["GROUP_RANK"]), int(os.environ["GROUP_WORLD_SIZE"]), store[0])
        return cls(
            here.number,
            here.num_hosts,
            launch.rank - launch.local_rank,
            launch.ranks_here,
            here.leader,
            store,
            prefix_of_start(),
            is_elastic=launch.agreed is not None,
        )

    @property
    def workers(self) -> range:
        """The workers of this host."""
        return range(self.first_worker, self.first_worker + self.num_workers)

    def open_store(self) -> Any:
        """The store in which hosts find each other, for the process that leads; its names are those of this start.

        It opens the store where torchrun has opened none; it is there for as long as this process lives. Where hosts
        come and go, the process of torchrun's rank 0 has opened one, which need not be this process."""
        if self.is_elastic:
            return self.rendezvous("", b"").open()
        store, _, _ = next(iter(dist.rendezvous("env://")))
        return dist.PrefixStore(self.prefix, store)

    def rendezvous(self, address: str, token: bytes) -> Rendezvous:
        """Return the place where this host and another one find each other. Gloo listens on `address` of this host."""
        return Rendezvous("", self.store, self.prefix, address, token)


def address_of_host(host: int, store: Any, until: float, stop: Callable[[], None]) -> str | None:
    """Wait for the address that another host has written into the store. Nothing is sent there before it has proved
    that it has the token.

    Args:
        until: the moment, of `asyncsgd.core.awake.awake`, until which it may come.
        stop: raises when the user has asked to stop.

    Returns:
        The address. None: it has not come.

    Raises:
        RunError: if it is no address.
    """
    name = name_of_address(host)
    while not store.check([name]):
        stop()
        if awake() > until:
            return None
        time.sleep(0.05)
    try:
        return str(ipaddress.ip_address(store.get(name).decode()))
    except ValueError as error:
        raise RunError(f"the address of host {host} is none ({error}); start the run again") from error


def rendezvous_for_election(token: bytes) -> Rendezvous:
    """Return the place where hosts that come and go meet; see `asyncsgd.backends.election`."""
    return Rendezvous("", store_of_torchrun(), f"{prefix_of_start()}/election", token=token)


def own_address(interface: str | None, other: str) -> str:
    """The address of this host that another host reaches: that of `interface`; None: that of the way to `other`."""
    return address_towards(other) if interface is None else address_of_interface(interface)


def name_of_address(host: int) -> str:
    """The name under which a host writes its address into the store."""
    return f"address of host {host}"
